"""The conformance suite: no report is left out, every implementation that a CPU runs meets every case, each check can
fail, and every outcome is a row."""

from __future__ import annotations

import ast
import fcntl
import io
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import ROOT, RightLayer
from rich.console import Console
from torch import Tensor

from harness import compilation, store
from harness.conformance import CASES, COVERED, LINES, OPERATION, OURS, Case, checks, command, get_case, suite
from harness.conformance.checks import CHECKS, Subject
from harness.conformance.inputs import assign, case_problem
from harness.conformance.measure import meet
from harness.correctness import forward_backward
from harness.environment import environment
from harness.errors import UserError
from harness.interface import Implementation, Layer, Problem
from harness.measure import Context
from harness.process import WorkerDied, WorkerProcess, WorkerStopped, WorkerTimeout
from harness.record import validate
from harness.registry import default_registry
from harness.report import data, html, markdown, terminal
from harness.report.tables import cell_text
from harness.routing import choose_experts, expert_counts
from harness.timing import GraphCapturedError
from implementations.torch_loop import _LoopLayer

CommandLine = Callable[..., tuple[int, str, str]]
#: The reports that the suite was made of; what has no report is tried besides.
REPORTS = {
    "pytorch": {"#152668", "#172439", "#192497", "#186365", " PR#150374", "#163425"},
    "MSLK": {"#158"},
    "transformers": {"#48205"},
    "sonic-moe": {"#63", "#21", " PR#15", "#45", " sources"},
    "megablocks": {"#170", "#178", "#114", "#62", "#166"},
    "scattermoe": {"#5", "#12", " PR#23"},
    "DeepGEMM": {" PR#450", " PR#103", "#136", " PR#116", " PR#302"},
    "tritonbench": {"#346", "#143"},
    "flashinfer": {"#2187", " PR#2213"},
    "vllm": {"#56887"},
    "also:": {f" {item}" for item in ("K = 1", "K = E", "T = 1", "T below a tile", "T = 0", "one expert",
                                      "ragged widths", "tied scores", "NaN in x", "inf in x", "fp16", "fp32")},
}  # fmt: skip
#: What an implementation refuses in words, or what PyTorch's own kernel fails; all else must be ok.
REFUSED = {
    ("torch_grouped_mm", "stride-of-100"): ("unsupported", "multiples of 8"),
    ("torch_grouped_mm", "torch-compile"): ("crashed", "Expected inputs of BF16 type"),
}
ON_CPU = [plugin.name for plugin in default_registry().offering("moe_layer", "cpu")]
MET = [case for case in CASES if not case.cuda_only]


# No report is left out.


def test_every_report_is_there() -> None:
    wanted = {f"{project}{number}" for project, numbers in REPORTS.items() for number in numbers}
    assert {line.name for line in LINES} == wanted and len(LINES) == len(wanted)


def test_every_report_has_a_case_or_a_test() -> None:
    by_cases = {line for case in CASES for line in case.lines}
    by_tests = {covered.line for covered in COVERED}
    assert by_cases | by_tests == {line.name for line in LINES}
    assert len({case.name for case in CASES}) == len(CASES)
    assert {case.check for case in CASES} == set(CHECKS)


