"""Gradients of the experts' biases, and the biases' share of the scores' gradients.

    expert_sum   out[e] = Σ over the rows r of expert e of weights[r] · values[r]       (db1 of dH; db2 of S · dO)
    row_products out[r] = <dO[gather[r]], b2[expert of r]>                             (dS gains it)

Both are memory-bound and off the layer's usual path. A sum runs over its expert's rows in order, so that it is the same
at every call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from implementations.sonicmoe_triton.launching import cdiv, launch
from implementations.sonicmoe_triton.metadata import Routing

_ROWS, _COLUMNS = 32, 64


@triton.jit
def _expert_sum_kernel(  # type: ignore[no-untyped-def]
    values_ptr,  # (R, c), or (T, c) where gathered
    weights_ptr,  # (R,) fp32
    gather_ptr,  # (R,)
    expert_offsets_ptr,  # (E+1,)
    out_ptr,  # (E, c)
    c,
    GATHERED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    expert = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < c
    first, end = tl.load(expert_offsets_ptr + expert), tl.load(expert_offsets_ptr + expert + 1)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = rows < end
        source = rows
        if GATHERED:
            source = tl.load(gather_ptr + rows, mask=mask, other=0)
        values = tl.load(
            values_ptr + source[:, None].to(tl.int64) * c + columns[None, :],
            mask=mask[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights_ptr + rows, mask=mask, other=0.0)[:, None]
        total += tl.sum(values, 0)
    tl.store(out_ptr + expert.to(tl.int64) * c + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _row_products_kernel(  # type: ignore[no-untyped-def]
    grad_out_ptr,  # (T, d)
    bias_ptr,  # (E, d)
    gather_ptr,  # (R,)
    expert_offsets_ptr,  # (E+1,)
    tile_expert_ptr,  # (max_tiles,)
    tile_row_ptr,  # (max_tiles,)
    num_tiles_ptr,  # (1,)
    out_ptr,  # (R,) fp32
    d,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # A program takes ROWS rows of a tile: a whole tile's pointers do not fit into registers.
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(tile_expert_ptr + tile)
    rows = tl.load(tile_row_ptr + tile) + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mask = rows < tl.load(expert_offsets_ptr + expert + 1)
    token = tl.load(gather_ptr + rows, mask=mask, other=0).to(tl.int64)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, d, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        inside = columns < d
        bias = tl.load(bias_ptr + expert.to(tl.int64) * d + columns, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(
            grad_out_ptr + token[:, None] * d + columns[None, :], mask=mask[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        total += tl.sum(grad * bias[None, :], 1)
    tl.store(out_ptr + rows, total, mask=mask)


def expert_sum(values: Tensor, routing: Routing, weights: Tensor | None = None, gathered: bool = False) -> Tensor:
    """Sums over each expert's rows, fp32 inside; exactly zero for an expert without rows.

    Args:
        values: (R, c); (T, c) where ``gathered``.
        weights: (R,) fp32 or None.
        gathered: row r is ``values[gather[r]]``.

    Returns:
        (E, c) in the values' dtype.
    """
    values = values.contiguous()
    experts, c = routing.expert_offsets.numel() - 1, values.shape[1]
    if routing.gather.numel() == 0:
        return values.new_zeros(experts, c)
    out = values.new_empty(experts, c)
    launch(
        _expert_sum_kernel,
        (experts, cdiv(c, _COLUMNS)),
        (values, weights, routing.gather, routing.expert_offsets, out, c),
        {"GATHERED": gathered, "WEIGHTED": weights is not None, "ROWS": _ROWS, "COLUMNS": _COLUMNS},
        {},
    )
    return out


def row_products(grad_out: Tensor, bias: Tensor, routing: Routing) -> Tensor:
    """(T, d), (E, d) -> (R,) fp32: each row's token's gradient times its expert's bias."""
    grad_out, bias = grad_out.contiguous(), bias.contiguous()
    out = torch.empty(routing.gather.numel(), dtype=torch.float32, device=grad_out.device)
    if out.numel():
        rows = min(_ROWS, routing.block_m)
        launch(
            _row_products_kernel,
            (routing.tile_expert.numel(), routing.block_m // rows),
            (
                grad_out, bias, routing.gather, routing.expert_offsets, routing.tile_expert, routing.tile_row,
                routing.num_tiles, out, grad_out.shape[1],
            ),
            {"ROWS": rows, "COLUMNS": _COLUMNS},
            {},
        )  # fmt: skip
    return out
