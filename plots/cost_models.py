"""Cost models beside what was measured: memory held and bytes moved against granularity, and the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator

from harness.algorithm_costs import ALGORITHMS, Algorithm
from harness.costs import algorithm_bytes, arithmetic_intensity, model_flops, weight_bytes
from harness.gpus import GpuRates, rates_of
from harness.shapes import MoEShape
from plots import rows as table
from plots import style
from plots.figure13_memory import failure_text, implementation_legend, labels
from plots.granularity import UNSTABLE, Family

NAME = "cost_models"
MODEL = "7B"
DTYPE = "bfloat16"
PASSES = ("forward", "backward")
#: Marker of each model in the roofline.
MARKERS = dict(zip(table.MODELS, ("o", "s", "^", "D"), strict=True))
#: Whose throughput stands in the roofline; both follow SonicMoE's algorithm, so its bytes give their intensity.
ROOFLINE = ("sonicmoe_official", "sonicmoe_triton")
#: Its peaks make the roof where no row names a GPU.
DEFAULT_GPU = "NVIDIA H200"
_DASHED: Any = (0, (2.6, 1.6))


def family(layers: pd.DataFrame) -> Family:
    """The paper's 7B layers and the measured ones that cost the same: T, d, n·K and n·E are theirs."""
    (T, d), experts = table.MODELS[MODEL]
    n, E, K = experts[0]
    same = layers[
        (layers["T"] == T) & (layers["d"] == d) & (layers["n"] * layers["K"] == n * K)
        & (layers["n"] * layers["E"] == n * E)
    ]  # fmt: skip
    found = {(int(n), int(E), int(K)) for n, E, K in zip(same["n"], same["E"], same["K"], strict=True)}
    by_x = sorted(found | set(experts), key=lambda sizes: -sizes[0])
    return Family("granularity", f"{MODEL}: T = {T}, d = {d}, nK = {n * K}, nE = {n * E}", T, d, tuple(by_x))


def held_measured(layers: pd.DataFrame, name: str, shape: str) -> pd.Series | None:
    """The row that gives an implementation's held memory at a shape: measured, else traced with fake tensors, else a
    failure; None without any."""
    own = layers[(layers["implementation"] == name) & (layers["shape"] == shape)]
    found = [table.best_row(own[own["measured_on"] == where], "memory_held") for where in ("cuda", "fake")]
    numbers = [row for row in found if row is not None and row["status"] in table.NUMBERS_ALLOWED]
    failures = [row for row in found if row is not None]
    return numbers[0] if numbers else failures[0] if failures else None


def held_in_paper(memory: pd.DataFrame, algorithm: Algorithm, shape: MoEShape) -> float:
    """Held bytes of an algorithm without a plugin by the paper's Figure 13, its bar less the experts' weights and X;
    NaN where the paper has none."""
    name = table.PAPER_NAMES.get(algorithm.paper, "")
    bar = table.paper_value(memory, name, str(shape)) * table.GIB
    return bar - weight_bytes(shape, router=False) - 2 * shape.T * shape.d


def intensity(shape: MoEShape, direction: str) -> float:
    """Model FLOPs for each byte that SonicMoE's kernels move in a pass."""
    return model_flops(shape, direction) / algorithm_bytes(shape, direction)


def roof(intensities: float, rates: GpuRates) -> float:
    """TFLOPS that a GPU's peaks allow at so many FLOPs for each byte."""
    return min(rates.tflops[DTYPE], intensities * rates.bytes_per_s / 1e12)


def _line(algorithm: Algorithm) -> dict[str, Any]:
    names = algorithm.implementations or ("momoe",)
    dashed = algorithm.name == "momoe"
    return {"color": style.colours([names[0]])[names[0]], "linestyle": _DASHED if dashed else "-", "linewidth": 1.5}


def _x_axis(axes: Axes, shown: Family) -> None:
    x = [shown.x(experts) for experts in shown.experts]
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{place:g}\n({n})" for place, (n, _, _) in zip(x, shown.experts, strict=True)])
    axes.minorticks_off()
    axes.set_xlim(min(x) * 0.78, max(x) * 1.28)
    style.plain_grid(axes)


def _shape(shown: Family, experts: tuple[int, int, int]) -> MoEShape:
    return MoEShape.parse(shown.shape(experts))


