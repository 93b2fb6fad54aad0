"""The layer's kernels one by one at the paper's twelve layers: grouped GEMMs, the aggregation, the router."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from plots import bars, style
from plots import rows as table
from plots.bars import Bar
from plots.figure13_memory import failure_text, implementation_legend, labels

NAME = "kernels"
#: The sweep whose rows are drawn has the figure's name. Whose time the ratios are over:
OURS = "sonicmoe_triton"


@dataclass(frozen=True)
class Panel:
    """One operation and variant: its title, and what its bars show, a column of the rows."""

    operation: str
    variant: str
    title: str
    column: str = "tflops"


PANELS = (
    Panel("grouped_gemm", "up", "Grouped GEMM, rows side by side: W1"),
    Panel("grouped_gemm", "down", "Grouped GEMM, rows side by side: W2"),
    Panel("grouped_gemm_gather_m", "up", "Up-projection: rows gathered, SwiGLU"),
    Panel("hidden_gradient", "", "dH: rows gathered, gradients of SwiGLU and S"),
    Panel("grouped_gemm_gather_k", "dW1", "dW1: contraction over gathered rows of X"),
    Panel("grouped_gemm_gather_k", "dW2", "dW2: contraction over gathered rows of dO"),
    Panel("down_aggregation", "", "Down-projection and aggregation"),
    Panel("expert_aggregation", "gather", "Aggregation: each token sums its rows", "gb_per_s"),
    Panel("topk_router", "", "Top-K and its weights", "gb_per_s"),
)
#: Drawn by those that have rows only: the sweep leaves them out.
OPTIONAL = ("down_aggregation",)
#: Beside the aggregation: the same from rows that lie in the tokens' order.
YARDSTICK = "contiguous"
UNITS = {"tflops": "TFLOPS", "gb_per_s": "GB/s"}
NO_ROWS = "No rows yet: nobody has measured single kernels here.\nOn a machine with a GPU:  moebench run kernels"
CAPTION = (
    "TFLOPS: 2 · M · N · K of the matrix product over the GPU's busy time, whatever else the operation does. GB/s: "
    "inputs and outputs once each over the same time; small tensors may lie in the L2 cache. With PyTorch, gathers and "
    "activations are kernels of their own, and their time counts.",
    "Above each group: time of the fastest other implementation over our Triton kernel's, from ratio rows (both in one "
    "process, by turns); above 1 ours is faster. No number: no stable ratio row.",
)


def kernel_bar(kernels: pd.DataFrame, panel: Panel, name: str, model: str, shape: str, notes: style.Footnotes) -> Bar:
    """One implementation's rate at one shape, with its interval; a failure's reason goes to ``notes``."""
    own = kernels[
        (kernels["operation"] == panel.operation)
        & (kernels["variant"] == panel.variant)
        & (kernels["implementation"] == name)
        & (kernels["shape"] == shape)
    ]
    row = table.best_row(own, panel.column)
    if row is None:
        return Bar(text="no device time" if len(own) else "not measured")
    if row["status"] not in table.NUMBERS_ALLOWED:
        return Bar(text=failure_text(row, model, notes))
    return Bar(
        value=row[panel.column], low=row[f"{panel.column}_low"], high=row[f"{panel.column}_high"],
        unstable=row["status"] == "unstable",
    )  # fmt: skip


def fastest_other(rows: pd.DataFrame, panel: Panel, shape: str) -> float:
    """Time of the fastest other implementation over ours, from stable ratio rows; NaN where there is none."""
    found = table.by_precedence(
        rows[
            (rows["record"] == "ratio")
            & (rows["sweep"] == NAME)
            & (rows["operation"] == panel.operation)
            & (rows["variant"] == panel.variant)
            & (rows["shape"] == shape)
            & (rows["pass"] == "forward")
            & (rows["denominator"] == OURS)
            & (rows["numerator"] != OURS)
            & (rows["time_kind"] == "device")
            & (rows["measured_on"] == "cuda")
            & rows["dtype"].isin(["bfloat16", ""])
            & rows["distribution"].isin(["uniform", ""])
        ]
    )
    latest = found.drop_duplicates("numerator", keep="last")
    return float(latest.loc[latest["status"] == "ok", "value"].min())


def in_order(kernels: pd.DataFrame, shape: str) -> float:
    """GB/s of the fastest aggregation of rows that lie in the tokens' order; NaN where there is none."""
    found = kernels[
        (kernels["operation"] == "expert_aggregation")
        & (kernels["variant"] == YARDSTICK)
        & (kernels["shape"] == shape)
        & kernels["status"].isin(table.NUMBERS_ALLOWED)
    ]
    return float(found["gb_per_s"].max())


