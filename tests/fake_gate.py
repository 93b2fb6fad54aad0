"""The regression gate with a fake GPU: rows made up, the judge real."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import regress as gate
from harness import store
from harness.interface import Point
from harness.record import point_fields
from harness.registry import load_registry
from harness.sweep import RatioPoint, Sweep, load_sweep

GPU = "NVIDIA H200"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEADLINE, OLMOE = "24576,1536,256,128,8", "16384,2048,1024,64,8"

registry = functools.cache(load_registry)


@functools.cache
def ci() -> Sweep:
    return load_sweep("ci", registry())


def machine(**changed: Any) -> dict[str, Any]:
    found = {"measured_on": "cuda", "gpu": GPU, "driver": "580.1", "cuda": "13.0", "torch": "2.11", "triton": "3.6"}
    return found | {"python": "3.12", "platform": "Linux", "host": "ab", "commit": COMMIT, "dirty": False} | changed


def kernels(pass_: str, factor: float = 1.0) -> list[dict[str, Any]]:
    main = "up" if pass_ == "forward" else "dH"
    found = [("main_kernel", 600.0 * factor, main), ("scan_kernel", 40.0, "router"), ("count_kernel", 10.0, "router")]
    return [{"name": name, "calls": 1.0, "us": us, "role": role} for name, us, role in [*found, ("nvjet", 90.0, None)]]


@dataclass
class FakeGpu:
    """A GPU that answers a sweep at once. Keys are (shape, pass); shapes as texts.

    Attributes:
        slower: factor on a point's time; ``ratios``: on its ratio over the bound; ``busy``: on the kernels' busy time,
            where rows have one; ``busy_ratios``: on the ratio of those. Of a list, the first is for the first
            measurement, and so on; the last one stays.
        busy_width: half the width of the busy time's interval, relative; None: rows have no busy time.
        mode: how the sweep's points are timed, as its rows say it.
        failing, bad_ratios: status and reason in place of numbers (with them, where it is unstable).
        basis: of points, and of ratios that are not asked for by busy times.
        missing: points for which no row is written.
        width: half the intervals' width, relative.
    """

    slower: dict[tuple[str, str], float | list[float]] = field(default_factory=dict)
    ratios: dict[tuple[str, str], float | list[float]] = field(default_factory=dict)
    busy: dict[tuple[str, str], float | list[float]] = field(default_factory=dict)
    busy_ratios: dict[tuple[str, str], float | list[float]] = field(default_factory=dict)
    busy_width: float | None = None
    failing: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    bad_ratios: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    missing: set[tuple[str, str]] = field(default_factory=set)
    environment: dict[str, Any] = field(default_factory=dict)
    basis: str = "graph"
    width: float = 0.002
    itself: float = 1.0
    commits: dict[tuple[str, str], str] = field(default_factory=dict)
    extra_kernels: list[dict[str, Any]] = field(default_factory=list)
    asked: list[Sweep] = field(default_factory=list)
    mode: str = "burst"

    def run_sweep(
        self, out: Console, sweep: Sweep, registry: Any, path: Path, resume: bool, dry_run: bool, mode: str = ""
    ) -> int:
        assert not resume and not dry_run
        self.asked.append(sweep)
        self.mode = sweep.options.mode
        for point in sweep.points:
            for pass_ in sweep.options.passes:
                self.measure(path, point, pass_)
        for ratio in sweep.ratios:
            for pass_ in ratio.passes:
                self.ratio(path, ratio, pass_)
        return 0

    def common(self, point: Point, pass_: str) -> dict[str, Any]:
        commit = self.commits.get((str(point.shape), pass_), COMMIT)
        return {
            **point_fields(point), "schema": 1, "run_id": "x", "sweep": "ci", "pass": pass_, "measured_on": "cuda",
            "timestamp": "2026-11-30T12:00:00+00:00",
            "environment": machine(**{"commit": commit, **self.environment}),
            **({} if self.mode == "burst" else {"mode": self.mode}),
        }  # fmt: skip

    @staticmethod
    def factor(factors: dict[tuple[str, str], float | list[float]], place: tuple[str, str]) -> float:
        found = factors.get(place, 1.0)
        if isinstance(found, list):
            return found.pop(0) if len(found) > 1 else found[0]
        return found

    def numbers(self, centre: str, value: float, width: float | None = None) -> dict[str, Any]:
        width = self.width if width is None else width
        ends = [value * (1 - width), value * (1 + width)]
        return {centre: value, "ci95": ends, "samples": 12}

    def measure(self, path: Path, point: Point, pass_: str) -> None:
        place = (str(point.shape), pass_)
        if place in self.missing:
            return
        factor = self.factor(self.slower, place)
        status, reason = self.failing.get(place, ("ok", ""))
        row = {
            **self.common(point, pass_),
            "record": "measurement",
            "label": "ours",
            "status": status,
            "reason": reason,
        }
        if status in ("ok", "unstable"):
            row["device_ms"] = {**self.numbers("median", factor * (1 + point.shape.n / 1000)), "basis": self.basis}
            if self.busy_width is not None:
                busy = self.factor(self.busy, place) * 0.99 * (1 + point.shape.n / 1000)
                row["busy_ms"] = self.numbers("median", busy, self.busy_width)
            row.pop("mode", None)
            row["latency_ms"] = {**self.numbers("median", 3.0), "mode": self.mode}
            row["kernels"] = kernels(pass_, factor) + self.extra_kernels
        append(path, row)

    def ratio(self, path: Path, ratio: RatioPoint, pass_: str) -> None:
        place = (str(ratio.point.shape), pass_)
        status, reason = ("ok", "") if ratio.is_a_a else self.bad_ratios.get(place, ("ok", ""))
        row = {**self.common(ratio.point, pass_), "record": "ratio", "status": status, "reason": reason}
        row |= {"numerator": ratio.numerator, "denominator": ratio.denominator, "time_kind": ratio.time_kind}
        del row["implementation"]
        if ratio.bound:
            row["denominator_variant"] = ratio.bound
        if status in ("ok", "unstable"):
            busy = ratio.time_kind == "busy"
            factors = self.busy_ratios if busy else self.ratios
            value = self.itself if ratio.is_a_a else (1.2 if ratio.bound else 1.0) * self.factor(factors, place)
            row |= {**self.numbers("value", value), "basis": "busy" if busy else self.basis}
        append(path, row)


def append(path: Path, row: dict[str, Any]) -> None:
    """`store.append` without its wait for the disk; a row that the record refuses fails the test."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checked = store.check(store.clean(row))
    with path.open("a") as file:
        file.write(json.dumps(checked) + "\n")


