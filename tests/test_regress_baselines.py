"""Baselines of the regression gate: written, kept, read, refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_gate import COMMIT, FORWARD, GPU, FakeGpu, Gate, machine, what
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.regress import baseline as baselines
from harness.regress.baseline import Threshold, parse_threshold


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


def test_a_baseline_measures_points_and_ratios_three_times(bare: Gate) -> None:
    gpu = FakeGpu(slower={FORWARD: [1.0, 1.02, 1.01]}, ratios={FORWARD: [1.0, 1.02, 1.01]}, busy_width=0.02)
    assert bare.run(gpu, update=True)[0] == 0
    read = baselines.read(bare.path)
    point = next(point for point in read.points if point.what == what())
    for found, centre in ((point.time, 1.256), (point.reference and point.reference.ratio, 1.2)):
        assert found is not None
        expected = (1.01 * centre, 0.998 * centre, 1.02 * 1.002 * centre)
        assert (found.median, found.low, found.high) == pytest.approx(expected)
    assert point.busy is not None and point.busy.median == pytest.approx(0.99 * 1.256)
    data = json.loads(bare.path.read_text())
    assert read.as_dict() == data and all("busy_ms" in each for each in data["points"])


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
        (damage_point("busy_ms", 3), "points[1].busy_ms: missing or not an object"),
        (damage_point("busy_ms", {"median": 1.0}), "points[1].busy_ms.ci95: must be [low, high]"),
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
