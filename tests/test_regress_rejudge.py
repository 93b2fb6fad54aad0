"""Stored rounds of the gate's sweep, judged again."""

from __future__ import annotations

import functools
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median

import pytest
from conftest import ROOT
from fake_gate import FORWARD, GPU, HEADLINE, OLMOE, FakeGpu, Gate, ci, what
from rich.console import Console

from harness import regress as gate
from harness import store
from harness.errors import UserError
from harness.record import Row
from harness.regress import baseline as baselines
from harness.regress import rejudge, trial
from harness.regress.asked import Asked
from harness.regress.baseline import Baseline, Threshold
from harness.regress.update import new_baseline

COMMITTED = ROOT / "results" / "nvidia_h200" / "ci.jsonl"
PLANTED = COMMITTED.with_name("ci_planted.jsonl")
FIVE, THREE = Threshold(5.0), Threshold(3.0)


def measured(gated: Gate, gpu: FakeGpu, gates: int, threshold: Threshold) -> list[Row]:
    """The rows of so many gates with their second looks, all in one run each, as the trial measures them."""
    gated.gpu = gpu
    path = gated.folder / "trial" / "ci.jsonl"
    run = gate.Run(Console(file=io.StringIO()), None, path)  # type: ignore[arg-type]
    known = gate.of_all_points(baselines.read(gated.path), threshold)
    trial.Trial(run, ci(), gate.asked_of(ci()), known).gates(gates)
    rows, problems = store.read(path)
    assert not problems
    return rows


def runs(rows: Sequence[Row]) -> list[Row]:
    """With the identity that the fake leaves out: a run of points, then one of ratios, and so on."""
    return [{**row, "run_id": "looks" if row["record"] == "ratio" else "points"} for row in rows]


def judged(gated: Gate, rows: Sequence[Row], *thresholds: Threshold) -> list[rejudge.Verdicts]:
    known = gate.of_all_points(baselines.read(gated.path), None)
    asked = rejudge.asked_in_any_mode(ci(), known)
    return rejudge.verdicts(rejudge.blocks_of(rows, asked), known, asked, thresholds, 0.055)


def test_stored_gates_are_judged_as_they_were(gated: Gate) -> None:
    """Of four gates the first and third look slower, one confirmed; at 5 % only the third does."""
    gpu = FakeGpu(slower={FORWARD: [1.04, 1.0, 1.1, 1.0]}, ratios={FORWARD: [1.0, 1.1]})
    rows = runs(measured(gated, gpu, 4, THREE))
    three, five = judged(gated, rows, THREE, FIVE)
    assert (three.gates, three.suspicious, three.settled, three.failing) == (4, 2, 4, 1)
    assert (five.gates, five.suspicious, five.settled, five.failing) == (4, 1, 4, 1)
    assert three.caught == {one.what: 4 for one in gate.asked_of(ci())}
    # Without the threshold at which they were taken nobody can tell whose the second looks are.
    (alone,) = judged(gated, rows, FIVE)
    assert (alone.suspicious, alone.settled, alone.failing) == (1, 3, 0)


def test_second_looks_by_busy_times_count(gated: Gate) -> None:
    """They follow the two runs of an update, whose ratios are nobody's second look."""
    wandering = {FORWARD: [1.0, 1.05, 1.1]}
    (gated.folder / "rows" / "ci.jsonl").unlink()
    assert gated.run(FakeGpu(busy_width=0.003, slower=wandering), update=True)[0] == 0
    made, _ = store.read(gated.folder / "rows" / "ci.jsonl")
    last = max(index for index, row in enumerate(made) if row["record"] == "measurement")
    over = [row for row in made if row.get("denominator_variant")]
    assert {row["time_kind"] for row in over} == {"device", "busy"} and made.index(over[0]) > last
    update = [{**row, "run_id": "ratios" if row in over else "points and itself"} for row in made]
    update.sort(key=lambda row: row["run_id"])
    gpu = FakeGpu(busy_width=0.003, busy={FORWARD: [1.1, 1.0, 1.1]}, busy_ratios={FORWARD: [1.0, 1.1]})
    gates = runs(measured(gated, gpu, 3, THREE))
    for rows in (gates, [*update, *gates], [*gates, *update]):
        (found,) = judged(gated, rows, THREE)
        assert (found.gates, found.suspicious, found.settled, found.failing) == (3, 2, 3, 1)


