"""DeepGEMM++'s kernels between its GEMMs: padding, gather, SwiGLU, and the three steps of its backward. All are
memory-bound; a program takes some rows of one block of columns, 16 bytes a thread at once.

R routed rows lie by expert. Padded, each expert's rows fill whole tiles of `ALIGNMENT`; M rows in all. A padding row
repeats the last token of its expert with score zero: then A' and dH vanish there and it adds nothing to a weight
gradient, and what is not finite stays with the experts that saw it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implementations._deepgemm_ops import ALIGNMENT
from implementations.sonicmoe_triton.activations import activate, activation_backward
from implementations.sonicmoe_triton.aggregation import column_block
from implementations.sonicmoe_triton.launching import cdiv, launch
from implementations.sonicmoe_triton.metadata import Routing, padded_experts

#: Elements that a program moves at once: of a copy, and where fp32 intermediates share the registers.
COPIED, COMPUTED = 8192, 4096
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


@triton.jit
def _block(WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # (rows (ROWS,), columns (BLOCK,), whether inside (1, BLOCK)) of this program; the rows divide M
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // COLUMN_BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % COLUMN_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    return row, column, (column < WIDTH)[None, :]


@triton.jit
def _load_halves(h, row, column, inside, N: tl.constexpr):  # type: ignore[no-untyped-def]
    # gate, up (ROWS, BLOCK) fp32 of h (M, 2N)
    at = row[:, None] * (2 * N) + column[None, :]
    gate = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    return gate, tl.load(h + N + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _pp_gather_kernel(  # type: ignore[no-untyped-def]
    x, gather, out, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # x (T, D), gather (M,) -> out (M, D)
    row, column, inside = _block(D, ROWS, BLOCK)
    token = tl.load(gather + row).to(tl.int64)
    tl.store(
        out + row[:, None] * D + column[None, :],
        tl.load(x + token[:, None] * D + column[None, :], mask=inside, other=0.0),
        mask=inside,
    )


@triton.jit
def _pp_swiglu_kernel(  # type: ignore[no-untyped-def]
    h, a, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # h (M, 2N) -> a (M, N)
    row, column, inside = _block(N, ROWS, BLOCK)
    gate, up = _load_halves(h, row, column, inside, N)
    out = activate(gate, up, "swiglu").to(a.dtype.element_ty)
    tl.store(a + row[:, None] * N + column[None, :], out, mask=inside)


@triton.jit
def _pp_scaled_swiglu_kernel(  # type: ignore[no-untyped-def]
    h, scores, scaled_a, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # h (M, 2N), scores (M,) -> scaled_a (M, N) = s a
    row, column, inside = _block(N, ROWS, BLOCK)
    gate, up = _load_halves(h, row, column, inside, N)
    out = activate(gate, up, "swiglu") * tl.load(scores + row)[:, None]
    tl.store(scaled_a + row[:, None] * N + column[None, :], out.to(scaled_a.dtype.element_ty), mask=inside)


@triton.jit
def _pp_score_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_a, h, grad_scores, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # grad_a (M, N), h (M, 2N) -> grad_scores (M,) = rowsum(grad_a a)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (column < N)[None, :]
        gate, up = _load_halves(h, row, column, inside, N)
        grad = tl.load(grad_a + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(grad * activate(gate, up, "swiglu"), 1)
    tl.store(grad_scores + row, total)


@triton.jit
def _pp_swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad_a, h, scores, grad_h, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # grad_a (M, N), h (M, 2N), scores (M,) -> grad_h (M, 2N), the gradient of h for that of a being s grad_a
    row, column, inside = _block(N, ROWS, BLOCK)
    gate, up = _load_halves(h, row, column, inside, N)
    grad = tl.load(grad_a + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    grad *= tl.load(scores + row)[:, None]
    grad_gate, grad_up, _ = activation_backward(gate, up, grad, "swiglu")
    at = row[:, None] * (2 * N) + column[None, :]
    tl.store(grad_h + at, grad_gate.to(grad_h.dtype.element_ty), mask=inside)
    tl.store(grad_h + N + at, grad_up.to(grad_h.dtype.element_ty), mask=inside)


def _launch(kernel: Any, out: Tensor, arguments: tuple[Tensor, ...], sizes: dict[str, int], elements: int) -> Tensor:
    """Launches a kernel over blocks of rows and columns (rows alone, where ``out`` has no columns); returns ``out``.

    Args:
        arguments: contiguous. sizes: the width of a row, by the kernel's name for it.
        elements: of one block.
    """
    (width,) = sizes.values()
    block, _ = column_block(width, arguments[0].element_size())
    rows = min(elements // block, ALIGNMENT)
    blocks = out.shape[0] // rows * (cdiv(width, block) if out.dim() == 2 else 1)
    if blocks:
        launch(kernel, (blocks,), arguments, {**sizes, "ROWS": rows, "BLOCK": block}, {"num_warps": WARPS})
    return out


def gather_rows(x: Tensor, padded: Padded) -> Tensor:
    """(T, d) -> (M, d): each padded row its token's."""
    gather = padded.routing.gather
    out = x.new_empty(gather.numel(), x.shape[1])
    return _launch(_pp_gather_kernel, out, (x.contiguous(), gather, out), {"D": x.shape[1]}, COPIED)


def swiglu(h: Tensor) -> Tensor:
    """(M, 2n) in halves gate | up -> A (M, n)."""
    out = h.new_empty(h.shape[0], h.shape[1] // 2)
    return _launch(_pp_swiglu_kernel, out, (h, out), {"N": out.shape[1]}, COMPUTED)


def scaled_swiglu(h: Tensor, scores: Tensor) -> Tensor:
    """(M, 2n), (M,) -> A' = S·A (M, n)."""
    out = h.new_empty(h.shape[0], h.shape[1] // 2)
    return _launch(_pp_scaled_swiglu_kernel, out, (h, scores, out), {"N": out.shape[1]}, COMPUTED)


def score_gradient(grad_a: Tensor, h: Tensor) -> Tensor:
    """dA' (M, n), H (M, 2n) -> dS = rowsum(dA' ∘ A) (M,) fp32."""
    out = torch.empty(h.shape[0], dtype=torch.float32, device=h.device)
    return _launch(_pp_score_gradient_kernel, out, (grad_a, h, out), {"N": grad_a.shape[1]}, COMPUTED)


def swiglu_backward(grad_a: Tensor, h: Tensor, scores: Tensor) -> Tensor:
    """dA' (M, n), H (M, 2n), S (M,) -> dH = dSwiGLU(S·dA', H) (M, 2n)."""
    out = torch.empty_like(h)
    return _launch(_pp_swiglu_backward_kernel, out, (grad_a, h, scores, out), {"N": grad_a.shape[1]}, COMPUTED)