class Gate:
    """The gate with a fake GPU and a folder of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.path = folder / "baselines" / "nvidia_h200.json"
        self.gpu = FakeGpu()
        self.name: str | None = GPU
        self.tree: dict[str, Any] = machine()
        monkeypatch.setattr(gate, "run_sweep", lambda *args, **kwargs: self.gpu.run_sweep(*args, **kwargs))
        monkeypatch.setattr(gate, "gpu_name", lambda: self.name)
        monkeypatch.setattr(gate, "environment", self.environment)
        monkeypatch.setattr(gate, "BASELINES", folder / "baselines")
        monkeypatch.setattr(gate, "load_registry", registry)
        monkeypatch.setattr(gate, "load_sweep", lambda name, registry: ci())

    def environment(self, measured_on: str, packages: tuple[str, ...] = (), initialise_cuda: bool = True) -> Any:
        assert measured_on == "fake" or not initialise_cuda, "the gate's own process stays off CUDA"
        return self.tree

    def run(self, gpu: FakeGpu | None = None, **options: Any) -> tuple[int, str]:
        self.gpu = gpu or FakeGpu()
        out = Console(file=io.StringIO(), width=250)
        code = gate.regress(out, output=self.folder / "rows", **options)
        assert isinstance(out.file, io.StringIO)
        return code, out.file.getvalue()

    def found(
        self, gpu: FakeGpu | None = None, **options: Any
    ) -> tuple[int, dict[str, dict[str, Any]], dict[str, Any]]:
        """The exit code, what the JSON says of each point by its name, and all of it."""
        file = self.folder / "found.json"
        code, _ = self.run(gpu, json_file=file, **options)
        data = json.loads(file.read_text())
        assert data["exit_code"] == code
        return code, {point["what"]: point for point in data["points"]}, data

    def change(self, change: Callable[[dict[str, Any]], None]) -> None:
        data = json.loads(self.path.read_text())
        change(data)
        self.path.write_text(json.dumps(data))


def what(shape: str = HEADLINE, pass_: str = "forward") -> str:
    return f"sonicmoe_triton moe_layer {shape} bfloat16 {pass_}"


FORWARD = (HEADLINE, "forward")
