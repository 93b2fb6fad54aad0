"""The regression gate on made-up rows: what counts as slower, what is refused, and what the four forms say."""

from __future__ import annotations

import copy
import fcntl
import functools
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness import regress as gate
from harness import store
from harness.errors import UserError
from harness.interface import Point
from harness.record import point_fields
from harness.registry import PLUGINS_VARIABLE, load_registry
from harness.regress import baseline as baselines
from harness.regress import judge, trial
from harness.regress.baseline import Interval, Threshold, parse_threshold
from harness.session import run_sweep
from harness.sweep import RatioPoint, Sweep, load_sweep

GPU = "NVIDIA H200"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEADLINE, OLMOE = "24576,1536,256,128,8", "16384,2048,1024,64,8"
HOSTILE = "\u202e<script>alert(1)</script> | [red]x[/] @somebody `tick`\n\x1b[31mred\x00\ud800\ufffe ]]> &amp; **bold**"
Run = Callable[..., tuple[int, str, str]]

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
        slower: factor on a point's time; ``ratios``: on its ratio over the bound. Of a list, the first is for the first
            measurement, and so on; the last one stays.
        failing, bad_ratios: status and reason in place of numbers (with them, where it is unstable).
        missing: points for which no row is written.
        width: half the intervals' width, relative.
    """

    slower: dict[tuple[str, str], float | list[float]] = field(default_factory=dict)
    ratios: dict[tuple[str, str], float] = field(default_factory=dict)
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

    def run_sweep(
        self, out: Console, sweep: Sweep, registry: Any, path: Path, resume: bool, dry_run: bool, mode: str = ""
    ) -> int:
        assert not resume and not dry_run
        self.asked.append(sweep)
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
        }  # fmt: skip

    def numbers(self, centre: str, value: float) -> dict[str, Any]:
        ends = [value * (1 - self.width), value * (1 + self.width)]
        return {centre: value, "ci95": ends, "samples": 12}

    def measure(self, path: Path, point: Point, pass_: str) -> None:
        place = (str(point.shape), pass_)
        if place in self.missing:
            return
        factor = self.slower.get(place, 1.0)
        if isinstance(factor, list):
            factor = factor.pop(0) if len(factor) > 1 else factor[0]
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
            row["latency_ms"] = {**self.numbers("median", 3.0), "mode": "burst"}
            row["kernels"] = kernels(pass_, factor) + self.extra_kernels
        append(path, row)

    def ratio(self, path: Path, ratio: RatioPoint, pass_: str) -> None:
        place = (str(ratio.point.shape), pass_)
        status, reason = ("ok", "") if ratio.is_a_a else self.bad_ratios.get(place, ("ok", ""))
        row = {**self.common(ratio.point, pass_), "record": "ratio", "status": status, "reason": reason}
        row |= {"numerator": ratio.numerator, "denominator": ratio.denominator, "time_kind": "device"}
        del row["implementation"]
        if ratio.bound:
            row["denominator_variant"] = ratio.bound
        if status in ("ok", "unstable"):
            value = self.itself if ratio.is_a_a else 1.2 * self.ratios.get(place, 1.0)
            row |= {**self.numbers("value", value), "basis": self.basis}
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
        monkeypatch.setattr(gate, "environment", lambda measured_on: self.tree)
        monkeypatch.setattr(gate, "BASELINES", folder / "baselines")
        monkeypatch.setattr(gate, "load_registry", registry)
        monkeypatch.setattr(gate, "load_sweep", lambda name, registry: ci())

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


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """With a baseline of an ordinary run."""
    made = Gate(tmp_path, monkeypatch)
    assert made.run(update=True)[0] == 0
    return made


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Without one."""
    return Gate(tmp_path, monkeypatch)


# The sweep, and how its rows are found again.


def test_the_sweep_is_a_dozen_points_each_with_its_ratio_over_the_bound() -> None:
    asked = gate.asked_of(ci())
    assert len(asked) == 12 and len({one.key for one in asked}) == len({one.what for one in asked}) == 12
    assert all(one.ratio is not None and one.ratio.bound == "gemm" for one in asked)
    assert len({one.ratio_key for one in asked}) == 12
    assert sum(ratio.is_a_a for ratio in ci().ratios) == 1


