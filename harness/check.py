"""Correctness of implementations without timing: output and every gradient against the fp32 reference."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from harness import traces
from harness.environment import gpu_name
from harness.errors import UserError
from harness.interface import DISTRIBUTIONS, DTYPES, Implementation, Point, RoutingSpec
from harness.operations import RoutedExperts, get_operation, variants_of
from harness.points import point_to_dict
from harness.process import WorkerDied, WorkerProcess, WorkerStartError, WorkerTimeout
from harness.registry import choices, installed_reason, load_registry, refusal
from harness.shapes import MoEShape
from harness.tuners import FIRST_CONFIGURATION, OF_A_CHOICE

TIME_LIMIT_S = 300.0
#: After so many whose tuners took longer than that to choose, first verdicts stand.
SLOW_CHOICES = 2
_HEADINGS = ("implementation", "dtype", "routing", "result", "largest relative L2 error")


class _Lines:
    """One line for each outcome, shown when it is known: upstream kernels may compile and tune for minutes at a new
    shape, and whoever ends the wait keeps what is there."""

    def __init__(self, out: Console, plugins: Sequence[Implementation], distributions: Sequence[str]) -> None:
        self._out = out
        names = [_name(p, o, v) for p in plugins for o in p.operations for v in variants_of(p, o)]
        columns = (names, list(DTYPES), list(distributions), ["not installed"])
        self._widths = [max(map(len, [head, *cells])) for head, cells in zip(_HEADINGS, columns, strict=False)]
        self.add(*_HEADINGS, style="bold")

    def add(self, *cells: str, style: str = "") -> None:
        """The cells of one line; the last one may be long and is folded, the result before it is coloured."""
        colour = {"ok": "green", "wrong": "red", "crashed": "red", "timeout": "red", "out_of_memory": "red"}.get(
            cells[3], ""
        )
        padded = [escape(cell.ljust(width)) for cell, width in zip(cells, self._widths, strict=False)]
        if colour:
            padded[3] = f"[{colour}]{padded[3]}[/]"
        self._out.print("  ".join([*padded, escape(cells[4])]), style=style or None, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Shows at a terminal what is being waited for."""
        with self._out.status(escape(text)) if self._out.is_terminal else contextlib.nullcontext():
            yield


def check_implementations(
    out: Console, names: Sequence[str], shape: str, dtype: str, device: str, distributions: Sequence[str]
) -> int:
    """Print one line for each implementation, variant and distribution; returns how many failed.

    Raises:
        UserError: an unknown implementation, shape, dtype, device or distribution, or a trace that does not fit.
    """
    registry = load_registry()
    parsed = MoEShape.parse(shape)
    for value, valid, option in ((dtype, list(DTYPES), "--dtype"), (device, ["cuda", "cpu"], "--device")):
        if value and value not in valid:
            raise UserError(f"{option} {value}: {choices(value, valid)}")
    routings = [asked_routing(text, parsed) for text in distributions or DISTRIBUTIONS]
    plugins = [registry.get(name) for name in names] if names else registry.all()
    has_gpu = gpu_name() is not None
    if device == "cuda" and not has_gpu:
        raise UserError("--device cuda: this machine has no NVIDIA GPU")
    lines = _Lines(out, plugins, [routing.distribution for routing in routings])
    return sum(
        _check_one(lines, plugin, parsed, dtype, device or device_for(plugin, has_gpu), routings, bool(names))
        for plugin in plugins
    )


def _name(plugin: Implementation, operation: str, variant: str) -> str:
    """What a line calls it: with the operation where it is another than the layer itself."""
    named = operation.removeprefix("moe_layer").removeprefix("dense_bound")
    return " ".join(part for part in (plugin.name, named, variant) if part)


def asked_routing(text: str, shape: MoEShape) -> RoutingSpec:
    """The routing by a text of the option ``--distribution``; `UserError` where there is none, or a trace that does not
    fit the shape."""
    try:
        routing = traces.parse(text)
        traces.check(routing, shape)
    except UserError as error:
        raise UserError(f"--distribution {text}: {error}") from error
    return routing


def device_for(plugin: Implementation, has_gpu: bool) -> str:
    """Where it runs unless one says: on the GPU, where there is one and it can."""
    return "cuda" if has_gpu and "cuda" in plugin.devices else "cpu"


