"""Host time and device time of a layer's forward and backward.

Three times, always named. *Host*: events around a call that the host launches onto an idle GPU. *Device*: the GPU's
own time, from replaying a CUDA graph of the same call. *Busy*: the union of the kernels' busy intervals from the
profiler, the device time of calls that cannot be captured. Before every call the L2 cache is evicted by reading a
buffer larger than it (writing would leave dirty lines whose write-back falls into the sample); between forward and
backward too, since training does not find those operands in the cache.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from harness.environment import GpuMonitor, is_slowdown
from harness.interface import Layer, Problem
from harness.statistics import median_interval, relative_width

#: One sample: milliseconds of the forward and of the backward (0 where there is none).
Sample = tuple[float, float]


@dataclass(frozen=True)
class TimingSettings:
    """How long to sample.

    Attributes:
        mode: ``burst`` (the card has rested while the point was checked; samples follow each other), ``sustained``
            (the layer runs without pause for ``heat_s`` before, too) or ``paced`` (the card rests before each sample,
            see `paced`).
        target_width: stop when the 95 % interval of the median is this narrow, relative to the median.
        time_limit_s: stop after this long, having taken at least ``min_samples``.
        pace_below_s: in the mode ``paced`` a sample that takes this long or longer is followed by no rest; None: all
            are. It is about a layer that meets the power cap within a single sample whatever came before.
    """

    mode: str = "burst"
    min_samples: int = 10
    max_samples: int = 50
    target_width: float = 0.01
    time_limit_s: float = 1.0
    heat_s: float = 2.0
    pace_below_s: float | None = None


@dataclass
class Samples:
    """Samples of one kind of time and what ended the sampling."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    stop_criterion: str = ""
    dropped: int = 0
    dropped_reason: str = ""
    #: Samples under a slowdown are among those kept, since none came without.
    slowed: bool = False
    #: Samples of earlier attempts, dropped because the SM clock was still settling.
    settling: int = 0
    #: What the monitor saw after each sample.
    states: list[dict[str, Any]] = field(default_factory=list)

    def of(self, pass_: str) -> list[float]:
        if pass_ == "forward":
            return self.forward
        if pass_ == "backward":
            return self.backward
        return [f + b for f, b in zip(self.forward, self.backward, strict=True)]


class L2Eviction:
    """Evicts the L2 cache by reading a buffer several times its size."""

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._buffer = torch.randn(4 * l2 // 4, device="cuda")
        self._sink = torch.empty((), device="cuda")

    def __call__(self) -> None:
        torch.sum(self._buffer, dim=0, out=self._sink)


def sample_until(take: Callable[[int], Sample], settings: TimingSettings, monitor: GpuMonitor | None) -> Samples:
    """Take samples until both passes' medians are known well enough, or a cap ends it.

    Samples under the power cap stay: it is the operating point. A sample during which the card reports a thermal or
    a hardware slowdown is dropped and counted; where the time is up and too few are left, they are kept and said to be
    slowed.
    """
    samples = Samples()
    take = paced(take, settings)
    start = time.perf_counter()
    taken = 0
    while True:
        forward, backward = take(taken)
        taken += 1
        state = monitor.sample() if monitor is not None else {}
        samples.states.append(state)
        late = time.perf_counter() - start > settings.time_limit_s or taken >= 4 * settings.max_samples
        if is_slowdown(state) and not late:
            samples.dropped += 1
            samples.dropped_reason = ", ".join(state["throttle_reasons"])
        else:
            samples.slowed = samples.slowed or is_slowdown(state)
            samples.forward.append(forward)
            samples.backward.append(backward)
        kept = len(samples.forward)
        if kept >= settings.max_samples:
            samples.stop_criterion = "max_samples"
            break
        if kept >= settings.min_samples:
            widths = [relative_width(s) for s in (samples.forward, samples.of("forward_backward"))]
            if max(widths) <= settings.target_width:
                samples.stop_criterion = "interval_width"
                break
        if late and kept >= settings.min_samples:
            samples.stop_criterion = "time_limit"
            break
    return samples


def sample_steadily(
    take: Callable[[int], Sample], settings: TimingSettings, monitor: GpuMonitor | None, attempts: int = 3
) -> Samples:
    """`sample_until`, again where the card's clock was still settling: the samples of such a run are dropped and
    counted. The last attempt stands, and where its clock drifts too the row will say `unstable`."""
    settling = 0
    samples = sample_until(take, settings, monitor)
    for _ in range(attempts - 1):
        if abs(clock_drift(samples.states)) <= CLOCK_BAND:
            break
        settling += len(samples.forward)
        samples = sample_until(take, settings, monitor)
    samples.settling = settling
    return samples


#: How long the card rests before a paced sample, as a multiple of what the last one took, and before the first, in
#: seconds. At a quarter of its load no layer reaches the power cap on average, so that a sample should find the highest
#: clock.
REST, FIRST_REST_S = 3.0, 0.2


def paced(
    take: Callable[[int], Sample],
    settings: TimingSettings,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], None] | None = None,
) -> Callable[[int], Sample]:
    """``take``; in the mode ``paced`` with a rest before every call.

    Without rests a short layer heats the card until, at some moment of the run, the power cap takes a fifth of its
    clock: the median then says how early that was. A ratio over another layer does not cancel it, since what waits for
    memory does not follow the SM clock."""
    if settings.mode != "paced":
        return take
    clock, sleep = clock or time.perf_counter, sleep or time.sleep
    rest_s = FIRST_REST_S

    def rested(index: int) -> Sample:
        nonlocal rest_s
        sleep(rest_s)
        start = clock()
        sample = take(index)
        took_s = clock() - start
        rest_s = REST * took_s if settings.pace_below_s is None or took_s < settings.pace_below_s else 0.0
        return sample

    return rested


