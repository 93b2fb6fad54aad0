"""PyTorch's own operators for the operations on single kernels: `grouped_mm` between gathers, sums and top-K."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.interface import KERNELS, ROUTER_CONVENTIONS, Implementation, Kernel, Layer, Point, Problem
from harness.routing import router_scores
from implementations import _torch_ops as ops

#: Names of the results of an operation that has several.
_OUTPUTS = {
    "grouped_gemm_gather_m": ("h", "a"),
    "hidden_gradient": ("grad_h", "scaled_a", "grad_scores"),
    "topk_router": ("scores", "indices"),
}


class _TorchKernel(Kernel):
    """Operands in canonical layout; W1 as gate rows, then up rows."""

    def __init__(self, problem: Problem) -> None:
        rows = problem.rows
        assert rows is not None
        self.rows, self.k, self.convention = rows, problem.shape.K, problem.point.layer.router_convention
        self.operands = dict(problem.operands)
        if "gate" in self.operands:
            self.operands["weight"] = torch.cat([self.operands.pop("gate"), self.operands.pop("up")], dim=1)
        on_device = problem.x.is_cuda and problem.x.dtype == torch.bfloat16
        self.gemm = ops.GroupedGemm(rows.expert_offsets, rows.gather.numel(), on_device)
        self.operation = problem.point.operation
        self.first = problem.point.variant == "dW1"
        in_order = "_in_order" if problem.point.variant == "contiguous" else ""
        self.run: Callable[[Tensor], Any] = getattr(self, f"{self.operation}{in_order}")

    def forward(self, x: Tensor) -> Any:
        return self.run(x)

    def grouped_gemm(self, x: Tensor) -> Tensor:
        return self.gemm.multiply(x, self.operands["weight"].transpose(1, 2))

    def grouped_gemm_gather_m(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.gemm.multiply(x.index_select(0, self.rows.gather), self.operands["weight"].transpose(1, 2))
        return h, ops.swiglu(h)

    def grouped_gemm_gather_k(self, x: Tensor) -> Tensor:
        gathered, rows = x.index_select(0, self.rows.gather), self.operands["rows"]
        return self.gemm.weight_gradient(rows, gathered) if self.first else self.gemm.weight_gradient(gathered, rows)

    def hidden_gradient(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_a = self.gemm.multiply(x.index_select(0, self.rows.gather), self.operands["down"])
        grad_scores, scaled_a, grad_h = ops.down_backward_epilogue(
            grad_a, self.operands["h"], self.operands["row_scores"]
        )
        return grad_h, scaled_a, grad_scores

    def down_aggregation(self, x: Tensor) -> Tensor:
        y = self.gemm.multiply(x, self.operands["down"].transpose(1, 2))
        return ops.weighted_sum(y, self.rows.reverse, self.operands["scores"])

    def expert_aggregation(self, x: Tensor) -> Tensor:
        return ops.weighted_sum(x, self.rows.reverse, self.operands["scores"])

    def expert_aggregation_in_order(self, x: Tensor) -> Tensor:
        tokens, k = self.operands["scores"].shape
        return torch.einsum("tk,tkd->td", self.operands["scores"].to(x.dtype), x.view(tokens, k, x.shape[1]))

    def topk_router(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = x.float()
        indices = torch.topk(logits, self.k, dim=-1).indices
        return router_scores(logits, indices, self.convention), indices

    def outputs(self, found: Any) -> dict[str, Tensor]:
        if isinstance(found, Tensor):
            return {"output": found}
        return dict(zip(_OUTPUTS[self.operation], found, strict=True))


class TorchKernels(Implementation):
    """What one writes with torch alone. Gathers and activations are kernels of their own."""

    name = "torch_kernels"
    label = "PyTorch"
    upstream = "https://github.com/pytorch/pytorch"
    licence = "BSD-3-Clause"
    distributions = ("torch",)
    operations = KERNELS
    devices = ("cuda", "cpu")
    dtypes = ("bfloat16", "float16", "float32")
    conventions = ROUTER_CONVENTIONS
    kernel_roles = ops.KERNEL_ROLES

    def restriction(self, point: Point) -> str | None:
        if point.operation in ("expert_aggregation", "topk_router"):
            return None
        return ops.grouped_mm_restriction(point.torch_dtype, point.shape.d, point.shape.n)

    def build(self, problem: Problem) -> Layer:
        return _TorchKernel(problem)
