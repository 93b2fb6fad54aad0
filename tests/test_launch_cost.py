"""The tool that measures what the layer costs beside the GPU's time, as far as a machine without a GPU can tell."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import ROOT, RightLayer, problem_of
from typer.testing import CliRunner

from harness.interface import Implementation, Layer, Problem
from implementations.sonicmoe_triton import launch_cost
from implementations.sonicmoe_triton.launch_cost import Calls

COMMITTED = ROOT / "results" / "nvidia_h200" / "tuning" / "sonicmoe_triton_launch_cost.json"


def command(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    app = typer.Typer(add_completion=False)
    app.command()(launch_cost.main)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "launch costs need a Hopper GPU (compute capability 9.0)"),
        (("--shape", "8,64,64"), "shape '8,64,64': expected five whole numbers"),
        (("--shape", "8,64,64,1025,2"), "takes at most 1024 experts, not E=1025"),
    ],
)
def test_refusals(arguments: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = tmp_path / "rows.json"
    code, output = command(*arguments, "--rows", str(rows))
    assert code == 2 and not rows.exists()
    assert sum(reason in line for line in output.splitlines()) == 1, output


ROUNDS = [
    {"host_ms": host, "enqueue_ms": host / 2, "graph_ms": graph, "idle_ms": 2 * host}
    for host, graph in [(3.0, 2.0), (2.5, 2.4), (2.6, 2.5), (9.0, 2.0), (2.4, 2.4), (2.7, 1.8), (2.8, 2.1)]
]


def test_medians_intervals_and_paired_ratios() -> None:
    found = launch_cost.summary(ROUNDS)
    values = {key: [row[key] for row in ROUNDS] for key in ROUNDS[0]}
    values["host_over_graph"] = [row["host_ms"] / row["graph_ms"] for row in ROUNDS]
    for key, samples in values.items():
        # Of seven the whole range covers the median with 1 - 2/2^7 = 98 %, all but the ends with 87 % only.
        interval = [min(samples), max(samples)]
        assert found[key] == {"median": statistics.median(samples), "ci95": interval, "samples": 7}
    # Paired: not the medians' own ratio.
    assert found["host_over_graph"]["median"] == pytest.approx(2.8 / 2.1) != pytest.approx(2.7 / 2.1)
    assert found["rounds"] == ROUNDS and found["no_graph"] is None
    json.dumps(found, allow_nan=False)


def test_a_layer_without_a_graph_has_no_ratio() -> None:
    rows = [{key: value for key, value in row.items() if key != "graph_ms"} for row in ROUNDS]
    found = launch_cost.summary(rows, "it waits for the host")
    assert found["graph_ms"] is None and found["host_over_graph"] is None
    assert found["no_graph"] == "it waits for the host" and found["host_ms"]["median"] == 2.7


def child(program: str, cache: Path) -> dict[str, Any]:
    return launch_cost.run_child([sys.executable, "-S", "-c", program], cache)


def test_what_a_child_reports(tmp_path: Path) -> None:
    report = child(
        "import json, os; print('chatter'); print(json.dumps({'cache': os.environ['TRITON_CACHE_DIR']}))", tmp_path
    )
    assert report.pop("wall_s") > 0 and report == {"cache": str(tmp_path)}


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.stderr.write('first\\n'); sys.exit('last words')", r"failed \(exit code 1\): last words$"),
        ("import os; os.kill(os.getpid(), 9)", r"failed \(ended by signal SIGKILL\): nothing on standard error$"),
        ("import sys; print('chatter'); sys.stderr.write('odd\\n')", "reported nothing: odd$"),
        ("pass", "reported nothing: nothing on standard error$"),
    ],
)
def test_a_child_that_fails(program: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=message):
        child(program, tmp_path)


class FakeEvent:
    """Events whose clock runs with the calls that were made: one millisecond for each."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.now

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at - self.at


class FakeGraphs:
    """Both graphs of a layer: together they take half a millisecond."""

    def __init__(self, *_: object) -> None:
        self.forward_graph = self.backward_graph = self

    def replay(self) -> None:
        FakeEvent.now += 0.25


class SlowLayer(RightLayer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        FakeEvent.now += 1.0
        return super().forward(x)


class Plugin(Implementation):
    name, label, upstream, licence = "plugin", "Plugin", "", ""

    def build(self, problem: Problem) -> Layer:
        return SlowLayer(problem)


class Uncaptured(Plugin):
    name, no_graph_reason = "uncaptured", "it waits for the host"


def test_turns_of_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(launch_cost, "GraphCalls", FakeGraphs)
    monkeypatch.setattr(launch_cost, "L2Eviction", lambda: None)
    monkeypatch.setattr(launch_cost.gc, "freeze", lambda: None)
    problem = problem_of("8,16,8,4,2")
    row = launch_cost.in_a_row([Plugin(), Uncaptured()], problem)
    assert list(row) == ["plugin", "uncaptured"]
    medians = {key: row["plugin"][key]["median"] for key in launch_cost.NUMBERS if key != "enqueue_ms"}
    assert medians == {"host_ms": 1.0, "graph_ms": 0.5, "idle_ms": 1.0, "host_over_graph": 2.0}
    assert row["uncaptured"]["graph_ms"] is None and row["uncaptured"]["no_graph"] == "it waits for the host"
    assert all(len(found["rounds"]) == launch_cost.ROUNDS for found in row.values())
    assert not problem.x.requires_grad and problem.x.grad is None
    first = {name: {"first_call_s": 1.0, "wall_s": 2.0} for name in ("cold", "warm")}
    assert [len(table.rows) for table in launch_cost.tables(first, row)] == [2, len(launch_cost.NUMBERS)]


def test_a_failed_capture_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise launch_cost.GraphCapturedError("RuntimeError: capture")

    monkeypatch.setattr(launch_cost, "GraphCalls", fail)
    monkeypatch.setattr(launch_cost, "L2Eviction", lambda: None)
    problem = problem_of("8,16,8,4,2")
    calls: Calls = launch_cost.prepare(RightLayer(problem), problem, None)
    assert calls.replay is None and calls.no_graph == "cannot be captured in a CUDA graph: RuntimeError: capture"


@pytest.mark.skipif(not COMMITTED.exists(), reason="not measured yet")
def test_the_committed_file_is_whole() -> None:
    found = json.loads(COMMITTED.read_text())
    assert {"gpu", "driver", "torch", "triton", "commit", "dirty", "packages", "shape"} <= set(found)
    cold, warm = found["first_call"]["cold"], found["first_call"]["warm"]
    for report in (cold, warm):
        parts = ("import_s", "tool_import_s", "context_s", "first_call_s")
        assert 0 < sum(report[part] for part in parts) < report["wall_s"]
        assert report["kernels_compiled"] + report["kernels_loaded"] > 0
    assert cold["kernels_compiled"] > warm["kernels_compiled"] == 0
    row = found["in_a_row"]
    assert row["calls"] > 0 and launch_cost.OURS in row["layers"]
    assert set(row["layers"]) | set(row["left_out"]) == {launch_cost.OURS, launch_cost.OFFICIAL}
    for layer in row["layers"].values():
        assert layer == launch_cost.summary(layer["rounds"], layer["no_graph"])
