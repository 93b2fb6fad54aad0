"""Busy time and breakdown from fabricated profiler events; when sampling stops, from fabricated samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import RightLayer, point_of, problem_of

from harness import measure, timing
from harness.correctness import forward_backward
from harness.interface import Layer, Problem
from harness.measure import Built, Context, _graph_samples, _instability, _named
from harness.operations import MoELayer
from harness.profiling import (
    KernelInterval,
    breakdown,
    busy_samples,
    communication_shares,
    kernels_in_windows,
    union_ns,
)
from harness.record import MODES
from harness.registry import default_registry
from harness.statistics import ratio_interval
from harness.timing import (
    FIRST_REST_S,
    REST,
    CpuCalls,
    Sample,
    Samples,
    TimingSettings,
    clock_drift,
    clock_fields,
    interleaved,
    paced,
    pair_order,
    sample_until,
)

GPU, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


@dataclass
class Event:
    """What the profiler's raw events offer."""

    label: str
    start: int
    duration: int
    device: Any = GPU

    def name(self) -> str:
        return self.label

    def device_type(self) -> Any:
        return self.device

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration


def markers(start: int, end: int) -> list[Event]:
    """The two kernels around a window that lies between ``start`` and ``end``."""
    return [Event("spin_kernel(long)", start - 10, 10), Event("spin_kernel(long)", end, 10)]


def spans(*pairs: tuple[int, int]) -> list[KernelInterval]:
    return [KernelInterval("k", start, end) for start, end in pairs]


@pytest.mark.parametrize(
    ("intervals", "length"),
    [
        ((), 0),
        (((10, 20),), 10),
        (((10, 20), (30, 45)), 25),
        (((10, 20), (20, 30)), 20),
        (((10, 30), (20, 40)), 30),
        (((10, 100), (20, 30), (40, 50)), 90),
        (((20, 30), (10, 100), (90, 110)), 100),
        (((0, 5), (0, 5)), 5),
        (((10, 10),), 0),
    ],
)
def test_union(intervals: tuple[tuple[int, int], ...], length: int) -> None:
    assert union_ns(spans(*intervals)) == length


GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_ReduceScatter"


@pytest.mark.parametrize(
    ("kernels", "shares"),
    [
        ((), None),
        (((GATHER, 5, 5),), None),  # no time
        ((("gemm", 0, 100),), (0, 0)),
        (((GATHER, 0, 100),), (1, 1)),
        (((GATHER, 0, 50), ("gemm", 50, 100)), (0.5, 0.5)),
        (((GATHER, 20, 60), ("gemm", 0, 100)), (0.4, 0)),  # hidden
        (((GATHER, 0, 60), ("gemm", 40, 100)), (0.6, 0.4)),
        # Two on streams of their own, over each other and over two kernels that follow one another with a gap.
        (((GATHER, 0, 40), (SCATTER, 30, 70), ("gemm", 10, 35), ("norm", 45, 100)), (0.7, 0.2)),
        # Neither idleness nor copies and fills, by which FSDP-2 casts too, are exposed communication.
        (((GATHER, 0, 50), ("Memcpy DtoD (Device -> Device)", 0, 20), ("Memset (Device)", 20, 30)), (1, 0.4)),
        (((GATHER, 0, 20), ("gemm", 60, 100)), (0.2, 0.2)),
        ((("gemm", 1000, 1100), (GATHER, 1050, 1200)), (0.75, 0.5)),  # in any order, from any moment
    ],
)
def test_shares_of_communication(kernels: tuple[tuple[str, int, int], ...], shares: tuple[float, float] | None) -> None:
    found = communication_shares([KernelInterval(*kernel) for kernel in kernels])
    assert found == (None if shares is None else pytest.approx(shares))