def _mark(axes: Axes, x: float, y: float, colour: Any, marker: str = "o", size: float = 6.0, **more: Any) -> None:
    look: dict[str, Any] = {
        "markerfacecolor": colour,
        "markeredgecolor": style.edge(colour),
        "markeredgewidth": 0.6,
        "zorder": 5,
    }
    axes.plot([x], [y], linestyle="none", marker=marker, markersize=size, **(look | more))


def _slash(axes: Axes, x: float, y: float) -> None:
    axes.plot([x], [y], linestyle="none", marker=UNSTABLE, markersize=9, color=style.INK, markeredgewidth=1.2,
              zorder=8)  # fmt: skip


class _Figure:
    """What is drawn, gathered from the rows once, and what its drawing found."""

    def __init__(self, everything: pd.DataFrame) -> None:
        layers = table.layers(everything)
        self.shown = family(layers)
        self.twelve = [MoEShape.parse(shape) for _, shape in table.paper_shapes()]
        shapes = {self.shown.shape(experts) for experts in self.shown.experts} | {str(s) for s in self.twelve}
        followed = {name for algorithm in ALGORITHMS.values() for name in algorithm.implementations}
        self.layers = layers[layers["shape"].isin(shapes) & layers["implementation"].isin(followed)]
        self.gpus = table.gpus(self.layers)
        self.gpu = self.gpus[0] if self.gpus else DEFAULT_GPU
        self.rates = rates_of(self.gpu)
        self.notes = style.Footnotes()
        every = [intensity(shape, direction) for shape in self.twelve for direction in PASSES]
        #: Of the roofline's x axis, and of what stands in it: both passes share their axes.
        self.ends = (min(every) * 0.72, max(every) * 1.35)
        self.every = [self.points(name, direction) for name in ROOFLINE for direction in PASSES]
        #: Kinds of marks that were drawn, for the legend.
        self.kinds: set[str] = set()

    def held(self, axes: Axes) -> None:
        """Lines by the models, marks by what was measured."""
        x = [self.shown.x(experts) for experts in self.shown.experts]
        shapes = [_shape(self.shown, experts) for experts in self.shown.experts]
        memory = table.paper_memory()
        top = 0.0
        for algorithm in ALGORITHMS.values():
            model = [algorithm.held(shape, 2) / table.GIB for shape in shapes]
            axes.plot(x, model, zorder=3, **_line(algorithm))
            top = max([top, *model])
            for place, shape in zip(x, shapes, strict=True):
                for name in style.ordered(algorithm.implementations):
                    # Three plugins follow SonicMoE and hold the same; smaller marks lie on larger ones.
                    index = list(algorithm.implementations).index(name)
                    top = max(top, self._held_mark(axes, place, name, str(shape), 8.0 - 2.6 * index))
                bar = held_in_paper(memory, algorithm, shape) / table.GIB
                if not math.isnan(bar):
                    colour = _line(algorithm)["color"]
                    _mark(axes, place, bar, "white", markeredgecolor=colour, markeredgewidth=1.2)
                    self.kinds.add("paper")
                    top = max(top, bar)
        axes.set_ylim(0, top * 1.06)
        axes.set_ylabel("GiB held")
        _x_axis(axes, self.shown)
        axes.set_xlabel("granularity d / n (n)", labelpad=1)
        axes.set_title("Memory held, forward to backward")

    def _held_mark(self, axes: Axes, place: float, name: str, shape: str, size: float) -> float:
        row = held_measured(self.layers, name, shape)
        if row is None:
            return 0.0
        colour = style.colours([name])[name]
        if row["status"] not in table.NUMBERS_ALLOWED:
            failure_text(row, MODEL, self.notes)
            _mark(axes, place, 0.03, colour, "x", 4.8, markeredgecolor=colour, markeredgewidth=1.4, clip_on=False,
                  transform=axes.get_xaxis_transform())  # fmt: skip
            self.kinds.add("failed")
            return 0.0
        value = float(row["memory_held"]) / table.GIB
        if row["measured_on"] == "fake":
            _mark(axes, place, value, style.pale(colour), "D", 4.4, markeredgecolor=style.edge(colour), zorder=4)
            self.kinds.add("fake")
        else:
            _mark(axes, place, value, colour, size=size)
            self.kinds |= {"measured", name}
            if row["status"] == "unstable":
                _slash(axes, place, value)
                self.kinds.add("unstable")
        return value

    def moved(self, axes: Axes, direction: str) -> None:
        """Lines by the models: what a kernel reads from memory was not measured."""
        x = [self.shown.x(experts) for experts in self.shown.experts]
        shapes = [_shape(self.shown, experts) for experts in self.shown.experts]
        top = 0.0
        for algorithm in ALGORITHMS.values():
            model = [algorithm.moved(shape, direction, 2) / 1e9 for shape in shapes]
            axes.plot(x, model, marker=".", markersize=5, zorder=3, **_line(algorithm))
            top = max([top, *model])
        axes.set_ylim(0, top * 1.10)
        axes.set_ylabel("GB moved")
        _x_axis(axes, self.shown)
        axes.set_title(f"Bytes moved, {direction}")
        if direction == PASSES[-1]:
            axes.set_xlabel("granularity d / n (n)", labelpad=1)
        else:
            axes.tick_params(labelbottom=False)

    def points(self, name: str, direction: str) -> dict[str, list[tuple[float, float, bool]]]:
        """By model, its layers from coarse to fine experts: (intensity, TFLOPS, unstable) of what was measured;
        reasons of failures go to the notes."""
        own = self.layers[(self.layers["implementation"] == name) & (self.layers["measured_on"] == "cuda")]
        found: dict[str, list[tuple[float, float, bool]]] = {}
        for model, text in reversed(table.paper_shapes()):
            here = own[own["shape"] == text]
            failed = ~here["status"].isin(table.NUMBERS_ALLOWED)
            row = table.best_row(here[(here["pass"] == direction) | failed], "tflops")
            if row is None:
                continue
            if row["status"] not in table.NUMBERS_ALLOWED:
                failure_text(row, model, self.notes)
                continue
            x = intensity(MoEShape.parse(text), direction)
            found.setdefault(model, []).append((x, float(row["tflops"]), row["status"] == "unstable"))
        return found

    def roofline(self, axes: Axes, direction: str) -> None:
        """TFLOPS over intensity, under the GPU's two peaks."""
        ends = self.ends
        heights = [height for points in self.every for found in points.values() for _, height, _ in found]
        for name, points in zip(ROOFLINE, (self.points(name, direction) for name in ROOFLINE), strict=True):
            colour = style.colours([name])[name]
            for model, found in points.items():
                x, y = [place for place, _, _ in found], [height for _, height, _ in found]
                axes.plot(x, y, color=colour, linewidth=0.9, marker=MARKERS[model], markersize=5.0,
                          markeredgecolor=style.edge(colour), markeredgewidth=0.6, zorder=4)  # fmt: skip
                self.kinds |= {name, model}
                for place, height, unstable in found:
                    if unstable:
                        _slash(axes, place, height)
                        self.kinds.add("unstable")
        if self.rates is not None:
            self._roof(axes, ends, self.rates)
            heights += [self.rates.tflops[DTYPE]]
        if direction == PASSES[0]:
            self._authors(axes)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(*ends)
        axes.set_ylim(min(heights, default=200.0) * 0.88, max(heights, default=1000.0) * 1.20)
        _plain_ticks(axes)
        axes.grid(True, color=style.GRID)
        axes.set_ylabel("TFLOPS")
        axes.set_title(f"Roofline of the twelve layers, {direction}")
        if direction == PASSES[-1]:
            axes.set_xlabel("model FLOPs for each byte moved", labelpad=1)
        else:
            axes.tick_params(labelbottom=False)

    def _roof(self, axes: Axes, ends: tuple[float, float], rates: GpuRates) -> None:
        ridge = rates.tflops[DTYPE] * 1e12 / rates.bytes_per_s
        x = [ends[0], *([ridge] if ends[0] < ridge < ends[1] else []), ends[1]]
        axes.plot(x, [roof(place, rates) for place in x], color=style.BLACK, linewidth=1.2, zorder=2)
        text = f"{rates.bytes_per_s / 1e12:g} TB/s, {rates.tflops[DTYPE]:.0f} TFLOPS"
        axes.text(ends[1] * 0.97, rates.tflops[DTYPE] * 1.03, text, fontsize=7.2, ha="right", va="bottom")

    def _authors(self, axes: Axes) -> None:
        # Below the points, on the axis: places only, since they are no measurement.
        for shape in self.twelve:
            axes.plot([arithmetic_intensity(shape)["paper"]], [0.012], transform=axes.get_xaxis_transform(),
                      linestyle="none", marker="|", markersize=8, markeredgewidth=1.0, color=style.FAINT,
                      zorder=3)  # fmt: skip

    def legend(self) -> list[tuple[Any, str]]:
        """The algorithms' lines, then what the marks that were drawn mean."""
        entries: list[tuple[Any, str]] = [
            (Line2D([], [], **_line(algorithm)), f"model: {algorithm.label}") for algorithm in ALGORITHMS.values()
        ]
        measured = style.ordered(set(ALGORITHMS["sonicmoe"].implementations) & self.kinds)
        entries += implementation_legend(measured, labels(self.layers))
        marks: dict[str, tuple[Any, str]] = {
            "measured": (_key("o"), "held, measured"),
            "paper": (_key("o", "white", 1.2), "held, the paper's, H100"),
            "fake": (style.key_fake(), "held, traced with fake tensors"),
            **{model: (_key(marker), f"roofline, {model}") for model, marker in MARKERS.items()},
            "failed": (_key("x", "#404040", 1.4), "no number (see below)"),
            "unstable": (_key(UNSTABLE, style.INK, 1.2), "slash: unstable"),
        }
        entries += [entry for kind, entry in marks.items() if kind in self.kinds]
        entries.append((Line2D([], [], linestyle="none", marker="|", markersize=8, color=style.FAINT),
                        "one expert's forward, authors' formula"))  # fmt: skip
        return entries

    def caption(self, characters: int) -> list[str]:
        """What is compared with what."""
        sentences = [
            "Lines are arithmetic, from the published source of each algorithm (harness/algorithm_costs.py): every "
            "kernel's tensors once, bfloat16, X and the weights not among what is held.",
            "Bytes moved were not measured. MoMoE recomputes H and Y or stores them; the paper's bars (Figure 13, less "
            "weights and X) fit storing but for one T·d tensor, which they lack and SonicMoE's have.",
            "Roofline: model FLOPs over the bytes that SonicMoE's kernels move in a pass of the layer; lines join the "
            "layers of a model, from fine experts (left) to coarse ones; ",
        ]
        sentences[-1] += (
            f"the roof is the {self.gpu}'s datasheet, dense." if self.rates is not None
            else f"no datasheet of {self.gpu} is recorded, so there is no roof."
        )  # fmt: skip
        return style.wrapped(sentences, characters)


