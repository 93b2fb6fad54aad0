"""Grouped GEMMs without what the paper fuses into them: over gathered rows without an epilogue, and a down-projection
that scatters its rows. (What an epilogue leaves over are the kernels of `_separate_kernels`.)

R routed rows lie by expert, as everywhere in `sonicmoe_triton`. These are its plain kernels with nothing changed but
what an ablation is about.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.contiguous_gemm import _store_rows
from implementations.sonicmoe_triton.launching import cdiv
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import check_down_projection
from implementations.sonicmoe_triton.rows import gathered, load_step, locate
from implementations.sonicmoe_triton.tiles import Tile


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
