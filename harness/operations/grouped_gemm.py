"""Grouped GEMMs by themselves: rows side by side, rows gathered while loading, and a contraction over gathered rows.

R = T·K routed rows; rows of expert e are expert_offsets[e] … expert_offsets[e + 1] of `harness.interface.RoutedRows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.correctness import Correctness
from harness.costs import ELEMENT_BYTES
from harness.interface import Point, Problem, RoutedRows
from harness.operations.kernel import KernelOperation
from harness.reference import LEAST_EXPERT, swiglu_backward


def experts_rows(rows: RoutedRows) -> Iterator[tuple[int, slice]]:
    """Each expert and its rows."""
    offsets = rows.expert_offsets.tolist()
    for expert, (first, last) in enumerate(pairwise(offsets)):
        yield expert, slice(first, last)


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).to(h.dtype)


def times(rows_x: Tensor, weights: Tensor, rows: RoutedRows) -> Tensor:
    """(R, k), (E, m, k) -> (R, m) in fp32: each row with its expert's matrix."""
    out = rows_x.new_empty(rows_x.shape[0], weights.shape[1], dtype=torch.float32)
    for expert, of in experts_rows(rows):
        out[of] = rows_x[of].float() @ weights[expert].float().T
    return out


def hidden(problem: Problem, rows: RoutedRows) -> Tensor:
    """H (R, 2n), gate | up, in the problem's dtype: what the layer would have at this place."""
    w1 = torch.cat([problem.gate, problem.up], dim=1)
    return times(problem.x[rows.gather], w1, rows).to(problem.x.dtype)


def row_scores(rows: RoutedRows) -> Tensor:
    """(R,), fp32: each row's weight."""
    scores = rows.scores.reshape(-1)
    return torch.empty_like(scores).scatter_(0, rows.reverse.reshape(-1).long(), scores)


class _GroupedGemm(KernelOperation):
    """Sizes and costs: M rows in all, N columns, contraction over K, so many groups."""

    def _nk(self, point: Point) -> tuple[int, int]:
        d, n = point.shape.d, point.shape.n
        return {"up": (2 * n, d), "down": (d, n), "dW1": (2 * n, d), "dW2": (d, n)}[point.variant]

    #: Whether rows are gathered from (T, …) while loading.
    gathers: ClassVar[bool] = False

    def sizes(self, point: Point) -> dict[str, Any]:
        n, k = self._nk(point)
        m = point.shape.routed_rows
        return {"M": m, "N": n, "K": k, "groups": point.shape.E, "gather": self.gathers}

    def flops(self, point: Point, pass_: str, rows: int) -> int:
        n, k = self._nk(point)
        return 2 * rows * n * k


