"""Device times for pytest-benchmark: a clock that a round sets to what the GPU needed, and what a saved benchmark says
beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import store
from harness.record import MEASURED_STATUSES
from harness.registry import Registry
from harness.regress import Asked
from harness.runner import Runner
from harness.session import works_of
from harness.sweep import Sweep
from harness.timing import TimingSettings


class DeviceClock:
    """A timer for pytest-benchmark, in seconds. Each round begins at zero, so that the difference of its two readings
    is the sample itself and not the rounded difference of two sums."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def begin(self) -> None:
        self.now = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True)
class Measured:
    """A row with the samples behind its ``device_ms``, in ms (none where the row has no numbers)."""

    row: Mapping[str, Any]
    samples_ms: Sequence[float] = ()


def id_of(asked: Asked) -> str:
    """The parameter in a test's name: `-k` takes no commas and no spaces."""
    return re.sub(r"[ ,+]+", "-", asked.what)


def measure(sweep: Sweep, wanted: Iterable[Asked], registry: Registry, path: Path) -> dict[str, Measured]:
    """Measure points as `moebench regress` does, one worker process for all; rows go to ``path``. By identity."""
    points = list(dict.fromkeys(asked.point for asked in wanted))
    runner = Runner(
        sweep.name,
        works_of(replace(sweep, points=points, ratios=[])),
        registry,
        path,
        settings=TimingSettings(**sweep.options.settings()),
        time_limit_s=sweep.options.time_limit_s,
        resume=False,
    )
    samples: dict[str, list[float]] = {}
    runner.on_samples(lambda row, found: samples.update({row["resume_key"]: found}))
    runner.run()
    rows, _ = store.read(path)
    found = {}
    for row in rows:
        if row["status"] not in MEASURED_STATUSES:
            # A row without numbers says "cpu" where the GPU could not be reached.
            found[store.identity({**row, "measured_on": "cuda"}, None)] = Measured(row)
        else:
            found[store.identity(row, None)] = Measured(row, samples[row["resume_key"]])
    return found


def extra_info(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a saved benchmark says beside its statistics."""
    machine, time = row["environment"], row["device_ms"]
    seen = machine.get("during_samples") or {}
    return {
        "unit": "seconds of GPU time (device_ms / 1000)",
        **{key: row[key] for key in ("implementation", "operation", "variant", "pass", "shape", "dtype", "routing")},
        **{key: row[key] for key in ("status", "reason", "resume_key")},
        "basis": time["basis"],
        "device_ms": {"median": time["median"], "ci95": time["ci95"]},
        "tflops": (row.get("tflops") or {}).get("device"),
        **{key: machine.get(key) for key in ("gpu", "driver", "cuda", "torch", "triton", "commit", "dirty")},
        "sm_clock_mhz": seen.get("sm_clock_mhz"),
        "power_w": seen.get("power_w"),
    }
