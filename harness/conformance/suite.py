"""Runs the suite: cases in worker processes, every outcome a row, each row stored the moment it exists."""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness import store
from harness.compilation import cold_caches
from harness.conformance import OPERATION, OURS, Case
from harness.deadline import Deadline
from harness.environment import environment, gpu_name, package_version
from harness.interface import Implementation, Point
from harness.operations import get_operation
from harness.points import point_to_dict, row_fields
from harness.process import WorkerDied, WorkerProcess, WorkerStartError, WorkerTimeout, side_by_side
from harness.record import SCHEMA_VERSION, new_run_id, utc_now
from harness.registry import code_hash, installed_reason, refusal
from harness.runner import FAILED
from harness.timing import TimingSettings
from harness.tuners import FIRST_CONFIGURATION, OF_A_CHOICE, OWN_CHOICE

PASS = "forward_backward"
#: Seconds that a case may take, building included.
TIME_LIMIT_S = 60.0
#: As many times as long may it take where kernels that tune themselves do so, and compile all that they may choose; not
#: tried any more after `SLOW_CASES` of an implementation's that have taken longer.
TUNING_TIMES = 4
#: `TIME_LIMIT_S` once `SLOW_CASES` of an implementation's have not finished; the rest is left out after
#: `MOST_TIMEOUTS`.
SHORT_LIMIT_S = 20.0
SLOW_CASES, MOST_TIMEOUTS = 2, 4
#: Statuses with which one of our own implementations fails the suite.
FAILURES = (*FAILED, "unstable")

Row = dict[str, Any]


@dataclass
class Lane:
    """Cases of one implementation that run one after another in one worker, which a crash or a timeout replaces."""

    implementation: Implementation
    cases: Sequence[Case]
    worker: WorkerProcess | None = None
    timeouts: int = 0


