"""How long a job will take: for the dry run and for the progress bar's time left."""

from __future__ import annotations

from harness.costs import model_flops
from harness.interface import Point

#: Model FLOP/s that a job's samples reach on average, all implementations taken together.
_RATE = {"cuda": 250e12, "cpu": 20e9}
#: Forward+backward calls that a job runs: warm-up, host samples, profile, graph replays.
_CALLS = {"point": {"cuda": 45, "cpu": 12}, "ratio": {"cuda": 60, "cpu": 60}}
#: Inputs, reference, building and (shared) process start.
_FIXED_S = {
    "point": {"cuda": 1.0, "cpu": 0.5},
    "ratio": {"cuda": 1.0, "cpu": 1.0},
    "fake": {"cpu": 1.0},
    "account": {"cpu": 0.3},
}


def job_seconds(kind: str, point: Point) -> float:
    """Estimated seconds of one job, from its FLOPs and a fixed part; within a factor of two or so."""
    fixed = _FIXED_S[kind].get(point.device, 1.0)
    if kind in ("fake", "account"):
        return fixed
    flops = model_flops(point.shape, "forward_backward")
    return fixed + _CALLS[kind][point.device] * flops / _RATE[point.device]
