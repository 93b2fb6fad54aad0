"""Token rounding: the rows that padding wastes, the rows that a routing method adds and drops, and what it saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from plots import rows as table
from plots import style
from plots.figure13_memory import labels
from plots.granularity import UNSTABLE
from plots.token_rounding_series import (
    METHODS,
    OPERATIONS,
    TOP_K,
    Family,
    Moved,
    Point,
    Rounded,
    choose,
    found_choices,
    in_order,
    method_label,
    moved,
    paying,
    prediction,
    speedups,
    throughput,
    wasted,
)

NAME = "token_rounding"
#: Methods that do not round to tiles: their bars are cut where they would dwarf the others'.
_NO_ROUNDING = ("expert_choice", "token_drop")
DISTRIBUTIONS = ("uniform", "skewed", "one_group", "empty_experts")
PASSES = {"forward": "forward", "backward": "backward", "forward_backward": "forward + backward"}
_DASHED = (0, (3.0, 1.6))
X_LABEL = "sparsity E / K (experts E)"
NO_ACCOUNTS = "Nobody has counted the rows of any routing here yet.\nAny machine can:  moebench run token_rounding"
NO_GPU_ROWS = (
    "Nobody has measured yet what token rounding saves in time.\nOn a machine with a GPU:  moebench run token_rounding"
)


def _method_style(method: str) -> tuple[str, str]:
    return METHODS[method][1:] if method in METHODS else (style.FAINT, "*")


def _tick(family: Family, experts: int) -> str:
    return f"{experts / family.K:g}\n({experts})"


def _x_axis(axes: Axes, family: Family) -> None:
    x = [experts / family.K for experts in family.experts]
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [_tick(family, experts) for experts in family.experts])
    axes.minorticks_off()
    axes.set_xlim(min(x) * 0.70, max(x) * 1.43)
    axes.set_xlabel(X_LABEL, labelpad=1)
    style.plain_grid(axes)


def _spread(index: int, many: int, step: float) -> float:
    """The factor by which one of several series stands beside its place on a logarithmic axis."""
    return float(2 ** (step * (index - (many - 1) / 2)))


def _series(
    axes: Axes, family: Family, points: Sequence[Point], colour: str, marker: str, *, factor: float = 1.0,
    line: Any = "-", hollow: str = "", width: float = 1.5, size: float = 4.8, zorder: float = 4, crosses: bool = True,
) -> None:  # fmt: skip
    """A line over E with its intervals, a slash through unstable points and a cross on the axis for failures;
    ``hollow`` is what fills markers that are outlines only."""
    x = [point.experts / family.K * factor for point in points]
    axes.plot(x, [point.value for point in points], color=colour, linestyle=line, linewidth=width, marker=marker,
              markersize=size, markerfacecolor=hollow or colour,
              markeredgecolor=colour if hollow else style.edge(colour), markeredgewidth=1.0 if hollow else 0.6,
              zorder=zorder)  # fmt: skip
    for place, point in zip(x, points, strict=True):
        if not math.isnan(point.low) and not math.isnan(point.high):
            axes.vlines(place, point.low, point.high, color=style.edge(colour), linewidth=1.1, zorder=zorder - 0.5)
        if point.unstable:
            axes.plot([place], [point.value], linestyle="none", marker=UNSTABLE, markersize=9, color=style.INK,
                      markeredgewidth=1.2, zorder=8)  # fmt: skip
        if point.failed and crosses:
            _cross(axes, place, colour)


def _cross(axes: Axes, place: float, colour: str) -> None:
    axes.plot([place], [0.03], transform=axes.get_xaxis_transform(), linestyle="none", marker="x", markersize=4.8,
              markeredgewidth=1.4, color=colour, zorder=7, clip_on=False)  # fmt: skip


def _limits(points: Iterable[Point]) -> tuple[float, float]:
    """Ends of an axis that holds all of the points and intervals, zero left out."""
    numbers = [n for p in points for n in (p.value, p.low, p.high) if not math.isnan(n)] or [0.0, 1.0]
    low, high = min(numbers), max(numbers)
    room = 0.12 * max(high - low, 0.05 * high)
    return low - 1.6 * room, high + room


def _top(points: Iterable[Point]) -> float:
    return max((n for p in points for n in (p.value, p.high) if not math.isnan(n)), default=0.0)


def _draw_wasted(axes: Axes, family: Family, series: Mapping[str, list[Point]]) -> None:
    # Many methods waste nothing: those stand side by side, without lines.
    beside = [method for method in series if method not in (TOP_K, "token_drop")]
    for method, points in series.items():
        colour, marker = _method_style(method)
        if method in beside:
            factor = _spread(beside.index(method), len(beside), 0.105)
            _series(axes, family, points, colour, marker, factor=factor, line="none", zorder=5)
        else:
            _series(axes, family, points, colour, marker, zorder=6 if method == TOP_K else 4)
    axes.set_ylabel("% of multiplied rows")
    _x_axis(axes, family)


def moved_limit(series: Iterable[Mapping[str, list[Moved]]]) -> float:
    """The end of (b)'s axis in %: the methods that round fill it, larger bars of the others are cut."""
    largest = [0.0, 0.0]
    for by_method in series:
        for method, points in by_method.items():
            numbers = [n for p in points for n in (p.added, p.dropped) if not math.isnan(n)]
            largest[method in _NO_ROUNDING] = max([largest[method in _NO_ROUNDING], *numbers])
    return 1.25 * (min(largest[0] * 1.2, max(largest)) or largest[1]) or 1.0


