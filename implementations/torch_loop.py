"""The layer as one writes it first: a loop over experts in plain PyTorch, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS, Implementation, Layer, Problem
from harness.routing import expert_counts, router_scores
from implementations._torch_ops import host_counts, sort_by_expert


class _LoopLayer(Layer):
    """Weights in canonical layout: gate, up (E, n, d), down (E, d, n), router (E, d)."""

    def __init__(self, problem: Problem) -> None:
        self.k = problem.shape.K
        self.convention = problem.point.layer.router_convention
        weights = (problem.gate, problem.up, problem.down, problem.router)
        self.gate, self.up, self.down, self.router = (w.detach().requires_grad_() for w in weights)

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate, self.up, self.down, self.router]

    def forward(self, x: Tensor) -> Tensor:
        logits = (x @ self.router.T).float()
        indices = torch.topk(logits.detach(), self.k, dim=-1).indices
        scores = router_scores(logits, indices, self.convention)
        with torch.no_grad():
            rows = sort_by_expert(indices, self.router.shape[0])
            counts = host_counts(rows.offsets, indices.numel())
            # The (token, k) of each row, to pick its score.
            slots = torch.empty_like(rows.gather).scatter_(
                0,
                rows.reverse.reshape(-1).long(),
                torch.arange(indices.numel(), dtype=torch.int32, device=x.device),
            )
        out = torch.zeros_like(x, dtype=torch.float32)
        # unbind, not gate[e]: the gradient of each indexing would be as large as all experts together. An expert
        # without tokens takes part with zero rows, which makes its gradients exactly zero.
        experts = zip(
            self.gate.unbind(),
            self.up.unbind(),
            self.down.unbind(),
            rows.gather.split(counts),
            slots.split(counts),
            strict=True,
        )
        for gate, up, down, tokens, slot in experts:
            expert_x = x.index_select(0, tokens)
            hidden = F.silu(F.linear(expert_x, gate)) * F.linear(expert_x, up)
            weight = scores.reshape(-1).index_select(0, slot)
            out = out.index_add_(0, tokens, F.linear(hidden, down) * weight[:, None])
        return out.to(x.dtype)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("grad_gate", "grad_up", "grad_down", "grad_router"), gradients, strict=True))


class _RoutedLoopLayer(Layer):
    """The same experts with the routing given: gate, up (E, n, d), down (E, d, n), scores (P,)."""

    def __init__(self, problem: Problem) -> None:
        routing = problem.routing
        assert routing is not None
        weights = (problem.gate, problem.up, problem.down, routing.scores)
        self.gate, self.up, self.down, self.scores = (w.detach().requires_grad_() for w in weights)
        experts = routing.experts.long()
        tokens = torch.arange(problem.shape.T, device=experts.device)
        tokens = torch.repeat_interleave(tokens, routing.token_offsets.long().diff())
        # Known before any call, so that no call reads counts on the host.
        counts = expert_counts(experts, problem.shape.E).tolist()
        self.pairs = torch.argsort(experts, stable=True).split(counts)
        self.tokens = [tokens[pairs] for pairs in self.pairs]

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate, self.up, self.down, self.scores]

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        experts = zip(self.gate.unbind(), self.up.unbind(), self.down.unbind(), self.tokens, self.pairs, strict=True)
        for gate, up, down, tokens, pairs in experts:
            expert_x = x.index_select(0, tokens)
            hidden = F.silu(F.linear(expert_x, gate)) * F.linear(expert_x, up)
            weight = self.scores.index_select(0, pairs)
            out = out.index_add_(0, tokens, F.linear(hidden, down) * weight[:, None])
        return out.to(x.dtype)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("grad_gate", "grad_up", "grad_down", "grad_scores"), gradients, strict=True))


class TorchLoop(Implementation):
    """A loop over experts: gather the expert's tokens, three linear layers, weighted `index_add_` in fp32.

    The rows of each expert are read on the host (one synchronisation a forward), so a CUDA graph cannot capture it.
    Under fake tensors, which have no values, every expert is taken to receive TK / E rows (`_torch_ops.host_counts`):
    the sizes that the layer holds depend on the sum of the counts only, so the held memory is that of any routing.
    """

    name = "torch_loop"
    label = "PyTorch loop"
    upstream = "https://github.com/pytorch/pytorch"
    licence = "BSD-3-Clause"
    distributions = ("torch",)
    operations = ("moe_layer", "routed_experts")
    devices = ("cuda", "cpu")
    dtypes = ("bfloat16", "float16", "float32")
    conventions = ROUTER_CONVENTIONS
    no_graph_reason = "the number of rows of each expert is read on the host, which a CUDA graph cannot capture"
    fake_tensors = True

    def build(self, problem: Problem) -> Layer:
        return _LoopLayer(problem) if problem.routing is None else _RoutedLoopLayer(problem)
