"""The steps that SonicMoE fuses into its GEMMs, as kernels of their own: the gather as a copy, the activation, dS, A'
and dSwiGLU. For implementations between whose GEMMs they stand, and for ablations.

All are memory-bound: a program takes some rows of one block of columns, 16 bytes a thread at once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from implementations.sonicmoe_triton.activations import activate, activation_backward
from implementations.sonicmoe_triton.aggregation import column_block
from implementations.sonicmoe_triton.launching import cdiv, launch

#: Elements that a program moves at once: of a copy, where fp32 intermediates share the registers, and where there are
#: six tensors of them.
COPIED, COMPUTED, ALL_COMPUTED = 8192, 4096, 2048
WARPS = 4


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
def _apart_gather_kernel(  # type: ignore[no-untyped-def]
    x, gather, out, rows, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # x (T, D), gather (R,) -> out (R, D)
    row, column, inside = _block(rows, D, ROWS, BLOCK)
    token = tl.load(gather + row, mask=row < rows, other=0).to(tl.int64)
    values = tl.load(x + token[:, None] * D + column[None, :], mask=inside, other=0.0)
    tl.store(out + row[:, None] * D + column[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _apart_swiglu_kernel(  # type: ignore[no-untyped-def]
    h, a, rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # h (R, 2N) -> a (R, N)
    row, column, inside = _block(rows, N, ROWS, BLOCK)
    gate, up = _load_halves(h, row, column, inside, N)
    out = activate(gate, up, "swiglu").to(a.dtype.element_ty)
    tl.store(a + row[:, None] * N + column[None, :], out, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _apart_scaled_swiglu_kernel(  # type: ignore[no-untyped-def]
    h, scores, scaled_a, rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    # h (R, 2N), scores (R,) -> scaled_a (R, N) = s a
    row, column, inside = _block(rows, N, ROWS, BLOCK)
    gate, up = _load_halves(h, row, column, inside, N)
    score = tl.load(scores + row, mask=row < rows, other=0.0)
    out = (activate(gate, up, "swiglu") * score[:, None]).to(scaled_a.dtype.element_ty)
    tl.store(scaled_a + row[:, None] * N + column[None, :], out, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _apart_score_gradient_kernel(  # type: ignore[no-untyped-def]
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
def _apart_swiglu_backward_kernel(  # type: ignore[no-untyped-def]
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
def _apart_epilogue_kernel(  # type: ignore[no-untyped-def]
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
    _launch(_apart_gather_kernel, (x.contiguous(), gather, out), ("D", d), rows, COPIED)
    return out


def swiglu(h: Tensor) -> Tensor:
    """(R, 2n) in halves gate | up -> A (R, n)."""
    rows, n = h.shape[0], h.shape[1] // 2
    a = h.new_empty(rows, n)
    _launch(_apart_swiglu_kernel, (h, a), ("N", n), rows, COMPUTED)
    return a


def scaled_swiglu(h: Tensor, row_scores: Tensor) -> Tensor:
    """(R, 2n), (R,) -> A' = S·A (R, n)."""
    rows, n = h.shape[0], h.shape[1] // 2
    scaled_a = h.new_empty(rows, n)
    _launch(_apart_scaled_swiglu_kernel, (h, row_scores, scaled_a), ("N", n), rows, COMPUTED)
    return scaled_a


def score_gradient(grad_a: Tensor, h: Tensor) -> Tensor:
    """dA' (R, n), H (R, 2n) -> dS = rowsum(dA' ∘ A) (R,) fp32."""
    rows, n = grad_a.shape
    grad_scores = torch.empty(rows, dtype=torch.float32, device=h.device)
    _launch(_apart_score_gradient_kernel, (grad_a, h, grad_scores), ("N", n), rows, COMPUTED, by_row=True)
    return grad_scores


def swiglu_backward(grad_a: Tensor, h: Tensor, row_scores: Tensor) -> Tensor:
    """dA' (R, n), H (R, 2n), S (R,) -> dH = dSwiGLU(S·dA', H) (R, 2n)."""
    rows, n = grad_a.shape
    grad_h = torch.empty_like(h)
    _launch(_apart_swiglu_backward_kernel, (grad_a, h, row_scores, grad_h), ("N", n), rows, COMPUTED)
    return grad_h


def epilogue(grad_a: Tensor, h: Tensor, row_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(dH (R, 2n), A' (R, n), dS (R,) fp32) of dA' (R, n), H (R, 2n), S (R,): the three above in one kernel."""
    rows, n = grad_a.shape
    grad_h, scaled_a = torch.empty_like(h), torch.empty_like(grad_a)
    grad_scores = torch.empty(rows, dtype=torch.float32, device=h.device)
    arguments = (grad_a, h, row_scores, grad_h, scaled_a, grad_scores)
    _launch(_apart_epilogue_kernel, arguments, ("N", n), rows, ALL_COMPUTED, by_row=True)
    return grad_h, scaled_a, grad_scores
