"""The figure of cost models: what its panels are computed from, and that it draws from every state of the rows."""

from __future__ import annotations

import math
import random
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from test_plots import failed, fake, synthetic

from harness.algorithm_costs import ALGORITHMS
from harness.gpus import rates_of
from harness.shapes import MoEShape
from plots import cost_models as figure
from plots import rows as table

HEADLINE = MoEShape.parse(table.HEADLINE_SHAPE)
T, D, N, E, R = 24576, 1536, 256, 128, 196608


def layers(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return table.layers(table.one_gpu(rows))


def test_intensity_and_roof() -> None:
    # Forward: X twice, H, A twice, Y twice, O, and the weights, two bytes each.
    moved = 2 * (3 * T * D + 4 * R * N + 2 * R * D) + 2 * (3 * E * D * N + E * D)
    assert figure.intensity(HEADLINE, "forward") == pytest.approx(6 * R * N * D / moved)
    rates = rates_of("NVIDIA H200")
    assert rates is not None
    assert figure.roof(100, rates) == pytest.approx(480)
    assert figure.roof(10_000, rates) == 989.4
    # Nothing that was measured lies above the roof.
    stored, _ = table.load()
    drawn = figure._Figure(table.of_gpu(stored, "NVIDIA H200"))
    points = [point for model in drawn.every for found in model.values() for point in found]
    assert len(points) == 2 * 2 * 12
    assert all(0.3 * figure.roof(x, rates) < height < figure.roof(x, rates) for x, height, _ in points)


def test_the_family_is_the_papers_and_those_of_equal_cost() -> None:
    assert figure.family(layers([])).experts == ((1024, 32, 2), (512, 64, 4), (256, 128, 8))
    more = [synthetic(shape=shape, sweep="granularity")
            for shape in ("24576,1536,64,512,32", "24576,1536,256,256,8", "4096,1536,128,256,16")]  # fmt: skip
    shown = figure.family(layers(more))
    assert shown.experts == ((1024, 32, 2), (512, 64, 4), (256, 128, 8), (64, 512, 32))
    assert [shown.x(experts) for experts in shown.experts] == [1.5, 3, 6, 24]


def test_what_is_held() -> None:
    shape = table.HEADLINE_SHAPE
    numbers = {"static": 1, "held": 1000, "peak": 2, "layer": 3}
    measured = synthetic("scattermoe", shape, memory_bytes=numbers)
    broken = failed("crashed", "exit code -6", implementation="scattermoe", shape=shape, direction="backward")
    traced = fake("torch_grouped_mm", shape)
    found = layers([broken, measured, traced, synthetic("torch_grouped_mm", shape, memory_bytes=None)])
    row = figure.held_measured(found, "scattermoe", shape)
    assert row is not None and row["memory_held"] == 1000
    row = figure.held_measured(found, "torch_grouped_mm", shape)
    assert row is not None and row["measured_on"] == "fake"
    assert figure.held_measured(found, "momoe", shape) is None
    row = figure.held_measured(layers([broken]), "scattermoe", shape)
    assert row is not None and row["status"] == "crashed"


def test_the_papers_momoe_without_weights_and_input() -> None:
    bar = figure.held_in_paper(table.paper_memory(), ALGORITHMS["momoe_stored"], HEADLINE)
    assert bar == pytest.approx(1.1102 * 2**30 - 6 * E * D * N - 2 * T * D)
    # One tensor of T·d less than the model, as `held_bytes_momoe` says.
    assert bar + 2 * T * D == pytest.approx(ALGORITHMS["momoe_stored"].held(HEADLINE, 2), rel=0.01)
    assert math.isnan(figure.held_in_paper(table.paper_memory(), ALGORITHMS["momoe"], HEADLINE))


def everything() -> list[dict[str, Any]]:
    rows = [
        synthetic(name, shape, direction)
        for _, shape in table.paper_shapes()
        for name in ("sonicmoe_official", "sonicmoe_triton", "sonicmoe_torch", "scattermoe")
        for direction in figure.PASSES
    ]
    rows += [failed("out_of_memory", "no room", implementation="torch_grouped_mm", shape=shape)
             for _, shape in table.paper_shapes()]  # fmt: skip
    rows += [synthetic("sonicmoe_triton", table.HEADLINE_SHAPE, status="unstable", reason="clock drifted by 9 %")]
    return rows


@pytest.mark.parametrize(
    ("state", "gpu"),
    [
        ("all", "NVIDIA H200"),
        ("all", "NVIDIA Imaginary 100"),
        ("failures", "NVIDIA H200"),
        ("failures", "NVIDIA Imaginary 100"),
        ("fake", ""),
    ],
)
def test_the_figure_from_every_state(state: str, gpu: str, tmp_path: Path) -> None:
    found = {
        "all": everything,
        "fake": lambda: [fake("torch_grouped_mm", shape) for _, shape in table.paper_shapes()],
        "failures": lambda: [failed("timeout", "took 900 s", shape=shape) for _, shape in table.paper_shapes()],
    }[state]()
    for row in found:
        if row["measured_on"] == "cuda":
            row["environment"] = {"gpu": gpu}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = figure.draw(found, tmp_path / "first")
    assert [path.name for path in first] == ["cost_models.svg", "cost_models.png"]
    if state == "all" and gpu == "NVIDIA H200":
        second = figure.draw(random.Random(0).sample(found, len(found)), tmp_path / "second")
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_gpu_without_a_datasheet_has_no_roof() -> None:
    drawn = figure._Figure(table.one_gpu(everything()))
    assert drawn.rates is None and "there is no roof" in " ".join(drawn.caption(500))
    drawn = figure._Figure(table.one_gpu([]))
    assert drawn.gpu == figure.DEFAULT_GPU and drawn.rates == rates_of("NVIDIA H200")
