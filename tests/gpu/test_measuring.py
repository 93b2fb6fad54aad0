"""What measures on a GPU: graph replays, the profiler's windows, interleaved ratios, heat, and memory that runs out."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from harness import measure, one_call, store, timing
from harness.correctness import forward_backward
from harness.interface import Layer, Problem
from harness.measure import Context, measure_point, measure_ratio
from harness.profiling import (
    KernelInterval,
    WindowedCalls,
    breakdown,
    busy_samples,
    kernels_in_windows,
    profile,
    union_ns,
)
from harness.registry import default_registry, load_registry
from harness.runner import Runner, Work
from harness.timing import GraphCalls, HostCalls, L2Eviction, Sample, TimingSettings, heat

from . import common

NAME = "sonicmoe_torch"
MEDIUM, HEADLINE = "4096,768,256,32,4", "24576,1536,256,128,8"
PASSES = ("forward", "backward", "forward_backward")


@pytest.fixture(scope="module")
def evict() -> L2Eviction:
    return L2Eviction()


@pytest.fixture(scope="module")
def built() -> tuple[Layer, list[Problem]]:
    """A layer with two input sets, warm."""
    problems = [common.problem_of(NAME, MEDIUM, input_set=index) for index in range(2)]
    layer = default_registry().get(NAME).build(problems[0])
    for problem in problems:
        common.run(layer, problem)
    return layer, problems


@pytest.fixture(scope="module")
def windows(built: tuple[Layer, list[Problem]], evict: L2Eviction) -> dict[str, list[KernelInterval]]:
    """The windows of eight profiled calls; the first, which carries the profiler's start-up, left out."""
    order: list[str] = []
    windowed = WindowedCalls("p", *built, evict, order)

    def calls() -> None:
        for index in range(-1, 8):
            windowed(index)

    found = kernels_in_windows(profile(calls), order)
    assert list(found) == order and len(order) == 18
    return {window: kernels for window, kernels in found.items() if not window.endswith(":-1")}


def test_a_graph_replays_what_the_eager_call_computes(built: tuple[Layer, list[Problem]], evict: L2Eviction) -> None:
    layer, problems = built
    calls = GraphCalls(layer, problems, evict)
    outputs: list[Tensor] = []
    for index in (0, 1, 0):
        forward_ms, backward_ms = calls(index)
        assert 0 < forward_ms < 1e3 and 0 < backward_ms < 1e3
        output, gradients = calls.outputs()
        eager, eager_gradients = forward_backward(layer, problems[index].x, problems[index].grad_output)
        for got, want in zip([output, *gradients], [eager, *eager_gradients], strict=True):
            assert got is not None and want is not None
            assert common.relative([(got, want.float())]) < 5e-3
        outputs.append(output.clone())
    assert common.relative([(outputs[0], outputs[1].float())]) > 0.5
    assert common.relative([(outputs[0], outputs[2].float())]) < 5e-3


def test_every_window_holds_the_same_kernels(windows: dict[str, list[KernelInterval]]) -> None:
    for pass_ in ("forward", "backward"):
        names = [sorted(k.name for k in windows[f"p:{pass_}:{index}"]) for index in range(8)]
        assert names[0] and all(n == names[0] for n in names)
    for kernels in windows.values():
        assert all(kernel.end > kernel.start for kernel in kernels)
        assert not any("spin_kernel" in kernel.name for kernel in kernels)
        assert 0 < union_ns(kernels) <= sum(kernel.end - kernel.start for kernel in kernels)


def test_evictions_lie_outside_the_windows(evict: L2Eviction) -> None:
    """A layer of one product: its window holds little else, and no sum over the eviction's buffer."""

    class OneProduct(Layer):
        def __init__(self, problem: Problem) -> None:
            self.weight = (problem.x.new_ones(problem.shape.d, problem.shape.d) / problem.shape.d).requires_grad_()

        def parameters(self) -> list[Tensor]:
            return [self.weight]

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

        def canonical_gradients(self, gradients: object) -> dict[str, Tensor]:
            return {}

    problem = common.problem_of(NAME, MEDIUM)
    layer = OneProduct(problem)
    common.run(layer, problem)
    order: list[str] = []
    windowed = WindowedCalls("one", layer, [problem], evict, order)

    def calls() -> None:
        for index in range(4):
            windowed(index)

    found = kernels_in_windows(profile(calls), order)
    for index in range(1, 4):
        names = [kernel.name for kernel in found[f"one:forward:{index}"]]
        # A product may be split along its contraction, and then has a fill or a sum of its own.
        assert 1 <= len(names) <= 3, names
        assert not any("at::native::reduce_kernel" in name for name in names), names


