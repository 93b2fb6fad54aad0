"""A pytest plugin (`-p fake_device_samples`): a GPU and a worker that answers each point at once, with made-up samples.

`SLOWER` in the environment is a factor on all of them; the point of `FAILING` has a failed measurement.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from harness import environment, runner
from harness.points import point_from_dict, row_fields
from harness.statistics import summarise

GPU = "NVIDIA H200"
FAILING = "16384,4096,1024,512,8"
REASON = "while in build: RuntimeError: no such tile"


def samples_of(shape: str, pass_: str) -> list[float]:
    """ms: others for each shape and pass, in no order, an even number, none of them a short binary fraction."""
    base = 0.1 + sum(map(int, shape.split(","))) % 997 / 1000.0 + (0.7 if pass_ == "backward" else 0.0)
    return [base * (1.0 + (index * 7 % 12) / 1300.0) * float(os.environ.get("SLOWER", "1")) for index in range(12)]


class Worker:
    phase = "graph"
    start_s = 0.5

    def run(self, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        point = point_from_dict(job["point"])
        if str(point.shape) == FAILING:
            self.phase = "build"
            yield {"event": "failed", "status": "crashed", "reason": REASON.split(": ", 1)[1], "passes": job["passes"]}
        for pass_ in job["passes"] if str(point.shape) != FAILING else ():
            found = samples_of(str(point.shape), pass_)
            summary = summarise(found)
            device = {key: summary[key] for key in ("median", "ci95", "samples")}
            machine = {"measured_on": "cuda", "gpu": GPU, "driver": "580.1", "commit": "0123abc", "dirty": False}
            seen = {"sm_clock_mhz": {"min": 1500.0, "median": 1600.0, "max": 1700.0}, "throttle_reasons": []}
            base = {key: value for key, value in job["bases"][pass_].items() if key != "mode"}
            row = {
                **base,
                **row_fields(point),
                "timestamp": "2026-11-30T12:00:00+00:00",
                "status": "ok",
                "reason": "",
                "measured_on": "cuda",
                "environment": {**machine, "during_samples": seen},
                "latency_ms": {**summary, "mode": job["settings"]["mode"]},
                "device_ms": {**device, "basis": "graph"},
                "tflops": {"host": 1.0, "device": 2.0, "hardware": 3.0},
            }
            yield {"event": "row", "row": row, "samples": found}
        yield {"event": "done", "poisoned": False, "phases": {}}

    def close(self, patience_s: float = 5.0) -> None:
        pass


def pytest_load_initial_conftests() -> None:
    # Before any test's module takes these names over; and only where this file is a plugin, not where it is imported.
    for module in (environment, runner):
        module.gpu_name = lambda: GPU  # type: ignore[attr-defined]
    runner.WorkerProcess = Worker  # type: ignore[assignment,misc]
