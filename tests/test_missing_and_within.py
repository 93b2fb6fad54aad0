"""What a folder of rows lacks (``--missing-in``), what fits into the time there is (``--within``), and one operation of
a sweep (``--operation``)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import point_of
from fake_conformance import MET, StubWorker, run_suite

from harness import deadline as deadlines
from harness import runner, store
from harness.deadline import Deadline
from harness.errors import UserError
from harness.interface import RoutingSpec
from harness.process import WorkerProcess
from harness.registry import ROOT, load_registry
from harness.runner import Job, Runner, Work
from harness.session import GPU_SWEEPS, works_of
from harness.sweep import load_sweep
from harness.timing import TimingSettings

pytestmark = pytest.mark.usefixtures("forked_workers")

CommandLine = Callable[..., tuple[int, str, str]]
REGISTRY = load_registry()
H200 = ROOT / "results" / "nvidia_h200"
COUNTED = """
[sweep]
description = "Counted"

[defaults]
min_samples = 6
max_samples = 6
sampling_s = 0.05

[[routing]]
methods = ["top_k", "nearest"]
shapes = ["64,64,32,8,2", "64,64,32,4,2"]
m_tile = 16

[[points]]
implementations = ["torch_loop"]
shapes = ["64,64,32,8,2"]
device = "cpu"
"""


class Clock:
    """Time that passes when told."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadlines.time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_worker: WorkerProcess) -> Path:
    """A sweep that takes no time."""
    monkeypatch.setattr(runner, "WorkerProcess", lambda: one_worker)
    path = tmp_path / "counted.toml"
    path.write_text(COUNTED)
    return path


def runner_of(works: Sequence[Work], path: Path, **options: Any) -> Runner:
    options = {"settings": TimingSettings(), "resume": False, "time_limit_s": 60, **options}
    return Runner("s", works, REGISTRY, path, **options)


# The time there is.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("25m", 1500), ("25 min", 1500), ("1.5h", 5400), (" 0.5s ", 0.5)],
)
def test_lengths_of_time(clock: Clock, text: str, seconds: float) -> None:
    found = Deadline.of("--within", text)
    assert found is not None and found.left_s() == pytest.approx(seconds)
    clock.now += seconds + 1
    assert found.left_s() == pytest.approx(-1)


@pytest.mark.parametrize("text", ["soon", "-5", "1d", "5 m s", "0", "0.0h", "nan", "inf", "1e3", "٣m", "m", "9" * 400])
def test_what_is_no_length_of_time_gets_one_line(command_line: CommandLine, text: str) -> None:
    with pytest.raises(UserError, match=r"expected a length of time such as 90s, 25m or 1\.5h"):
        Deadline.of("--within", text)
    for command in (("run", "smoke"), ("conformance",), ("reproduce",)):
        code, _, err = command_line(*command, f"--within={text}")
        assert code == 2 and err.count("\n") == 1 and err.startswith("moebench: --within ")


def test_no_text_is_no_limit() -> None:
    assert Deadline.of("--within", "") is None


def test_what_fits_is_judged_by_what_earlier_jobs_took(clock: Clock) -> None:
    limit = Deadline(100.0)
    assert limit.fits(100.0) and not limit.fits(100.1)
    limit.took(10.0, 5.0)
    # Who was faster than thought is not trusted to be so again.
    assert limit.fits(100.0) and not limit.fits(100.1)
    limit.took(10.0, 55.0)
    assert limit.fits(33.0) and not limit.fits(34.0)
    clock.now += 100.0
    assert limit.fits(0.0) and not limit.fits(0.1)


def test_jobs_that_come_too_late_are_left_for_resume(tmp_path: Path, clock: Clock) -> None:
    """Of three jobs the first takes all but a little of the time: the long one is left out, the short one is not."""
    small, large = point_of("8,8,8,2,1", name="torch_loop"), point_of("4096,512,512,8,4", name="torch_loop")
    works = [
        Work("point", small, ("forward",)),
        Work("point", large, ("forward",)),
        Work("point", small, ("backward",)),
    ]
    estimates = [job.seconds for job in runner_of(works, tmp_path / "plan.jsonl").jobs]
    assert estimates[0] == estimates[2] == pytest.approx(0.5, rel=0.01) and estimates[1] > 2.0
    runner = runner_of(works, tmp_path / "rows.jsonl", deadline=Deadline(estimates[1] + 0.5))
    events: list[str] = []
    runner.on_event(lambda event, job, text: events.append(event))
    ran: list[Job] = []

    def run_job(worker: object, job: Job, *rest: object) -> tuple[bool, str]:
        ran.append(job)
        clock.now += 1.0
        return True, ""

    runner._run_job = run_job  # type: ignore[method-assign, assignment]
    runner.serve(runner.jobs, lambda: StubWorkerWithStart())  # type: ignore[arg-type, return-value]
    assert [job.work.point.shape for job in ran] == [small.shape, small.shape]
    assert events == ["start", "done", "late", "start", "done"]
    assert runner.summary.late == 1