def test_identities_are_those_of_committed_rows() -> None:
    """Were a key built otherwise than a row's, every point would be missing on a real GPU and none here."""
    rows, _ = store.read(ROOT / "results" / "nvidia_h200" / "paper_layers.jsonl")
    found = {store.identity(row, None) for row in rows}
    assert sum(one.key in found for one in gate.asked_of(ci())) >= 8
    glue = replace(ci(), ratios=[replace(ratio, bound="gemm_glue") for ratio in ci().ratios])
    assert sum(one.ratio_key in found for one in gate.asked_of(glue)) >= 6


# What counts.


def test_unchanged_passes_and_measures_points_alone(gated: Gate) -> None:
    code, text = gated.run()
    assert code == 0 and "passed" in text and "12 points, of which 12 ok" in text
    [sweep] = gated.gpu.asked
    assert len(sweep.points) == 6 and not sweep.ratios


def test_slower_and_confirmed_names_the_kernel(gated: Gate) -> None:
    code, points, _ = gated.found(FakeGpu(slower={FORWARD: 1.1}, ratios={FORWARD: 1.1}))
    point = points[what()]
    assert code == 1 and point["outcome"] == "regression" and point["change"] == pytest.approx(0.1)
    assert [(k["name"], k["us"], k["baseline_us"]) for k in point["kernels"]] == [("up (main_kernel)", 660.0, 600.0)]
    assert point["second_look"]["change"] == pytest.approx(0.1)
    assert point["second_look"]["how"] == "ratio over cublas_bound gemm"
    assert [one["outcome"] for one in points.values()].count("ok") == 11
    again = gated.gpu.asked[1]
    assert not again.points and [(r.denominator, r.passes) for r in again.ratios if r.bound] == [
        ("cublas_bound", ("forward",))
    ]
    assert any(ratio.is_a_a for ratio in again.ratios)
    code, text = gated.run(FakeGpu(slower={FORWARD: 1.1}, ratios={FORWARD: 1.1}))
    assert code == 1 and "up (main_kernel): +10.0%, 600.0 to 660.0 µs" in text and "failed" in text


def test_slower_with_the_same_ratio_is_drift(gated: Gate) -> None:
    code, points, _ = gated.found(FakeGpu(slower={FORWARD: 1.1}))
    assert code == 0 and points[what()]["outcome"] == "drift"
    assert "stayed within the threshold" in points[what()]["reason"]
    assert gated.run(FakeGpu(slower={FORWARD: 1.1}))[1].count("drift") == 3


@pytest.mark.parametrize(
    ("gpu", "outcome"),
    [
        (FakeGpu(slower={FORWARD: 1.04}), "ok"),
        (FakeGpu(slower={FORWARD: 1.10}, width=0.11), "intervals overlap"),
        (FakeGpu(slower={FORWARD: 0.90}), "faster"),
        (FakeGpu(slower={FORWARD: 0.97}), "ok"),
        (FakeGpu(slower={FORWARD: 0.90}, width=0.11), "ok"),
    ],
)
def test_what_is_no_suspicion(gated: Gate, gpu: FakeGpu, outcome: str) -> None:
    gpu = copy.deepcopy(gpu)
    code, points, _ = gated.found(gpu)
    assert code == 0 and points[what()]["outcome"] == outcome and len(gpu.asked) == 1


def test_failing_and_missing_points(gated: Gate) -> None:
    gpu = FakeGpu(failing={FORWARD: ("wrong_result", "grad_up: 0.5")}, missing={(OLMOE, "backward")})
    code, points, _ = gated.found(gpu)
    assert code == 1 and points[what()]["outcome"] == "failed" and "grad_up: 0.5" in points[what()]["reason"]
    assert points[what(OLMOE, "backward")]["outcome"] == "missing"
    assert sum(point["failing"] for point in points.values()) == 2
    # Nor does a failing second look let a point through.
    gpu = FakeGpu(slower={FORWARD: 1.1}, bad_ratios={FORWARD: ("crashed", "no bound")})
    code, points, _ = gated.found(gpu)
    assert code == 1 and points[what()]["outcome"] == "failed" and "no bound" in points[what()]["reason"]


