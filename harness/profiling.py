"""The kernels of a call, from the profiler: busy time (union of their intervals) and the breakdown by kernel."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.interface import Layer, Problem
from harness.timing import L2Eviction, Sample, _backward, _leaves

_WINDOW = "moebench:"


@dataclass(frozen=True)
class KernelInterval:
    """One kernel, copy or fill on the GPU; nanoseconds on the profiler's clock."""

    name: str
    start: int
    end: int


def union_ns(intervals: Sequence[KernelInterval]) -> int:
    """Length of the union of intervals: overlapping kernels count once."""
    total, reached = 0, -1
    for interval in sorted(intervals, key=lambda i: i.start):
        if interval.end > reached:
            total += interval.end - max(interval.start, reached)
            reached = interval.end
    return total


def kernels_in_windows(events: Sequence[Any]) -> dict[str, list[KernelInterval]]:
    """The kernels that ran in each window (a ``record_function`` range around call and synchronisation).

    Every window synchronises before it ends and the windows do not overlap, so time alone tells where a kernel
    belongs; kernels outside every window (evictions) fall away.
    """
    windows: list[tuple[int, int, str]] = []
    kernels: list[KernelInterval] = []
    for event in events:
        name = event.name()
        on_gpu = event.device_type() == torch.autograd.DeviceType.CUDA
        start, end = event.start_ns(), event.start_ns() + event.duration_ns()
        if name.startswith(_WINDOW):
            # The profiler mirrors each range onto the GPU's timeline; only the host's own range counts.
            if not on_gpu:
                windows.append((start, end, name[len(_WINDOW) :]))
        elif on_gpu and not name.startswith(("ProfilerStep", "## Call CompiledFxGraph", "Torch-Compiled Region")):
            kernels.append(KernelInterval(name, start, end))
    windows.sort()
    starts = [w[0] for w in windows]
    found: dict[str, list[KernelInterval]] = {w[2]: [] for w in windows}
    for kernel in kernels:
        place = bisect_right(starts, kernel.start) - 1
        if place >= 0 and kernel.start <= windows[place][1]:
            found[windows[place][2]].append(kernel)
    return found


def profile(run: Callable[[], None]) -> list[Any]:
    """Raw events of ``run`` under the profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=False) as profiler:
        run()
        torch.cuda.synchronize()
    results: Any = profiler.profiler
    return list(results.kineto_results.events())


class WindowedCalls:
    """Forward and backward of a layer, each in a window of its own, for use under `profile`."""

    def __init__(self, tag: str, layer: Layer, problems: Sequence[Problem], evict: L2Eviction) -> None:
        self.tag = tag
        self._layer = layer
        self._problems = problems
        self._evict = evict

    def __call__(self, index: int) -> Sample:
        problem = self._problems[index % len(self._problems)]
        x = problem.x.detach().requires_grad_()
        leaves = _leaves(self._layer, x)
        self._evict()
        torch.cuda.synchronize()
        with torch.profiler.record_function(f"{_WINDOW}{self.tag}:forward:{index}"):
            output = self._layer.forward(x)
            torch.cuda.synchronize()
        self._evict()
        torch.cuda.synchronize()
        with torch.profiler.record_function(f"{_WINDOW}{self.tag}:backward:{index}"):
            _backward(output, leaves, problem.grad_output)
            torch.cuda.synchronize()
        return 0.0, 0.0


def busy_samples(found: dict[str, list[KernelInterval]], tag: str) -> list[Sample]:
    """Busy milliseconds of each call of ``tag``: (forward, backward), in the order of the calls."""
    busy: dict[int, dict[str, float]] = defaultdict(dict)
    for window, kernels in found.items():
        name, pass_, index = window.rsplit(":", 2)
        if name == tag:
            busy[int(index)][pass_] = union_ns(kernels) / 1e6
    return [(b["forward"], b["backward"]) for _, b in sorted(busy.items()) if {"forward", "backward"} <= b.keys()]


def breakdown(
    found: dict[str, list[KernelInterval]], tag: str, pass_: str, role: Callable[[str], str | None]
) -> list[dict[str, Any]]:
    """Every kernel of one call: name, launches a call, microseconds a call (mean over the calls), role.

    With programmatic dependent launch a kernel that waits for its predecessor counts its waiting too: the sum may
    exceed the busy time and serves the breakdown only.
    """
    passes = ("forward", "backward") if pass_ == "forward_backward" else (pass_,)
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    indices = set()
    for window, kernels in found.items():
        name, window_pass, index = window.rsplit(":", 2)
        if name != tag or window_pass not in passes:
            continue
        indices.add(index)
        for kernel in kernels:
            totals[kernel.name][0] += 1
            totals[kernel.name][1] += (kernel.end - kernel.start) / 1e3
    calls = max(len(indices), 1)
    rows = [
        {"name": name[:200], "calls": round(count / calls, 3), "us": round(us / calls, 3), "role": role(name)}
        for name, (count, us) in totals.items()
    ]
    return sorted(rows, key=lambda row: -float(row["us"]))