class StubWorkerWithStart:
    start_s = 0.1

    def close(self, patience_s: float = 0.0) -> None: ...


def test_the_command_says_what_it_left_out_and_resume_goes_on(
    command_line: CommandLine, counted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = ("--output", tmp_path / "rows")
    monkeypatch.setattr(Deadline, "fits", lambda self, estimate: estimate < 0.35)
    code, out, err = command_line("run", counted, *rows, "--within", "5m")
    assert code == 0, err
    assert "left out 1 of 5 jobs, which would not have ended in time: continue with --resume" in out
    assert "4 rows in" in out
    _, out, _ = command_line("run", counted, *rows, "--resume", "--within", "5m")
    assert "left out 1 of 1 jobs, which would not have ended in time: run it again to continue" in out
    code, out, _ = command_line("run", counted, *rows, "--resume")
    assert code == 0 and "3 rows in" in out and "4 were there already" in out and "left out" not in out


def test_conformance_says_how_to_go_on(
    command_line: CommandLine, stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: {}))
    left = [1.0, 0.0]
    monkeypatch.setattr(Deadline, "left_s", lambda self: left.pop(0))
    cases = ("--case", MET[0].name, "--case", MET[1].name)
    command = ("conformance", "torch_loop", "--device", "cpu", *cases, "--output", tmp_path)
    code, out, _ = command_line(*command, "--within", "1s")
    rows = tmp_path / "conformance.jsonl"
    assert code == 0 and f"left out 1 case, since the time was over: continue with --missing-in {rows}\n" in out
    code, out, _ = command_line(*command, "--missing-in", rows)
    assert code == 0 and "1 of 1 case ok" in out and "1 case there already." in out


def test_a_cluster_takes_every_job_at_once(command_line: CommandLine) -> None:
    code, _, err = command_line("run", "smoke", "--ray", "local", "--within", "5m")
    assert (
        code == 2
        and err == "moebench: --within and --ray: leave one of both out; a cluster is handed every job at once\n"
    )


