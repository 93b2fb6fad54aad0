"""Figure 14: forward and backward throughput of one MoE layer, for the paper's twelve layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from plots import bars, style
from plots import rows as table
from plots.bars import Bar
from plots.figure13_memory import failure_text, group_name, implementation_legend, labels, not_in_paper

NAME = "figure14_throughput"
PASSES = ("forward", "backward")
#: Variants of the dense bound: label and line style. Glue: activation and aggregation at copy speed.
BOUNDS: dict[str, tuple[str, Any]] = {
    "gemm": ("cuBLAS, GEMMs only", "-"),
    "gemm_glue": ("cuBLAS and glue", (0, (2.2, 1.4))),
}


def throughput_bar(
    layers: pd.DataFrame, paper: pd.DataFrame, name: str, model: str, shape: str, direction: str, notes: style.Footnotes
) -> Bar:
    """One implementation's TFLOPS (model FLOPs over busy time) in one pass; a failure's reason goes to ``notes``."""
    own = layers[(layers["implementation"] == name) & (layers["shape"] == shape) & (layers["measured_on"] == "cuda")]
    this_pass = own["pass"] == direction
    # A point that failed before its passes were timed may have one row for all of them.
    row = table.best_row(own[this_pass | ~own["status"].isin(table.NUMBERS_ALLOWED)], "tflops")
    known = table.paper_value(paper, name, shape, direction)
    if row is None:
        text = ""
        if len(own[this_pass]):
            text = "no device time"
        elif not_in_paper(paper, name, shape, direction):
            text = "not supported (paper)"
        return Bar(paper=known, text=text)
    if row["status"] not in table.NUMBERS_ALLOWED:
        return Bar(paper=known, text=failure_text(row, model, notes))
    return Bar(
        value=row["tflops"], low=row["tflops_low"], high=row["tflops_high"], paper=known,
        unstable=row["status"] == "unstable",
    )  # fmt: skip


def draw_bounds(axes: Axes, bounds: Mapping[tuple[int, str], float]) -> None:
    """A line over each group at the bound's TFLOPS; keys are (index of group, variant)."""
    for (group, variant), value in bounds.items():
        if not math.isnan(value):
            axes.hlines(
                value, group - 0.47, group + 0.47, color=style.BLACK, linewidth=1.2, linestyle=BOUNDS[variant][1],
                zorder=3,
            )  # fmt: skip


def bound_text(bounds: Iterable[float]) -> str:
    """A sentence on what the lines are, where there is any."""
    if all(math.isnan(value) for value in bounds):
        return ""
    return " Glue: activation and aggregation at copy speed."


def bound_legend(bounds: Iterable[tuple[str, float]]) -> list[tuple[Any, str]]:
    """Legend entries of those bounds that have a number."""
    present = {variant for variant, value in bounds if not math.isnan(value)}
    return [
        (Line2D([], [], color=style.BLACK, linewidth=1.2, linestyle=line), text)
        for variant, (text, line) in BOUNDS.items()
        if variant in present
    ]


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``figure14_throughput.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    everything = table.one_gpu(rows)
    layers, paper = table.layers(everything), table.paper_tflops()
    wanted = table.paper_shapes()
    layers = layers[layers["shape"].isin([shape for _, shape in wanted]) & (layers["measured_on"] == "cuda")]
    names = style.ordered(set(layers["implementation"]) | set(paper["implementation"]))
    notes = style.Footnotes()
    bar_of = {
        (direction, shape, name): throughput_bar(layers, paper, name, model, shape, direction, notes)
        for model, shape in wanted
        for direction in PASSES
        for name in names
    }
    bound_of = {
        (direction, shape, variant): table.bound(everything, variant, direction, shape)
        for _, shape in wanted
        for direction in PASSES
        for variant in BOUNDS
    }
    legend = implementation_legend(names, labels(layers))
    if any(not math.isnan(bar.value) for bar in bar_of.values()):
        legend.append((style.key_measured(), "filled: measured"))
    legend.append((style.key_paper(), "outline: the paper's, H100"))
    if any(bar.unstable for bar in bar_of.values()):
        legend.append((style.key_unstable(), "hatched: unstable"))
    legend += bound_legend((variant, value) for (_, _, variant), value in bound_of.items())
    width = 10.0
    with style.figure_style():
        page = style.Page(
            width=width, panels_height=10.4, legend=legend,
            title="Throughput of one MoE layer: model FLOPs over the GPU's busy time",
            subtitle=f"{style.gpu_text(table.gpus(everything))}, bfloat16, uniform routing, top-K; whiskers: 95 % "
            f"interval of the median.{bound_text(bound_of.values())}\n{style.PAPER_NOTE} (read off Figure 14).",
            notes=style.below(width, notes),
        )  # fmt: skip
        figure, margins = page.make()
        grid = figure.add_gridspec(4, 2, hspace=0.40, wspace=0.10, **margins)
        for line, (model, ((tokens, d), experts)) in enumerate(table.MODELS.items()):
            shapes = [f"{tokens},{d},{n},{E},{K}" for n, E, K in experts]
            panels = {
                direction: {
                    (group, name): bar_of[direction, shape, name]
                    for group, shape in enumerate(shapes)
                    for name in names
                }
                for direction in PASSES
            }
            bounds = {
                direction: {
                    (group, variant): bound_of[direction, shape, variant]
                    for group, shape in enumerate(shapes)
                    for variant in BOUNDS
                }
                for direction in PASSES
            }
            # Forward and backward of one model share the scale.
            top = max(bars.limit(panels[direction], list(bounds[direction].values())) for direction in PASSES)
            for column, direction in enumerate(PASSES):
                axes = figure.add_subplot(grid[line, column])
                axes.set_ylim(0, top)
                bars.draw(axes, panels[direction], [group_name(shape) for shape in shapes], names)
                draw_bounds(axes, bounds[direction])
                axes.set_title(f"{model} {direction}: T = {tokens}, d = {d}")
                if column == 0:
                    axes.set_ylabel("TFLOPS")
        return style.save(figure, output, NAME)
