"""The whole MoE layer: router, top-K, experts, aggregation; forward and backward."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from harness.correctness import (
    Correctness,
    Snapshot,
    check_routing,
    check_shapes,
    check_tokens_alone,
    evaluate,
    fingerprint,
    forward_backward,
    judge,
    layer_counts,
)
from harness.interface import Layer, Point, Problem
from harness.operations.base import Operation
from harness.problem import make_problem
from harness.reference import compare_layer
from harness.rounding_check import check_rounding, kept_tokens
from harness.routing import choose_experts, expert_counts
from harness.token_rounding import TOP_K


class MoELayer(Operation):
    """O[t] = sum over the token's K experts e of S[t,e] · down_e(silu(gate_e x_t) · up_e x_t).

    Where the point's routing method is a token rounding, it is the layer's own and part of it; a token then has as many
    experts as were kept for it."""

    name: ClassVar[str] = "moe_layer"

    def make_problem(self, point: Point, device: torch.device | str, input_set: int = 0) -> Problem:
        return make_problem(point, device, input_set)

    def compare(self, layer: Layer, problem: Problem) -> Correctness:
        shape = problem.shape
        before = Snapshot(problem)
        # A call on other data, routed otherwise, comes first: what the judged call still holds of it is stale.
        forward_backward(layer, -problem.x, problem.grad_output)
        evaluated = evaluate(layer, problem)
        indices = layer.expert_indices(problem.x)
        if indices is None:
            indices = choose_experts(problem.x, problem.router, shape.K)
        weights = {f"grad_{w}": (shape.E, shape.n, shape.d) for w in ("gate", "up")}
        expected: dict[str, tuple[int, ...]] = {
            "output": (shape.T, shape.d),
            "grad_x": (shape.T, shape.d),
            **weights,
            "grad_down": (shape.E, shape.d, shape.n),
            "grad_router": (shape.E, shape.d),
        }
        result = Correctness(reason=before.change(problem) or check_shapes(evaluated, expected))
        if result.reason:
            return result
        result.reason, result.routing_differs = check_routing(problem, indices)
        if result.reason:
            return result
        kept = None
        if problem.point.routing.method == TOP_K:
            result.counts = layer_counts(problem, indices)
        else:
            pairs = layer.kept_pairs(problem.x)
            if pairs is None:
                result.reason = "the layer does not tell which pairs its rounding kept"
                return result
            result.reason = check_rounding(problem, indices, *pairs)
            if result.reason:
                return result
            kept = kept_tokens(pairs[1]), pairs[0]
            result.moved = _moved(indices, *kept)
            result.counts = expert_counts(pairs[0], shape.E).cpu()
            result.reason = check_tokens_alone(pairs[1], evaluated)
            if result.reason:
                return result
        comparison = compare_layer(problem, indices, evaluated.output, evaluated.grad_x, evaluated.gradients, kept)
        result.errors, result.worst = comparison.errors, comparison.worst
        result.fingerprint = fingerprint(evaluated, comparison, problem.point.dtype)
        result.reason = judge(comparison, problem.point.dtype)
        return result


def _moved(indices: Tensor, tokens: Tensor, experts: Tensor) -> tuple[int, int]:
    """How many pairs of top-K (T, K) are not kept, and how many kept pairs (P,) are not among them."""
    unchanged = int((indices[tokens] == experts[:, None]).sum())
    return indices.numel() - unchanged, experts.numel() - unchanged