def test_lost_markers_are_noticed(built: tuple[Layer, list[Problem]], evict: L2Eviction) -> None:
    order: list[str] = []
    windowed = WindowedCalls("p", *built, evict, order)

    def call() -> None:
        windowed(0)

    events = profile(call)
    with pytest.raises(RuntimeError, match="the profiler recorded 4 of 6 window markers"):
        kernels_in_windows(events, [*order, "p:forward:1"])


def test_busy_time_is_positive_and_within_the_host_time(
    built: tuple[Layer, list[Problem]], evict: L2Eviction, windows: dict[str, list[KernelInterval]]
) -> None:
    busy = busy_samples(windows, "p")
    assert len(busy) == 8 and all(f > 0 and b > 0 for f, b in busy)
    host_calls = HostCalls(*built, evict)
    host = [host_calls(index) for index in range(12)][2:]
    for pass_ in (0, 1):
        median_busy, median_host = (statistics.median(s[pass_] for s in samples) for samples in (busy, host))
        assert median_busy <= 1.05 * median_host


def test_the_breakdown_adds_up(windows: dict[str, list[KernelInterval]]) -> None:
    role = default_registry().get(NAME).kernel_role
    both = breakdown(windows, "p", "forward_backward", role)
    apart = [row for pass_ in ("forward", "backward") for row in breakdown(windows, "p", pass_, role)]
    assert both and all(row["calls"] > 0 and row["us"] > 0 for row in both)
    assert sum(row["us"] for row in both) == pytest.approx(sum(row["us"] for row in apart), rel=1e-3)
    busy_us = 1e3 * statistics.mean(f + b for f, b in busy_samples(windows, "p"))
    assert sum(row["us"] for row in both) >= 0.99 * busy_us