def test_conformance_begins_nothing_after_the_time(
    stub: type[StubWorker], clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def does(job: dict[str, Any]) -> dict[str, Any]:
        clock.now += 10.0
        return {}

    monkeypatch.setattr(stub, "does", staticmethod(does))
    rows = run_suite(tmp_path / "rows.jsonl", MET[:5], deadline=Deadline(25.0))
    assert [row["variant"] for row in rows] == [case.name for case in MET[:3]]


# What rows lack.


def test_rows_of_another_commit_and_of_other_packages_count(
    command_line: CommandLine, counted: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    assert command_line("run", counted, "--output", first)[0] == 0
    (path,) = first.glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 7
    # As if from another commit; one pass failed, one was unstable, one is from another sweep.
    changed = [{**line, "resume_key": "0" * 64} for line in lines]
    by_pass = {line["pass"]: line for line in changed if line["implementation"] == "torch_loop"}
    by_pass["forward"]["sweep"] = "another"
    by_pass["backward"]["status"], by_pass["backward"]["reason"] = "unstable", "a drifting clock"
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    again = ("run", counted, "--output", tmp_path / "second", "--missing-in")
    code, out, _ = command_line(*again, first)
    assert code == 0 and "6 were there already" in out
    (second,) = (tmp_path / "second").glob("*.jsonl")
    assert [json.loads(line)["pass"] for line in second.read_text().splitlines()] == ["backward"]
    # A file does as well as a folder, and with --resume either one's rows count.
    assert "1 jobs, 6 rows there already" in command_line(*again, path, "--dry-run")[1]
    assert "0 jobs, 7 rows there already" in command_line(*again, path, "--dry-run", "--resume")[1]
    # Broken lines are named, and cost themselves alone.
    with path.open("a") as file:
        file.write("{\n")
    _, out, _ = command_line(*again, first, "--dry-run")
    assert f"ignored {path}:8: not a JSON object" in out and "1 jobs, 6 rows" in out


@pytest.mark.parametrize("command", [("run", "smoke"), ("conformance", "torch_loop", "--device", "cpu")])
def test_a_place_without_rows(command_line: CommandLine, tmp_path: Path, command: tuple[str, ...]) -> None:
    code, _, err = command_line(*command, "--missing-in", tmp_path / "none")
    assert (code, err) == (2, f"moebench: --missing-in {tmp_path / 'none'}: no such folder or file\n")


def test_rows_of_another_gpu_say_nothing_of_this_one() -> None:
    row = {"measured_on": "cuda", "status": "ok", "environment": {"gpu": "NVIDIA H200"}, "pass": "forward"}
    known = store.Known([row])  # type: ignore[list-item]
    asked = {"measured_on": "cuda", "pass": "forward"}
    assert known.has(asked, "NVIDIA H200") and not known.has(asked, "NVIDIA H100")
    # Without a GPU here: of any.
    assert known.has(asked, None) and not known.has({**asked, "pass": "backward"}, None)
    assert not known.has({**asked, "measured_on": "cpu"}, None)
    counted = store.Known([{**row, "measured_on": "cpu"}])  # type: ignore[list-item]
    assert counted.has({**asked, "measured_on": "cpu"}, "NVIDIA H100")


def test_a_job_is_told_apart_by_all_that_is_asked_for(tmp_path: Path) -> None:
    point = point_of("8,8,8,2,1", name="torch_loop")
    others = [
        replace(point, dtype="float16"),
        replace(point, routing=RoutingSpec(distribution="skewed")),
        replace(point, routing=RoutingSpec(seed=1)),
        replace(point, implementation="sonicmoe_torch"),
    ]
    works = [Work("point", each, ("forward",)) for each in (point, *others)]
    (job, *_) = runner_of(works, tmp_path / "rows.jsonl").jobs
    row = {**Runner._asked(job, "forward"), "status": "ok", "environment": {}}
    known = store.Known([row])  # type: ignore[list-item]
    assert [one.work for one in runner_of(works, tmp_path / "rows.jsonl", known=known).jobs] == works[1:]
    paced = runner_of(works, tmp_path / "rows.jsonl", known=known, settings=TimingSettings(mode="paced"))
    assert [one.work for one in paced.jobs] == works


def test_what_the_committed_rows_have_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all of the GPU's sweeps, by an independent count: what is planned and what is stored, told apart by
    fields read from the files."""

    def key(row: dict[str, Any]) -> str:
        routing = row["routing"]
        fields = ("operation", "pass", "implementation", "numerator", "denominator", "denominator_variant", "dtype")
        told = [row.get(field) or "" for field in (*fields, "variant", "measured_on")]
        told += [routing["method"], (row.get("denominator_routing") or {}).get("method", "")]
        return json.dumps([*told, *row["shape"].values()])

    rows, _ = store.read_folder(H200)
    final = {key(dict(row)) for row in rows if row["status"] in ("ok", "unsupported")}
    works = [work for name in GPU_SWEEPS for work in works_of(load_sweep(name, REGISTRY))]
    # Reading what every plugin imports is another test's subject.
    monkeypatch.setattr(runner, "code_hash", lambda implementation: "")
    everything = runner_of(works, tmp_path / "rows.jsonl")
    wanted = {key(Runner._asked(job, pass_)) for job in everything.jobs for pass_ in job.bases}
    left = runner_of(works, tmp_path / "rows.jsonl", known=store.Known(rows))
    found = {key(Runner._asked(job, pass_)) for job in left.jobs for pass_ in job.bases}
    assert found == wanted - final
    assert len(found) < len(wanted)


def test_conformance_meets_only_what_is_missing(
    command_line: CommandLine, stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = MET[2].name
    monkeypatch.setattr(
        stub,
        "does",
        staticmethod(lambda job: {"status": "wrong_result", "reason": "x"} if job["case"] == wrong else {}),
    )
    cases = [part for case in MET[:4] for part in ("--case", case.name)]
    command = ("conformance", "torch_loop", "--device", "cpu")
    assert command_line(*command, *cases[:6], "--output", tmp_path / "first")[0] == 1
    code, out, _ = command_line(*command, *cases, "--output", tmp_path / "second", "--missing-in", tmp_path / "first")
    rows, _ = store.read(tmp_path / "second" / "conformance.jsonl")
    assert code == 1 and sorted(row["variant"] for row in rows) == sorted([wrong, MET[3].name])
    assert "2 cases there already." in out and MET[0].name not in out
    again = ("--missing-in", tmp_path / "second", "--case", MET[3].name)
    code, out, _ = command_line(*command, *again, "--output", tmp_path / "third")
    assert code == 0 and "1 case there already." in out and "Conformance" not in out
    assert not (tmp_path / "third" / "conformance.jsonl").exists()


# One operation.


def test_one_operation_of_a_sweep(command_line: CommandLine, counted: Path) -> None:
    _, out, _ = command_line("run", counted, "--operation", "token_rounding", "--dry-run")
    assert "4 jobs;" in out
    _, out, _ = command_line("run", counted, "--operation", "moe_layer", "--dry-run")
    assert "1 jobs;" in out and "torch_loop" in out
    _, out, _ = command_line("run", "kernels", "--operation", "expert_aggregation", "--dry-run")
    assert re.search(r"\bratio\b", out) and "topk_router" not in out
    code, _, err = command_line("run", "kernels", "--operation", "topk_ruoter", "--dry-run")
    assert code == 2 and "did you mean topk_router?" in err and err.count("\n") == 1
