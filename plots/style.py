"""One look for every figure: colours, order, fonts, titles, footnotes, and files that come out the same each time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.errors import printable

# Okabe and Ito's palette, which survives the common kinds of colour blindness; the relatives of one implementation
# take darker or lighter steps of its hue, and position and legend follow one order, so that hue never stands alone.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILLION, PURPLE, YELLOW, BLACK = "#D55E00", "#CC79A7", "#F0E442", "#000000"
INK, FAINT, GRID = "#222222", "#6B6B6B", "#E3E3E3"

#: Order of drawing, label and colour of the implementations known here; others follow in alphabetical order.
KNOWN: dict[str, tuple[str, str]] = {
    "sonicmoe_official": ("SonicMoE (official)", BLUE),
    "sonicmoe_triton": ("SonicMoE (Triton, ours)", SKY),
    "sonicmoe_torch": ("SonicMoE (PyTorch, ours)", "#0B3954"),
    "scattermoe": ("ScatterMoE", ORANGE),
    "momoe": ("MoMoE", PURPLE),
    "megablocks": ("MegaBlocks", GREEN),
    "megatron": ("Megatron", YELLOW),
    "deepgemm": ("DeepGEMM-pt", VERMILLION),
    "deepgemm_pp": ("DeepGEMM++", "#8A3D00"),
    "liger": ("Liger-Kernel", "#00695C"),
    "torch_grouped_mm": ("torch grouped_mm", "#8C8C8C"),
    "torch_loop": ("torch loop", "#C9C9C9"),
    "torch_kernels": ("PyTorch", "#A3A3A3"),
}
_SPARE = (
    "#117733", "#882255", "#999933", "#332288", "#AA4499", "#44AA99", "#CC6677", "#88CCEE", "#DDCC77",
)  # fmt: skip

RC: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.labelsize": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "moebench",
    "path.simplify": True,
}
PNG_DPI = 160

PAPER_NOTE = "The paper's values were measured on H100 by its authors"

STATUS_TEXT = {
    "unsupported": "unsupported",
    "not_installed": "not installed",
    "wrong_result": "wrong result",
    "out_of_memory": "out of memory",
    "timeout": "timeout",
    "crashed": "crashed",
}
_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def ordered(names: Iterable[str]) -> list[str]:
    """Implementations in the order in which every figure draws them."""
    found = set(names)
    return [name for name in KNOWN if name in found] + sorted(found - set(KNOWN))


def label(name: str, labels: dict[str, str] | None = None) -> str:
    """An implementation's label: as its rows give it, else as known here, else its name."""
    return (labels or {}).get(name) or (KNOWN[name][0] if name in KNOWN else name)


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each implementation; those not known here take spare ones in their order."""
    unknown = [name for name in names if name not in KNOWN]
    spare = {name: _SPARE[index % len(_SPARE)] for index, name in enumerate(unknown)}
    return {name: KNOWN[name][1] if name in KNOWN else spare[name] for name in names}


def edge(colour: str, share: float = 0.55) -> tuple[float, float, float]:
    """A darker step of a colour, for outlines that must show on the colour itself; a ``share`` near 1 keeps more of
    it, for outlines on white."""
    red, green, blue = to_rgb(colour)
    return red * share, green * share, blue * share


def pale(colour: str) -> tuple[float, float, float]:
    """A very light step of a colour, for markers that must show on white and on the colour itself."""
    red, green, blue = to_rgb(colour)
    return 1 - (1 - red) * 0.12, 1 - (1 - green) * 0.12, 1 - (1 - blue) * 0.12


def gpu_text(names: Sequence[str]) -> str:
    """The subtitle's first half: on what was measured."""
    return f"Measured on {', '.join(names)}" if names else "No GPU measurement here yet"


@contextmanager
def figure_style() -> Iterator[None]:
    """The settings under which a figure is made *and* saved."""
    with matplotlib.rc_context(RC):
        yield


@dataclass
class Footnotes:
    """Reasons of points without a number, numbered in the order in which they are met."""

    entries: dict[tuple[str, str], dict[str, list[str]]] = field(default_factory=dict)

    def mark(self, who: str, status: str, reason: str, where: str) -> str:
        """The superscript for a point; `who` and `status` share one note, which lists every reason once."""
        who, reason = printable(who), printable(reason)
        reasons = self.entries.setdefault((who, status), {})
        places = reasons.setdefault(" ".join(reason.split()) or "no reason given", [])
        if where not in places:
            places.append(where)
        return str(list(self.entries).index((who, status)) + 1).translate(_SUPERSCRIPTS)

    def lines(self, width: int, most: int = 14) -> list[str]:
        """The notes wrapped to ``width`` characters, at most ``most`` lines; the last says what was left out."""
        lines: list[str] = []
        for number, ((who, status), reasons) in enumerate(self.entries.items(), 1):
            texts = []
            for reason, places in reasons.items():
                short = reason if len(reason) <= 170 else reason[:167].rstrip() + "…"
                where = f" ({'; '.join(places)})" if len(reasons) > 1 and len(places) <= 3 else ""
                texts.append(short.rstrip(".") + where)
            if len(texts) > 3:
                texts = [*texts[:3], f"more reasons in the rows ({len(texts) - 3})"]
            note = f"{who}, {STATUS_TEXT.get(status, status)}: {'; '.join(texts)}"
            note += "" if note.endswith("…") else "."
            mark = str(number).translate(_SUPERSCRIPTS)
            lines += textwrap.wrap(f"{mark} {note}", width, subsequent_indent="   ", break_long_words=True)
        if len(lines) > most:
            lines = [*lines[: most - 1], "… more reasons in the rows themselves (results/)."]
        return lines