def _check_one(
    lines: _Lines,
    plugin: Implementation,
    shape: MoEShape,
    dtype: str,
    device: str,
    routings: Sequence[RoutingSpec],
    asked_for: bool,
) -> int:
    """Lines of one plugin; returns how many failed. One that is ``asked_for`` by name fails where it is missing."""
    missing = installed_reason(plugin)
    if missing:
        lines.add(plugin.name, "", "", "not installed", missing)
        return int(asked_for)
    # fp32 shows mistakes that a wide tolerance hides; GPUs compute these layers in bf16.
    preferred = [dtype] if dtype else [d for d in ("float32", "bfloat16") if d in plugin.dtypes]
    if not dtype and device == "cuda":
        preferred.reverse()
    failed = 0
    checker = Checker()
    try:
        for operation in plugin.operations:
            for variant in variants_of(plugin, operation):
                for routing in routings:
                    its = routing
                    if operation == RoutedExperts.name and not routing.trace_file:
                        # Tokens with more, with fewer and without experts, however the router's choices lie. (A trace
                        # says itself who has which.)
                        its = replace(routing, method="expert_choice")
                    point = Point(
                        operation, plugin.name, shape, preferred[0], routing=its, variant=variant, device=device
                    )
                    impossible = get_operation(operation).unsupported_reason(point)
                    refused = ("unsupported", impossible) if impossible else refusal(plugin, point)
                    cells = (_name(plugin, operation, variant), point.dtype, routing.distribution)
                    if refused:
                        lines.add(*cells, *refused)
                        failed += refused[0] == "crashed"
                        continue
                    with lines.waiting(" ".join(cells)):
                        passed, *verdict = checker.verdict(point)
                    lines.add(*cells, *verdict)
                    failed += not passed
    except WorkerStartError as error:
        lines.add(plugin.name, "", "", "crashed", str(error))
        failed += 1
    finally:
        checker.close()
    return failed


def ask(worker: WorkerProcess, job: dict[str, Any], wanted: str, limit_s: float) -> tuple[bool, dict[str, Any]]:
    """Is the worker still good after a job without rows, and the event that answers it: the one ``wanted``, or
    ``failed`` with ``status`` and ``reason``, also where the worker died or did not finish in time."""
    found: dict[str, Any] = {}
    keep = True
    try:
        for event in worker.run(job, limit_s):
            if event["event"] in (wanted, "failed"):
                found = event
            elif event["event"] == "done":
                keep = not event["poisoned"]
    except (WorkerTimeout, WorkerDied) as error:
        status, reason = worker.failure(error, limit_s)
        return False, {"event": "failed", "status": status, "reason": reason.splitlines()[0]}
    return keep and found.get("status") != "crashed", found


class Kept:
    """A worker process for jobs without rows, which serves until it is no longer good. Close it.

    Attributes:
        untuned: of the worker that answered last (`WorkerProcess.untuned`).
    """

    def __init__(self, stop: threading.Event | None = None) -> None:
        self._stop = stop
        self._worker: WorkerProcess | None = None
        self.untuned = False

    def ask(self, job: dict[str, Any], wanted: str, limit_s: float) -> dict[str, Any]:
        """The event that answers the job, as of `ask`.

        Raises:
            WorkerStartError: no worker comes up.
        """
        self._worker = self._worker or WorkerProcess(stop=self._stop)
        keep, found = ask(self._worker, job, wanted, limit_s)
        self.untuned = self._worker.untuned
        if not keep:
            self.close(patience_s=0.0)
        return found

    def close(self, patience_s: float = 1.0) -> None:
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close(patience_s=patience_s)


class Checker:
    """Checks points in a worker process that it keeps. Close it."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._kept = Kept()
        self.close = self._kept.close
        self._slow = 0

    def verdict(self, point: Point) -> tuple[bool, str, str]:
        """Did the point pass, the result in a word, and what there is to say of it.

        Raises:
            WorkerStartError: no worker comes up.
        """
        passed, result, text = self._ask(point, own_tuning=False)
        if passed or result not in OF_A_CHOICE or not self._kept.untuned:
            return passed, result, text
        # Of what its tuners may never choose: a process that has taken nothing yet lets them choose.
        if self._slow < SLOW_CHOICES:
            self.close(patience_s=0.0)
            try:
                own_passed, own_result, own_text = self._ask(point, own_tuning=True)
            except WorkerStartError as error:
                return passed, result, f"{text}; {FIRST_CONFIGURATION}; no process for their own choice: {error}"
            if own_result != "timeout":
                return own_passed, own_result, f"{own_text}; {FIRST_CONFIGURATION}: {result}, {text}"
            self._slow += 1
        return passed, result, f"{text}; {FIRST_CONFIGURATION}; their own choice took too long"

    def _ask(self, point: Point, own_tuning: bool) -> tuple[bool, str, str]:
        asked = {"passes": [], "bases": {}, "settings": {}, "own_tuning": own_tuning}
        job = {"kind": "check", "point": point_to_dict(point), **asked}
        found = self._kept.ask(job, "checked", self._time_limit_s)
        if found.get("event") == "failed":
            return False, found["status"], found["reason"]
        if found.get("reason"):
            return False, "wrong", found["reason"]
        errors: dict[str, float] = found["errors"]
        worst = max(errors, key=lambda name: errors[name])
        return True, "ok", f"{errors[worst]:.2g} ({worst})"
