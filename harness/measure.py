"""Measures one point, one ratio or one fake-tensor trace, inside a worker process; yields finished rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from harness.accounts import account
from harness.compilation import CompilationCounter
from harness.correctness import Correctness, Snapshot, canonical, forward_backward
from harness.costs import floors_ms
from harness.environment import GpuMonitor, environment
from harness.errors import printable
from harness.gpus import rates_of
from harness.interface import Implementation, Kernel, Layer, Point, Problem
from harness.memory import cuda_memory, leak_note, let_autograd_go, tracked_memory
from harness.operations import get_operation
from harness.points import row_fields
from harness.process_state import ProcessState
from harness.profiling import KernelInterval, WindowedCalls, breakdown, busy_samples, kernels_in_windows, profile
from harness.record import SCHEMA_VERSION, utc_now
from harness.reference import full_precision
from harness.routing import routing_outcome
from harness.statistics import interval_only, ratio_interval, summarise
from harness.timing import (
    CLOCK_BAND,
    CpuCalls,
    GraphCalls,
    GraphCapturedError,
    HostCalls,
    L2Eviction,
    Sample,
    Samples,
    TimingSettings,
    clock_drift,
    clock_fields,
    heat,
    input_of,
    interleaved,
    leaves_of,
    paced,
    pair_order,
    run_backward,
    sample_steadily,
    sample_until,
)
from harness.tuners import found_note, watch_found

Row = dict[str, Any]


@dataclass
class Context:
    """What outlives one job in a worker: the eviction buffer, the monitor, the settings.

    Attributes:
        announce: told the name of each phase as it begins, so that the parent can say where a worker died.
        poisoned: set once a graph capture has failed; the parent then starts a fresh process.
    """

    announce: Callable[[str], None]
    settings: TimingSettings = field(default_factory=TimingSettings)
    evict: L2Eviction | None = None
    monitor: GpuMonitor | None = None
    poisoned: bool = False
    overhead: dict[str, float] = field(default_factory=dict)
    #: Seconds of every phase of the current job, the harness's own and the others.
    phases: dict[str, float] = field(default_factory=dict)
    #: By pass, the times in ms whose median a row of the current job holds: ``device_ms``, on a CPU ``latency_ms``.
    samples: dict[str, list[float]] = field(default_factory=dict)
    _current: tuple[str, float] | None = None
    _state: ProcessState | None = None

    def phase(self, name: str) -> None:
        """Begin a phase; an empty name ends the last one."""
        now = time.perf_counter()
        if self._current is not None:
            last, since = self._current
            self.phases[last] = self.phases.get(last, 0.0) + now - since
        self._current = (name, now) if name else None
        if name:
            self.announce(name)

    def begin_job(self) -> None:
        """Forget the last job's accounts."""
        self.overhead, self.phases, self.samples, self._current = {}, {}, {}, None
        self._state = ProcessState.now()

    def changes(self) -> str:
        """A sentence that names what the job has changed for the whole process; empty where it has changed nothing."""
        return ProcessState.now().changes(self._state) if self._state is not None else ""

    @contextmanager
    def timed(self, name: str, phase: str = "") -> Iterator[None]:
        """Announce a phase and account its seconds under ``name``, which is the phase's too where none is given."""
        self.phase(phase or name)
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.overhead[name] = round(self.overhead.get(name, 0.0) + time.perf_counter() - start, 4)

    def start_cuda(self) -> None:
        """Create the CUDA context, the eviction buffer and the matrix library's workspaces (forward and autograd
        thread), so that none of them counts as a layer's memory."""
        if self.evict is not None:
            return
        watch_found()
        self.evict = L2Eviction()
        self.monitor = GpuMonitor()
        a = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        batched = a.expand(4, 256, 256)
        out = a @ a + torch.bmm(batched, batched).sum(0) + (a.float() @ a.float()).bfloat16()
        torch.autograd.grad(out, a, torch.ones_like(out))
        torch.cuda.synchronize()


def release() -> None:
    """Free what the last point left behind; cached blocks go back to the device only where they fill much of it, since
    allocating them again takes long."""
    gc.collect()
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        if free < total // 2:
            torch.cuda.empty_cache()


@dataclass
class Built:
    """A built and checked layer with its inputs (weights dropped), and what building and checking gave."""

    layer: Layer
    problems: list[Problem]
    correctness: Correctness
    build_s: float
    static: int
    implementation: Implementation


