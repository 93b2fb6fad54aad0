"""The regression gate on made-up rows: what counts as slower, and what is looked at again."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from conftest import ROOT
from fake_gate import FORWARD, HEADLINE, OLMOE, FakeGpu, Gate, ci, what
from hypothesis import given
from hypothesis import strategies as st

from harness import regress as gate
from harness import store
from harness.errors import UserError
from harness.record import MODES
from harness.regress import baseline as baselines
from harness.regress import judge
from harness.regress.baseline import Interval, Threshold
from harness.session import run_sweep

# The sweep, and how its rows are found again.


def test_the_sweep_is_a_dozen_points_each_with_its_ratios_over_the_bound() -> None:
    asked = gate.asked_of(ci())
    assert len(asked) == 12 and len({one.key for one in asked}) == len({one.what for one in asked}) == 12
    ratios = [over for one in asked for over in one.ratios.values()]
    assert all(over.ratio.bound == "gemm" for over in ratios)
    assert len({over.key for over in ratios}) == len(ratios) == 24
    assert sum(ratio.is_a_a for ratio in ci().ratios) == 1


def test_identities_are_those_of_committed_rows() -> None:
    """Were a key built otherwise than a row's, every point would be missing on a real GPU and none here."""
    rows, _ = store.read(ROOT / "results" / "nvidia_h200" / "paper_layers.jsonl")
    found = {store.identity(row, None) for row in rows}
    burst = replace(ci(), options=replace(ci().options, mode="burst"))  # as those rows are timed
    assert sum(one.key in found for one in gate.asked_of(burst)) >= 8
    glue = replace(burst, ratios=[replace(ratio, bound="gemm_glue") for ratio in burst.ratios])
    assert sum(one.ratios["device_ms"].key in found for one in gate.asked_of(glue)) >= 6
    # Nobody takes a ratio of busy times for one of replays, nor the other way.
    busy = {store.identity({**row, "time_kind": "busy"}, None) for row in rows if row["record"] == "ratio"}
    assert sum(one.ratios["busy_ms"].key in busy for one in gate.asked_of(glue)) >= 6 and not busy & found


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


# By which time.


def with_busy(**factors: Any) -> FakeGpu:
    return FakeGpu(busy_width=0.003, **factors)


def judging_by_busy(**factors: Any) -> FakeGpu:
    """For an update: the replays of one point wander."""
    return with_busy(slower={FORWARD: [1.0, 1.05, 1.1]}, **factors)


BY_BUSY_TIMES = "ratio over cublas_bound gemm, of busy times"


def test_a_point_whose_replays_wander_is_judged_by_its_busy_time(gated: Gate) -> None:
    """Its second look is of that time, too: a ratio of replays would say no more than the replays."""
    assert gated.run(judging_by_busy(), update=True)[0] == 0
    assert {point.what: point.by for point in baselines.read(gated.path).points if point.by != "device_ms"} == {
        what(): "busy_ms"
    }
    assert gated.found(with_busy(slower={FORWARD: 1.3}))[1][what()]["outcome"] == "ok"
    gpu = with_busy(busy={FORWARD: 1.055}, busy_ratios={FORWARD: 1.055})
    code, points, _ = gated.found(gpu, threshold="median:3%")
    point = points[what()]
    assert code == 1 and point["outcome"] == "regression" and point["judged_by"] == "busy_ms"
    assert point["change"] == pytest.approx(0.055) and point["baseline_ms"]["median"] == pytest.approx(0.99 * 1.256)
    assert point["second_look"]["how"] == BY_BUSY_TIMES
    again = gpu.asked[1]
    assert not again.points and {ratio.time_kind for ratio in again.ratios} == {"busy"}
    assert [(str(ratio.point.shape), ratio.passes) for ratio in again.ratios if ratio.bound] == [
        (HEADLINE, ("forward",))
    ]
    assert any(ratio.is_a_a for ratio in again.ratios)
    code, points, _ = gated.found(FakeGpu())
    assert code == 1 and points[what()]["reason"] == "the row has no busy time"


def test_a_clock_that_slows_the_bound_as_well_fails_no_point(gated: Gate) -> None:
    """The points judged by busy times included, though these are slower each time that they are measured."""
    assert gated.run(judging_by_busy(), update=True)[0] == 0
    slow = {FORWARD: 1.055, (OLMOE, "forward"): 1.055}
    gpu = with_busy(slower=slow, busy=slow)
    code, points, _ = gated.found(gpu, threshold="median:3%")
    assert code == 0 and sum(point["failing"] for point in points.values()) == 0
    hows = {points[name]["outcome"]: points[name]["second_look"]["how"] for name in (what(), what(OLMOE))}
    assert hows == {"drift": "ratio over cublas_bound gemm"}
    assert points[what()]["second_look"]["how"] == BY_BUSY_TIMES
    # Both kinds are one sweep, each with the method against itself.
    (again,) = gpu.asked[1:]
    assert not again.points
    assert sorted((ratio.time_kind, ratio.bound) for ratio in again.ratios) == [
        ("busy", ""), ("busy", "gemm"), ("device", ""), ("device", "gemm"),
    ]  # fmt: skip
    _, text = gated.run(gpu, threshold="median:3%")
    assert "ms, by its kernels' busy time: +5.5%" in text
    # Of the two ratios only that of the judged time counts.
    one = with_busy(slower=slow, busy=slow, ratios={FORWARD: 1.055}, busy_ratios={(OLMOE, "forward"): 1.055})
    assert gated.run(one, threshold="median:3%")[0] == 0


