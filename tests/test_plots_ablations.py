"""The figure of the ablations from made-up rows: its numbers, what stands for missing ones, files."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import plots
from harness.interface import Point
from harness.operations import get_operation
from harness.record import validate
from harness.registry import default_registry
from harness.shapes import MoEShape
from harness.sweep import load_sweep
from implementations._ablation import Ablation
from plots import ablations as figure
from plots import rows as table
from plots import style

GPU = "NVIDIA H200"
SHAPES = [shape for _, shape in table.paper_shapes()]
SERIES = [series for panel in figure.PANELS.values() for series in panel]


def row(operation: str, variant: str, shape: str, **changes: Any) -> dict[str, Any]:
    sizes = dict(zip(("T", "d", "n", "E", "K"), map(int, shape.split(",")), strict=True))
    return {
        "schema": 1, "record": "measurement", "run_id": "test", "timestamp": "2030-01-01T00:00:00Z",
        "sweep": "ablations", "operation": operation, "variant": variant, "pass": "forward", "shape": sizes,
        "dtype": "bfloat16", "layer": {"activation": "swiglu", "router_convention": "topk_softmax", "bias": False},
        "routing": {"method": "top_k", "distribution": "uniform", "seed": 0, "m_tile": 128}, "status": "ok",
        "reason": "", "measured_on": "cuda", "environment": {"gpu": GPU}, **changes,
    }  # fmt: skip


def measured(series: figure.Series, shape: str, ms: float, **changes: Any) -> dict[str, Any]:
    return row(series.operation, series.variant, shape, **{
        "implementation": series.denominator, "label": style.label(series.denominator),
        "device_ms": {"median": ms, "ci95": [0.99 * ms, 1.01 * ms], "samples": 40, "basis": "graph"}, **changes,
    })  # fmt: skip


def ratio(series: figure.Series, shape: str, value: float, **changes: Any) -> dict[str, Any]:
    return row(series.operation, series.variant, shape, **{
        "record": "ratio", "numerator": series.numerator, "denominator": series.denominator,
        "numerator_label": series.numerator, "denominator_label": series.denominator, "time_kind": "device",
        "basis": "graph", "value": value, "ci95": [value - 0.02, value + 0.03], "samples": 60, **changes,
    })  # fmt: skip


def everything() -> list[dict[str, Any]]:
    """All series at all shapes; the time saved is some share of the extra traffic's."""
    made, draws = [], random.Random(0)
    for series in SERIES:
        for shape in SHAPES:
            ms = 0.5 + 3 * draws.random()
            extra = figure.traffic_ms(series, shape, GPU)
            value = 1.1 if math.isnan(extra) else 1 + draws.uniform(0.6, 1.5) * extra / ms
            made += [measured(series, shape, ms), ratio(series, shape, value)]
    return made


def several() -> list[dict[str, Any]]:
    """With a failure, an unstable row and a measurement that is missing."""
    made = everything()
    failed: dict[str, Any] = dict.fromkeys(("value", "ci95", "samples"))
    failed |= {"status": "out_of_memory", "reason": "3 GiB are missing", "timestamp": "2030-01-02T00:00:00Z"}
    made.append(ratio(SERIES[0], SHAPES[3], 1.0) | failed)
    unsteady = {"status": "unstable", "reason": "the clock drifted by 9 %"}
    made.append(ratio(SERIES[1], SHAPES[4], 1.3, timestamp="2030-01-02T00:00:00Z", **unsteady))
    gone = (SERIES[3].operation, SHAPES[5])
    sizes = [int(size) for size in SHAPES[5].split(",")]
    return [
        its for its in made
        if its["record"] == "ratio" or (its["operation"], list(its["shape"].values())) != (gone[0], sizes)
    ]  # fmt: skip


def elsewhere() -> list[dict[str, Any]]:
    """On a GPU of which no datasheet is recorded."""
    return [its | {"environment": {"gpu": "NVIDIA Imaginary 100"}} for its in everything()]


STATES = {
    "everything": everything,
    "several": several,
    "elsewhere": elsewhere,
    "one": lambda: [ratio(SERIES[0], SHAPES[0], 1.2)],
    "other rows": lambda: [measured(SERIES[0], SHAPES[0], 1.0)],
}