def build_and_check(point: Point, implementation: Implementation, context: Context, input_sets: int = 2) -> Built:
    """Problem, layer, correctness gate, static memory, further input sets; in that order."""
    operation = get_operation(point.operation)
    on_cuda = point.device == "cuda"
    release()
    before = 0
    if on_cuda:
        let_autograd_go()
        before = torch.cuda.memory_allocated()
    with context.timed("inputs"):
        problem = operation.make_problem(point, point.device)
        before_build = Snapshot(problem, copies=False)
    context.phase("build")
    start = time.perf_counter()
    layer = implementation.build(problem)
    if on_cuda:
        torch.cuda.synchronize()
    build_s = time.perf_counter() - start
    if not isinstance(layer, Layer):
        raise TypeError(f"build returned {type(layer).__name__}, expected a Layer")
    with context.timed("correctness"):
        changed = before_build.change(problem)
        del before_build
        if changed:
            correctness = Correctness(reason=f"{changed} while it was built")
        else:
            correctness = operation.check(layer, problem)
    with context.timed("inputs"), full_precision():
        problem = _without_weights(problem)
        release()
        static = 0
        if on_cuda:
            let_autograd_go()
            grad_bytes = problem.grad_output.untyped_storage().nbytes()
            static = torch.cuda.memory_allocated() - before - grad_bytes
        problems = [problem]
        for index in range(1, input_sets):
            problems.append(_without_weights(operation.make_problem(point, point.device, index)))
        release()
    return Built(layer, problems, correctness, build_s, static, implementation)


def check_point(point: Point, implementation: Implementation, context: Context) -> Correctness:
    """The correctness gate alone."""
    if point.device == "cuda":
        context.start_cuda()
    return build_and_check(point, implementation, context, input_sets=1).correctness


def build_and_call(point: Point, implementation: Implementation, context: Context) -> None:
    """Build the point's layer and call it, forward and, where it has one, backward. Nothing is judged."""
    on_cuda = point.device == "cuda"
    if on_cuda:
        context.start_cuda()
    release()
    with context.timed("inputs"):
        problem = get_operation(point.operation).make_problem(point, point.device)
    context.phase("build")
    layer = implementation.build(problem)
    context.phase("call")
    x = input_of(problem)
    output = layer.forward(x)
    if not problem.forward_only:
        run_backward(output, leaves_of(layer, x), problem.grad_output)
    if on_cuda:
        torch.cuda.synchronize()


def _without_weights(problem: Problem) -> Problem:
    empty = torch.empty(0, dtype=problem.x.dtype)
    return replace(problem, gate=empty, up=empty, down=empty, router=empty, operands={})


def _outcome(built: Built, point: Point) -> dict[str, int]:
    """What came of the point's routing, for its row."""
    assert built.correctness.counts is not None
    given = built.problems[0].routing
    dropped, added = built.correctness.moved if given is None else (given.dropped, given.added)
    return routing_outcome(built.correctness.counts, point.routing.m_tile) | {"dropped": dropped, "added": added}


def notes_of(layers: Sequence[Layer], *more: str) -> list[str]:
    """What the layers say of themselves, and the harness of them; each sentence once."""
    said = [[layer.notes] if isinstance(layer.notes, str) else layer.notes for layer in layers]
    return list(dict.fromkeys([*(printable(str(note)) for notes in said for note in notes), *filter(None, more)]))


def _call(built: Built) -> tuple[Any, Sequence[torch.Tensor | None]]:
    """What one call on the first input set returns: the output, and all gradients where there is a backward."""
    problem = built.problems[0]
    if problem.forward_only:
        return built.layer.forward(problem.x), ()
    return forward_backward(built.layer, problem.x, problem.grad_output)


def _change(built: Built, output: Any, gradients: Sequence[torch.Tensor | None]) -> str:
    """A sentence where a call on the first input set, after timing, differs from the one that was checked; else
    empty."""
    if built.correctness.fingerprint is None:
        return ""
    problem = built.problems[0]
    found = output if isinstance(built.layer, Kernel) else canonical(built.layer, problem.x, output, gradients)
    results = get_operation(problem.point.operation).repeatable(built.layer, found)
    difference = built.correctness.fingerprint.difference(results)
    if difference is None:
        return ""
    return f"right when it was checked, but after it was timed its results on the same data differ: {difference}"


