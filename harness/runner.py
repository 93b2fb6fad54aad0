"""Runs a sweep: jobs in worker processes, every outcome a row, each row stored the moment it exists."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from harness import accounts, store
from harness.deadline import Deadline
from harness.environment import environment, gpu_name, package_version
from harness.errors import printable
from harness.estimate import job_seconds
from harness.interface import Implementation, Point, RoutingSpec
from harness.operations import get_operation
from harness.points import point_to_dict, row_fields
from harness.process import WorkerDied, WorkerProcess, WorkerStartError, WorkerTimeout
from harness.record import SCHEMA_VERSION, new_run_id, utc_now
from harness.registry import Registry, code_hash, harness_hash, installed_reason, refusal
from harness.timing import TimingSettings

#: Statuses that make a sweep's exit code non-zero.
FAILED = ("wrong_result", "out_of_memory", "timeout", "crashed")
#: How a job is run again, in a fresh process.
WITHOUT_GRAPHS, AFRESH = "without graphs", "as before"


@dataclass(frozen=True)
class Work:
    """What to measure, before it is known whether it can run.

    ``kind`` is ``point``, ``ratio`` (then ``denominator`` names the second implementation), ``fake`` or ``account``
    (which no implementation takes part in).
    """

    kind: str
    point: Point
    passes: tuple[str, ...]
    denominator: str = ""
    #: What the denominator computes, where that is not the numerator's point (a bound).
    denominator_point: Point | None = None
    #: Of which times a ratio is; see `harness.sweep.RatioPoint`.
    time_kind: str = "device"

    @property
    def implementations(self) -> tuple[str, ...]:
        if self.kind == "ratio":
            return (self.point.implementation, self.denominator)
        return (self.point.implementation,)

    @property
    def group(self) -> tuple[str, ...]:
        """Works of one group share a worker process."""
        return (self.kind, *self.implementations)

    @property
    def title(self) -> str:
        text = " / ".join(self.implementations)
        variant = f" {self.point.variant}" if self.point.variant else ""
        bound = f" {self.bound}" if self.bound else ""
        other = self.denominator_routing
        methods = f" ({self.point.routing.method} / {other.method})" if other else ""
        busy = " by busy times" if self.time_kind == "busy" else ""
        return f"{text}{variant}{bound}{methods}{busy} {self.point.shape}"

    @property
    def denominator_routing(self) -> RoutingSpec | None:
        """How the denominator is routed, where that is another way than the numerator's."""
        other = self.denominator_point
        return other.routing if other is not None and other.routing != self.point.routing else None

    @property
    def bound(self) -> str:
        """The denominator's variant where it computes another operation; empty where both compute the same."""
        other = self.denominator_point
        return other.variant if other is not None and other.operation != self.point.operation else ""

    @property
    def points(self) -> tuple[Point, ...]:
        """The point of each implementation."""
        if self.kind != "ratio":
            return (self.point,)
        return (self.point, self.denominator_point or replace(self.point, implementation=self.denominator))


@dataclass
class Job:
    """A work with the fields of its rows fixed: one base row and one resume key for each pass."""

    work: Work
    bases: dict[str, dict[str, Any]]
    #: Why it will not run here, as (status, reason); None where it will.
    refusal: tuple[str, str] | None = None
    #: Of the row's environment, what names the GPU that the job was handed to, where there are several.
    gpu: dict[str, Any] = field(default_factory=dict)
    #: How it is timed.
    settings: TimingSettings = field(default_factory=TimingSettings)

    @property
    def seconds(self) -> float:
        return 0.0 if self.refusal else job_seconds(self.work.kind, self.work.point, self.settings)


@dataclass
class Summary:
    """What came of a run."""

    statuses: Counter[str] = field(default_factory=Counter)
    by_implementation: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[tuple[str, str, str]] = field(default_factory=list)
    skipped: int = 0
    #: Jobs that were not begun, since they would not have ended in time.
    late: int = 0
    seconds: float = 0.0
    build_s: float = 0.0
    #: Harness overhead in seconds by shape: (inputs + reference + correctness + memory + share of process start).
    overhead: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    #: Seconds by phase over the whole run, process starts included.
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def failed(self) -> int:
        return sum(self.statuses[status] for status in FAILED)


class Place(Protocol):
    """Where a sweep's jobs run, if not one after another on this machine's first GPU."""

    @property
    def gpu(self) -> str | None:
        """The name of the GPUs, which are of one model; None where there is none."""

    def run(self, runner: Runner) -> None:
        """Run every job of ``runner.jobs`` once."""


