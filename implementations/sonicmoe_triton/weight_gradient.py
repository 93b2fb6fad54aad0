"""Weight gradients: grouped GEMMs whose contraction runs over an expert's rows, one side gathered while loading.

With the rows r of expert e and their tokens t = gather[r]:

    dW1[e] = sum_r dH[r]^T x[t]             (2n, d)
    dW2[e] = sum_r dO[t]^T A'[r]            (d, n)       A' = s A: the score is in it already

Every tile of every expert is stored, so an expert without rows gets exact zeros. The contraction's tail is masked on
both sides: beyond it lie the next expert's rows, and a NaN there times zero would still be NaN. One program adds up a
whole tile: no atomics, the result is deterministic.
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
from implementations.sonicmoe_triton.operands import check_down_weight_gradient, check_up_weight_gradient
from implementations.sonicmoe_triton.tiles import Tile


@triton.jit
def _gathered(x, token, column, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x[token, column : column + COLUMNS], zero past x's width."""
    columns = column + tl.arange(0, COLUMNS)
    pointers = x + token[:, None].to(tl.int64) * WIDTH + columns[None, :]
    if WIDTH % COLUMNS == 0:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    return values


@triton.jit
def _rows_of(expert, expert_offsets, BK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first, tail, end) of an expert's rows: whole steps of BK from first to tail, what is left from there to end."""
    first = tl.load(expert_offsets + expert)
    end = tl.load(expert_offsets + expert + 1)
    return first, first + (end - first) // BK * BK, end


@triton.jit
def up_weight_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_h,  # descriptor of (R, M), box (BK, BM)
    x,  # (T, D)
    grad_w1,  # descriptor of (E, M, D), box (1, BM, BN)
    gather,  # (R,)
    expert_offsets,  # (E + 1,)
    E: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (D + BN - 1) // BN
    TILES: tl.constexpr = (M + BM - 1) // BM * COLUMN_TILES  # of one expert
    steps = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), E * TILES, PROGRAMS):
        expert = tile // TILES
        unit = tile % TILES // COLUMN_TILES * BM
        column = tile % COLUMN_TILES * BN
        first, tail, end = _rows_of(expert, expert_offsets, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for row in range(first, tail, BK):
            token = tl.load(gather + row + steps)
            x_step = _gathered(x, token, column, D, BN)
            acc = tl.dot(grad_h.load([row, unit]).T, x_step, acc, input_precision=PRECISION)
        if tail < end:
            inside = tail + steps < end
            token = tl.load(gather + tail + steps, mask=inside, other=0)
            x_step = tl.where(inside[:, None], _gathered(x, token, column, D, BN), 0.0)
            h_step = tl.where(inside[:, None], grad_h.load([tail, unit]), 0.0)
            acc = tl.dot(h_step.T, x_step, acc, input_precision=PRECISION)
        grad_w1.store([expert, unit, column], acc.to(x.dtype.element_ty).reshape(1, BM, BN))


@triton.jit
def down_weight_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_out,  # (T, D)
    scaled_a,  # descriptor of (R, N), box (BK, BN)
    grad_w2,  # descriptor of (E, D, N), box (1, BM, BN)
    gather,  # (R,)
    expert_offsets,  # (E + 1,)
    E: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    TILES: tl.constexpr = (D + BM - 1) // BM * COLUMN_TILES  # of one expert
    steps = tl.arange(0, BK)
    for tile in tl.range(tl.program_id(0), E * TILES, PROGRAMS):
        expert = tile // TILES
        unit = tile % TILES // COLUMN_TILES * BM
        column = tile % COLUMN_TILES * BN
        first, tail, end = _rows_of(expert, expert_offsets, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for row in range(first, tail, BK):
            token = tl.load(gather + row + steps)
            out_step = _gathered(grad_out, token, unit, D, BM)
            acc = tl.dot(out_step.T, scaled_a.load([row, column]), acc, input_precision=PRECISION)
        if tail < end:
            inside = tail + steps < end
            token = tl.load(gather + tail + steps, mask=inside, other=0)
            out_step = tl.where(inside[:, None], _gathered(grad_out, token, unit, D, BM), 0.0)
            a_step = tl.where(inside[:, None], scaled_a.load([tail, column]), 0.0)
            acc = tl.dot(out_step.T, a_step, acc, input_precision=PRECISION)
        grad_w2.store([expert, unit, column], acc.to(grad_out.dtype.element_ty).reshape(1, BM, BN))


def up_weight_gradient(grad_h: Tensor, x: Tensor, routing: Routing, tile: Tile | None = None) -> Tensor:
    """grad_w1 (E, 2n, d) of grad_h (R, 2n) and x (T, d), in their dtype ((E, n, d) of (R, n) for ungated activations).

    Raises:
        ValueError: d or H's width is no multiple of 16 bytes; a tensor's shape, dtype or device does not fit the
            others.
    """
    rows, experts = routing.rows, routing.num_experts
    hidden, d = check_up_weight_gradient(grad_h, x, routing)
    if rows == 0:
        return torch.zeros(experts, hidden, d, dtype=x.dtype, device=x.device)
    grad_w1 = torch.empty(experts, hidden, d, dtype=x.dtype, device=x.device)
    tile = tile or tiles.choose(tiles.UP_WEIGHT_GRADIENT, d, hidden, x.element_size())
    tiles.launch(
        up_weight_gradient_kernel,
        tile,
        experts * cdiv(hidden, tile.block_m) * cdiv(d, tile.block_n),
        (
            TensorDescriptor.from_tensor(tiles.dense(grad_h), [tile.block_k, tile.block_m]),
            x.contiguous(),
            TensorDescriptor.from_tensor(grad_w1, [1, tile.block_m, tile.block_n]),
            routing.gather,
            routing.expert_offsets,
        ),
        x,
        E=experts,
        M=hidden,
        D=d,
    )
    return grad_w1


def down_weight_gradient(grad_out: Tensor, scaled_a: Tensor, routing: Routing, tile: Tile | None = None) -> Tensor:
    """grad_w2 (E, d, n) of grad_out (T, d) and scaled_a (R, n), in their dtype.

    Raises:
        ValueError: d or n is no multiple of 16 bytes; a tensor's shape, dtype or device does not fit the others.
    """
    rows, experts = routing.rows, routing.num_experts
    d, n = check_down_weight_gradient(grad_out, scaled_a, routing)
    dtype, device = grad_out.dtype, grad_out.device
    if rows == 0:
        return torch.zeros(experts, d, n, dtype=dtype, device=device)
    grad_w2 = torch.empty(experts, d, n, dtype=dtype, device=device)
    tile = tile or tiles.choose(tiles.DOWN_WEIGHT_GRADIENT, d, n, grad_out.element_size())
    tiles.launch(
        down_weight_gradient_kernel,
        tile,
        experts * cdiv(d, tile.block_m) * cdiv(n, tile.block_n),
        (
            grad_out.contiguous(),
            TensorDescriptor.from_tensor(tiles.dense(scaled_a), [tile.block_k, tile.block_n]),
            TensorDescriptor.from_tensor(grad_w2, [1, tile.block_m, tile.block_n]),
            routing.gather,
            routing.expert_offsets,
        ),
        grad_out,
        E=experts,
        D=d,
        N=n,
    )
    return grad_w2