def test_kernels_belong_to_the_window_in_which_they_start() -> None:
    events = [
        Event("after", 4100, 20),
        *markers(3000, 4000),
        *markers(1000, 2000),
        Event("gemm", 1200, 300),
        Event("gemm", 1400, 300),
        Event("evict", 2300, 400),
        Event("before", 10, 20),
        Event("memset", 3200, 50),
        Event("first", 3000, 10),
        # The host's side, were it recorded too, counts for nothing.
        Event("aten::mm", 1150, 500, CPU),
        Event("spin_kernel", 1150, 500, CPU),
    ]
    found = kernels_in_windows(events, ["p:forward:0", "p:backward:0"])
    assert {name: [(k.name, k.start) for k in kernels] for name, kernels in found.items()} == {
        "p:forward:0": [("gemm", 1200), ("gemm", 1400)],
        "p:backward:0": [("memset", 3200), ("first", 3000)],
    }
    # The two GEMMs overlap (programmatic dependent launch): 500 ns busy, 600 ns of kernels.
    assert busy_samples(found, "p") == [(500e-6, 60e-6)]
    assert breakdown(found, "p", "forward", lambda name: name.upper()) == [
        {"name": "gemm", "calls": 2.0, "us": 0.6, "role": "GEMM"}
    ]
    both = breakdown(found, "p", "forward_backward", lambda name: None)
    assert [row["name"] for row in both] == ["gemm", "memset", "first"]
    assert sum(row["us"] for row in both) == pytest.approx(0.66)


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_lost_markers_are_an_error(lost: int) -> None:
    events = [*markers(1000, 2000), Event("gemm", 1200, 300), *markers(3000, 4000)]
    assert kernels_in_windows(events, ["p:forward:0", "p:backward:0"])
    marked = [event for event in events if "spin" in event.label]
    del events[events.index(marked[lost])]
    with pytest.raises(RuntimeError, match="3 of 4 window markers"):
        kernels_in_windows(events, ["p:forward:0", "p:backward:0"])


def test_breakdown_is_the_mean_over_calls_and_sums_to_all_kernel_time() -> None:
    events, order = [], []
    for index in range(4):
        start = 10_000 * index
        order += [f"p:forward:{index}", f"other:forward:{index}"]
        events += markers(start + 50, start + 5000)
        events += [Event("up", start + 100, 1000 + 100 * index), Event("down", start + 2000, 500)]
        events += [*markers(start + 6000, start + 9000), Event("foreign", start + 6100, 700)]
    found = kernels_in_windows(events, order)
    rows = breakdown(found, "p", "forward", lambda name: None)
    assert [(row["name"], row["calls"], row["us"]) for row in rows] == [("up", 1.0, 1.15), ("down", 1.0, 0.5)]
    # A kernel by itself has no backward.
    assert busy_samples(found, "p") == [(0.0015, 0.0), (0.0016, 0.0), (0.0017, 0.0), (0.0018, 0.0)]
    assert breakdown({}, "p", "forward", lambda name: None) == []


def test_busy_samples_come_in_the_order_of_the_calls() -> None:
    found = {
        f"p:{pass_}:{index}": spans((0, 1000 * (index + 3)))
        for index in (10, 9, -1)
        for pass_ in ("forward", "backward")
    }
    assert busy_samples(found, "p") == [(2e-3, 2e-3), (12e-3, 12e-3), (13e-3, 13e-3)]


# Sampling.


class Monitor:
    """Says what it is told, sample by sample."""

    def __init__(self, state: Callable[[int], dict[str, Any]]) -> None:
        self.state, self.count = state, 0

    def sample(self) -> dict[str, Any]:
        self.count += 1
        return self.state(self.count - 1)


def settings(**given: Any) -> TimingSettings:
    return TimingSettings(**{"min_samples": 6, "max_samples": 40, "target_width": 0.01, "time_limit_s": 60.0, **given})


def test_steady_samples_stop_at_the_interval() -> None:
    samples = sample_until(lambda index: (1.0, 2.0), settings(), None)
    assert samples.stop_criterion == "interval_width"
    assert len(samples.forward) == 6 and samples.dropped == 0
    assert samples.of("backward") == [2.0] * 6 and samples.of("forward_backward") == [3.0] * 6


