"""`moebench warm`: every layer that a sweep would measure is built and called once, side by side, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_runner import write_sweep

from harness import check, warm
from harness.deadline import Deadline
from harness.interface import Point, RoutingSpec
from harness.process import WorkerDied, WorkerProcess, WorkerStartError
from harness.shapes import MoEShape
from harness.warm import POINTS_A_PROCESS, Warmed, chunks, distinct

pytestmark = pytest.mark.usefixtures("forked_workers")

CommandLine = Callable[..., tuple[int, str, str]]
SMALL = "32,16,8,4,2"


def point(name: str = "torch_loop", n: int = 8, **routing: Any) -> Point:
    shape = MoEShape(32, 16, n, 4, 2)
    return Point("moe_layer", name, shape, "float32", routing=RoutingSpec(**routing), device="cpu")


def test_a_point_is_built_once() -> None:
    same = [point(), point(distribution="skewed"), point(seed=3), point(trace_file="a", distribution="trace:a@0")]
    others = [point(n=16), point(method="nearest"), point(method="nearest", m_tile=64), point("sonicmoe_torch")]
    others += [replace(point(), dtype="bfloat16"), replace(point(), variant="gemm", operation="dense_bound")]
    assert distinct([*same, *others, *same]) == [same[0], *others]


def test_a_process_takes_points_of_one_implementation() -> None:
    points = [point(name, n) for n in range(8, 14) for name in ("torch_loop", "sonicmoe_torch")]
    taken = list(chunks(points, jobs=1))
    assert sorted(len(its) for its in taken) == [2, 2, POINTS_A_PROCESS, POINTS_A_PROCESS]
    assert all(len({one.implementation for one in its}) == 1 for its in taken)
    assert {one for its in taken for one in its} == set(points) and list(chunks([], 1)) == []


@pytest.mark.parametrize(("points", "jobs", "processes"), [(17, 9, 17), (16, 3, 8), (16, 1, 4), (3, 100, 3)])
def test_no_process_takes_so_many_that_others_wait_for_it(points: int, jobs: int, processes: int) -> None:
    assert len(list(chunks([point(n=n) for n in range(8, 8 + points)], jobs))) == processes


class Stub:
    """Stands in for a worker process: each job ends as `ends` says next."""

    started: ClassVar[list[Stub]] = []
    ends: ClassVar[Iterator[dict[str, Any] | Exception]]

    failure = WorkerProcess.failure
    phase, untuned = "build", False

    def __init__(self, stop: threading.Event | None = None) -> None:
        self.jobs: list[dict[str, Any]] = []
        self.closed = 0
        type(self).started.append(self)

    def run(self, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        assert not self.closed and 0 < limit_s <= warm.TIME_LIMIT_S
        self.jobs.append(job)
        found = next(Stub.ends)
        if isinstance(found, Exception):
            raise found
        yield found
        yield {"event": "done", "poisoned": found.get("status") == "out_of_memory"}

    def log_tail(self) -> str:
        return "the last line"

    def close(self, patience_s: float) -> None:
        self.closed += 1


def take(
    monkeypatch: pytest.MonkeyPatch, points: list[Point], *ends: Any, deadline: Deadline | None = None
) -> list[Warmed]:
    Stub.started, Stub.ends = [], iter(ends)
    monkeypatch.setattr(check, "WorkerProcess", Stub)
    told: list[Warmed] = []
    warm._take(points, told.append, deadline, threading.Event())
    assert [found.point for found in told] == points
    assert all(worker.closed == 1 for worker in Stub.started)
    return told


def test_a_process_serves_until_it_is_no_good(monkeypatch: pytest.MonkeyPatch) -> None:
    good = {"event": "warmed"}
    full = {"event": "failed", "status": "out_of_memory", "reason": "OutOfMemoryError: 3 TiB"}
    told = take(monkeypatch, [point(n=n) for n in range(8, 13)], good, full, good, WorkerDied(-11), good)
    assert [found.reason.partition(":")[0] for found in told] == ["", "out_of_memory", "", "crashed", ""]
    assert "SIGSEGV" in told[3].reason and "\n" not in told[3].reason
    assert [len(worker.jobs) for worker in Stub.started] == [2, 2, 1]
    assert all(job["kind"] == "warm" for worker in Stub.started for job in worker.jobs)


def test_nothing_begins_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline(60)
    left = iter([1.0, -1.0, -1.0])
    monkeypatch.setattr(deadline, "left_s", lambda: next(left))
    told = take(monkeypatch, [point(n=n) for n in range(8, 11)], {"event": "warmed"}, deadline=deadline)
    assert [found.late for found in told] == [False, True, True] and not told[0].reason


def test_a_process_that_does_not_start_costs_its_points_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never(Stub):
        def __init__(self, stop: threading.Event | None = None) -> None:
            raise WorkerStartError("no memory")

    monkeypatch.setattr(check, "WorkerProcess", Never)
    told: list[Warmed] = []
    warm._take([point(), point(n=16)], told.append, None, threading.Event())
    assert all(found.reason == "the worker process did not start: no memory" for found in told) and len(told) == 2


def test_on_the_command_line(command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good, refused and dying implementations; no row, no figure, no file."""
    monkeypatch.chdir(tmp_path)
    names = ["torch_loop", "fake_segfault", "fake_unsupported", "fake_wrong"]
    sweep = write_sweep(tmp_path, "some", names, [SMALL])
    before = set(tmp_path.rglob("*"))
    code, said, error = command_line("warm", sweep, "--jobs", 2)
    assert (code, error) == (0, "")
    lines = {line.split()[1]: line for line in said.splitlines()[:-1]}
    assert set(lines) == {"torch_loop", "fake_segfault", "fake_wrong"}
    assert lines["torch_loop"].endswith(" s") and lines["fake_wrong"].endswith(" s")
    assert f"fake_segfault {SMALL} fp32  not warm crashed: the worker died while in" in lines["fake_segfault"]
    assert said.splitlines()[-1].startswith("2 of 3 points warm in ") and "built when it is measured" in said
    assert set(tmp_path.rglob("*")) == before


def test_what_rows_say_already_is_not_built(command_line: CommandLine, tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, "some", ["torch_loop"], [SMALL])
    assert command_line("run", sweep, "--output", tmp_path / "rows")[0] == 0
    code, said, _ = command_line("warm", sweep, "--missing-in", tmp_path / "rows")
    assert code == 0 and said == "Nothing to build: no point that can run here is left.\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("smoke", "--jobs", "0"), "--jobs 0: must be at least 1"),
        (("smoke", "--only", "zebra"), "--only zebra: not in sweep smoke"),
        (("smoke", "--within", "soon"), "--within soon: expected a length of time"),
        (("smoke", "--missing-in", "nowhere"), "--missing-in nowhere: no such folder or file"),
        (("zebra",), "unknown sweep 'zebra'"),
    ],
)
def test_bad_input_gets_one_line(command_line: CommandLine, arguments: tuple[str, ...], part: str) -> None:
    code, said, error = command_line("warm", *arguments)
    assert code == 2 and part in error and len(error.splitlines()) == 1 and not said
