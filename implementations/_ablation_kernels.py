"""What the paper's fusions leave out, as kernels of their own: the gather as a copy, grouped GEMMs over gathered rows
without an epilogue, the activation and its backward apart, and a down-projection that scatters its rows.

R routed rows lie by expert, as everywhere in `sonicmoe_triton`. The copy and the steps apart are memory-bound: a
program takes some rows of one block of columns, 16 bytes a thread at once. The GEMMs are the plain kernels of
`sonicmoe_triton` with nothing changed but what an ablation is about.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.activations import activate, activation_backward
from implementations.sonicmoe_triton.aggregation import column_block
from implementations.sonicmoe_triton.contiguous_gemm import _store_rows
from implementations.sonicmoe_triton.launching import cdiv, launch
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import check_down_projection
from implementations.sonicmoe_triton.rows import gathered, load_step, locate
from implementations.sonicmoe_triton.tiles import Tile

#: Elements that a program moves at once: of a copy, where fp32 intermediates share the registers, and where there are
#: six tensors of them.
COPIED, COMPUTED, ALL_COMPUTED = 8192, 4096, 2048
WARPS = 4


# Memory-bound kernels


@triton.jit
def _block(rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # (rows (ROWS,), columns (BLOCK,), whether inside (ROWS, BLOCK)) of this program
    COLUMN_BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // COLUMN_BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % COLUMN_BLOCKS * BLOCK + tl.arange(0, BLOCK)
    return row, column, (row < rows)[:, None] & (column < WIDTH)[None, :]


@triton.jit
def _load_halves(h, row, column, inside, N: tl.constexpr):  # type: ignore[no-untyped-def]
    # gate, up (ROWS, BLOCK) fp32 of h (R, 2N)
    at = row[:, None] * (2 * N) + column[None, :]
    gate = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
    return gate, tl.load(h + N + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(grad_h, gate, up, row, column, inside, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = row[:, None] * (2 * N) + column[None, :]
    tl.store(grad_h + at, gate.to(grad_h.dtype.element_ty), mask=inside)
    tl.store(grad_h + N + at, up.to(grad_h.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _ablation_gather_kernel(  # type: ignore[no-untyped-def]
    x, gather, out, rows, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # x (T, D), gather (R,) -> out (R, D)
    row, column, inside = _block(rows, D, ROWS, BLOCK)
    token = tl.load(gather + row, mask=row < rows, other=0).to(tl.int64)
    values = tl.load(x + token[:, None] * D + column[None, :], mask=inside, other=0.0)
    tl.store(out + row[:, None] * D + column[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _ablation_swiglu_kernel(  # type: ignore[no-untyped-def]
    h, a, rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # h (R, 2N) -> a (R, N)
    row, column, inside = _block(rows, N, ROWS, BLOCK)
    gate, up = _load_halves(h, row, column, inside, N)
    out = activate(gate, up, "swiglu").to(a.dtype.element_ty)
    tl.store(a + row[:, None] * N + column[None, :], out, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _ablation_scaled_swiglu_kernel(  # type: ignore[no-untyped-def]
    h, scores, scaled_a, rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # h (R, 2N), scores (R,) -> scaled_a (R, N) = s a
    row, column, inside = _block(rows, N, ROWS, BLOCK)
    gate, up = _load_halves(h, row, column, inside, N)
    score = tl.load(scores + row, mask=row < rows, other=0.0)
    out = (activate(gate, up, "swiglu") * score[:, None]).to(scaled_a.dtype.element_ty)
    tl.store(scaled_a + row[:, None] * N + column[None, :], out, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _ablation_score_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_a, h, grad_scores, rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # grad_a (R, N), h (R, 2N) -> grad_scores (R,) = rowsum(grad_a a)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < N)[None, :]
        gate, up = _load_halves(h, row, column, inside, N)
        grad = tl.load(grad_a + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(grad * activate(gate, up, "swiglu"), 1)
    tl.store(grad_scores + row, total, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _ablation_swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    grad_a, h, scores, grad_h, rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # grad_a (R, N), h (R, 2N), scores (R,) -> grad_h (R, 2N), the gradient of h for that of a being s grad_a
    row, column, inside = _block(rows, N, ROWS, BLOCK)
    gate, up = _load_halves(h, row, column, inside, N)
    grad = tl.load(grad_a + row[:, None] * N + column[None, :], mask=inside, other=0.0).to(tl.float32)
    grad *= tl.load(scores + row, mask=row < rows, other=0.0)[:, None]
    grad_gate, grad_up, _ = activation_backward(gate, up, grad, "swiglu")
    _store_halves(grad_h, grad_gate, grad_up, row, column, inside, N)


@triton.jit(do_not_specialize=["rows"])
def _ablation_epilogue_kernel(  # type: ignore[no-untyped-def]
    grad_a, h, scores, grad_h, scaled_a, grad_scores, rows,
    N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # All three at once: grad_a and h are read once
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    score = tl.load(scores + row, mask=row < rows, other=0.0)[:, None]
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (row < rows)[:, None] & (column < N)[None, :]
        gate, up = _load_halves(h, row, column, inside, N)
        at = row[:, None] * N + column[None, :]
        grad = tl.load(grad_a + at, mask=inside, other=0.0).to(tl.float32)
        grad_gate, grad_up, activated = activation_backward(gate, up, grad * score, "swiglu")
        total += tl.sum(grad * activated, 1)
        tl.store(scaled_a + at, (activated * score).to(scaled_a.dtype.element_ty), mask=inside)
        _store_halves(grad_h, grad_gate, grad_up, row, column, inside, N)
    tl.store(grad_scores + row, total, mask=row < rows)


def sizes(width: int, element_size: int, elements: int) -> dict[str, int]:
    """ROWS and BLOCK of a program that has about ``elements`` elements of rows of ``width``."""
    block, _ = column_block(width, element_size)
    return {"ROWS": max(elements // block, 1), "BLOCK": block}


def _launch(
    kernel: Any, arguments: tuple[Tensor, ...], width: tuple[str, int], rows: int, elements: int, by_row: bool = False
) -> None:
    """``kernel`` over blocks of rows and columns, or (``by_row``) of whole rows, of contiguous ``arguments``."""
    name, columns = width
    cut = sizes(columns, arguments[0].element_size(), elements)
    blocks = cdiv(rows, cut["ROWS"]) * (1 if by_row else cdiv(columns, cut["BLOCK"]))
    if blocks:
        launch(kernel, (blocks,), (*arguments, rows), {name: columns, **cut}, {"num_warps": WARPS})


def gather_rows(x: Tensor, gather: Tensor) -> Tensor:
    """(T, d), (R,) -> (R, d): each row its token's."""
    rows, d = gather.numel(), x.shape[1]
    out = x.new_empty(rows, d)
    _launch(_ablation_gather_kernel, (x.contiguous(), gather, out), ("D", d), rows, COPIED)
    return out