def _draw_moved(axes: Axes, family: Family, series: Mapping[str, list[Moved]], limit: float) -> None:
    """Bars up and down, those beyond the limit cut and named."""
    fill = 0.86
    slot = fill / max(len(series), 1)
    for index, (method, points) in enumerate(series.items()):
        colour, _ = _method_style(method)
        for group, point in enumerate(points):
            x = group - fill / 2 + (index + 0.5) * slot
            if point.failed:
                axes.plot([x], [0], linestyle="none", marker="x", markersize=4.5, markeredgewidth=1.4, color=colour,
                          zorder=7)  # fmt: skip
                continue
            for sign, height in ((1, point.added), (-1, point.dropped)):
                if math.isnan(height):
                    continue
                axes.bar(x, sign * min(height, limit), width=slot * 0.86, color=colour, linewidth=0.4,
                         edgecolor=style.edge(colour), hatch="/////" if point.unstable else None,
                         zorder=2)  # fmt: skip
                if height > limit:
                    ink = "white" if sum(to_rgb(colour)) < 1.3 else style.BLACK
                    axes.text(x, sign * limit * 0.97, f"{height:.0f} %", fontsize=6.4, ha="center", rotation=90,
                              color=ink, va="top" if sign > 0 else "bottom", zorder=6)  # fmt: skip
            net = point.added - point.dropped
            if not math.isnan(net) and abs(net) <= limit:
                axes.hlines(net, x - slot * 0.43, x + slot * 0.43, color=style.BLACK, linewidth=1.3, zorder=4)
    axes.axhline(0, color=style.INK, linewidth=0.8, zorder=3)
    axes.set_ylim(-limit, limit)
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    axes.set_xlim(-0.55, len(family.experts) - 0.45)
    axes.set_xticks(range(len(family.experts)), [_tick(family, experts) for experts in family.experts])
    axes.set_xlabel(X_LABEL, labelpad=1)
    axes.set_ylabel("dropped   ↓   % of T·K   ↑   added")
    style.plain_grid(axes)


def _line(colour: str, marker: str = "", line: Any = "-", hollow: bool = False) -> Line2D:
    return Line2D([], [], color=colour, linestyle=line, linewidth=1.4, marker=marker, markersize=4.8,
                  markerfacecolor="white" if hollow else colour,
                  markeredgecolor=colour if hollow else style.edge(colour))  # fmt: skip


