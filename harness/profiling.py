"""The kernels of a call, from the profiler: busy time (union of their intervals) and the breakdown by kernel."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from harness.interface import Layer, Problem
from harness.timing import L2Eviction, Sample, input_of, leaves_of, run_backward

#: Clock cycles that a marker spins: long enough to be a kernel, short enough not to matter.
_MARKER_CYCLES = 1000
#: The kernel behind `torch.cuda._sleep`, which no layer launches.
_MARKER = "spin_kernel"


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


def communication_shares(kernels: Sequence[KernelInterval]) -> tuple[float, float] | None:
    """Of the time from the first kernel's start to the last one's end, the share in which a communication kernel runs,
    and the share in which one runs and nothing else does (exposed). None without kernels.

    Communication kernels are NCCL's, known by their name; their waiting for another process counts. Everything else
    is not: copies and fills, and the kernels by which FSDP-2 casts and copies into and out of what is gathered, which a
    single process runs too.
    """
    if not kernels:
        return None
    span = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
    others = [kernel for kernel in kernels if "nccl" not in kernel.name.lower()]
    communicating = union_ns([kernel for kernel in kernels if "nccl" in kernel.name.lower()])
    # What the union of all has beyond that of the others is where communication runs alone.
    exposed = union_ns(kernels) - union_ns(others)
    return (communicating / span, exposed / span) if span else None


def kernels_in_windows(events: Sequence[Any], order: Sequence[str]) -> dict[str, list[KernelInterval]]:
    """The kernels that ran in each window.

    A window is what the GPU does between two marker kernels. Markers are told from everything else by their name, and
    one window from another by the order in which they were opened; kernels outside (evictions) fall away. So only the
    GPU's own records are needed, and the profiler need not follow the host, which would slow it down.

    Args:
        order: the windows' names in the order in which `WindowedCalls` opened them.

    Raises:
        RuntimeError: the profiler lost markers, so windows cannot be told apart.
    """
    markers: list[KernelInterval] = []
    kernels: list[KernelInterval] = []
    for event in events:
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        interval = KernelInterval(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        (markers if _MARKER in interval.name else kernels).append(interval)
    markers.sort(key=lambda m: m.start)
    if len(markers) != 2 * len(order):
        raise RuntimeError(f"the profiler recorded {len(markers)} of {2 * len(order)} window markers")
    windows = [(markers[2 * i].end, markers[2 * i + 1].start) for i in range(len(order))]
    starts = [window[0] for window in windows]
    found: dict[str, list[KernelInterval]] = {name: [] for name in order}
    for kernel in kernels:
        place = bisect_right(starts, kernel.start) - 1
        if place >= 0 and kernel.start < windows[place][1]:
            found[order[place]].append(kernel)
    return found


def profile(run: Callable[[], None]) -> list[Any]:
    """Raw events of ``run`` under the profiler, the GPU's side only."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CUDA], acc_events=False) as profiler:
        run()
        torch.cuda.synchronize()
    results: Any = profiler.profiler
    return list(results.kineto_results.events())


@contextmanager
def window(name: str, order: list[str]) -> Iterator[None]:
    """What runs inside, between two markers, under `profile`; ``order`` receives the name."""
    torch.cuda.synchronize()
    order.append(name)
    torch.cuda._sleep(_MARKER_CYCLES)
    yield
    # Kernels on other streams belong to the window too.
    torch.cuda.synchronize()
    torch.cuda._sleep(_MARKER_CYCLES)


class WindowedCalls:
    """Forward and backward of a layer, each in a window of its own, for use under `profile`.

    Args:
        tag: tells this layer's windows from another's; a window's name is ``tag:pass:index``.
        order: receives the name of every window as it is opened (shared where two layers alternate).
    """

    def __init__(
        self, tag: str, layer: Layer, problems: Sequence[Problem], evict: L2Eviction, order: list[str]
    ) -> None:
        self.tag = tag
        self._layer = layer
        self._problems = problems
        self._evict = evict
        self._order = order

    @contextmanager
    def _window(self, pass_: str, index: int) -> Iterator[None]:
        self._evict()
        with window(f"{self.tag}:{pass_}:{index}", self._order):
            yield

    def __call__(self, index: int) -> Sample:
        problem = self._problems[index % len(self._problems)]
        x = input_of(problem)
        leaves = leaves_of(self._layer, x)
        with self._window("forward", index):
            output = self._layer.forward(x)
        if problem.forward_only:
            return 0.0, 0.0
        with self._window("backward", index):
            run_backward(output, leaves, problem.grad_output)
        return 0.0, 0.0


def busy_samples(found: dict[str, list[KernelInterval]], tag: str) -> list[Sample]:
    """Busy milliseconds of each call of ``tag``: (forward, backward), in the order of the calls; 0 for a pass that was
    not called."""
    busy: dict[int, dict[str, float]] = defaultdict(dict)
    for window, kernels in found.items():
        name, pass_, index = window.rsplit(":", 2)
        if name == tag:
            busy[int(index)][pass_] = union_ns(kernels) / 1e6
    return [(b.get("forward", 0.0), b.get("backward", 0.0)) for _, b in sorted(busy.items())]


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