def test_noisy_samples_stop_at_the_most() -> None:
    samples = sample_until(lambda index: (1.0 + index % 7, 2.0), settings(), None)
    assert samples.stop_criterion == "max_samples" and len(samples.forward) == 40


def test_a_noisy_backward_alone_keeps_sampling() -> None:
    assert len(sample_until(lambda index: (1.0, 1.0 + index % 7), settings(), None).forward) == 40


def test_the_time_limit_ends_it_after_the_least_number_of_samples() -> None:
    samples = sample_until(lambda index: (1.0 + index % 7, 2.0), settings(time_limit_s=0.0), None)
    assert samples.stop_criterion == "time_limit" and len(samples.forward) == 6


def test_samples_under_a_slowdown_are_dropped_and_those_under_the_power_cap_stay() -> None:
    def state(index: int) -> dict[str, Any]:
        reasons = {0: ["hw_thermal_slowdown"], 2: ["hw_thermal_slowdown", "sw_power_cap"], 3: ["sw_power_cap"]}
        return {"throttle_reasons": reasons.get(index, []), "sm_clock_mhz": 1500, "power_w": 600.0}

    monitor = Monitor(state)
    samples = sample_until(lambda index: (float(index + 100), 1.0), settings(max_samples=8, target_width=0.0), monitor)
    assert samples.dropped == 2 and "thermal" in samples.dropped_reason
    assert samples.forward == [float(i + 100) for i in (1, 3, 4, 5, 6, 7, 8, 9)]
    assert len(samples.states) == 10
    assert clock_fields(samples.states)["throttle_reasons"] == ["hw_thermal_slowdown", "sw_power_cap"]


def test_an_endless_slowdown_ends_too_with_samples() -> None:
    monitor = Monitor(lambda index: {"throttle_reasons": ["hw_thermal_slowdown"]})
    samples = sample_until(lambda index: (1.0 + index % 7, 1.0), settings(max_samples=10), monitor)
    assert samples.dropped >= 10 and len(samples.forward) >= 6 and samples.slowed


def test_an_endless_slowdown_ends_at_the_time_limit_with_samples() -> None:
    monitor = Monitor(lambda index: {"throttle_reasons": ["hw_thermal_slowdown"]})
    samples = sample_until(lambda index: (1.0 + index % 5, 1.0), settings(time_limit_s=0.0), monitor)
    assert len(samples.forward) == 6 and samples.slowed and samples.stop_criterion == "time_limit"
    assert "slowed" in _instability(0, [samples]) and not _instability(0, [Samples([1.0], [1.0])])


