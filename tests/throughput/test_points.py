"""The points of `moebench regress` as benchmarks of pytest-benchmark, whose statistics are of device time.

`python -m pytest tests/throughput --benchmark-save=NAME`, then `--benchmark-compare`; needs a GPU.
"""

from __future__ import annotations

import warnings

import pytest

from harness.environment import gpu_name
from harness.record import MEASURED_STATUSES
from harness.registry import load_registry
from harness.regress import SWEEP, Asked, asked_of
from harness.sweep import load_sweep

from .device_time import DeviceClock, Measured, extra_info, id_of

pytest.importorskip("pytest_benchmark", reason="pytest-benchmark is missing: pip install -e '.[dev]'")
from pytest_benchmark.fixture import BenchmarkFixture

pytestmark = pytest.mark.skipif(gpu_name() is None, reason="device times need an NVIDIA GPU, and this machine has none")


@pytest.mark.benchmark(timer=DeviceClock(), disable_gc=False)
@pytest.mark.parametrize("asked", asked_of(load_sweep(SWEEP, load_registry())), ids=id_of)
def test_device_time(
    asked: Asked, benchmark: BenchmarkFixture, device_clock: DeviceClock, request: pytest.FixtureRequest
) -> None:
    """One round for each of the harness' samples; a point that fails fails its test."""
    if not benchmark.enabled:
        pytest.skip("benchmarks are disabled (by --benchmark-disable, or pytest-xdist: one GPU serves one timing)")
    # Not before it is known that it is wanted: the first test measures every point.
    point: Measured = request.getfixturevalue("measured")[asked.key]
    row = point.row
    if row["status"] not in MEASURED_STATUSES:
        pytest.fail(f"{row['status']}: {row['reason']}", pytrace=False)
    if row["status"] != "ok":
        warnings.warn(f"{asked.what}: {row['status']}: {row['reason']}", stacklevel=1)
    benchmark.group = asked.pass_
    benchmark.extra_info.update(extra_info(row))
    left = iter(point.samples_ms)
    benchmark.pedantic(
        lambda: device_clock.pass_by(next(left) / 1e3), setup=device_clock.begin, rounds=len(point.samples_ms)
    )