def test_the_tests_that_stand_for_a_report_exist() -> None:
    for covered in COVERED:
        for test in covered.tests:
            path, name = test.split("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_addresses_of_reports() -> None:
    urls = {line.name: line.url for line in LINES}
    assert urls["pytorch#152668"] == "https://github.com/pytorch/pytorch/issues/152668"
    assert urls["scattermoe PR#23"] == "https://github.com/shawntan/scattermoe/pull/23"
    assert {name for name, url in urls.items() if not url} == {
        name for name in urls if name.startswith("also: ") or name == "sonic-moe sources"
    }


def test_an_unknown_case_is_an_error() -> None:
    with pytest.raises(UserError, match="did you mean no-token"):
        get_case("no-tokens")


# Inputs.


@pytest.mark.parametrize("case", [case for case in CASES if case.counts], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_counts_are_those_of_the_report(case: Case, dtype: str) -> None:
    problem = case_problem(case, replace(case.point("test", (dtype,), "cpu"), dtype=dtype), "cpu")
    chosen = choose_experts(problem.x, problem.router, problem.shape.K)
    assert expert_counts(chosen, problem.shape.E).tolist() == list(case.counts)
    other = case_problem(case, problem.point, "cpu", input_set=1)
    assert torch.equal(other.router, problem.router) and not torch.equal(other.x, problem.x)


def test_assigned_experts_are_distinct_and_counts_must_fit() -> None:
    chosen = assign((5, 0, 3, 4), 6, 2)
    assert torch.bincount(chosen.flatten(), minlength=4).tolist() == [5, 0, 3, 4]
    assert all(len(set(row)) == 2 for row in chosen.tolist())
    for counts in ((7, 5), (5, 5)):
        with pytest.raises(ValueError, match="no routing of 6 tokens"):
            assign(counts, 6, 2)


def test_scores_tie_exactly() -> None:
    problem = case_problem(get_case("tied-scores"), get_case("tied-scores").point("test", ("float32",), "cpu"), "cpu")
    logits = problem.x @ problem.router.T
    top = logits.topk(4).values
    # Of four, two pairs; K = 3 cuts through the second.
    assert torch.equal(top[:, 0], top[:, 1]) and torch.equal(top[:, 2], top[:, 3])


# Every implementation of a CPU meets every case.


@pytest.mark.parametrize("case", MET, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ON_CPU)
def test_implementations_on_a_cpu(name: str, case: Case, tmp_path: Path) -> None:
    plugin = default_registry().get(name)
    point = case.point(name, tuple(plugin.dtypes), "cpu")
    expected = REFUSED.get((name, case.name))
    if expected and expected[0] == "unsupported":
        status, reason = suite.Suite([plugin], [case], "cpu", tmp_path / "rows").refusal(plugin, case, point) or (
            "",
            "",
        )
        assert (status, expected[1] in reason) == ("unsupported", True)
    elif expected:
        with pytest.raises(Exception, match=expected[1]):
            meet(case, point, plugin, Context(lambda phase: None))
    else:
        verdict, _, _ = meet(case, point, plugin, Context(lambda phase: None))
        assert verdict.status == "ok", verdict.reason
        assert verdict.correctness is not None and verdict.correctness.errors


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


# Every outcome is a row.


MACHINE = environment("cpu")


#: Seconds after which a test that waits for another thread gives up.
HANG_S = 60.0


class StubWorker:
    """Stands in for a worker process: does with each job what `does` says, and counts its like."""

    started: ClassVar[list[StubWorker]] = []
    does: ClassVar[Callable[[dict[str, Any]], dict[str, Any] | Exception]]

    failure = WorkerProcess.failure
    died_before_job = False

    def __init__(self, environment: dict[str, str] | None = None, stop: threading.Event | None = None) -> None:
        self.environment, self.stop = environment, stop
        self.phase, self.closed = "build", False
        self.limits: list[float] = []
        type(self).started.append(self)

    def run(self, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        assert not self.closed
        self.limits.append(limit_s)
        found = StubWorker.does(job)
        if isinstance(found, Exception):
            raise found
        yield {"event": "phase", "name": "build"}
        if "reason" in found:
            yield {"event": "failed", "passes": [suite.PASS], **found}
        else:
            base = job["bases"][suite.PASS]
            row = {
                **base,
                "timestamp": "2026-01-01T00:00:00+00:00",
                "environment": MACHINE | {"measured_on": base["measured_on"], "gpu": "NVIDIA H200"},
            }
            yield {"event": "row", "row": {**row, "status": "ok", "reason": "", **found}}
        yield {"event": "done", "poisoned": found.get("status") == "out_of_memory", "phases": {}}

    def log_tail(self) -> str:
        return "the last line"

    def where(self) -> str:
        return "the innermost call"

    def close(self, patience_s: float = 5.0) -> None:
        self.closed = True


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubWorker]:
    StubWorker.started = []
    monkeypatch.setattr(StubWorker, "does", staticmethod(lambda job: {}), raising=False)
    monkeypatch.setattr(suite, "WorkerProcess", StubWorker)
    return StubWorker


def run_suite(path: Path, cases: Sequence[Case], device: str = "cpu", **options: Any) -> list[dict[str, Any]]:
    plugins = [default_registry().get("torch_loop")]
    rows = suite.Suite(plugins, cases, device, path, **options).run()
    stored, problems = store.read(path)
    assert not problems and len(stored) == len(rows)
    assert all(validate(row) == [] for row in stored)
    return rows


def test_one_worker_serves_until_it_dies(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing: dict[str, Any] = {
        MET[1].name: WorkerDied(-11),
        MET[3].name: {"status": "out_of_memory", "reason": "MemoryError: 3 TiB"},
        MET[4].name: {"status": "crashed", "reason": "ValueError: no such kernel"},
    }
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: failing.get(job["case"], {})))
    rows = run_suite(tmp_path / "rows.jsonl", MET[:6])
    assert [row["status"] for row in rows] == ["ok", "crashed", "ok", "out_of_memory", "crashed", "ok"]
    assert rows[1]["reason"] == "the worker died while in build (ended by signal SIGSEGV)\nthe last line"
    assert rows[3]["reason"] == "while in build: MemoryError: 3 TiB"
    # An exception leaves its process good.
    assert [len(worker.limits) for worker in stub.started] == [2, 2, 2]
    assert all(worker.closed for worker in stub.started)
    assert {row["run_id"] for row in rows} == {rows[0]["run_id"]} and len({row["resume_key"] for row in rows}) == 6


def test_what_an_earlier_case_left_is_not_the_next_ones_failure(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stub, "died_before_job", property(lambda worker: len(worker.limits) > 1))
    deaths = [WorkerDied(-6), WorkerDied(-9, out_of_memory=True)]

    def does(job: dict[str, Any]) -> dict[str, Any] | Exception:
        second = job["case"] == MET[1].name
        return deaths.pop(0) if second and deaths else {}

    monkeypatch.setattr(stub, "does", staticmethod(does))
    rows = run_suite(tmp_path / "rows.jsonl", MET[:3])
    assert [row["status"] for row in rows] == ["ok", "out_of_memory", "ok"]
    assert [len(worker.limits) for worker in stub.started] == [2, 1, 1]


def test_a_row_that_breaks_the_rules_fails_its_case_and_no_other(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = {MET[0].name: {"notes": "one sentence"}, MET[1].name: {"build_s": float("nan")}}
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: broken.get(job["case"], {})))
    rows = run_suite(tmp_path / "rows.jsonl", MET[:3])
    assert [row["status"] for row in rows] == ["crashed", "crashed", "ok"]
    assert all("the row breaks the rules of the record: " in row["reason"] for row in rows[:2])


