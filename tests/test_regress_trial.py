"""The gate on trial: rounds without a change, and slowdowns that are there."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from typing import Any

import pytest
import torch
from fake_gate import FORWARD, HEADLINE, OLMOE, FakeGpu, Gate, what

from harness.errors import UserError
from harness.registry import PLUGINS_VARIABLE, load_registry
from harness.regress import trial
from harness.regress.baseline import Threshold

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
    first, second = noisy.asked
    assert len(first.points) == 24 and not first.ratios and not second.points
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
    class Lost(FakeGpu):
        def run_sweep(self, *args: Any, **kwargs: Any) -> int:
            if trial.PERMILLE in os.environ:
                raise KeyboardInterrupt
            return super().run_sweep(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        on_trial(gated, Lost())
    found = json.loads((gated.folder / "trial.json").read_text())
    assert len(found["unchanged"]["gates"]) == 3 and "planted" not in found
    assert trial.PERMILLE not in os.environ


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
