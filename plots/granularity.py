"""Held memory and throughput against the experts' granularity and against sparsity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from plots import rows as table
from plots import style
from plots.figure13_memory import failure_text, implementation_legend, labels
from plots.figure14_throughput import BOUNDS, PASSES, bound_legend

NAME = "granularity"
#: A slash through a point: a line has no area to hatch.
UNSTABLE: Any = (2, 2, -45)
SWEEPS = ("granularity", "sparsity")


@dataclass(frozen=True)
class Family:
    """Shapes that differ in one thing: granularity (n·K and n·E constant) or sparsity (only E differs).

    Attributes:
        kind: ``granularity`` (x is d / n) or ``sparsity`` (x is E / K).
        title: what stands above its first panel.
        shapes: (n, E, K) -> shape text, by rising x.
    """

    kind: str
    title: str
    T: int
    d: int
    experts: tuple[tuple[int, int, int], ...]

    def shape(self, experts: tuple[int, int, int]) -> str:
        n, E, K = experts
        return f"{self.T},{self.d},{n},{E},{K}"

    def x(self, experts: tuple[int, int, int]) -> float:
        n, E, K = experts
        return self.d / n if self.kind == "granularity" else E / K

    def tick(self, experts: tuple[int, int, int]) -> str:
        n, E, K = experts
        return f"{self.d / n:g}\n({n})" if self.kind == "granularity" else f"{E / K:g}\n({E})"


def families(layers: pd.DataFrame) -> list[Family]:
    """The families among rows of the sweeps named for them (a name that holds ``granularity`` or ``sparsity``);
    without any such row, the paper's four models, whose experts differ in granularity."""
    own = layers[layers["sweep"].str.contains("|".join(SWEEPS), regex=True)]
    seen: dict[tuple[Any, ...], set[tuple[int, int, int]]] = {}
    for T, d, n, E, K, sweep in zip(*(own[c] for c in ("T", "d", "n", "E", "K", "sweep")), strict=True):
        T, d, n, E, K = int(T), int(d), int(n), int(E), int(K)
        group = ("granularity", T, d, n * K, n * E) if "granularity" in sweep else ("sparsity", T, d, n, K)
        seen.setdefault(group, set()).add((n, E, K))
    found = []
    for (kind, T, d, first, second), experts in sorted(seen.items()):
        if len(experts) < 2:
            continue
        fixed = f"nK = {first}, nE = {second}" if kind == "granularity" else f"n = {first}, K = {second}"
        by_x = sorted(experts, key=lambda e: (-e[0], e[1]))
        found.append(Family(kind, f"T = {T}, d = {d}, {fixed}", T, d, tuple(by_x)))
    if found:
        return found
    return [
        Family("granularity", f"{model}: T = {T}, d = {d}", T, d, tuple(reversed(experts)))
        for model, ((T, d), experts) in table.MODELS.items()
    ]


def minimal_held(T: int, d: int, n: int, K: int) -> float:
    """Bytes that a bfloat16 layer holds after the forward if it keeps X, H and S only: its output (2Td), the
    pre-activation (4TKn) and about 16 bytes of scores and indices for each routed row."""
    return 2.0 * T * d + 4.0 * T * K * n + 16.0 * T * K


def _curve(axes: Axes, x: list[float], y: list[float], low: list[float], high: list[float], colour: str) -> None:
    axes.plot(x, y, color=colour, linewidth=1.7, marker="o", markersize=4.6, markeredgecolor=style.edge(colour),
              markeredgewidth=0.5, zorder=4)  # fmt: skip
    axes.vlines(x, low, high, color=style.edge(colour), linewidth=1.0, zorder=3)