@pytest.mark.parametrize("jobs", [1, 2])
def test_nobody_else_adds_rows_meanwhile(stub: type[StubWorker], tmp_path: Path, jobs: int) -> None:
    path = tmp_path / "rows.jsonl"

    def other_process(row: dict[str, Any]) -> None:
        with path.open("ab") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    assert len(run_suite(path, MET[:4], jobs=jobs, on_row=other_process)) == 4
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(store.WriteError, match="another run is writing rows there"):
            run_suite(path, MET[:1], jobs=jobs)
    assert len(path.read_bytes().splitlines()) == 4


def test_an_implementation_that_never_finishes_ends_soon(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: WorkerTimeout()))
    rows = run_suite(tmp_path / "rows.jsonl", MET[:7])
    assert {row["status"] for row in rows} == {"timeout"}
    limits = [limit for worker in stub.started for limit in worker.limits]
    assert limits == [suite.TIME_LIMIT_S] * 2 + [suite.SHORT_LIMIT_S] * 2
    assert rows[0]["reason"] == "not finished after 60 s, while in build\nthe innermost call"
    assert rows[6]["reason"] == "not tried, after 4 cases that did not finish"


def test_a_limit_below_a_second_is_named_as_it_was_set(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: WorkerTimeout()))
    (row,) = run_suite(tmp_path / "rows.jsonl", MET[:1], time_limit_s=0.5)
    assert row["reason"].startswith("not finished after 0.5 s, while in build\n")


def test_jobs_share_the_cases_and_every_row_comes(stub: type[StubWorker], tmp_path: Path) -> None:
    rows = run_suite(tmp_path / "rows.jsonl", CASES, jobs=3)
    assert sorted(row["variant"] for row in rows) == sorted(case.name for case in CASES)
    assert len(stub.started) == 3 and all(worker.closed for worker in stub.started)


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interruption_ends_every_worker(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, jobs: int
) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(row: dict[str, Any]) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        run_suite(tmp_path / "rows.jsonl", MET, jobs=jobs, on_row=interrupt)
    assert stub.started and all(worker.closed for worker in stub.started)