def _key(marker: Any, face: str = "#9A9A9A", width: float = 0.8) -> Line2D:
    return Line2D([], [], linestyle="none", marker=marker, markersize=5.4, markerfacecolor=face,
                  markeredgecolor="#404040", markeredgewidth=width)  # fmt: skip


def _plain_ticks(axes: Axes) -> None:
    for axis, places in ((axes.xaxis, (50, 100, 200, 400, 800, 1600)), (axes.yaxis, (100, 200, 300, 400, 600, 1000))):
        axis.set_major_locator(FixedLocator(places))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())


def _page(drawn: _Figure, width: float) -> tuple[Figure, dict[str, float]]:
    characters = style.characters(width)
    page = style.Page(
        width=width, panels_height=4.4, legend=drawn.legend(), gap=0.06,
        title="Cost models: memory held, bytes moved, and the roofline",
        subtitle=f"{style.gpu_text(drawn.gpus)}, bfloat16, uniform routing, top-K.\n"
        f"Left and middle: {drawn.shown.title}. {style.PAPER_NOTE}.",
        notes=[*drawn.caption(characters), *drawn.notes.lines(characters)],
    )  # fmt: skip
    return page.make()


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``cost_models.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    drawn = _Figure(table.one_gpu(rows))
    with style.figure_style():
        # Legend and notes are known only once the panels are drawn, and the page's height depends on them: draw twice.
        for _ in range(2):
            figure, margins = _page(drawn, 10.0)
            margins["bottom"] += 0.14 / figure.get_size_inches()[1]
            grid = figure.add_gridspec(2, 3, width_ratios=(1.0, 1.0, 1.25), wspace=0.27, hspace=0.22, **margins)
            drawn.held(figure.add_subplot(grid[:, 0]))
            for line, direction in enumerate(PASSES):
                drawn.moved(figure.add_subplot(grid[line, 1]), direction)
                drawn.roofline(figure.add_subplot(grid[line, 2]), direction)
        return style.save(figure, output, NAME)
