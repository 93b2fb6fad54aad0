"""What token rounding on the device costs beside the layer that it routes for, on the GPU at hand:

    python -m implementations.sonicmoe_triton.rounding_cost                    # T = 16384, E = 256 and 512
    python -m implementations.sonicmoe_triton.rounding_cost --shape 16384,4096,1024,256,8

Every candidate is a replayed CUDA graph, so that no launch from Python is in its time; all of them take turns, and the
L2 cache is evicted before each. bf16, uniform random logits. Before anything is timed the routings are compared with
`harness.token_rounding`'s. The numbers go to a file beside the GPU's results.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from harness.environment import environment
from harness.errors import UserError
from harness.interface import Layer, Point, Problem
from harness.problem import make_problem
from harness.record import gpu_slug
from harness.registry import ROOT, load_registry
from harness.shapes import MoEShape
from harness.statistics import ratio_interval, summarise
from harness.timing import GraphCalls, L2Eviction
from harness.token_rounding import ROUNDINGS, route_by
from implementations.sonicmoe_triton.function import moe_layer, routed_experts
from implementations.sonicmoe_triton.launch_cost import DEVICE, OURS
from implementations.sonicmoe_triton.rounding import RoundedRouting, round_routing
from implementations.sonicmoe_triton.router import top_k

FILE = "sonicmoe_triton_rounding_cost.json"
SHAPES = ("16384,4096,1024,256,8", "16384,4096,1024,512,8")
M_TILE, CONVENTION = 128, "topk_softmax"
#: Gives the harness the draws of ``stochastic`` that candidates are handed.
SEED = 1
#: Turns of each candidate that count, after some that do not.
ROUNDS, WARM_UP = 31, 10
#: What a turn tells, milliseconds (see `prepare`).
NUMBERS = ("top_k", *ROUNDINGS, "nearest_backward", "nearest_forward_backward", "layer_forward", "top_k_layer_forward")
#: What rounding may take of the forward of the layer with top-K.
MOST = 0.10
#: One turn of a candidate: milliseconds by their name among `NUMBERS`.
Take = Callable[[], Mapping[str, float]]


def round_on_device(logits: Tensor, k: int, rounding: str, draws: Tensor) -> RoundedRouting:
    """The candidate; ``draws`` (E,), int64, are for ``stochastic`` alone."""
    return round_routing(logits, k, M_TILE, rounding, CONVENTION, draws=draws if rounding == "stochastic" else None)


def checked_pairs(logits: Tensor, size: MoEShape, draws: Tensor) -> dict[str, int]:
    """How many pairs each rounding keeps, once all of them are known to be right.

    Raises:
        UserError: one is not, so that what it costs would mean nothing; the message names it and the shape.
    """
    kept = {}
    for rounding in ROUNDINGS:
        found = round_on_device(logits, size.K, rounding, draws)
        same_draws = torch.Generator(DEVICE).manual_seed(SEED)
        want = route_by(logits, size.K, rounding, M_TILE, CONVENTION, generator=same_draws)
        kept[rounding] = want.experts.numel()
        same = torch.equal(found.token_offsets, want.token_offsets)
        if not (same and torch.equal(found.experts[: kept[rounding]], want.experts)):
            raise UserError(f"{rounding} at {size}: tokens have other experts than in harness.token_rounding")
    return kept


class Replays:
    """Replays of one CUDA graph of a call without gradients; the L2 cache is evicted before each."""

    def __init__(self, name: str, call: Callable[[], object], evict: L2Eviction) -> None:
        # The graph holds addresses only: the call keeps its operands alive.
        self._name, self._call, self._evict = name, call, evict
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            with torch.cuda.stream(stream):
                # Compiles; what compiling leaves to a second call is not captured either.
                for _ in range(2):
                    call()
            torch.cuda.synchronize()
            with torch.cuda.graph(self._graph, stream=stream):
                call()

    def __call__(self) -> dict[str, float]:
        """One turn, milliseconds."""
        begin, end = self._events
        # No synchronisation between eviction and replay: the launch hides behind the eviction's own time.
        self._evict()
        begin.record()
        self._graph.replay()
        end.record()
        torch.cuda.synchronize()
        return {self._name: begin.elapsed_time(end)}


class RoundingLayer(Layer):
    """Rounding to the nearest in the form that the harness captures: logits (T, E) -> scores (P_max,), fp32."""

    def __init__(self, k: int, draws: Tensor) -> None:
        self._k, self._draws = k, draws

    def parameters(self) -> Sequence[Tensor]:
        return []

    def forward(self, x: Tensor) -> Tensor:
        return round_on_device(x, self._k, "nearest", self._draws).scores

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {}


def prepare(problem: Problem, logits: Tensor, draws: Tensor, evict: L2Eviction) -> list[Take]:
    """All candidates, captured. Forward unless their name says otherwise:

    - ``top_k``: the router's kernel, which rounding contains; and each of `ROUNDINGS` by its name, from logits.
    - ``nearest_backward``: the logits' gradient; ``nearest_forward_backward``: with a forward before it, the L2 cache
      evicted in between.
    - ``layer_forward``: the experts with the routing of ``nearest``, no router; ``top_k_layer_forward``: the layer with
      its own router, logits included.

    ``logits`` (T, E) are the problem's own; ``draws`` as in `round_on_device`."""
    x, w1, w2, k = problem.x, torch.cat([problem.gate, problem.up], dim=1), problem.down, problem.shape.K
    nearest = round_on_device(logits, k, "nearest", draws)
    # As many pairs as there may be: what is left over, expert -1, is in the layer's time, as it is in training.
    pairs = nearest.scores, nearest.experts, nearest.token_offsets
    calls: dict[str, Callable[[], object]] = {"top_k": functools.partial(top_k, logits, k, CONVENTION)}
    calls |= {name: functools.partial(round_on_device, logits, k, name, draws) for name in ROUNDINGS}
    calls["layer_forward"] = functools.partial(routed_experts, x, w1, w2, *pairs)
    calls["top_k_layer_forward"] = functools.partial(moe_layer, x, w1, w2, problem.router, k, CONVENTION)
    of_logits = replace(problem, x=logits, grad_output=torch.randn_like(nearest.scores))
    graphs = GraphCalls(RoundingLayer(k, draws), [of_logits], evict)

    def both_passes() -> dict[str, float]:
        forward_ms, backward_ms = graphs(0)
        return {"nearest_backward": backward_ms, "nearest_forward_backward": forward_ms + backward_ms}

    return [*(Replays(name, call, evict) for name, call in calls.items()), both_passes]


