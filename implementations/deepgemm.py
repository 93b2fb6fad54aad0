"""DeepGEMM-pt: DeepGEMM's BF16 grouped GEMMs for every GEMM of the experts, everything else standard PyTorch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from harness.interface import Implementation, Layer, Point, Problem
from implementations._deepgemm_ops import ALIGNMENT, load, multiply, multiply_back, weight_gradient
from implementations._torch_ops import ROUTER_ROLES, sort_by_expert


class _Groups(NamedTuple):
    """Where each expert's rows lie once every expert is padded to a multiple of `ALIGNMENT`.

    Attributes:
        row_of_pair: (T, K) int64, the row of each (token, k).
        token_of_row: (M,) int32, the token of each row; padding repeats a token of its own expert.
        expert_of_row: (M,) int32, padding rows included.
        padded: (E,) int32 row counts on the device; padded_host: the same numbers as a list.
    """

    row_of_pair: Tensor
    token_of_row: Tensor
    expert_of_row: Tensor
    padded: Tensor
    padded_host: list[int]


def _groups(indices: Tensor, experts: int) -> _Groups:
    """Sort (T, K) expert indices by expert and pad; synchronises with the host once."""
    order = sort_by_expert(indices, experts)
    starts, ends = order.offsets[:-1], order.offsets[1:]
    padded = (ends - starts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    # The grouped GEMM over varying K takes its group sizes from a host list, so no arrangement avoids this.
    padded_host: list[int] = padded.tolist()
    rows = sum(padded_host)
    shift = padded.cumsum(0, dtype=torch.int32) - padded - starts
    # Padding carries its expert's index, not -1: no tile is left undefined.
    expert_of_row = torch.repeat_interleave(
        torch.arange(experts, dtype=torch.int32, device=indices.device), padded, output_size=rows
    )
    # Padding needs no zeros: with weight zero its activation and the gradient of H vanish, and one factor of each
    # product that it adds to a weight gradient is zero. A token of its own expert keeps infinities where they are.
    unpadded = torch.arange(rows, dtype=torch.int32, device=indices.device) - shift.index_select(0, expert_of_row)
    unpadded = torch.minimum(unpadded, ends.index_select(0, expert_of_row) - 1)
    return _Groups(
        row_of_pair=order.reverse.long() + shift[indices],
        token_of_row=order.gather.index_select(0, unpadded),
        expert_of_row=expert_of_row,
        padded=padded,
        padded_host=padded_host,
    )


def _take(x: Tensor, groups: _Groups) -> Tensor:
    """(T, d) -> (M, d): each row its token's."""
    return x.index_select(0, groups.token_of_row)


def _sum(rows: Tensor, groups: _Groups) -> Tensor:
    """(M, d) -> (T, d): the sum over each token's K rows; padding falls away."""
    of_pair = rows.index_select(0, groups.row_of_pair.reshape(-1))
    return of_pair.view(*groups.row_of_pair.shape, rows.shape[1]).sum(dim=1)


# `_Gather` and `_Aggregate` are each other's gradients (where padding has weight zero). Autograd's own gradient of an
# indexed read adds with bf16 atomics instead, which is slow and neither exact nor reproducible.