def failure(base: Row, status: str, reason: str, **extra: Any) -> Row:
    """A row without numbers."""
    return {**base, "timestamp": utc_now(), "status": status, "reason": reason, **extra}


def measure_point(
    point: Point,
    passes: Sequence[str],
    implementation: Implementation,
    bases: dict[str, Row],
    context: Context,
    allow_graph: bool = True,
) -> Iterator[Row]:
    """Rows of every pass of one point.

    Args:
        bases: by pass, the fields of the row that the parent fixed (run id, sweep, resume key, implementation).
        allow_graph: False after a capture has killed a process at this point.
    """
    on_cuda = point.device == "cuda"
    packages = tuple(implementation.distributions)
    if on_cuda:
        context.start_cuda()
    measured_on = "cuda" if on_cuda else "cpu"
    with context.timed("environment"):
        machine = environment(measured_on, packages)
    built = build_and_check(point, implementation, context)
    operation = get_operation(point.operation)
    common: Row = {
        **row_fields(point),
        "environment": machine,
        "notes": notes_of([built.layer], context.changes(), found_note()),
        "measured_on": measured_on,
        "build_s": round(built.build_s, 3),
        "correctness": built.correctness.as_dict(point.dtype),
    }
    rows = point.shape.routed_rows
    padded = rows
    if sizes := operation.sizes(point):
        common["problem"] = sizes
    if built.correctness.counts is not None and operation.reports_routing:
        outcome = _outcome(built, point)
        common["routing"] = {**common["routing"], **outcome}
        rows, padded = outcome["routed_rows"], outcome["padded_rows"]
    if built.correctness.reason:
        for pass_ in passes:
            yield failure({**bases[pass_], **common}, "wrong_result", built.correctness.reason)
        return

    memory: dict[str, int] = {}
    leak = ""
    if operation.reports_memory:
        with context.timed("memory"):
            problem = built.problems[0]
            if on_cuda:
                forward_backward(built.layer, problem.x, problem.grad_output)
                memory = cuda_memory(built.layer, problem, built.static)
            else:
                memory = tracked_memory(built.layer, problem.x, problem.grad_output)
            leak = leak_note(memory)

    compilations = CompilationCounter()
    settings = context.settings
    host: Samples
    device: Samples | None = None
    busy: list[Sample] = []
    found: dict[str, list[KernelInterval]] = {}
    basis_reason = ""
    context.phase("host timing")
    if on_cuda:
        assert context.evict is not None
        host_calls = HostCalls(built.layer, built.problems, context.evict)
        for index in range(3):
            host_calls(index)
        compilations = CompilationCounter()
        if settings.mode == "sustained":
            heat(host_calls, settings.heat_s)
        host = sample_steadily(host_calls, settings, context.monitor)
        context.phase("profile")
        found = profiled_windows(built, context)
        busy = busy_samples(found, "p")
        compiled_while_timing = compilations.since_start()
        with context.timed("correctness", phase="check after timing"):
            output, gradients = _call(built)
            changed = _change(built, output, gradients)
            eager = _named(built.layer, output, gradients)
            del output, gradients
        if not changed:
            context.phase("graph")
            device, basis_reason, changed = _graph_samples(built, context, allow_graph, eager)
        del eager
    else:
        cpu_calls = CpuCalls(built.layer, built.problems)
        cpu_calls(0)
        compilations = CompilationCounter()
        if settings.mode == "sustained":
            heat(cpu_calls, settings.heat_s)
        host = sample_until(cpu_calls, settings, None)
        compiled_while_timing = compilations.since_start()
        with context.timed("correctness", phase="check after timing"):
            changed = _change(built, *_call(built))

    # What the plugin has changed since, too: the number of threads, for one.
    machine["cpu_threads"] = torch.get_num_threads()
    common["notes"] = notes_of([built.layer], context.changes(), found_note(), leak)
    if changed:
        for pass_ in passes:
            yield failure({**bases[pass_], **common}, "wrong_result", changed)
        return
    rates = rates_of(str(machine.get("gpu") or ""))
    for pass_ in passes:
        row: Row = {**bases[pass_], **common, "timestamp": utc_now(), "status": "ok", "reason": ""}
        context.samples[pass_] = host.of(pass_)
        latency = {**summarise(context.samples[pass_]), "mode": settings.mode}
        row.pop("mode", None)  # latency_ms has it
        row["latency_ms"] = latency
        if memory:
            row["memory_bytes"] = {key: size for key, size in memory.items() if key != "left"}
        row["stop_criterion"] = host.stop_criterion
        row["dropped_samples"] = _dropped([s for s in (host, device) if s is not None])
        row["backward_method"] = "direct"
        flops, bytes_ = operation.flops(point, pass_, rows), operation.algorithm_bytes(point, pass_, rows)
        tflops: dict[str, float] = {"host": flops / latency["median"] / 1e9}
        gb_per_s: dict[str, float] = {"host": bytes_ / latency["median"] / 1e6}
        device_median = None
        if on_cuda:
            busy_of_pass = times_of_pass(busy, pass_)
            row["busy_ms"] = interval_only(busy_of_pass)
            context.samples[pass_] = busy_of_pass if device is None else device.of(pass_)
            if device is not None:
                row["device_ms"] = {**interval_only(context.samples[pass_]), "basis": "graph"}
                row["stop_criterion"] = device.stop_criterion
            else:
                row["device_ms"] = {**row["busy_ms"], "basis": "busy", "basis_reason": basis_reason}
            device_median = float(row["device_ms"]["median"])
            tflops["device"] = flops / device_median / 1e9
            tflops["hardware"] = operation.flops(point, pass_, padded) / device_median / 1e9
            gb_per_s["device"] = bytes_ / device_median / 1e6
            row["kernels"] = breakdown(found, "p", pass_, implementation.kernel_role)
            row["environment"] = {**machine, "during_samples": clock_fields((device or host).states)}
        if flops:
            row["tflops"] = tflops
        if operation.reports_bandwidth:
            row["gb_per_s"] = gb_per_s
        row["costs"] = {
            "flops": flops,
            "boundary_bytes": operation.boundary_bytes(point, pass_, rows),
            "algorithm_bytes": bytes_,
        }
        if rates is not None and device_median is not None:
            floors = floors_ms(flops, bytes_, point.dtype, rates)
            row["costs"]["floor_ms"] = floors
            row["costs"]["floor_share"] = max(floors.values()) / device_median
        row["overhead_s"] = dict(context.overhead)
        problems = _instability(compiled_while_timing, [s for s in (host, device) if s is not None])
        if problems:
            row["status"], row["reason"] = "unstable", problems
        yield row