def _panel(
    axes: Axes, family: Family, column: int, layers: pd.DataFrame, bounds: Mapping[tuple[str, str, str], float],
    names: list[str], notes: style.Footnotes,
) -> None:  # fmt: skip
    palette = style.colours(names)
    memory, tflops = table.paper_memory(), table.paper_tflops()
    points = dict(iter(layers.groupby(["implementation", "shape"], sort=False)))
    x = [family.x(experts) for experts in family.experts]
    top = 0.0
    for name in names:
        y, low, high, paper, fake, failed, shaky = [], [], [], [], [], [], []
        for place, experts in zip(x, family.experts, strict=True):
            n, E, _ = experts
            shape = family.shape(experts)
            own = points.get((name, shape), layers.iloc[:0])
            cuda, traced = own[own["measured_on"] == "cuda"], own[own["measured_on"] == "fake"]
            y_here = low_here = high_here = fake_here = math.nan
            if column == 0:
                row, trace = table.best_row(cuda, "memory_held"), table.best_row(traced, "memory_held")
                if row is not None and row["status"] in table.NUMBERS_ALLOWED:
                    y_here = row["memory_held"] / table.GIB
                if trace is not None and trace["status"] in table.NUMBERS_ALLOWED:
                    fake_here = trace["memory_held"] / table.GIB
                static = 6 * E * family.d * n + 2 * family.T * family.d
                paper.append(table.paper_value(memory, name, shape) - static / table.GIB)
            else:
                direction = PASSES[column - 1]
                keep = (cuda["pass"] == direction) | ~cuda["status"].isin(table.NUMBERS_ALLOWED)
                row = table.best_row(cuda[keep], "tflops")
                if row is not None and row["status"] in table.NUMBERS_ALLOWED:
                    y_here, low_here, high_here = row["tflops"], row["tflops_low"], row["tflops_high"]
                paper.append(table.paper_value(tflops, name, shape, direction))
            if row is not None and row["status"] not in table.NUMBERS_ALLOWED:
                failure_text(row, f"d = {family.d},", notes)
                failed.append(place)
            if row is not None and row["status"] == "unstable":
                shaky.append((place, y_here))
            y.append(y_here)
            low.append(low_here)
            high.append(high_here)
            fake.append(fake_here)
        colour = palette[name]
        axes.plot(x, paper, linestyle=(0, (2.5, 1.8)), linewidth=1.0, color=style.edge(colour, 0.85),
                  marker="o", markersize=4.2, markerfacecolor="white", markeredgewidth=1.0, zorder=3)  # fmt: skip
        _curve(axes, x, y, low, high, colour)
        axes.plot(x, fake, linestyle="none", marker="D", markersize=4.2, markerfacecolor=style.pale(colour),
                  markeredgecolor=style.edge(colour), zorder=6)  # fmt: skip
        axes.plot(
            *([place for place, _ in shaky], [value for _, value in shaky]),
            linestyle="none",
            marker=UNSTABLE,
            markersize=8,
            color=style.INK,
            markeredgewidth=1.2,
            zorder=6,
        )
        # A failure stands on the axis, beside those of other implementations, never as a value of zero in a curve.
        for place in failed:
            step = 1 + 0.045 * (names.index(name) - (len(names) - 1) / 2)
            axes.plot([place * step], [0.03], transform=axes.get_xaxis_transform(), linestyle="none", marker="x",
                      markersize=4.5, markeredgewidth=1.4, color=colour, zorder=7, clip_on=False)  # fmt: skip
        top = max([top, *(v for v in [*y, *high, *paper, *fake] if not math.isnan(v))])
    if column == 0:
        least = [minimal_held(family.T, family.d, n, K) / table.GIB for n, _, K in family.experts]
        axes.plot(x, least, color=style.BLACK, linewidth=1.0, linestyle=":", zorder=2)
        top = max([top, *least])
    else:
        for variant, (_, line) in BOUNDS.items():
            limit = [bounds[variant, PASSES[column - 1], family.shape(experts)] for experts in family.experts]
            axes.plot(x, limit, color=style.BLACK, linewidth=1.1, linestyle=line, zorder=2)
            top = max([top, *(value for value in limit if not math.isnan(value))])
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [family.tick(experts) for experts in family.experts])
    axes.minorticks_off()
    axes.set_xlim(min(x) * 0.78, max(x) * 1.28)
    axes.set_ylim(0, (top or 1.0) * 1.08)
    axes.set_xlabel("granularity d / n (n)" if family.kind == "granularity" else "sparsity E / K (E)", labelpad=1)
    axes.set_ylabel("GiB held" if column == 0 else "TFLOPS")
    style.plain_grid(axes)


def not_measured(layers: pd.DataFrame, families: Sequence[Family], names: Iterable[str]) -> list[str]:
    """A sentence on the points of which no row of a GPU is there, not even of a failure, for implementations of which
    the sweeps have others."""
    cuda = layers[layers["measured_on"] == "cuda"]
    met = set(zip(cuda["implementation"], cuda["shape"], strict=True))
    swept = set(cuda.loc[cuda["sweep"].str.contains("|".join(SWEEPS), regex=True), "implementation"])
    shapes = {family.shape(experts) for family in families for experts in family.experts}
    absent = {name: {shape for shape in shapes if (name, shape) not in met} for name in names if name in swept}
    return _places("Not measured yet", layers, families, absent)


