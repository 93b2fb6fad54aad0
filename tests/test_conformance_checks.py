"""The conformance suite's checks: each can fail, and what a GPU alone can do runs with stand-ins for its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from conftest import RightLayer
from torch import Tensor

from harness import compilation
from harness.conformance import checks, get_case
from harness.conformance.checks import Subject
from harness.conformance.inputs import case_problem
from harness.conformance.measure import meet
from harness.correctness import forward_backward
from harness.interface import Implementation, Layer, Problem
from harness.measure import Context
from harness.timing import GraphCapturedError
from implementations.torch_loop import _LoopLayer

# Each check can fail.


#: The second one multiplies nothing by the weight zero, which would carry NaN to experts that nobody chose.
Right = RightLayer | _LoopLayer


class Planted(Implementation):
    """A right layer with one fault."""

    name, label, upstream, licence = "planted", "Planted", "none", "none"
    devices, dtypes = ("cpu",), ("float32",)

    def __init__(self, layer: type[Right]) -> None:
        self.layer = layer

    def build(self, problem: Problem) -> Layer:
        return self.layer(problem)


class Undetermined(RightLayer):
    """Within every tolerance, but never twice the same."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return super().forward(x) * (1 + 1e-6 * type(self).calls)


class Uninitialised(RightLayer):
    """Adds a buffer that nobody has written, which is zero where the memory happens to be fresh."""

    def forward(self, x: Tensor) -> Tensor:
        rest = torch.empty(x.shape)
        return super().forward(x) + torch.where(rest.isnan(), rest, 0.0)


