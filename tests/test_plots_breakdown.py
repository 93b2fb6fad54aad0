"""The breakdown from made-up rows: sums and shares of its stacks, what stands for missing ones, files."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest

import plots
from plots import breakdown as figure
from plots import rows as table
from plots import style
from plots.breakdown_series import UNCLAIMED, Stack, parts, stack

GPU = "NVIDIA Imaginary 100"
SHAPES = (table.HEADLINE_SHAPE, *(shape for _, shape in figure.OTHERS))
KERNELS = (
    {"name": "up_projection_kernel", "calls": 1.0, "us": 600.0, "role": "up"},
    {"name": "_aggregation_kernel", "calls": 1.0, "us": 300.0, "role": None},
    {"name": "never_seen_before", "calls": 2.0, "us": 100.0, "role": None},
)
_clock = itertools.count()


def row(
    implementation: str = "sonicmoe_triton",
    shape: str = table.HEADLINE_SHAPE,
    direction: str = "forward",
    **changes: Any,
) -> dict[str, Any]:
    return {
        "schema": 1, "record": "measurement", "run_id": "test", "sweep": "breakdown", "operation": "moe_layer",
        "timestamp": f"2030-01-01T00:{next(_clock) // 60 % 60:02d}:{next(_clock) % 60:02d}Z", "variant": "",
        "pass": direction, "implementation": implementation, "label": style.label(implementation),
        "shape": dict(zip("TdnEK", (int(size) for size in shape.split(",")), strict=True)), "dtype": "bfloat16",
        "layer": {"activation": "swiglu", "router_convention": "topk_softmax", "bias": False},
        "routing": {"method": "top_k", "distribution": "uniform", "seed": 0, "m_tile": 128}, "status": "ok",
        "reason": "", "kernels": KERNELS, "measured_on": "cuda", "environment": {"gpu": GPU}, **changes,
    }  # fmt: skip


def one(*rows: dict[str, Any], name: str = "sonicmoe_triton", notes: style.Footnotes | None = None) -> Stack:
    layers = table.layers(table.one_gpu(rows))
    return stack(layers, name, "7B", table.HEADLINE_SHAPE, "forward", notes or style.Footnotes())


def test_a_plugins_present_roles_win_and_stored_ones_stand_in() -> None:
    found = one(row())
    assert found.parts == {"up": 600.0, "aggregation": 300.0, UNCLAIMED: 100.0}
    assert found.total == 1000.0 and found.unclaimed == 0.1
    stored = one(row("somebodys_moe"), name="somebodys_moe")
    assert stored.parts == {"up": 600.0, UNCLAIMED: 400.0}


def test_roles_that_are_drawn_together() -> None:
    kernels = [{"name": "k", "us": us, "role": role} for us, role in ((1, "gemm"), (2, "grouped_gemm"), (4, "poetry"))]
    assert parts(kernels, lambda name: None) == {"gemm": 3.0, "other": 4.0}


def test_the_latest_row_counts() -> None:
    assert one(row(), row(kernels=KERNELS[:1])).parts == {"up": 600.0}


def test_what_stands_for_a_missing_stack() -> None:
    notes = style.Footnotes()
    failed = row(status="out_of_memory", reason="tried to allocate 9 GiB", kernels=None)
    assert one(failed, notes=notes) == Stack(text="out of memory¹")
    assert "tried to allocate 9 GiB" in " ".join(notes.lines(100))
    assert one(row(kernels=None)).text == "no kernels profiled"
    assert one(row(direction="backward")).text == "not measured"


def test_one_long_bar_does_not_shorten_the_others() -> None:
    stacks = [Stack({"up": us}) for us in (900.0, 1000.0, 8000.0)]
    assert figure.limit(stacks) == 1000.0
    assert figure.limit([*stacks, Stack(text="crashed")]) == 1000.0
    assert figure.limit(stacks[:2]) == 1000.0
    assert figure.limit([]) == 1.0


@pytest.mark.parametrize(("us", "text"), [(955.4, "955 µs"), (9999.0, "9999 µs"), (11333.0, "11.3 ms")])
def test_sums_for_people(us: float, text: str) -> None:
    assert figure.sum_text(us) == text


@pytest.mark.parametrize(
    "rows",
    [
        [row()],
        [row(status="unstable", reason="clock drifted by 9 %")],
        [row(kernels=None)],
        [row(status="crashed", reason="exit code -11", kernels=None)],
        [row(name, shape, direction) for name in style.KNOWN for shape in SHAPES for direction in figure.PASSES],
    ],
    ids=["one", "unstable", "no_kernels", "failed", "full"],
)
def test_it_draws_from_any_rows(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written = plots.FIGURES[figure.NAME](rows, tmp_path)
    assert [path.name for path in written] == ["breakdown.svg", "breakdown.png"]
    assert all(path.stat().st_size > 5000 for path in written)


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    rows = [row(), row("scattermoe")]
    first, second = (figure.draw(order, tmp_path / name) for name, order in (("a", rows), ("b", rows[::-1])))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
