"""The worker process: measures jobs for one plugin (two for a ratio) and may die without harm.

It reads one JSON job a line from standard input and writes one JSON event a line to the descriptor it was given:
``ready``, ``phase``, ``row``, ``done``, and others where a job asks for no row. Whatever a plugin prints goes to the
parent's log file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from harness import descendants
from harness.compilation import watch_triton
from harness.correctness import WrongResult
from harness.errors import describe
from harness.interface import Implementation
from harness.measure import (
    Context,
    build_and_call,
    check_point,
    count_rows,
    measure_point,
    measure_ratio,
    release,
    trace_fake,
)
from harness.points import point_from_dict
from harness.registry import Registry, importable, load_registry
from harness.timing import TimingSettings
from harness.tuners import all_is_compiled, nothing_is_timed, tuners_choose, untimed

#: Kinds of job that judge results and time nothing. (``warm`` judges none either.)
UNTIMED = ("check", "conformance")


class Events:
    """Writes events to the parent's pipe, whole lines at a time."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)
        self._process = os.getpid()
        # Of kernels that a backward launches, autograd's thread tells.
        self._lock = threading.Lock()

    def send(self, event: str, **fields: Any) -> None:
        # A plugin's fork that did not end where it should have would go on as a second worker.
        if os.getpid() != self._process:
            os._exit(1)
        with self._lock:
            self._pipe.write(json.dumps({"event": event, **fields}) + "\n")
            self._pipe.flush()


def die_with_parent() -> None:
    """Ask Linux to end this process with its parent, so that a killed sweep leaves nothing on the GPU."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def no_memory(error: BaseException) -> bool:
    """Did an allocator refuse? Those of the CPU, of drivers and of libraries say so by plain exceptions, and a plugin
    may raise its own one from theirs."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = describe(error)
    parts = ("DefaultCPUAllocator", "Storage size calculation overflowed", "out of memory", "_ALLOC_FAILED")
    cause = error.__cause__
    return any(part in text for part in parts) or (cause is not None and no_memory(cause))


def missing_package(error: BaseException, implementations: Sequence[Implementation]) -> str | None:
    """A sentence where the exception says that a package is not installed; None where it says anything else, a missing
    part of a package that is there included."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    if importable(package):
        return None
    ways = dict.fromkeys(how for plugin in implementations for how in plugin.requires.values())
    whole = f", or again what needs it: {'; '.join(ways)}" if ways else ""
    return f"the package {package} is missing; install it{whole}"


def run_job(job: dict[str, Any], plugins: Registry, context: Context, events: Events) -> None:
    """Measure one job and send its rows; an exception becomes a row for every pass that has none yet."""
    bases: dict[str, dict[str, Any]] = job["bases"]
    passes: list[str] = job["passes"]
    point = point_from_dict(job["point"])
    context.settings = TimingSettings(**job["settings"])
    context.begin_job()
    names = [job["numerator"], job["denominator"]] if job["kind"] == "ratio" else [point.implementation]
    # What earlier jobs imported stays; looking through it at every collection would take long.
    release()
    gc.freeze()
    sent: set[str] = set()
    status, reason = "", ""
    rows: Iterator[dict[str, Any]]
    try:
        if job["kind"] == "warm":
            all_is_compiled()
        elif job["kind"] in UNTIMED and not job.get("own_tuning"):
            nothing_is_timed(lambda: events.send("first_configuration"))
        elif untimed():
            raise RuntimeError("this process holds what tuners took untimed: measure in a fresh one")
        elif job["kind"] in UNTIMED:
            tuners_choose()
        if job["kind"] == "check":
            correctness = check_point(point, plugins.get(point.implementation), context)
            events.send("checked", reason=correctness.reason, errors=correctness.errors)
            rows = iter(())
        elif job["kind"] == "warm":
            build_and_call(point, plugins.get(point.implementation), context)
            events.send("warmed")
            rows = iter(())
        elif job["kind"] == "profile":
            # Only here, since nothing else needs it.
            from harness.one_call import profiled

            found = profiled(point, job["pass"], plugins.get(point.implementation), context, job["timeline"])
            events.send("profiled", **found)
            rows = iter(())
        elif job["kind"] == "fake":
            rows = trace_fake(point, plugins.get(point.implementation), bases, context)
        elif job["kind"] == "conformance":
            # As above.
            from harness.conformance.measure import conformance_rows

            rows = conformance_rows(job, point, plugins.get(point.implementation), context)
        elif job["kind"] == "account":
            rows = count_rows(point, bases, context)
        elif job["kind"] == "ratio":
            pair = plugins.get(job["numerator"]), plugins.get(job["denominator"])
            points = point, point_from_dict(job["denominator_point"])
            rows = measure_ratio(points, passes, *pair, bases, context, job["allow_graph"], job["time_kind"])
        else:
            implementation = plugins.get(point.implementation)
            rows = measure_point(point, passes, implementation, bases, context, job["allow_graph"])
        for row in rows:
            events.send("row", row=row, samples=context.samples.get(row["pass"], []))
            sent.add(row["pass"])
    except WrongResult as error:
        status, reason = "wrong_result", str(error)
    # Everything that a plugin may raise, SystemExit and KeyboardInterrupt too: the parent's Ctrl-C does not come here.
    except BaseException as error:
        missing = missing_package(error, [plugins.get(name) for name in names if name in plugins])
        if missing:
            status, reason = "not_installed", missing
        elif no_memory(error):
            status, reason = "out_of_memory", describe(error).split(" Tried to allocate")[0] + _tried(error)
        else:
            status, reason = "crashed", describe(error)
        with contextlib.suppress(Exception):  # the plugin may have closed what this is printed to
            traceback.print_exc()
        # After a CUDA error every later call in this process fails too.
        context.poisoned = context.poisoned or "CUDA error" in reason or "AcceleratorError" in reason
    # The traceback holds the layer's tensors alive until here.
    with contextlib.suppress(Exception):
        release()
    changed = context.changes()
    if status:
        left = [pass_ for pass_ in passes if pass_ not in sent]
        events.send("failed", status=status, reason=f"{reason}; {changed}" if changed else reason, passes=left)
    context.phase("")
    # What it changed would be there for the next point, which a fresh process must not be.
    poisoned = context.poisoned or status == "out_of_memory" or bool(changed)
    events.send("done", poisoned=poisoned, phases=context.phases)


def _tried(error: BaseException) -> str:
    text = str(error)
    start = text.find("Tried to allocate")
    return " " + text[start:].split(". ")[0] if start >= 0 else ""


def take_standard_input() -> TextIO:
    """Jobs come by standard input. A plugin that asks there finds its end: it must neither wait nor take a job."""
    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return jobs


def main() -> None:
    """Serve jobs until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    # The parent asks by it where a worker hangs; it is told even while the interpreter's lock is held.
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    events = Events(arguments.events)
    jobs = take_standard_input()
    # So that the parent can find what a plugin leaves there.
    tempfile.template = descendants.temporary_prefix(os.environ.get(descendants.MARK_VARIABLE, ""))
    plugins = load_registry()
    watch_triton()
    context = Context(announce=lambda name: events.send("phase", name=name))
    # The first dispatch mode or autograd.Function imports it, which would fall into the first job's phases.
    import torch._dynamo  # noqa: F401

    # What the imports left lives as long as the process: without it a collection, of which a job needs several, takes
    # a few milliseconds instead of 0.2 s.
    gc.collect()
    gc.freeze()
    events.send("ready")
    for line in jobs:
        run_job(json.loads(line), plugins, context, events)
    # Plugins may leave threads or atexit hooks that hang, and may have closed these.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
