"""The worker process: measures jobs for one plugin (two for a ratio) and may die without harm.

It reads one JSON job a line from standard input and writes one JSON event a line to the descriptor it was given:
``ready``, ``phase``, ``row``, ``done``. Whatever a plugin prints goes to the parent's log file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from harness.compilation import watch_triton
from harness.measure import Context, check_point, count_rows, measure_point, measure_ratio, release, trace_fake
from harness.points import point_from_dict
from harness.registry import Registry, load_registry
from harness.timing import TimingSettings


class Events:
    """Writes events to the parent's pipe, whole lines at a time."""

    def __init__(self, descriptor: int) -> None:
        self._pipe = os.fdopen(descriptor, "w", encoding="utf-8", buffering=1)

    def send(self, event: str, **fields: Any) -> None:
        self._pipe.write(json.dumps({"event": event, **fields}) + "\n")
        self._pipe.flush()


def die_with_parent() -> None:
    """Ask Linux to end this process with its parent, so that a killed sweep leaves nothing on the GPU."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def describe(error: BaseException) -> str:
    """The exception as one line."""
    # What C++ adds to a message is a stack of addresses.
    text = " ".join(str(error).split("Exception raised from ")[0].split())
    return f"{type(error).__name__}: {text[:600]}" if text else type(error).__name__


def no_host_memory(error: BaseException) -> bool:
    """Did the CPU's allocator refuse, or the size not fit into 64 bits? Both come as plain exceptions."""
    text = str(error)
    return any(part in text for part in ("DefaultCPUAllocator", "Storage size calculation overflowed"))


def run_job(job: dict[str, Any], plugins: Registry, context: Context, events: Events) -> None:
    """Measure one job and send its rows; an exception becomes a row for every pass that has none yet."""
    import torch

    bases: dict[str, dict[str, Any]] = job["bases"]
    passes: list[str] = job["passes"]
    point = point_from_dict(job["point"])
    context.settings = TimingSettings(**job["settings"])
    context.begin_job()
    # What earlier jobs imported stays; looking through it at every collection would take long.
    release()
    gc.freeze()
    sent: set[str] = set()
    status, reason = "", ""
    rows: Iterator[dict[str, Any]]
    try:
        if job["kind"] == "check":
            correctness = check_point(point, plugins.get(point.implementation), context)
            events.send("checked", reason=correctness.reason, errors=correctness.errors)
            rows = iter(())
        elif job["kind"] == "fake":
            rows = trace_fake(point, plugins.get(point.implementation), bases, context)
        elif job["kind"] == "conformance":
            # Only here, since nothing else needs it.
            from harness.conformance.measure import conformance_rows

            rows = conformance_rows(job, point, plugins.get(point.implementation), context)
        elif job["kind"] == "account":
            rows = count_rows(point, bases, context)
        elif job["kind"] == "ratio":
            pair = plugins.get(job["numerator"]), plugins.get(job["denominator"])
            points = point, point_from_dict(job["denominator_point"])
            rows = measure_ratio(points, passes, *pair, bases, context, job["allow_graph"])
        else:
            implementation = plugins.get(point.implementation)
            rows = measure_point(point, passes, implementation, bases, context, job["allow_graph"])
        for row in rows:
            events.send("row", row=row)
            sent.add(row["pass"])
    except torch.OutOfMemoryError as error:
        status, reason = "out_of_memory", describe(error).split(" Tried to allocate")[0] + _tried(error)
    except MemoryError as error:
        status, reason = "out_of_memory", describe(error)
    except Exception as error:
        traceback.print_exc()
        status, reason = "out_of_memory" if no_host_memory(error) else "crashed", describe(error)
        # After a CUDA error every later call in this process fails too.
        context.poisoned = context.poisoned or "CUDA error" in reason or "AcceleratorError" in reason
    # The traceback holds the layer's tensors alive until here.
    with contextlib.suppress(Exception):
        release()
    if status:
        missing = [pass_ for pass_ in passes if pass_ not in sent]
        events.send("failed", status=status, reason=reason, passes=missing)
    context.phase("")
    events.send("done", poisoned=context.poisoned or status == "out_of_memory", phases=context.phases)


def _tried(error: BaseException) -> str:
    text = str(error)
    start = text.find("Tried to allocate")
    return " " + text[start:].split(". ")[0] if start >= 0 else ""


def main() -> None:
    """Serve jobs until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    events = Events(arguments.events)
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
    for line in sys.stdin:
        run_job(json.loads(line), plugins, context, events)
    # Plugins may leave threads or atexit hooks that hang.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