def swiglu(h: Tensor) -> Tensor:
    """(R, 2n) in halves gate | up -> A (R, n)."""
    rows, n = h.shape[0], h.shape[1] // 2
    a = h.new_empty(rows, n)
    _launch(_ablation_swiglu_kernel, (h, a), ("N", n), rows, COMPUTED)
    return a


def scaled_swiglu(h: Tensor, row_scores: Tensor) -> Tensor:
    """(R, 2n), (R,) -> A' = S·A (R, n)."""
    rows, n = h.shape[0], h.shape[1] // 2
    scaled_a = h.new_empty(rows, n)
    _launch(_ablation_scaled_swiglu_kernel, (h, row_scores, scaled_a), ("N", n), rows, COMPUTED)
    return scaled_a


def score_gradient(grad_a: Tensor, h: Tensor) -> Tensor:
    """dA' (R, n), H (R, 2n) -> dS = rowsum(dA' ∘ A) (R,) fp32."""
    rows, n = grad_a.shape
    grad_scores = torch.empty(rows, dtype=torch.float32, device=h.device)
    _launch(_ablation_score_gradient_kernel, (grad_a, h, grad_scores), ("N", n), rows, COMPUTED, by_row=True)
    return grad_scores


def swiglu_backward(grad_a: Tensor, h: Tensor, row_scores: Tensor) -> Tensor:
    """dA' (R, n), H (R, 2n), S (R,) -> dH = dSwiGLU(S·dA', H) (R, 2n)."""
    rows, n = grad_a.shape
    grad_h = torch.empty_like(h)
    _launch(_ablation_swiglu_backward_kernel, (grad_a, h, row_scores, grad_h), ("N", n), rows, COMPUTED)
    return grad_h


