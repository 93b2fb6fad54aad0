"""Grouped GEMMs whose rows already lie contiguously by expert: the down-projection and the gradient of the inputs.

For row r of expert e:

    Y[r]  = A[r] W2[e]^T (+ bias2[e])       (R, d)    down-projection, contraction over n
    dX~[r] = dH[r] W1[e] (+ g[r] Wr[e])     (R, d)    input gradient, contraction over 2n

(g[r]: the gradient of the logit that chose the row, Wr the router; a token's rows then add up to its whole gradient.)
Both write contiguous rows; `aggregation` sums a token's rows afterwards. Operands come by TMA, whose boxes are filled
with zeros where they overhang: each expert's weights are their own slab of a 3-D descriptor, so an overhanging box
never reaches the next expert. Rows past an expert's end are computed from whatever lies there and are not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.launching import cdiv
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import RouterTerm, check_down_projection, check_input_gradient
from implementations.sonicmoe_triton.rows import locate
from implementations.sonicmoe_triton.tiles import Tile


@triton.jit
def _store_rows(out, acc, first, inside, column, COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    # A 64-bit base for the tile and 32-bit offsets within it.
    rows = tl.arange(0, BM)
    columns = column + tl.arange(0, BN)
    mask = inside[:, None]
    if COLUMNS % BN:
        mask = mask & (columns < COLUMNS)[None, :]
    out_tile = out + first.to(tl.int64) * COLUMNS
    tl.store(out_tile + rows[:, None] * COLUMNS + columns[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def down_projection_kernel(  # type: ignore[no-untyped-def]
    a,  # descriptor of (R, N), box (BM, BK)
    w2,  # descriptor of (E, D, N), box (1, BN, BK)
    bias2,  # (E, D), not read without HAS_BIAS
    y,  # (R, D)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    D: tl.constexpr,
    N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (D + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles) * COLUMN_TILES, PROGRAMS, flatten=FLATTEN):
        row_tile = tile // COLUMN_TILES
        column = tile % COLUMN_TILES * BN
        expert, first, inside = locate(tile_expert, tile_row, expert_offsets, row_tile, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, N, BK):
            w_step = w2.load([expert, column, k]).reshape(BN, BK)
            acc = tl.dot(a.load([first, k]), w_step.T, acc, input_precision=PRECISION)
        if HAS_BIAS:
            columns = column + tl.arange(0, BN)
            bias = tl.load(bias2 + expert.to(tl.int64) * D + columns, mask=columns < D, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        _store_rows(y, acc, first, inside, column, D, BM, BN)


@triton.jit
def input_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_h,  # descriptor of (R, K), box (BM, BK)
    w1,  # descriptor of (E, K, D), box (1, BK, BN)
    row_gradients,  # (R,) and (E, D), not read without ROUTED
    router,
    grad_rows,  # (R, D)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    D: tl.constexpr,
    K: tl.constexpr,
    ROUTED: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (D + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles) * COLUMN_TILES, PROGRAMS, flatten=FLATTEN):
        row_tile = tile // COLUMN_TILES
        column = tile % COLUMN_TILES * BN
        expert, first, inside = locate(tile_expert, tile_row, expert_offsets, row_tile, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            w_step = w1.load([expert, k, column]).reshape(BK, BN)
            acc = tl.dot(grad_h.load([first, k]), w_step, acc, input_precision=PRECISION)
        if ROUTED:
            columns = column + tl.arange(0, BN)
            weight = tl.load(router + expert.to(tl.int64) * D + columns, mask=columns < D, other=0.0)
            gradient = tl.load(row_gradients + first + tl.arange(0, BM), mask=inside, other=0.0)
            acc += gradient[:, None] * weight.to(tl.float32)[None, :]
        _store_rows(grad_rows, acc, first, inside, column, D, BM, BN)


def down_projection(
    a: Tensor, w2: Tensor, routing: Routing, bias2: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """y (R, d) of a (R, n), w2 (E, d, n) and bias2 (E, d) or None, in a's dtype.

    Raises:
        ValueError: d or n is no multiple of 16 bytes; a tensor's shape, dtype or device does not fit the others; the
            tile's block_m is not the routing's.
    """
    d, n = check_down_projection(a, w2, routing, bias2)
    rows = routing.rows
    y = torch.empty(rows, d, dtype=a.dtype, device=a.device)
    if rows == 0:
        return y
    tile = tile or tiles.choose(tiles.DOWN_PROJECTION, d, n, a.element_size(), routing.block_m)
    tiles.check_block_m(tile, routing.block_m)
    tiles.launch(
        down_projection_kernel,
        tile,
        routing.max_tiles * cdiv(d, tile.block_n),
        (
            TensorDescriptor.from_tensor(tiles.dense(a), [tile.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(tiles.dense(w2), [1, tile.block_n, tile.block_k]),
            y if bias2 is None else bias2.contiguous(),
            y,
            *routing.row_tiles,
        ),
        a,
        D=d,
        N=n,
        HAS_BIAS=bias2 is not None,
        FLATTEN=tile.flatten,
    )
    return y


def input_gradient(
    grad_h: Tensor, w1: Tensor, routing: Routing, router_term: RouterTerm | None = None, tile: Tile | None = None
) -> Tensor:
    """The gradient of each routed row (R, d) of grad_h (R, 2n) and w1 (E, 2n, d), in grad_h's dtype.

    With an ungated activation: grad_h (R, n), w1 (E, n, d). ``router_term``: added before the result is rounded.

    Raises:
        ValueError: d or H's width is no multiple of 16 bytes; a tensor's shape, dtype or device does not fit the
            others; the tile's block_m is not the routing's.
    """
    d, hidden = check_input_gradient(grad_h, w1, routing, router_term)
    rows = routing.rows
    grad_rows = torch.empty(rows, d, dtype=grad_h.dtype, device=grad_h.device)
    if rows == 0:
        return grad_rows
    tile = tile or tiles.choose(tiles.INPUT_GRADIENT, d, hidden, grad_h.element_size(), routing.block_m)
    tiles.check_block_m(tile, routing.block_m)
    tiles.launch(
        input_gradient_kernel,
        tile,
        routing.max_tiles * cdiv(d, tile.block_n),
        (
            TensorDescriptor.from_tensor(tiles.dense(grad_h), [tile.block_m, tile.block_k]),
            TensorDescriptor.from_tensor(tiles.dense(w1), [1, tile.block_k, tile.block_n]),
            *((grad_rows, grad_rows) if router_term is None else map(tiles.dense, router_term)),
            grad_rows,
            *routing.row_tiles,
        ),
        grad_h,
        D=d,
        K=hidden,
        ROUTED=router_term is not None,
        FLATTEN=tile.flatten,
    )
    return grad_rows
