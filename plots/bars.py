"""Grouped bars: one group for each shape or pass, one slot for each implementation, the paper's value as an outline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.patheffects import withStroke

from plots import style

#: Share of a group's width that its slots take.
FILL = 0.90


@dataclass(frozen=True)
class Bar:
    """What one slot shows.

    Attributes:
        value, low, high: the measured number and its 95 % interval (NaN: none).
        paper: the paper's number (NaN: none).
        fake: a number from a fake-tensor trace (NaN: none).
        unstable: hatch the measured bar.
        text: what stands in the slot of a number that is missing, e.g. ``crashed¹``.
    """

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    paper: float = math.nan
    fake: float = math.nan
    unstable: bool = False
    text: str = ""

    @property
    def top(self) -> float:
        """The highest number shown; 0 where there is none."""
        numbers = [n for n in (self.value, self.high, self.paper, self.fake) if not math.isnan(n)]
        return max(numbers, default=0.0)


def limit(bars: Mapping[tuple[int, str], Bar], extra: Sequence[float] = (), headroom: float = 1.08) -> float:
    """The upper end of the axis for these bars and further numbers (bounds); 1 where nothing has a number."""
    highest = max([bar.top for bar in bars.values()] + [n for n in extra if not math.isnan(n)], default=0.0)
    return highest * headroom or 1.0


def draw(axes: Axes, bars: Mapping[tuple[int, str], Bar], groups: Sequence[str], names: Sequence[str]) -> None:
    """Draw bars by (index of group, implementation) and name the groups on the x axis.

    The axis limits must be set before, since texts in slots are placed by them."""
    palette = style.colours(names)
    slot = FILL / max(len(names), 1)
    low_end, high_end = axes.get_ylim()
    whiskers: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for (group, name), bar in sorted(bars.items()):
        x = group - FILL / 2 + (names.index(name) + 0.5) * slot
        colour = palette[name]
        if not math.isnan(bar.value):
            axes.bar(
                x, bar.value, width=slot * 0.88, color=colour, linewidth=0, zorder=2,
                hatch="/////" if bar.unstable else None, edgecolor=style.edge(colour) if bar.unstable else colour,
            )  # fmt: skip
            if not math.isnan(bar.low) and not math.isnan(bar.high):
                whiskers.append(((x, bar.low), (x, bar.high)))
                whiskers += [((x - slot * 0.2, end), (x + slot * 0.2, end)) for end in (bar.low, bar.high)]
        if not math.isnan(bar.paper):
            outline = style.edge(colour, 0.5 if not math.isnan(bar.value) else 0.85)
            axes.bar(x, bar.paper, width=slot * 0.80, fill=False, edgecolor=outline, linewidth=1.1, zorder=4)
        if not math.isnan(bar.fake):
            axes.plot(
                [x], [bar.fake], linestyle="none", marker="D", markersize=3.6, zorder=6,
                markerfacecolor=style.pale(colour), markeredgecolor=style.edge(colour), markeredgewidth=0.9,
            )  # fmt: skip
        if bar.text:
            axes.text(
                x, low_end + 0.02 * (high_end - low_end), bar.text, rotation=90, fontsize=5.8, color=style.INK,
                ha="center", va="bottom", zorder=7, path_effects=[withStroke(linewidth=1.2, foreground="white")],
            )  # fmt: skip
    if whiskers:
        axes.add_collection(LineCollection(whiskers, colors=style.INK, linewidths=0.9, zorder=5), autolim=False)
    axes.set_xlim(-0.55, len(groups) - 0.45)
    axes.set_xticks(range(len(groups)), groups)
    style.plain_grid(axes)
