"""The official package's kernels one by one, for the operations on single kernels: the calls that its layer makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.interface import Kernel, Problem, RoutedRows


def _rows(problem: Problem) -> RoutedRows:
    assert problem.rows is not None
    return problem.rows


class _GroupedGemm(Kernel):
    def __init__(self, problem: Problem) -> None:
        from quack.gemm_interface import gemm

        self.gemm, self.offsets = gemm, _rows(problem).expert_offsets
        self.weight = problem.operands["weight"].transpose(1, 2)

    def forward(self, x: Tensor) -> Any:
        return self.gemm(x, self.weight, cu_seqlens_m=self.offsets)


class _GatherM(Kernel):
    """Weights and H as rows and columns g0, u0, g1, u1, …"""

    def __init__(self, problem: Problem) -> None:
        from quack.gemm_interface import gemm_gated

        self.gemm, self.rows = gemm_gated, _rows(problem)
        joint = torch.stack((problem.operands["gate"], problem.operands["up"]), dim=2).flatten(1, 2)
        self.weight = joint.transpose(1, 2)

    def forward(self, x: Tensor) -> Any:
        rows, columns = self.rows.gather.numel(), self.weight.shape[2]
        h, a = x.new_empty(rows, columns), x.new_empty(rows, columns // 2)
        self.gemm(
            x,
            self.weight,
            activation="swiglu",
            cu_seqlens_m=self.rows.expert_offsets,
            A_idx=self.rows.gather,
            preact_out=h,
            postact_out=a,
            store_preact=True,
        )
        return h, a

    def outputs(self, found: Any) -> dict[str, Tensor]:
        h, a = found
        return {"h": torch.cat((h[:, 0::2], h[:, 1::2]), dim=1), "a": a}


class _GatherK(Kernel):
    def __init__(self, problem: Problem) -> None:
        from quack.gemm_interface import gemm

        self.gemm, self.rows, self.other = gemm, _rows(problem), problem.operands["rows"]
        self.first, self.experts = problem.point.variant == "dW1", problem.shape.E

    def forward(self, x: Tensor) -> Any:
        wide, narrow = (self.other.shape[1], x.shape[1]) if self.first else (x.shape[1], self.other.shape[1])
        out = x.new_empty(self.experts, wide, narrow)
        self.gemm(
            x.T,
            self.other,
            out=out.transpose(1, 2) if self.first else out,
            cu_seqlens_k=self.rows.expert_offsets,
            A_idx=self.rows.gather,
        )
        return out


class _HiddenGradient(Kernel):
    """H and its gradient with columns g0, u0, g1, u1, …"""

    def __init__(self, problem: Problem) -> None:
        from quack.gemm_interface import gemm_dgated

        self.gemm, self.rows, operands = gemm_dgated, _rows(problem), problem.operands
        gate, up = operands["h"].chunk(2, dim=1)
        self.h = torch.stack((gate, up), dim=2).flatten(1)
        self.weight, self.scores = operands["down"], operands["row_scores"]

    def forward(self, x: Tensor) -> Any:
        grad_h, scaled_a = torch.empty_like(self.h), x.new_empty(self.h.shape[0], self.h.shape[1] // 2)
        _, _, grad_scores = self.gemm(
            x,
            self.weight,
            PreAct=self.h,
            activation="swiglu",
            dx_out=grad_h,
            postact_out=scaled_a,
            colvec_scale=self.scores,
            colvec_reduce=True,
            cu_seqlens_m=self.rows.expert_offsets,
            A_idx=self.rows.gather,
            dynamic_scheduler=False,
        )
        return grad_h, scaled_a, grad_scores

    def outputs(self, found: Any) -> dict[str, Tensor]:
        grad_h, scaled_a, grad_scores = found
        grad_h = torch.cat((grad_h[:, 0::2], grad_h[:, 1::2]), dim=1)
        return {"grad_h": grad_h, "scaled_a": scaled_a, "grad_scores": grad_scores}


class _Aggregation(Kernel):
    def __init__(self, problem: Problem) -> None:
        from sonicmoe.functional.reduction_over_k_gather import token_gather_and_sum_varlen_K_triton

        self.sum, (self.tokens, self.k) = token_gather_and_sum_varlen_K_triton, _rows(problem).reverse.shape
        self.reverse, self.scores = _rows(problem).reverse.reshape(-1), problem.operands["scores"].reshape(-1)
        if problem.point.variant == "contiguous":
            self.reverse = torch.arange(self.reverse.numel(), dtype=torch.int32, device=self.reverse.device)

    def forward(self, x: Tensor) -> Any:
        out = x.new_empty(self.tokens, x.shape[1])
        self.sum(x, self.scores, out, self.reverse, None, self.tokens, self.k, x.shape[1], False)
        return out


class _DownAggregation(_Aggregation):
    def __init__(self, problem: Problem) -> None:
        from quack.gemm_interface import gemm

        super().__init__(problem)
        self.gemm, self.offsets = gemm, _rows(problem).expert_offsets
        self.weight = problem.operands["down"].transpose(1, 2)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.gemm(x, self.weight, cu_seqlens_m=self.offsets))


class _Router(Kernel):
    def __init__(self, problem: Problem, flags: tuple[bool, bool]) -> None:
        from sonicmoe.functional import TC_Softmax_Topk_Router_Function

        self.choose, self.k, self.flags = TC_Softmax_Topk_Router_Function.apply, problem.shape.K, flags

    def forward(self, x: Tensor) -> Any:
        return self.choose(x, x.shape[1], self.k, *self.flags)

    def outputs(self, found: Any) -> dict[str, Tensor]:
        return {"scores": found[0], "indices": found[1]}


_BUILD: dict[str, Callable[[Problem], Kernel]] = {
    "grouped_gemm": _GroupedGemm,
    "grouped_gemm_gather_m": _GatherM,
    "grouped_gemm_gather_k": _GatherK,
    "hidden_gradient": _HiddenGradient,
    "down_aggregation": _DownAggregation,
    "expert_aggregation": _Aggregation,
}


def build(problem: Problem, flags: tuple[bool, bool]) -> Kernel:
    """The kernel of the problem's operation; ``flags``: the router's convention as the package has it."""
    if problem.point.operation == "topk_router":
        return _Router(problem, flags)
    return _BUILD[problem.point.operation](problem)
