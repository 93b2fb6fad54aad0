"""Sweeps over plugins that fail in every way, and sweeps that are killed: typed rows, nothing lost, nothing left."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import MoeBench, point_of, problem_of, wait_for_no_process

from harness import process, store
from harness.process import WorkerDied, WorkerProcess, WorkerStartError, WorkerTimeout, describe_exit
from harness.record import MODES, validate

PASSES = ("forward", "backward", "forward_backward")
#: Plugin -> the status of its rows and a part of their reason.
EXPECTED = {
    "fake_ok": ("ok", ""),
    "fake_wrong": ("wrong_result", "output 0.1 > 0.0001"),
    "fake_hangs": ("timeout", "not finished after 8 s, while in build"),
    "fake_segfault": ("crashed", "while in build (ended by signal SIGSEGV)\nabout to touch address zero\nFatal Python"),
    "fake_missing_package": ("not_installed", "moebench_no_such_module is missing; get it with: pip install"),
    "fake_unsupported": ("unsupported", "it takes d of at most 8, not d=16"),
    "fake_leaves_child": ("ok", ""),
    "fake_leaves_daemon": ("crashed", "the worker died while in build (exit code 3)"),
    "fake_import_error": ("crashed", "cannot be imported: RuntimeError: this file was never finished"),
    "fake_heavy_import": ("crashed", "imports numpy at module level"),
}
SWEEP = """
[sweep]
name = "{name}"
description = "A test's"

[defaults]
device = "cpu"
dtype = "float32"
passes = ["forward", "backward", "forward_backward"]
time_limit_s = {limit}
min_samples = 6
max_samples = 6
sampling_s = 0.05

