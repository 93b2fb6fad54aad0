"""The conformance suite with workers that do as they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from harness import store
from harness.conformance import CASES, Case, suite
from harness.environment import environment
from harness.process import WorkerProcess
from harness.record import validate
from harness.registry import default_registry

MET = [case for case in CASES if not case.cuda_only]
MACHINE = environment("cpu")


class StubWorker:
    """Stands in for a worker process: does with each job what `does` says, and counts its like."""

    started: ClassVar[list[StubWorker]] = []
    does: ClassVar[Callable[[dict[str, Any]], dict[str, Any] | Exception]]

    failure = WorkerProcess.failure
    died_before_job = False
    untuned = False

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


def run_suite(path: Path, cases: Sequence[Case], device: str = "cpu", **options: Any) -> list[dict[str, Any]]:
    plugins = [default_registry().get("torch_loop")]
    rows = suite.Suite(plugins, cases, device, path, **options).run()
    stored, problems = store.read(path)
    assert not problems and len(stored) == len(rows)
    assert all(validate(row) == [] for row in stored)
    return rows