def in_turns(takes: Sequence[Take]) -> dict[str, list[float]]:
    """`ROUNDS` samples of each of `NUMBERS`, milliseconds; place i of all of them is one round. The order within a
    round is random, so that nobody always follows the same neighbour."""
    order = random.Random(0)
    rounds: list[dict[str, float]] = []
    for _ in range(WARM_UP + ROUNDS):
        turns = order.sample(takes, len(takes))
        rounds.append({name: ms for take in turns for name, ms in take().items()})
    return {name: [round(found[name], 5) for found in rounds[WARM_UP:]] for name in NUMBERS}


def summary(samples: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """``ms``: each number's median with its 95 % interval. ``share``: ``value``, the median of ``nearest`` over that of
    ``top_k_layer_forward``, and ``ci95`` of the ratio, paired round by round, so that a drifting clock cancels.
    ``extra_share``: the same of what ``nearest`` takes beyond ``top_k``. And the ``samples`` themselves."""
    wholes = {name: summarise(values) for name, values in samples.items()}
    ms = {name: {key: whole[key] for key in ("median", "ci95", "samples")} for name, whole in wholes.items()}
    nearest, chosen, layer = (ms[name]["median"] for name in ("nearest", "top_k", "top_k_layer_forward"))
    paired = ratio_interval(zip(samples["nearest"], samples["top_k_layer_forward"], strict=True))
    share = {"value": nearest / layer, "ci95": paired["ci95"], "samples": paired["samples"]}
    return {"ms": ms, "share": share, "extra_share": (nearest - chosen) / layer, "samples": samples}


def measure(size: MoEShape) -> dict[str, Any]:
    """`summary` of one shape, and the pairs that each rounding keeps of it. Raises `UserError` as `checked_pairs`."""
    torch.cuda.empty_cache()  # the last shape's graphs have left pools of their own
    problem = make_problem(Point("moe_layer", OURS, size, device=DEVICE), DEVICE)
    logits = problem.x @ problem.router.T
    draws = torch.randint(M_TILE, (size.E,), generator=torch.Generator(DEVICE).manual_seed(SEED), device=DEVICE)
    kept = checked_pairs(logits, size, draws)
    samples = in_turns(prepare(problem, logits, draws, L2Eviction()))
    return {"shape": str(size), "pairs": kept, **summary(samples)}


def table(measured: Sequence[Mapping[str, Any]]) -> Table:
    """The numbers for a terminal, a column for each shape: medians with their intervals."""
    title = "Milliseconds of a replayed call, and shares of top_k_layer_forward"
    headings = (Column(heading, no_wrap=True) for heading in ("", *(found["shape"] for found in measured)))
    made = Table(*headings, title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)

    def add(name: str, values: Sequence[Mapping[str, Any]], key: str, form: str) -> None:
        cells = [[format(number, form) for number in (value[key], *value["ci95"])] for value in values]
        made.add_row(name, *("{} ({}–{})".format(*cell) for cell in cells))

    for name in NUMBERS:
        add(name, [found["ms"][name] for found in measured], "median", ".3f")
    add(f"share (at most {MOST:.0%})", [found["share"] for found in measured], "value", ".1%")
    made.add_row("extra_share", *(f"{found['extra_share']:.1%}" for found in measured))
    return made


def prepared(shapes: Sequence[str], rows: Path | None) -> tuple[list[MoEShape], Path]:
    """The shapes and the file to write. Raises `UserError` for whatever stands against measuring them."""
    sizes = [MoEShape.parse(text) for text in shapes]
    for size in sizes:
        if reason := load_registry().get(OURS).unsupported_reason(Point("moe_layer", OURS, size)):
            raise UserError(reason)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise UserError("the cost of rounding needs a Hopper GPU (compute capability 9.0)")
    rows = rows or ROOT / "results" / gpu_slug(torch.cuda.get_device_name()) / "tuning" / FILE
    new = not rows.exists()
    try:
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.open("a").close()
        if new:  # a file stands for numbers of routings that were right
            rows.unlink()
    except OSError as error:
        raise UserError(f"--rows {rows}: cannot be written: {error.strerror or error}") from error
    return sizes, rows


def main(
    shape: Annotated[list[str] | None, typer.Option(help="T,d,n,E,K (repeatable).")] = None,
    rows: Annotated[Path | None, typer.Option(help="Where the measurements go.")] = None,
) -> None:
    """Measure rounding on the device beside the layer's forward."""
    try:
        sizes, rows = prepared(shape or SHAPES, rows)
        where = environment("cuda", load_registry().get(OURS).distributions)
        measured = [measure(size) for size in sizes]
    except UserError as error:
        typer.echo(f"rounding_cost: {error}", err=True)
        raise typer.Exit(2) from error
    about = {key: where[key] for key in ("gpu", "driver", "torch", "triton", "commit", "dirty", "packages")}
    given = "".join(f" --shape {size}" for size in sizes)
    about["command"] = f"python -m implementations.sonicmoe_triton.rounding_cost{given}"
    about |= {"dtype": "bfloat16", "m_tile": M_TILE, "convention": CONVENTION, "rounds": ROUNDS}
    rows.write_text(json.dumps(about | {"shapes": measured}, indent=1) + "\n")
    print(f"-> {rows}")
    Console().print(table(measured))


if __name__ == "__main__":
    typer.run(main)