[[points]]
implementations = {implementations}
shapes = {shapes}
"""


def write_sweep(folder: Path, name: str, implementations: list[str], shapes: list[str], limit: int = 60) -> Path:
    path = folder / f"{name}.toml"
    text = SWEEP.format(name=name, limit=limit, implementations=json.dumps(implementations), shapes=json.dumps(shapes))
    path.write_text(text)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows, problems = store.read(path)
    assert not problems
    return [dict(row) for row in rows]


def by_plugin(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        grouped[row["implementation"]].append(row)
    return grouped


@pytest.fixture(scope="module")
def failures(moebench: MoeBench, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One sweep over every fake plugin, run once even where the tests are spread over processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "failures"
    folder.mkdir(exist_ok=True)
    sweep = write_sweep(folder, "failures", list(EXPECTED), ["32,16,8,4,2"], limit=8)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ended.json").exists():
            ended = moebench("run", sweep, "--output", folder / "rows")
            left = wait_for_no_process(moebench.mark)
            told = {"code": ended.returncode, "out": ended.stdout, "err": ended.stderr, "left": left}
            (folder / "ended.json").write_text(json.dumps(told))
    path = folder / "rows" / "failures.jsonl"
    return {"sweep": sweep, "path": path, "rows": rows_of(path), **json.loads((folder / "ended.json").read_text())}


def test_every_failure_is_a_typed_row_with_a_reason(failures: dict[str, Any]) -> None:
    grouped = by_plugin(failures["rows"])
    assert list(grouped) == list(EXPECTED)
    for name, (status, reason) in EXPECTED.items():
        rows = grouped[name]
        assert sorted(row["pass"] for row in rows) == sorted(PASSES), name
        for row in rows:
            assert row["status"] == status, (name, row["status"], row["reason"])
            assert reason in row["reason"] if reason else row["reason"] == "", (name, row["reason"])
            assert row["resume_key"] and row["environment"]["torch"], name
            assert (row.get("latency_ms") is not None) == (status == "ok"), name


def test_every_row_is_valid(failures: dict[str, Any]) -> None:
    for line in failures["path"].read_text().splitlines():
        assert validate(json.loads(line)) == []


def test_the_sweep_ends_with_code_3_and_names_what_failed(failures: dict[str, Any]) -> None:
    out = failures["out"]
    assert failures["code"] == 3, failures["err"]
    assert "Traceback" not in out + failures["err"]
    assert "fake_segfault 32,16,8,4,2 forward: the worker died while in build" in out
    assert "30 rows in" in out and "18 failed" in out


def test_nothing_is_left_running(failures: dict[str, Any]) -> None:
    assert failures["left"] == []


def test_a_good_row_says_everything(failures: dict[str, Any]) -> None:
    rows = {row["pass"]: row for row in by_plugin(failures["rows"])["fake_ok"]}
    assert len({row["resume_key"] for row in rows.values()}) == 3
    assert len({row["run_id"] for row in failures["rows"]}) == 1
    row = rows["forward_backward"]
    assert row["latency_ms"]["samples"] == 6 and row["latency_ms"]["mode"] == "burst"
    assert row["tflops"]["host"] == pytest.approx(row["costs"]["flops"] / row["latency_ms"]["median"] / 1e9)
    assert row["memory_bytes"]["layer"] == row["memory_bytes"]["static"] + row["memory_bytes"]["held"]
    assert row["routing"]["routed_rows"] == 64 and row["routing"]["padded_rows"] == 512
    assert row["costs"]["flops"] == 18 * 64 * 8 * 16
    assert row["measured_on"] == "cpu" and row["stop_criterion"] in ("interval_width", "max_samples", "time_limit")
    # What the harness adds to a point, its own start aside, is far below what it measures on a GPU.
    overhead = dict(row["overhead_s"])
    assert overhead.pop("process_start") > 0
    assert sum(overhead.values()) < 1.5


def test_resume_repeats_what_is_neither_ok_nor_unsupported(
    failures: dict[str, Any], moebench: MoeBench, tmp_path: Path
) -> None:
    path = Path(shutil.copy(failures["path"], tmp_path))
    before = failures["rows"]
    chosen = ["fake_ok", "fake_unsupported", "fake_missing_package", "fake_heavy_import", "fake_wrong"]
    with path.open("a") as file:
        file.write('{"schema": 1, "record": "measu\n')
    only = [part for name in chosen for part in ("--only", name)]
    ended = moebench("run", failures["sweep"], "--output", tmp_path, "--resume", *only)
    assert ended.returncode == 3
    number = len(before) + 1
    assert f"failures.jsonl:{number}: not a JSON object" in ended.stdout.replace("\n", "")
    assert "6 were there already" in ended.stdout
    rows, problems = store.read(path)
    assert [problem.line for problem in problems] == [number]
    added = Counter(row["implementation"] for row in rows[len(before) :])
    assert added == {"fake_missing_package": 3, "fake_heavy_import": 3, "fake_wrong": 3}
    assert [dict(row) for row in rows[: len(before)]] == before


def test_other_settings_and_shapes_are_other_measurements(
    failures: dict[str, Any], command_line: Callable[..., tuple[int, str, str]]
) -> None:
    sweep = failures["sweep"]
    text = sweep.read_text()
    assert "max_samples = 6" in text
    changed = sweep.with_name("changed.toml")
    changed.write_text(text.replace("max_samples = 6", "max_samples = 7"))
    only = ("--resume", "--dry-run", "--only", "fake_ok", "--only", "fake_unsupported")
    output = ("--output", failures["path"].parent)
    assert "0 jobs, 6 rows there already" in command_line("run", sweep, *output, *only)[1]
    assert "2 jobs;" in command_line("run", changed, *output, *only)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_sweep_in_order(moebench: MoeBench, tmp_path: Path, number: signal.Signals) -> None:
    sweep = write_sweep(tmp_path, "interrupted", ["fake_hangs"], ["8,16,8,4,2", "32,16,8,4,2"])
    process = moebench.start("run", sweep, "--output", tmp_path, stderr=subprocess.PIPE)
    path = tmp_path / "interrupted.jsonl"
    end = time.monotonic() + 60
    while time.monotonic() < end and not (path.exists() and path.read_bytes().count(b"\n") == 3):
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert err == b"moebench: interrupted; every finished row is stored, continue with --resume\n"
    assert wait_for_no_process(moebench.mark) == []
    assert {row["status"] for row in rows_of(path)} == {"ok"}


def test_an_interrupted_check_has_said_what_it_knew(moebench: MoeBench) -> None:
    names = ("torch_loop", "fake_hangs")
    process = moebench.start(
        "check", *names, "--shape", "32,16,8,4,2", "--distribution", "uniform",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    lines = [process.stdout.readline(), process.stdout.readline()]
    assert b"largest relative L2 error" in lines[0] and b" ok " in lines[1]
    os.kill(process.pid, signal.SIGINT)
    rest, err = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert err == b"moebench: interrupted\n" and b"fake_hangs" not in rest
    assert wait_for_no_process(moebench.mark) == []


def test_an_interrupted_conformance_says_what_becomes_of_its_rows(moebench: MoeBench, tmp_path: Path) -> None:
    process = moebench.start(
        "conformance", "torch_loop", "--device", "cpu", "--output", str(tmp_path),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline().startswith(b"rows -> ")
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (128 + signal.SIGINT, b"moebench: interrupted; every finished row is stored\n")
    assert wait_for_no_process(moebench.mark) == []


# One worker, without a sweep.


def test_a_worker_takes_jobs_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = WorkerProcess()
    try:
        assert worker.start_s > 0
        job = {
            "kind": "check",
            "point": {
                "operation": "moe_layer",
                "implementation": "torch_loop",
                "shape": {"T": 8, "d": 16, "n": 8, "E": 4, "K": 2},
                "dtype": "float32",
                "layer": {"activation": "swiglu", "router_convention": "topk_softmax", "bias": False},
                "routing": {"method": "top_k", "distribution": "uniform", "seed": 0, "m_tile": 128},
                "variant": "",
                "device": "cpu",
            },
            "passes": [],
            "bases": {},
            "settings": {},
        }
        for _ in range(2):
            events = list(worker.run(job, 60))
            assert [e["event"] for e in events][-1] == "done"
            assert [e["name"] for e in events if e["event"] == "phase"] == ["inputs", "build", "correctness", "inputs"]
            assert next(e for e in events if e["event"] == "checked")["reason"] is None
        with pytest.raises(WorkerTimeout):
            list(worker.run(job, 0.0))
        # It is at that job still, whose events must not be taken for the next one's.
        assert any(event["event"] == "done" for event in worker._read(time.monotonic() + 60))
        monkeypatch.setattr(process, "oom_kills", lambda: 0)
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied) as death:
            list(worker.run(job, 60))
            list(worker.run(job, 60))
        assert death.value.exit_code == -signal.SIGKILL and death.value.status == "crashed"
        assert death.value.how.startswith("ended by signal SIGKILL, which comes from outside")
        assert worker.died_before_job
        # The kernel has ended one more process since the job began.
        monkeypatch.setattr(process, "oom_kills", lambda: 1)
        assert worker._death().status == "out_of_memory"
    finally:
        worker.close(patience_s=0.0)


def test_a_system_that_starts_no_process_is_a_worker_that_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuses)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(WorkerStartError, match=r"the system refuses: .*Resource temporarily unavailable"):
        WorkerProcess()
    assert os.listdir("/proc/self/fd") == before


def test_what_workers_print_is_cut_before_it_fills_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOG_LIMIT", 1000)
    monkeypatch.setattr(process, "LOG_KEPT", 100)
    worker = WorkerProcess.__new__(WorkerProcess)
    worker._job_start = 0
    with process.log_file() as log:
        worker._log = log
        # A worker writes by a descriptor of its own.
        own = os.dup(log.fileno())
        for number in range(300):
            os.write(own, f"line {number}\n".encode())
            worker._cut_log()
            assert os.fstat(own).st_size <= 1000
        os.write(own, b"the last words")
        os.close(own)
        assert worker.log_tail().splitlines()[-3:] == ["line 298", "line 299", "the last words"]


def test_exits_in_words() -> None:
    assert describe_exit(-11) == "ended by signal SIGSEGV"
    assert describe_exit(-200) == "ended by signal 200"
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(None) == "no exit code"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bound", ["", "gemm_glue"])
def test_numbers_that_break_the_rules_become_a_crashed_row(tmp_path: Path, bound: str, mode: str) -> None:
    """A NaN among the times is that point's failure: the row says so and keeps what identifies it."""
    from dataclasses import replace

    from harness.environment import environment
    from harness.points import row_fields
    from harness.registry import load_registry
    from harness.runner import Runner, Work
    from harness.timing import TimingSettings

    point = point_of("8,8,8,2,1", name="torch_loop")
    other = replace(point, implementation="cublas_bound", operation="dense_bound", variant=bound)
    work = Work("ratio", point, ("forward",), "cublas_bound", other) if bound else Work("point", point, ("forward",))
    path = tmp_path / "rows.jsonl"
    settings = TimingSettings(mode=mode)
    runner = Runner("t", [work], load_registry(), path, settings=settings, time_limit_s=5, resume=False)
    nan = float("nan")
    numbers: dict[str, object] = {"latency_ms": {"median": nan, "ci95": [1.0, 2.0], "samples": 3, "mode": mode}}
    if bound:
        numbers = {"value": nan, "ci95": [1.0, 2.0], "samples": 3}
    base = dict(runner.jobs[0].bases["forward"])
    assert base.get("mode", "burst") == mode
    if not bound:
        base.pop("mode", None)  # latency_ms has it, as `measure_point` writes it
    row = {
        **base,
        **row_fields(point),
        **numbers,
        "timestamp": "2026-01-31T12:00:00+00:00",
        "status": "ok",
        "reason": "",
        "measured_on": "cpu",
        "environment": environment("cpu"),
    }
    runner._store(row)
    (stored,) = (json.loads(line) for line in path.read_text().splitlines())
    assert stored["status"] == "crashed" and "breaks the rules" in stored["reason"]
    assert stored.get("mode", "burst") == mode and store.identity(stored, None) == store.identity(row, None)
    assert stored["resume_key"] == row["resume_key"] and stored.get("denominator_variant", "") == bound
    assert runner.summary.failed == 1


def test_a_plugins_kernel_roles_and_its_one_call() -> None:
    from harness.interface import Implementation
    from harness.registry import load_registry

    class Roles(Implementation):
        name = label = upstream = licence = "roles"
        kernel_roles = (("gemm_up", "up"), ("gemm", "down"))

        def build(self, problem: object) -> object:  # type: ignore[override]
            raise NotImplementedError

    role = Roles().kernel_role
    assert [role(name) for name in ("void GEMM_Up<1>", "gemm_7", "copy")] == ["up", "down", None]
    problem = problem_of("8,8,8,2,1", name="torch_loop")
    layer = load_registry().get("torch_loop").build(problem)
    before = problem.x.clone()
    layer.call_once(problem)
    assert (problem.x == before).all() and not problem.x.requires_grad
    assert all(parameter.grad is None for parameter in layer.parameters())
