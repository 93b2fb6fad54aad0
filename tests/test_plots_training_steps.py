"""The figure of training steps from made-up rows."""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_plots import synthetic
from training_rows import GPU, failed, in_turns, session, step
from typer.testing import CliRunner

from harness.cli import app
from plots import rows as table
from plots import style
from plots import training_steps as figure

OURS = figure.REFERENCE


def bars(rows: list[dict[str, Any]]) -> dict[str, dict[str, figure.Bar]]:
    """Title -> label -> bar."""
    found = figure.groups(table.one_gpu(rows))
    return {title: {bar.label: bar for bar in figure.bars_of(its, {}, style.Footnotes(), title)}
            for title, its in found.items()}  # fmt: skip


def test_groups_that_compare_something() -> None:
    found = bars(session())
    assert list(found) == [
        "7B, 43 layers, 24 sequences, recomputing, 24576 tokens a micro-batch, 1 GPU",
        "7B, 24 layers, 24 sequences, 24576 tokens a micro-batch, 1 GPU",
        "1.4B-sparse, 17 layers, 80 sequences, 8192 tokens a micro-batch, 1 GPU",
    ]
    assert [len(its) for its in found.values()] == [4, 2, 2]
    alone = bars([step(layers=20), step(layers=24, dtype="float32")])
    assert [title.rsplit(", ", 1)[1] for title in alone] == ["float32", "1 GPU"]


def test_a_bar_is_the_newest_row_and_its_ratio_the_newest_in_turns() -> None:
    whole = {"layers": 43, "batch": 24, "recompute": True}
    other = {"implementation": "scattermoe", **whole}
    # A longer run of the same steps is the newest; its ratio was measured before and again later.
    rows = [step(slower=1.5, **other), step(**whole)]
    rows += [in_turns(*rows, 1.45), step(slower=1.3, **{**other, "steps": 50}), in_turns(*rows, 1.41)]
    for shuffled in (rows, rows[::-1]):
        (found,) = bars(shuffled).values()
        row = rows[3]["training"]["tokens_per_day_per_gpu"] / 1e9
        scattermoe, ours = found["ScatterMoE"], found["SonicMoE (Triton, ours)"]
        assert scattermoe.value == pytest.approx(row) and scattermoe.low < row < scattermoe.high
        low, high = rows[3]["latency_ms"]["ci95"]
        assert scattermoe.high / scattermoe.low == pytest.approx(high / low)
        assert (scattermoe.ratio.value, ours.ratio.value) == (pytest.approx(1.41), pytest.approx(math.nan, nan_ok=True))
        assert figure.bar_text(scattermoe) == f"{row:.2f}    1.41× [1.40, 1.42]"
        assert figure.bar_text(ours) == f"{ours.value:.2f}"


def test_a_rounding_is_turned_over() -> None:
    top_k, nearest = step("1.4B"), step("1.4B", 0.9, routing="nearest")
    (found,) = bars([top_k, nearest, in_turns(top_k, nearest, 1.1)]).values()
    its = found["SonicMoE (Triton, ours), nearest-128"].ratio
    assert its.value == pytest.approx(1 / 1.1) and its.low < its.value < its.high


def test_busy_times_draw_nothing() -> None:
    sides = [step("1.4B", busy=0.5), step("1.4B", 0.9, routing="nearest", busy=0.5)]
    alone = [{key: value for key, value in row.items() if key != "busy_ms"} for row in sides]
    ratio = in_turns(*sides, 1.1)
    assert bars([*sides, ratio, in_turns(*sides, 0.5, busy=True)]) == bars([*alone, ratio])


def test_tiles_are_bars_of_their_own() -> None:
    sides = [step("1.4B", slower, routing="nearest", m_tile=tile) for tile, slower in ((128, 0.9), (64, 0.8))]
    other = step("1.4B", m_tile=64)
    (found,) = bars([step("1.4B"), *sides, in_turns(other, sides[1], 1.2)]).values()
    small, large = (found[f"SonicMoE (Triton, ours), nearest-{tile}"] for tile in (64, 128))
    assert small.value > large.value and math.isnan(large.ratio.value)
    assert small.ratio.value == pytest.approx(1 / 1.2)


def test_what_is_no_bar() -> None:
    ours, other = step(), step(implementation="scattermoe")
    nothing = [
        step(validation_loss=3.2),
        step(validation_loss=3.1, routing="nearest"),
        in_turns(other, step(implementation="scattermoe", world=2), 0.9),
        {**step("tiny"), "measured_on": "cpu"},
        step(routing="expert_choice"),
        in_turns(ours, other, 1.4),
        failed("crashed", "exit code 1"),
        synthetic(environment={"gpu": GPU}),
    ]
    assert bars(nothing) == {}
    (found,) = bars([*nothing, ours, other]).values()
    # A ratio the other way round; a failure takes no number back, and losses alone are nothing to compare.
    assert found["ScatterMoE"].ratio.value == pytest.approx(1 / 1.4) and len(found) == 2


def test_failures_and_doubt() -> None:
    ours = step(unstable="2 compilations happened while timing")
    rows = [ours, failed("out_of_memory", "3 GiB", implementation="scattermoe"), step(implementation="megablocks")]
    (found,) = bars([*rows, in_turns(rows[2], ours, 2.0)]).values()
    assert found["SonicMoE (Triton, ours)"].unstable and found["ScatterMoE"].text == "out of memory¹"
    assert figure.bar_text(found["ScatterMoE"]) == "out of memory¹"
    assert figure.bar_text(found["MegaBlocks"]).endswith("[1.98, 2.02], unstable")


def test_the_papers_bars() -> None:
    sonic, scatter = figure.paper_bars()
    assert (sonic.value, scatter.value) == (pytest.approx(213 / 64), pytest.approx(225 / 96))
    assert math.isnan(sonic.ratio.value)
    assert scatter.ratio.value == pytest.approx(table.claims()["training-throughput-7b"]["value"], abs=0.005)


def test_drawn_the_same_each_time_and_beside_the_paper_only_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlined = []
    panel = figure._panel
    monkeypatch.setattr(
        figure, "_panel", lambda axes, its: (outlined.append(sum(bar.paper for bar in its)), panel(axes, its))
    )
    rows = [*session(), step("1.4B", 0.6, unstable="something compiled", routing="up")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = figure.draw(rows, tmp_path)
        again = figure.draw(random.Random(0).sample(rows, len(rows)), tmp_path / "again")
        figure.draw([step(layers=42), step(layers=42, implementation="scattermoe")], tmp_path / "fewer")
    assert [path.name for path in written] == ["training_steps.svg", "training_steps.png"]
    assert [path.read_bytes() for path in written] == [path.read_bytes() for path in again]
    assert outlined == [2, 0, 0] * 2 + [0]


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    arguments = ["--results", str(tmp_path / "rows"), "--output", str(tmp_path / "out"), "--figure", figure.NAME]
    ended = CliRunner().invoke(app, ["plot", *arguments])
    assert ended.exit_code == 0 and "nothing drawn: no rows here of training_steps" in ended.output
    assert not (tmp_path / "out").exists()