def leaves_of(layer: Layer, x: Tensor) -> list[Tensor]:
    return [x, *layer.parameters()]


def input_of(problem: Problem) -> Tensor:
    """The problem's x as a leaf of its own; without gradients where there is no backward."""
    return problem.x.detach().requires_grad_(not problem.forward_only)


def run_backward(output: Tensor, leaves: Sequence[Tensor], grad_output: Tensor) -> None:
    torch.autograd.grad(output, leaves, grad_output, allow_unused=True)


class HostCalls:
    """Host-launched calls: each sample runs a fresh forward and one backward, with events around each."""

    def __init__(self, layer: Layer, problems: Sequence[Problem], evict: L2Eviction) -> None:
        self._layer = layer
        self._problems = problems
        self._evict = evict
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]

    def __call__(self, index: int) -> Sample:
        problem = self._problems[index % len(self._problems)]
        x = input_of(problem)
        leaves = leaves_of(self._layer, x)
        e = self._events
        self._evict()
        torch.cuda.synchronize()
        e[0].record()
        output = self._layer.forward(x)
        e[1].record()
        if problem.forward_only:
            torch.cuda.synchronize()
            return e[0].elapsed_time(e[1]), 0.0
        self._evict()
        torch.cuda.synchronize()
        e[2].record()
        run_backward(output, leaves, problem.grad_output)
        e[3].record()
        torch.cuda.synchronize()
        return e[0].elapsed_time(e[1]), e[2].elapsed_time(e[3])


class CpuCalls:
    """Wall-clock samples on a CPU."""

    def __init__(self, layer: Layer, problems: Sequence[Problem]) -> None:
        self._layer = layer
        self._problems = problems

    def __call__(self, index: int) -> Sample:
        problem = self._problems[index % len(self._problems)]
        x = input_of(problem)
        leaves = leaves_of(self._layer, x)
        t0 = time.perf_counter()
        output = self._layer.forward(x)
        t1 = time.perf_counter()
        if problem.forward_only:
            return (t1 - t0) * 1e3, 0.0
        run_backward(output, leaves, problem.grad_output)
        return (t1 - t0) * 1e3, (time.perf_counter() - t1) * 1e3


class GraphCapturedError(RuntimeError):
    """A CUDA-graph capture failed; the process must not time anything more."""