class _Gather(torch.autograd.Function):
    """(T, d) -> (M, d) rows by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: _Groups) -> Tensor:
        ctx.groups = groups
        return _take(x, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _sum(grads[0], ctx.groups), None


class _Aggregate(torch.autograd.Function):
    """(M, d) weighted rows by expert -> (T, d)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: _Groups) -> Tensor:
        ctx.groups = groups
        return _sum(rows, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _take(grads[0], ctx.groups), None


class _WeightedSwiGLU(torch.autograd.Function):
    """(M, 2n) in halves gate | up and fp32 weights (M,) -> (M, n): weight * silu(gate) * up.

    Keeps its inputs only, as `silu` itself does. Operands that are strided or broadcast cost an elementwise kernel its
    vector loads, hence the order of the products."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(h, weights)
        gate, up = h.chunk(2, dim=-1)
        return silu(gate).mul_(up).mul_(weights.to(h.dtype).unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h, weights = ctx.saved_tensors
        gate, up = h.chunk(2, dim=-1)
        column = weights.to(h.dtype).unsqueeze(-1)
        grad, activated = grads[0], silu(gate)
        grad_activated = grad * up
        grad_weights = (grad_activated * activated).sum(dim=-1, dtype=weights.dtype)
        # Its halves are written where they belong, which saves a concatenation.
        grad_h = torch.empty_like(h)
        grad_gate, grad_up = grad_h.chunk(2, dim=-1)
        torch.mul(activated.mul_(grad), column, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad_activated.mul_(column), gate, grad_input=grad_gate)
        return grad_h, grad_weights


class _GroupedLinear(torch.autograd.Function):
    """(M, k) rows by expert times (E, n, k) weights -> (M, n), forward and both gradients in DeepGEMM."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: _Groups, deep_gemm: ModuleType) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.groups, ctx.deep_gemm = groups, deep_gemm
        return multiply(deep_gemm, rows, weight, groups.expert_of_row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        groups: _Groups = ctx.groups
        grad = grads[0].contiguous()
        grad_rows = multiply_back(ctx.deep_gemm, grad, weight, groups.expert_of_row)
        grad_weight = weight_gradient(ctx.deep_gemm, grad, rows, groups.padded, groups.padded_host)
        return grad_rows, grad_weight, None, None


class DeepGemmLayer(Layer):
    """Parameters W1 (E, 2n, d), gate rows then up rows, W2 (E, d, n) and the router (E, d)."""

    notes = (
        f"every expert's rows are padded to a multiple of {ALIGNMENT}",
        "routing weights multiply the activation before the down-projection (equal in exact arithmetic to weighting "
        "its output), so no tensor of routed rows times d is kept for the router's gradient",
        "group sizes are read back to the host once per forward: the grouped GEMM over varying K takes a host list",
        "weight gradients accumulate in bf16 onto a zero-filled output (fp32 within the GEMM), since that kernel "
        "always adds to its output",
    )

    def __init__(self, problem: Problem, deep_gemm: ModuleType) -> None:
        self.deep_gemm = deep_gemm
        self.n, self.k, self.experts = problem.shape.n, problem.shape.K, problem.shape.E
        self.w1 = torch.cat((problem.gate, problem.up), dim=1).detach().requires_grad_()
        self.w2 = problem.down.detach().clone().requires_grad_()
        self.router = problem.router.detach().clone().requires_grad_()

    def parameters(self) -> Sequence[Tensor]:
        return (self.w1, self.w2, self.router)

    def expert_indices(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.topk((x @ self.router.T).float(), self.k, dim=-1).indices

    def forward(self, x: Tensor) -> Tensor:
        top = torch.topk((x @ self.router.T).float(), self.k, dim=-1)
        scores = torch.softmax(top.values, dim=-1)
        groups = _groups(top.indices, self.experts)
        weights = scores.new_zeros(groups.token_of_row.shape)
        weights = weights.index_copy(0, groups.row_of_pair.reshape(-1), scores.reshape(-1))
        h = _GroupedLinear.apply(_Gather.apply(x, groups), self.w1, groups, self.deep_gemm)
        y = _GroupedLinear.apply(_WeightedSwiGLU.apply(h, weights), self.w2, groups, self.deep_gemm)
        return _Aggregate.apply(y, groups)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        grad_w1, grad_w2, grad_router = gradients
        return {
            "grad_gate": grad_w1[:, : self.n],
            "grad_up": grad_w1[:, self.n :],
            "grad_down": grad_w2,
            "grad_router": grad_router,
        }


class DeepGemm(Implementation):
    """The paper's DeepGEMM-pt: grouped GEMMs by DeepGEMM, router, sort, gather, SwiGLU and aggregation by PyTorch."""

    name = "deepgemm"
    label = "DeepGEMM-pt"
    upstream = "https://github.com/sgl-project/DeepGEMM"
    licence = "Apache-2.0 (fork of deepseek-ai/DeepGEMM, MIT)"
    requires: ClassVar[dict[str, str]] = {
        "deep_gemm": "pip install --no-deps -r requirements/deepgemm.txt (needs nvcc of CUDA 12.9 or newer and torch)"
    }
    distributions: ClassVar[Sequence[str]] = ("sgl-deep-gemm", "apache-tvm-ffi")
    no_graph_reason = (
        "DeepGEMM's grouped GEMM over varying K needs every expert's row count on the host, so each forward "
        "synchronises with it"
    )
    #: Of the GEMMs: see `_gemm_role`. `_take` reads by 32-bit indices, `_sum` by 64-bit ones.
    kernel_roles = (
        ("silu", "activation"),
        ("vectorized_gather_kernel<16, int>", "gather"),
        ("vectorized_gather_kernel<16, long>", "aggregation"),
        ("sum_functor<c10::bfloat16, float, c10::bfloat16>", "aggregation"),
        # The products of `_WeightedSwiGLU`, and their sums, which are the weights' gradients.
        ("sum_functor<c10::bfloat16, float, float>", "activation"),
        ("binaryfunctor<c10::bfloat16, c10::bfloat16, c10::bfloat16, at::native::binary_internal::mul", "activation"),
        # Autograd adds the router's term to that of the experts.
        ("cudafunctor_add<c10::bfloat16>", "dX"),
        *((part, "fill") for part in ("fillfunctor", "memset")),
        *((part, "router") for part in ("nvjet", "cublas", "compute_cuda_kernel")),  # the last: repeat_interleave
        *ROUTER_ROLES,
    )

    def __init__(self) -> None:
        self._sizes: tuple[int, int] | None = None

    def restriction(self, point: Point) -> str | None:
        if point.shape.d % 64 or point.shape.n % 64:
            return (
                f"{self.label} needs d and n to be multiples of 64 (the K step of its grouped GEMM), "
                f"not d={point.shape.d}, n={point.shape.n}"
            )
        return None

    def _layer(self, problem: Problem, deep_gemm: ModuleType) -> Layer:
        return DeepGemmLayer(problem, deep_gemm)

    def build(self, problem: Problem) -> Layer:
        self._sizes = (problem.shape.d, problem.shape.n)
        layer = self._layer(problem, load())
        # Its kernels are compiled when first called, seconds each, keyed by shape and by the tile that the number of
        # rows favours; the real data choose the tiles that will be timed.
        layer.call_once(problem)
        if problem.x.is_cuda:
            torch.cuda.synchronize(problem.x.device)
        return layer

    def kernel_role(self, name: str) -> str | None:
        if "sm90_bf16_gemm_impl" in name:
            return self._gemm_role(name)
        return super().kernel_role(name)

    def _gemm_role(self, name: str) -> str | None:
        """Which of the six GEMMs, by the kernel's compile-time M, N, K (0: not fixed) and the built sizes; where two
        have equal ones (d = 2n, d = n), by how the weights lie: K-major (0) in the forward, N-major (1) for dX and dH.
        """
        arguments = name.split("sm90_bf16_gemm_impl", 1)[1]
        # Demangled "…Major)0, (…Major)0, 0u, 512u, 1536u, …", or mangled "…E0ELS…_0ELj0ELj512ELj1536E…".
        found = re.search(r"(?:, |Lj)(\d+)(?:u?, |ELj)(\d+)(?:u?, |ELj)(\d+)", arguments)
        if self._sizes is None or found is None:
            return None
        d, n = self._sizes
        m_size, n_size, k_size = (int(size) for size in found.groups())
        if m_size:
            return {(2 * n, d): "dW1", (d, n): "dW2"}.get((m_size, n_size))
        k_major = re.search(r"(?:Major\)|MajorE)\d(?:, \(cute::UMMA::Major\)|ELS\d*_)0", arguments)
        forward, backward = {(2 * n, d): "up", (d, n): "down"}, {(n, d): "dH", (d, 2 * n): "dX"}
        return (backward | forward if k_major else forward | backward).get((n_size, k_size))
