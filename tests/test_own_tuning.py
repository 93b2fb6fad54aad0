"""What fails with the first configuration of its kernels' tuners is asked again with the choice that they make."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fake_conformance import MET, StubWorker, run_suite
from rich.console import Console

from harness import check
from harness.check import SLOW_CHOICES, Checker, check_implementations
from harness.conformance import CASES, suite
from harness.deadline import Deadline
from harness.interface import Point
from harness.process import WorkerDied, WorkerProcess, WorkerStartError, WorkerTimeout
from harness.record import validate
from harness.registry import load_registry
from harness.shapes import MoEShape
from harness.tuners import FIRST_CONFIGURATION, OWN_CHOICE

pytestmark = pytest.mark.usefixtures("forked_workers")

#: Each layer's output is multiplied by what its tuner chooses: the smallest number. None: the process dies.
PLUGINS = """
import os

from harness.interface import Implementation, Layer, Problem
from implementations._template import _TemplateLayer


class Kernel:
    arg_names = ("n",)

    def __init__(self) -> None:
        def kernel(n: int, FACTOR: float) -> None:
            raise AssertionError

        self.fn, self.last = kernel, 0.0

    def run(self, n, *, FACTOR, grid, warmup, **options):
        if FACTOR < 0:
            os.abort()
        self.last = FACTOR
        return FACTOR

    def bench(self, call, quantiles):
        call()
        return [self.last] * len(quantiles)


def tuner(*factors):
    import triton

    kernel = Kernel()
    configs = [triton.Config({"FACTOR": factor}) for factor in factors]
    return triton.autotune(configs, key=["n"], do_bench=kernel.bench)(kernel)


class TunedLayer(_TemplateLayer):
    tuner = None

    def forward(self, x):
        return super().forward(x) * self.tuner[(1,)](3)


class _Tuned(Implementation):
    label, upstream, licence = "Tuned", "none", "none"
    devices, dtypes = ("cpu",), ("float32",)
    factors = ()

    def build(self, problem: Problem) -> Layer:
        layer = TunedLayer(problem)
        layer.tuner = tuner(*self.factors)
        return layer


class Maligned(_Tuned):
    name, factors = "maligned", (2.0, 1.0)


class Wrong(_Tuned):
    name, factors = "wrong", (4.0, 2.0)


class Right(_Tuned):
    name, factors = "right", (1.0, 4.0)


class Untuned(_Tuned):
    name, factors = "untuned", (2.0,)
"""
ORDINARY = next(case for case in CASES if case.name == "ordinary-inputs")


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "tuned.py").write_text(PLUGINS)
    monkeypatch.setenv("MOEBENCH_PLUGINS", str(folder))
    return folder


@pytest.fixture
def asked(stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The jobs that came, of workers in which a tuner has taken its first configuration."""
    monkeypatch.setattr(stub, "untuned", True)
    jobs: list[dict[str, Any]] = []
    yield jobs
    assert all(worker.closed for worker in stub.started)


def test_cases_of_a_kernel_that_tunes_itself(plugins: Path, tmp_path: Path) -> None:
    registry = load_registry()
    named = [registry.get(name) for name in ("maligned", "wrong", "right", "untuned")]
    met = suite.Suite(named, [ORDINARY], "cpu", tmp_path / "rows.jsonl").run()
    rows = {row["implementation"]: row for row in met}
    assert all(validate(row) == [] for row in met)
    assert {name: row["status"] for name, row in rows.items()} == {
        "maligned": "ok",
        "wrong": "wrong_result",
        "right": "ok",
        "untuned": "wrong_result",
    }
    told = {name: [note for note in row["notes"] if FIRST_CONFIGURATION in note] for name, row in rows.items()}
    assert not told["right"] and not told["untuned"]
    for name in ("maligned", "wrong"):
        (note,) = told[name]
        assert note.startswith(f"{OWN_CHOICE}; ") and ": wrong_result, relative L2 error above" in note
    # Twice and four times the right output.
    assert "output 3 >" in told["wrong"][0] and "output 1 >" in rows["wrong"]["reason"]