def profiled_windows(built: Built, context: Context) -> dict[str, list[KernelInterval]]:
    """The kernels of eight calls under the profiler, by window (`WindowedCalls` with the tag ``p``)."""
    assert context.evict is not None
    order: list[str] = []
    windowed = paced(WindowedCalls("p", built.layer, built.problems, context.evict, order), context.settings)

    def calls() -> None:
        # The first call under the profiler carries its own start-up.
        for index in range(-1, 8):
            windowed(index)

    found = kernels_in_windows(profile(calls), order)
    return {window: kernels for window, kernels in found.items() if not window.endswith(":-1")}


def _graph_samples(
    built: Built, context: Context, allow_graph: bool, eager: dict[str, torch.Tensor]
) -> tuple[Samples | None, str, str]:
    """Device samples by graph replay, or None and the reason why there is no graph; then what `_change` says of the
    replays.

    Args:
        eager: what an ordinary call on the first input set gives, by the names of `_named`.
    """
    reason = built.implementation.no_graph_reason
    if reason is None and not allow_graph:
        reason = "a graph capture ended the process at this point"
    if reason is not None:
        return None, reason, ""
    assert context.evict is not None
    try:
        calls = GraphCalls(built.layer, built.problems, context.evict)
    except GraphCapturedError as error:
        context.poisoned = True
        return None, f"cannot be captured in a CUDA graph: {error}", ""
    calls(0)
    replayed = _named(built.layer, *calls.outputs())
    for name, expected in eager.items():
        difference = torch.linalg.vector_norm(replayed[name].float() - expected.float())
        if not bool(difference <= 1e-2 * torch.linalg.vector_norm(expected.float())):
            context.poisoned = True
            return None, f"the replayed CUDA graph gives another {name} than the call that it captured", ""
    eager.clear()
    del replayed
    for index in range(2):
        calls(index)
    if context.settings.mode == "sustained":
        heat(calls, context.settings.heat_s)
    samples = sample_steadily(calls, context.settings, context.monitor)
    calls(0)
    return samples, "", _change(built, *calls.outputs())


