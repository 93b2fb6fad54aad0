"""One call of a point's layer under a profiler: torch's (``moebench profile``), or one that starts the process itself.

``python -m harness.one_call IMPLEMENTATION …`` builds the layer, checks and warms it, and makes one call between
cudaProfilerStart and cudaProfilerStop, so that a profiler which waits for that (``ncu --profile-from-start off``) sees
that call alone. On a CPU the call is made all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from harness.correctness import WrongResult
from harness.errors import refusals
from harness.interface import Implementation, Layer, Point, Problem
from harness.measure import Built, Context, build_and_check, profiled_windows, times_of_pass
from harness.profiling import breakdown, busy_samples
from harness.statistics import summarise
from harness.timing import input_of, leaves_of, run_backward

#: What an implementation's name does not tell.
OPTIONS = ("shape", "operation", "variant", "dtype", "device", "pass", "routing", "distribution")
#: Calls before the one that counts, and, on a CPU, calls whose mean counts.
WARM_CALLS, CPU_CALLS = 3, 3


def call(layer: Layer, problem: Problem, pass_: str, around: AbstractContextManager[Any]) -> None:
    """A forward, and a backward where the pass has one; what belongs to the pass runs inside ``around``."""
    x = input_of(problem)
    leaves = leaves_of(layer, x)
    with contextlib.ExitStack() as inside:
        if pass_ != "backward":
            inside.enter_context(around)
        output = layer.forward(x)
        if pass_ == "backward":
            inside.enter_context(around)
        if pass_ != "forward":
            run_backward(output, leaves, problem.grad_output)


def warmed(point: Point, pass_: str, implementation: Implementation, context: Context) -> Built:
    """The point's layer, built, checked and called a few times.

    Raises:
        WrongResult: it is not right, so that what it does is of no interest.
    """
    if point.device == "cuda":
        context.start_cuda()
    built = build_and_check(point, implementation, context)
    if built.correctness.reason:
        raise WrongResult(built.correctness.reason)
    context.phase("warm-up")
    for index in range(WARM_CALLS):
        call(built.layer, built.problems[index % len(built.problems)], pass_, contextlib.nullcontext())
    return built


def profiled(
    point: Point, pass_: str, implementation: Implementation, context: Context, timeline: str
) -> dict[str, Any]:
    """What one call of the pass consists of, mean over a few calls.

    Args:
        timeline: the file that a Chrome trace of one more call goes to; empty: none.

    Returns:
        ``kernels``: as in a row (`harness.profiling.breakdown`); on a CPU the operators with their own time, without
        roles, which are of kernels. ``busy_us``: on a GPU, how long any kernel runs in a call (median); else None.
    """
    built = warmed(point, pass_, implementation, context)
    context.phase("profile")
    found: dict[str, Any]
    if point.device == "cuda":
        windows = profiled_windows(built, context)
        samples = busy_samples(windows, "p")
        kernels = breakdown(windows, "p", pass_, implementation.kernel_role)
        found = {"kernels": kernels, "busy_us": 1e3 * summarise(times_of_pass(samples, pass_))["median"]}
    else:
        found = {"kernels": _operators(built, pass_), "busy_us": None}
    if timeline:
        context.phase("Chrome trace")
        profiler = _profiler(point.device)
        call(built.layer, built.problems[0], pass_, _within(profiler, point.device))
        profiler.export_chrome_trace(timeline)
    return found


def _profiler(device: str) -> torch.profiler.profile:
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    return torch.profiler.profile(activities=activities, acc_events=True)


@contextlib.contextmanager
def _within(profiler: AbstractContextManager[Any], device: str) -> Iterator[None]:
    """Inside the profiler, from an idle GPU to an idle GPU."""
    if device == "cuda":
        torch.cuda.synchronize()
    with profiler:
        yield
        if device == "cuda":
            torch.cuda.synchronize()


def _operators(built: Built, pass_: str) -> list[dict[str, Any]]:
    """Operators of one call on a CPU: name, calls, microseconds of their own (without what they call), mean."""
    totals: dict[str, list[float]] = {}
    for index in range(CPU_CALLS):
        profiler = _profiler("cpu")
        call(built.layer, built.problems[index % len(built.problems)], pass_, profiler)
        for event in profiler.key_averages():
            entry = totals.setdefault(event.key, [0.0, 0.0])
            entry[0] += event.count
            entry[1] += event.self_cpu_time_total
    rows = [
        {"name": name[:200], "calls": round(count / CPU_CALLS, 3), "us": round(us / CPU_CALLS, 3), "role": None}
        for name, (count, us) in totals.items()
    ]
    return sorted(rows, key=lambda row: -float(row["us"]))


@contextlib.contextmanager
def _switched_on(device: str) -> Iterator[None]:
    """Between cudaProfilerStart and cudaProfilerStop; nothing on a CPU."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> None:
    """The entry for a profiler: options as those of ``moebench profile``; exit code 2 for bad input, 3 where the layer
    cannot run here or is not right."""
    # The parent's side, which a worker does without.
    from harness.profile import asked_point, refused
    from harness.registry import load_registry

    parser = argparse.ArgumentParser(prog="python -m harness.one_call", description="One call of a layer's pass.")
    parser.add_argument("implementation")
    for option in OPTIONS:
        parser.add_argument(f"--{option}", default="")
    given = vars(parser.parse_args())
    with refusals("one_call"):
        registry = load_registry()
        point, pass_ = asked_point(registry, pass_=given.pop("pass"), **given)
        implementation = registry.get(point.implementation)
        reason = refused(implementation, point)
        context = Context(announce=lambda name: None)
        built = None
        if not reason:
            try:
                built = warmed(point, pass_, implementation, context)
            except WrongResult as error:
                reason = "wrong_result", str(error)
    if built is None:
        print(": ".join(reason or ()), file=sys.stderr)
        sys.exit(3)
    call(built.layer, built.problems[0], pass_, _switched_on(point.device))
    print(f"called once: {point.implementation}, {pass_}, {point.shape}, {point.dtype}, {point.device}")


if __name__ == "__main__":
    main()
