"""Running the conformance suite: every outcome is a row, with workers that do as they are told; its command."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_conformance import MET, StubWorker, run_suite

from harness import store
from harness.conformance import CASES, OPERATION, OURS, get_case, suite
from harness.process import WorkerDied, WorkerStopped, WorkerTimeout

pytestmark = pytest.mark.usefixtures("forked_workers")

CommandLine = Callable[..., tuple[int, str, str]]


#: Seconds after which a test that waits for another thread gives up.
HANG_S = 60.0


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
    own = len(OURS)
    assert suite.own_in_words(rows) == f"{own} ok, {own} not_installed, {own} unsupported, {2 * own} failed"


def test_what_ours_refuse_is_said(command_line: CommandLine, tmp_path: Path) -> None:
    """On a CPU our kernels meet nothing: no failure, and no success."""
    code, out, err = command_line(
        "conformance", "sonicmoe_triton", "--case", "tied-scores", "--device", "cpu", "--output", tmp_path
    )
    assert code == 0, err
    assert "0 of 1 case ok; our own: 0 ok, 1 unsupported, none failed." in out


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
    assert "1 of 3 cases ok; our own: 1 ok, none failed." in out and "WRONG" in out and "CRASH " in out


def test_a_failure_of_ours_is_the_exit_code(
    command_line: CommandLine, stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: {"status": "wrong_result", "reason": "[b]output 1[/b]"}))
    for name, expected, words in (
        ("torch_loop", 1, "our own: 0 ok, 1 failed."),
        ("torch_grouped_mm", 0, "our own: none met."),
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