def test_second_looks_that_are_missing_settle_nothing(gated: Gate) -> None:
    gpu = FakeGpu(slower={FORWARD: 1.1}, ratios={FORWARD: 1.1})
    rows = runs(measured(gated, gpu, 3, THREE))
    bound = [index for index, row in enumerate(rows) if row.get("denominator_variant")]
    del rows[bound[-1]]  # the trial was cut off: two gates have theirs
    (found,) = judged(gated, rows, THREE)
    assert (found.gates, found.suspicious, found.settled, found.failing) == (3, 3, 2, 2)


def test_what_is_a_round_and_what_is_not(gated: Gate) -> None:
    known = baselines.read(gated.path)
    asked = rejudge.asked_in_any_mode(ci(), known)
    ours, _ = store.read(gated.folder / "rows" / "ci.jsonl")
    made = [{**row, "run_id": "made a baseline"} for row in ours]
    assert len(made) > 36 and rejudge.blocks_of(made, asked) == []
    points = [{**row, "run_id": "gates"} for row in ours if row["record"] == "measurement"]
    (block,) = rejudge.blocks_of([*made, *points[:-1]], asked)
    assert len(block.rounds) == 2 and not block.looks  # the third was cut off
    assert all(len(each) == 12 and all(len(rows) == 1 for rows in each.values()) for each in block.rounds)
    assert rejudge.blocks_of(points[:11], asked) == []
    again = [{**row, "run_id": "second looks"} for row in points[:2]]
    assert len(rejudge.blocks_of([*points, *again], asked)[0].rounds) == 3


def test_the_rule_is_tried_on_rounds_that_did_not_make_its_baseline(gated: Gate) -> None:
    """Replays wander at one point, busy times at another: what repeated best sees a slowdown of both."""
    wandering = [1.0, 1.1, 1.05]
    olmoe = (OLMOE, "forward")
    gpu = FakeGpu(slower={FORWARD: wandering * 2}, busy={olmoe: wandering * 2}, busy_width=0.002)
    rounds = rejudge.blocks_of(runs(measured(gated, gpu, 6, Threshold(50.0))), asked := gate.asked_of(ci()))[0].rounds
    found = rejudge.crossed(rounds, THREE, 0.055, 3)
    keys = {one.what: one.key for one in asked}
    assert {rule: its.gates for rule, its in found.items()} == {"device_ms": 6, "busy_ms": 6, rejudge.BEST: 6}
    device, busy, best = found.values()
    assert device.share(keys[what()]) < 1 == device.share(keys[what(OLMOE)])
    assert busy.share(keys[what(OLMOE)]) < 1 == busy.share(keys[what()])
    assert best.share(keys[what()]) == best.share(keys[what(OLMOE)]) == best.share() == 1
    assert best.suspicious == 0
    spread = rejudge.spreads(rounds)[keys[what()]]
    assert spread["device_ms"].least == pytest.approx(1 / 1.05) and spread["busy_ms"].deviation == 0
    # Too few to make a baseline of a half.
    assert {its.gates for its in rejudge.crossed(rounds[:4], THREE, 0.055, 3).values()} == {0}