def found_choices(layers: pd.DataFrame, families: Sequence[Family], names: Iterable[str]) -> list[str]:
    """A sentence on the points with choices that were found on the machine, where there are any."""
    return _places(table.FOUND_CHOICES, layers, families, {name: table.found_choices(layers, name) for name in names})


def _places(what: str, layers: pd.DataFrame, families: Sequence[Family], shapes: Mapping[str, set[str]]) -> list[str]:
    """A sentence on an implementation's shapes, told by what differs in each family; none without any."""
    texts = labels(layers)
    places: dict[str, list[str]] = {}
    for family in families:
        finer = family.kind == "granularity"
        for name, its in shapes.items():
            own = [str(n if finer else E) for n, E, K in family.experts if family.shape((n, E, K)) in its]
            if own:
                which = f" = {', '.join(own)}" if len(own) < len(family.experts) else ": all"
                places.setdefault(name, []).append(f"{'n' if finer else 'E'}{which}")
    told = [f"{style.label(name, texts)} ({'; '.join(its)})" for name, its in places.items()]
    return [f"{what}: {', '.join(told)}."] if told else []


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``granularity.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    everything = table.one_gpu(rows)
    layers = table.layers(everything)
    lines = families(layers)
    shapes = {family.shape(experts) for family in lines for experts in family.experts}
    layers = layers[layers["shape"].isin(shapes)]
    paper = table.paper_tflops()
    in_paper = set(paper["implementation"][paper["shape"].isin(shapes)])
    names = style.ordered(set(layers["implementation"]) | in_paper)
    notes = style.Footnotes()
    legend = implementation_legend(names, labels(layers))
    if len(layers[layers["measured_on"] == "cuda"]):
        legend.append((Line2D([], [], color="#777777", linewidth=1.7, marker="o", markersize=4.6), "measured"))
    if in_paper:
        legend.append((Line2D([], [], color="#404040", linewidth=0.9, linestyle=(0, (2.5, 1.8)), marker="o",
                              markersize=4.2, markerfacecolor="white"), "the paper's, H100"))  # fmt: skip
    if len(layers[layers["measured_on"] == "fake"]):
        legend.append((style.key_fake(), "traced with fake tensors"))
    cuda = layers[layers["measured_on"] == "cuda"]
    if (~cuda["status"].isin(table.NUMBERS_ALLOWED)).any():
        legend.append((Line2D([], [], linestyle="none", marker="x", color="#404040", markersize=4.5,
                              markeredgewidth=1.4), "no number (see below)"))  # fmt: skip
    if (cuda["status"] == "unstable").any():
        slash = Line2D([], [], linestyle="none", marker=UNSTABLE, color=style.INK, markersize=8, markeredgewidth=1.2)
        legend.append((slash, "slash: unstable"))
    legend.append((Line2D([], [], color=style.BLACK, linewidth=1.0, linestyle=":"), "2Td + 4TKn + 16TK bytes"))
    bounds = {
        (variant, direction, shape): table.bound(everything, variant, direction, shape)
        for variant in BOUNDS
        for direction in PASSES
        for shape in sorted(shapes)
    }
    legend += bound_legend((variant, value) for (variant, _, _), value in bounds.items())
    width, each = 10.0, 2.45
    with style.figure_style():
        # Footnotes are known only once the panels are drawn, and the page's height depends on them: then draw twice.
        for _ in range(2):
            below = style.below(
                width, notes, [*found_choices(layers, lines, names), *not_measured(layers, lines, names)]
            )
            page = style.Page(
                width=width, panels_height=each * len(lines), legend=legend, gap=0.16,
                title="Held memory and throughput against granularity and sparsity",
                subtitle=f"{style.gpu_text(table.gpus(layers))}, bfloat16, uniform routing, top-K.\n"
                f"{style.PAPER_NOTE}; their held memory is Figure 13's less weights and input.",
                notes=below,
            )  # fmt: skip
            figure, margins = page.make()
            margins["bottom"] += 0.14 / figure.get_size_inches()[1]
            grid = figure.add_gridspec(len(lines), 3, hspace=0.62, wspace=0.24, **margins)
            for line, family in enumerate(lines):
                for column in range(3):
                    axes = figure.add_subplot(grid[line, column])
                    _panel(axes, family, column, layers, bounds, names, notes)
                    what = ("held after the forward", "forward", "backward")[column]
                    axes.set_title(f"{family.title}\n{what}" if column == 0 else what)
            if not notes.entries:
                break
        return style.save(figure, output, NAME)