class _Figure:
    """What is drawn, gathered from the rows once: rows of panels, legend, caption."""

    def __init__(self, everything: pd.DataFrame) -> None:
        self.found = Rounded.among(everything)
        gpu = pd.concat([self.found.measurements, self.found.comparisons])
        self.counted, self.timed, self.left = choose(self.found.accounts, gpu)
        self.notes = style.Footnotes()
        self.labels = labels(everything)
        self.methods: set[str] = set()
        self.series: list[Point] = []
        self.cut = self.any_moved = self.any_failed_bar = False
        #: (panels, height in inches): each panel a function of its axes.
        self.lines: list[tuple[list[Callable[[Axes], None]], float]] = []
        #: A sentence for each pass and distribution: where rounding pays.
        self.paying: list[str] = []
        self._rows()
        self._gpu_rows()

    def _keep(self, points: list[Point]) -> list[Point]:
        self.series += points
        return points

    def _rows(self) -> None:
        family = self.counted
        if family is None:
            self.lines.append(([lambda axes: style.sentence(axes, NO_ACCOUNTS)], 0.45))
            return
        own = family.of(self.found.accounts)
        methods = in_order(own["method"], METHODS)
        distributions = in_order(own["distribution"], DISTRIBUTIONS)
        self.methods |= set(methods)
        waste = {
            distribution: {m: self._keep(wasted(own, family, m, distribution, self.notes)) for m in methods}
            for distribution in distributions
        }
        top = max(5.0, *(_top(points) for series in waste.values() for points in series.values())) * 1.10
        moves = {
            distribution: {m: moved(own, family, m, distribution) for m in methods if m != TOP_K}
            for distribution in distributions
        }
        limit = moved_limit(moves.values())
        bars = [point for series in moves.values() for points in series.values() for point in points]
        self.any_moved = any(not math.isnan(point.added) for point in bars)
        self.any_failed_bar = any(point.failed for point in bars)
        self.cut = any(max(point.added, point.dropped) > limit for point in bars)

        def panel_a(distribution: str) -> Callable[[Axes], None]:
            def panel(axes: Axes) -> None:
                _draw_wasted(axes, family, waste[distribution])
                axes.set_ylim(-0.045 * top, top)
                axes.set_title(f"(a) rows that padding wastes, {_words(distribution)}")

            return panel

        def panel_b(distribution: str) -> Callable[[Axes], None]:
            def panel(axes: Axes) -> None:
                _draw_moved(axes, family, moves[distribution], limit)
                axes.set_title(f"(b) rows added and dropped, {_words(distribution)}")

            return panel

        self.lines.append(([panel_a(name) for name in distributions], 1.75))
        if any(moves.values()):
            self.lines.append(([panel_b(name) for name in distributions], 2.05))

    def _gpu_rows(self) -> None:
        family = self.timed
        if family is None:
            self.lines.append(([lambda axes: style.sentence(axes, NO_GPU_ROWS)], 0.45))
            return
        measured, compared = family.of(self.found.measurements), family.of(self.found.comparisons)
        distributions = in_order(measured["distribution"], DISTRIBUTIONS)
        passes = in_order(measured["pass"], PASSES)
        if {"forward", "backward"} <= set(passes):
            passes = [direction for direction in passes if direction != "forward_backward"]
        lines = {
            (name, distribution, direction, method): throughput(
                measured, family, name, method, distribution, direction, self.notes
            )
            for name in style.ordered(measured["implementation"])
            for distribution in distributions
            for direction in passes
            for method in in_order(measured["method"], METHODS)
        }
        lines = {key: pair for key, pair in lines.items() if any(p.failed or not math.isnan(p.value) for p in pair[0])}
        self.methods |= {method for *_, method in lines}
        for model, _ in lines.values():
            self._keep(model)
        limits = _limits([point for pair in lines.values() for points in pair for point in points])
        for name in style.ordered({key[0] for key in lines}):
            here = [key for key in dict.fromkeys(key[:3] for key in lines) if key[0] == name]
            # Four panels fit side by side; else one row for each distribution.
            parts = [here] if len(here) <= 4 else [[key for key in here if key[1] == d] for d in distributions]
            for part in parts:
                if part:
                    self.lines.append(([self._throughput_panel(family, lines, key, limits) for key in part], 1.75))
        for distribution in in_order(compared["distribution"], DISTRIBUTIONS):
            of_distribution = compared[compared["distribution"] == distribution]
            passes = in_order(of_distribution["pass"], PASSES)
            keys = [
                (name, operation, method)
                for name in style.ordered(of_distribution["numerator"])
                for operation in OPERATIONS
                for method in in_order(of_distribution["denominator_method"], METHODS)
            ]
            ratios = {
                (direction, key): self._keep(speedups(self.found, family, *key, distribution, direction, self.notes))
                for direction in passes
                for key in keys
            }
            self.methods |= {method for (_, (_, _, method)) in ratios}
            self._note_paying(family, ratios, distribution)
            expected = {direction: prediction(self.found, family, distribution, direction) for direction in passes}
            self.lines.append((
                [self._ratio_panel(family, ratios, direction, distribution, expected) for direction in passes], 1.85
            ))  # fmt: skip

    def _note_paying(
        self, family: Family, ratios: Mapping[tuple[str, tuple[str, str, str]], list[Point]], distribution: str
    ) -> None:
        """Where each series of (d) begins to pay and where it ends, for the caption; series that agree together."""
        for direction in dict.fromkeys(direction for direction, _ in ratios):
            where: dict[str, list[str]] = {}
            for (when, (name, operation, method)), points in ratios.items():
                if when == direction and any(not math.isnan(point.value) for point in points):
                    what = style.label(name, self.labels) if method == "nearest" else method_label(method)
                    what += " with the rounding's own time" if operation == "moe_layer" else ""
                    where.setdefault(paying(points, family.K), []).append(what)
            texts = [f"{places}, {' and '.join(series)}" for places, series in where.items()]
            if texts:
                when = f"{PASSES.get(direction, direction).capitalize()}, {_words(distribution, short=True)}"
                self.paying.append(f"{when}: {'; '.join(texts)}")

    def _throughput_panel(
        self, family: Family, lines: Mapping[tuple[str, str, str, str], tuple[list[Point], list[Point]]],
        place: tuple[str, str, str], limits: tuple[float, float],
    ) -> Callable[[Axes], None]:  # fmt: skip
        name, distribution, direction = place

        def panel(axes: Axes) -> None:
            own = {method: pair for (*where, method), pair in lines.items() if tuple(where) == place}
            for index, (method, (model, hardware)) in enumerate(own.items()):
                colour, marker = _method_style(method)
                # Padded rows may run as fast with top-K as without padding: top-K's outlines stand above other marks.
                above = 1 if method == TOP_K else 0
                _series(axes, family, model, colour, marker, zorder=4 + above, size=4.2, crosses=False)
                _series(axes, family, hardware, colour, marker, line=_DASHED, hollow="none", width=1.2,
                        size=5.5 + 2.5 * above, zorder=6 + above)  # fmt: skip
                # Crosses of several methods stand side by side.
                for point in model:
                    if point.failed:
                        _cross(axes, point.experts / family.K * _spread(index, len(own), 0.15), colour)
            axes.set_ylim(*limits)
            axes.set_ylabel("TFLOPS")
            _x_axis(axes, family)
            axes.set_title(f"(c) {PASSES.get(direction, direction)}, {_words(distribution, short=True)}\n"
                           f"{style.label(name, self.labels)}")  # fmt: skip

        return panel

    def _ratio_panel(
        self, family: Family, ratios: Mapping[tuple[str, tuple[str, str, str]], list[Point]], direction: str,
        distribution: str, expected: Mapping[str, list[Point]],
    ) -> Callable[[Axes], None]:  # fmt: skip
        every = [point for points in (*expected.values(), *ratios.values()) for point in points]
        limits = _limits([*every, Point(0, 1.0)])

        def panel(axes: Axes) -> None:
            present = {
                key: points
                for (when, key), points in ratios.items()
                if when == direction and any(not math.isnan(p.value) or p.failed for p in points)
            }
            palette = style.colours(style.ordered(name for name, _, _ in present))
            axes.axhline(1, color=style.INK, linewidth=0.8, zorder=1.5)
            _series(axes, family, expected[direction], style.BLACK, "", line=":", width=1.5, zorder=3)
            for index, ((name, operation, method), points) in enumerate(present.items()):
                layer, factor = operation == "moe_layer", _spread(index, len(present), 0.09)
                _series(axes, family, points, palette[name], _method_style(method)[1], hollow="white" if layer else "",
                        line=_DASHED if layer else "-", factor=factor, size=5.0)  # fmt: skip
            axes.set_ylim(*limits)
            axes.set_ylabel("speed-up per routed row")
            _x_axis(axes, family)
            axes.set_title(f"(d) {PASSES.get(direction, direction)}, {_words(distribution, short=True)}")

        return panel

    def legend(self) -> list[tuple[Any, str]]:
        entries: list[tuple[Any, str]] = []
        for method in in_order(self.methods, METHODS):
            colour, marker = _method_style(method)
            entries.append((_line(colour, marker), method_label(method)))
        if self.any_moved:
            entries.append((Line2D([], [], color=style.BLACK, linewidth=1.3), "(b) added − dropped"))
        family = self.timed
        if family is not None:
            if len(family.of(self.found.measurements)):
                entries.append((_line("#666666"), "(c) model FLOPs"))
                entries.append((_line("#666666", "o", _DASHED, True), "(c) with padded rows"))
            compared = family.of(self.found.comparisons)
            names = style.ordered(compared["numerator"])
            for name, colour in style.colours(names).items():
                entries.append((Patch(facecolor=colour, edgecolor=style.edge(colour), linewidth=0.5),
                                f"(d) {style.label(name, self.labels)}"))  # fmt: skip
            if "moe_layer" in set(compared["operation"]):
                entries.append((_line("#666666", "s", _DASHED, True), "(d) rounding's own time included"))
            if len(compared):
                entries.append((_line(style.BLACK, "", ":"), "(d) what tiles over rows predict"))
        if any(point.unstable for point in self.series):
            entries.append((Line2D([], [], linestyle="none", marker=UNSTABLE, color=style.INK, markersize=8,
                                   markeredgewidth=1.2), "slash: unstable"))  # fmt: skip
        if self.any_failed_bar or any(point.failed for point in self.series):
            entries.append((Line2D([], [], linestyle="none", marker="x", color="#404040", markersize=4.8,
                                   markeredgewidth=1.4), "no number (see below)"))  # fmt: skip
        return entries

    def subtitle(self) -> str:
        texts = []
        if self.counted is not None:
            texts.append("(a), (b): rows counted on a CPU, which hold for any kernel with this M tile.")
        names = table.gpus(pd.concat([self.found.measurements, self.found.comparisons]))
        if self.timed is not None:
            texts.append(f"(c), (d): measured on {', '.join(names) or 'a GPU without a name'}, bfloat16.")
        else:
            texts.append("No GPU measurement here yet.")
        second = self.counted.title if self.counted is not None else ""
        if self.timed is not None and (self.counted is None or self.timed.sizes != self.counted.sizes):
            second = "; ".join(filter(None, [second and f"(a), (b): {second}", f"(c), (d): {self.timed.title}"]))
        return " ".join(texts) + (f"\n{second}." if second else "")

    def caption(self, width: int) -> list[str]:
        texts = []
        if self.counted is not None:
            texts.append(
                "(a) 1 − routed rows / padded rows. A grouped GEMM pads each expert's rows to its M tile. Rounding "
                "leaves no padding but at experts that it exempts (those that would get more than T rows)."
            )
            cut = " Longer bars are cut; the number in one is its full length." if self.cut else ""
            texts.append(f"(b) Against top-K's rows, as a share of T·K.{cut}")
        if self.timed is not None and len(self.timed.of(self.found.measurements)):
            texts.append(
                "(c) The experts alone, routing given: FLOPs of the routed rows (model) and of the padded rows, over "
                "the GPU's busy time; whiskers: 95 % interval of the median. The axes do not start at zero."
            )
        if self.timed is not None and len(self.timed.of(self.found.comparisons)):
            claim = table.claims()["token-rounding-kernel-speedup"]["value"]
            texts.append(
                "(d) Time with top-K / time with rounding (ratio rows of the latest run, 95 % interval), times rows "
                "with rounding / with top-K, since the two compute different numbers of rows. Dotted: if time went "
                "with the FLOPs of top-K's padded rows, but for the weight gradients (half of the backward's): they "
                "contract over rows in shorter steps, whose padding is left out. Filled: the experts. The "
                f"paper's claim at high sparsity: {claim:.2f}×."
            )
            sparsities = [experts / self.timed.K for experts in self.timed.experts]
            texts.append(
                f"Where rounding begins and ends to pay (d's interval above 1), of E / K from {sparsities[0]:g} to "
                f"{sparsities[-1]:g}. {'. '.join(self.paying)}."
            )
        if self.timed is not None:
            its = found_choices(self.found, self.timed)
            told = [f"{style.label(name, self.labels)} (E = {', '.join(map(str, its[name]))})" for name in its]
            texts += [f"{table.FOUND_CHOICES}: {', '.join(told)}."] if told else []
        if self.left:
            drawn = self.counted or self.timed
            others = [_differences(family, drawn) if drawn is not None else family.title for family in self.left]
            more = f"; {len(others) - 6} more" if len(others) > 6 else ""
            texts.append(f"In the rows but not drawn: {'; '.join(others[:6])}{more}.")
        return style.wrapped(texts, width, indent="     ")