def group_name(shape: str) -> str:
    """``24576,1536,256,128,8`` -> two lines: n, then E and K."""
    _, _, n, experts, k = shape.split(",")
    return f"{n}\n{experts}, {k}"


def _draw_panel(
    axes: Axes, panel: Panel, found: Mapping[tuple[int, str], Bar], names: Sequence[str], ratios: Sequence[float],
    lines: Sequence[float],
) -> None:  # fmt: skip
    axes.set_ylim(0, bars.limit(found, lines, headroom=1.2))
    bars.draw(axes, found, [group_name(shape) for _, shape in table.paper_shapes()], names)
    axes.tick_params(axis="x", labelsize=6.6)
    axes.set_title(panel.title)
    axes.set_ylabel(UNITS[panel.column])
    place = 0
    for model, ((_, d), experts) in table.MODELS.items():
        if place:
            axes.axvline(place - 0.5, color=style.GRID, linewidth=0.8, zorder=0)
        axes.annotate(
            f"{model}: d = {d}", (place + (len(experts) - 1) / 2, 0), (0, -25), fontsize=6.6,
            xycoords=("data", "axes fraction"), textcoords="offset points", ha="center", va="top",
        )  # fmt: skip
        place += len(experts)
    for group, value in enumerate(lines):
        if not math.isnan(value):
            axes.hlines(value, group - 0.47, group + 0.47, color=style.BLACK, linewidth=1.2, zorder=3)
    for group, value in enumerate(ratios):
        if not math.isnan(value):
            axes.text(group, 0.985, f"{value:.2f}×", transform=axes.get_xaxis_transform(), fontsize=6.4,
                      ha="center", va="top", color=style.INK)  # fmt: skip


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``kernels.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    everything = table.one_gpu(rows)
    shapes = table.paper_shapes()
    kernels = table.single_kernels(everything, NAME)
    kernels = kernels[kernels["shape"].isin([shape for _, shape in shapes]) & (kernels["measured_on"] == "cuda")]
    names = style.ordered(set(kernels["implementation"]))
    measured = len(kernels) > 0
    panels = [p for p in PANELS if p.operation not in OPTIONAL or p.operation in set(kernels["operation"])]
    notes = style.Footnotes()
    found = {
        panel: {
            (group, name): kernel_bar(kernels, panel, name, model, shape, notes)
            for group, (model, shape) in enumerate(shapes)
            for name in names
        }
        for panel in panels
    }
    lines = [in_order(kernels, shape) for _, shape in shapes]
    legend: list[tuple[Any, str]] = implementation_legend(names, labels(kernels))
    if any(bar.unstable for its in found.values() for bar in its.values()):
        legend.append((style.key_unstable(), "hatched: unstable"))
    if not all(math.isnan(value) for value in lines):
        line = Line2D([], [], color=style.BLACK, linewidth=1.2)
        legend.append((line, "aggregation: the fastest of rows in the tokens' order"))
    tokens = ", ".join(f"T = {T} at {model}" for model, ((T, _), _) in table.MODELS.items())
    width, in_lines = 11.0, math.ceil(len(panels) / 2)
    with style.figure_style():
        page = style.Page(
            width=width, panels_height=2.55 * in_lines if measured else 0.9, legend=legend,
            title="The kernels of one MoE layer, one by one",
            subtitle=f"{style.gpu_text(table.gpus(kernels))}, bfloat16, uniform routing, top-K; whiskers: 95 % "
            f"interval of the median.\nUnder the bars: n, then E and K, of the paper's twelve layers; {tokens}.",
            notes=style.below(width, notes, CAPTION if measured else ()),
        )  # fmt: skip
        figure, margins = page.make()
        if not measured:
            style.sentence(figure.add_subplot(figure.add_gridspec(1, 1, **margins)[0]), NO_ROWS)
            return style.save(figure, output, NAME)
        # Models' names below the groups' take more than the margin allows for.
        margins["bottom"] += 0.14 / figure.get_size_inches()[1]
        grid = figure.add_gridspec(in_lines, 2, hspace=0.46, wspace=0.13, **margins)
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(grid[divmod(index, 2)])
            ratios = [fastest_other(everything, panel, shape) for _, shape in shapes]
            yardstick = lines if panel.operation == "expert_aggregation" else []
            _draw_panel(axes, panel, found[panel], names, ratios, yardstick)
        return style.save(figure, output, NAME)
