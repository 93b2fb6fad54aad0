"""The router's choice by itself: top-K and its weights from the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.correctness import Correctness
from harness.costs import ELEMENT_BYTES
from harness.interface import Layer, Point, Problem, RoutedRows
from harness.operations.kernel import KernelOperation
from harness.reference import full_precision
from harness.routing import router_scores


class TopKRouter(KernelOperation):
    """x (T, E), logits in the point's dtype -> ``scores`` (T, K), fp32 or the point's dtype, and ``indices`` (T, K),
    integers: the K largest logits of each token, in any order, with their weights in the router's convention."""

    name: ClassVar[str] = "topk_router"
    part: ClassVar[str] = "token"
    reports_routing: ClassVar[bool] = False
    takes_routing: ClassVar[bool] = False

    def inputs(self, problem: Problem, rows: RoutedRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        with full_precision():
            return (problem.x.float() @ problem.router.float().T).to(problem.x.dtype), {}

    def reference(self, problem: Problem) -> dict[str, Tensor]:
        k = problem.shape.K
        logits = problem.x.float()
        top = torch.topk(logits, k, dim=1)
        scores = router_scores(logits, top.indices, problem.point.layer.router_convention)
        return {"scores": scores, "indices": top.indices}

    def judge(
        self, result: Correctness, problem: Problem, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> None:
        """Of tied logits any may be chosen, and the order is free: compared are the chosen logits, sorted, which must
        be the largest ones exactly, and the weights of the choice that was made."""
        if found["indices"].is_floating_point():
            result.reason = "the expert indices are not integers"
            return
        logits, indices = problem.x.float(), found["indices"].long()
        if bool(((indices < 0) | (indices >= problem.shape.E)).any()):
            result.reason = "an expert index is out of range"
            return
        ordered = indices.sort(1).values
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            result.reason = "a token chose one expert twice"
            return
        chosen = torch.gather(logits, 1, indices).sort(1, descending=True).values
        best = torch.gather(logits, 1, expected["indices"]).sort(1, descending=True).values
        if not torch.equal(chosen, best):
            result.reason = f"{int((chosen != best).any(1).sum())} tokens chose an expert that is not among their top K"
            return
        scores = router_scores(logits, indices, problem.point.layer.router_convention)
        # The largest first, since a token's experts may come in another order in the next call.
        order = found["scores"].argsort(1, descending=True)
        own, expected_scores = found["scores"].gather(1, order), scores.gather(1, order)
        super().judge(result, problem, {"scores": own}, {"scores": expected_scores})

    def repeatable(self, layer: Layer, found: Any) -> dict[str, Tensor]:
        scores = super().repeatable(layer, found)["scores"]
        return {"scores": scores.sort(1, descending=True).values}

    def sizes(self, point: Point) -> dict[str, Any]:
        shape = point.shape
        return {"M": shape.T, "N": shape.E, "K": shape.K, "groups": 1, "gather": False}

    def flops(self, point: Point, pass_: str, rows: int) -> int:
        return 0

    def algorithm_bytes(self, point: Point, pass_: str, rows: int) -> int:
        """Logits read; a score (fp32) and an index (int32) written for each of K."""
        shape = point.shape
        return ELEMENT_BYTES[point.dtype] * shape.T * shape.E + 8 * shape.routed_rows

    boundary_bytes = algorithm_bytes
