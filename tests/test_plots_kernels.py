"""The figure of single kernels from made-up rows."""

from __future__ import annotations

import itertools
import math
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from test_plots import failed, ratio, synthetic

import plots
from harness.interface import KERNELS
from harness.operations import OPERATIONS
from harness.record import validate
from plots import kernels as figure
from plots import rows as table
from plots import style

SPEED = {"sonicmoe_triton": 1.0, "sonicmoe_official": 0.93, "torch_kernels": 0.55}
ALL = [(operation, variant) for operation in KERNELS for variant in OPERATIONS[operation].variants]
HEADLINE = table.HEADLINE_SHAPE
UP = figure.PANELS[0]


def row(
    name: str = "sonicmoe_triton", operation: str = "grouped_gemm", variant: str = "up", shape: str = HEADLINE,
    **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """A row of one kernel: TFLOPS where it multiplies, GB/s always; the busy time is 0.9 of the device time."""
    T, d, n, _, K = (int(size) for size in shape.split(","))
    moves = operation in ("expert_aggregation", "topk_router")
    speed = SPEED.get(name, 0.4) * (1.15 if variant == "contiguous" else 1.0)
    ms = (2e-9 * T * K * d / 3.9 if moves else 4e-9 * T * K * d * n / 690) / speed
    fields: dict[str, Any] = {
        "operation": operation, "variant": variant, "sweep": "kernels", "memory_bytes": None,
        "device_ms": {"median": ms, "ci95": [ms * 0.98, ms * 1.03], "samples": 40, "basis": "graph"},
        "busy_ms": {"median": 0.9 * ms, "ci95": [0.88 * ms, 0.93 * ms], "samples": 8},
        "gb_per_s": {"device": 3900.0 * speed, "host": 3000.0 * speed},
        "tflops": None if moves else {"device": 690.0 * speed, "host": 500.0 * speed, "hardware": 700.0 * speed},
    }  # fmt: skip
    return synthetic(name, shape, **{**fields, **changes})


def row_of_a_crash() -> dict[str, Any]:
    return failed("crashed", "exit code -11") | {"operation": "grouped_gemm", "variant": "up", "sweep": "kernels"}


def kernel_ratio(numerator: str, value: float, operation: str, variant: str, shape: str, **changes: Any) -> Any:
    place = {"operation": operation, "variant": variant, "sweep": "kernels", "pass": "forward"}
    return ratio(numerator, figure.OURS, shape, value, **{**place, **changes})


def everything(skip: tuple[str, ...] = ("down_aggregation",)) -> list[dict[str, Any]]:
    """All of it, with one failure, one unstable point and one that nobody measured."""
    found = []
    draw = random.Random(0)
    for (operation, variant), (model, shape) in itertools.product(ALL, table.paper_shapes()):
        if operation in skip:
            continue
        for name, speed in SPEED.items():
            place = {"operation": operation, "variant": variant, "shape": shape}
            if (name, operation, model) == ("sonicmoe_official", "topk_router", "30B"):
                found.append(failed("crashed", "exit code -11", implementation=name, shape=shape)
                             | {"operation": operation, "variant": variant, "sweep": "kernels"})  # fmt: skip
            elif (name, operation, shape) == ("torch_kernels", "hidden_gradient", HEADLINE):
                found.append(row(name, **place, status="unstable", reason="clock drifted by 9 %"))
            elif (name, variant, shape) != ("torch_kernels", "dW2", HEADLINE):
                found.append(row(name, **place))
            if name != figure.OURS:
                found.append(kernel_ratio(name, draw.uniform(0.97, 1.05) / speed, operation, variant, shape))
    return found


def bar(rows: list[dict[str, Any]], panel: figure.Panel = UP, name: str = "sonicmoe_triton") -> figure.Bar:
    kernels = table.single_kernels(table.one_gpu(rows), figure.NAME)
    return figure.kernel_bar(kernels, panel, name, "7B", HEADLINE, style.Footnotes())


def test_the_rows_keep_the_rows_rules() -> None:
    assert [problem for one in everything(()) for problem in validate(one)] == []


def test_every_operation_has_its_panel() -> None:
    drawn = [(panel.operation, panel.variant) for panel in figure.PANELS]
    assert sorted(drawn) == sorted(set(ALL) - {("expert_aggregation", figure.YARDSTICK)})
    for panel in figure.PANELS:
        assert (panel.column == "gb_per_s") == (panel.operation in ("expert_aggregation", "topk_router"))


def test_rates_are_over_the_busy_time() -> None:
    drawn = bar([row()])
    assert drawn.value == pytest.approx(690 / 0.9)
    assert (drawn.low, drawn.high) == (pytest.approx(690 / 0.93), pytest.approx(690 / 0.88))
    aggregation = next(panel for panel in figure.PANELS if panel.operation == "expert_aggregation")
    moved = bar([row(operation="expert_aggregation", variant="gather")], aggregation)
    assert moved.value == pytest.approx(3900 / 0.9)
    assert moved.low < moved.value < moved.high
    assert bar([row(busy_ms=None)]).value == pytest.approx(690)


def test_what_stands_for_a_missing_bar() -> None:
    assert bar([row()], name="torch_kernels").text == "not measured"
    assert bar([row(variant="down")]).text == "not measured"
    crash = row_of_a_crash()
    assert bar([crash], name="sonicmoe_official").text == "crashed¹"
    assert bar([row(device_ms=None, busy_ms=None)]).text == "no device time"
    assert bar([row(dtype="float16")]).text == "not measured"
    assert bar([row(status="unstable", reason="clock drifted by 9 %")]).unstable


def test_other_operations_and_sweeps_are_not_drawn() -> None:
    rows = [synthetic(), row(sweep="ablations"), row(operation="expert_aggregation", variant="contiguous")]
    assert math.isnan(bar(rows).value)
    kernels = table.single_kernels(table.one_gpu(rows), figure.NAME)
    assert list(kernels["variant"]) == ["contiguous"]
    assert set(table.layers(table.one_gpu(rows))["operation"]) == {"moe_layer"}


def test_the_ratio_is_of_the_fastest_other() -> None:
    place = ("grouped_gemm", "up", HEADLINE)

    def value(*rows: dict[str, Any]) -> float:
        return figure.fastest_other(table.one_gpu(rows), UP, HEADLINE)

    torch_kernels = kernel_ratio("torch_kernels", 1.8, *place)
    official = kernel_ratio("sonicmoe_official", 1.1, *place)
    assert value(torch_kernels, official) == 1.1
    assert value(torch_kernels) == 1.8
    elsewhere = kernel_ratio("sonicmoe_official", 1.03, *place, sweep="ablations")
    itself = kernel_ratio(figure.OURS, 0.999, *place)
    other_size = kernel_ratio("sonicmoe_official", 1.02, "grouped_gemm", "down", HEADLINE)
    unstable = kernel_ratio("sonicmoe_official", 1.05, *place, status="unstable", reason="drift")
    assert value(torch_kernels, itself, other_size, unstable, elsewhere) == 1.8
    assert math.isnan(value(itself, other_size)) and math.isnan(value())
    later = {**official, "value": 1.2, "ci95": [1.19, 1.21], "timestamp": "2031-01-01T00:00:00Z"}
    assert value(torch_kernels, official, later) == 1.2


def test_the_yardstick_is_the_fastest_in_order() -> None:
    rows = [row(name, "expert_aggregation", variant) for name in SPEED for variant in ("gather", "contiguous")]
    kernels = table.single_kernels(table.one_gpu(rows), figure.NAME)
    assert figure.in_order(kernels, HEADLINE) == pytest.approx(3900 * 1.15 / 0.9)
    assert math.isnan(figure.in_order(kernels, table.paper_shapes()[0][1]))


@pytest.mark.parametrize("state", ["layers", "unknown", "failures", "all", "optional"])
def test_the_figure_from_every_state(state: str, tmp_path: Path) -> None:
    found = {
        "layers": lambda: [synthetic()],
        "unknown": lambda: [row("my_kernels", "expert_aggregation", "gather")],
        "failures": lambda: [row_of_a_crash()],
        "all": everything,
        "optional": lambda: everything(()),
    }[state]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = plots.FIGURES[figure.NAME](found, tmp_path / "first")
    assert [path.name for path in first] == ["kernels.svg", "kernels.png"]
    if state == "all":
        second = figure.draw(random.Random(0).sample(found, len(found)), tmp_path / "second")
        assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