class GraphCalls:
    """Replays of two CUDA graphs, one of the forward and one of the backward, over one memory pool.

    The backward's graph follows the forward's replay, so that a backward which overwrites what the forward saved is
    right too. Inputs rotate by copying another set into the captured tensors before the eviction.
    """

    def __init__(self, layer: Layer, problems: Sequence[Problem], evict: L2Eviction) -> None:
        self._problems = problems
        self._evict = evict
        self._x = problems[0].x.detach().clone().requires_grad_(not problems[0].forward_only)
        self._forward_only = problems[0].forward_only
        self._gradients: Sequence[Tensor | None] = ()
        self._grad_output = problems[0].grad_output.clone()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        leaves = leaves_of(layer, self._x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    output = layer.forward(self._x)
                    if not self._forward_only:
                        run_backward(output, leaves, self._grad_output)
            torch.cuda.synchronize()
            self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(self.forward_graph, pool=pool, stream=stream):
                output = layer.forward(self._x)
            if not self._forward_only:
                with torch.cuda.graph(self.backward_graph, pool=pool, stream=stream):
                    self._gradients = torch.autograd.grad(output, leaves, self._grad_output, allow_unused=True)
            self._output = output if self._forward_only else output.detach()
            for _ in range(2):
                self.forward_graph.replay()
                if not self._forward_only:
                    self.backward_graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            raise GraphCapturedError(f"{type(error).__name__}: {error}".splitlines()[0]) from error

    def outputs(self) -> tuple[Any, Sequence[Tensor | None]]:
        """The captured output and gradients (x first; none without a backward), as of the last replay."""
        return self._output, self._gradients

    def load(self, index: int) -> None:
        """Copy an input set into the captured tensors."""
        problem = self._problems[index % len(self._problems)]
        with torch.no_grad():
            self._x.copy_(problem.x)
        self._grad_output.copy_(problem.grad_output)

    def __call__(self, index: int) -> Sample:
        e = self._events
        self.load(index)
        # No synchronisation between eviction and replay: the launch hides behind the eviction's own time.
        self._evict()
        e[0].record()
        self.forward_graph.replay()
        e[1].record()
        if self._forward_only:
            torch.cuda.synchronize()
            return e[0].elapsed_time(e[1]), 0.0
        self._evict()
        e[2].record()
        self.backward_graph.replay()
        e[3].record()
        torch.cuda.synchronize()
        return e[0].elapsed_time(e[1]), e[2].elapsed_time(e[3])


def heat(call: Callable[[int], Sample], seconds: float) -> None:
    """Run without pause, so that the card reaches the clock that its power allows."""
    end = time.perf_counter() + seconds
    index = 0
    while time.perf_counter() < end:
        call(index)
        index += 1


def clock_drift(states: Sequence[dict[str, Any]]) -> float:
    """Relative change of the SM clock's median between the first and the second half of the samples."""
    clocks_mhz = [float(state["sm_clock_mhz"]) for state in states if state.get("sm_clock_mhz")]
    if len(clocks_mhz) < 8:
        return 0.0
    half = len(clocks_mhz) // 2
    first, second = (sorted(part)[len(part) // 2] for part in (clocks_mhz[:half], clocks_mhz[half:]))
    return second / first - 1.0


def clock_fields(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """SM clock (MHz) and power (W) seen after the samples (least, median, largest), and the throttle reasons."""
    fields: dict[str, Any] = {}
    for key in ("sm_clock_mhz", "power_w"):
        values = sorted(float(state[key]) for state in states if state.get(key) is not None)
        if values:
            fields[key] = {"min": values[0], "median": values[len(values) // 2], "max": values[-1]}
    fields["throttle_reasons"] = sorted({r for state in states for r in state.get("throttle_reasons") or ()})
    return fields


#: The band outside which a run is ``unstable``: how far the clock's median may move between the halves of a run.
CLOCK_BAND = 0.10


def pair_order(count: int, seed: int = 0) -> list[int]:
    """For ``count`` pairs, which of the two (0 or 1) goes first, at random."""
    order = random.Random(seed)
    return [int(order.random() < 0.5) for _ in range(count)]


def interleaved(
    first: Callable[[int], Sample],
    second: Callable[[int], Sample],
    settings: TimingSettings,
    seed: int = 0,
    observe: Callable[[], None] = lambda: None,
) -> list[tuple[Sample, Sample]]:
    """Pairs of samples of two layers, called in random order within each pair, on the same input set; ``observe`` is
    called after each pair."""
    first, second = paced(first, settings), paced(second, settings)
    order = pair_order(settings.max_samples, seed)
    pairs: list[tuple[Sample, Sample]] = []
    start = time.perf_counter()
    while len(pairs) < settings.max_samples:
        index = len(pairs)
        if order[index] == 0:
            a = first(index)
            pairs.append((a, second(index)))
        else:
            b = second(index)
            pairs.append((first(index), b))
        observe()
        if len(pairs) >= settings.min_samples:
            ratios = [(a[0] + a[1]) / (b[0] + b[1]) for a, b in pairs]
            low, high = median_interval(ratios)
            narrow = high - low <= settings.target_width * (high + low) / 2
            if narrow or time.perf_counter() - start > settings.time_limit_s:
                break
    return pairs