def test_an_interruption_waits_neither_for_a_case_nor_for_a_worker_that_starts(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interrupted(BaseException):
        pass

    second_is_there = threading.Event()

    def start(
        worker: StubWorker, environment: dict[str, str] | None = None, stop: threading.Event | None = None
    ) -> None:
        plain_start(worker, environment, stop)
        if len(stub.started) == 2:  # as `WorkerProcess` waits for what it started
            second_is_there.set()
            if stop is not None:
                assert stop.wait(HANG_S)
            raise WorkerStopped

    def interrupt(row: dict[str, Any]) -> None:
        assert second_is_there.wait(HANG_S)
        raise Interrupted

    plain_start = stub.__init__
    monkeypatch.setattr(stub, "__init__", start)
    with pytest.raises(Interrupted):
        run_suite(tmp_path / "rows.jsonl", MET, jobs=2, on_row=interrupt)
    assert len(stub.started) == 2 and stub.started[0].closed
    assert all(worker.stop is not None and worker.stop.is_set() for worker in stub.started)


def test_two_processes_race_for_cold_caches(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(suite, "gpu_name", lambda: "NVIDIA H200")
    rows = run_suite(tmp_path / "rows.jsonl", [get_case("cold-caches")], "cuda")
    first, second = stub.started
    assert first.environment == second.environment and first.environment is not None
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "DG_JIT_CACHE_DIR"} <= set(first.environment)
    assert rows[0]["status"] == "ok"
    # One of two is enough to fail it.
    answers: list[Any] = [{}, {"status": "crashed", "reason": "OSError: half a file"}]
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: answers.pop()))
    rows = run_suite(tmp_path / "again.jsonl", [get_case("cold-caches")], "cuda")
    assert rows[0]["status"] == "crashed" and "half a file" in rows[0]["reason"]


def test_what_does_not_run_is_a_row_with_a_reason(stub: type[StubWorker], tmp_path: Path) -> None:
    rows = run_suite(tmp_path / "rows.jsonl", [case for case in CASES if case.cuda_only])
    assert [row["status"] for row in rows] == ["unsupported", "unsupported"] and not stub.started
    assert rows[1]["reason"] == "a CUDA graph needs a GPU"


def test_ours_fail_the_suite_and_nobody_else() -> None:
    rows = [{"implementation": name, "status": status} for name in (*OURS, "scattermoe")
            for status in ("ok", "unsupported", "not_installed", "wrong_result", "unstable")]  # fmt: skip
    failed = suite.failed_of_ours(rows)
    assert [row["implementation"] for row in failed] == [name for name in OURS for _ in range(2)]


def test_on_the_command_line(command_line: CommandLine, tmp_path: Path) -> None:
    """Real workers: one dies, one computes something wrong, one is right."""
    names = ("fake_segfault", "fake_wrong", "torch_loop")
    arguments = ("conformance", *names, "--case", "fine-grained", "--device", "cpu", "--jobs", 2)
    code, out, err = command_line(*arguments, "--output", tmp_path)
    assert code == 0, err
    rows, problems = store.read(tmp_path / "conformance.jsonl")
    assert not problems
    found = {row["implementation"]: row for row in rows}
    assert len(rows) == 3 and {(row["operation"], row["variant"]) for row in rows} == {(OPERATION, "fine-grained")}
    assert found["fake_segfault"]["status"] == "crashed" and "SIGSEGV" in found["fake_segfault"]["reason"]
    assert found["fake_wrong"]["status"] == "wrong_result" and "output 0.1" in found["fake_wrong"]["reason"]
    right = found["torch_loop"]
    assert right["status"] == "ok" and right["environment"]["torch"] and right["routing"]["routed_rows"] == 64 * 24
    assert right["notes"] == ["scaled down on a CPU: memory and time; in full 8192,1536,128,48,24"]
    assert max(right["correctness"]["relative_l2"].values()) <= right["correctness"]["tolerance"]["output"]
    assert "1 of 3 cases ok; our own fail none." in out and "WRONG" in out and "CRASH " in out


def test_a_failure_of_ours_is_the_exit_code(
    command_line: CommandLine, stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: {"status": "wrong_result", "reason": "[b]output 1[/b]"}))
    for name, expected, words in (
        ("torch_loop", 1, "our own implementations fail 1 case"),
        ("torch_grouped_mm", 0, "our own fail none"),
    ):
        code, out, _ = command_line("conformance", name, "--case", "k-of-1", "--output", tmp_path / name)
        assert code == expected and words in out and "[b]output 1[/b]" in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("torch_lop",), "did you mean torch_loop?"),
        (("torch_loop", "--case", "k-of-one"), "unknown case 'k-of-one'"),
        (("torch_loop", "--device", "tpu"), "--device tpu"),
        (("torch_loop", "--device", "cuda"), "no NVIDIA GPU"),
        (("torch_loop", "--jobs", "0"), "--jobs 0"),
        (("torch_loop", "--time-limit", "0"), "--time-limit 0"),
        (("cublas_bound",), "cublas_bound offers no whole layer"),
    ],
)
def test_bad_input_gets_one_line(command_line: CommandLine, arguments: tuple[str, ...], part: str) -> None:
    code, _, err = command_line("conformance", *arguments)
    assert code == 2 and part in err and err.count("\n") == 1, err