def _named(layer: Layer, output: Any, gradients: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """What a replay is compared by."""
    if isinstance(layer, Kernel):
        return layer.outputs(output)
    assert gradients[0] is not None
    return {"output": output, "gradient of x": gradients[0]}


def times_of_pass(samples: Sequence[Sample], pass_: str) -> list[float]:
    if pass_ == "forward":
        return [f for f, _ in samples]
    if pass_ == "backward":
        return [b for _, b in samples]
    return [f + b for f, b in samples]


def _dropped(sampled: Sequence[Samples]) -> dict[str, Any]:
    """How many samples were dropped, and why."""
    settling = sum(s.settling for s in sampled)
    reasons = [s.dropped_reason for s in sampled if s.dropped]
    if settling:
        reasons.append(f"{settling} while the SM clock was settling")
    return {"count": settling + sum(s.dropped for s in sampled), "reason": "; ".join(dict.fromkeys(reasons))}


def _instability(compiled: int, sampled: Sequence[Samples]) -> str:
    """A sentence where a run cannot be trusted as steady; empty where it can."""
    problems = []
    if compiled:
        problems.append(f"{compiled} compilations happened while timing")
    for samples in sampled:
        drift = clock_drift(samples.states)
        if abs(drift) > CLOCK_BAND:
            problems.append(f"the SM clock drifted by {drift:+.0%} between the halves of the run")
            break
        if samples.slowed or samples.dropped > len(samples.forward):
            problems.append(f"the card was slowed during most samples ({samples.dropped_reason or 'slowdown'})")
            break
    return "; ".join(problems)


def count_rows(point: Point, bases: dict[str, Row], context: Context) -> Iterator[Row]:
    """One row: what came of a routing, counted on the CPU without a layer."""
    with context.timed("environment"):
        machine = environment("cpu")
    with context.timed("counting"):
        counted = account(point)
    fields = row_fields(point)
    (base,) = bases.values()
    yield {
        **base,
        **fields,
        "routing": {**fields["routing"], **counted["routing"]},
        "costs": counted["costs"],
        "environment": machine,
        "measured_on": "cpu",
        "timestamp": utc_now(),
        "status": "ok",
        "reason": "",
        "overhead_s": dict(context.overhead),
    }


def measure_ratio(
    points: tuple[Point, Point],
    passes: Sequence[str],
    numerator: Implementation,
    denominator: Implementation,
    bases: dict[str, Row],
    context: Context,
    allow_graph: bool = True,
    time_kind: str = "device",
) -> Iterator[Row]:
    """Ratio rows numerator / denominator of device time, the two alternating call by call on the same data.

    Args:
        points: what each of them computes; they differ where the denominator is a bound, which has data of its own.
        time_kind: ``busy``: of busy times, whether or not graphs can be captured.
    """
    point = points[0]
    context.start_cuda()
    packages = tuple(dict.fromkeys([*numerator.distributions, *denominator.distributions]))
    machine = environment("cuda", packages)
    builts: list[Built] = []
    build_s = 0.0
    for its_point, implementation in zip(points, (numerator, denominator), strict=True):
        built = build_and_check(its_point, implementation, context)
        build_s += built.build_s
        builts.append(built)
    common: Row = {
        **row_fields(point),
        "environment": machine,
        "notes": notes_of([built.layer for built in builts], found_note()),
        "measured_on": "cuda",
        "build_s": round(build_s, 3),
        "correctness": {_side(points, i): built.correctness.as_dict(point.dtype) for i, built in enumerate(builts)},
    }
    for key, built, its in zip(("routing", "denominator_routing"), builts, points, strict=True):
        if built.correctness.counts is None or (key == "denominator_routing" and its.routing == point.routing):
            continue
        # Where all sides have top-K's T·K rows there is nothing to tell.
        if its.operation == "routed_experts" or any(side.routing.method != "top_k" for side in points):
            common[key] = {**its.routing.as_dict(), **_outcome(built, its)}
    wrong = [
        f"{_side(points, i)}: {built.correctness.reason}" for i, built in enumerate(builts) if built.correctness.reason
    ]
    if wrong:
        for pass_ in passes:
            yield failure({**bases[pass_], **common}, "wrong_result", "; ".join(wrong))
        return
    if points[1].operation == point.operation:
        # Both layers see the same tensors.
        builts[1].problems = builts[0].problems
    assert context.evict is not None
    reasons = [b.implementation.no_graph_reason for b in builts]
    reason = next((r for r in reasons if r), None if allow_graph else "a graph capture ended the process")
    if time_kind == "busy":
        reason = "busy times were asked for"
    compilations = CompilationCounter()
    states: list[dict[str, Any]] = []

    def observe() -> None:
        assert context.monitor is not None
        states.append(context.monitor.sample())

    if reason is None:
        context.phase("graph")
        try:
            calls: list[GraphCalls] = [GraphCalls(b.layer, b.problems, context.evict) for b in builts]
        except GraphCapturedError:
            # The process is poisoned; the parent repeats the job in a fresh one, without graphs.
            context.poisoned = True
            raise
        compilations = CompilationCounter()
        for index in range(2):
            calls[0](index)
            calls[1](index)
        if context.settings.mode == "sustained":
            heat(lambda index: calls[index % 2](index), context.settings.heat_s)
        pairs = interleaved(calls[0], calls[1], context.settings, observe=observe)
        basis = "graph"
    else:
        context.phase("profile")
        order: list[str] = []
        windowed = [
            paced(WindowedCalls(tag, b.layer, b.problems, context.evict, order), context.settings)
            for tag, b in zip("nd", builts, strict=True)
        ]
        count = max(context.settings.min_samples, 12)
        for index in range(2):
            windowed[0](index)
            windowed[1](index)
        compilations = CompilationCounter()
        if context.settings.mode == "sustained":
            heat(lambda index: windowed[index % 2](index), context.settings.heat_s)
        order.clear()

        def alternating() -> None:
            for index, first in enumerate(pair_order(count)):
                windowed[first](index)
                windowed[1 - first](index)
                observe()

        found = kernels_in_windows(profile(alternating), order)
        # The first pair carries the profiler's own start-up.
        pairs = list(zip(busy_samples(found, "n"), busy_samples(found, "d"), strict=True))[1:]
        basis = "busy"
    compiled = compilations.since_start()
    common["notes"] = notes_of([built.layer for built in builts], context.changes(), found_note())
    with context.timed("correctness", phase="check after timing"):
        for i, built in enumerate(builts):
            if basis == "graph":
                calls[i](0)
            found_again = calls[i].outputs() if basis == "graph" else _call(built)
            changed = _change(built, *found_again)
            if changed:
                wrong.append(f"{_side(points, i)}: {changed}")
            del found_again
    if wrong:
        for pass_ in passes:
            yield failure({**bases[pass_], **common}, "wrong_result", "; ".join(wrong))
        return
    for pass_ in passes:
        both = [(times_of_pass([a], pass_)[0], times_of_pass([b], pass_)[0]) for a, b in pairs]
        row: Row = {
            **bases[pass_],
            **common,
            "environment": {**machine, "during_samples": clock_fields(states)},
            "timestamp": utc_now(),
            "status": "ok",
            "reason": "",
            "time_kind": time_kind,
            "basis": basis,
            **ratio_interval(both),
            "overhead_s": dict(context.overhead),
        }
        if basis == "busy":
            row["basis_reason"] = reason
        if compiled:
            row["status"], row["reason"] = "unstable", f"{compiled} compilations happened while timing"
        yield row


def _side(points: tuple[Point, Point], i: int) -> str:
    """What a ratio's row calls one of its sides: its implementation, and its method where the routing alone differs."""
    own, other = points[i], points[1 - i]
    alike = own.implementation == other.implementation and own.routing != other.routing
    return f"{own.implementation} ({own.routing.method})" if alike else own.implementation


def trace_fake(point: Point, implementation: Implementation, bases: dict[str, Row], context: Context) -> Iterator[Row]:
    """Held memory at any scale under fake tensors: nothing is computed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    context.phase("fake")
    operation = get_operation(point.operation)
    with FakeTensorMode():
        problem = operation.make_problem(point, "cpu")
        layer = implementation.build(problem)
        memory = tracked_memory(layer, problem.x, problem.grad_output)
    notes = notes_of([layer], context.changes(), leak_note(memory))
    del memory["left"]
    for base in bases.values():
        yield {
            **base,
            **row_fields(point),
            "timestamp": utc_now(),
            "environment": environment("fake", tuple(implementation.distributions)),
            "notes": notes,
            "measured_on": "fake",
            "status": "ok",
            "reason": "",
            "memory_bytes": memory,
        }


__all__ = [
    "SCHEMA_VERSION",
    "Context",
    "check_point",
    "failure",
    "measure_point",
    "measure_ratio",
    "release",
    "trace_fake",
]