def test_an_old_row_is_no_row_of_this_run(gated: Gate) -> None:
    assert gated.run()[0] == 0
    assert gated.run(FakeGpu(missing={FORWARD}))[0] == 1


def test_points_that_the_sweep_or_the_baseline_lacks(gated: Gate) -> None:
    def forget(data: dict[str, Any]) -> None:
        data["points"] = [point for point in data["points"] if point["what"] != what()]
        data["points"][0]["key"] = data["points"][0]["what"] = "a point of old"

    gated.change(forget)
    code, points, _ = gated.found()
    assert code == 1 and points[what()]["outcome"] == "new" and not points[what()]["failing"]
    assert points["a point of old"]["outcome"] == "missing"
    code, points, _ = gated.found(FakeGpu(failing={FORWARD: ("timeout", "too long")}))
    assert points[what()]["outcome"] == "failed"


def test_an_unstable_point_is_looked_at_twice(gated: Gate) -> None:
    unstable = {FORWARD: ("unstable", "the clock moved by 12 %")}
    code, points, _ = gated.found(FakeGpu(failing=unstable))
    assert code == 0 and points[what()]["outcome"] == "drift" and "the clock moved" in points[what()]["reason"]
    code, points, _ = gated.found(FakeGpu(failing=unstable, ratios={FORWARD: 1.1}))
    assert code == 1 and points[what()]["outcome"] == "regression"


def test_without_a_reference_the_point_is_measured_once_more(gated: Gate) -> None:
    def without(data: dict[str, Any]) -> None:
        for point in data["points"]:
            del point["reference"]

    gated.change(without)
    gpu = FakeGpu(slower={FORWARD: [1.1, 1.0]})
    code, points, _ = gated.found(gpu)
    assert (
        code == 0 and points[what()]["outcome"] == "drift" and points[what()]["second_look"]["how"] == "measured again"
    )
    assert [str(point.shape) for point in gpu.asked[1].points] == [HEADLINE] and not gpu.asked[1].ratios
    assert gated.run(FakeGpu(slower={FORWARD: 1.1}))[0] == 1
    # Unstable twice: nothing is known of it.
    assert gated.run(FakeGpu(failing={FORWARD: ("unstable", "compiled while timing")}))[0] == 1


def test_thresholds(gated: Gate) -> None:
    slower = {FORWARD: 1.1, (OLMOE, "forward"): 1.1}

    def own(data: dict[str, Any]) -> None:
        next(point for point in data["points"] if point["what"] == what())["threshold"] = "median:20%"

    gated.change(own)
    code, points, _ = gated.found(FakeGpu(slower=slower, ratios=slower))
    assert code == 1 and points[what()]["outcome"] == "ok" and points[what(OLMOE)]["outcome"] == "regression"
    assert (points[what()]["threshold"], points[what(OLMOE)]["threshold"]) == ("median:20%", "median:5%")
    # The command line stands above both.
    code, points, _ = gated.found(FakeGpu(slower=slower, ratios=slower), threshold="median:11%")
    assert code == 0 and points[what()]["threshold"] == "median:11%"
    assert gated.run(FakeGpu(slower=slower, ratios=slower), threshold="median:9.5%")[0] == 1


def test_repetitions_count_by_their_median(gated: Gate) -> None:
    gpu = FakeGpu(slower={FORWARD: [1.0, 1.2, 1.0]})
    code, points, data = gated.found(gpu, repeat=3)
    assert code == 0 and points[what()]["outcome"] == "ok" and data["repeat"] == 3
    assert points[what()]["now_ms"]["ci95"] == pytest.approx([1.256 * 0.998, 1.256 * 1.2 * 1.002])
    # The shapes take turns, so that a slow moment does not hit one point alone.
    assert gpu.asked[0].points == ci().points * 3
    with pytest.raises(UserError, match="--repeat 0: must be at least 1"):
        gated.run(repeat=0)


def test_another_environment_is_a_warning(gated: Gate) -> None:
    code, _, data = gated.found(FakeGpu(environment={"driver": "600.2", "triton": "3.7", "host": "cd"}))
    assert code == 0
    assert data["warnings"] == ["driver is 600.2, the baseline's was 580.1", "triton is 3.7, the baseline's was 3.6"]
    gated.name = "NVIDIA H300"
    _, text = gated.run(FakeGpu(environment={"gpu": "NVIDIA H300"}), baseline=gated.path)
    assert "GPU is NVIDIA H300, the baseline's was NVIDIA H200" in text


