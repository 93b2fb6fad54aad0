"""Liger-Kernel's fused MoE: SonicMoE's algorithm in portable Triton, without Hopper's instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS, Implementation, Layer, Problem
from harness.routing import router_scores
from implementations._torch_ops import ROUTER_ROLES


class LigerLayer(Layer):
    """Liger's experts behind a router in plain torch. Weights: (E, 2n, d), gate rows then up rows; (E, d, n)."""

    notes = (
        "router in plain torch: logits in the layer's dtype, top-K and softmax in fp32; scores handed over in fp32, "
        "their gradients come back in the layer's dtype",
        "not reproducible bit for bit: the scores' gradients are added up by atomics",
    )

    def __init__(self, problem: Problem, experts: Callable[..., Tensor]) -> None:
        self.experts, self.k = experts, problem.shape.K
        self.convention = problem.point.layer.router_convention
        self.gate_up = torch.cat([problem.gate, problem.up], dim=1).detach().requires_grad_()
        self.down = problem.down.detach().requires_grad_()
        self.router = problem.router.detach().requires_grad_()

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate_up, self.down, self.router]

    def forward(self, x: Tensor) -> Tensor:
        logits = (x @ self.router.T).float()
        indices = torch.topk(logits, self.k, dim=-1).indices
        scores = router_scores(logits, indices, self.convention)
        return self.experts(x, self.gate_up, self.down, indices.int(), scores)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        grad_gate, grad_up = gradients[0].chunk(2, dim=1)
        return {"grad_gate": grad_gate, "grad_up": grad_up, "grad_down": gradients[1], "grad_router": gradients[2]}


class Liger(Implementation):
    name = "liger"
    label = "Liger-Kernel"
    upstream = "https://github.com/linkedin/Liger-Kernel"
    licence = "BSD-2-Clause"
    requires: ClassVar[dict[str, str]] = {"liger_kernel": "pip install --no-deps -r requirements/liger.txt"}
    distributions = ("liger-kernel", "triton")
    # Not fp32: its kernels multiply in TF32.
    dtypes = ("bfloat16", "float16")
    conventions = ROUTER_CONVENTIONS
    no_graph_reason = "Liger-Kernel reads the number of row tiles on the host in each forward"
    kernel_roles = (
        ("_fused_up_proj", "up"),
        ("_fused_down_proj", "down"),
        ("_moe_bwd_down_proj", "dH"),
        ("_moe_bwd_dw1", "dW1"),
        ("_moe_bwd_dw2", "dW2"),
        ("_moe_bwd_dx", "dX"),
        ("_token_gather_weighted_sum", "aggregation"),
        ("_moe_router_", "router"),
        # Autograd adds the router's term to that of the experts.
        *((f"cudafunctor_add<c10::{dtype}>", "dX") for dtype in ("bfloat16", "half")),
        *((part, "fill") for part in ("fillfunctor", "memset")),
        *((part, "router") for part in ("nvjet", "cublas", "gemm")),
        *ROUTER_ROLES,
    )

    def build(self, problem: Problem) -> Layer:
        from liger_kernel.ops import LigerFusedMoEFunction

        layer = LigerLayer(problem, LigerFusedMoEFunction.apply)
        # Its kernels tune themselves at their first call. Of all that they compile, the sum over the K rows of a token
        # takes the longest at wide layers: it is unrolled over d. `moebench warm` compiles ahead.
        layer.call_once(problem)
        return layer
