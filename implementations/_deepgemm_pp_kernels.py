"""DeepGEMM++'s routing: each expert's rows padded to whole tiles.

R routed rows lie by expert. Padded, each expert's rows fill whole tiles of `ALIGNMENT`; M rows in all. A padding row
repeats the last token of its expert with score zero: then A' and dH vanish there and it adds nothing to a weight
gradient, and what is not finite stays with the experts that saw it.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from implementations._deepgemm_ops import ALIGNMENT
from implementations.sonicmoe_triton.launching import cdiv, launch
from implementations.sonicmoe_triton.metadata import Routing, padded_experts

#: Of one program that places them.
PAIRS = 1024
WARPS = 4


class PaddedRouting(Routing):
    """A `Routing` with more rows than pairs, as far as the aggregation looks at one."""

    @property
    def tokens(self) -> int:
        return self.reverse.numel() // self.k


class Padded(NamedTuple):
    """The padded rows.

    Attributes:
        routing: gather (M,), the token of each row; reverse (P,), the row of each pair.
        scores: (M,) fp32. expert_of_row: (M,) int32.
        counts: (E,) int32, rows of each expert; counts_host: the same numbers as a list.
    """

    routing: PaddedRouting
    scores: Tensor
    expert_of_row: Tensor
    counts: Tensor
    counts_host: list[int]


@triton.jit
def _pp_routing_rows_kernel(  # type: ignore[no-untyped-def]
    gather, row_scores, expert_offsets, tile_expert, tile_row, padded_gather, padded_scores, expert_of_row,
    TILE: tl.constexpr,
):  # fmt: skip
    # gather, row_scores (R,) and the tile map -> padded_gather, padded_scores, expert_of_row (M,): a tile a program
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    expert = tl.load(tile_expert + tile)
    row = tl.load(tile_row + tile) + tl.arange(0, TILE)
    end = tl.load(expert_offsets + expert + 1)
    tl.store(padded_gather + at, tl.load(gather + tl.minimum(row, end - 1)))
    tl.store(padded_scores + at, tl.load(row_scores + row, mask=row < end, other=0.0))
    tl.store(expert_of_row + at, tl.zeros((TILE,), tl.int32) + expert)


@triton.jit
def _pp_routing_pairs_kernel(  # type: ignore[no-untyped-def]
    reverse, experts, expert_offsets, padded_reverse, pairs,
    E: tl.constexpr, E_PAD: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # reverse, experts (P,) -> padded_reverse (P,): a row moves by the padding of all experts before its own
    lane = tl.arange(0, E_PAD)
    first = tl.load(expert_offsets + lane, mask=lane < E, other=0)
    count = tl.load(expert_offsets + lane + 1, mask=lane < E, other=0) - first
    padding = (TILE - count % TILE) % TILE
    shift = tl.cumsum(padding, 0) - padding
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + pair, mask=pair < pairs, other=0)
    row = tl.load(reverse + pair, mask=pair < pairs, other=0) + tl.gather(shift, expert, 0)
    tl.store(padded_reverse + pair, row, mask=pair < pairs)


def pad(routing: Routing, row_scores: Tensor) -> Padded:
    """Rows of a top-K routing with tiles of `ALIGNMENT` rows, padded; synchronises with the host once.

    Args:
        row_scores: (R,) fp32, the score of each row.
    """
    offsets, experts = routing.expert_offsets, routing.num_experts
    counts = (offsets.diff() + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    # The grouped GEMM over varying K takes its group sizes from a host list, so no arrangement avoids this.
    counts_host: list[int] = counts.tolist()
    rows, pairs = sum(counts_host), routing.reverse.numel()
    gather, reverse, expert_of_row = (offsets.new_empty(size) for size in (rows, pairs, rows))
    scores = row_scores.new_empty(rows)
    if rows:
        arguments = (routing.gather, row_scores, offsets, routing.tile_expert, routing.tile_row)
        launch(
            _pp_routing_rows_kernel,
            (rows // ALIGNMENT,),
            (*arguments, gather, scores, expert_of_row),
            {"TILE": ALIGNMENT},
            {"num_warps": WARPS},
        )
        launch(
            _pp_routing_pairs_kernel,
            (cdiv(pairs, PAIRS),),
            (routing.reverse, routing.experts, offsets, reverse, pairs),
            {"E": experts, "E_PAD": padded_experts(experts), "TILE": ALIGNMENT, "BLOCK": PAIRS},
            {"num_warps": WARPS},
        )
    padded = PaddedRouting(
        gather=gather, reverse=reverse, token_offsets=None, k=routing.k, experts=routing.experts,
        expert_offsets=offsets, tile_expert=routing.tile_expert, tile_row=routing.tile_row,
        num_tiles=routing.num_tiles, block_m=ALIGNMENT,
    )  # fmt: skip
    return Padded(padded, scores, expert_of_row, counts, counts_host)
