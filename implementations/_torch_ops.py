"""What the PyTorch plugins share: routing metadata without a host synchronisation, grouped GEMMs, and the glue between
them (small pure functions that `torch.compile` may fuse)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from harness.interface import Layer, Problem

#: `grouped_mm` asks for strides that are multiples of this many bytes.
GROUPED_MM_ALIGNMENT = 16

#: Public since torch 2.10, private before, with the same arguments.
grouped_mm: Callable[..., Tensor] = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True)
class RowOrder:
    """Which routed row belongs to which token and expert; rows are sorted by expert, then by token.

    Attributes:
        gather: (TK,) int32, the token of each row.
        reverse: (T, K) int32, the row of each (token, k).
        offsets: (E+1,) int32, the first row of each expert, then TK.
    """

    gather: Tensor
    reverse: Tensor
    offsets: Tensor


def sort_by_expert(indices: Tensor, experts: int) -> RowOrder:
    """Routing metadata of (T, K) expert indices, made on their device with no host synchronisation."""
    tokens, k = indices.shape
    keys, order = torch.sort(indices.reshape(-1).int(), stable=True)
    # A search in the sorted keys gives the prefix sums directly: no atomics, and it traces under fake tensors,
    # which bincount does not.
    first = torch.arange(experts + 1, dtype=torch.int32, device=indices.device)
    offsets = torch.searchsorted(keys, first, out_int32=True)
    rows = torch.arange(tokens * k, dtype=torch.int32, device=indices.device)
    reverse = torch.empty_like(rows).scatter_(0, order, rows).view(tokens, k)
    gather = torch.div(order, k, rounding_mode="floor").int()
    return RowOrder(gather, reverse, offsets)


def host_counts(offsets: Tensor, rows: int) -> list[int]:
    """Rows of each expert on the host: a synchronisation. Fake tensors have no values; there the ``rows`` are split
    evenly, which changes no size that the layer holds."""
    experts = offsets.numel() - 1
    if is_fake(offsets):
        return [rows // experts + (e < rows % experts) for e in range(experts)]
    ends = offsets.tolist()
    return [ends[e + 1] - ends[e] for e in range(experts)]


def to_rows(per_slot: Tensor, reverse: Tensor) -> Tensor:
    """(T, K) values of each (token, k) -> (TK,) values of each row."""
    return torch.empty_like(per_slot).view(-1).scatter_(0, reverse.reshape(-1).long(), per_slot.reshape(-1))


def grouped_mm_restriction(dtype: torch.dtype, d: int, n: int) -> str | None:
    """Why `grouped_mm` refuses these widths, in words; None where it takes them."""
    multiple = GROUPED_MM_ALIGNMENT // dtype.itemsize
    wrong = [f"{name}={size}" for name, size in (("d", d), ("n", n)) if size % multiple]
    if not wrong:
        return None
    return f"torch's grouped_mm takes widths that are multiples of {multiple} in {dtype}, not {' and '.join(wrong)}"


class GroupedGemm:
    """Grouped GEMMs over rows sorted by expert: `grouped_mm` with offsets on the device, or a loop over experts with
    counts on the host (one synchronisation, when it is made).

    Args:
        offsets: (E+1,) int32.
        rows: TK.
        on_device: use `grouped_mm`.
    """

    def __init__(self, offsets: Tensor, rows: int, on_device: bool) -> None:
        self.ends = offsets[1:]
        self.empty = offsets[1:] == offsets[:-1]
        # grouped_mm refuses zero rows in some versions.
        self.counts = None if on_device and rows > 0 else host_counts(offsets, rows)

    def multiply(self, a: Tensor, weights: Tensor) -> Tensor:
        """(TK, k) × (E, k, m) -> (TK, m): each row with the matrix of its expert."""
        if self.counts is None:
            return grouped_mm(a, weights, offs=self.ends)
        out = a.new_empty(a.shape[0], weights.shape[2])
        for rows, weight, target in zip(a.split(self.counts), weights, out.split(self.counts), strict=True):
            torch.mm(rows, weight, out=target)
        return out

    def weight_gradient(self, a: Tensor, b: Tensor) -> Tensor:
        """(TK, m), (TK, k) -> (E, m, k): aᵀ·b over the rows of each expert; exactly zero for an expert without rows."""
        if self.counts is not None:
            out = a.new_empty(len(self.counts), a.shape[1], b.shape[1])
            for rows_a, rows_b, target in zip(a.split(self.counts), b.split(self.counts), out, strict=True):
                if rows_a.shape[0]:
                    torch.mm(rows_a.t(), rows_b, out=target)
                else:
                    target.zero_()
            return out
        # grouped_mm may leave the block of an empty expert uninitialised.
        return grouped_mm(a.t(), b, offs=self.ends).masked_fill_(self.empty[:, None, None], 0)


# The glue. Sums are fp32. The loops over K are unrolled on purpose: a compiler makes one pointwise kernel of them, and
# run eagerly they need temporaries of size T·d rather than TK·d.


def _assume_aligned(width: int) -> None:
    """Let a compiler with dynamic shapes know where rows keep their alignment: without that it moves bf16 one by one.
    The comparison becomes a guard, and what is guarded may be relied on."""
    if torch.compiler.is_compiling() and width % 32 == 0:
        torch._check(width % 32 == 0)


def swiglu(h: Tensor) -> Tensor:
    """(R, 2n) pre-activations in halves gate | up -> (R, n): silu(gate) * up."""
    _assume_aligned(h.shape[1])
    gate, up = h.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(h.dtype)


def _swiglu_gradient(h: Tensor, grad: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad_gate.to(h.dtype), (grad * gate * sigmoid).to(h.dtype)], dim=-1)


def swiglu_backward(h: Tensor, grad: Tensor) -> Tensor:
    """(R, 2n), (R, n) -> (R, 2n)."""
    _assume_aligned(h.shape[1])
    return _swiglu_gradient(h, grad.float())


def weighted_sum(y: Tensor, reverse: Tensor, scores: Tensor) -> Tensor:
    """O[t] = Σ_k S[t,k] · Y[reverse[t,k]]: (TK, d), (T, K), (T, K) fp32 -> (T, d)."""
    _assume_aligned(y.shape[1])
    total = scores[:, 0:1] * y.index_select(0, reverse[:, 0]).float()
    for k in range(1, reverse.shape[1]):
        total = total + scores[:, k : k + 1] * y.index_select(0, reverse[:, k]).float()
    return total.to(y.dtype)


def row_sum(rows: Tensor, reverse: Tensor) -> Tensor:
    """Σ_k rows[reverse[t,k]]: (TK, d), (T, K) -> (T, d)."""
    _assume_aligned(rows.shape[1])
    total = rows.index_select(0, reverse[:, 0]).float()
    for k in range(1, reverse.shape[1]):
        total = total + rows.index_select(0, reverse[:, k]).float()
    return total.to(rows.dtype)


def row_sum_plus(rows: Tensor, reverse: Tensor, base: Tensor) -> Tensor:
    """base[t] + Σ_k rows[reverse[t,k]]: (TK, d), (T, K), (T, d) -> (T, d)."""
    _assume_aligned(rows.shape[1])
    total = base.float()
    for k in range(reverse.shape[1]):
        total = total + rows.index_select(0, reverse[:, k]).float()
    return total.to(rows.dtype)


def weighted_sum_backward(
    grad: Tensor, y: Tensor, order: Tensor, reverse: Tensor, row_scores: Tensor
) -> Sequence[Tensor]:
    """Gradients of `weighted_sum`: dY (TK, d) and dS (T, K) fp32.

    Args:
        grad: (T, d).
        order: (TK,) int32, the token of each row.
        row_scores: (TK,) fp32, the weight of each row.
    """
    _assume_aligned(y.shape[1])
    grad_y = (row_scores[:, None] * grad.index_select(0, order).float()).to(y.dtype)
    slots = [(grad.float() * y.index_select(0, reverse[:, k]).float()).sum(-1) for k in range(reverse.shape[1])]
    return grad_y, torch.stack(slots, dim=1)


def down_backward_epilogue(grad_a: Tensor, h: Tensor, row_scores: Tensor) -> Sequence[Tensor]:
    """What follows dA′ = dO·W2: dS = rowsum(dA′ ∘ A) (TK,) fp32, A′ = S·A (TK, n), dH = dSwiGLU(S·dA′, H) (TK, 2n).

    Args:
        grad_a: dA′, (TK, n).
        h: H, (TK, 2n) in halves gate | up.
        row_scores: (TK,) fp32, the weight of each row.
    """
    _assume_aligned(h.shape[1])
    gate, up = h.float().chunk(2, dim=-1)
    a = gate * torch.sigmoid(gate) * up
    grad = grad_a.float()
    weight = row_scores[:, None]
    return (grad * a).sum(-1), (weight * a).to(h.dtype), _swiglu_gradient(h, weight * grad)


@dataclass
class Glue:
    """The functions above, as they are or compiled."""

    swiglu: Callable[[Tensor], Tensor] = swiglu
    swiglu_backward: Callable[[Tensor, Tensor], Tensor] = swiglu_backward
    weighted_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum
    weighted_sum_backward: Callable[..., Sequence[Tensor]] = weighted_sum_backward
    row_sum: Callable[[Tensor, Tensor], Tensor] = row_sum
    row_sum_plus: Callable[[Tensor, Tensor, Tensor], Tensor] = row_sum_plus
    down_backward_epilogue: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]] = down_backward_epilogue

    @classmethod
    def compiled(cls) -> Glue:
        """Compiled with dynamic shapes; the compilation itself happens at the first call of each function."""
        import torch._dynamo

        # Every K is a program of its own; past the limit the compiler would fall back to eager in silence.
        limit: Any = torch._dynamo.config
        limit.recompile_limit = max(limit.recompile_limit, 64)
        functions = {
            name: torch.compile(function, dynamic=True, fullgraph=True) for name, function in vars(cls()).items()
        }
        return cls(**functions)


def build_with_glue(problem: Problem, make_layer: Callable[[Glue], Layer]) -> Layer:
    """The layer of ``make_layer(glue)``: compiled glue on a GPU, where one forward and backward compiles all of it now;
    eager glue on the CPU, or where compilation raises (with a note on the layer)."""
    if problem.x.device.type != "cuda" or is_fake(problem.x) or problem.x.shape[0] == 0:
        return make_layer(Glue())
    layer = make_layer(Glue.compiled())
    try:
        layer.call_once(problem)
        layer.notes = [*layer.notes, "glue compiled with torch.compile(dynamic=True)"]
        return layer
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may fail in any way, and eager glue is as correct
        first_line = (str(error).strip().splitlines() or [""])[0][:200]
        failure = f"glue runs eagerly, since torch.compile raised {type(error).__name__}: {first_line}"
    layer = make_layer(Glue())
    layer.notes = [*layer.notes, failure]
    return layer


#: Torch's kernels of a router: scores, order, prefix sums and counts, permutations, integers, and casts of logits and
#: scores.
ROUTER_ROLES = tuple(
    (part, "router")
    for part in (
        *("topk", "softmax", "sort", "fill_reverse_indices", "searchsorted", "devicescan", "histogram"),
        *("scatter_gather", "index_kernel", "index_put", "index_copy", "arange", "memcpy dtoh"),
        *("_add<int>", "_add<long>", "functor<int", "functor<long", "reduceop<int", "reduceop<long"),
        *("direct_copy_kernel", "bfloat16_copy_kernel"),
    )
)
#: `Implementation.kernel_roles` of plugins that multiply with `grouped_mm`: one kernel serves the six GEMMs of the
#: experts, and dense GEMMs are the router's.
KERNEL_ROLES = (
    *ROUTER_ROLES,
    *((part, "grouped_gemm") for part in ("groupproblemshape", "grouped_gemm")),
    *((part, "activation") for part in ("sigmoid", "silu")),
    ("triton_poi_fused__to_copy_add_index_select", "aggregation"),
    ("triton_poi_fused_add_index_select", "aggregation"),
    # The scores' gradient, from the rows that were added up.
    ("triton_red_fused__to_copy_index_select_mul_select_stack_sum", "aggregation"),
    *((part, "gather") for part in ("indexselect", "index_select", "vectorized_gather")),
    # Autograd adds the router's term to that of the experts.
    ("cudafunctor_add<c10::bfloat16>", "dX"),
    *((part, "fill") for part in ("masked_fill", "fillfunctor", "memset")),
    *((part, "router") for part in ("nvjet", "cublas", "gemm")),
)
#: Dense GEMMs of experts one by one or in a batch, the router's among them. At the end of cuBLAS' names stand three
#: letters, of which the first two say what is transposed: NT is aᵀ·b over an expert's rows, a weight gradient.
DENSE_GEMM_ROLES = (
    *((part, "dW") for part in ("_ntn", "_ntt")),
    *((part, "gemm") for part in ("nvjet", "cublas", "gemm")),
)
