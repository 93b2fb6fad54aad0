"""The layer as one writes it first: a loop over experts in plain PyTorch, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS, Implementation, Layer, Problem
from harness.routing import expert_counts, router_scores
from harness.token_rounding import ROUNDINGS, TOP_K, GeneralRouting, token_rounding, top_k
from implementations._torch_ops import DENSE_GEMM_ROLES, ROUTER_ROLES, host_counts, sort_by_expert


class _LoopLayer(Layer):
    """Weights in canonical layout: gate, up (E, n, d), down (E, d, n), router (E, d)."""

    def __init__(self, problem: Problem) -> None:
        self.k = problem.shape.K
        self.convention = problem.point.layer.router_convention
        weights = (problem.gate, problem.up, problem.down, problem.router)
        self.gate, self.up, self.down, self.router = (w.detach().requires_grad_() for w in weights)

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate, self.up, self.down, self.router]

    def logits(self, x: Tensor) -> Tensor:
        return (x @ self.router.T).float()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
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
        tokens, pairs = rows.gather.split(counts), slots.split(counts)
        return _loop(x, self.gate, self.up, self.down, scores.reshape(-1), tokens, pairs)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("grad_gate", "grad_up", "grad_down", "grad_router"), gradients, strict=True))


class _RoundedLoopLayer(_LoopLayer):
    """The same with top-K rounded by the point's method."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.routing = problem.point.routing
        if self.routing.method == "stochastic":
            self.notes = ["stochastic rounding draws the same numbers in every call"]

    def round(self, x: Tensor) -> GeneralRouting:
        generator = torch.Generator(device=x.device).manual_seed(self.routing.seed)
        return token_rounding(
            self.logits(x), self.k, self.routing.m_tile, self.routing.method, self.convention, generator=generator
        )

    def forward(self, x: Tensor) -> Tensor:
        routing = self.round(x)
        tokens, pairs = _by_expert(routing, self.router.shape[0])
        return _loop(x, self.gate, self.up, self.down, routing.scores, tokens, pairs)

    def expert_indices(self, x: Tensor) -> Tensor:
        return top_k(self.logits(x.detach()), self.k).experts.view(-1, self.k)

    def kept_pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        routing = self.round(x.detach())
        return routing.experts, routing.token_offsets


class _RoutedLoopLayer(Layer):
    """The same experts with the routing given: gate, up (E, n, d), down (E, d, n), scores (P,)."""

    def __init__(self, problem: Problem) -> None:
        routing = problem.routing
        assert routing is not None
        weights = (problem.gate, problem.up, problem.down, routing.scores)
        self.gate, self.up, self.down, self.scores = (w.detach().requires_grad_() for w in weights)
        # Known before any call, so that no call reads counts on the host.
        self.tokens, self.pairs = _by_expert(routing, problem.shape.E)

    def use_routing(self, routing: GeneralRouting) -> None:
        self.scores = routing.scores
        self.tokens, self.pairs = _by_expert(routing, self.gate.shape[0])

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate, self.up, self.down, self.scores]

    def forward(self, x: Tensor) -> Tensor:
        return _loop(x, self.gate, self.up, self.down, self.scores, self.tokens, self.pairs)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("grad_gate", "grad_up", "grad_down", "grad_scores"), gradients, strict=True))


def _by_expert(routing: GeneralRouting, experts: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Of each expert the tokens and the pairs."""
    named = routing.experts.long()
    tokens = torch.arange(routing.token_offsets.numel() - 1, device=named.device)
    tokens = torch.repeat_interleave(tokens, routing.token_offsets.long().diff())
    pairs = torch.argsort(named, stable=True).split(expert_counts(named, experts).tolist())
    return [tokens[its] for its in pairs], pairs


def _loop(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    scores: Tensor,
    tokens: Sequence[Tensor],
    pairs: Sequence[Tensor],
) -> Tensor:
    """(T, d): one expert after the other, its tokens' results added up with the weights (P,) of its pairs."""
    out = torch.zeros_like(x, dtype=torch.float32)
    # unbind, not gate[e]: the gradient of each indexing would be as large as all experts together. An expert without
    # tokens takes part with zero rows, which makes its gradients exactly zero.
    experts = zip(gate.unbind(), up.unbind(), down.unbind(), tokens, pairs, strict=True)
    for its_gate, its_up, its_down, its_tokens, its_pairs in experts:
        expert_x = x.index_select(0, its_tokens)
        hidden = F.silu(F.linear(expert_x, its_gate)) * F.linear(expert_x, its_up)
        weight = scores.index_select(0, its_pairs)
        out = out.index_add_(0, its_tokens, F.linear(hidden, its_down) * weight[:, None])
    return out.to(x.dtype)


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
    routing_methods = (TOP_K, *ROUNDINGS)
    no_graph_reason = "the number of rows of each expert is read on the host, which a CUDA graph cannot capture"
    fake_tensors = True
    #: Weights and their gradients belong to the aggregation, which weighs rows in a kernel of its own.
    kernel_roles = (
        *DENSE_GEMM_ROLES,
        ("silu", "activation"),
        ("binaryfunctor<c10::bfloat16, c10::bfloat16, c10::bfloat16, at::native::binary_internal::mul", "activation"),
        ("vectorized_gather", "gather"),
        # Of one dimension: the gradients of scores. Of two: rows of the output, or of dX.
        ("indexfunclargeindex<float, int, unsigned int, 1", "router"),
        ("indexfunc", "aggregation"),
        ("binaryfunctor<float, float, float, at::native::binary_internal::mul", "aggregation"),
        ("sum_functor", "aggregation"),
        ("cudafunctor_add<c10::bfloat16>", "dX"),
        # The experts' gradients, one by one, become one tensor.
        ("catarray", "dW"),
        # Casts of logits, of the output and of its gradient.
        *((part, "pointwise") for part in ("bfloat16_copy_kernel", "lambda(float)")),
        *((part, "fill") for part in ("fillfunctor", "memset")),
        # The scores of an expert's rows are gathered one by one, their gradients added up likewise.
        ("cudafunctor_add<float>", "router"),
        *ROUTER_ROLES,
    )

    def build(self, problem: Problem) -> Layer:
        if problem.routing is not None:
            return _RoutedLoopLayer(problem)
        return _LoopLayer(problem) if problem.point.routing.method == TOP_K else _RoundedLoopLayer(problem)
