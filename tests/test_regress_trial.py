"""The gate on trial: rounds without a change, and slowdowns that are there."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gate import FORWARD, HEADLINE, OLMOE, FakeGpu, Gate, ci, registry, what
from rich.console import Console

from harness import regress as gate
from harness import store
from harness.errors import UserError
from harness.interface import Layer, Point
from harness.registry import PLUGINS_VARIABLE, code_hash, load_registry
from harness.regress import baseline as baselines
from harness.regress import trial
from harness.regress.baseline import Threshold
from harness.sweep import RatioPoint

DOWN = {"name": "down_projection_kernel", "calls": 1.0, "us": 270.0, "role": "down"}


@dataclass
class PlantedGpu(FakeGpu):
    """The slowed layer is slower at one point, by a part of what the down-projection takes.

    Attributes:
        gives: how much of the planted work costs time, 1 being what the baseline says.
    """

    gives: float = 1.0

    def measure(self, path: Path, point: Point, pass_: str) -> None:
        self.slow_down(point.implementation)
        super().measure(path, point, pass_)

    def ratio(self, path: Path, ratio: RatioPoint, pass_: str) -> None:
        self.slow_down(ratio.numerator)
        super().ratio(path, ratio, pass_)

    def slow_down(self, implementation: str) -> None:
        permille = 0
        if implementation == trial.SLOWED:
            assert str(trial.PLANTED) in os.environ[PLUGINS_VARIABLE].split(os.pathsep)
            permille = int(os.environ[trial.PERMILLE])
        whole = 1e3 * (1 + int(HEADLINE.split(",")[2]) / 1000)
        self.slower[FORWARD] = self.ratios[FORWARD] = 1 + self.gives * permille / 1000 * DOWN["us"] / whole


def on_trial(gated: Gate, gpu: FakeGpu, **options: Any) -> dict[str, Any]:
    assert gated.run(FakeGpu(extra_kernels=[DOWN]), update=True)[0] == 0
    gated.gpu = gpu
    file = gated.folder / "trial.json"
    asked = {"gates": 3, "tries": 2, "slowdown": 5.5, "shape": HEADLINE, "threshold": Threshold(3.0), "baseline": None}
    asked["workers"] = 2
    trial._main(**asked | options, output=gated.folder / "rows", file=file)
    return dict(json.loads(file.read_text()))


def test_a_trial_counts_false_alarms_and_what_is_caught(gated: Gate) -> None:
    gpu = PlantedGpu()
    found = on_trial(gated, gpu)
    assert (len(found["unchanged"]["gates"]), found["unchanged"]["false_alarms"]) == (3, 0)
    assert [len(each) for each in found["unchanged"]["gates"]] == [12, 12, 12]
    assert found["workers"] == 2 and [len(sweep.points) for sweep in gpu.asked[:2]] == [12, 6]
    its = found["planted"]
    assert (len(its["gates"]), its["caught"]) == (2, 2) and its["what"] == what()
    assert {one["what"].split()[0] for each in its["gates"] for one in each} == {trial.SLOWED}
    assert its["slowdown"]["value"] == pytest.approx(0.055, abs=1e-3)
    low, high = its["slowdown"]["ci95"]
    assert low < 0.055 < high
    assert trial._planted_told(its).startswith("2 of 2 slowdowns caught; measured: +5.5")
    assert [len(each) for each in its["gates"]] == [2, 2]
    assert its["change"] == pytest.approx([0.055, 0.055], abs=1e-3)
    assert trial.PERMILLE not in os.environ and PLUGINS_VARIABLE not in os.environ
    # Nobody takes what is slow on purpose for our layer.
    rows = {name: store.read(gated.folder / "rows" / f"{name}.jsonl")[0] for name in ("ci", "ci_planted")}
    assert {row.get("implementation") for row in rows["ci"]} == {"sonicmoe_triton", None}
    assert {row.get("implementation") for row in rows["ci_planted"]} == {trial.SLOWED, None}
    assert {row["denominator"] for row in rows["ci_planted"] if row["record"] == "ratio"} == {
        "sonicmoe_triton", "cublas_bound", trial.SLOWED,
    }  # fmt: skip


def test_a_baseline_that_judges_by_replays_alone_is_said(gated: Gate, capsys: pytest.CaptureFixture[str]) -> None:
    assert on_trial(gated, FakeGpu(), gates=0, tries=0)["unchanged"] == {"gates": [], "false_alarms": 0}
    assert "every point is judged by its replays; moebench regress --update" in capsys.readouterr().err
    assert gated.run(FakeGpu(busy_width=0.003), update=True)[0] == 0
    kept = {"output": gated.folder / "rows", "file": gated.folder / "trial.json", "workers": 1, "baseline": None}
    trial._main(0, 0, 5.5, HEADLINE, Threshold(3.0), **kept)
    assert "warning" not in capsys.readouterr().err


def test_the_planted_work_is_set_by_what_it_was_measured_to_cost(gated: Gate) -> None:
    its = on_trial(gated, PlantedGpu(gives=0.8))["planted"]
    assert its["slowdown"]["value"] == pytest.approx(0.055 * (0.8 + 0.2 * 0.8), abs=1e-3)
    assert its["change"] == pytest.approx([its["slowdown"]["value"]] * 2, abs=1e-6) and its["caught"] == 2
    assert its["permille"] == pytest.approx(1.2 * 0.055 * 1256 / 270 * 1000, abs=2)


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (PlantedGpu(gives=0.3), "the slowdown as measured is another; measured: +"),
        (PlantedGpu(gives=0.0), "the slowdown as measured is another; measured: +0.00%"),
        (PlantedGpu(bad_ratios={FORWARD: ("crashed", "no kernel")}), "failed: crashed: no kernel; measured: not known"),
    ],
)
def test_a_slowdown_other_than_asked_for_is_not_tried(gated: Gate, gpu: PlantedGpu, reason: str) -> None:
    gpu = copy.deepcopy(gpu)
    its = on_trial(gated, gpu)["planted"]
    assert (its["gates"], its["change"], its["caught"]) == ([], [], 0)
    told = trial._planted_told(its)
    assert told.startswith(f"no slowdown tried: {reason}") and told.endswith("asked for: 5.0% to 6.0%")
    assert not any(point.implementation == trial.SLOWED for sweep in gpu.asked for point in sweep.points)


def test_a_trial_judges_each_round_by_itself(gated: Gate) -> None:
    """Of three rounds the second is slow at one point, and at its second look as well."""
    noisy = FakeGpu(slower={FORWARD: [1.0, 1.1, 1.0]}, ratios={FORWARD: 1.1})
    found = on_trial(gated, noisy, tries=0)
    assert found["unchanged"]["false_alarms"] == 1 and "planted" not in found
    outcomes = [{one["what"]: one["outcome"] for one in each}[what()] for each in found["unchanged"]["gates"]]
    assert outcomes == ["ok", "regression", "ok"]


def test_second_looks_of_all_rounds_are_one_sweep_and_each_round_has_its_own(gated: Gate) -> None:
    backward = (OLMOE, "backward")
    noisy = FakeGpu(
        slower={FORWARD: [1.1, 1.0, 1.1, 1.1], backward: [1.0, 1.1, 1.1, 1.0]},
        ratios={FORWARD: [1.0, 1.1, 1.0], backward: [1.1, 1.0]},
    )
    found = on_trial(gated, noisy, gates=4, tries=0)["unchanged"]
    outcomes = [{one["what"]: one["outcome"] for one in each} for each in found["gates"]]
    assert [each[what()] for each in outcomes] == ["drift", "ok", "regression", "drift"]
    assert [each[what(*backward)] for each in outcomes] == ["ok", "regression", "drift", "ok"]
    assert found["false_alarms"] == 2
    *first, second = noisy.asked
    assert [len(each.points) for each in first] == [12, 12] and not any(each.ratios for each in first)
    assert not second.points
    asked = [(str(ratio.point.shape), ratio.passes) for ratio in second.ratios if ratio.bound]
    assert sorted(asked) == [(OLMOE, ("backward",))] * 2 + [(HEADLINE, ("forward",))] * 3
    assert sum(ratio.is_a_a for ratio in second.ratios) == 1


def test_a_second_look_that_fails_is_its_own_rounds_alone(gated: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker dies in the second round's ratio: that round fails, those before and after it have their own rows."""
    noisy = FakeGpu(slower={FORWARD: 1.1}, ratios={FORWARD: [1.0, 1.0, 1.1]})
    ratios: list[str] = []
    measured = FakeGpu.ratio

    def ratio(self: FakeGpu, path: Any, asked: Any, pass_: str) -> None:
        if asked.bound:
            ratios.append(pass_)
            self.bad_ratios = {FORWARD: ("crashed", "the worker died")} if len(ratios) == 2 else {}
        measured(self, path, asked, pass_)

    monkeypatch.setattr(FakeGpu, "ratio", lambda self, *asked: (ratio if self is noisy else measured)(self, *asked))
    found = on_trial(gated, noisy, gates=4, tries=0)["unchanged"]
    seen = [{one["what"]: one for one in each}[what()] for each in found["gates"]]
    assert [one["outcome"] for one in seen] == ["drift", "failed", "drift", "regression"]
    assert "the worker died" in seen[1]["reason"] and found["false_alarms"] == 2