class Stale(RightLayer):
    """Computes with a copy of the weights that it made while it was built."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.copy = problem.gate.clone()

    def expert(self, e: int, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return super().expert(e, x, gate - gate.detach() + self.copy[e], up, down)


class Interleaved(RightLayer):
    """Keeps its up weights in another order of rows than it says."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.up = problem.up.flip(1).detach().requires_grad_()

    def expert(self, e: int, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return super().expert(e, x, gate, up.flip(0), down)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        found = super().canonical_gradients(gradients)
        # The gradients are right, the weights come out as they lie.
        return found if gradients[0].data_ptr() == self.gate.data_ptr() else {**found, "grad_up": gradients[1].flip(1)}


class Contiguous(RightLayer):
    """Takes it that weights lie side by side."""

    def expert(self, e: int, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return super().expert(e, x, gate.as_strided(gate.shape, (gate.shape[1], 1)), up, down)


class Silencing(_LoopLayer):
    """Turns what is not finite into numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.nan_to_num(0.0, 1.0, -1.0))


class Spreading(_LoopLayer):
    """Its tokens share a buffer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0 * x.detach().sum()


class Recompiling(RightLayer):
    """Compiles again whenever it meets another shape than at its last call."""

    last: ClassVar[tuple[int, ...]] = ()

    def forward(self, x: Tensor) -> Tensor:
        if Recompiling.last != tuple(x.shape):
            compilation._triton_count += 1
            Recompiling.last = tuple(x.shape)
        return super().forward(x)


class Untraceable(RightLayer):
    """Forgets a factor where it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if torch.compiler.is_compiling() else out


class Tiring(RightLayer):
    """The third call fails."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("an illegal memory access was encountered")
        return super().forward(x)


@pytest.mark.parametrize(
    ("layer", "case", "status", "reason"),
    [
        (Undetermined, "identical-calls", "wrong_result", "identical calls disagree in output (1 of its values)"),
        (Uninitialised, "poisoned-allocator", "wrong_result", "output nan"),
        (Stale, "two-optimiser-steps", "wrong_result", "after 1 steps: relative L2 error"),
        (Interleaved, "weight-layout", "wrong_result", "are others than those given: up"),
        (Contiguous, "non-contiguous-weights", "wrong_result", "relative L2 error above tolerance"),
        (Silencing, "nan-in-x", "wrong_result", "a token with nan in x has finite values"),
        (Silencing, "inf-in-x", "wrong_result", "a token with inf in x has finite values"),
        (Spreading, "nan-in-x", "wrong_result", "nan in one token's x changes the others: relative L2 error"),
        (Recompiling, "two-shapes", "unstable", "10 compilations in calls that came after a call of the same shape"),
        (Untraceable, "torch-compile", "wrong_result", "output 1 >"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_check_finds(layer: type[Right], case: str, status: str, reason: str) -> None:
    asked = get_case(case)
    # A fault shows at any size.
    asked = replace(asked, cpu_shape=asked.cpu_shape if asked.counts else "24,32,16,3,2")
    asked = replace(asked, second_shape="12,32,16,3,2" if asked.second_shape else "")
    point = asked.point("planted", ("float32",), "cpu")
    verdict, _, _ = meet(asked, point, Planted(layer), Context(lambda phase: None))
    assert verdict.status == status and reason in verdict.reason, verdict
    # The right layer has none of these faults. (Traced it takes seconds: the implementations have been, above.)
    if layer is not Untraceable:
        right = meet(asked, point, Planted(layer.__base__), Context(lambda phase: None))[0]
        assert right.status == "ok", right.reason


def test_a_fault_of_a_later_call_is_found() -> None:
    case = replace(get_case("many-calls"), cpu_shape="24,32,16,8,2")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        meet(case, case.point("planted", ("float32",), "cpu"), Planted(Tiring), Context(lambda phase: None))


def test_only_the_gradients_of_chosen_experts_may_turn_nan() -> None:
    class SpreadingGradients(_LoopLayer):
        def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
            found = super().canonical_gradients(gradients)
            return {**found, "grad_up": found["grad_up"] + 0.0 * found["grad_up"].sum()}

    case = replace(get_case("nan-in-x"), cpu_shape="24,32,16,8,2")
    point = case.point("planted", ("float32",), "cpu")
    verdict = meet(case, point, Planted(SpreadingGradients), Context(lambda phase: None))[0]
    assert "experts have gradients that are not finite, of one token" in verdict.reason


# What a GPU alone can do, with stand-ins for its part.


def on_a_gpu(name: str, layer: type[Right]) -> Subject:
    """The case's layer on the CPU, whose point says cuda."""
    case = replace(get_case(name), shape="24,32,16,3,2", counts=(24, 0, 24) if get_case(name).counts else ())
    point = case.point("planted", ("float32",), "cuda")
    problem = case_problem(case, point, "cpu")
    return Subject(case, problem, layer(problem), Planted(layer), Context(lambda phase: None, evict=lambda: None))  # type: ignore[arg-type]


class ReplayedCalls:
    """In place of `GraphCalls`: "captures" by calling, and gives what it is told to spoil."""

    spoil: ClassVar[Callable[[Tensor], Tensor]]

    def __init__(self, layer: Layer, problems: Sequence[Problem], evict: object) -> None:
        self.layer, self.problem, self.calls = layer, problems[0], 0

    def __call__(self, index: int) -> None:
        self.calls += 1

    def outputs(self) -> tuple[Tensor, Sequence[Tensor | None]]:
        assert self.calls == 2
        output, gradients = forward_backward(self.layer, self.problem.x, self.problem.grad_output)
        return ReplayedCalls.spoil(output), gradients


def test_replays_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "GraphCalls", ReplayedCalls)
    monkeypatch.setattr(ReplayedCalls, "spoil", staticmethod(lambda output: output), raising=False)
    assert checks.graph(on_a_gpu("cuda-graph", RightLayer)).status == "ok"
    # Replays that left the output of another call.
    monkeypatch.setattr(ReplayedCalls, "spoil", staticmethod(lambda output: output.flip(0)))
    verdict = checks.graph(on_a_gpu("cuda-graph", RightLayer))
    assert verdict.status == "wrong_result"
    assert verdict.reason.startswith("replayed from a CUDA graph: relative L2 error above tolerance")


def test_a_capture_that_fails_is_said_and_spoils_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise GraphCapturedError("RuntimeError: operation not permitted when stream is capturing")

    monkeypatch.setattr(checks, "GraphCalls", refuse)
    subject = on_a_gpu("cuda-graph", RightLayer)
    verdict = checks.graph(subject)
    assert verdict.status == "crashed" and "not permitted when stream is capturing" in verdict.reason
    assert subject.context.poisoned
    monkeypatch.setattr(Planted, "no_graph_reason", "it reads counts on the host")
    verdict = checks.graph(on_a_gpu("cuda-graph", RightLayer))
    assert (verdict.status, verdict.reason) == ("unsupported", "it reads counts on the host")


def test_blocks_are_filled_before_each_forward_and_each_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    filled: list[str] = []

    class Watching(RightLayer):
        def forward(self, x: Tensor) -> Tensor:
            filled.append("forward")
            out = super().forward(x)
            out.register_hook(lambda gradient: filled.append("backward"))
            return out

    monkeypatch.setattr(checks, "fill_free_blocks", lambda: filled.append("fill"))
    assert checks.poisoned(on_a_gpu("poisoned-allocator", Watching)).status == "ok"
    # The first call, which leaves blocks of every size, and the gate's two.
    assert filled[:2] == ["forward", "backward"] and len(filled) == 2 + 2 * 4
    for start in (2, 6):
        assert filled[start : start + 2] == ["fill", "forward"] and sorted(filled[start + 2 : start + 4]) == [
            "backward", "fill",
        ]  # fmt: skip


def test_free_blocks_of_all_sizes_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest first, small segments by what they serve at once; no block of a graph's pool, none in use, no rest
    that would not be found again."""

    def segment(kind: str, pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
        found = [{"size": size, "state": state} for size, state in blocks]
        return {"segment_type": kind, "segment_pool_id": pool, "blocks": found}

    snapshot = [
        segment("small", (0, 0), (512, "inactive"), (1024, "active_allocated"), (4096, "inactive")),
        segment("small", (0, 0), (1 << 21, "inactive")),
        segment("small", (0, 0), ((1 << 20) + 512, "inactive"), (1 << 19, "active_pending_free")),
        segment("large", (0, 0), (1 << 19, "inactive"), (1 << 22, "inactive")),
        segment("large", (0, 1), (1 << 23, "inactive")),
    ]
    asked: list[int] = []
    empty = torch.empty

    def allocate(size: int, dtype: torch.dtype, device: str) -> Tensor:
        asked.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "empty", allocate)
    checks.fill_free_blocks()
    assert asked == [1 << 22, *[1 << 20] * 3, 4096, 512, 512]