def _differences(family: Family, drawn: Family) -> str:
    """In what a family differs from the one that is drawn."""
    names = ("T", "d", "n", "K", "M tile")
    return ", ".join(
        f"{name} = {own}"
        for name, own, other in zip(names, family.sizes, drawn.sizes, strict=True)
        if own != other
    )  # fmt: skip


def _words(distribution: str, short: bool = False) -> str:
    # A trace has a file's name, with the file's own underscores.
    text = (distribution if ":" in distribution else distribution.replace("_", " ")) or "unnamed"
    return text if short else f"{text} routing"


def _make(drawn: _Figure, width: float) -> Figure:
    # Titles of (c) have two lines; below a sentence there are no ticks.
    between, bottom_line = (1.02, 0.10) if drawn.timed is not None else (0.84, -0.25)
    heights = [height for _, height in drawn.lines]
    tall = sum(heights) + between * (len(heights) - 1)
    characters = style.characters(width)
    page = style.Page(
        width=width, panels_height=tall + bottom_line, legend=drawn.legend(), gap=0.10, left=0.66,
        title="Token rounding: rows that padding wastes, rows it moves, time it saves",
        subtitle=drawn.subtitle(),
        notes=[*drawn.caption(characters), *drawn.notes.lines(characters)],
    )  # fmt: skip
    figure, margins = page.make()
    margins["bottom"] += bottom_line / figure.get_size_inches()[1]
    average = sum(heights) / len(heights)
    grid = GridSpec(len(heights), 1, figure, height_ratios=heights, hspace=between / average, **margins)
    for index, (panels, _) in enumerate(drawn.lines):
        cells = grid[index].subgridspec(1, len(panels), wspace=(0.20, 0.20, 0.26, 0.32)[min(len(panels), 4) - 1])
        for column, panel in enumerate(panels):
            panel(figure.add_subplot(cells[column]))
    return figure


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``token_rounding.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    drawn = _Figure(table.one_gpu(rows))
    with style.figure_style():
        return style.save(_make(drawn, 10.0), output, NAME)
