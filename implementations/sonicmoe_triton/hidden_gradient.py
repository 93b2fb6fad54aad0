"""The gradient of the hidden layer, with everything else that the backward wants from the same tile.

For row r of expert e, with token t = gather[r] and score s[r]:

    dA'[r] = dO[t] W2[e]                    (n,), in the accumulator only
    A[r]   = f(gate) * up                   recomputed from H[r] = gate | up
    ds[r]  = <dA'[r], A[r]>                 the score's gradient, without Y: <dO, A W2^T> = <dO W2, A>
    A'[r]  = s[r] A[r]                      (R, n), what dW2 contracts with dO
    dH[r]  = backward of f(gate) * up for the gradient s[r] dA'[r]      (R, 2n)

A row that spans several column tiles gets a partial ds from each, summed afterwards in a fixed order: the result is
deterministic. Ungated activations: H and dH are (R, n), A = f(H).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.activations import activation_backward
from implementations.sonicmoe_triton.launching import cdiv
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import check_hidden_gradient
from implementations.sonicmoe_triton.rows import gathered, load_step, locate
from implementations.sonicmoe_triton.tiles import Tile

#: Columns of the epilogue's slices.
SLICE = 32


@triton.jit
def _columns_backward(  # type: ignore[no-untyped-def]
    acc,  # (BM, COLUMNS): dA' of these columns
    score,  # (BM,)
    h,  # h, grad_h and scaled_a point at the tile's first row: offsets within a tile fit into 32 bits
    grad_h,
    scaled_a,
    inside,  # (BM,)
    column,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UNEVEN: tl.constexpr,
    BM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Stores dH and A' of these columns and returns their share of ds, one slice of SLICE columns after the other: H,
    dH and A' of a whole tile do not fit into registers beside its accumulator."""
    if COLUMNS > SLICE:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, COLUMNS // 2)), (0, 2, 1)))
        ds = _columns_backward(
            left,
            score,
            h,
            grad_h,
            scaled_a,
            inside,
            column,
            N,
            HALVES,
            ACTIVATION,
            UNEVEN,
            BM,
            COLUMNS // 2,
            SLICE,
        )
        ds += _columns_backward(
            right,
            score,
            h,
            grad_h,
            scaled_a,
            inside,
            column + COLUMNS // 2,
            N,
            HALVES,
            ACTIVATION,
            UNEVEN,
            BM,
            COLUMNS // 2,
            SLICE,
        )
    else:
        rows = tl.arange(0, BM)
        columns = column + tl.arange(0, COLUMNS)
        mask = inside[:, None]
        if UNEVEN:
            mask = mask & (columns < N)[None, :]
        offsets = rows[:, None] * (HALVES * N) + columns[None, :]
        gate = tl.load(h + offsets, mask=mask, other=0.0).to(tl.float32)
        up = gate
        if HALVES == 2:
            up = tl.load(h + N + offsets, mask=mask, other=0.0).to(tl.float32)
        grad_gate, grad_up, activated = activation_backward(gate, up, acc * score[:, None], ACTIVATION)
        product = acc * activated
        if UNEVEN:
            # An infinite dO times an overhanging column's zeros is NaN, which this row's sum must not see.
            product = tl.where(mask, product, 0.0)
        ds = tl.sum(product, 1)
        a_offsets = rows[:, None] * N + columns[None, :]
        tl.store(scaled_a + a_offsets, (activated * score[:, None]).to(scaled_a.dtype.element_ty), mask=mask)
        if HALVES == 2:
            tl.store(grad_h + N + offsets, grad_up.to(grad_h.dtype.element_ty), mask=mask)
        tl.store(grad_h + offsets, grad_gate.to(grad_h.dtype.element_ty), mask=mask)
    return ds


@triton.jit(do_not_specialize=["R"])
def hidden_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_out,  # (T, D)
    w2,  # descriptor of (E, D, N), box (1, BK, BN)
    h,  # (R, HALVES N)
    row_scores,  # (R,)
    grad_h,  # (R, HALVES N)
    scaled_a,  # (R, N)
    partial_scores,  # (column tiles, R)
    gather,  # (R,)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    R,
    D: tl.constexpr,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SLICE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles) * COLUMN_TILES, PROGRAMS, flatten=FLATTEN):
        row_tile = tile // COLUMN_TILES
        column_tile = tile % COLUMN_TILES
        column = column_tile * BN
        expert, first, inside = locate(tile_expert, tile_row, expert_offsets, row_tile, BM)
        out_rows = gathered(grad_out, gather, first, inside, D, BM, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D, BK):
            w_step = w2.load([expert, k, column]).reshape(BK, BN)
            acc = tl.dot(load_step(out_rows, k, D, BK), w_step, acc, input_precision=PRECISION)

        rows = tl.arange(0, BM)
        score = tl.load(row_scores + first + rows, mask=inside, other=0.0)
        start = first.to(tl.int64)
        h_tile = h + start * (HALVES * N)
        dh_tile = grad_h + start * (HALVES * N)
        a_tile = scaled_a + start * N
        ds = _columns_backward(
            acc,
            score,
            h_tile,
            dh_tile,
            a_tile,
            inside,
            column,
            N,
            HALVES,
            ACTIVATION,
            N % BN != 0,
            BM,
            BN,
            SLICE,
        )
        tl.store(partial_scores + column_tile.to(tl.int64) * R + first + rows, ds, mask=inside)


def hidden_gradient(
    grad_out: Tensor,
    w2: Tensor,
    h: Tensor,
    row_scores: Tensor,
    routing: Routing,
    activation: str,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_h like h, scaled_a (R, n), partial_scores (C, R) float32, whose sum over the C column tiles is dS).

    Args:
        grad_out: (T, d), the gradient of the layer's output.
        w2: (E, d, n). h: (R, 2n), halves gate | up ((R, n) for an ungated activation). Both of grad_out's dtype.
        row_scores: (R,) float32, the score of each row.

    Raises:
        ValueError: unknown activation; d or n is no multiple of 16 bytes; a tensor's shape, dtype or device does not
            fit the others; the tile's block_m is not the routing's.
    """
    halves, _, d, n = check_hidden_gradient(grad_out, w2, h, row_scores, routing, activation)
    rows, dtype, device = routing.rows, grad_out.dtype, grad_out.device
    grad_h = torch.empty(rows, halves * n, dtype=dtype, device=device)
    scaled_a = torch.empty(rows, n, dtype=dtype, device=device)
    if rows == 0:
        return grad_h, scaled_a, torch.empty(1, 0, dtype=torch.float32, device=device)
    tile = tile or tiles.choose(tiles.HIDDEN_GRADIENT, d, n, grad_out.element_size(), routing.block_m)
    tiles.check_block_m(tile, routing.block_m)
    column_tiles = cdiv(n, tile.block_n)
    partial_scores = torch.empty(column_tiles, rows, dtype=torch.float32, device=device)
    tiles.launch(
        hidden_gradient_kernel,
        tile,
        routing.max_tiles * column_tiles,
        (
            grad_out.contiguous(),
            TensorDescriptor.from_tensor(tiles.dense(w2), [1, tile.block_k, tile.block_n]),
            h.contiguous(),
            row_scores.contiguous(),
            grad_h,
            scaled_a,
            partial_scores,
            routing.gather,
            *routing.row_tiles,
            rows,
        ),
        grad_out,
        D=d,
        N=n,
        HALVES=halves,
        ACTIVATION=activation,
        SLICE=SLICE,
        FLATTEN=tile.flatten,
    )
    return grad_h, scaled_a, partial_scores