def test_an_update_measures_ratios_of_busy_times_only_where_these_judge(gated: Gate) -> None:
    gpu = judging_by_busy(busy_ratios={FORWARD: [1.0, 1.001, 1.002]})
    assert gated.run(gpu, update=True)[0] == 0
    first, second = gpu.asked
    assert first.points == ci().points * 3 and all(ratio.is_a_a for ratio in first.ratios) and len(first.ratios) == 3
    assert not second.points
    asked = [
        (str(ratio.point.shape), ratio.passes) for ratio in second.ratios if ratio.time_kind == "busy" and ratio.bound
    ]
    assert asked == [(HEADLINE, ("forward",))] * 3
    assert sum(len(ratio.passes) for ratio in second.ratios if ratio.time_kind == "device") == 3 * 11
    assert sum(ratio.is_a_a for ratio in second.ratios) == 3
    read = {point.what: point.reference for point in baselines.read(gated.path).points}
    assert {name: found.basis for name, found in read.items() if found and found.basis != "graph"} == {what(): "busy"}
    found = read[what()]
    assert found is not None and found.ratio.median == pytest.approx(1.2 * 1.001)


@pytest.mark.parametrize("without", ["reference", "basis", "spread"])
def test_without_a_good_ratio_of_busy_times_the_point_is_measured_by_itself(gated: Gate, without: str) -> None:
    """None in the baseline; one of replays, as baselines had it; one that repeated worse than the busy time."""
    ratios = {FORWARD: [1.0, 1.01, 1.02]} if without == "spread" else {}
    assert gated.run(judging_by_busy(busy_ratios=ratios), update=True)[0] == 0

    def change(data: dict[str, Any]) -> None:
        point = next(point for point in data["points"] if point["what"] == what())
        if without == "reference":
            del point["reference"]
        elif without == "basis":
            point["reference"]["basis"] = "graph"

    gated.change(change)
    gpu = with_busy(busy={FORWARD: 1.055})
    code, points, _ = gated.found(gpu, threshold="median:3%")
    assert code == 1 and points[what()]["second_look"]["how"] == "measured again"
    assert [str(one.shape) for one in gpu.asked[1].points] == [HEADLINE] and not gpu.asked[1].ratios
    code, text = gated.run(with_busy(busy={FORWARD: [1.055, 1.0]}), threshold="median:3%")
    assert code == 0 and "not confirmed, measured again: it stayed within the threshold" in text


@pytest.mark.parametrize("status", ["crashed", "unstable"])
def test_a_second_look_whose_ratio_of_busy_times_has_no_number_fails(gated: Gate, status: str) -> None:
    assert gated.run(judging_by_busy(), update=True)[0] == 0
    gpu = with_busy(busy={FORWARD: 1.055}, bad_ratios={FORWARD: (status, "compiled while timing")})
    code, points, _ = gated.found(gpu, threshold="median:3%")
    assert code == 1 and points[what()]["outcome"] == "failed"
    assert (
        points[what()]["reason"]
        == f"second look (ratio over cublas_bound gemm, of busy times): {status}: compiled while timing"
    )


@pytest.mark.parametrize(
    ("wandering", "by", "how"),
    [
        ("busy", "device_ms", "ratio over cublas_bound gemm"),
        ("ratios", "device_ms", "measured again"),
        ("slower", "busy_ms", BY_BUSY_TIMES),
    ],
)
def test_each_look_is_at_what_repeated_best(gated: Gate, wandering: str, by: str, how: str) -> None:
    gpu = FakeGpu(busy_width=0.003, width=0.002, **{wandering: {FORWARD: [1.0, 1.01, 1.02]}})
    if wandering != "ratios":  # else as wide as the time's
        gpu.ratios = {**gpu.ratios, FORWARD: [1.0, 1.0, 1.0]}
        gpu.slower = {FORWARD: [1.0, 1.001, 1.0], **gpu.slower}
    assert gated.run(gpu, update=True)[0] == 0
    slow = {FORWARD: 1.1}
    code, points, _ = gated.found(with_busy(slower=slow, busy=slow, ratios=slow, busy_ratios=slow))
    point = points[what()]
    assert code == 1 and (point["judged_by"], point["second_look"]["how"]) == (by, how)


def test_a_baseline_measured_once_says_nothing_of_what_repeats(gated: Gate) -> None:
    assert gated.run(with_busy(slower={FORWARD: [1.0, 1.05]}), update=True, repeat=2)[0] == 0
    assert {(point.by, point.busy) for point in baselines.read(gated.path).points} == {("device_ms", None)}


@pytest.mark.parametrize("mode", MODES)
def test_points_and_ratios_of_every_mode_are_found(mode: str, gated: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed ones too, which have no time to say it with."""

    def timed(mode: str) -> None:
        sweep = replace(ci(), options=replace(ci().options, mode=mode))
        monkeypatch.setattr(gate, "load_sweep", lambda name, registry: sweep)

    timed(mode)
    assert gated.run(FakeGpu(), update=True)[0] == 0
    slower = {FORWARD: 1.1, (OLMOE, "forward"): 1.1}
    gpu = FakeGpu(slower=slower, ratios={FORWARD: 1.1}, failing={(OLMOE, "backward"): ("crashed", "an exit")})
    code, points, _ = gated.found(gpu)
    outcomes = {name: point["outcome"] for name, point in points.items() if point["outcome"] != "ok"}
    assert code == 1
    assert outcomes == {what(): "regression", what(OLMOE): "drift", what(OLMOE, "backward"): "failed"}
    # Times of two modes are not compared.
    timed(MODES[MODES.index(mode) - 1])
    code, _, data = gated.found(FakeGpu())
    assert code == 1 and {point["outcome"] for point in data["points"]} == {"missing", "new"}


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
