"""How long a job will take: for the dry run and for the progress bar's time left."""

from __future__ import annotations

from harness.costs import model_flops
from harness.interface import Point
from harness.timing import FIRST_REST_S, REST, TimingSettings

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


def job_seconds(kind: str, point: Point, settings: TimingSettings | None = None) -> float:
    """Estimated seconds of one job, from its FLOPs and a fixed part; within a factor of two or so. The settings count
    by their mode: heating and rests."""
    fixed = _FIXED_S[kind].get(point.device, 1.0)
    if kind in ("fake", "account"):
        return fixed
    sampling = _CALLS[kind][point.device] * model_flops(point.shape, "forward_backward") / _RATE[point.device]
    settings = settings or TimingSettings()
    # Before host samples and before graph replays; a ratio, and a CPU, has one kind of sample.
    kinds = 2 if (kind, point.device) == ("point", "cuda") else 1
    if settings.mode == "sustained":
        sampling += kinds * settings.heat_s
    elif settings.mode == "paced":
        sampling = (1.0 + REST) * sampling + kinds * FIRST_REST_S
    return fixed + sampling
