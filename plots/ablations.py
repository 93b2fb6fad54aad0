"""What each fusion buys: time with it taken apart over time fused, and how much of the extra traffic's time shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.costs import ELEMENT_BYTES
from harness.gpus import rates_of
from harness.shapes import MoEShape
from plots import rows as table
from plots import style
from plots.granularity import UNSTABLE

NAME = "ablations"
NO_ROWS = (
    "No rows yet: nobody has taken our kernels' fusions apart here.\nOn a machine with a GPU:  moebench run ablations"
)
NO_RATE = "no bandwidth is recorded for this GPU\n(harness/gpus.py)"
NOT_MEASURED = "not measured"
NO_EXTRA = "no bytes more: the same ones\nin another order"
CAPTION = (
    "Above, in each panel: time apart / time fused, both in one process, with 95 % intervals; above 1 the fusion pays. "
    "Below: the time that is saved, over the time that the bytes saved would take at the datasheet's bandwidth. At 1 "
    "the fused kernel does for nothing what the separate ones move bytes for: its traffic hides behind the "
    "computation. Below 1 it pays for a part of it itself; above 1 separate kernels cost more than their traffic at "
    "full bandwidth, which no kernel reaches.",
    "Bytes saved, with R = T·K rows: a copy of the rows is written and read, 2·R·d elements; SwiGLU apart reads H, "
    "2·R·n; dH's epilogue apart writes and reads dA', 2·R·n, in one kernel; in three it reads dA' once more and H "
    "twice more, 7·R·n. X and dO count once either way.",
    "Kernels apart have the fused kernels' tiles and are not tuned anew; copied rows are loaded by the same "
    "instructions as gathered ones, not by TMA. (f): the down-projection stores each row at its token's place, against "
    "contiguous stores and gather-and-sum; plain kernels on both sides.",
)
#: Places of the twelve shapes: a gap between models.
GAP = 0.7


@dataclass(frozen=True)
class Series:
    """One ratio over the paper's shapes.

    Attributes:
        text: in the legend of a panel with several.
        operation, variant, numerator, denominator: of the ratio rows.
        extra: elements moved more by the numerator, from the shape; None: none.
    """

    text: str
    operation: str
    variant: str
    numerator: str
    denominator: str = "sonicmoe_triton"
    extra: Callable[[MoEShape], int] | None = None


def _copy(shape: MoEShape) -> int:
    return 2 * shape.routed_rows * shape.d


def _hidden(times: int) -> Callable[[MoEShape], int]:
    return lambda shape: times * shape.routed_rows * shape.n


#: Title -> what stands in the panel.
PANELS: dict[str, tuple[Series, ...]] = {
    "(a) gather apart: up-projection": (Series("", "grouped_gemm_gather_m", "up", "ablation_gather", extra=_copy),),
    "(b) gather apart: weight gradients": (
        Series("dW1", "grouped_gemm_gather_k", "dW1", "ablation_gather", extra=_copy),
        Series("dW2", "grouped_gemm_gather_k", "dW2", "ablation_gather", extra=_copy),
    ),
    "(c) gather apart: dH": (Series("", "hidden_gradient", "", "ablation_gather", extra=_copy),),
    "(d) SwiGLU apart: up-projection": (
        Series("", "grouped_gemm_gather_m", "up", "ablation_activation", extra=_hidden(2)),
    ),
    "(e) epilogue apart: dH": (
        Series("three kernels", "hidden_gradient", "", "ablation_activation", extra=_hidden(7)),
        Series("one kernel", "hidden_gradient", "", "ablation_epilogue", extra=_hidden(2)),
    ),
    "(f) scattered stores": (Series("", "down_aggregation", "", "ablation_scatter", denominator="ablation_plain"),),
}
_LOOKS = ((style.BLUE, "o"), (style.VERMILLION, "s"))


@dataclass(frozen=True)
class Point:
    """A series at one shape: the ratio, and the time saved over the extra traffic's own; NaN where there is none.

    ``failed``: the note's mark where there is a row, and it has no number."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    saved: float = math.nan
    saved_low: float = math.nan
    saved_high: float = math.nan
    unstable: bool = False
    failed: str = ""


def _chosen(rows: pd.DataFrame) -> pd.DataFrame:
    """Forward rows of the ablations' operations, as the sweep measures them."""
    operations = {series.operation for panel in PANELS.values() for series in panel}
    return table.by_precedence(
        rows[
            rows["operation"].isin(operations)
            & (rows["pass"] == "forward")
            & (rows["measured_on"] == "cuda")
            & rows["dtype"].isin(["bfloat16", ""])
            & rows["distribution"].isin(["uniform", ""])
        ]
    )


def comparisons(rows: pd.DataFrame) -> pd.DataFrame:
    """The ratio rows that a panel shows."""
    chosen = _chosen(rows)
    chosen = chosen[(chosen["record"] == "ratio") & chosen["time_kind"].isin(["device", ""])]
    wanted = {f"{series.numerator} / {series.denominator}" for panel in PANELS.values() for series in panel}
    return chosen[(chosen["numerator"] + " / " + chosen["denominator"]).isin(wanted)]