class Hourglass:
    """Time that passes where a call takes it or somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def take(self, index: int) -> Sample:
        self.now += 0.001 * (index + 1)
        return float(index), 1.0


def test_a_paced_call_rests_as_long_as_the_last_one_asks_for() -> None:
    glass = Hourglass()
    take = paced(glass.take, settings(mode="paced"), lambda: glass.now, glass.sleep)
    assert [take(index) for index in range(4)] == [(float(index), 1.0) for index in range(4)]
    assert glass.slept == pytest.approx([FIRST_REST_S, REST * 0.001, REST * 0.002, REST * 0.003])
    # Of calls of 1, 2, 3 ms those below the limit.
    glass.slept = []
    take = paced(glass.take, settings(mode="paced", pace_below_s=0.0025), lambda: glass.now, glass.sleep)
    assert len([take(index) for index in range(4)]) == 4
    assert glass.slept == pytest.approx([FIRST_REST_S, REST * 0.001, REST * 0.002, 0.0])
    for mode in ("burst", "sustained"):
        assert paced(glass.take, settings(mode=mode)) == glass.take


def test_samples_and_pairs_are_paced_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    glass = Hourglass()
    monkeypatch.setattr(timing.time, "sleep", glass.sleep)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: glass.now)
    for mode, rests in (("burst", 0), ("paced", 6)):
        glass.slept = []
        samples = sample_until(lambda index: glass.take(index)[::-1], settings(mode=mode, max_samples=6), None)
        assert len(samples.forward) == 6 and len(glass.slept) == rests
    interleaved(glass.take, glass.take, settings(mode="paced", max_samples=6))
    assert len(glass.slept) == 6 + 12


@pytest.mark.parametrize("mode", MODES)
def test_a_cpu_is_heated_before_sustained_samples_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heated: list[float] = []
    monkeypatch.setattr(measure, "heat", lambda call, seconds: heated.append(seconds))
    context = Context(lambda _: None, TimingSettings(mode, min_samples=2, max_samples=2, heat_s=0.5))
    point = point_of("8,8,8,2,1", name="torch_loop")
    bases = {"forward": {"record": "measurement", "pass": "forward", "mode": mode}}
    (row,) = measure.measure_point(point, ("forward",), default_registry().get("torch_loop"), bases, context)
    assert heated == [0.5] * (mode == "sustained")
    assert row["latency_ms"]["mode"] == mode and "mode" not in row


def test_clock_drift_and_fields() -> None:
    falling = [{"sm_clock_mhz": mhz} for mhz in [1900] * 10 + [1520] * 10]
    assert clock_drift(falling) == pytest.approx(-0.2)
    assert clock_drift(falling[::-1]) == pytest.approx(0.25)
    assert clock_drift([{"sm_clock_mhz": 1900}] * 7) == 0.0
    assert clock_drift([{}] * 20) == 0.0
    fields = clock_fields([{"sm_clock_mhz": mhz, "power_w": None} for mhz in (1500, 1800, 1600)])
    assert fields == {"sm_clock_mhz": {"min": 1500.0, "median": 1600.0, "max": 1800.0}, "throttle_reasons": []}


def test_pair_order_is_random_even_and_reproducible() -> None:
    order = pair_order(400, seed=1)
    assert order == pair_order(400, seed=1) != pair_order(400, seed=2)
    assert set(order) == {0, 1} and 150 < sum(order) < 250


class Clocked:
    """A card whose time per call drifts as it warms: every call, of whichever layer, takes longer than the last."""

    def __init__(self) -> None:
        self.now, self.order = 0, ""

    def call(self, name: str, factor: float) -> Callable[[int], Sample]:
        def take(index: int) -> Sample:
            self.now += 1
            self.order += name
            time = factor * (1.0 + 0.002 * self.now)
            return time, 2 * time

        return take


def test_a_against_a_is_one_however_the_clock_drifts() -> None:
    card = Clocked()
    pairs = interleaved(card.call("a", 1.0), card.call("b", 1.0), settings(max_samples=60, target_width=0.0))
    assert len(pairs) == 60
    assert all(sorted(card.order[i : i + 2]) == ["a", "b"] for i in range(0, 120, 2))
    assert {card.order[i : i + 2] for i in range(0, 120, 2)} == {"ab", "ba"}
    found = ratio_interval([(a[0], b[0]) for a, b in pairs])
    assert found["ci95"][0] <= 1.0 <= found["ci95"][1]
    assert found["value"] == pytest.approx(1.0, abs=0.003)


def test_interleaved_pairs_keep_their_sides() -> None:
    card = Clocked()
    pairs = interleaved(card.call("a", 2.0), card.call("b", 1.0), settings(max_samples=30))
    assert ratio_interval([(a[0] + a[1], b[0] + b[1]) for a, b in pairs])["value"] == pytest.approx(2.0, rel=0.01)
    assert len(interleaved(lambda i: (1.0, 1.0), lambda i: (1.0, 1.0), settings())) == 6
    slow = interleaved(lambda i: (1.0 + i % 5, 1.0), lambda i: (1.0, 1.0), settings(time_limit_s=0.0))
    assert len(slow) == 6


def test_cpu_calls_rotate_their_inputs() -> None:
    problems = [problem_of("8,16,8,4,2", seed=seed) for seed in range(2)]
    seen = []

    class Watching(RightLayer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.data_ptr())
            return super().forward(x)

    calls = CpuCalls(Watching(problems[0]), problems)
    times = [calls(index) for index in range(4)]
    assert seen == [problems[index % 2].x.data_ptr() for index in range(4)]
    assert all(forward > 0 and backward > 0 for forward, backward in times)


def test_samples_of_each_pass() -> None:
    samples = Samples([1.0, 2.0], [3.0, 4.0])
    assert [samples.of(p) for p in ("forward", "backward", "forward_backward")] == [[1.0, 2.0], [3.0, 4.0], [4.0, 6.0]]


def test_a_settling_clock_is_sampled_again() -> None:
    from harness.timing import CLOCK_BAND, clock_drift, sample_steadily

    class Settling:
        """A clock that falls during the first run and stays low afterwards."""

        def __init__(self) -> None:
            self.calls = 0

        def sample(self) -> dict[str, object]:
            self.calls += 1
            return {"sm_clock_mhz": 1980.0 if self.calls <= 10 else 1500.0, "power_w": 700.0, "throttle_reasons": []}

    settings = TimingSettings(min_samples=20, max_samples=20, target_width=0.0)
    samples = sample_steadily(lambda index: (1.0, 2.0), settings, Settling())  # type: ignore[arg-type]
    assert samples.settling == 20 and len(samples.forward) == 20
    assert abs(clock_drift(samples.states)) <= CLOCK_BAND

    class Drifting(Settling):
        """A clock that never settles."""

        def sample(self) -> dict[str, object]:
            return {**super().sample(), "sm_clock_mhz": 1980.0 if self.calls % 20 < 10 else 1500.0}

    samples = sample_steadily(lambda index: (1.0, 2.0), settings, Drifting())  # type: ignore[arg-type]
    assert samples.settling == 40 and abs(clock_drift(samples.states)) > CLOCK_BAND


# Replays.


@pytest.mark.parametrize(("last_right", "part"), [(100, ""), (8, "differ: grad_gate "), (0, "")])
def test_replays_are_compared_before_and_after_they_are_timed(
    monkeypatch: pytest.MonkeyPatch, last_right: int, part: str
) -> None:
    """One comparison is with an ordinary call, by output and gradient of x; the other with the checked one."""

    class Replays:
        """Stands in for graphs, of which a gradient is wrong after some replays, or the output from the first on."""

        def __init__(self, layer: Layer, problems: Sequence[Problem], evict: object) -> None:
            self.layer, self.problem, self.replayed = layer, problems[0], 0

        def __call__(self, index: int) -> Sample:
            self.replayed += 1
            return 1.0, 2.0

        def outputs(self) -> tuple[Any, Sequence[Any]]:
            output, (grad_x, grad_gate, *others) = forward_backward(
                self.layer, self.problem.x, self.problem.grad_output
            )
            if self.replayed > last_right:
                output, grad_gate = output * (1.0 if last_right else 1.1), grad_gate * 1.1
            return output, [grad_x, grad_gate, *others]

    monkeypatch.setattr(measure, "GraphCalls", Replays)
    problem = problem_of("16,16,8,4,2")
    layer = RightLayer(problem)
    implementation: Any = type("Plugin", (), {"no_graph_reason": None})()
    built = Built(layer, [problem], MoELayer().check(layer, problem), 0.0, 0, implementation)
    context = Context(lambda _: None, TimingSettings(min_samples=6, max_samples=6))
    context.evict = object()  # type: ignore[assignment]
    eager = _named(layer, *forward_backward(layer, problem.x, problem.grad_output))
    samples, no_graph, changed = _graph_samples(built, context, True, eager)
    if last_right == 0:
        assert samples is None and "gives another output" in no_graph and context.poisoned
    else:
        assert samples is not None and no_graph == "" and not context.poisoned
        assert part in changed and bool(part) == bool(changed)