@dataclass
class Suite:
    """One run of the suite on a device.

    Attributes:
        output: the file that rows go to.
        time_limit_s: seconds that a case may take, building included; `TUNING_TIMES` as many where what a case was met
            with first was no tuner's choice.
        jobs: how many worker processes run side by side.
        on_row: told each row once it is stored.
        known: leave out what these rows say, whatever they were made with.
        deadline: begin no case once it is over.
        skipped, late: how many cases were left out for either.
    """

    implementations: Sequence[Implementation]
    cases: Sequence[Case]
    device: str
    output: Path
    time_limit_s: float = TIME_LIMIT_S
    jobs: int = 1
    on_row: Callable[[Row], None] = lambda row: None
    known: store.Known | None = None
    deadline: Deadline | None = None
    skipped: int = field(init=False, default=0)
    late: int = field(init=False, default=0)
    run_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.run_id = new_run_id()
        self._machine = environment(self.device, (), initialise_cuda=False)
        self._gpu = gpu_name() if self.device == "cuda" else None
        self._stop = threading.Event()
        self._counting = threading.Lock()
        self._slow_tuning: Counter[str] = Counter()
        # Once for all cases: a plugin's hash reads and parses all that it imports.
        self._made_of = {
            plugin.name: (
                code_hash(plugin),
                {name: package_version(name) for name in ("torch", "triton", *plugin.distributions)},
            )
            for plugin in self.implementations
        }

    def run(self) -> list[Row]:
        """Meet every case; rows are in the file as soon as they exist, whatever ends the run.

        Raises:
            WriteError: rows cannot be stored there.
        """
        # More workers than implementations: each implementation's cases are dealt to several.
        each = max(1, self.jobs // max(len(self.implementations), 1))
        lanes = [
            Lane(implementation, self.cases[start::each])
            for implementation in self.implementations
            for start in range(min(each, len(self.cases)))
        ]
        rows: list[Row] = []
        with store.hold(self.output):
            side_by_side([partial(self._run_lane, lane, rows.append) for lane in lanes], self.jobs, self._stop)
        return rows

    def _run_lane(self, lane: Lane, keep: Callable[[Row], None]) -> None:
        try:
            for case in lane.cases:
                if self._stop.is_set():
                    return
                if self._left_out(lane.implementation, case):
                    continue
                row = store.keep(self.output, self._meet(lane, case))
                keep(row)
                self.on_row(row)
        finally:
            self._close(lane, patience_s=1.0)

    def _left_out(self, implementation: Implementation, case: Case) -> bool:
        known = self.known is not None and self.known.has(
            self._base(implementation, case, self._point(implementation, case)), self._gpu
        )
        late = not known and self.deadline is not None and self.deadline.left_s() <= 0
        with self._counting:
            self.skipped += known
            self.late += late
        return known or late

    def _point(self, implementation: Implementation, case: Case) -> Point:
        return case.point(implementation.name, tuple(implementation.dtypes), self.device)

    def _close(self, lane: Lane, patience_s: float = 0.0) -> None:
        if lane.worker is not None:
            lane.worker.close(patience_s=patience_s)
            lane.worker = None

    def _base(self, implementation: Implementation, case: Case, point: Point) -> Row:
        where = (self._gpu or "no GPU") if self.device == "cuda" else "cpu"
        inputs = store.point_inputs(point, PASS, kind=OPERATION, case=asdict(case))
        key = store.resume_key(inputs, *self._made_of[implementation.name], where)
        scaled = point.device == "cpu" and case.cpu_shape
        return {
            **row_fields(point),
            "schema": SCHEMA_VERSION,
            "record": "measurement",
            "run_id": self.run_id,
            "sweep": OPERATION,
            "operation": OPERATION,
            "variant": case.name,
            "pass": PASS,
            "implementation": implementation.name,
            "label": implementation.label,
            "measured_on": self.device,
            "resume_key": key,
            "notes": [f"{case.cpu_reason}; in full {case.shape}"] if scaled else [],
        }

    def refusal(self, implementation: Implementation, case: Case, point: Point) -> tuple[str, str] | None:
        """Why the case does not run, as (status, reason)."""
        impossible = get_operation(point.operation).unsupported_reason(point)
        if impossible or (case.cuda_only and self.device == "cpu"):
            return "unsupported", impossible or case.cuda_only
        refused = refusal(implementation, point)
        missing = None if refused else installed_reason(implementation)
        return ("not_installed", missing) if missing else refused

    def _meet(self, lane: Lane, case: Case) -> Row:
        implementation = lane.implementation
        point = self._point(implementation, case)
        base = self._base(implementation, case, point)

        def without_numbers(status: str, reason: str) -> Row:
            return {**base, "timestamp": utc_now(), "environment": self._machine, "status": status, "reason": reason}

        refused = self.refusal(implementation, case, point)
        if refused:
            return without_numbers(*refused)
        if lane.timeouts >= MOST_TIMEOUTS:
            return without_numbers("timeout", f"not tried, after {MOST_TIMEOUTS} cases that did not finish")
        limit_s = self.time_limit_s if lane.timeouts < SLOW_CASES else min(SHORT_LIMIT_S, self.time_limit_s)
        job: dict[str, Any] = {
            "kind": OPERATION,
            "case": case.name,
            "point": point_to_dict(point),
            "passes": [PASS],
            "bases": {PASS: base},
            "settings": asdict(TimingSettings()),
            "alone": self.jobs == 1 and case.check != "cold_caches",
        }

        def ask(job: dict[str, Any], limit_s: float) -> tuple[Row, bool]:
            found, untuned = (self._race if case.check == "cold_caches" else partial(self._serve, lane))(job, limit_s)
            return (without_numbers(*found) if isinstance(found, tuple) else found), untuned

        row, untuned = ask(job, limit_s)
        lane.timeouts += row["status"] == "timeout"
        if not untuned or row["status"] not in OF_A_CHOICE:
            return row
        # So far a choice that their tuners may never make: what they choose themselves is theirs.
        tuning_s = TUNING_TIMES * self.time_limit_s
        if self.deadline is not None:
            tuning_s = min(tuning_s, self.deadline.left_s())
        why = "no time was left for their own choice"
        if self._slow_tuning[implementation.name] >= SLOW_CASES:
            why = "their own choice took too long in other cases"
        elif tuning_s > 0:
            self._close(lane)
            tuned, _ = ask(job | {"own_tuning": True}, tuning_s)
            if tuned["status"] != "timeout":
                first = f"{FIRST_CONFIGURATION}: {row['status']}, {row['reason'].splitlines()[0]}"
                return {**tuned, "notes": [*tuned["notes"], f"{OWN_CHOICE}; {first}"]}
            why = f"with their own choice it had not ended after {tuning_s:.0f} s"
            with self._counting:
                self._slow_tuning[implementation.name] += 1
        return {**row, "notes": [*row["notes"], f"{FIRST_CONFIGURATION}; {why}"]}

    def _serve(self, lane: Lane, job: dict[str, Any], limit_s: float) -> tuple[Row | tuple[str, str], bool]:
        """The outcome of a job in the lane's worker, and whether a tuner in it has taken its first configuration."""
        while True:
            try:
                lane.worker = lane.worker or WorkerProcess(stop=self._stop)
            except WorkerStartError as error:
                return _not_started(error), False
            keep, found = outcome(lane.worker, job, limit_s)
            untuned = lane.worker.untuned
            if not keep:
                self._close(lane)
            if found is not None:
                return found, untuned

    def _race(self, job: dict[str, Any], limit_s: float) -> tuple[Row | tuple[str, str], bool]:
        """The same job in two processes at once, whose compilers find empty caches in the same folders; as `_serve`."""
        found: list[Row | tuple[str, str]] = []
        untuned: list[bool] = []
        with tempfile.TemporaryDirectory(prefix="moebench-cold-") as folder:
            caches = cold_caches(Path(folder))

            def one() -> None:
                try:
                    worker = WorkerProcess(caches, self._stop)
                except WorkerStartError as error:
                    found.append(_not_started(error))
                    return
                try:
                    _, its = outcome(worker, job, limit_s)
                finally:
                    untuned.append(worker.untuned)
                    worker.close(patience_s=0.0)
                assert its is not None
                found.append(its)

            side_by_side([one, one], 2, self._stop)
        wrong = [one for one in found if isinstance(one, tuple) or one["status"] != "ok"]
        return (wrong[0] if wrong else found[0]), any(untuned)


def _not_started(error: WorkerStartError) -> tuple[str, str]:
    return "crashed", f"the worker process did not start: {error}"


def outcome(worker: WorkerProcess, job: dict[str, Any], limit_s: float) -> tuple[bool, Row | tuple[str, str] | None]:
    """Run one job: is the worker still good, and its row, or (status, reason) where it gave none. None of both where
    the worker died of what an earlier job had left in it: the job is to run again, in a fresh one."""
    row: Row | None = None
    failed: tuple[str, str] | None = None
    try:
        for event in worker.run(job, limit_s):
            if event["event"] == "row":
                row = event["row"]
            elif event["event"] == "failed":
                failed = event["status"], f"while in {worker.phase}: {event['reason']}"
            elif event["event"] == "done":
                return not event["poisoned"], failed or row or ("crashed", "the case ended without a row")
    except WorkerTimeout as late:
        return False, worker.failure(late, limit_s)
    except WorkerDied as death:
        return False, None if worker.died_before_job else worker.failure(death, limit_s)
    return False, ("crashed", "the worker's events ended")


def failed_of_ours(rows: Sequence[Row], ours: Sequence[str] = OURS) -> list[Row]:
    """Rows with which one of our own implementations fails."""
    return [row for row in rows if row["implementation"] in ours and row["status"] in FAILURES]


def own_in_words(rows: Sequence[Row], ours: Sequence[str] = OURS) -> str:
    """``36 ok, 2 unsupported, none failed``: a case that ours refuse is no failure, and must not be hidden either."""
    counts = Counter(row["status"] for row in rows if row["implementation"] in ours)
    if not counts:
        return "none met"
    failed = sum(counts[status] for status in FAILURES)
    others = [f"{counts[status]} {status}" for status in sorted(counts) if status not in ("ok", *FAILURES)]
    return ", ".join([f"{counts['ok']} ok", *others, f"{failed or 'none'} failed"])