def _at(rows: pd.DataFrame, series: Series, shape: str) -> pd.DataFrame:
    return rows[
        (rows["operation"] == series.operation)
        & rows["variant"].isin([series.variant, ""])
        & (rows["shape"] == shape)
    ]  # fmt: skip


def traffic_ms(series: Series, shape: str, gpu: str) -> float:
    """Milliseconds that a series' extra bytes (bfloat16) take at the datasheet's bandwidth; NaN: there are none, or no
    datasheet."""
    rates = rates_of(gpu)
    if rates is None or series.extra is None:
        return math.nan
    return series.extra(MoEShape.parse(shape)) * ELEMENT_BYTES["bfloat16"] / rates.bytes_per_s * 1e3


def fused_kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """The measurements of what the ratios of `comparisons` are of."""
    chosen = _chosen(rows)
    return chosen[chosen["record"] == "measurement"]


def point(
    compared: pd.DataFrame, fused: pd.DataFrame, series: Series, shape: str, where: str, notes: style.Footnotes
) -> Point | None:
    """A series at one shape, the reason of a failure to ``notes``; None without a row. The time saved is
    (ratio - 1) times the fused kernel's, so that it is as exact as the ratio.

    Args:
        compared: of `comparisons`.
        fused: of `fused_kernels`.
    """
    own = _at(compared, series, shape)
    row = table.best_row(
        own[(own["numerator"] == series.numerator) & (own["denominator"] == series.denominator)], "value"
    )
    if row is None:
        return None
    if row["status"] not in table.NUMBERS_ALLOWED:
        who = row["numerator_label"] or style.label(series.numerator)
        return Point(failed=notes.mark(who, row["status"], row["reason"], where))
    kernel = _at(fused, series, shape)
    measured = table.best_row(kernel[kernel["implementation"] == series.denominator], "device_ms")
    # A failure's time is NaN.
    scale = math.nan if measured is None else measured["device_ms"] / traffic_ms(series, shape, row["gpu"])
    value, low, high = row["value"], row["value_low"], row["value_high"]
    saved = [(ratio - 1) * scale for ratio in (value, low, high)]
    return Point(value, low, high, saved[0], saved[1], saved[2], row["status"] == "unstable")


def places() -> list[tuple[float, str, str]]:
    """(x, model, shape) of the paper's twelve layers."""
    shapes = table.paper_shapes()
    models = list(dict.fromkeys(model for model, _ in shapes))
    return [(index + GAP * models.index(model), model, shape) for index, (model, shape) in enumerate(shapes)]


def _draw_points(axes: Axes, found: Sequence[tuple[float, Point]], look: tuple[str, str], saved: bool) -> None:
    colour, marker = look
    for x, its in found:
        value, low, high = (its.saved, its.saved_low, its.saved_high) if saved else (its.value, its.low, its.high)
        if its.failed and not saved:
            axes.plot([x], [0.05], transform=axes.get_xaxis_transform(), linestyle="none", marker="x", markersize=4.8,
                      markeredgewidth=1.4, color=colour, zorder=7)  # fmt: skip
            axes.annotate(its.failed, (x, 0.05), xycoords=axes.get_xaxis_transform(), xytext=(3, 1),
                          textcoords="offset points", fontsize=7)  # fmt: skip
        if math.isnan(value):
            continue
        axes.plot([x], [value], linestyle="none", marker=marker, markersize=4.2, color=colour,
                  markeredgecolor=style.edge(colour), markeredgewidth=0.6, zorder=4)  # fmt: skip
        if not math.isnan(low) and not math.isnan(high):
            axes.vlines(x, low, high, color=style.edge(colour), linewidth=1.1, zorder=5)
        if its.unstable:
            axes.plot([x], [value], linestyle="none", marker=UNSTABLE, markersize=9, color=style.INK,
                      markeredgewidth=1.2, zorder=8)  # fmt: skip


def _limits(numbers: Iterable[float]) -> tuple[float, float]:
    """Ends of an axis with 1, or 0 and 1, in it."""
    known = [number for number in numbers if not math.isnan(number)]
    low, high = min(known), max(known)
    room = 0.10 * max(high - low, 0.1)
    return low - room, high + room


