"""What is checked of a case, in the worker process. Everything is judged by the harness's own gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.compilation import CompilationCounter
from harness.conformance.cases import Case
from harness.conformance.inputs import case_problem
from harness.correctness import Correctness, Evaluated, evaluate, forward_backward, judge
from harness.interface import Implementation, Layer, Problem
from harness.measure import Context
from harness.operations import get_operation
from harness.reference import LEAST_EXPERT, LEAST_TOKEN, Comparison, ErrorSums, compare_layer
from harness.routing import choose_experts
from harness.shapes import MoEShape
from harness.timing import GraphCalls, GraphCapturedError

#: Calls of the checks that repeat.
CALLS = 5
#: Large enough to move every weight in bfloat16 by several roundings, small enough to leave it of ordinary size.
LEARNING_RATE = 0.01
_WEIGHTS = ("gate", "up", "down", "router")


@dataclass
class Subject:
    """A built layer, its problem, and what made both. ``alone``: no other process runs cases meanwhile."""

    case: Case
    problem: Problem
    layer: Layer
    implementation: Implementation
    context: Context
    alone: bool = True

    @property
    def device(self) -> str:
        return self.problem.point.device

    def problem_of(self, input_set: int) -> Problem:
        return case_problem(self.case, self.problem.point, self.device, input_set)


@dataclass
class Verdict:
    """A row's status and reason, what the gate found, and sentences for the row's notes."""

    status: str = "ok"
    reason: str = ""
    correctness: Correctness | None = None
    notes: list[str] = field(default_factory=list)

    def fails(self, reason: str | None, status: str = "wrong_result") -> Verdict:
        """The same with a first failure, where there is one."""
        return replace(self, status=status, reason=reason) if reason and self.status == "ok" else self


class Wrapped(Layer):
    """A layer around another one: changes how it is called, not what it is."""

    def __init__(self, inner: Layer, forward: Callable[[Tensor], Tensor] | None = None) -> None:
        self.inner = inner
        self._forward = forward or inner.forward

    def parameters(self) -> Sequence[Tensor]:
        return self.inner.parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return self.inner.canonical_gradients(gradients)

    def expert_indices(self, x: Tensor) -> Tensor | None:
        return self.inner.expert_indices(x)


def gate(subject: Subject, layer: Layer | None = None, problem: Problem | None = None) -> Verdict:
    """Output and all gradients against the fp32 reference."""
    problem = problem or subject.problem
    found = get_operation(problem.point.operation).check(layer or subject.layer, problem)
    return Verdict("wrong_result" if found.reason else "ok", found.reason or "", found)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaN equals NaN here."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def repeated(subject: Subject) -> Verdict:
    """Equal inputs give equal bits."""
    first = _tensors(evaluate(subject.layer, subject.problem))
    differ: dict[str, float] = {}
    for _ in range(CALLS - 1):
        for name, tensor in _tensors(evaluate(subject.layer, subject.problem)).items():
            if not same_bits(tensor, first[name]):
                differ[name] = max(differ.get(name, 0.0), float((tensor != first[name]).double().mean()))
    found = ", ".join(f"{name} ({share:.2g} of its values)" for name, share in differ.items())
    return gate(subject).fails(f"identical calls disagree in {found}" if found else None)


def _tensors(evaluated: Evaluated) -> dict[str, Tensor]:
    return {"output": evaluated.output, "grad_x": evaluated.grad_x, **evaluated.gradients}


def many_calls(subject: Subject) -> Verdict:
    """Forward and backward again and again, each waited for: an illegal access surfaces at the call that did it."""
    for index in range(CALLS):
        problem = subject.problem_of(index)
        forward_backward(subject.layer, problem.x, problem.grad_output)
        if subject.device == "cuda":
            torch.cuda.synchronize()
    return gate(subject)


#: Up to this size, in bytes, torch's caching allocator serves a request from segments of their own.
_SMALL = 1 << 20


def fill_free_blocks() -> None:
    """Fill every free block of torch's caching allocator with bytes of 255: NaN as a float, -1 as an integer."""
    torch.cuda.synchronize()
    free: list[int] = []
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            # A graph's.
            continue
        for size in (block["size"] for block in segment["blocks"] if block["state"] == "inactive"):
            if segment["segment_type"] == "small":
                free += [min(_SMALL, size - start) for start in range(0, size, _SMALL)]
            elif size > _SMALL:
                # A smaller rest of a large segment serves no request at all.
                free.append(size)
    # The largest first, so that none of them is split for a smaller one.
    held = [torch.empty(size, dtype=torch.uint8, device="cuda").fill_(255) for size in sorted(free, reverse=True)]
    torch.cuda.synchronize()
    del held


