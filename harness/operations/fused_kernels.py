"""Steps of the layer that SonicMoE fuses, by themselves: what comes after a GEMM is part of the operation, so that
fused and separate kernels can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.costs import ELEMENT_BYTES
from harness.interface import Point, Problem, RoutedRows
from harness.operations.grouped_gemm import hidden, row_scores, swiglu, times
from harness.operations.kernel import KernelOperation
from harness.reference import swiglu_backward


class HiddenGradient(KernelOperation):
    """The dH step of the backward (arXiv 2512.14080): with dA'[r] = W2[e]ᵀ dO[gather[r]] and A = SwiGLU(H),

        dS[r] = <dA'[r], A[r]>,  A'[r] = S[r] A[r],  dH[r] = dSwiGLU(S[r] dA'[r], H[r]).

    x = dO (T, d); operands ``down`` (E, d, n), ``h`` (R, 2n), gate then up, ``row_scores`` (R,) fp32. Outputs
    ``grad_h`` (R, 2n), ``scaled_a`` (R, n), ``grad_scores`` (R,), fp32.
    """

    name: ClassVar[str] = "hidden_gradient"

    def inputs(self, problem: Problem, rows: RoutedRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        operands = {"down": problem.down, "h": hidden(problem, rows), "row_scores": row_scores(rows)}
        return problem.grad_output, operands

    def reference(self, problem: Problem) -> dict[str, Tensor]:
        assert problem.rows is not None
        scores = problem.operands["row_scores"][:, None]
        gate, up = problem.operands["h"].float().chunk(2, dim=1)
        weights = problem.operands["down"].transpose(1, 2)
        grad_a = times(problem.x[problem.rows.gather], weights, problem.rows)
        a, grad_gate, grad_up = swiglu_backward(gate, up, scores * grad_a)
        return {
            "grad_h": torch.cat([grad_gate, grad_up], dim=1),
            "scaled_a": scores * a,
            "grad_scores": (grad_a * a).sum(1),
        }

    def sizes(self, point: Point) -> dict[str, Any]:
        shape = point.shape
        return {"M": shape.routed_rows, "N": shape.n, "K": shape.d, "groups": shape.E, "gather": True}

    def flops(self, point: Point, pass_: str, rows: int) -> int:
        return 2 * rows * point.shape.n * point.shape.d

    def algorithm_bytes(self, point: Point, pass_: str, rows: int) -> int:
        """dO (once: re-reads are taken to hit the L2 cache), W2, H and scores read; dH, A' and dS written."""
        T, d, n, E = point.shape.T, point.shape.d, point.shape.n, point.shape.E
        return ELEMENT_BYTES[point.dtype] * (T * d + rows * 5 * n + E * d * n) + 8 * rows

    boundary_bytes = algorithm_bytes


class DownAggregation(KernelOperation):
    """The down-projection and the sum over each token's experts: out[t] = Σ_k S[t,k] · W2[e] A[row of (t, k)].

    x = A (R, n); operands ``down`` (E, d, n), ``scores`` (T, K) fp32; output (T, d). Whether an expert's results lie by
    expert or go to their tokens' places at once is the implementation's.
    """

    name: ClassVar[str] = "down_aggregation"
    part: ClassVar[str] = "token"

    def inputs(self, problem: Problem, rows: RoutedRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        return swiglu(hidden(problem, rows)), {"down": problem.down, "scores": rows.scores}

    def reference(self, problem: Problem) -> dict[str, Tensor]:
        assert problem.rows is not None
        y = times(problem.x, problem.operands["down"], problem.rows)
        y *= row_scores(problem.rows)[:, None]
        out = torch.zeros(problem.shape.T, y.shape[1], device=y.device)
        return {"output": out.index_add_(0, problem.rows.gather, y)}

    def sizes(self, point: Point) -> dict[str, Any]:
        shape = point.shape
        return {"M": shape.routed_rows, "N": shape.d, "K": shape.n, "groups": shape.E, "gather": False}

    def flops(self, point: Point, pass_: str, rows: int) -> int:
        return 2 * rows * point.shape.n * point.shape.d

    def algorithm_bytes(self, point: Point, pass_: str, rows: int) -> int:
        """A, W2, scores and places read, Y written and read, O written."""
        T, d, n, E = point.shape.T, point.shape.d, point.shape.n, point.shape.E
        return ELEMENT_BYTES[point.dtype] * (rows * (n + 2 * d) + E * d * n + T * d) + 8 * rows

    def boundary_bytes(self, point: Point, pass_: str, rows: int) -> int:
        """The same without Y."""
        return self.algorithm_bytes(point, pass_, rows) - ELEMENT_BYTES[point.dtype] * rows * 2 * point.shape.d
