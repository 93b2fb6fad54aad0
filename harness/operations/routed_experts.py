"""The experts of a layer with the routing given: any number of experts for each token; forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from harness.correctness import (
    Correctness,
    Snapshot,
    check_shapes,
    check_tokens_alone,
    evaluate,
    fingerprint,
    forward_backward,
    judge,
)
from harness.costs import ELEMENT_BYTES, algorithm_bytes, boundary_bytes
from harness.interface import Layer, Point, Problem
from harness.operations.base import Operation
from harness.problem import forbid_others, make_problem
from harness.reference import compare_routed, full_precision
from harness.routing import expert_counts
from harness.token_rounding import GeneralRouting, route_by
from harness.traces import chosen_experts


class RoutedExperts(Operation):
    """O[t] = sum over the pairs (t, e) of the routing of S[t,e] · down_e(silu(gate_e x_t) · up_e x_t).

    The routing is made by the point's method from the logits x router^T of the first input set (experts that a trace
    does not give a token forbidden), and is the same for all input sets: what a routing costs the experts, without the
    routing's own cost. The pairs' weights are a leaf, whose gradient is checked. The router is no part of the layer.
    """

    name: ClassVar[str] = "routed_experts"
    takes_routing: ClassVar[bool] = True

    def boundary_bytes(self, point: Point, pass_: str, rows: int) -> int:
        return boundary_bytes(point.shape, pass_, ELEMENT_BYTES[point.dtype], router=False)

    def algorithm_bytes(self, point: Point, pass_: str, rows: int) -> int:
        return algorithm_bytes(point.shape, pass_, ELEMENT_BYTES[point.dtype], rows, router=False)

    def make_problem(self, point: Point, device: torch.device | str, input_set: int = 0) -> Problem:
        problem = make_problem(point, device, input_set, plant_trace=False)
        return problem if input_set else replace(problem, routing=self._route(problem, point))

    @staticmethod
    def _route(problem: Problem, point: Point) -> GeneralRouting:
        """The point's routing of the problem's own tokens, always the same; the router serves nothing else."""
        with full_precision():
            logits = problem.x.float() @ problem.router.float().T
        if point.routing.trace_file:
            logits = forbid_others(logits, chosen_experts(point.routing, point.shape))
        return route_by(
            logits,
            point.shape.K,
            point.routing.method,
            point.routing.m_tile,
            point.layer.router_convention,
            generator=torch.Generator(device=logits.device).manual_seed(point.routing.seed),
        )

    def compare(self, layer: Layer, problem: Problem) -> Correctness:
        shape, routing = problem.shape, problem.routing
        assert routing is not None
        # The routing is what the reference goes by, and building came before this: it must still be the method's own.
        own = self._route(problem, problem.point)
        given = all(torch.equal(a, b) for a, b in zip(own[:3], routing[:3], strict=True))
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
        changed = before.change(problem) or (None if given else "the layer changed the routing while it was built")
        result = Correctness(reason=changed or check_shapes(evaluated, expected))
        result.counts = expert_counts(routing.experts, shape.E).cpu()
        if result.reason:
            return result
        comparison = compare_routed(problem, evaluated.output, evaluated.grad_x, evaluated.gradients)
        result.errors, result.worst = comparison.errors, comparison.worst
        result.fingerprint = fingerprint(evaluated, comparison, problem.point.dtype)
        result.reason = check_tokens_alone(routing.token_offsets, evaluated) or judge(comparison, problem.point.dtype)
        return result
