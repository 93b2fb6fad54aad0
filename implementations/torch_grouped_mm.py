"""What PyTorch offers for MoE layers out of the box: `torch.nn.functional.grouped_mm` between gathered rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

from harness.interface import ROUTER_CONVENTIONS, Implementation, Layer, Point, Problem
from harness.routing import router_scores
from implementations._torch_ops import (
    KERNEL_ROLES,
    Glue,
    build_with_glue,
    grouped_mm,
    grouped_mm_restriction,
    sort_by_expert,
    to_rows,
)


class _Gather(torch.autograd.Function):
    """(T, d) -> (TK, d). Backward: gather and sum through the reverse index, where autograd's own scatter would add
    with atomics in the layer's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Tensor, reverse: Tensor, glue: Glue) -> Tensor:
        ctx.save_for_backward(reverse)
        ctx.glue = glue
        return x.index_select(0, gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (reverse,) = ctx.saved_tensors
        return ctx.glue.row_sum(grad, reverse), None, None, None


class _SwiGLU(torch.autograd.Function):
    """(TK, 2n) in halves gate | up -> (TK, n)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, glue: Glue) -> Tensor:
        ctx.save_for_backward(h)
        ctx.glue = glue
        return glue.swiglu(h)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        return ctx.glue.swiglu_backward(h, grad), None


class _Aggregate(torch.autograd.Function):
    """(TK, d) and scores (T, K) -> (T, d); keeps Y for the scores' gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scores: Tensor, gather: Tensor, reverse: Tensor, glue: Glue) -> Tensor:
        ctx.save_for_backward(y, scores, gather, reverse)
        ctx.glue = glue
        return glue.weighted_sum(y, reverse, scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        y, scores, gather, reverse = ctx.saved_tensors
        row_scores = to_rows(scores, reverse)
        grad_y, grad_scores = ctx.glue.weighted_sum_backward(grad.contiguous(), y, gather, reverse, row_scores)
        return grad_y, grad_scores, None, None, None


def _grouped(a: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """(TK, k) × (E, k, m) -> (TK, m). Fake tensors that `grouped_mm` refuses: balanced rows."""
    if is_fake(a) and a.dtype != torch.bfloat16:
        sizes = [rows.shape[0] for rows in a.tensor_split(weights.shape[0])]
        return torch.cat([rows @ weight for rows, weight in zip(a.split(sizes), weights.unbind(), strict=True)])
    return grouped_mm(a, weights, offs=ends)


class _GroupedLayer(Layer):
    """Weights: up-projection (E, 2n, d) in halves gate | up, down (E, d, n), router (E, d)."""

    def __init__(self, problem: Problem, glue: Glue) -> None:
        self.k = problem.shape.K
        self.convention = problem.point.layer.router_convention
        self.glue = glue
        self.gate_up = torch.cat([problem.gate, problem.up], dim=1).detach().requires_grad_()
        self.down = problem.down.detach().requires_grad_()
        self.router = problem.router.detach().requires_grad_()

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate_up, self.down, self.router]

    def forward(self, x: Tensor) -> Tensor:
        logits = (x @ self.router.T).float()
        indices = torch.topk(logits.detach(), self.k, dim=-1).indices
        scores = router_scores(logits, indices, self.convention)
        rows = sort_by_expert(indices, self.router.shape[0])
        ends = rows.offsets[1:]
        gathered = _Gather.apply(x, rows.gather, rows.reverse, self.glue)
        h = _grouped(gathered, self.gate_up.transpose(1, 2), ends)
        y = _grouped(_SwiGLU.apply(h, self.glue), self.down.transpose(1, 2), ends)
        return _Aggregate.apply(y, scores, rows.gather, rows.reverse, self.glue)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        grad_gate, grad_up = gradients[0].chunk(2, dim=1)
        return {"grad_gate": grad_gate, "grad_up": grad_up, "grad_down": gradients[1], "grad_router": gradients[2]}


class TorchGroupedMM(Implementation):
    """Sort by expert, gather rows, `grouped_mm`, SwiGLU, `grouped_mm`, gather-and-sum; no host synchronisation.

    Gathered X, H, A and Y are kept for the backward, as autograd of these operators has it. The glue is compiled on a
    GPU. Weight gradients of experts without tokens are `grouped_mm`'s own, and are left as they come.
    """

    name = "torch_grouped_mm"
    label = "PyTorch grouped GEMM"
    upstream = "https://github.com/pytorch/pytorch"
    licence = "BSD-3-Clause"
    distributions = ("torch",)
    devices = ("cuda", "cpu")
    dtypes = ("bfloat16", "float16", "float32")
    conventions = ROUTER_CONVENTIONS
    fake_tensors = True
    kernel_roles = KERNEL_ROLES

    def restriction(self, point: Point) -> str | None:
        if point.device == "cuda" and point.dtype != "bfloat16":
            return f"on a GPU torch's grouped_mm computes in bfloat16 only, not in {point.dtype}"
        return grouped_mm_restriction(point.torch_dtype, point.shape.d, point.shape.n)

    def build(self, problem: Problem) -> Layer:
        return build_with_glue(problem, lambda glue: _GroupedLayer(problem, glue))