class GroupedGemm(_GroupedGemm):
    """y[r] = W[e] x[r] for every row r of expert e, rows side by side.

    Variant ``up``: x (R, d), W = operands["weight"] (E, 2n, d), output (R, 2n). Variant ``down``: x (R, n), W
    (E, d, n), output (R, d). No activation.
    """

    name: ClassVar[str] = "grouped_gemm"
    variants: ClassVar[tuple[str, ...]] = ("up", "down")

    def inputs(self, problem: Problem, rows: RoutedRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        if problem.point.variant == "up":
            weight = torch.cat([problem.gate, problem.up], dim=1)
            return problem.x[rows.gather], {"weight": weight}
        return swiglu(hidden(problem, rows)), {"weight": problem.down}

    def reference(self, problem: Problem) -> dict[str, Tensor]:
        assert problem.rows is not None
        return {"output": times(problem.x, problem.operands["weight"], problem.rows)}

    def algorithm_bytes(self, point: Point, pass_: str, rows: int) -> int:
        n, k = self._nk(point)
        return ELEMENT_BYTES[point.dtype] * (rows * (n + k) + point.shape.E * n * k)

    boundary_bytes = algorithm_bytes


class GroupedGemmGatherM(_GroupedGemm):
    """The up-projection: h[r] = W1[e] x[gather[r]], a[r] = silu(h's gate half) · (h's up half).

    x (T, d), operands gate and up (E, n, d), token of each row in the rows' ``gather``; outputs ``h`` (R, 2n), gate
    then up, and ``a`` (R, n). How the rows are gathered, and whether the activation is a kernel of its own, is the
    implementation's.
    """

    name: ClassVar[str] = "grouped_gemm_gather_m"
    variants: ClassVar[tuple[str, ...]] = ("up",)
    gathers: ClassVar[bool] = True

    def inputs(self, problem: Problem, rows: RoutedRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        return problem.x, {"gate": problem.gate, "up": problem.up}

    def reference(self, problem: Problem) -> dict[str, Tensor]:
        assert problem.rows is not None
        w1 = torch.cat([problem.operands["gate"], problem.operands["up"]], dim=1)
        h = times(problem.x[problem.rows.gather], w1, problem.rows)
        gate, up = h.chunk(2, dim=1)
        return {"h": h, "a": torch.nn.functional.silu(gate) * up}

    def algorithm_bytes(self, point: Point, pass_: str, rows: int) -> int:
        """X counts once: re-reads are taken to hit the L2 cache."""
        T, d, n, E = point.shape.T, point.shape.d, point.shape.n, point.shape.E
        return ELEMENT_BYTES[point.dtype] * (T * d + rows * 3 * n + E * 2 * n * d)

    boundary_bytes = algorithm_bytes


class GroupedGemmGatherK(_GroupedGemm):
    """A weight gradient: the contraction runs over an expert's rows, one side of which is gathered.

    Variant ``dW1``: x = X (T, d), operand ``rows`` = dH (R, 2n): dW1[e] = Σ_r dH[r] X[gather[r]]ᵀ, (E, 2n, d). Variant
    ``dW2``: x = dO (T, d), operand ``rows`` = A' (R, n): dW2[e] = Σ_r dO[gather[r]] A'[r]ᵀ, (E, d, n). Exactly zero for
    an expert without rows.
    """

    name: ClassVar[str] = "grouped_gemm_gather_k"
    variants: ClassVar[tuple[str, ...]] = ("dW1", "dW2")
    gathers: ClassVar[bool] = True
    part: ClassVar[str] = "expert"
    least_part: ClassVar[float] = LEAST_EXPERT

    def inputs(self, problem: Problem, rows: RoutedRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        h, scores = hidden(problem, rows), row_scores(rows)
        gate, up = h.float().chunk(2, dim=1)
        if problem.point.variant == "dW2":
            scaled = scores[:, None] * torch.nn.functional.silu(gate) * up
            return problem.grad_output, {"rows": scaled.to(h.dtype)}
        w2 = problem.down.transpose(1, 2)
        grad_a = scores[:, None] * times(problem.grad_output[rows.gather], w2, rows)
        _, grad_gate, grad_up = swiglu_backward(gate, up, grad_a)
        return problem.x, {"rows": torch.cat([grad_gate, grad_up], dim=1).to(h.dtype)}

    def reference(self, problem: Problem) -> dict[str, Tensor]:
        assert problem.rows is not None
        x, other, first = problem.x, problem.operands["rows"], problem.point.variant == "dW1"
        size = (problem.shape.E, *((other.shape[1], x.shape[1]) if first else (x.shape[1], other.shape[1])))
        out = x.new_empty(size, dtype=torch.float32)
        for expert, of in experts_rows(problem.rows):
            gathered, rows = x[problem.rows.gather[of]].float(), other[of].float()
            out[expert] = rows.T @ gathered if first else gathered.T @ rows
        return {"output": out}

    def judge(
        self, result: Correctness, problem: Problem, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> None:
        """Also that an expert without rows has exactly zero, which an optimiser would otherwise train on."""
        super().judge(result, problem, found, expected)
        assert problem.rows is not None
        empty = problem.rows.expert_offsets.diff() == 0
        wrong = int((found["output"][empty] != 0).flatten(1).any(1).sum()) if bool(empty.any()) else 0
        if wrong and result.reason is None:
            result.reason = f"{wrong} experts without rows have gradients that are not zero"

    def algorithm_bytes(self, point: Point, pass_: str, rows: int) -> int:
        """The gathered tensor counts once: re-reads are taken to hit the L2 cache."""
        n, k = self._nk(point)
        width = n if point.variant == "dW1" else k
        return ELEMENT_BYTES[point.dtype] * (point.shape.T * point.shape.d + rows * width + point.shape.E * n * k)

    boundary_bytes = algorithm_bytes