def _note(axes: Axes, text: str) -> None:
    """In place of numbers."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=7.5, color=style.FAINT,
              linespacing=1.3)  # fmt: skip
    axes.set_yticks([])


class _Panel:
    """Two axes, one above the other, over the twelve shapes."""

    def __init__(self, title: str, compared: pd.DataFrame, fused: pd.DataFrame, notes: style.Footnotes) -> None:
        self.title, self.series = title, PANELS[title]
        self.found: list[list[tuple[float, Point]]] = []
        several = len(self.series) > 1
        for index, series in enumerate(self.series):
            shift = 0.2 * (index - (len(self.series) - 1) / 2) * several
            points = [
                (x + shift, point(compared, fused, series, shape, f"{title[:3]} {model}", notes))
                for x, model, shape in places()
            ]
            self.found.append([(x, its) for x, its in points if its is not None])

    @property
    def points(self) -> list[Point]:
        return [its for found in self.found for _, its in found]

    def draw(self, above: Axes, below: Axes, known_rate: bool) -> None:
        for look, found in zip(_LOOKS, self.found, strict=False):
            _draw_points(above, found, look, saved=False)
            _draw_points(below, found, look, saved=True)
        self._x_axis(above, False)
        above.set_title(self.title)
        if self.points:
            above.axhline(1, color=style.INK, linewidth=0.8, zorder=1.5)
            above.set_ylim(*_limits([1.0, *(n for its in self.points for n in (its.value, its.low, its.high))]))
        else:
            _note(above, NOT_MEASURED)
        if len(self.series) > 1 and self.points:
            handles = [
                Line2D([], [], linestyle="none", marker=marker, markersize=4.2, color=colour)
                for colour, marker in _LOOKS
            ]
            above.legend(
                handles, [series.text for series in self.series], loc="best", fontsize=7.2, handletextpad=0.2,
                borderpad=0.1, labelspacing=0.2,
            )  # fmt: skip
        text = ""
        if all(series.extra is None for series in self.series):
            text = NO_EXTRA
        elif not known_rate:
            text = NO_RATE
        elif not any(not math.isnan(its.saved) for its in self.points):
            text = "the fused kernel's own time\nis not measured" if self.points else NOT_MEASURED
        if text:
            _note(below, text)
        else:
            for level in (0, 1):
                below.axhline(level, color=style.INK, linewidth=0.8, linestyle="-" if level else ":", zorder=1.5)
            numbers = [n for its in self.points for n in (its.saved, its.saved_low, its.saved_high)]
            below.set_ylim(*_limits([0.0, 1.0, *numbers]))
        self._x_axis(below, True)

    def _x_axis(self, axes: Axes, named: bool) -> None:
        where = places()
        axes.set_xlim(where[0][0] - 0.6, where[-1][0] + 0.6)
        style.plain_grid(axes)
        texts = [shape.split(",")[2] for _, _, shape in where]
        axes.set_xticks([x for x, _, _ in where], texts if named else [""] * len(where))
        axes.tick_params(axis="x", labelsize=6.4, rotation=90 if named else 0, pad=1)
        if not named:
            return
        for model in dict.fromkeys(model for _, model, _ in where):
            middle = [x for x, its, _ in where if its == model][1]
            axes.annotate(model, (middle, 0), xycoords=("data", "axes fraction"), xytext=(0, -29),
                          textcoords="offset points", ha="center", va="center", fontsize=7.2)  # fmt: skip


def _legend(points: Sequence[Point]) -> list[tuple[Any, str]]:
    entries: list[tuple[Any, str]] = []
    if any(its.unstable for its in points):
        entries.append((Line2D([], [], linestyle="none", marker=UNSTABLE, color=style.INK, markersize=8,
                               markeredgewidth=1.2), "slash: unstable"))  # fmt: skip
    if any(its.failed for its in points):
        entries.append((Line2D([], [], linestyle="none", marker="x", color="#404040", markersize=4.8,
                               markeredgewidth=1.4), "no number (see below)"))  # fmt: skip
    return entries


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``ablations.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    everything = table.one_gpu(rows)
    compared = comparisons(everything)
    names = table.gpus(compared)
    rates = rates_of(names[0]) if names else None
    notes = style.Footnotes()
    fused = fused_kernels(everything)
    panels = [_Panel(title, compared, fused, notes) for title in PANELS]
    width, columns = 10.0, 3
    speed = f" ({rates.bytes_per_s / 1e12:g} TB/s by its datasheet)" if rates else ""
    with style.figure_style():
        page = style.Page(
            width=width, panels_height=6.7 if len(compared) else 0.9, left=0.72,
            legend=_legend([its for panel in panels for its in panel.points]),
            title="What each fusion buys: our kernels apart / fused",
            subtitle=f"{style.gpu_text(names)}{speed}, bfloat16, uniform routing, top-K; the paper's twelve layers by "
            "the width n of an expert.",
            notes=style.below(width, notes, CAPTION if len(compared) else ()),
        )  # fmt: skip
        figure, margins = page.make()
        if not len(compared):
            style.sentence(figure.add_subplot(figure.add_gridspec(1, 1, **margins)[0]), NO_ROWS)
            return style.save(figure, output, NAME)
        outer = figure.add_gridspec(len(panels) // columns, columns, hspace=0.32, wspace=0.24, **margins)
        for index, panel in enumerate(panels):
            inner = outer[index].subgridspec(2, 1, height_ratios=[1.5, 1.0], hspace=0.10)
            above, below = figure.add_subplot(inner[0]), figure.add_subplot(inner[1])
            panel.draw(above, below, rates is not None)
            if index % columns == 0:
                above.set_ylabel("time apart / fused")
                below.set_ylabel("saved /\nextra traffic")
        figure.align_ylabels()
        return style.save(figure, output, NAME)