@contextmanager
def nan_in_empty_tensors() -> Iterator[None]:
    """On a CPU `torch.empty` and its kin are full of NaN, or of the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def poisoned(subject: Subject) -> Verdict:
    """Whatever the layer allocates is full of NaN at first."""
    layer, problem = subject.layer, subject.problem
    if subject.device == "cpu":
        with nan_in_empty_tensors():
            return gate(subject)
    # So that there are free blocks of every size that it needs.
    forward_backward(layer, problem.x, problem.grad_output)

    def forward(x: Tensor) -> Tensor:
        fill_free_blocks()
        output = layer.forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: fill_free_blocks())
        return output

    return gate(subject, Wrapped(layer, forward))


def canonical_weights(layer: Layer) -> dict[str, Tensor]:
    """Copies of the layer's weights in canonical layout: they lie as their gradients do."""
    found = layer.canonical_gradients([parameter.detach() for parameter in layer.parameters()])
    return {name: found[f"grad_{name}"].clone(memory_format=torch.contiguous_format) for name in _WEIGHTS}


def layout(subject: Subject) -> Verdict:
    """The weights come out of the layer's own layout as they went in."""
    found = canonical_weights(subject.layer)
    wrong = [
        name
        for name in _WEIGHTS
        if not same_bits(found[name].to(subject.problem.x.dtype), getattr(subject.problem, name))
    ]
    return gate(subject).fails(
        f"weights in the layer's own layout are others than those given: {', '.join(wrong)}" if wrong else None
    )


def two_steps(subject: Subject) -> Verdict:
    """The layer stays right while an optimiser changes its weights and the routing changes with the input."""
    optimiser = torch.optim.AdamW(list(subject.layer.parameters()), lr=LEARNING_RATE)
    verdict = Verdict()
    for step in range(3):
        problem = subject.problem_of(step)
        for name, weight in canonical_weights(subject.layer).items():
            setattr(problem, name, weight)
        found = gate(subject, problem=problem)
        if found.status != "ok":
            return replace(found, reason=f"after {step} steps: {found.reason}" if step else found.reason)
        verdict = verdict if verdict.correctness else found
        _, gradients = forward_backward(subject.layer, problem.x, problem.grad_output)
        for parameter, gradient in zip(subject.layer.parameters(), gradients[1:], strict=True):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return verdict


def strided_weights(subject: Subject) -> Verdict:
    """The experts' weights lie transposed in memory, as a checkpoint may hold them."""
    shape = subject.problem.shape
    for parameter in subject.layer.parameters():
        # The router's is no larger than that.
        if parameter.dim() > 1 and parameter.numel() > shape.E * shape.d:
            parameter.data = parameter.data.mT.contiguous().mT
    return gate(subject)


def _not_finite(subject: Subject, value: float) -> Verdict:
    """One token's x holds a value that is not finite. Its own output must not be, the other tokens' must not change,
    nor the gradients of experts that it did not choose."""
    verdict = gate(subject)
    if verdict.status != "ok":
        return verdict
    layer, problem, shape = subject.layer, subject.problem, subject.problem.shape
    clean = evaluate(layer, problem)
    indices = _indices(layer, problem)
    x = problem.x.clone()
    token = shape.T // 2
    x[token, -1] = value
    spoilt = evaluate(layer, replace(problem, x=x))
    if bool(spoilt.output[token].isfinite().any()):
        return verdict.fails(f"a token with {value} in x has finite values in its output")
    others = torch.arange(shape.T, device=x.device) != token
    sums = {name: ErrorSums() for name in ("output", "grad_x", "grad_gate", "grad_up", "grad_down")}
    sums["output"].add(spoilt.output[others], clean.output[others].float(), by_row=True)
    sums["grad_x"].add(spoilt.grad_x[others], clean.grad_x[others].float(), by_row=True)
    weights = ("grad_gate", "grad_up", "grad_down")
    finite = torch.stack([spoilt.gradients[name].isfinite().flatten(1).all(1) for name in weights]).all(0)
    if int((~finite).sum()) > shape.K:
        return verdict.fails(
            f"{int((~finite).sum())} experts have gradients that are not finite, of one token with {value}"
        )
    finite[indices[token]] = False
    for name in weights:
        for expert in finite.nonzero().flatten().tolist():
            sums[name].add(spoilt.gradients[name][expert], clean.gradients[name][expert].float())
    worst = {
        name: one.worst_part(LEAST_TOKEN if name in ("output", "grad_x") else LEAST_EXPERT)
        for name, one in sums.items()
    }
    changed = judge(Comparison({name: one.relative() for name, one in sums.items()}, 0, worst), problem.point.dtype)
    return verdict.fails(f"{value} in one token's x changes the others: {changed}" if changed else None)


