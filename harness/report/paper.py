"""The paper's twelve layers: its own values beside what was measured on each GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pandas as pd

from harness.report import text
from harness.report.tables import Cell, Column, Number, Table
from harness.report.text import NONE
from plots import rows as table
from plots import style

#: Quantity -> column of the rows' table; passes in the order of the paper's figures.
QUANTITIES = {
    "forward TFLOPS": ("tflops", "forward"),
    "backward TFLOPS": ("tflops", "backward"),
    "forward + backward TFLOPS": ("tflops", "forward_backward"),
    "memory GiB": ("memory_layer", ""),
}
#: 6, 12 and 18 FLOPs for each routed row and n·d.
_FLOPS = {"forward": 6.0, "backward": 12.0}


@dataclass(frozen=True)
class Value:
    """A measured value with its interval, or the status of the failure in its place; ``value`` NaN: none."""

    value: float
    low: float = math.nan
    high: float = math.nan
    status: str = ""

    @property
    def text(self) -> str:
        if math.isnan(self.value):
            return style.STATUS_TEXT.get(self.status, self.status) or NONE
        return text.with_interval(self.value, self.low, self.high) + (
            " (unstable)" if self.status == "unstable" else ""
        )


@dataclass(frozen=True)
class Layer:
    """One quantity of one layer by one implementation, in the paper (NaN: not there) and on each GPU."""

    model: str
    shape: str
    quantity: str
    implementation: str
    label: str
    paper: float
    measured: dict[str, Value]


def _paper_values() -> dict[tuple[str, str, str], float]:
    """By implementation, shape and quantity. Forward + backward follows from the two, which take 6 and 12 FLOPs."""
    rates = {
        (line["implementation"], line["shape"], line["pass"]): float(line["value"])
        for line in table.paper_tflops().to_dict("records")
    }
    found = {
        (line["implementation"], line["shape"], "memory GiB"): float(line["value"])
        for line in table.paper_memory().to_dict("records")
    }
    for (name, shape, pass_), value in rates.items():
        found[name, shape, f"{pass_} TFLOPS"] = value
    for name, shape in {key[:2] for key in rates}:
        times = [flops / rates.get((name, shape, pass_), math.nan) for pass_, flops in _FLOPS.items()]
        found[name, shape, "forward + backward TFLOPS"] = sum(_FLOPS.values()) / sum(times)
    return found


def _measured(rows: pd.DataFrame, gpu: str) -> tuple[dict[tuple[str, str, str], Value], dict[str, str]]:
    chosen = table.layers(table.latest(table.of_gpu(rows, gpu)))
    chosen = chosen[chosen["measured_on"] == "cuda"]
    found: dict[tuple[str, str, str], Value] = {}
    for quantity, (column, pass_) in QUANTITIES.items():
        part = chosen[chosen["pass"] == pass_] if pass_ else chosen
        scale = table.GIB if column == "memory_layer" else 1.0
        for names, group in part.groupby(["implementation", "shape"], sort=False):
            name, shape = cast("tuple[str, str]", names)
            row = table.best_row(group, column)
            if row is None:
                continue
            # Memory is counted, so it has no interval.
            low, high = (float(row.get(f"{column}_{end}", math.nan)) for end in ("low", "high"))
            found[name, shape, quantity] = Value(float(row[column]) / scale, low, high, str(row["status"]))
    return found, dict(zip(chosen["implementation"], chosen["label"], strict=True))


def layers(results: Path) -> tuple[list[Layer], list[str]]:
    """The paper's layers, those that nobody has a value for left out, and the GPUs with rows."""
    rows, _ = table.load(results)
    gpus = table.gpus(rows)
    paper = _paper_values()
    measured: dict[str, dict[tuple[str, str, str], Value]] = {}
    labels: dict[str, str] = {}
    for gpu in gpus:
        measured[gpu], found = _measured(rows, gpu)
        labels |= found
    names = style.ordered({key[0] for key in paper} | {key[0] for values in measured.values() for key in values})
    lines = []
    for quantity in QUANTITIES:
        for model, shape in table.paper_shapes():
            for name in names:
                key = (name, shape, quantity)
                here = {gpu: measured[gpu][key] for gpu in gpus if key in measured[gpu]}
                value = paper.get(key, math.nan)
                if here or not math.isnan(value):
                    label = text.plain(style.label(name, labels))
                    lines.append(Layer(model, shape, quantity, text.plain(name), label, value, here))
    return lines, [text.plain(gpu) for gpu in gpus]


def as_table(lines: Iterable[Layer], gpus: Iterable[str]) -> Table:
    """One line for each quantity, layer and implementation."""
    gpus = list(gpus)
    rows: list[tuple[Cell, ...]] = []
    for line in lines:
        paper = None if math.isnan(line.paper) else line.paper
        cells: list[Cell] = [line.quantity, line.model, line.shape, line.label, Number(paper, text.number(paper))]
        for gpu in gpus:
            found = line.measured.get(gpu, Value(math.nan))
            value = None if math.isnan(found.value) else found.value
            share = value / paper if value and paper else None
            cells += [Number(value, found.text), Number(share, f"{share:.2f}×" if share else NONE)]
        rows.append(tuple(cells))
    columns = [Column("quantity", filter=True), Column("model", filter=True), Column("shape T,d,n,E,K"),
               Column("implementation", filter=True), Column("paper, H100", "number")]  # fmt: skip
    for gpu in gpus:
        columns += [Column(gpu, "number"), Column(f"{gpu} / paper", "number")]
    return Table(
        "layers", "The paper's twelve layers",
        "The latest rows beside the values read off the paper's figures 13 and 14. TFLOPS: model FLOPs over the time "
        "in which kernels run, as the figures draw it; memory: allocated after the forward pass, weights and input "
        "included. Rows of a table were timed one after another; which of two is faster, ratios say. The paper's are "
        "of H100: equal ratios between implementations are a reproduction, equal TFLOPS are not to be expected.",
        tuple(columns), tuple(rows),
    )  # fmt: skip
