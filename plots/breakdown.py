"""The kernels of one MoE layer by role, forward and backward: where the time goes, and what no role claims.

A kernel's role is what its plugin says now of its name, else what was stored with the row (see `breakdown_series`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from plots import rows as table
from plots import style
from plots.breakdown_series import PARTS, UNCLAIMED, Stack, stack
from plots.figure13_memory import labels
from plots.figure14_throughput import PASSES

NAME = "breakdown"
#: (model, shape) of the smaller panels.
OTHERS = (
    ("1.4B", "40960,768,256,128,8"),
    ("30B", "32768,4096,256,256,16"),
    ("120B", "32768,4096,1024,128,8"),
)
CAPTION = (
    "Numbers beside the bars: the sum over the kernels of one call, and the share that no role claims. The sum is not "
    "the device time: overlapping kernels count twice, gaps between kernels not at all, and with programmatic "
    "dependent launch a kernel that waits for the one before it counts its waiting. What a kernel does in its epilogue "
    "has its GEMM's role. Router: its GEMMs, sorting and permutations, and their gradients; dX: also the sum of its "
    "two terms; aggregation: also that of dX's rows, and the gradients of its weights."
)
#: Bars longer than this many times the longest but one are cut.
CUT = 1.5
HATCH = "xxxxx"


def limit(stacks: Iterable[Stack]) -> float:
    """The longest bar that is shown in full, µs: the longest of all, or of those that are not far beyond the others."""
    totals = sorted(stack.total for stack in stacks if stack.total)
    while len(totals) > 1 and totals[-1] > CUT * totals[-2]:
        totals.pop()
    return totals[-1] if totals else 1.0


def sum_text(us: float) -> str:
    """µs for people: ``955 µs``, ``11.3 ms``."""
    return f"{us:.0f} µs" if us < 9999.5 else f"{us / 1000:.1f} ms"


def draw_stacks(axes: Axes, stacks: Sequence[Stack], end: float, shares: bool, texts: bool) -> None:
    """Draw horizontal stacks from top to bottom.

    Args:
        end: where a bar is cut, µs.
        shares: draw percent of each sum instead of µs.
        texts: name the parts that are wide enough.
    """
    room = 100.0 if shares else end
    for place, its in enumerate(stacks):
        left, scale = 0.0, 100.0 / (its.total or 1.0) if shares else 1.0
        for part in (*PARTS, UNCLAIMED):
            width = min(its.parts.get(part, 0.0) * scale, room - left)
            if width <= 0:
                continue
            colour = PARTS[part][1] if part else "white"
            hatch = HATCH if part == UNCLAIMED else "/////" if its.unstable else None
            edge: Any = style.INK if part == UNCLAIMED else style.edge(colour) if its.unstable else colour
            axes.barh(place, width, left=left, height=0.74, color=colour, hatch=hatch, edgecolor=edge, linewidth=0)
            axes.vlines(left + width, place - 0.37, place + 0.37, color="white", linewidth=0.7)
            if texts and part and width > room * 0.018 * (len(part) + 0.6):
                red, green, blue = to_rgb(colour)
                dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
                axes.text(left + width / 2, place, part, fontsize=6.4, ha="center", va="center",
                          color="white" if dark else style.INK)  # fmt: skip
            left += width
        if its.total:
            cut = "" if shares or its.total <= end else "cut: "
            axes.text(
                left + room * 0.012, place, f"{cut}{sum_text(its.total)}, {its.unclaimed:.1%}".replace("%", " %"),
                fontsize=6.8 if texts else 6.2, color=style.INK, va="center",
            )  # fmt: skip
        if its.text:
            axes.text(room * 0.012, place, its.text, fontsize=6.8, color=style.INK, va="center",
                      path_effects=[withStroke(linewidth=1.2, foreground="white")])  # fmt: skip
    axes.set_xlim(0, room * (1.34 if texts else 1.52))
    axes.set_ylim(max(len(stacks), 1) - 0.45, -0.55)
    if shares:
        axes.set_xticks([0, 50, 100])
    style.plain_grid(axes, "x")


def legend(stacks: Iterable[Stack]) -> list[tuple[Any, str]]:
    """Entries of the parts that occur."""
    every = list(stacks)
    found = {part for its in every for part in its.parts}
    entries: list[tuple[Any, str]] = [
        (style.swatch(colour), text) for part, (text, colour) in PARTS.items() if part in found
    ]
    entries.append((Patch(facecolor="white", edgecolor=style.INK, hatch=HATCH, linewidth=0.5), "no role claims it"))
    if any(its.unstable for its in every):
        entries.append((style.key_unstable(), "hatched: unstable"))
    return entries


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``breakdown.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    everything = table.one_gpu(rows)
    layers = table.layers(everything)
    shapes = [("7B", table.HEADLINE_SHAPE), *OTHERS]
    layers = layers[layers["shape"].isin([shape for _, shape in shapes]) & (layers["measured_on"] == "cuda")]
    names = style.ordered(set(layers["implementation"]))
    texts = labels(layers)
    ticks = [style.label(name, texts) for name in names]
    notes = style.Footnotes()
    stacks = {
        (shape, direction): [stack(layers, name, model, shape, direction, notes) for name in names]
        for model, shape in shapes
        for direction in PASSES
    }
    width = 10.0
    heights = [inches * max(len(names), 3) for inches in (0.24, 0.185)]
    with style.figure_style():
        page = style.Page(
            width=width, panels_height=heights[0] + 2 * heights[1] + 1.9, left=1.85,
            legend=legend(its for found in stacks.values() for its in found),
            title="The kernels of one MoE layer by role",
            subtitle=f"{style.gpu_text(table.gpus(everything))}, bfloat16, uniform routing, top-K; from the profiler: "
            "means over the profiled calls, no whiskers.\nAbove: microseconds at the headline's shape; below: shares "
            "of the sum at one shape of each other model.",
            notes=style.below(width, notes, [CAPTION]),
        )  # fmt: skip
        figure, margins = page.make()
        ratios = [heights[0] + 0.2, 2 * heights[1] + 0.8]
        grid = figure.add_gridspec(2, 1, height_ratios=ratios, hspace=0.30, **margins)
        wide = grid[0, 0].subgridspec(1, 2, wspace=0.06)
        small = grid[1, 0].subgridspec(2, 3, hspace=0.26, wspace=0.06)
        for line, direction in enumerate(PASSES):
            axes = figure.add_subplot(wide[0, line])
            found = stacks[table.HEADLINE_SHAPE, direction]
            draw_stacks(axes, found, limit(found), shares=False, texts=True)
            axes.set_title(f"7B {direction}: {_sizes(table.HEADLINE_SHAPE)}")
            axes.set_xlabel("µs, sum over the kernels", labelpad=1)
            axes.set_yticks(range(len(names)), ticks if line == 0 else [])
            for column, (model, shape) in enumerate(OTHERS):
                axes = figure.add_subplot(small[line, column])
                draw_stacks(axes, stacks[shape, direction], limit(stacks[shape, direction]), shares=True, texts=False)
                axes.set_title(f"{model}: {_sizes(shape)}\n{direction}" if line == 0 else direction, fontsize=8.5)
                axes.set_yticks(range(len(names)), ticks if column == 0 else [])
                axes.tick_params(labelsize=7)
                if line == 1:
                    axes.set_xlabel("% of the sum", labelpad=1)
        return style.save(figure, output, NAME)


def _sizes(shape: str) -> str:
    _, _, n, experts, k = shape.split(",")
    return f"n = {n}, E = {experts}, K = {k}"
