"""Pointwise and row-sum kernels at copy speed for the dense bound: each tensor is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Elements of one stream that a program handles: 8 for each of 256 threads, i.e. one 16-byte access in bf16.
_TILE = 2048
_WARPS = 8


@triton.jit
def _bound_swiglu_kernel(  # type: ignore[no-untyped-def]
    h_ptr, a_ptr, rows, n, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (column < n)[None, :]
    h_offset = row[:, None] * (2 * n) + column[None, :]
    gate = tl.load(h_ptr + h_offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + h_offset + n, mask=mask, other=0.0).to(tl.float32)
    a = gate * tl.sigmoid(gate) * up
    tl.store(a_ptr + row[:, None] * n + column[None, :], a.to(a_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bound_swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    h_ptr, grad_a_ptr, a_ptr, grad_h_ptr, rows, n, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (column < n)[None, :]
    h_offset = row[:, None] * (2 * n) + column[None, :]
    a_offset = row[:, None] * n + column[None, :]
    gate = tl.load(h_ptr + h_offset, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + h_offset + n, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_a_ptr + a_offset, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    activated = gate * sigmoid
    grad_gate = grad * up * (sigmoid + activated * (1.0 - sigmoid))
    tl.store(a_ptr + a_offset, (activated * up).to(a_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_h_ptr + h_offset, grad_gate.to(grad_h_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_h_ptr + h_offset + n, (grad * activated).to(grad_h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _bound_sum_rows_kernel(  # type: ignore[no-untyped-def]
    rows_ptr, out_ptr, tokens, d, K: tl.constexpr, BLOCK_D: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = column < d
    total = tl.zeros((BLOCK_D,), tl.float32)
    for k in tl.static_range(K):
        total += tl.load(rows_ptr + (k * tokens + token) * d + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * d + column, total.to(out_ptr.dtype.element_ty), mask=mask)


def _tile(n: int) -> tuple[int, int]:
    """Rows and columns of a tile for rows of ``n`` columns."""
    columns = min(triton.next_power_of_2(n), _TILE)
    return _TILE // columns, columns


def swiglu(h: Tensor) -> Tensor:
    """(…, 2n) contiguous pre-activation, gate | up -> (…, n); reads h and writes A once."""
    n = h.shape[-1] // 2
    rows = h.numel() // (2 * n)
    a = torch.empty((*h.shape[:-1], n), dtype=h.dtype, device=h.device)
    if rows:
        block_r, block_n = _tile(n)
        grid = (triton.cdiv(rows, block_r), triton.cdiv(n, block_n))
        _bound_swiglu_kernel[grid](h, a, rows, n, BLOCK_R=block_r, BLOCK_N=block_n, num_warps=_WARPS)
    return a


def swiglu_backward(h: Tensor, grad_a: Tensor) -> tuple[Tensor, Tensor]:
    """(…, 2n) pre-activation and (…, n) gradient, both contiguous -> A again (…, n) and dH (…, 2n).

    Reads h and grad_a once, writes A and dH once."""
    n = h.shape[-1] // 2
    rows = h.numel() // (2 * n)
    a, grad_h = torch.empty_like(grad_a), torch.empty_like(h)
    if rows:
        block_r, block_n = _tile(n)
        grid = (triton.cdiv(rows, block_r), triton.cdiv(n, block_n))
        _bound_swiglu_backward_kernel[grid](
            h, grad_a, a, grad_h, rows, n, BLOCK_R=block_r, BLOCK_N=block_n, num_warps=_WARPS
        )
    return a, grad_h


def sum_rows(rows: Tensor, k: int) -> Tensor:
    """(T·K, d) contiguous -> (T, d): the sum of rows t, T + t, 2·T + t, … in fp32; reads T·K·d, writes T·d."""
    tokens, d = rows.shape[0] // k, rows.shape[1]
    out = torch.empty((tokens, d), dtype=rows.dtype, device=rows.device)
    if tokens:
        # A power of two that divides d leaves no program half empty (d = 768, 1536); 8 elements for each thread.
        block = min(d & -d, 1024)
        if block < 256:
            block = min(triton.next_power_of_2(d), 1024)
        grid = (tokens, triton.cdiv(d, block))
        _bound_sum_rows_kernel[grid](rows, out, tokens, d, K=k, BLOCK_D=block, num_warps=max(block // 256, 1))
    return out