@dataclass
class Page:
    """A figure whose title, legend and notes take fixed heights in inches, so that panels never change their size.

    Attributes:
        width, panels_height: inches of the page and of the area for panels (tick labels included).
        title, subtitle: the lines at the top; the subtitle has one or two.
        legend: (handle, text) pairs, as many in a row as fit.
        notes: lines below the panels.
        left, right, gap: inches beside the panels and, beyond the usual, above them.
    """

    width: float
    panels_height: float
    title: str
    subtitle: str
    legend: Sequence[tuple[Artist | tuple[Artist, ...], str]]
    notes: Sequence[str]
    left: float = 0.62
    right: float = 0.12
    gap: float = 0.0

    def make(self) -> tuple[Figure, dict[str, float]]:
        """The figure and the margins (as fractions, for `Figure.add_gridspec`) within which panels belong."""
        columns = self._columns()
        legend_rows = math.ceil(len(self.legend) / columns)
        head = 0.62 + 0.15 * self.subtitle.count("\n")
        top = head + legend_rows * 0.185 + 0.30 + self.gap
        bottom = 0.42 + (0.145 * len(self.notes) + 0.16 if self.notes else 0.0)
        height = top + self.panels_height + bottom
        figure = Figure(figsize=(self.width, height))
        figure.text(0.10 / self.width, 1 - 0.10 / height, self.title, fontsize=12, fontweight="bold", va="top")
        figure.text(0.10 / self.width, 1 - 0.37 / height, self.subtitle, fontsize=8.5, color=FAINT, va="top",
                    linespacing=1.25)  # fmt: skip
        if self.legend:
            handles, texts = zip(*self._by_rows(columns), strict=True)
            figure.legend(
                handles, texts, loc="upper left", bbox_to_anchor=(0.10 / self.width, 1 - (head + 0.01) / height),
                ncol=columns, borderaxespad=0.0, borderpad=0.0, handlelength=1.6, handletextpad=0.5,
                columnspacing=1.4, labelspacing=0.35, handler_map={tuple: HandlerTuple(ndivide=None, pad=0.0)},
            )  # fmt: skip
        for number, line in enumerate(self.notes):
            place = (0.145 * (len(self.notes) - number) + 0.04) / height
            figure.text(0.10 / self.width, place, line, fontsize=6.8, color=INK, va="top")
        margins = {
            "left": self.left / self.width,
            "right": 1 - self.right / self.width,
            "top": 1 - top / height,
            "bottom": bottom / height,
        }
        return figure, margins

    def _columns(self) -> int:
        # By the average width of a character; a column is as wide as its longest text, handle and gaps beside it.
        for columns in range(7, 1, -1):
            longest = [max(len(text) for _, text in self.legend[start::columns])
                       for start in range(min(columns, len(self.legend)))]  # fmt: skip
            if sum(0.062 * length + 0.40 for length in longest) <= self.width - 0.2:
                return columns
        return 1

    def _by_rows(self, columns: int) -> list[tuple[Artist | tuple[Artist, ...], str]]:
        # matplotlib fills legends column by column; reading goes row by row.
        full, rest = divmod(len(self.legend), columns)
        heights = [full + (column < rest) for column in range(columns)]
        return [self.legend[row * columns + column] for column in range(columns)
                for row in range(heights[column])]  # fmt: skip


def characters(width: float) -> int:
    """Characters of a note that fit into a page of that many inches."""
    return int((width - 0.2) * 72 / (6.8 * 0.535))


def wrapped(sentences: Iterable[str], width: int, indent: str = "") -> list[str]:
    """The lines of a caption, of at most ``width`` characters: each sentence begins one; ``indent`` begins those that
    go on."""
    return [line for one in sentences for line in textwrap.wrap(one, width, subsequent_indent=indent)]


def below(inches: float, footnotes: Footnotes, caption: Iterable[str] = (), most: int = 14) -> list[str]:
    """What stands below the panels of a page of that many inches: the caption's sentences, and the footnotes in at most
    ``most`` lines."""
    width = characters(inches)
    return [*wrapped(caption, width), *footnotes.lines(width, most)]


def swatch(colour: str) -> Patch:
    """An implementation's legend entry."""
    return Patch(facecolor=colour, edgecolor=edge(colour), linewidth=0.5)


def key_measured() -> Patch:
    return Patch(facecolor="#9A9A9A", edgecolor="none")


def key_paper() -> Patch:
    return Patch(facecolor="none", edgecolor="#404040", linewidth=1.1)


def key_unstable() -> Patch:
    return Patch(facecolor="#9A9A9A", edgecolor=edge("#9A9A9A"), hatch="/////", linewidth=0)


def key_fake() -> Line2D:
    return Line2D([], [], linestyle="none", marker="D", markersize=4.5, markerfacecolor="#EFEFEF",
                  markeredgecolor="#404040", markeredgewidth=0.9)  # fmt: skip


def plain_grid(axes: Axes, axis: str = "y") -> None:
    """Faint grid lines along one axis, no tick marks on the other."""
    axes.grid(True, axis=axis)  # type: ignore[arg-type]
    axes.tick_params(axis="x" if axis == "y" else "y", length=0)


def sentence(axes: Axes, text: str) -> None:
    """What stands in a panel that has nothing to draw yet."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9, linespacing=1.6,
              bbox={"boxstyle": "round,pad=0.9", "facecolor": "#F6F6F6", "edgecolor": GRID})  # fmt: skip


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write ``name.svg`` and ``name.png`` into the folder (made if missing); equal figures give equal bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    figure.savefig(png, dpi=PNG_DPI, metadata={"Software": None})
    return [svg, png]