def test_a_check_of_a_kernel_that_tunes_itself(plugins: Path) -> None:
    said = io.StringIO()
    out = Console(file=said, width=400)
    names = ["maligned", "wrong", "right"]
    assert check_implementations(out, names, "64,32,16,4,2", "float32", "cpu", ["uniform"]) == 1
    lines = [line for line in said.getvalue().splitlines() if line.startswith(tuple(names))]
    assert [line.split()[:4] for line in lines] == [
        ["maligned", "float32", "uniform", "ok"],
        ["wrong", "float32", "uniform", "wrong"],
        ["right", "float32", "uniform", "ok"],
    ]
    assert [f"; {FIRST_CONFIGURATION}: wrong, " in line for line in lines] == [True, True, False]


@pytest.mark.parametrize("first", ["wrong_result", "crashed", "death"])
def test_the_tuners_choice_is_asked_of_a_fresh_process(
    stub: type[StubWorker], asked: list[dict[str, Any]], first: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def does(job: dict[str, Any]) -> dict[str, Any] | Exception:
        asked.append(job)
        if job["case"] != MET[1].name or job.get("own_tuning"):
            return {}
        if first == "crashed":
            return {"status": first, "reason": "ValueError: no such kernel\nmore"}
        return WorkerDied(-11) if first == "death" else {"status": first, "notes": ["said"], "reason": "far off"}

    # A row, not a failure, is what a wrong result of the suite's checks comes as.
    monkeypatch.setattr(stub, "does", staticmethod(does))
    rows = run_suite(tmp_path / "rows.jsonl", MET[:3])
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert [bool(job.get("own_tuning")) for job in asked] == [False, False, True, False]
    assert [len(worker.limits) for worker in stub.started] == [2, 2]
    assert stub.started[1].limits == [suite.TUNING_TIMES * suite.TIME_LIMIT_S, suite.TIME_LIMIT_S]
    (note,) = [note for note in rows[1]["notes"] if FIRST_CONFIGURATION in note]
    assert {"wrong_result": "far off", "crashed": "no such kernel", "death": "SIGSEGV"}[first] in note
    assert "more" not in note


@pytest.mark.parametrize("jobs", [1, 4])
def test_choices_that_take_too_long_are_waited_for_twice(
    stub: type[StubWorker], asked: list[dict[str, Any]], jobs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def does(job: dict[str, Any]) -> dict[str, Any] | Exception:
        asked.append(job)
        return WorkerTimeout() if job.get("own_tuning") else {"status": "crashed", "reason": "ValueError"}

    monkeypatch.setattr(stub, "does", staticmethod(does))
    rows = run_suite(tmp_path / "rows.jsonl", MET[:12], jobs=jobs)
    # Their first verdict stands, and says of what.
    assert [(row["status"], row["reason"]) for row in rows] == [("crashed", "while in build: ValueError")] * 12
    said = [row["notes"][-1].removeprefix(f"{FIRST_CONFIGURATION}; ") for row in rows]
    # Each lane may be waiting for one when the second of all ends.
    waited = sum(bool(job.get("own_tuning")) for job in asked)
    assert 2 <= waited <= 1 + jobs
    assert sorted(said) == sorted(
        ["with their own choice it had not ended after 240 s"] * waited
        + ["their own choice took too long in other cases"] * (12 - waited)
    )


@pytest.mark.parametrize(("left", "limits"), [((100.0, 30.0), [60, 30]), ((100.0, 0.0), [60]), ((100.0, -5.0), [60])])
def test_a_choice_gets_the_time_that_is_left(
    stub: type[StubWorker],
    asked: list[dict[str, Any]],
    left: tuple[float, float],
    limits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    deadline, times = Deadline(100), iter(left)
    monkeypatch.setattr(deadline, "left_s", lambda: next(times))

    def does(job: dict[str, Any]) -> dict[str, Any]:
        return {} if job.get("own_tuning") else {"status": "crashed", "reason": "ValueError"}

    monkeypatch.setattr(stub, "does", staticmethod(does))
    (row,) = run_suite(tmp_path / "rows.jsonl", MET[:1], deadline=deadline)
    assert [limit for worker in stub.started for limit in worker.limits] == limits
    assert row["status"] == ("ok" if len(limits) == 2 else "crashed")
    assert row["notes"][-1].endswith("no time was left for their own choice") == (len(limits) == 1)


@pytest.mark.parametrize("status", ["out_of_memory", "timeout"])
def test_what_is_no_choices_fault_is_not_asked_again(
    stub: type[StubWorker], asked: list[dict[str, Any]], status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def does(job: dict[str, Any]) -> dict[str, Any] | Exception:
        asked.append(job)
        return WorkerTimeout() if status == "timeout" else {"status": status, "reason": "3 TiB"}

    monkeypatch.setattr(stub, "does", staticmethod(does))
    (row,) = run_suite(tmp_path / "rows.jsonl", MET[:1])
    assert row["status"] == status and len(asked) == 1 and FIRST_CONFIGURATION not in str(row["notes"])


def test_what_no_tuner_had_a_part_in_is_not_asked_again(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: {"status": "crashed", "reason": "ValueError"}))
    rows = run_suite(tmp_path / "rows.jsonl", MET[:2])
    assert [row["status"] for row in rows] == ["crashed"] * 2 and [len(w.limits) for w in stub.started] == [2]


def test_two_processes_race_again(
    stub: type[StubWorker], asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (cold,) = [case for case in CASES if case.check == "cold_caches"]
    failures = itertools.chain([{"status": "crashed", "reason": "ValueError"}], itertools.repeat({}))

    def does(job: dict[str, Any]) -> dict[str, Any]:
        asked.append(job)
        return next(failures)

    monkeypatch.setattr(stub, "does", staticmethod(does))
    (row,) = run_suite(tmp_path / "rows.jsonl", [cold], device="cuda")
    assert row["status"] == "ok" and FIRST_CONFIGURATION in row["notes"][-1]
    assert [bool(job.get("own_tuning")) for job in asked] == [False, False, True, True]


class CheckStub:
    """A worker whose tuners have taken their first: each check ends as `ends` says next; None: it does not start."""

    ends: ClassVar[list[dict[str, Any] | Exception | None]] = []
    asked: ClassVar[list[bool]] = []
    open: ClassVar[int] = 0

    untuned, phase = True, "build"
    failure = WorkerProcess.failure

    def __init__(self, stop: None) -> None:
        if CheckStub.ends[0] is None:
            del CheckStub.ends[0]
            raise WorkerStartError("no memory")
        CheckStub.open += 1

    def run(self, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        CheckStub.asked.append(job["own_tuning"])
        found = CheckStub.ends.pop(0)
        if isinstance(found, Exception):
            raise found
        assert found is not None
        yield found
        yield {"event": "done", "poisoned": False}

    def where(self) -> str:
        return ""

    def log_tail(self) -> str:
        return ""

    def close(self, patience_s: float) -> None:
        CheckStub.open -= 1


RIGHT = {"event": "checked", "reason": "", "errors": {"output": 1e-3}}
WRONG = {"event": "checked", "reason": "far off", "errors": {}}


def checked(monkeypatch: pytest.MonkeyPatch, *ends: dict[str, Any] | Exception | None) -> list[tuple[bool, str, str]]:
    """The verdicts on one point, asked as often as there are outcomes for."""
    CheckStub.ends, CheckStub.asked, CheckStub.open = list(ends), [], 0
    monkeypatch.setattr(check, "WorkerProcess", CheckStub)
    checker, found = Checker(), []
    while CheckStub.ends:
        found.append(checker.verdict(Point("moe_layer", "some", MoEShape(32, 16, 8, 4, 2), device="cpu")))
    checker.close()
    assert CheckStub.open == 0
    return found


def test_a_checks_first_verdict_stands_where_no_other_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = WorkerTimeout()
    found = checked(monkeypatch, *[WRONG, slow] * SLOW_CHOICES, WRONG, RIGHT)
    assert CheckStub.asked == [False, True] * SLOW_CHOICES + [False, False]
    assert [result for _, result, _ in found] == ["wrong"] * (SLOW_CHOICES + 1) + ["ok"]
    assert all(f"far off; {FIRST_CONFIGURATION}; their own choice took too long" == text for _, _, text in found[:-1])
    ((passed, result, text),) = checked(monkeypatch, WRONG, None)
    assert (passed, result) == (False, "wrong") and text.endswith("no process for their own choice: no memory")


@pytest.mark.parametrize("end", [WorkerTimeout(), {"event": "failed", "status": "out_of_memory", "reason": "3 TiB"}])
def test_a_check_is_asked_again_for_a_choices_faults_alone(
    monkeypatch: pytest.MonkeyPatch, end: dict[str, Any] | Exception
) -> None:
    ((passed, _, text),) = checked(monkeypatch, end)
    assert not passed and CheckStub.asked == [False] and FIRST_CONFIGURATION not in text


def test_a_check_that_dies_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found[1] for found in checked(monkeypatch, WorkerDied(-11), RIGHT)] == ["ok"]
    assert CheckStub.asked == [False, True]
