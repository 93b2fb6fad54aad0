"""The benchmarks of `tests/throughput` with made-up samples: what pytest-benchmark writes are those samples."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, point_of
from fake_device_samples import FAILING, GPU, REASON, samples_of

pytest.importorskip("pytest_benchmark")


def benchmarks(*arguments: object, slower: float = 1.0) -> subprocess.CompletedProcess[str]:
    """`pytest tests/throughput` in a process of its own, on the made-up GPU."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # A worker of pytest-xdist tells its children, too, that benchmarks are off.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": path, "SLOWER": str(slower), "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", "tests/throughput", "-p", "no:xdist", "-p", "fake_device_samples"]
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


def shape_of(benchmark: dict[str, Any]) -> str:
    return ",".join(str(benchmark["extra_info"]["shape"][key]) for key in "TdnEK")


def test_a_saved_benchmark_holds_the_device_samples_and_compares(tmp_path: Path) -> None:
    storage = (f"--benchmark-storage=file://{tmp_path / 'saved'}",)
    ended = benchmarks(f"--benchmark-json={tmp_path / 'all.json'}", "--benchmark-save=first", *storage)
    assert "10 passed" in ended.stdout and "2 failed" in ended.stdout, ended.stdout + ended.stderr
    assert ended.stdout.count(f"crashed: {REASON}") >= 2
    told = json.loads((tmp_path / "all.json").read_text())
    assert told["machine_info"]["gpu"]["torch"]
    assert len(told["benchmarks"]) == 10
    for benchmark in told["benchmarks"]:
        info, pass_ = benchmark["extra_info"], benchmark["extra_info"]["pass"]
        expected = [ms / 1e3 for ms in samples_of(shape_of(benchmark), pass_)]
        assert benchmark["stats"]["data"] == expected
        assert benchmark["stats"]["median"] == statistics.median(expected)
        assert benchmark["stats"]["rounds"] == 12 and benchmark["stats"]["iterations"] == 1
        assert benchmark["group"] == pass_ and benchmark["param"].endswith(f"-{pass_}")
        assert info["gpu"] == GPU and info["commit"] == "0123abc" and info["driver"] == "580.1"
        assert info["unit"].startswith("seconds of GPU time") and info["sm_clock_mhz"]["median"] == 1600.0
        assert info["implementation"] == "sonicmoe_triton" and info["status"] == "ok"
        assert info["device_ms"]["median"] == pytest.approx(benchmark["stats"]["median"] * 1e3, rel=1e-12)
    assert {shape_of(benchmark) for benchmark in told["benchmarks"]}.isdisjoint({FAILING})

    # Only what is selected is measured; 10 % slower fails the comparison.
    compare = ("--benchmark-compare=0001", "--benchmark-compare-fail=median:5%", *storage)
    slower = benchmarks("-k", "24576-1536", f"--benchmark-json={tmp_path / 'one.json'}", *compare, slower=1.1)
    assert slower.returncode != 0 and "Performance has regressed" in slower.stderr, slower.stdout + slower.stderr
    assert len(json.loads((tmp_path / "one.json").read_text())["benchmarks"]) == 2


@pytest.mark.usefixtures("forked_workers")
def test_a_workers_samples_are_those_behind_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from harness.registry import load_registry
    from harness.runner import Runner, Work
    from harness.timing import TimingSettings

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    passes = ("forward", "backward", "forward_backward")
    work = Work("point", point_of("8,16,8,4,2", name="torch_loop"), passes)
    settings = TimingSettings(min_samples=6, max_samples=7, time_limit_s=0.05)
    path = tmp_path / "rows.jsonl"
    runner = Runner("t", [work], load_registry(), path, settings=settings, time_limit_s=60, resume=False)
    found: dict[str, list[float]] = {}
    runner.on_samples(lambda row, samples: found.update({row["pass"]: samples}))
    assert runner.run().statuses == {"ok": 3}
    rows = {row["pass"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert set(found) == set(rows) == set(passes)
    for pass_, row in rows.items():
        assert len(found[pass_]) == row["latency_ms"]["samples"]
        assert statistics.median(found[pass_]) == pytest.approx(row["latency_ms"]["median"], rel=1e-12)
