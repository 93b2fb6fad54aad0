"""The experts of a layer with the routing given: any number of experts for each token; forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from harness.correctness import Correctness, Snapshot, check_shapes, evaluate, forward_backward, judge
from harness.interface import Layer, Point, Problem
from harness.operations.base import Operation
from harness.problem import make_problem
from harness.reference import compare_routed, full_precision
from harness.routing import expert_counts
from harness.token_rounding import route_by


class RoutedExperts(Operation):
    """O[t] = sum over the pairs (t, e) of the routing of S[t,e] · down_e(silu(gate_e x_t) · up_e x_t).

    The routing is made by the point's method from the logits x router^T of the first input set, and is the same for all
    input sets: what a routing costs the experts, without the routing's own cost. The pairs' weights are a leaf, whose
    gradient is checked. There is no router.
    """

    name: ClassVar[str] = "routed_experts"

    def make_problem(self, point: Point, device: torch.device | str, input_set: int = 0) -> Problem:
        problem = make_problem(point, device, input_set)
        nothing = problem.router[:0].clone()
        if input_set:
            return replace(problem, router=nothing)
        with full_precision():
            logits = problem.x.float() @ problem.router.float().T
        generator = torch.Generator(device=device).manual_seed(point.routing.seed)
        routing = route_by(
            logits,
            point.shape.K,
            point.routing.method,
            point.routing.m_tile,
            point.layer.router_convention,
            generator=generator,
        )
        return replace(problem, router=nothing, routing=routing)

    def check(self, layer: Layer, problem: Problem) -> Correctness:
        shape, routing = problem.shape, problem.routing
        assert routing is not None
        before = Snapshot(problem)
        # As for moe_layer: what the judged call still holds of a call on other data is stale.
        forward_backward(layer, -problem.x, problem.grad_output)
        evaluated = evaluate(layer, problem)
        expected: dict[str, tuple[int, ...]] = {
            "output": (shape.T, shape.d),
            "grad_x": (shape.T, shape.d),
            "grad_gate": (shape.E, shape.n, shape.d),
            "grad_up": (shape.E, shape.n, shape.d),
            "grad_down": (shape.E, shape.d, shape.n),
            "grad_scores": tuple(routing.scores.shape),
        }
        result = Correctness(reason=before.change(problem) or check_shapes(evaluated, expected))
        result.counts = expert_counts(routing.experts, shape.E).cpu()
        if result.reason:
            return result
        comparison = compare_routed(problem, evaluated.output, evaluated.grad_x, evaluated.gradients)
        result.errors, result.worst = comparison.errors, comparison.worst
        alone = routing.token_offsets.diff() == 0
        if bool((evaluated.output[alone] != 0).any()) or bool((evaluated.grad_x[alone] != 0).any()):
            result.reason = "tokens without an expert have outputs or gradients that are not zero"
        else:
            result.reason = judge(comparison, problem.point.dtype)
        return result
