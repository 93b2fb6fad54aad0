"""Megatron: the grouped MLP of Megatron-Core's MoE layer, put together from Transformer Engine's parts: permutation of
rows by Triton kernels, one GEMM for each expert on several streams, SwiGLU compiled by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from harness.interface import ROUTER_CONVENTIONS, Implementation, Layer, Point, Problem
from harness.routing import router_scores
from implementations._torch_ops import DENSE_GEMM_ROLES, ROUTER_ROLES


def _weighted_swiglu(h: Tensor, weights: Tensor) -> Tensor:
    """(R, 2n) in halves gate | up, (R,) fp32 -> (R, n): weight * silu(gate) * up."""
    gate, up = h.float().chunk(2, dim=-1)
    return (silu(gate) * up * weights[:, None]).to(h.dtype)


def _weighted_swiglu_backward(grad: Tensor, h: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both."""
    gate, up = h.float().chunk(2, dim=-1)
    sigmoid, grad = torch.sigmoid(gate), grad.float()
    grad_weights = (grad * gate * sigmoid * up).sum(-1)
    grad = grad * weights[:, None]
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad_gate, grad * gate * sigmoid], dim=-1).to(h.dtype), grad_weights


class _WeightedSwiGLU(torch.autograd.Function):
    """Keeps its inputs only. ``functions``: the two above, compiled or as they are."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weights: Tensor, functions: tuple[Callable[..., Any], ...]) -> Tensor:
        ctx.save_for_backward(h, weights)
        ctx.functions = functions
        out: Tensor = functions[0](h, weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_h, grad_weights = ctx.functions[1](grad, *ctx.saved_tensors)
        return grad_h, grad_weights, None


class MegatronLayer(Layer):
    """One parameter for each expert and projection, as `GroupedLinear` has them: (2n, d), gate rows then up rows, and
    (d, n)."""

    notes = (
        "Megatron-Core's layer put together from Transformer Engine's GroupedLinear, moe_permute_with_probs and "
        "moe_unpermute, without the rest of Megatron",
        "router in plain torch: logits in the layer's dtype, top-K and softmax in fp32",
        "routing weights multiply the activation, as in Megatron-Core",
        "tokens per expert are read on the host once per forward",
        "Transformer Engine's default: a cuBLAS GEMM for each expert, on several streams",
    )

    def __init__(self, problem: Problem, te: ModuleType) -> None:
        self.te, self.k = te, problem.shape.K
        self.convention = problem.point.layer.router_convention
        d, n, experts, x = problem.shape.d, problem.shape.n, problem.shape.E, problem.x
        options: dict[str, Any] = {"bias": False, "params_dtype": x.dtype, "device": x.device}
        self.fc1 = te.GroupedLinear(experts, d, 2 * n, **options)
        self.fc2 = te.GroupedLinear(experts, n, d, **options)
        with torch.no_grad():
            for e in range(experts):
                getattr(self.fc1, f"weight{e}").copy_(torch.cat([problem.gate[e], problem.up[e]]))
                getattr(self.fc2, f"weight{e}").copy_(problem.down[e])
        self.router = problem.router.detach().clone().requires_grad_()
        self.swiglu: tuple[Callable[..., Any], ...] = (_weighted_swiglu, _weighted_swiglu_backward)
        if x.is_cuda:
            self.swiglu = (
                torch.compile(_weighted_swiglu, dynamic=True),
                torch.compile(_weighted_swiglu_backward, dynamic=True),
            )

    def parameters(self) -> Sequence[Tensor]:
        experts = range(self.router.shape[0])
        weights = [getattr(linear, f"weight{e}") for linear in (self.fc1, self.fc2) for e in experts]
        return [*weights, self.router]

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        logits = (x @ self.router.T).float()
        indices = torch.topk(logits, self.k, dim=-1).indices
        weights = torch.zeros_like(logits).scatter(1, indices, router_scores(logits, indices, self.convention))
        chosen = torch.zeros_like(logits, dtype=torch.int32).scatter_(1, indices, 1)
        rows, row_weights, row_map = self.te.moe_permute_with_probs(x, weights, chosen, num_out_tokens=indices.numel())
        counts = chosen.sum(0).tolist()
        activated = _WeightedSwiGLU.apply(self.fc1(rows, counts), row_weights, self.swiglu)
        out: Tensor = self.te.moe_unpermute(
            self.fc2(activated, counts), row_map, restore_shape=x.shape, map_type="mask"
        )
        return out

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        experts = self.router.shape[0]
        grad_gate, grad_up = torch.stack(list(gradients[:experts])).chunk(2, dim=1)
        grad_down = torch.stack(list(gradients[experts : 2 * experts]))
        return {"grad_gate": grad_gate, "grad_up": grad_up, "grad_down": grad_down, "grad_router": gradients[-1]}


class Megatron(Implementation):
    name = "megatron"
    label = "Megatron"
    upstream = "https://github.com/NVIDIA/TransformerEngine"
    licence = "Apache-2.0"
    requires: ClassVar[dict[str, str]] = {
        "transformer_engine": "install requirements/megatron.txt line by line, as its comments say",
        "transformer_engine_torch": "install requirements/megatron.txt line by line, as its comments say",
    }
    distributions = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch", "triton")
    dtypes = ("bfloat16", "float16")
    conventions = ROUTER_CONVENTIONS
    no_graph_reason = "Transformer Engine's grouped GEMM takes the tokens per expert from the host"
    #: Its backward of the permutation is the kernel that sums up rows, that of the sum the one that permutes.
    kernel_roles = (
        ("_row_id_map", "router"),
        ("_unpermute_kernel", "aggregation"),
        ("_permute_kernel", "gather"),
        # Compiled SwiGLU, one kernel forward; backward a reduction for the weights and a pointwise one.
        *((part, "activation") for part in ("silu", "sigmoid")),
        ("cudafunctor_add<c10::bfloat16>", "dX"),
        *((part, "fill") for part in ("fillfunctor", "memset")),
        *DENSE_GEMM_ROLES,
        *ROUTER_ROLES,
    )

    def restriction(self, point: Point) -> str | None:
        # Its permutation refuses an output without rows.
        return None if point.shape.T else "Transformer Engine's permutation cannot run without tokens"

    def build(self, problem: Problem) -> Layer:
        import transformer_engine.pytorch as te

        layer = MegatronLayer(problem, te)
        # SwiGLU and the permutation compile and tune at their first call.
        layer.call_once(problem)
        return layer
