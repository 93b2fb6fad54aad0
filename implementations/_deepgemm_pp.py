"""DeepGEMM++ for autograd: SonicMoE's path with its fusions taken apart. Every GEMM is DeepGEMM's, over gathered and
padded rows; router, gather, activation and aggregation are Triton kernels of their own.

Between the passes lie X (the caller's), H, the scores and the routing; gathered X is made again for dW1, and neither Y
nor dY is needed: dS = rowsum(dA' ∘ A) with dA' = dO·W2.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from implementations._deepgemm_ops import ALIGNMENT, multiply, multiply_back, weight_gradient
from implementations._deepgemm_pp_kernels import Padded, pad
from implementations._separate_kernels import gather_rows, scaled_swiglu, score_gradient, swiglu, swiglu_backward
from implementations.sonicmoe_triton.aggregation import aggregate
from implementations.sonicmoe_triton.metadata import route
from implementations.sonicmoe_triton.router import router_backward, top_k


def choose_experts(x: Tensor, router: Tensor, k: int, convention: str) -> Tensor:
    """(T, K) experts of each token, as `moe_layer` chooses them."""
    return top_k(torch.mm(x, router.t()), k, convention)[1]


def moe_layer(
    x: Tensor, w1: Tensor, w2: Tensor, router: Tensor, k: int, convention: str, deep_gemm: ModuleType
) -> Tensor:
    """(T, d) -> (T, d), differentiable with respect to every tensor given.

    Args:
        w1: (E, 2n, d), gate rows then up rows. w2: (E, d, n). router: (E, d).
        convention: see `harness.interface.LayerSpec`.
    """
    out: Tensor = _LayerFunction.apply(x, w1, w2, router, k, convention, deep_gemm)
    return out


class _LayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, router: Tensor, k: int, convention: str, deep_gemm: ModuleType
    ) -> Tensor:
        x = x.contiguous()
        logits = torch.mm(x, router.t())
        scores, experts = top_k(logits, k, convention)
        padded = pad(*route(scores, experts, router.shape[0], ALIGNMENT))
        h = multiply(deep_gemm, gather_rows(x, padded.routing.gather), w1, padded.expert_of_row)
        y = multiply(deep_gemm, swiglu(h), w2, padded.expert_of_row)
        out = aggregate(y, padded.routing, weights=padded.scores)
        kept = logits if convention == "softmax_topk" else None
        ctx.save_for_backward(x, w1, w2, router, h, scores, experts, kept)
        ctx.padded, ctx.convention, ctx.deep_gemm = padded, convention, deep_gemm
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, w1, w2, router, h, scores, experts, logits = ctx.saved_tensors
        padded: Padded = ctx.padded
        deep_gemm, expert_of_row = ctx.deep_gemm, padded.expert_of_row

        grad_rows = gather_rows(grad_out, padded.routing.gather)
        grad_a = multiply_back(deep_gemm, grad_rows, w2, expert_of_row)
        grad_scores = score_gradient(grad_a, h).index_select(0, padded.routing.reverse).view_as(scores)
        scaled_a = scaled_swiglu(h, padded.scores)
        grad_h = swiglu_backward(grad_a, h, padded.scores)
        del grad_a
        grad_w2 = weight_gradient(deep_gemm, grad_rows, scaled_a, padded.counts, padded.counts_host)
        del grad_rows, scaled_a

        grad_logits = router_backward(scores, experts, grad_scores, ctx.convention, logits, router.shape[0], x.dtype)
        grad_router = torch.mm(grad_logits.t(), x)
        grad_x = aggregate(
            multiply_back(deep_gemm, grad_h, w1, expert_of_row),
            padded.routing,
            base=torch.mm(grad_logits, router),
            over_base=True,
        )
        grad_w1 = weight_gradient(
            deep_gemm, grad_h, gather_rows(x, padded.routing.gather), padded.counts, padded.counts_host
        )
        return grad_x, grad_w1, grad_w2, grad_router, None, None, None