def epilogue(grad_a: Tensor, h: Tensor, row_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dH (R, 2n), A' (R, n), dS (R,) fp32) of dA' (R, n), H (R, 2n), S (R,): the three above in one kernel."""
    rows, n = grad_a.shape
    grad_h, scaled_a = torch.empty_like(h), torch.empty_like(grad_a)
    grad_scores = torch.empty(rows, dtype=torch.float32, device=h.device)
    arguments = (grad_a, h, row_scores, grad_h, scaled_a, grad_scores)
    _launch(_ablation_epilogue_kernel, arguments, ("N", n), rows, ALL_COMPUTED, by_row=True)
    return grad_h, scaled_a, grad_scores


# GEMMs


def _gemm_name(specialization: Any) -> str:
    """Of a compiled kernel: profilers tell the two GEMMs apart by it."""
    gemm = "up_projection" if specialization.constants["TRANSPOSED"] else "hidden_gradient"
    return f"ablation_{gemm}_kernel"


@triton.jit(repr=_gemm_name)
def gathered_gemm_kernel(  # type: ignore[no-untyped-def]
    x,  # (T, D)
    w,  # descriptor of (E, N, D), box (1, BN, BK), if TRANSPOSED, else of (E, D, N), box (1, BK, BN)
    out,  # (R, N)
    gather,  # (R,)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    D: tl.constexpr,
    N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    # The plain up-projection and dH up to their epilogues, which are a store here.
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles) * COLUMN_TILES, PROGRAMS, flatten=FLATTEN):
        row_tile = tile // COLUMN_TILES
        column = tile % COLUMN_TILES * BN
        expert, first, inside = locate(tile_expert, tile_row, expert_offsets, row_tile, BM)
        x_rows = gathered(x, gather, first, inside, D, BM, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D, BK):
            if TRANSPOSED:
                w_step = w.load([expert, column, k]).reshape(BN, BK).T
            else:
                w_step = w.load([expert, k, column]).reshape(BK, BN)
            acc = tl.dot(load_step(x_rows, k, D, BK), w_step, acc, input_precision=PRECISION)
        _store_rows(out, acc, first, inside, column, N, BM, BN)


def gathered_gemm(x: Tensor, w: Tensor, routing: Routing, transposed: bool, tile: Tile) -> Tensor:
    """out[r] = x[gather[r]] W[e]ᵀ (R, N) of w (E, N, d) if ``transposed``, else x[gather[r]] W[e] of w (E, d, N)."""
    n, d = w.shape[1:] if transposed else (w.shape[2], w.shape[1])
    out = x.new_empty(routing.rows, n)
    if routing.rows == 0:
        return out
    tiles.check_block_m(tile, routing.block_m)
    box = [1, tile.block_n, tile.block_k] if transposed else [1, tile.block_k, tile.block_n]
    tiles.launch(
        gathered_gemm_kernel,
        tile,
        routing.max_tiles * cdiv(n, tile.block_n),
        (
            x.contiguous(),
            TensorDescriptor.from_tensor(tiles.dense(w), box),
            out,
            routing.gather,
            *routing.row_tiles,
        ),
        x,
        D=d,
        N=n,
        TRANSPOSED=transposed,
        FLATTEN=tile.flatten,
    )
    return out


@triton.jit
def scattered_down_projection_kernel(  # type: ignore[no-untyped-def]
    a,  # descriptor of (R, N), box (BM, BK)
    w2,  # descriptor of (E, D, N), box (1, BN, BK)
    y,  # (R, D)
    places,  # (R,)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    D: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    # `contiguous_gemm.down_projection_kernel` but for where a row is stored.
    COLUMN_TILES: tl.constexpr = (D + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles) * COLUMN_TILES, PROGRAMS, flatten=FLATTEN):
        row_tile = tile // COLUMN_TILES
        column = tile % COLUMN_TILES * BN
        expert, first, inside = locate(tile_expert, tile_row, expert_offsets, row_tile, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, N, BK):
            w_step = w2.load([expert, column, k]).reshape(BN, BK)
            acc = tl.dot(a.load([first, k]), w_step.T, acc, input_precision=PRECISION)
        place = tl.load(places + first + tl.arange(0, BM), mask=inside, other=0)
        columns = column + tl.arange(0, BN)
        mask = inside[:, None]
        if D % BN:
            mask = mask & (columns < D)[None, :]
        pointers = y + place[:, None].to(tl.int64) * D + columns[None, :]
        tl.store(pointers, acc.to(y.dtype.element_ty), mask=mask)


def scattered_down_projection(a: Tensor, w2: Tensor, routing: Routing, places: Tensor) -> Tensor:
    """y (R, d) of a (R, n) and w2 (E, d, n), row r at places[r]: a permutation of the rows, int32."""
    d, n = check_down_projection(a, w2, routing, None)
    y = a.new_empty(routing.rows, d)
    if routing.rows == 0:
        return y
    tile = tiles.choose(tiles.DOWN_PROJECTION, d, n, a.element_size(), routing.block_m)
    tiles.check_block_m(tile, routing.block_m)
    tiles.launch(
        scattered_down_projection_kernel,
        tile,
        routing.max_tiles * cdiv(d, tile.block_n),
        (
            TensorDescriptor.from_tensor(tiles.dense(a), [tile.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(tiles.dense(w2), [1, tile.block_n, tile.block_k]),
            y,
            places,
            *routing.row_tiles,
        ),
        a,
        D=d,
        N=n,
        FLATTEN=tile.flatten,
    )
    return y