def test_another_kind_of_time_cannot_be_compared(gated: Gate) -> None:
    code, points, _ = gated.found(FakeGpu(basis="busy"))
    assert code == 1 and {point["outcome"] for point in points.values()} == {"cannot compare"}
    assert "kind graph, this run's of kind busy" in points[what()]["reason"]


def test_a_ratio_of_the_method_with_itself_that_is_not_1_is_said(gated: Gate) -> None:
    _, text = gated.run(FakeGpu(slower={FORWARD: 1.1}, itself=1.03))
    assert "sonicmoe_triton against itself, forward: 1.030 [1.028, 1.032] should include 1" in text


def test_kernels_by_role_the_largest_loss_first() -> None:
    before = baselines.BaselinePoint(
        "x", "x", {}, "graph", Interval(1, 1, 1), {"up": 500.0, "router": 5.0, "gone": 9.0}
    )
    rows = [
        {"name": "a", "us": 550.1, "role": "up"},
        {"name": "b", "us": 9.0, "role": "router"},
        {"name": "c", "us": 1.0, "role": "router"},
        {"name": "fallback", "us": 80.0, "role": None},
        {"name": "tiny", "us": 2.0, "role": None},
    ]
    us, names = judge.kernels_of({"kernels": rows})
    found = judge.grown(judge.Now(Interval(2, 2, 2), "graph", us, names), before, Threshold(5))
    assert [(one.name, one.before) for one in found] == [
        ("fallback", None),
        ("up (a)", 500.0),
        ("router (b and 1 more)", 5.0),
    ]


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0.1, 100))
def test_never_a_regression_within_threshold_or_interval(a: float, b: float, x: float, y: float, limit: float) -> None:
    now, before = Interval(a, a * (1 - x), a * (1 + x)), Interval(b, b * (1 - y), b * (1 + y))
    verdict = judge.compared(now, before, Threshold(limit))
    slower = a / b - 1 > limit / 100
    assert (verdict == judge.REGRESSION) == (slower and now.low > before.high)
    # What is slower one way is never slower the other way.
    assert verdict != judge.REGRESSION or judge.compared(before, now, Threshold(limit)) == judge.FASTER


