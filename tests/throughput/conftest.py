"""What the benchmarks share: one measurement of all points that are selected, and the GPU in a saved file's machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.environment import environment, gpu_name
from harness.registry import load_registry
from harness.regress import SWEEP
from harness.sweep import load_sweep

from .device_time import DeviceClock, Measured, measure


@pytest.fixture
def device_clock(request: pytest.FixtureRequest) -> DeviceClock:
    """The timer of this test's benchmark."""
    marker = request.node.get_closest_marker("benchmark")
    assert marker is not None
    return marker.kwargs["timer"]


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measured]:
    """Every selected point, measured in one run; by identity."""
    wanted = [
        item.callspec.params["asked"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent
    ]
    registry = load_registry()
    path = tmp_path_factory.mktemp("throughput") / f"{SWEEP}.jsonl"
    return measure(load_sweep(SWEEP, registry), wanted, registry, path)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """So that a comparison across machines says that it is one. Called with every file that is saved, whatever was
    measured; without a GPU there is nothing to add."""
    if gpu_name() is not None:
        machine = environment("cuda", initialise_cuda=False)
        machine_info["gpu"] = {key: machine[key] for key in ("gpu", "driver", "cuda", "torch", "triton")}