def test_the_first_half_is_written_before_the_second_is_measured(gated: Gate) -> None:
    class Lost(PlantedGpu):
        def run_sweep(self, *args: Any, **kwargs: Any) -> int:
            if trial.PERMILLE in os.environ:
                raise KeyboardInterrupt
            return super().run_sweep(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        on_trial(gated, Lost())
    found = json.loads((gated.folder / "trial.json").read_text())
    assert len(found["unchanged"]["gates"]) == 3 and "planted" not in found
    assert trial.PERMILLE not in os.environ


def test_a_slowdown_that_the_gate_does_not_see_is_not_caught(gated: Gate) -> None:
    its = on_trial(gated, PlantedGpu(), threshold=Threshold(6.0))["planted"]
    assert (len(its["gates"]), its["caught"]) == (2, 0)


def look_again(gated: Gate, noisy: FakeGpu) -> None:
    """Three gates of one shape, of which the first looks again at the backward, the second at both passes, the third at
    none; each gets its own second looks."""
    gated.gpu = noisy
    run = gate.Run(Console(file=io.StringIO()), registry(), gated.folder / "rows" / "ci.jsonl")
    known = trial.Trial(run, ci(), gate.asked_of(ci()), baselines.read(gated.path)).only(HEADLINE)
    found = [{one.what: one.outcome for one in each} for each in known.gates(3)]
    assert [each[what(HEADLINE, "backward")] for each in found] == ["regression", "drift", "ok"]
    assert [each[what()] for each in found] == ["ok", "regression", "ok"]


def test_second_looks_without_a_ratio_are_one_sweep_too(gated: Gate) -> None:
    """Rows of both passes come of each point: whichever of them a gate asked for, it gets its own."""
    backward = (HEADLINE, "backward")
    making = FakeGpu(busy_width=0.003)
    making.slower = {FORWARD: [1, 1.1], backward: [1, 1.1]}
    making.busy_ratios = {FORWARD: [1, 1.1], backward: [1, 1.1]}
    assert gated.run(making, update=True)[0] == 0
    noisy = FakeGpu(
        busy_width=0.003,
        busy={FORWARD: [1.0, 1.1, 1.0, 1.0, 1.1, 1.1], backward: [1.1, 1.1, 1.0, 1.1, 1.0, 1.1]},
    )
    look_again(gated, noisy)
    assert [len(sweep.points) for sweep in noisy.asked] == [3, 2]


def test_second_looks_by_busy_times_are_one_sweep_too_and_each_gate_has_its_own(gated: Gate) -> None:
    backward = (HEADLINE, "backward")
    wandering = {FORWARD: [1, 1.1, 1.05], backward: [1, 1.1, 1.05]}
    assert gated.run(FakeGpu(busy_width=0.003, slower=wandering), update=True)[0] == 0
    noisy = FakeGpu(
        busy_width=0.003,
        busy={FORWARD: [1.0, 1.1, 1.0], backward: [1.1, 1.1, 1.0]},
        busy_ratios={FORWARD: [1.1], backward: [1.1, 1.0]},
    )
    look_again(gated, noisy)
    first, second = noisy.asked
    assert len(first.points) == 3 and not first.ratios and not second.points
    assert [(ratio.time_kind, ratio.passes) for ratio in second.ratios if ratio.bound] == [
        ("busy", ("backward",)), ("busy", ("backward", "forward")),
    ]  # fmt: skip


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
    + [("workers", 0, "--workers 0: must be at least 1")]
    + [("slowdown", value, f"--slowdown {value:g}: must be more than 0") for value in (0.0, -5.0, math.nan, 101.0)],
)
def test_a_trial_of_nothing_is_refused(gated: Gate, option: str, value: float, message: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        on_trial(gated, FakeGpu(), **{option: value})


def test_the_planted_plugin_multiplies_a_part_of_the_tiles_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own calls, and in none of our layer beside it."""
    from implementations.sonicmoe_triton import SonicMoETriton, algorithm, kernels

    seen: list[int] = []
    monkeypatch.setattr(algorithm, "down_projection", lambda a, w2, routing, bias2: seen.append(int(routing.num_tiles)))
    found = load_registry(extra_folders=[trial.PLANTED])
    assert found.broken == []
    (module,) = (its for name, its in sys.modules.items() if name.endswith(".slowed_down_projection"))
    assert module.PERMILLE == trial.PERMILLE

    class Calls(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            integers, nothing = torch.tensor([40], dtype=torch.int32), torch.empty(0, dtype=torch.int32)
            routing = kernels.Routing(nothing, nothing, None, 1, nothing, nothing, nothing, nothing, integers)
            algorithm.down_projection(x, x, routing, None)
            return x

        parameters = canonical_gradients = None  # type: ignore[assignment]

    monkeypatch.setattr(SonicMoETriton, "build", lambda self, problem: Calls())
    monkeypatch.setenv(trial.PERMILLE, "250")
    slowed, ours = (found.get(name).build(None) for name in (trial.SLOWED, "sonicmoe_triton"))  # type: ignore[arg-type]
    for layer, tiles in ((slowed, [10, 40]), (ours, [40]), (slowed, [10, 40])):
        layer.forward(torch.empty(0))
        assert seen == tiles
        seen.clear()
    assert slowed.notes == ["of the down-projection's tiles, 250 in 1000 are multiplied twice"] and not ours.notes
    # Its rows can be told from ours', and from those of other code.
    assert len(code_hash(found.get(trial.SLOWED))) == 64
