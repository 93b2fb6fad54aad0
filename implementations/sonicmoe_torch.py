"""SonicMoE's memory-efficient algorithm (arXiv 2512.14080) in plain PyTorch: one autograd.Function, router included.

It keeps X, H, the scores and int32 metadata for the backward, nothing of size TK·d, and recomputes no GEMM. The
gathers are separate passes here (a fused kernel gathers while loading), so the temporaries are larger and the time
longer than the algorithm's; what is held between forward and backward is exactly the algorithm's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd.function import once_differentiable

from harness.interface import ROUTER_CONVENTIONS, Implementation, Layer, Problem
from implementations._torch_ops import (
    DENSE_GEMM_ROLES,
    KERNEL_ROLES,
    Glue,
    GroupedGemm,
    build_with_glue,
    grouped_mm_restriction,
    sort_by_expert,
    to_rows,
)


def _on_device(x: Tensor, d: int, n: int) -> bool:
    """Whether `grouped_mm` with device offsets computes this layer: in bf16, its alignment permitting, on a GPU and
    (since they cannot tell counts) for fake tensors. Everything else loops over experts."""
    if x.dtype != torch.bfloat16 or grouped_mm_restriction(x.dtype, d, n) is not None:
        return False
    return x.device.type == "cuda" or is_fake(x)


class SonicMoEFunction(torch.autograd.Function):
    """``apply(x, w1, w2, router, k, convention, glue) -> (T, d)``.

    Shapes: x (T, d), w1 (E, 2n, d) in halves gate | up, w2 (E, d, n), router (E, d). Held for the backward beside the
    inputs: H (TK, 2n), S fp32, expert indices, gather and reverse index (16 bytes for each of TK), offsets (E+1); for
    ``softmax_topk`` also the probabilities (T, E) fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, router: Tensor, k: int, convention: str, glue: Glue
    ) -> Tensor:
        # 1. Router: logits in the layer's dtype, compared and normalised in fp32.
        logits = (x @ router.T).float()
        chosen_logits, indices = torch.topk(logits, k, dim=-1)
        if convention == "softmax_topk":
            probabilities = torch.softmax(logits, dim=-1)
            scores = torch.gather(probabilities, 1, indices)
        else:
            # Softmax over all and renormalised is the softmax over the chosen ones: E logits need not be kept.
            probabilities = None
            scores = torch.softmax(chosen_logits, dim=-1)
        # 2. Metadata.
        indices = indices.int()
        del logits, chosen_logits
        rows = sort_by_expert(indices, router.shape[0])
        gemm = GroupedGemm(rows.offsets, indices.numel(), _on_device(x, w2.shape[1], w2.shape[2]))
        # 3. Up-projection and activation.
        h = gemm.multiply(x.index_select(0, rows.gather), w1.transpose(1, 2))
        a = glue.swiglu(h)
        # 4. Down-projection, 5. aggregation.
        y = gemm.multiply(a, w2.transpose(1, 2))
        del a
        out = glue.weighted_sum(y, rows.reverse, scores)
        ctx.save_for_backward(
            x, w1, w2, router, h, scores, indices, rows.gather, rows.reverse, rows.offsets, probabilities
        )
        ctx.glue = glue
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, router, h, scores, indices, gather, reverse, offsets, probabilities = ctx.saved_tensors
        glue: Glue = ctx.glue
        gemm = GroupedGemm(offsets, gather.numel(), _on_device(x, w2.shape[1], w2.shape[2]))
        # 6. dA′ = dO·W2, then dS = rowsum(dA′ ∘ A), A′ = S·A and dH, without Y and without dY.
        grad_rows = grad_out.index_select(0, gather)
        grad_a = gemm.multiply(grad_rows, w2)
        grad_row_scores, scaled_a, grad_h = glue.down_backward_epilogue(grad_a, h, to_rows(scores, reverse))
        del grad_a
        # 7. dW2.
        grad_w2 = gemm.weight_gradient(grad_rows, scaled_a)
        del grad_rows, scaled_a
        # 11. Router: dS -> dlogits; only the chosen logits matter where the softmax runs over them.
        grad_scores = grad_row_scores.index_select(0, reverse.reshape(-1)).view_as(scores)
        if probabilities is None:
            grad_chosen = scores * (grad_scores - (grad_scores * scores).sum(-1, keepdim=True))
            grad_logits = torch.zeros((x.shape[0], router.shape[0]), dtype=x.dtype, device=x.device)
            grad_logits.scatter_(1, indices.long(), grad_chosen.to(x.dtype))
        else:
            inner = (grad_scores * scores).sum(-1, keepdim=True)
            grad_logits = (probabilities * -inner).scatter_add_(1, indices.long(), scores * grad_scores).to(x.dtype)
        grad_router = grad_logits.T @ x
        router_term = grad_logits @ router
        del grad_logits
        # 8. dX̃, 9. dX.
        grad_gathered_x = gemm.multiply(grad_h, w1)
        grad_x = glue.row_sum_plus(grad_gathered_x, reverse, router_term)
        del grad_gathered_x, router_term
        # 10. dW1.
        grad_w1 = gemm.weight_gradient(grad_h, x.index_select(0, gather))
        return grad_x, grad_w1, grad_w2, grad_router, None, None, None


class _SonicLayer(Layer):
    """Weights: w1 (E, 2n, d) in halves gate | up, w2 (E, d, n), router (E, d)."""

    def __init__(self, problem: Problem, glue: Glue) -> None:
        self.k = problem.shape.K
        self.convention = problem.point.layer.router_convention
        self.glue = glue
        self.w1 = torch.cat([problem.gate, problem.up], dim=1).detach().requires_grad_()
        self.w2 = problem.down.detach().requires_grad_()
        self.router = problem.router.detach().requires_grad_()
        if not _on_device(problem.x, problem.shape.d, problem.shape.n):
            self.notes = ["grouped GEMMs run as a loop over experts with counts read on the host"]

    def parameters(self) -> Sequence[Tensor]:
        return [self.w1, self.w2, self.router]

    def forward(self, x: Tensor) -> Tensor:
        return SonicMoEFunction.apply(x, self.w1, self.w2, self.router, self.k, self.convention, self.glue)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        grad_gate, grad_up = gradients[0].chunk(2, dim=1)
        return {"grad_gate": grad_gate, "grad_up": grad_up, "grad_down": gradients[1], "grad_router": gradients[2]}


class SonicMoETorch(Implementation):
    """The algorithm in PyTorch operators: on a GPU in bf16 `grouped_mm` with device offsets and compiled glue, no host
    synchronisation; elsewhere a loop over experts."""

    name = "sonicmoe_torch"
    label = "SonicMoE algorithm (PyTorch)"
    upstream = "https://arxiv.org/abs/2512.14080"
    licence = "Apache-2.0"
    distributions = ("torch",)
    devices = ("cuda", "cpu")
    dtypes = ("bfloat16", "float16", "float32")
    conventions = ROUTER_CONVENTIONS
    fake_tensors = True
    kernel_roles = KERNEL_ROLES

    def __init__(self) -> None:
        self._loops = False

    def kernel_role(self, name: str) -> str | None:
        # The loop multiplies with the same kernels as the router.
        dense = next((role for part, role in DENSE_GEMM_ROLES if part in name.lower()), None)
        return dense if self._loops and dense else super().kernel_role(name)

    def build(self, problem: Problem) -> Layer:
        self._loops = not _on_device(problem.x, problem.shape.d, problem.shape.n)
        return build_with_glue(problem, lambda glue: _SonicLayer(problem, glue))
