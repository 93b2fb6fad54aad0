"""The aggregation by itself: each token sums its experts' rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.costs import ELEMENT_BYTES
from harness.interface import Point, Problem, RoutedRows
from harness.operations.kernel import KernelOperation

#: Tokens between those that neighbouring experts' rows are taken from.
APART = 7919


class ExpertAggregation(KernelOperation):
    """out[t] = Σ_k S[t,k] · x[row of (t, k)], (R, d) -> (T, d).

    Variant ``gather``: the rows lie by expert, (t, k)'s is the rows' ``reverse``[t, k]. Variant ``contiguous``, a
    yardstick: (t, k)'s row is t·K + k, so that everything is read in order; nothing is gathered.
    """

    name: ClassVar[str] = "expert_aggregation"
    variants: ClassVar[tuple[str, ...]] = ("gather", "contiguous")
    part: ClassVar[str] = "token"
    reports_routing: ClassVar[bool] = False

    def inputs(self, problem: Problem, rows: RoutedRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        # Of the size that an expert's outputs have; another token's for every expert, so that no two rows of a token
        # are alike.
        experts = torch.arange(problem.shape.E, device=problem.x.device)
        experts = torch.repeat_interleave(experts, rows.expert_offsets.long().diff())
        other = (rows.gather + APART * experts) % max(problem.shape.T, 1)
        return problem.x[other], {"scores": rows.scores}

    def reference(self, problem: Problem) -> dict[str, Tensor]:
        assert problem.rows is not None
        scores, reverse = problem.operands["scores"], problem.rows.reverse.long()
        if problem.point.variant == "contiguous":
            reverse = torch.arange(reverse.numel(), device=reverse.device).view_as(reverse)
        out = torch.zeros(problem.shape.T, problem.x.shape[1], device=problem.x.device)
        for k in range(problem.shape.K):
            out += scores[:, k : k + 1] * problem.x[reverse[:, k]].float()
        return {"output": out}

    def sizes(self, point: Point) -> dict[str, Any]:
        shape = point.shape
        return {"M": shape.T, "N": shape.d, "K": shape.K, "groups": 1, "gather": point.variant == "gather"}

    def flops(self, point: Point, pass_: str, rows: int) -> int:
        return 0

    def algorithm_bytes(self, point: Point, pass_: str, rows: int) -> int:
        """Rows, scores (fp32) and places (int32; none where contiguous) read, the sums written."""
        shape, b = point.shape, ELEMENT_BYTES[point.dtype]
        each = 8 if point.variant == "gather" else 4
        return b * shape.d * (shape.routed_rows + shape.T) + each * shape.routed_rows

    boundary_bytes = algorithm_bytes
