"""What the operations on single kernels share: routed rows of a planted routing, a forward alone, its check."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from harness.correctness import TOLERANCES, WORST_PART, Correctness, Snapshot, WrongResult
from harness.fingerprint import Fingerprint, sketch
from harness.interface import Kernel, Layer, Point, Problem, RoutedRows
from harness.operations.base import Operation
from harness.problem import make_problem
from harness.reference import LEAST_TOKEN, ErrorSums, full_precision
from harness.routing import choose_experts, expert_counts, router_scores
from harness.traces import chosen_experts


def rows_of(logits: Tensor, indices: Tensor, convention: str) -> RoutedRows:
    """The routed rows of top-K's choice (T, K), sorted by expert and within an expert by token; scores by fp32 logits
    (T, E)."""
    tokens, k = indices.shape
    order = torch.argsort(indices.reshape(-1), stable=True)
    reverse = torch.empty_like(order)
    reverse[order] = torch.arange(order.numel(), device=order.device)
    counts = expert_counts(indices, logits.shape[1])
    offsets = torch.zeros(logits.shape[1] + 1, dtype=torch.int64, device=logits.device)
    offsets[1:] = counts.cumsum(0)
    return RoutedRows(
        scores=router_scores(logits, indices, convention),
        indices=indices,
        gather=(order // k).int(),
        reverse=reverse.view(tokens, k).int(),
        expert_offsets=offsets.int(),
    )


class KernelOperation(Operation):
    """A kernel of the layer by itself, on operands that the layer would have at that place.

    The routing is top-K's of the problem's own tokens, made in fp32, or a trace's, and the same for every input set.
    """

    passes: ClassVar[tuple[str, ...]] = ("forward",)
    takes_routing: ClassVar[bool] = True
    reports_memory: ClassVar[bool] = False
    reports_bandwidth: ClassVar[bool] = True
    #: What the first dimension of a result counts, and how small one of them may be (see `ErrorSums.worst_part`).
    part: ClassVar[str] = "row"
    least_part: ClassVar[float] = LEAST_TOKEN

    @abstractmethod
    def inputs(self, problem: Problem, rows: RoutedRows) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The kernel's x, and its other operands by name, from a layer's problem."""

    @abstractmethod
    def reference(self, problem: Problem) -> dict[str, Tensor]:
        """What the kernel must give, by name, in fp32 (or integers)."""

    def make_problem(self, point: Point, device: torch.device | str, input_set: int = 0) -> Problem:
        layer = make_problem(point, device, input_set, plant_trace=not self.takes_routing)
        first = make_problem(point, device, plant_trace=not self.takes_routing) if input_set else layer
        with full_precision():
            logits = first.x.float() @ first.router.float().T
        if point.routing.trace_file and self.takes_routing:
            indices = chosen_experts(point.routing, point.shape).to(logits.device)
        else:
            indices = choose_experts(first.x.float(), first.router.float(), point.shape.K)
        rows = rows_of(logits, indices, point.layer.router_convention)
        with torch.no_grad():
            x, operands = self.inputs(layer, rows)
        none = x.new_empty(0)
        return Problem(point, x, none, none, none, none, none, rows=rows, operands=dict(operands))

    def compare(self, layer: Layer, problem: Problem) -> Correctness:
        assert problem.rows is not None
        if not isinstance(layer, Kernel):
            raise WrongResult(f"build returned {type(layer).__name__}, expected a Kernel")
        before = Snapshot(problem)
        # A call on other data comes first: what the judged call still holds of it is stale.
        layer.forward(-problem.x)
        found = layer.outputs(layer.forward(problem.x))
        with torch.no_grad(), full_precision():
            expected = self.reference(problem)
        result = Correctness(reason=before.change(problem) or _shapes(found, expected))
        if self.reports_routing:
            result.counts = problem.rows.expert_offsets.long().diff().cpu()
        if result.reason is None:
            self.judge(result, problem, found, expected)
        return result

    def repeatable(self, layer: Layer, found: Any) -> dict[str, Tensor]:
        assert isinstance(layer, Kernel)
        return {name: value for name, value in layer.outputs(found).items() if value.is_floating_point()}

    def judge(
        self, result: Correctness, problem: Problem, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]
    ) -> None:
        """Fill in the errors, and the reason where one is above the outputs' tolerance, or one part's above ten times
        that."""
        tolerance = TOLERANCES[problem.point.dtype][0]
        wrong = []
        kept = Fingerprint({}, {}, {}, {})
        for name, reference in expected.items():
            sums = ErrorSums()
            # By slices: a difference in fp32 of all of it would be the largest tensor of the point.
            parts = max(1, SLICE * len(reference) // max(reference.numel(), 1))
            for value, wanted in zip(found[name].split(parts), reference.split(parts), strict=True):
                sums.add(value.unsqueeze(-1).flatten(1), wanted.float().unsqueeze(-1).flatten(1), by_row=True)
            result.errors[name], result.worst[name] = sums.relative(), sums.worst_part(self.least_part)
            kept.sketches[name], kept.sizes[name] = sketch(found[name]), sums.size()
            kept.tolerances[name], kept.parts[name] = tolerance, (self.least_part, WORST_PART)
            if not result.errors[name] <= tolerance:
                wrong.append(f"{name} {result.errors[name]:.3g} > {tolerance:g}")
            elif not result.worst[name] <= WORST_PART * tolerance:
                wrong.append(f"{name} {result.worst[name]:.3g} > {WORST_PART * tolerance:g} for one {self.part}")
        if wrong:
            result.reason = f"relative L2 error above tolerance for {problem.point.dtype}: {', '.join(wrong)}"
        result.fingerprint = kept


#: Elements of a result that are compared at once.
SLICE = 2**26


def _shapes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    for name, reference in expected.items():
        if name not in found:
            return f"{name} is missing"
        if not isinstance(found[name], Tensor):
            return f"{name} is {type(found[name]).__name__}, expected a tensor {tuple(reference.shape)}"
        if found[name].device != reference.device:
            return f"{name} is on {found[name].device}, expected {reference.device}"
        if found[name].shape != reference.shape:
            return f"{name} has shape {tuple(found[name].shape)}, expected {tuple(reference.shape)}"
    return None