def test_the_command_prints_it_and_needs_no_gpu(gated: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    gated.name = None
    rows = runs(measured(gated, FakeGpu(busy_width=0.002), 6, THREE))
    file = gated.folder / "stored.jsonl"
    for row in rows:
        store.append(file, row)
    trial.main(rows=file, threshold="median:3%", slowdown=5.5, baseline=None)
    text = capsys.readouterr().out
    assert "6 gates without a change" in text and "median:3%" in text and "what repeated best" in text


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "no such file"), ("", "no row of a GPU; name the baseline by --baseline"), ("rows", "no round of ci")],
)
def test_rows_that_hold_no_round_are_refused(gated: Gate, content: str | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    if content is not None:
        file.write_text("")
    if content:
        store.append(file, runs(measured(gated, FakeGpu(), 1, THREE))[0])
    with pytest.raises(UserError, match=f"^--rows .*{reason}") as raised:
        rejudge.rejudge(Console(file=io.StringIO()), file, None, THREE, 0.055, ci())
    assert "\n" not in str(raised.value)


# What README and docs/method.md say of the rows of 2026-12-01, which were measured in bursts.


@functools.cache
def first_trial() -> tuple[list[Row], Baseline, list[Asked]]:
    """Its rows, the baseline of the run before it, and what both asked for."""
    rows = [row for row in store.read(COMMITTED)[0] if row["run_id"] < "20261201T03"]
    asked = gate.asked_of(replace(ci(), options=replace(ci().options, mode="burst")))
    by_key: dict[str, list[Row]] = {}
    for row in rows:
        if row["run_id"] == rows[0]["run_id"]:
            by_key.setdefault(store.identity(row, None), []).append(row)
    return rows, new_baseline(asked, by_key, None, None, GPU), asked


def prose(name: str) -> str:
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_the_first_trial_is_told_as_its_rows_have_it() -> None:
    rows, known, asked = first_trial()
    five, three = rejudge.verdicts(rejudge.blocks_of(rows, asked), known, asked, [FIVE, THREE], 0.055)
    assert known.threshold == FIVE
    assert (three.gates, three.suspicious, three.settled, three.failing) == (20, 20, 10, 3)
    assert (five.gates, five.suspicious, five.failing) == (20, 17, 0)
    told = (
        "ten gates were measured to the end and which knew replays alone, would have failed three of the ten at "
        "`median:3%` and none at the baseline's 5 %"
    )
    assert told in prose("docs/method.md")


def test_second_looks_took_as_long_as_the_method_says() -> None:
    rows, _, _ = first_trial()
    ends: dict[str, str] = {row["run_id"]: row["timestamp"] for row in rows if row["record"] == "ratio"}
    del ends[rows[0]["run_id"]]  # the baseline
    took = []
    for run, end in ends.items():
        start = datetime.strptime(run.split("-")[0] + "+0000", "%Y%m%dT%H%M%S%z")
        took.append((datetime.fromisoformat(end) - start).total_seconds())
    told = (
        f"a second look with ratios of replays took {min(took):.0f} to {max(took):.0f} s, most of it the start of two"
    )
    assert len(took) == 10 and told in prose("docs/method.md")
    for run, seconds in zip(ends, took, strict=True):
        # A job has several rows and one share of the start.
        shares = {(str(row["shape"]), row["denominator"]): row["overhead_s"]["process_start"]
                  for row in rows if row["run_id"] == run}  # fmt: skip
        assert sum(shares.values()) > seconds / 2
    busy = [row for row in store.read(PLANTED)[0] if row["record"] == "ratio" and row["time_kind"] == "busy"]
    assert Counter(row["denominator"] for row in busy) == {"cublas_bound": 10, "slowed_down_projection": 2}
    (run,) = {row["run_id"] for row in busy}
    start = datetime.strptime(run.split("-")[0] + "+0000", "%Y%m%dT%H%M%S%z")
    all_took = (datetime.fromisoformat(busy[-1]["timestamp"]) - start).total_seconds()
    assert f"ratios of busy times at once took {all_took:.0f} s" in prose("docs/method.md")


def test_the_trial_is_told_as_it_was_written() -> None:
    written = json.loads((COMMITTED.parent / "regress_trial.json").read_text(encoding="utf-8"))
    method = prose("docs/method.md")
    its = written["planted"]
    gates = written["unchanged"]["gates"]
    assert (len(gates), written["unchanged"]["false_alarms"], written["threshold"]) == (20, 0, "median:3%")
    assert {one["outcome"] for gate_ in gates for one in gate_} == {"ok", "faster", "intervals overlap"}
    assert (its["caught"], len(its["gates"]), its["asked_for"]) == (10, 10, 0.055)
    low, high = its["slowdown"]["ci95"]
    value = 100 * its["slowdown"]["value"]
    told = f"measured as {value:.1f} % [{100 * low:.1f}, {100 * high:.1f}], and caught in 10 of 10"
    assert told in method and HEADLINE in its["what"]
    assert "of twenty gates without a change none failed" in prose("README.md")


def second_trial() -> tuple[rejudge.Block, Baseline, list[Asked]]:
    """Its rounds without a change, the baseline made just before, and what both asked for."""
    known = baselines.read(ROOT / "results" / "baselines" / "nvidia_h200.json")
    asked = rejudge.asked_in_any_mode(ci(), known)
    rows = [row for row in store.read(COMMITTED)[0] if "20261201T15" <= row["run_id"] < "20261201T16"]
    (block,) = rejudge.blocks_of(rows, asked)
    return block, known, asked


def test_what_the_baseline_sees_at_each_point_is_told() -> None:
    block, known, asked = second_trial()
    (three,) = rejudge.verdicts([block], known, asked, [THREE], 0.055)
    assert (three.gates, three.suspicious) == (20, 0)
    seen = {(str(one.point.shape), one.pass_): three.caught.get(one.what, 0) for one in asked}
    blind = {key: count for key, count in seen.items() if count < 20}
    assert blind == {
        ("16384,4096,1024,512,8", "backward"): 19,
        ("16384,2048,1024,64,8", "forward"): 7,
        ("16384,2048,1024,64,8", "backward"): 7,
        ("32768,4096,1024,128,8", "forward"): 5,
    }
    told = (
        "20 of 20 at seven of the other eleven, 19 at the backward of `16384,4096,1024,512,8`, 7 at each pass of "
        "`16384,2048,1024,64,8`, 5 at the forward of `32768,4096,1024,128,8`"
    )
    assert seen[HEADLINE, "forward"] == 20 and len(seen) - 1 - len(blind) == 7 and told in prose("docs/method.md")
    judged = {point.key: point.judged for point in known.points}
    wide = [
        (judged[one.key].high - judged[one.key].low) / judged[one.key].median for one in asked
        if blind.get((str(one.point.shape), one.pass_), 20) < 10
    ]  # fmt: skip
    assert f"span {100 * min(wide):.1f} to {100 * max(wide):.1f} %" in prose("docs/method.md")


def test_the_rule_on_rounds_of_several_processes_is_told() -> None:
    block, _, asked = second_trial()
    found = rejudge.crossed(block.rounds, THREE, 0.055, 3)
    alarms = {rule: 100 * its.suspicious / its.gates for rule, its in found.items()}
    seen = {rule: 100 * its.share() for rule, its in found.items()}
    told = (
        f"`device_ms` alone comes to {alarms['device_ms']:.1f} and {seen['device_ms']:.0f} %, `busy_ms` alone to "
        f"{alarms['busy_ms']:.1f} and {seen['busy_ms']:.0f} %, the rule to {alarms[rejudge.BEST]:.1f} and "
        f"{seen[rejudge.BEST]:.0f} %"
    )
    assert told in prose("docs/method.md")
    short = [one for one in asked if str(one.point.shape) in (HEADLINE, "40960,768,256,128,8")]
    assert all(found[rejudge.BEST].share(one.key) == 1 for one in short)


def test_the_rule_is_as_good_as_the_method_says() -> None:
    rows, _, asked = first_trial()
    (block,) = rejudge.blocks_of(rows, asked)
    found = rejudge.crossed(block.rounds, THREE, 0.055, 3)
    method = prose("docs/method.md")
    names = {
        "device_ms": "`device_ms` alone",
        "busy_ms": "`busy_ms` alone",
        rejudge.BEST: f"the one that {rejudge.BEST[5:]}",
    }
    for rule, its in found.items():
        assert f"| {names[rule]} | {100 * its.suspicious / its.gates:.1f} % | {100 * its.share():.0f} % |" in method
    short = [one for one in asked if str(one.point.shape) in (HEADLINE, "40960,768,256,128,8")]
    assert len(short) == 4 and all(found[rejudge.BEST].share(one.key) == 1 for one in short)


def test_another_process_measured_the_times_that_the_rule_judges_by_as_the_rounds_did() -> None:
    rows, _, asked = first_trial()
    (block,) = rejudge.blocks_of(rows, asked)
    off: dict[str, dict[str, list[float]]] = {"short": {}, "long": {}}
    for one in asked:
        shape = one.point.shape
        kind = "long" if shape.d == 4096 else "short" if shape.n == 256 else ""
        before = next(row for row in rows if store.identity(row, None) == one.key)
        for name in ("device_ms", "busy_ms") if kind else ():
            centre = median(each[one.key][0][name]["median"] for each in block.rounds)
            off[kind].setdefault(name, []).append(abs(before[name]["median"] / centre - 1))
    assert len(off["short"]["busy_ms"]) == 4 and len(off["long"]["device_ms"]) == 6
    assert max(off["short"]["busy_ms"]) < 0.012 and max(off["long"]["device_ms"]) < 0.014
    assert f"{max(off['short']['device_ms']):.1%} {max(off['long']['busy_ms']):.1%}" == "5.7% 13.8%"
    times = [each[asked[0].key][0] for each in block.rounds]
    fast = [row for row in times if row["environment"]["during_samples"]["sm_clock_mhz"]["median"] >= 1965]
    ends = sorted(row["device_ms"]["median"] for row in fast)
    assert asked[0].what == what() and (len(fast), f"{ends[0]:.3f}", f"{ends[-1]:.3f}") == (9, "0.964", "1.026")