def texts(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """Every text in the figure, which is not written."""
    found: set[str] = set()

    def look(drawn: Any, *_: Any) -> list[Path]:
        import matplotlib.text

        found.update(its.get_text() for its in drawn.findobj(matplotlib.text.Text))
        return []

    monkeypatch.setattr(style, "save", look)
    figure.draw(rows, folder)
    return found


def test_made_up_rows_are_valid() -> None:
    for its in several():
        assert validate(its) == []


@pytest.mark.parametrize("state", STATES)
def test_files(state: str, tmp_path: Path) -> None:
    written = figure.draw(STATES[state](), tmp_path)
    assert [path.name for path in written] == ["ablations.svg", "ablations.png"]
    if state == "several":
        first = [path.read_bytes() for path in written]
        assert [path.read_bytes() for path in figure.draw(several(), tmp_path)] == first


def test_what_stands_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert figure.NO_ROWS in texts([], monkeypatch, tmp_path)
    full = texts(everything(), monkeypatch, tmp_path)
    assert {*figure.PANELS, figure.NO_EXTRA, "three kernels", "dW2", "120B"} <= full
    assert not {figure.NO_RATE, figure.NOT_MEASURED} & full
    assert any("4.8 TB/s" in text for text in full)
    assert figure.NO_RATE in texts(elsewhere(), monkeypatch, tmp_path)
    found = texts(several(), monkeypatch, tmp_path)
    assert "¹" in found and any("3 GiB are missing" in text for text in found)
    assert figure.NOT_MEASURED in texts([ratio(SERIES[0], SHAPES[0], 1.2)], monkeypatch, tmp_path)


def at(rows: list[dict[str, Any]], series: figure.Series, shape: str, notes: style.Footnotes) -> figure.Point | None:
    every = table.frame(rows)
    return figure.point(figure.comparisons(every), figure.fused_kernels(every), series, shape, "here", notes)


def numbers(rows: list[dict[str, Any]], series: figure.Series, shape: str) -> figure.Point | None:
    return at(rows, series, shape, style.Footnotes())


def test_time_saved_over_the_extra_traffic() -> None:
    series, shape = SERIES[0], table.HEADLINE_SHAPE
    # R = 24576 * 8 rows of 1536 bf16, written and read.
    extra = 2 * 24576 * 8 * 1536 * 2 / 4.8e12 * 1e3
    assert figure.traffic_ms(series, shape, GPU) == pytest.approx(extra)
    its = numbers([measured(series, shape, 0.5), ratio(series, shape, 1.4)], series, shape)
    assert its is not None
    assert (its.value, its.low, its.high) == pytest.approx((1.4, 1.38, 1.43))
    assert (its.saved, its.saved_low) == pytest.approx((0.4 * 0.5 / extra, 0.38 * 0.5 / extra))
    alone = numbers([ratio(series, shape, 1.4)], series, shape)
    assert alone is not None and alone.value == 1.4 and math.isnan(alone.saved)
    other = measured(series, shape, 0.5, implementation=series.numerator)
    alone = numbers([other, ratio(series, shape, 1.4)], series, shape)
    assert alone is not None and math.isnan(alone.saved)
    assert numbers([measured(series, shape, 0.5)], series, shape) is None
    # The other way round, or of another operation, is another ratio.
    turned = ratio(series, shape, 1.4, numerator=series.denominator, denominator=series.numerator)
    assert numbers([turned, ratio(SERIES[3], shape, 1.4)], series, shape) is None


def test_variants_are_told_apart() -> None:
    first, second = figure.PANELS["(b) gather apart: weight gradients"]
    rows = [ratio(first, SHAPES[0], 1.1), ratio(second, SHAPES[0], 1.2)]
    assert [its and its.value for its in (numbers(rows, series, SHAPES[0]) for series in (first, second))] == [1.1, 1.2]


def test_a_failure_has_no_number_and_a_reason() -> None:
    notes = style.Footnotes()
    failed = ratio(SERIES[0], SHAPES[0], 1.0) | {"status": "crashed", "reason": "exit code 1", "value": None}
    its = at([failed], SERIES[0], SHAPES[0], notes)
    assert its == figure.Point(failed="¹")
    assert "exit code 1" in notes.lines(200)[0]


def kinds() -> Iterator[tuple[str, str]]:
    for name in ("ablation_gather", "ablation_activation", "ablation_epilogue", "ablation_scatter", "ablation_plain"):
        for operation in default_registry().get(name).operations:
            yield name, operation


def test_the_sweep_measures_what_the_figure_draws() -> None:
    sweep = load_sweep("ablations", default_registry())
    measured = {(p.implementation, p.operation, p.variant, str(p.shape)) for p in sweep.points}
    compared = {
        (r.numerator, r.denominator, r.point.operation, r.point.variant, str(r.point.shape)) for r in sweep.ratios
    }
    for series in SERIES:
        for shape in SHAPES:
            where = series.operation, series.variant, shape
            assert (series.numerator, *where) in measured and (series.denominator, *where) in measured
            assert (series.numerator, series.denominator, *where) in compared
    assert {(name, operation) for name, operation, _, _ in measured} >= set(kinds())
    assert sweep.options.passes == ("forward",) and sweep.figure == figure.NAME
    assert sum(its.is_a_a for its in sweep.ratios) == 1


def wide(name: str, operation: str) -> Point:
    """A point whose n is no multiple of 16 bytes."""
    return Point(operation, name, MoEShape(64, 64, 36, 8, 2))


def test_plugins_say_what_they_take_and_what_differs() -> None:
    sweep = load_sweep("ablations", default_registry())
    for point in sweep.points:
        plugin = default_registry().get(point.implementation)
        assert plugin.unsupported_reason(point) is None, point
        assert get_operation(point.operation).name in plugin.operations
    for name, operation in kinds():
        plugin = default_registry().get(name)
        assert isinstance(plugin, Ablation)
        assert set(plugin.differences) == set(plugin.operations)
        assert plugin.differences[operation]
        assert plugin.label in str(plugin.unsupported_reason(wide(name, operation)))
        # Roles of the kernels that are not the layer's own.
        assert plugin.kernel_role("_apart_gather_kernel") == "gather"
        assert plugin.kernel_role("_apart_swiglu_kernel") == "activation"
        assert plugin.kernel_role("_apart_scaled_swiglu_kernel") == "dH"
        assert plugin.kernel_role("gluon_ablation_up_projection_kernel") == "up"
        assert plugin.kernel_role("ablation_hidden_gradient_kernel") == "dH"
        assert plugin.kernel_role("scattered_down_projection_kernel") == "down"
        assert plugin.kernel_role("_aggregation_kernel") == "aggregation"


def test_it_is_registered() -> None:
    assert plots.FIGURES[figure.NAME] == plots.InModule(figure.NAME)
