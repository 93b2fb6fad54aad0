"""What a routing makes the grouped GEMMs multiply: rows and padded rows; and the pairs that it drops and adds.

A grouped GEMM pads each expert's rows to its M tile. Who wants to know how much of that a routing avoids needs the
experts' counts only, which a CPU has in seconds at any size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from harness.costs import model_flops
from harness.interface import Point, RoutingSpec
from harness.problem import forbid_others, planted_logits
from harness.routing import expert_counts, routing_outcome
from harness.shapes import MoEShape
from harness.token_rounding import method_counts, route_by
from harness.traces import chosen_experts

#: What rows call the implementation: counting is the harness's own.
NAME, LABEL = "routing", "Routing"
OPERATION = "token_rounding"
#: Tokens whose logits are drawn at once.
CHUNK = 8192


def _drawn(shape: MoEShape, routing: RoutingSpec) -> Iterator[Tensor]:
    """(CHUNK, E) logits at a time, fp32 on the CPU: distributed as those of `harness.problem`'s inputs, standard normal
    with the planted offsets, but not the same numbers (no product over d is computed). Without tokens, one (0, E)."""
    generator = torch.Generator().manual_seed(1_000_003 * routing.seed + 29)
    given = chosen_experts(routing, shape) if routing.trace_file else None
    offsets = planted_logits(routing.distribution, shape.E, shape.K) if given is None else None
    for first in range(0, max(shape.T, 1), CHUNK):
        logits = torch.randn(min(CHUNK, shape.T - first), shape.E, generator=generator)
        if given is not None:
            logits = forbid_others(logits, given[first : first + CHUNK])
        yield logits if offsets is None else logits + offsets


@functools.lru_cache(maxsize=4)
def _top_k_counts(shape: MoEShape, distribution: str, seed: int, trace_file: str = "") -> Tensor:
    """(E,) rows of each expert under top-K."""
    routing = RoutingSpec(distribution=distribution, seed=seed, trace_file=trace_file)
    counts = torch.zeros(shape.E, dtype=torch.int64)
    for logits in _drawn(shape, routing):
        counts += expert_counts(torch.topk(logits, shape.K, dim=1).indices, shape.E)
    return counts


def account(point: Point) -> dict[str, Any]:
    """The fields ``routing`` and ``costs`` of a row: what came of the point's routing method.

    ``costs.flops`` are the forward's model FLOPs of the routed rows, ``costs.hardware_flops`` those of the padded ones.
    """
    shape, routing = point.shape, point.routing
    counts = _top_k_counts(shape, routing.distribution, routing.seed, routing.trace_file)
    generator = torch.Generator().manual_seed(routing.seed)
    if routing.method == "expert_choice":
        # Which tokens an expert takes decides what is dropped and added, and its count does not tell.
        logits = torch.cat([*_drawn(shape, routing)])
        chosen = route_by(logits, shape.K, routing.method, routing.m_tile, generator=generator)
        found = expert_counts(chosen.experts, shape.E)
        dropped, added = chosen.dropped, chosen.added
    else:
        found = method_counts(counts, shape.T, shape.K, routing.method, routing.m_tile, generator=generator)
        dropped, added = int((counts - found).clamp_min(0).sum()), int((found - counts).clamp_min(0).sum())
    outcome = routing_outcome(found, routing.m_tile) | {"dropped": dropped, "added": added}
    rows = {"flops": outcome["routed_rows"], "hardware_flops": outcome["padded_rows"]}
    return {
        "routing": outcome,
        "costs": {key: model_flops(shape, "forward", number) for key, number in rows.items()},
    }