class Runner:
    """Plans and runs the works of one sweep into one results file."""

    def __init__(
        self,
        sweep: str,
        works: Sequence[Work],
        registry: Registry,
        output: Path,
        *,
        settings: TimingSettings,
        time_limit_s: float,
        resume: bool,
        place: Place | None = None,
        deadline: Deadline | None = None,
        known: store.Known | None = None,
    ) -> None:
        """
        Args:
            resume: leave out what ``output`` has rows of that still hold.
            deadline: begin no job that would not end before it.
            known: leave out what these rows say, too, whatever they were measured with.
        """
        self.sweep = sweep
        self.registry = registry
        self.output = output
        self.settings = settings
        self._settings_fields = asdict(settings)
        self.time_limit_s = time_limit_s
        self.run_id = new_run_id()
        self.summary = Summary()
        self._report: Callable[[str, Job, str], None] = lambda event, job, text: None
        self._samples: Callable[[dict[str, Any], list[float]], None] = lambda row, samples: None
        # Jobs may run side by side, each in a thread of its own.
        self._lock = threading.RLock()
        self._place = place
        self._deadline = deadline
        self._gpu = gpu_name() if place is None else place.gpu
        self._machine: dict[str, dict[str, Any]] = {}
        # A group's works run together, in the order in which the sweep names the groups.
        groups: dict[tuple[str, ...], list[Work]] = defaultdict(list)
        for work in works:
            groups[work.group].append(work)
        self._codes: dict[str, str] = {}
        self.jobs: list[Job] = []
        done = self._done() if resume else set()
        for work in (work for group in groups.values() for work in group):
            job = self._plan(work)
            left = [pass_ for pass_ in work.passes if job.bases[pass_]["resume_key"] not in done]
            if known is not None:
                left = [pass_ for pass_ in left if not known.has(self._asked(job, pass_), self._gpu)]
            self.summary.skipped += len(work.passes) - len(left)
            if left:
                # All passes of a work come from one measurement; what is left is measured again as a whole, but only
                # its missing rows are stored.
                job.bases = {pass_: job.bases[pass_] for pass_ in left}
                self.jobs.append(job)

    def on_event(self, report: Callable[[str, Job, str], None]) -> None:
        """Call ``report(event, job, text)`` as a job starts, enters a phase (its name is the text) and is done; or is
        left out, since it comes too late (event ``late``)."""

        def one_at_a_time(event: str, job: Job, text: str) -> None:
            with self._lock:
                report(event, job, text)

        self._report = one_at_a_time

    def on_samples(self, take: Callable[[dict[str, Any], list[float]], None]) -> None:
        """Call ``take(row, samples)`` with each row of a measurement that has numbers, and the times in ms whose median
        is its ``device_ms`` (on a CPU its ``latency_ms``)."""
        self._samples = take

    def _done(self) -> set[str]:
        if not self.output.exists():
            return set()
        rows, _ = store.read(self.output)
        return store.resume_keys(rows)

    def _plan(self, work: Work) -> Job:
        point = work.point
        names = () if work.kind == "account" else work.implementations
        known = [self.registry.get(name) if name in self.registry else None for name in names]
        base: dict[str, Any] = {"schema": SCHEMA_VERSION, "run_id": self.run_id, "sweep": self.sweep}
        labels = [i.label if i else n for i, n in zip(known, names, strict=True)] or [accounts.LABEL]
        if work.kind in ("point", "ratio") and self.settings.mode != "burst":
            # How it is to be timed, also where there will be no time.
            base["mode"] = self.settings.mode
        if work.kind == "ratio":
            base |= {
                "record": "ratio",
                "numerator": work.implementations[0],
                "denominator": work.implementations[1],
                "numerator_label": labels[0],
                "denominator_label": labels[1],
                "time_kind": work.time_kind,
            }
            if work.bound:
                base["denominator_variant"] = work.bound
            if work.denominator_routing:
                base["denominator_routing"] = work.denominator_routing.as_dict()
        else:
            base |= {"record": "measurement", "implementation": point.implementation, "label": labels[0]}
        found = [i for i in known if i is not None]
        distributions = ["torch", "triton", *(d for i in found for d in i.distributions)]
        packages = {name: package_version(name) for name in distributions}
        code = "".join(map(self._code, found)) or harness_hash()
        where = "fake" if work.kind == "fake" else (self._gpu or "no GPU") if point.device == "cuda" else "cpu"
        bases = {}
        for pass_ in work.passes:
            inputs = store.point_inputs(
                point,
                pass_,
                kind=work.kind,
                denominator=work.denominator,
                bound=work.bound,
                denominator_routing=work.denominator_routing and work.denominator_routing.as_dict(),
                time_kind=work.time_kind,
                settings=self._settings_fields,
            )
            bases[pass_] = {**base, "pass": pass_, "resume_key": store.resume_key(inputs, code, packages, where)}
        return Job(work, bases, self._refusal(work, known), settings=self.settings)

    @staticmethod
    def _asked(job: Job, pass_: str) -> dict[str, Any]:
        """The row of a pass as far as it is known before it is measured."""
        point = job.work.point
        measured_on = "fake" if job.work.kind == "fake" else point.device
        return {**job.bases[pass_], **row_fields(point), "measured_on": measured_on}

    def _code(self, implementation: Implementation) -> str:
        """`code_hash`, once for a sweep: it reads and parses all that a plugin imports."""
        if implementation.name not in self._codes:
            self._codes[implementation.name] = code_hash(implementation)
        return self._codes[implementation.name]

    def _refusal(self, work: Work, known: Sequence[Implementation | None]) -> tuple[str, str] | None:
        if work.kind == "account":
            return None
        for point in work.points:
            reason = get_operation(point.operation).unsupported_reason(point)
            if reason:
                return "unsupported", reason
        if work.kind == "ratio" and work.point.device != "cuda":
            return "unsupported", "ratios are of device times, which only a GPU has"
        for name, point, implementation in zip(work.implementations, work.points, known, strict=True):
            if implementation is None:
                return "crashed", self.registry.broken_reason(name) or f"no implementation {name}"
            if work.kind == "fake":
                if not implementation.fake_tensors:
                    return "unsupported", f"{implementation.label} cannot be traced under fake tensors"
            else:
                refused = refusal(implementation, point)
                if refused:
                    return refused
                if work.point.device == "cuda" and self._gpu is None:
                    return "unsupported", "this machine has no NVIDIA GPU"
            reason = installed_reason(implementation)
            if reason:
                return "not_installed", reason
        return None

    def run(self) -> Summary:
        """Run every job; rows are in the file as soon as they exist, whatever ends the run."""
        start = time.perf_counter()
        try:
            if self._place is None:
                self.serve(self.jobs)
            else:
                self._place.run(self)
        finally:
            self.summary.seconds = time.perf_counter() - start
        return self.summary

    def serve(self, jobs: Iterable[Job], start_worker: Callable[[], WorkerProcess] | None = None) -> None:
        """Run jobs one after another; neighbours of one group share a worker process.

        Args:
            start_worker: default: `WorkerProcess`.
        """
        worker: WorkerProcess | None = None
        worker_group: tuple[str, ...] = ()
        start_share = 0.0
        try:
            for job in jobs:
                if job.refusal:
                    self._fail(job, list(job.bases), *job.refusal)
                    self._report("done", job, job.refusal[0])
                    continue
                if self._deadline is not None and not self._deadline.fits(job.seconds):
                    # A shorter one may follow.
                    with self._lock:
                        self.summary.late += 1
                    self._report("late", job, "")
                    continue
                began = time.perf_counter()
                self._report("start", job, "")
                if worker is not None and worker_group != job.work.group:
                    worker.close()
                    worker = None
                worker_group = job.work.group
                allow_graph = True
                while True:
                    if worker is None:
                        try:
                            worker = WorkerProcess() if start_worker is None else start_worker()
                            self.spent({"process start": worker.start_s})
                        except WorkerStartError as error:
                            self._fail(job, list(job.bases), "crashed", f"the worker process did not start: {error}")
                            break
                        jobs_of_group = sum(j.work.group == job.work.group and not j.refusal for j in self.jobs)
                        start_share = worker.start_s / max(jobs_of_group, 1)
                    keep, again = self._run_job(worker, job, allow_graph, start_share)
                    if not keep:
                        worker.close(patience_s=0.0)
                        worker = None
                    if not again:
                        break
                    allow_graph = allow_graph and again != WITHOUT_GRAPHS
                if self._deadline is not None:
                    self._deadline.took(job.seconds, time.perf_counter() - began)
                self._report("done", job, "")
        finally:
            if worker is not None:
                worker.close(patience_s=1.0)

    def ended(self, job: Job) -> None:
        """Tell that a job is done whose rows came from elsewhere."""
        self._report("done", job, "")

    def spent(self, phases: Mapping[str, float]) -> None:
        """Account seconds by phase."""
        with self._lock:
            for name, seconds in phases.items():
                self.summary.phases[name] += seconds

    def _run_job(self, worker: WorkerProcess, job: Job, allow_graph: bool, start_share: float) -> tuple[bool, str]:
        """Run one job; returns whether the worker is still good, and how to run the job again (empty: not at all)."""
        work = job.work
        message = {
            "kind": work.kind,
            "point": point_to_dict(work.point),
            "denominator_point": point_to_dict(work.points[-1]),
            "passes": list(work.passes),
            "bases": {pass_: job.bases.get(pass_, {"pass": pass_}) for pass_ in work.passes},
            "settings": asdict(self.settings),
            "allow_graph": allow_graph,
            "numerator": work.implementations[0],
            "denominator": work.denominator,
            "time_kind": work.time_kind,
        }
        left = list(job.bases)
        failed: dict[str, Any] | None = None
        try:
            for event in worker.run(message, self.time_limit_s):
                kind = event["event"]
                if kind == "phase":
                    self._report("phase", job, event["name"])
                elif kind == "row":
                    row = event["row"]
                    if row["pass"] in left:
                        left.remove(row["pass"])
                        if "overhead_s" in row:
                            row["overhead_s"]["process_start"] = round(start_share, 4)
                        self.store(row, event.get("samples", ()))
                elif kind == "failed":
                    failed = event
                elif kind == "done":
                    self.spent(event["phases"])
                    if (
                        failed
                        and work.kind == "ratio"
                        and event["poisoned"]
                        and allow_graph
                        and worker.phase == "graph"
                    ):
                        return False, WITHOUT_GRAPHS
                    if failed:
                        self._fail(job, left, failed["status"], f"while in {worker.phase}: {failed['reason']}")
                    elif left:
                        self._fail(job, left, "crashed", "the measurement ended without a row for this pass")
                    return not event["poisoned"], ""
        except WorkerTimeout as late:
            self._fail(job, left, *worker.failure(late, self.time_limit_s))
        except WorkerDied as death:
            # A capture that kills the process costs the graph, not the point.
            if worker.phase == "graph" and allow_graph:
                return False, WITHOUT_GRAPHS
            # What an earlier job has left behind in it is not this one's failure.
            if worker.died_before_job:
                return False, AFRESH
            self._fail(job, left, *worker.failure(death, self.time_limit_s))
        return False, ""

    def _fail(self, job: Job, passes: Sequence[str], status: str, reason: str) -> None:
        """Store a row without numbers for each of ``passes``."""
        work = job.work
        measured_on = "fake" if work.kind == "fake" else work.point.device
        if measured_on == "cuda" and self._gpu is None:
            measured_on = "cpu"
        with self._lock:
            if measured_on not in self._machine:
                self._machine[measured_on] = environment(measured_on, (), initialise_cuda=False)
        for pass_ in passes:
            row = {
                **job.bases[pass_],
                **row_fields(work.point),
                "timestamp": utc_now(),
                "status": status,
                "reason": printable(reason),
                "measured_on": measured_on,
                "environment": {**self._machine[measured_on], **(job.gpu if measured_on == "cuda" else {})},
            }
            self.store(row)

    def store(self, row: dict[str, Any], samples: Sequence[float] = ()) -> None:
        """Write a row into the file and count it."""
        with self._lock:
            self._store(row)
            if samples:
                self._samples(row, list(samples))

    def _store(self, row: dict[str, Any]) -> None:
        row = store.keep(self.output, row)
        status = row["status"]
        name = row.get("implementation") or f"{row['numerator']} / {row['denominator']}"
        self.summary.statuses[status] += 1
        self.summary.by_implementation[name][status] += 1
        shape = ",".join(str(v) for v in row["shape"].values())
        if status not in ("ok", "not_installed", "unsupported"):
            self.summary.failures.append((f"{name} {shape} {row['pass']}", status, row["reason"]))
        last_pass = row["pass"] == "forward_backward"
        if "overhead_s" in row and last_pass:
            self.summary.overhead[shape].append(sum(row["overhead_s"].values()))
        if last_pass:
            self.summary.build_s += row.get("build_s") or 0.0
