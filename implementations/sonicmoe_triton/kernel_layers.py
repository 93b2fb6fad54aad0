"""Our kernels one by one, for the harness's operations on single kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.interface import Kernel, Problem
from implementations.sonicmoe_triton import kernels
from implementations.sonicmoe_triton.aggregation import aggregate
from implementations.sonicmoe_triton.algorithm import BLOCK_M
from implementations.sonicmoe_triton.metadata import route
from implementations.sonicmoe_triton.router import top_k


class _Routed(Kernel):
    """With the problem's rows as our routing has them, the same order of rows; made before any call."""

    def __init__(self, problem: Problem) -> None:
        rows = problem.rows
        assert rows is not None
        self.routing, self.row_scores = route(rows.scores, rows.indices, problem.shape.E, BLOCK_M)
        self.operands = problem.operands


class GroupedGemm(_Routed):
    """The down-projection's kernel, at both widths."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.down_projection(x, self.operands["weight"], self.routing)


class GatherM(_Routed):
    """The up-projection: W1 (E, 2n, d), gate rows then up rows."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.w1 = torch.cat([self.operands["gate"], self.operands["up"]], dim=1)

    def forward(self, x: Tensor) -> Any:
        return kernels.up_projection(x, self.w1, self.routing, "swiglu")

    def outputs(self, found: Any) -> dict[str, Tensor]:
        return {"h": found[0], "a": found[1]}


class GatherK(_Routed):
    """A weight gradient."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.first = problem.point.variant == "dW1"

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return kernels.up_weight_gradient(self.operands["rows"], x, self.routing)
        return kernels.down_weight_gradient(x, self.operands["rows"], self.routing)


class HiddenGradient(_Routed):
    """dA' and all that its epilogue makes of it. dS comes in parts (C, R): their sum, which in the layer the router's
    backward takes along, belongs to the operation and so to its time."""

    def forward(self, x: Tensor) -> Any:
        operands = self.operands
        grad_h, scaled_a, partial_scores = kernels.hidden_gradient(
            x, operands["down"], operands["h"], operands["row_scores"], self.routing, "swiglu"
        )
        return grad_h, scaled_a, partial_scores[0] if len(partial_scores) == 1 else partial_scores.sum(0)

    def outputs(self, found: Any) -> dict[str, Tensor]:
        return dict(zip(("grad_h", "scaled_a", "grad_scores"), found, strict=True))


class DownAggregation(_Routed):
    """The down-projection by expert, then the gather-and-sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = kernels.down_projection(x, self.operands["down"], self.routing)
        return aggregate(y, self.routing, weights=self.row_scores)


class Aggregation(_Routed):
    """The gather-and-sum; where rows lie by token its places are simply in order."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        if problem.point.variant == "contiguous":
            scores = self.operands["scores"]
            places = torch.arange(scores.numel(), dtype=torch.int32, device=scores.device)
            self.routing = replace(self.routing, reverse=places)
            self.row_scores = scores.reshape(-1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return aggregate(x, self.routing, weights=self.row_scores)


class Router(Kernel):
    """Top-K and its weights."""

    def __init__(self, problem: Problem) -> None:
        self.k, self.convention = problem.shape.K, problem.point.layer.router_convention

    def forward(self, x: Tensor) -> Any:
        return top_k(x, self.k, self.convention)

    def outputs(self, found: Any) -> dict[str, Tensor]:
        return {"scores": found[0], "indices": found[1]}


#: By operation.
BUILD: dict[str, Callable[[Problem], Kernel]] = {
    "grouped_gemm": GroupedGemm,
    "grouped_gemm_gather_m": GatherM,
    "grouped_gemm_gather_k": GatherK,
    "hidden_gradient": HiddenGradient,
    "down_aggregation": DownAggregation,
    "expert_aggregation": Aggregation,
    "topk_router": Router,
}
