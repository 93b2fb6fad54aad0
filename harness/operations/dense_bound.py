"""The dense bound: the layer's GEMMs with perfectly balanced experts, what a grouped GEMM can hope to reach."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from harness.correctness import Correctness, check_shapes, evaluate, fingerprint, judge
from harness.interface import Layer, Point, Problem
from harness.operations.base import Operation
from harness.problem import make_problem
from harness.reference import compare_dense


class DenseBound(Operation):
    """Rows r = 0 … T·K-1 belong to expert r // (T·K/E); no router, no gather.

    Variant ``gemm``: x, output and grad_output are the rows (T·K, d); only the batched GEMMs are timed, the
    activations that they read being made beforehand. Variant ``gemm_glue``: x, output and grad_output are (T, d) and
    row k·T + t holds token t; activation, its backward and the sums over each token's K rows are added at copy speed.
    (A token's rows lie T apart and so in different experts: side by side, equal rows would lower the power that a GEMM
    draws and so raise its clock, as no real layer's rows do.)
    """

    name: ClassVar[str] = "dense_bound"
    variants: ClassVar[tuple[str, ...]] = ("gemm", "gemm_glue")
    reports_memory: ClassVar[bool] = False
    reports_routing: ClassVar[bool] = False

    def unsupported_reason(self, point: Point) -> str | None:
        shape = point.shape
        if point.routing.trace_file:
            return "the dense bound's experts are balanced: it goes by no trace"
        if shape.T == 0 or shape.routed_rows % shape.E:
            return f"the dense bound needs balanced experts: T*K={shape.routed_rows} must be a multiple of E={shape.E}"
        return None

    def make_problem(self, point: Point, device: torch.device | str, input_set: int = 0) -> Problem:
        shape = point.shape
        rows = point if point.variant == "gemm_glue" else replace(point, shape=replace(shape, T=shape.routed_rows))
        problem = make_problem(rows, device, input_set)
        return replace(problem, point=point, router=problem.router[:0])

    def compare(self, layer: Layer, problem: Problem) -> Correctness:
        shape = problem.shape
        evaluated = evaluate(layer, problem)
        expected: dict[str, tuple[int, ...]] = {
            "output": tuple(problem.x.shape),
            "grad_x": tuple(problem.x.shape),
            "grad_gate": (shape.E, shape.n, shape.d),
            "grad_up": (shape.E, shape.n, shape.d),
            "grad_down": (shape.E, shape.d, shape.n),
        }
        result = Correctness(reason=check_shapes(evaluated, expected))
        result.counts = torch.full((shape.E,), shape.routed_rows // shape.E)
        if result.reason:
            return result
        summed = problem.point.variant == "gemm_glue"
        comparison = compare_dense(problem, summed, evaluated.output, evaluated.grad_x, evaluated.gradients)
        result.errors, result.worst = comparison.errors, comparison.worst
        result.fingerprint = fingerprint(evaluated, comparison, problem.point.dtype)
        result.reason = judge(comparison, problem.point.dtype)
        return result