def _indices(layer: Layer, problem: Problem) -> Tensor:
    found = layer.expert_indices(problem.x)
    return choose_experts(problem.x, problem.router, problem.shape.K) if found is None else found.long()


def nan(subject: Subject) -> Verdict:
    """NaN in one token's x stays with it."""
    return _not_finite(subject, float("nan"))


def infinity(subject: Subject) -> Verdict:
    """An infinity in one token's x stays with it."""
    return _not_finite(subject, float("inf"))


def two_shapes(subject: Subject) -> Verdict:
    """Two layers of different shapes take turns in one process; once both were called, nothing compiles any more."""
    point = replace(subject.problem.point, shape=MoEShape.parse(subject.case.second_shape))
    second = case_problem(subject.case, point, subject.device)
    layers = [(subject.layer, subject.problem), (subject.implementation.build(second), second)]
    verdict = Verdict()
    for layer, problem in layers:
        found = gate(subject, layer, problem)
        if found.status != "ok":
            return replace(found, reason=f"at {problem.shape}: {found.reason}")
        verdict = verdict if verdict.correctness else found
    compilations = CompilationCounter(subject.alone)
    for _ in range(CALLS):
        for layer, problem in layers:
            forward_backward(layer, problem.x, problem.grad_output)
    compiled = compilations.since_start()
    reason = f"{compiled} compilations in calls that came after a call of the same shape"
    return verdict.fails(reason if compiled else None, "unstable")


def compiled(subject: Subject) -> Verdict:
    """`torch.compile` of the forward: traced, differentiated and run without a code generator (``aot_eager``)."""
    from torch._dynamo.utils import counters

    breaks: Any = counters["graph_break"]
    before = sum(breaks.values())
    traced: Callable[[Tensor], Tensor] = torch.compile(subject.layer.forward, backend="aot_eager")
    verdict = gate(subject, Wrapped(subject.layer, traced))
    broken = sum(breaks.values()) - before
    verdict.notes.append(
        f"torch.compile breaks the graph at {broken} places" if broken else "torch.compile captures the forward whole"
    )
    return verdict


def graph(subject: Subject) -> Verdict:
    """A forward and a backward captured in CUDA graphs; what the replays leave is judged like any call's."""
    if subject.implementation.no_graph_reason:
        return Verdict("unsupported", subject.implementation.no_graph_reason)
    verdict = gate(subject)
    if verdict.status != "ok":
        return verdict
    problem, layer, context = subject.problem, subject.layer, subject.context
    assert context.evict is not None
    try:
        calls = GraphCalls(layer, [problem], context.evict)
    except GraphCapturedError as error:
        context.poisoned = True
        return verdict.fails(f"cannot be captured in a CUDA graph: {error}", "crashed")
    for index in range(2):
        calls(index)
    output, raw = calls.outputs()
    leaves = [problem.x, *layer.parameters()]
    gradients = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(raw, leaves, strict=True)]
    indices = _indices(layer, problem)
    comparison = compare_layer(problem, indices, output, gradients[0], layer.canonical_gradients(gradients[1:]))
    wrong = judge(comparison, problem.point.dtype)
    return verdict.fails(f"replayed from a CUDA graph: {wrong}" if wrong else None)


#: By the name that cases give. ``cold_caches`` is the gate in each of two processes, which the parent starts.
CHECKS: dict[str, Callable[[Subject], Verdict]] = {
    "gate": gate,
    "repeated": repeated,
    "many_calls": many_calls,
    "poisoned": poisoned,
    "layout": layout,
    "two_steps": two_steps,
    "strided_weights": strided_weights,
    "nan": nan,
    "infinity": infinity,
    "two_shapes": two_shapes,
    "compiled": compiled,
    "graph": graph,
    "cold_caches": gate,
}
