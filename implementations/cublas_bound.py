"""The dense upper bound: cuBLAS batched GEMMs with perfectly balanced experts, alone or with glue at copy speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from harness.interface import Implementation, Layer, Point, Problem
from implementations._torch_ops import DENSE_GEMM_ROLES


def _swiglu(h: Tensor) -> Tensor:
    """(…, 2n) pre-activation, gate | up -> (…, n), computed in fp32."""
    gate, up = h.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(h.dtype)


def _swiglu_backward(h: Tensor, grad_a: Tensor) -> tuple[Tensor, Tensor]:
    """(…, 2n) pre-activation and (…, n) gradient -> the activation again (…, n) and the gradient of ``h`` (…, 2n)."""
    gate, up = h.float().chunk(2, dim=-1)
    grad = grad_a.float()
    sigmoid = torch.sigmoid(gate)
    activated = gate * sigmoid
    grad_gate = grad * up * (sigmoid + activated * (1 - sigmoid))
    return (activated * up).to(h.dtype), torch.cat((grad_gate, grad * activated), dim=-1).to(h.dtype)


def _sum_rows(rows: Tensor, k: int) -> Tensor:
    """(T·K, d) -> (T, d): the sum of rows t, T + t, 2·T + t, …, accumulated in fp32."""
    return rows.view(k, -1, rows.shape[-1]).sum(dim=0)


class _GemmOnly(torch.autograd.Function):
    """Six batched GEMMs and nothing else; A and dH come from the build."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, a: Tensor, grad_h: Tensor) -> Tensor:
        experts, _, d = w1.shape
        x3 = x.view(experts, -1, d)
        # The result is dropped: that it is computed and written is what the bound charges.
        torch.bmm(x3, w1.transpose(1, 2))
        ctx.save_for_backward(x3, w1, w2, a, grad_h)
        return torch.bmm(a, w2.transpose(1, 2)).view(-1, d)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x3, w1, w2, a, grad_h = ctx.saved_tensors
        grad_y = grads[0].contiguous().view_as(x3)
        torch.bmm(grad_y, w2)
        grad_w2 = torch.bmm(grad_y.transpose(1, 2), a)
        grad_x = torch.bmm(grad_h, w1).view(-1, x3.shape[-1])
        grad_w1 = torch.bmm(grad_h.transpose(1, 2), x3)
        return grad_x, grad_w1, grad_w2, None, None


class _GemmGlue(torch.autograd.Function):
    """The six GEMMs with activation and sums over contiguous memory; rows of X and dY come from the build."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, layer: BoundLayer) -> Tensor:
        h = torch.bmm(layer.x_rows, w1.transpose(1, 2))
        y = torch.bmm(layer.activation(h), w2.transpose(1, 2))
        ctx.save_for_backward(h, w1, w2)
        ctx.layer = layer
        return layer.sum_rows(y.view(-1, y.shape[-1]), layer.k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, w1, w2 = ctx.saved_tensors
        layer: BoundLayer = ctx.layer
        # Not the incoming (T, d) gradient: its expansion to rows is a gather, which the bound leaves out.
        grad_y = layer.grad_rows
        a, grad_h = layer.activation_backward(h, torch.bmm(grad_y, w2))
        grad_w2 = torch.bmm(grad_y.transpose(1, 2), a)
        grad_x_rows = torch.bmm(grad_h, w1)
        grad_x = layer.sum_rows(grad_x_rows.view(-1, w1.shape[-1]), layer.k)
        # Freed before the last GEMM, as a layer would.
        del grad_x_rows, a
        grad_w1 = torch.bmm(grad_h.transpose(1, 2), layer.x_rows)
        return grad_x, grad_w1, grad_w2, None


class BoundLayer(Layer):
    """Parameters W1 (E, 2n, d), gate rows then up rows, and W2 (E, d, n)."""

    def __init__(self, problem: Problem) -> None:
        shape = problem.shape
        self.n, self.k = shape.n, shape.K
        self.glue = problem.point.variant == "gemm_glue"
        self.w1 = torch.cat((problem.gate, problem.up), dim=1).detach().requires_grad_()
        self.w2 = problem.down.detach().clone().requires_grad_()
        self.activation: Callable[[Tensor], Tensor] = _swiglu
        self.activation_backward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = _swiglu_backward
        self.sum_rows: Callable[[Tensor, int], Tensor] = _sum_rows
        if problem.x.is_cuda:
            from implementations import _bound_kernels

            self.activation = _bound_kernels.swiglu
            self.activation_backward = _bound_kernels.swiglu_backward
            self.sum_rows = _bound_kernels.sum_rows
        x, grad_output = problem.x.detach(), problem.grad_output.detach()
        if self.glue:
            x, grad_output = x.repeat(shape.K, 1), grad_output.repeat(shape.K, 1)
        rows = shape.routed_rows // shape.E
        self.x_rows = x.view(shape.E, rows, shape.d)
        self.grad_rows = grad_output.contiguous().view(shape.E, rows, shape.d)
        if self.glue:
            self.notes = (
                "rows of X and dY are expanded from tokens before timing: the bound leaves the gather out",
                "activation and sums run at copy speed, each tensor read and written once",
            )
            return
        with torch.no_grad():
            h = torch.bmm(self.x_rows, self.w1.transpose(1, 2))
            self.a, self.grad_h = self.activation_backward(h, torch.bmm(self.grad_rows, self.w2))
        self.notes = ("only the six GEMMs are timed: A and dH are computed before timing",)

    def parameters(self) -> Sequence[Tensor]:
        return (self.w1, self.w2)

    def forward(self, x: Tensor) -> Tensor:
        """(T·K, d) -> (T·K, d) for ``gemm``, (T, d) -> (T, d) for ``gemm_glue``.

        Exact for the problem's own input and gradient only, from which the build drew A and dH, or the rows."""
        if self.glue:
            return _GemmGlue.apply(x, self.w1, self.w2, self)
        return _GemmOnly.apply(x, self.w1, self.w2, self.a, self.grad_h)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        grad_w1, grad_w2 = gradients
        return {"grad_gate": grad_w1[:, : self.n], "grad_up": grad_w1[:, self.n :], "grad_down": grad_w2}


class CublasBound(Implementation):
    """No MoE layer: the time that cuBLAS needs for its GEMMs when every expert gets the same number of rows."""

    name = "cublas_bound"
    label = "cuBLAS bound"
    upstream = "https://docs.nvidia.com/cuda/cublas/"
    licence = "proprietary (CUDA EULA)"
    operations = ("dense_bound",)
    devices = ("cuda", "cpu")
    dtypes = ("bfloat16", "float16", "float32")
    variants: ClassVar[dict[str, Sequence[str]]] = {"dense_bound": ("gemm", "gemm_glue")}
    kernel_roles = (
        ("bound_swiglu", "activation"),
        ("bound_sum_rows", "aggregation"),
        *DENSE_GEMM_ROLES,
        ("memset", "fill"),
    )

    def restriction(self, point: Point) -> str | None:
        if point.variant not in self.variants["dense_bound"]:
            return f"{self.label} offers the variants gemm and gemm_glue, not {point.variant!r}"
        return None

    def build(self, problem: Problem) -> Layer:
        return BoundLayer(problem)
