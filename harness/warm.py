"""``moebench warm``: fills compilers' caches on disk with what sweeps need, in processes side by side.

On a fresh machine most of a sweep's time goes into compiling, one kernel after another, while the GPU waits. That needs
no quiet machine: only timing does. So every layer of the sweeps is built and called once here, forward and backward, in
several processes at once; kernels that tune themselves compile all that they would try (`harness.tuners`), but choose
nothing, since any time would be of a machine that is busy. The sweep then finds the caches full and tunes in quiet.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from harness.check import Kept
from harness.deadline import Deadline
from harness.environment import environment
from harness.errors import UserError, one_line
from harness.interface import SHORT_DTYPES, Point, RoutingSpec
from harness.points import point_to_dict
from harness.process import WorkerStartError, side_by_side
from harness.registry import load_registry
from harness.runner import Runner
from harness.session import known_rows, results_folder, works_of
from harness.sweep import load_sweep
from harness.timing import TimingSettings

#: Points of one implementation that a process takes at most, which pays for its start.
POINTS_A_PROCESS = 4
#: Times that each process comes back for more at least: points take between seconds and minutes, and the last process
#: at work is waited for.
TURNS = 2
#: Seconds that a point may take: hundreds of kernels, on a machine that compiles as many at once as it can.
TIME_LIMIT_S = 900.0


@dataclass(frozen=True)
class Warmed:
    """What came of a point. ``reason``: why it is not warm; empty where it is. ``late``: the time was over."""

    point: Point
    seconds: float = 0.0
    reason: str = ""
    late: bool = False


def warm(
    out: Console,
    names: Sequence[str],
    only: Sequence[str],
    skip: Sequence[str],
    shapes: Sequence[str],
    operations: Sequence[str],
    *,
    jobs: int,
    missing_in: Path | None = None,
    deadline: Deadline | None = None,
) -> int:
    """Build what sweeps would measure, a line for each point; returns how many points are not warm, for whatever
    reason: a sweep that measures them says more of it.

    Args:
        only, skip, shapes, operations: filters (`Sweep.filter`).
        jobs: processes side by side.
        missing_in: only what `harness.session.run_sweeps` would measure with it.
        deadline: begin nothing once it is over.

    Raises:
        UserError: an unknown sweep or filter, ``jobs`` below 1.
    """
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: must be at least 1")
    registry = load_registry()
    known = known_rows(out, missing_in)
    environment("fake")  # a commit that is named wrongly ends it here
    planned: list[Point] = []
    for sweep in [load_sweep(name, registry).filter(only, skip, shapes, operations) for name in names]:
        runner = Runner(
            sweep.name,
            works_of(sweep),
            registry,
            results_folder(None) / f"{sweep.name}.jsonl",
            settings=TimingSettings(**sweep.options.settings()),
            time_limit_s=sweep.options.time_limit_s,
            resume=False,
            known=known,
        )
        for job in runner.jobs:
            if job.refusal is None and job.work.kind in ("point", "ratio"):
                planned += job.work.points
    points = distinct(planned)
    if not points:
        out.print("Nothing to build: no point that can run here is left.", highlight=False)
        return 0
    done: list[Warmed] = []
    start, stop, telling = time.monotonic(), threading.Event(), threading.Lock()

    def tell(found: Warmed) -> None:
        with telling:
            done.append(found)
            out.print(_line(found, f"{len(done)}/{len(points)}"), highlight=False, soft_wrap=True)

    side_by_side([partial(_take, chunk, tell, deadline, stop) for chunk in chunks(points, jobs)], jobs, stop)
    cold = [found for found in done if found.reason or found.late]
    out.print(
        f"{len(done) - len(cold)} of {len(done)} points warm in {time.monotonic() - start:.0f} s"
        + ("; what is not is built when it is measured." if cold else "."),
        highlight=False,
    )
    return len(cold)


def _line(found: Warmed, count: str) -> str:
    point = found.point
    what = " ".join(filter(None, (point.implementation, point.variant, str(point.shape), SHORT_DTYPES[point.dtype])))
    if found.late:
        how = "[yellow]left out[/], since the time was over"
    elif found.reason:
        how = f"[yellow]not warm[/] {escape(one_line(found.reason))}"
    else:
        how = f"{found.seconds:.1f} s"
    return f"{count}  {escape(what)}  {how}"


def default_jobs() -> int:
    """Half of the cores that this process may use: a compiler of kernels has threads of its own."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def distinct(points: Iterable[Point]) -> list[Point]:
    """The points that differ in what is compiled, each once, in the order in which they come: it does not matter how
    evenly tokens are spread."""
    plain = (replace(point, routing=RoutingSpec(point.routing.method, m_tile=point.routing.m_tile)) for point in points)
    return list(dict.fromkeys(plain))


def chunks(points: Sequence[Point], jobs: int) -> Iterator[list[Point]]:
    """What one of ``jobs`` processes takes at a time: points of one implementation, few enough that all have work."""
    size = max(1, min(POINTS_A_PROCESS, len(points) // (jobs * TURNS)))
    for name in dict.fromkeys(point.implementation for point in points):
        own = [point for point in points if point.implementation == name]
        yield from (own[start : start + size] for start in range(0, len(own), size))


def _take(
    points: Sequence[Point], tell: Callable[[Warmed], None], deadline: Deadline | None, stop: threading.Event
) -> None:
    kept = Kept(stop)
    try:
        for point in points:
            left_s = TIME_LIMIT_S if deadline is None else min(TIME_LIMIT_S, deadline.left_s())
            if left_s <= 0:
                tell(Warmed(point, late=True))
                continue
            start = time.monotonic()
            job = {"kind": "warm", "point": point_to_dict(point), "passes": [], "bases": {}, "settings": {}}
            try:
                found = kept.ask(job, "warmed", left_s)
                reason = f"{found['status']}: {found['reason']}" if found.get("event") == "failed" else ""
            except WorkerStartError as error:
                reason = f"the worker process did not start: {error}"
            tell(Warmed(point, time.monotonic() - start, reason))
    finally:
        kept.close()