def test_one_call_is_profiled_and_written_as_a_trace(tmp_path: Path) -> None:
    context, plugin = context_of(), default_registry().get(NAME)
    point, file = common.point_of(NAME, MEDIUM), tmp_path / "trace.json"
    found = one_call.profiled(point, "backward", plugin, context, str(file))
    assert found["busy_us"] > 0 and all(kernel["us"] > 0 for kernel in found["kernels"])
    assert any(kernel["role"] for kernel in found["kernels"])
    traced = [e["name"] for e in json.loads(file.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    assert len(traced) == pytest.approx(sum(kernel["calls"] for kernel in found["kernels"]), abs=2)
    built = one_call.warmed(point, "forward", plugin, context)
    one_call.call(built.layer, built.problems[0], "forward", one_call._switched_on("cuda"))


def bases(record: str = "measurement") -> dict[str, dict[str, Any]]:
    return {pass_: {"pass": pass_, "record": record} for pass_ in PASSES}


def context_of(**settings: Any) -> Context:
    return Context(announce=lambda name: None, settings=TimingSettings(**settings))


def test_a_layer_is_as_fast_as_itself() -> None:
    plugin, point = default_registry().get(NAME), common.point_of(NAME, HEADLINE)
    context = context_of(min_samples=30, max_samples=60, time_limit_s=5.0)
    rows = list(measure_ratio((point, point), PASSES, plugin, plugin, bases("ratio"), context))
    assert [row["pass"] for row in rows] == list(PASSES)
    for row in rows:
        assert row["status"] == "ok" and row["basis"] == "graph", row
        low, high = row["ci95"]
        assert 0.97 <= row["value"] <= 1.03, (row["pass"], row["value"], row["ci95"])
        assert low <= 1.03 and high >= 0.97, (row["pass"], row["value"], row["ci95"])


def test_heat_lasts_as_long_as_it_should(built: tuple[Layer, list[Problem]], evict: L2Eviction) -> None:
    host_calls = HostCalls(*built, evict)
    calls = []

    def call(index: int) -> Sample:
        calls.append(index)
        return host_calls(index)

    start = time.perf_counter()
    heat(call, 0.3)
    assert 0.3 <= time.perf_counter() - start < 3.0
    assert len(calls) > 3 and calls == list(range(len(calls)))


def test_sustained_mode_heats_before_each_kind_of_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    heated: list[float] = []
    real: Callable[[Callable[[int], Sample], float], None] = measure.heat

    def recorded(call: Callable[[int], Sample], seconds: float) -> None:
        heated.append(seconds)
        real(call, seconds)

    monkeypatch.setattr(measure, "heat", recorded)
    plugin, point = default_registry().get(NAME), common.point_of(NAME, MEDIUM)
    rows = list(measure_point(point, PASSES, plugin, bases(), context_of(mode="sustained", heat_s=0.25)))
    assert heated == [0.25, 0.25]
    assert [row["pass"] for row in rows] == list(PASSES)
    for row in rows:
        assert row["status"] in ("ok", "unstable"), row["reason"]
        assert row["latency_ms"]["mode"] == "sustained" and row["device_ms"]["basis"] == "graph"
    context = context_of(mode="sustained", heat_s=0.1)
    rows = list(measure_ratio((point, point), PASSES, plugin, plugin, bases("ratio"), context))
    assert len(rows) == 3 and heated[2:] == [0.1]
    rows = list(measure_ratio((point, point), PASSES, plugin, plugin, bases("ratio"), context, allow_graph=False))
    assert [row["basis"] for row in rows] == ["busy"] * 3 and heated[3:] == [0.1]


def test_a_layer_is_as_fast_as_itself_by_busy_times() -> None:
    plugin, point = default_registry().get(NAME), common.point_of(NAME, HEADLINE)
    context = context_of(min_samples=30)
    rows = list(
        measure_ratio((point, point), PASSES, plugin, plugin, bases("ratio"), context, time_kind="busy"),
    )
    assert [row["pass"] for row in rows] == list(PASSES)
    for row in rows:
        assert (row["status"], row["time_kind"], row["basis"], row["samples"]) == ("ok", "busy", "busy", 29), row
        assert 0.97 <= row["value"] <= 1.03, (row["pass"], row["value"], row["ci95"])


@pytest.mark.parametrize("allow_graph", [True, False])
def test_paced_mode_rests_before_each_kind_of_sample(allow_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", slept.append)
    plugin, point = default_registry().get(NAME), common.point_of(NAME, MEDIUM)
    paced = {"mode": "paced", "min_samples": 12, "max_samples": 12}
    rows = list(measure_point(point, PASSES, plugin, bases(), context_of(**paced), allow_graph=allow_graph))
    assert {row["latency_ms"]["mode"] for row in rows} == {"paced"}
    assert slept.count(timing.FIRST_REST_S) >= 2 + allow_graph and len(slept) >= 12 * (1 + allow_graph) + 9
    slept.clear()
    rows = list(measure_ratio((point, point), PASSES, plugin, plugin, bases("ratio"), context_of(**paced), allow_graph))
    assert {row["basis"] for row in rows} == {"graph" if allow_graph else "busy"}
    assert slept.count(timing.FIRST_REST_S) == 2 and len(slept) >= 2 * 12


GREEDY = '''
"""It wants ten tebibytes at one size, before or within its forward, and is right at every other."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.interface import Layer, Problem
from implementations.torch_loop import TorchLoop


def take(device: torch.device) -> Tensor:
    return torch.empty(10 * 2**40, dtype=torch.uint8, device=device)


class Greedy(TorchLoop):
    name, label = "greedy", "Greedy"

    def build(self, problem: Problem) -> Layer:
        if problem.shape.T == 512:
            take(problem.x.device)
        layer = super().build(problem)
        if problem.shape.T == 384:
            layer.forward = lambda x: take(x.device)
        return layer
'''


def test_a_layer_out_of_memory_is_a_row_and_the_next_point_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "greedy.py").write_text(GREEDY)
    monkeypatch.setenv("MOEBENCH_PLUGINS", str(folder))
    registry = load_registry()
    assert "greedy" in registry, registry.broken_reason("greedy")
    dtype = "bfloat16" if common.DEVICE == "cuda" else "float32"
    works = [
        Work("point", common.point_of("greedy", f"{tokens},64,32,4,2", dtype), PASSES) for tokens in (512, 384, 256)
    ]
    settings = TimingSettings(min_samples=6, max_samples=6, time_limit_s=0.5)
    output = tmp_path / "rows.jsonl"
    summary = Runner("greedy", works, registry, output, settings=settings, time_limit_s=300, resume=False).run()
    rows, problems = store.read(output)
    assert not problems and len(rows) == 9
    phases = {512: "build", 384: "correctness"}
    for row in rows:
        tokens = row["shape"]["T"]
        if tokens in phases:
            assert row["status"] == "out_of_memory", row["reason"]
            assert f"while in {phases[tokens]}" in row["reason"]
        else:
            assert row["status"] in ("ok", "unstable"), row["reason"]
            assert row["measured_on"] == common.DEVICE
    assert summary.statuses["out_of_memory"] == 6