# The report.


@pytest.fixture
def made(stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> data.Report:
    wrong = {"status": "crashed", "reason": "ValueError: <b>no</b> such | kernel"}
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: wrong if job["case"] == "k-of-1" else {}))
    # Earlier rows, of another size: what came later counts.
    run_suite(tmp_path / "cpu" / "a.jsonl", [replace(get_case("k-of-1"), cpu_shape="8,16,8,4,1")])
    run_suite(tmp_path / "cpu" / "conformance.jsonl", CASES)
    return data.build(tmp_path, tmp_path / "out")


def test_the_report_has_a_table_of_cases_and_one_of_reasons(made: data.Report) -> None:
    table, reasons = made.table("conformance"), made.table("conformance-reasons")
    assert table is not None and reasons is not None
    found = {cell_text(row[1]): [cell_text(cell) for cell in row] for row in table.rows}
    assert list(found) == [case.name for case in CASES]
    assert found["k-of-1"][2:] == ["crashed", "also: K = 1", "one expert for each token"]
    assert found["cuda-graph"][2] == "unsupported" and found["empty-expert"][2] == "ok"
    assert [cell_text(cell) for cell in reasons.rows[0]][1:5] == [
        "torch_loop", "crashed", "k-of-1", "while in build: ValueError: <b>no</b> such | kernel",
    ]  # fmt: skip
    assert made.conformance[0][1:] == (
        "torch_loop",
        f"{len(CASES) - 3} ok, 1 crashed, 2 unsupported of {len(CASES)} cases",
    )


def test_cases_are_no_measurements(made: data.Report) -> None:
    for name in ("measurements", "failures"):
        table = made.table(name)
        assert table is not None and not table.rows
    runs = made.table("runs")
    assert runs is not None and [cell_text(cell) for cell in runs.rows[0]][2] == OPERATION


def test_every_form_shows_it(made: data.Report, tmp_path: Path) -> None:
    text = io.StringIO()
    terminal.render(Console(file=text, width=160), made)
    assert "35 ok, 1 crashed, 2 unsupported" in text.getvalue()
    assert "crashed: torch_loop on CPU" in text.getvalue() and "a CUDA graph needs a GPU" not in text.getvalue()
    marked = markdown.render(made, tmp_path / "out")
    assert "## Conformance" in marked and "&lt;b&gt;no&lt;/b&gt; such \\| kernel" in marked
    page = html.render(made)
    assert '<section id="conformance"' in page and "<b>no</b>" not in page
    tables = json.loads(page.split('<script type="application/json" id="tables">')[1].split("</script>")[0])
    shown = next(table for table in tables if table["name"] == "conformance")
    assert shown["columns"][2]["kind"] == "status" and shown["columns"][2]["title"] == "torch_loop"


@pytest.mark.parametrize("width", [60, 112, 200])
def test_the_table_fits_a_terminal(width: int) -> None:
    plugins = default_registry().offering("moe_layer")
    statuses = [*command.SHORT, *(["ok"] * len(plugins))]
    rows = [
        {"implementation": plugin.name, "variant": case.name, "status": statuses[index], "reason": "[b]why[/b]"}
        for index, plugin in enumerate(plugins)
        for case in CASES[:2]
    ]
    text = io.StringIO()
    command.show(Console(file=text, width=width), rows, CASES[:2], plugins)
    lines = text.getvalue().splitlines()
    shown = [line.split() for line in lines if line.lstrip().startswith(f"{CASES[0].name} ")]
    assert [cell for line in shown for cell in line[1:]] == [command.SHORT[s] for s in statuses[: len(plugins)]]
    assert max(map(len, lines[: lines.index(next(line for line in lines if "[b]why" in line))])) <= width
    heads = text.getvalue().split(CASES[0].name)[0]
    assert all(plugin.name in " ".join(heads.split()) for plugin in plugins)
