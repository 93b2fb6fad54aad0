"""A right layer and a plugin around it, for plugins that fail in one way each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.interface import Implementation, Layer, Problem
from harness.routing import router_scores


class RightLayer(Layer):
    def __init__(self, problem: Problem) -> None:
        self.k = problem.shape.K
        weights = (problem.gate, problem.up, problem.down, problem.router)
        self.gate, self.up, self.down, self.router = (w.detach().requires_grad_() for w in weights)

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate, self.up, self.down, self.router]

    def forward(self, x: Tensor) -> Tensor:
        logits = (x @ self.router.T).float()
        indices = torch.topk(logits, self.k, dim=-1).indices
        weights = torch.zeros_like(logits).scatter(1, indices, router_scores(logits, indices, "topk_softmax"))
        out = torch.zeros_like(x, dtype=torch.float32)
        for e in range(self.router.shape[0]):
            hidden = F.silu(F.linear(x, self.gate[e])) * F.linear(x, self.up[e])
            out = out + weights[:, e, None] * F.linear(hidden, self.down[e])
        return out.to(x.dtype)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("grad_gate", "grad_up", "grad_down", "grad_router"), gradients, strict=True))


class FakeBase(Implementation):
    name, label, upstream, licence = "fake_base", "Fake", "none", "none"
    devices, dtypes = ("cpu",), ("float32", "bfloat16")

    def build(self, problem: Problem) -> Layer:
        return RightLayer(problem)