def test_a_real_run_of_the_sweep_where_it_cannot_run(gated: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the runner itself: here each of them says that there is no GPU, and the gate must not pass."""
    monkeypatch.setattr(gate, "run_sweep", run_sweep)
    code, points, _ = gated.found()
    assert code == 1 and len(points) == 12 and {point["outcome"] for point in points.values()} == {"failed"}
    assert "no NVIDIA GPU" in points[what()]["reason"]
    rows, problems = store.read(gated.folder / "rows" / "ci.jsonl")
    assert not problems and [row["status"] for row in rows[-12:]] == ["unsupported"] * 12


# Baselines.


def test_a_baseline_names_its_environment_and_is_sorted(gated: Gate) -> None:
    data = json.loads(gated.path.read_text())
    assert (data["schema"], data["gpu"], data["threshold"]) == (1, GPU, "median:5%")
    assert data["made"] == "2026-11-30T12:00:00+00:00"
    assert data["environment"]["commit"] == COMMIT and data["environment"]["driver"] == "580.1"
    names = [point["what"] for point in data["points"]]
    assert len(names) == 12 and names == sorted(names)
    point = next(point for point in data["points"] if point["what"] == what())
    assert point["kernels"] == {"up": 600.0, "nvjet": 90.0, "router": 50.0}
    assert list(point["kernels"]) == ["up", "nvjet", "router"]
    assert point["reference"]["value"] == pytest.approx(1.2) and point["device_ms"]["basis"] == "graph"
    assert (point["shape"], point["pass"]) == FORWARD
    read = baselines.read(gated.path)
    assert read.as_dict() == data
    assert not [path for path in gated.path.parent.iterdir() if path != gated.path]


def test_an_update_keeps_thresholds(gated: Gate) -> None:
    def own(data: dict[str, Any]) -> None:
        data["threshold"] = "median:4%"
        next(point for point in data["points"] if point["what"] == what())["threshold"] = "median:2.5%"

    gated.change(own)
    assert gated.run(FakeGpu(slower={FORWARD: 1.3}), update=True)[0] == 0
    read = baselines.read(gated.path)
    assert str(read.threshold) == "median:4%"
    assert {str(point.threshold) for point in read.points if point.what == what()} == {"median:2.5%"}
    assert sum(point.threshold is not None for point in read.points) == 1
    assert gated.run(FakeGpu(slower={FORWARD: 1.3}))[0] == 0
    assert gated.run(update=True, threshold="median:7%")[0] == 0
    assert str(baselines.read(gated.path).threshold) == "median:7%"


@pytest.mark.parametrize(
    ("gpu", "tree", "reason"),
    [
        (FakeGpu(), {"dirty": True}, "uncommitted changes"),
        (FakeGpu(), {"dirty": None, "commit": None}, "set MOEBENCH_COMMIT"),
        (FakeGpu(environment={"dirty": True}), {}, "uncommitted changes"),
        (FakeGpu(failing={FORWARD: ("crashed", "a\nb")}), {}, "forward: failed: crashed: a b"),
        (FakeGpu(failing={FORWARD: ("unstable", "clock")}), {}, "unstable: clock"),
        (FakeGpu(missing={FORWARD}), {}, "missing: no row of this point"),
        (FakeGpu(bad_ratios={FORWARD: ("crashed", "c")}), {}, "ratio over the bound of sonicmoe_triton"),
        (FakeGpu(commits={FORWARD: "f" * 40}), {}, "the commit changed while measuring"),
        (FakeGpu(itself=1.06), {}, "sonicmoe_triton against itself is 1.060, beyond the threshold median:5%"),
    ],
)
def test_an_update_is_refused_in_one_line(bare: Gate, gpu: FakeGpu, tree: dict[str, Any], reason: str) -> None:
    bare.tree = machine(**tree)
    gpu = copy.deepcopy(gpu)
    with pytest.raises(UserError) as raised:
        bare.run(gpu, update=True)
    assert reason in str(raised.value) and "\n" not in str(raised.value)
    assert not bare.path.exists()
    # A dirty tree is found before anything is measured.
    assert bool(gpu.asked) == (not tree)


@given(st.integers(1, 10_000_000))
def test_thresholds_are_read_as_they_are_written(ten_thousandths: int) -> None:
    threshold = Threshold(ten_thousandths / 10_000)
    assert parse_threshold(str(threshold)) == threshold


@given(st.text())
def test_any_other_threshold_is_one_line(text: str) -> None:
    try:
        threshold = parse_threshold(text)
    except UserError as error:
        assert str(error).startswith("--threshold ") and len(str(error).splitlines()) == 1
    else:
        assert 0 < threshold.percent <= 1000 and text.startswith("median:")


@pytest.mark.parametrize(
    "text", ["5%", "median:5", "mean:5%", "median:0%", "median:-5%", "median:1001%", "median:1e1%"]
)
def test_thresholds_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="write median:5%"):
        parse_threshold(text)


def damage(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(changed)


def damage_point(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        table = data["points"][0]
        *above, last = path.split(".")
        for key in above:
            table = table[key]
        table[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damage(schema=2), "schema: 2 is newer than this harness reads (1); update the harness"),
        (damage(schema=None), "schema: missing or unknown"),
        (damage(schema=True), "schema: missing or unknown"),
        (damage(points=[]), "points: missing or empty"),
        (damage(points=[3]), "points[1]: must be an object"),
        (damage(gpu=""), "gpu: missing or not a text"),
        (damage(environment=[]), "environment: missing or not an object"),
        (damage(threshold="5"), "threshold '5': write median:5%"),
        (damage(threshold=5), "threshold: missing or not a text such as median:5%"),
        (damage_point("key", 3), "points[1].key: missing or not a text"),
        (damage_point("threshold", "fast"), "points[1].threshold 'fast'"),
        (damage_point("device_ms.median", "fast"), "points[1].device_ms.median: must be a number greater than zero"),
        (damage_point("device_ms.median", float("nan")), "points[1].device_ms.median"),
        (damage_point("device_ms.ci95", [9, 10]), "points[1].device_ms.ci95: must be ordered"),
        (damage_point("device_ms.ci95", [1]), "points[1].device_ms.ci95: must be [low, high]"),
        (damage_point("device_ms.basis", "host"), "points[1].device_ms.basis: must be one of graph, busy"),
        (damage_point("kernels", {"up": None}), "points[1].kernels: 'up' must be microseconds"),
        (damage_point("reference", {"basis": "graph"}), "points[1].reference.value"),
        (lambda data: data["points"].append(data["points"][0]), "points[13].key: stands there twice"),
    ],
)
def test_damaged_baselines_are_named(gated: Gate, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    gated.change(change)
    with pytest.raises(UserError) as raised:
        gated.run()
    assert reason in str(raised.value) and str(raised.value).startswith(str(gated.path))
    assert "\n" not in str(raised.value) and not gated.gpu.asked
    # Whose thresholds would be lost is not written over.
    with pytest.raises(UserError):
        gated.run(update=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": 1', "\udcff", "[" * 100_000])
def test_what_is_no_baseline(gated: Gate, text: str) -> None:
    gated.path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"not a baseline|not valid JSON|nested more than") as raised:
        gated.run()
    assert "\n" not in str(raised.value)


# The forms.


def hostile(gated: Gate, **files: Path) -> None:
    gpu = FakeGpu(failing={FORWARD: ("crashed", HOSTILE)}, environment={"driver": HOSTILE})
    gpu.extra_kernels = [{"name": "<b>k|@x</b>\x07", "calls": 1.0, "us": 500.0, "role": None}]
    gpu.slower = {(OLMOE, "forward"): 1.2}
    gpu.ratios = {(OLMOE, "forward"): 1.2}
    code, text = gated.run(gpu, **files)
    assert code == 1 and "\u202e" not in text and "\x1b" not in text and "\x00" not in text and "\x07" not in text
    assert "[red]x[/]" in text


def test_json_holds_everything(gated: Gate) -> None:
    file = gated.folder / "deep" / "found.json"
    hostile(gated, json_file=file)
    data = json.loads(file.read_text(encoding="ascii"))
    point = next(point for point in data["points"] if point["what"] == what())
    assert HOSTILE.replace("\ud800", "\ufffd") in point["reason"]
    assert point["outcome"] == "failed" and point["change"] is None
    assert [point["failing"] for point in data["points"]].count(True) == 2 and data["points"][0]["failing"]
    assert data["baseline"]["file"] == str(gated.path) and data["environment"]["commit"] == COMMIT


def test_junit_has_a_case_for_each_point(gated: Gate) -> None:
    file = gated.folder / "junit.xml"
    hostile(gated, junit_file=file)
    root = ElementTree.fromstring(file.read_bytes())
    [suite] = root.findall("testsuite")
    cases = suite.findall("testcase")
    assert len(cases) == 12 == int(suite.attrib["tests"]) and suite.attrib["failures"] == "2"
    failures = {case.attrib["name"]: case.find("failure") for case in cases if case.find("failure") is not None}
    assert set(failures) == {what(), what(OLMOE)}
    assert "\u202e" not in file.read_text(encoding="utf-8")
    bad = failures[what()]
    assert bad is not None and "<script>" in (bad.text or "") and "\n" not in bad.attrib["message"]
    slow = failures[what(OLMOE)]
    assert slow is not None and "up (main_kernel): +20.0%" in (slow.text or "") and slow.attrib["type"] == "regression"


def test_markdown_is_a_verdict_a_table_and_details(gated: Gate) -> None:
    file = gated.folder / "summary.md"
    hostile(gated, markdown_file=file)
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0].startswith("❌ **Regression gate failed on NVIDIA H200: 12 points")
    assert (
        "\u202e" not in text
        and "<script>" not in text
        and "@somebody" not in text
        and "\x1b" not in text
        and "<b>" not in text
    )
    tables = [line for line in lines if line.startswith("|")]
    columns = {unescaped_bars(line) for line in tables}
    assert columns == {8, 6, 4}
    assert text.count("<details>") == text.count("</details>") == 1
    assert sum(what(OLMOE).split()[2] in line for line in tables) == 2
    gated.run(markdown_file=file)
    assert file.read_text(encoding="utf-8").startswith("✅ **Regression gate passed")


def unescaped_bars(line: str) -> int:
    return line.replace("\\|", "").count("|")


def test_a_form_that_cannot_be_written_is_found_before_measuring(gated: Gate) -> None:
    (gated.folder / "file").write_text("")
    for path, reason in ((gated.folder, "is a folder"), (gated.folder / "file" / "x.json", "file is not a folder")):
        for form in ("json", "junit", "markdown"):
            with pytest.raises(UserError, match=f"--{form} .*{reason}"):
                gated.run(**{f"{form}_file": path})
            assert not gated.gpu.asked
    with pytest.raises(UserError, match="--json: --update compares nothing"):
        gated.run(update=True, json_file=gated.folder / "x.json")


# The command line.


def test_on_the_command_line(gated: Gate, command_line: Run) -> None:
    rows = ("--output", gated.folder / "rows")
    assert command_line("regress", *rows)[0] == 0
    gated.gpu = FakeGpu(slower={FORWARD: 1.1}, ratios={FORWARD: 1.1})
    forms = [gated.folder / name for name in ("x.json", "x.xml", "x.md")]
    options: Iterable[object] = ("--json", forms[0], "--junit", forms[1], "--markdown", forms[2], "--repeat", 2)
    code, text, _ = command_line("regress", *rows, *options)
    assert code == 1 and "failed" in text and all(form.stat().st_size for form in forms)
    assert command_line("regress", *rows, "--threshold", "median:12%")[0] == 0
    assert command_line("regress", *rows, "--update")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        ((), GPU, "nvidia_h200.json: no baseline for NVIDIA H200; moebench regress --update makes one"),
        ((), None, "this machine has none"),
        (("--update",), None, "this machine has none"),
        (("--baseline", "none.json"), GPU, "none.json: no baseline"),
        (("--threshold", "fast"), GPU, "--threshold 'fast': write median:5%"),
        (("--repeat", "0"), GPU, "--repeat 0"),
        (("--update", "--junit", "x.xml"), GPU, "--junit: --update compares nothing"),
    ],
)
def test_bad_input_is_one_line(
    bare: Gate, command_line: Run, arguments: tuple[str, ...], name: str | None, reason: str
) -> None:
    bare.name = name
    code, _, error = command_line("regress", *arguments)
    assert code == 2 and reason in error and error.count("\n") == 1 and error.startswith("moebench: ")
    assert not bare.gpu.asked


class WatchedGpu(FakeGpu):
    """Tries to add rows while it measures, as another process would."""

    def run_sweep(self, out: Console, sweep: Sweep, registry: Any, path: Path, **options: Any) -> int:
        refused(path)
        return super().run_sweep(out, sweep, registry, path, **options)


def refused(path: Path) -> None:
    with path.open("ab") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_nobody_else_adds_rows_from_the_first_look_to_the_second(gated: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows would count as this run's, and their lock would keep it from the second look."""
    path = gated.folder / "rows" / "ci.jsonl"
    looked: list[None] = []

    def first_look(*arguments: Any) -> Any:
        looked.append(refused(path))
        return judge.first_look(*arguments)

    monkeypatch.setattr(gate, "first_look", first_look)
    gpu = WatchedGpu(slower={FORWARD: 1.1}, ratios={FORWARD: 1.1})
    assert gated.run(gpu)[0] == 1
    assert looked and len(gpu.asked) == 2
    bare = WatchedGpu()
    assert gated.run(bare, update=True)[0] == 0 and len(bare.asked) == 1


# The gate on trial.


DOWN = {"name": "down_projection_kernel", "calls": 1.0, "us": 270.0, "role": "down"}


class PlantedGpu(FakeGpu):
    """Slower at one point in workers that are told to be, by a part of what the down-projection takes."""

    def run_sweep(self, *args: Any, **kwargs: Any) -> int:
        permille = int(os.environ.get(trial.PERMILLE, "0"))
        if permille:
            assert str(trial.PLANTED) in os.environ[PLUGINS_VARIABLE].split(os.pathsep)
        whole = 1e3 * (1 + int(HEADLINE.split(",")[2]) / 1000)
        self.slower[FORWARD] = self.ratios[FORWARD] = 1 + permille / 1000 * DOWN["us"] / whole
        return super().run_sweep(*args, **kwargs)


def on_trial(gated: Gate, gpu: FakeGpu, **options: Any) -> dict[str, Any]:
    assert gated.run(FakeGpu(extra_kernels=[DOWN]), update=True)[0] == 0
    gated.gpu = gpu
    file = gated.folder / "trial.json"
    asked = {"gates": 3, "tries": 2, "slowdown": 5.5, "shape": HEADLINE, "threshold": Threshold(3.0), "baseline": None}
    trial._main(**asked | options, output=gated.folder / "rows", file=file)
    return dict(json.loads(file.read_text()))


def test_a_trial_counts_false_alarms_and_what_is_caught(gated: Gate) -> None:
    found = on_trial(gated, PlantedGpu())
    assert (len(found["unchanged"]["gates"]), found["unchanged"]["false_alarms"]) == (3, 0)
    assert [len(each) for each in found["unchanged"]["gates"]] == [12, 12, 12]
    its = found["planted"]
    assert (len(its["gates"]), its["caught"]) == (2, 2)
    assert [len(each) for each in its["gates"]] == [2, 2]
    assert its["change"] == pytest.approx([0.055, 0.055], abs=1e-3)
    assert trial.PERMILLE not in os.environ and PLUGINS_VARIABLE not in os.environ


def test_a_trial_judges_each_round_by_itself(gated: Gate) -> None:
    """Of three rounds the second is slow at one point, and at its second look as well."""
    noisy = FakeGpu(slower={FORWARD: [1.0, 1.1, 1.0]}, ratios={FORWARD: 1.1})
    found = on_trial(gated, noisy, tries=0)
    assert found["unchanged"]["false_alarms"] == 1 and "planted" not in found
    outcomes = [{one["what"]: one["outcome"] for one in each}[what()] for each in found["unchanged"]["gates"]]
    assert outcomes == ["ok", "regression", "ok"]


def test_a_slowdown_that_is_not_there_is_not_caught(gated: Gate) -> None:
    assert on_trial(gated, FakeGpu())["planted"]["caught"] == 0


def test_a_slowdown_beyond_the_kernel_is_refused(gated: Gate) -> None:
    gpu = FakeGpu()
    with pytest.raises(UserError, match=r"which cannot give 90\.0% more"):
        on_trial(gated, gpu, slowdown=90.0)
    with pytest.raises(UserError, match="no such point"):
        on_trial(gated, gpu, shape="1,2,3,4,5")
    assert gpu.asked == []  # before anything is measured


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("gates", -1, "--gates -1: must be at least 0"), ("tries", -1, "--tries -1: must be at least 0")]
    + [("slowdown", value, f"--slowdown {value:g}: must be more than 0") for value in (0.0, -5.0, math.nan, 101.0)],
)
def test_a_trial_of_nothing_is_refused(gated: Gate, option: str, value: float, message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        on_trial(gated, FakeGpu(), **{option: value})


def test_the_planted_plugin_multiplies_a_part_of_the_tiles_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from implementations.sonicmoe_triton import SonicMoETriton, algorithm, kernels

    monkeypatch.setattr(SonicMoETriton, "build", SonicMoETriton.build)
    monkeypatch.setattr(algorithm, "down_projection", algorithm.down_projection)
    seen: list[int] = []
    monkeypatch.setattr(kernels, "down_projection", lambda a, w2, routing, bias2: seen.append(int(routing.num_tiles)))
    assert load_registry(extra_folders=[trial.PLANTED]).broken == []
    (module,) = (its for name, its in sys.modules.items() if name.endswith(".slowed_down_projection"))
    assert module.PERMILLE == trial.PERMILLE
    module.plant(250)
    integers = torch.tensor([40], dtype=torch.int32)
    nothing = torch.empty(0, dtype=torch.int32)
    routing = kernels.Routing(nothing, nothing, None, 1, nothing, nothing, nothing, nothing, integers)
    algorithm.down_projection(nothing, nothing, routing)
    assert seen == [10, 40]
