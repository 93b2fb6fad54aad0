"""Tokens a day on each GPU by implementation, from whole training steps, and what steps in turns say of the ratio."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from harness.token_rounding import ROUNDINGS, TOP_K, routing_name
from harness.training.config import load_config
from harness.training.projection import PAPER
from harness.training.rows import OPERATION, asked
from plots import rows as table
from plots import style
from plots.figure13_memory import labels
from plots.headline import Ratio

NAME = "training_steps"
#: Whose step the ratios are over, by top-K.
REFERENCE = "sonicmoe_triton"
#: The configuration that the paper's numbers stand beside, where all its layers were trained.
OF_THE_PAPER = "7B"
WIDTH = 9.0
#: Inches: of a bar and its gap, beyond the bars of a panel, between panels.
BAR, EDGE, GAP = 0.25, 0.10, 0.52
CAPTION = (
    "×: the time of a step over that of ours by top-K, both in one process, some steps of each in turns, with the 95 % "
    "interval; above 1 ours is faster. Two bars are of two moments; where no × stands, nothing was compared in turns."
)
_PAPER = (f"{tokens / 1e9:.0f} B tokens a day on {gpus} H100 with {who}" for gpus, (who, tokens) in PAPER.items())
PAPER_CAPTION = (
    f"The paper's: {', '.join(_PAPER)}, divided by the GPUs; × is over its SonicMoE. That is another GPU, "
    "many of them, and a model of which the paper gives neither layers, heads, vocabulary and batch nor whether it "
    "recomputes: compare ratios, not lengths."
)


@dataclass(frozen=True)
class Bar:
    """An implementation's step by a routing: billion tokens a day on each GPU and the 95 % interval (NaN: none), the
    time of a step over the reference's, and what stands in place of a number."""

    name: str
    label: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    unstable: bool = False
    ratio: Ratio = field(default_factory=Ratio)
    text: str = ""
    paper: bool = False


def groups(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Title -> the rows of equal training steps but for implementation and routing: of GPUs, by top-K or a token
    rounding, the row that counts last. Only those with a rate, and where there are any to compare, only these; the
    largest first."""
    chosen = rows[
        (rows["operation"] == OPERATION)
        & (rows["measured_on"] == "cuda")
        & rows["method"].isin([TOP_K, *ROUNDINGS])
        # A run that shared its GPU has losses and no rate; a ratio of one GPU over several is of one implementation.
        & ((rows["record"] == "ratio") | rows["tokens_per_day"].notna() | ~rows["status"].isin(table.NUMBERS_ALLOWED))
        & (rows["denominator_variant"] == "")
        # Bars are of the wall clock, so no ratio of busy times stands beside them.
        & (rows["time_kind"] != "busy")
    ]  # fmt: skip
    found: dict[tuple[str, int, int, str, str, str], list[Any]] = {}
    for index, row in table.by_precedence(chosen).iterrows():
        what = asked(row["variant"])
        key = what.configuration, -what.layers, what.processes, what.rest, row["shape"], row["dtype"]
        found.setdefault(key, []).append(index)
    titled: dict[str, pd.DataFrame] = {}
    models: dict[str, str] = {}
    for key in sorted(found):
        its = rows.loc[found[key]]
        if its["tokens_per_day"].notna().any():
            configuration, layers, processes, rest, shape, dtype = key
            gpus = f"{processes} GPU{'s' if processes > 1 else ''}" if processes else ""
            tokens = f"{shape.split(',')[0]} tokens a micro-batch"
            parts = (configuration, f"{-layers} layers" if layers else "", rest, tokens, gpus)
            title = ", ".join([*filter(None, parts), *([] if dtype == "bfloat16" else [dtype])])
            titled[title], models[title] = its, configuration
    several = {title: its for title, its in titled.items() if len(_sides(its)) > 1}
    shown = several or titled
    most: dict[str, int] = {}
    for title, its in shown.items():
        most[models[title]] = max(most.get(models[title], 0), len(_sides(its)))
    # A model's steps stand together.
    return {title: shown[title] for title in sorted(shown, key=lambda title: (-most[models[title]], models[title]))}


def _routed(rows: pd.DataFrame) -> list[str]:
    """Each row's routing, of a ratio the numerator's."""
    return [routing_name(*its) for its in zip(rows["method"], rows["m_tile"], strict=True)]


def _sides(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """(Implementation, routing) of the steps by themselves, in the order of drawing."""
    measured = rows[rows["record"] == "measurement"]
    found = set(zip(measured["implementation"], _routed(measured), strict=True))
    order = style.ordered(name for name, _ in found)
    return sorted(found, key=lambda side: (order.index(side[0]), side[1] != TOP_K, side[1]))


def ratio(rows: pd.DataFrame, name: str, routing: str) -> Ratio:
    """The time of a step over that of the reference by top-K, from the last row of both in turns."""
    own, other = (name, routing), (REFERENCE, TOP_K)
    result = Ratio()
    for _, row in rows[(rows["record"] == "ratio") & rows["value"].gt(0)].iterrows():
        above = row["numerator"], routing_name(row["method"], row["m_tile"])
        below = row["denominator"], routing_name(row["denominator_method"] or row["method"], row["m_tile"])
        unstable = row["status"] == "unstable"
        if own != other and (above, below) == (own, other):
            result = Ratio(row["value"], row["value_low"], row["value_high"], 1, unstable)
        elif own != other and (above, below) == (other, own):
            result = Ratio(1 / row["value"], 1 / row["value_high"], 1 / row["value_low"], 1, unstable)
    return result


def bars_of(rows: pd.DataFrame, texts: dict[str, str], notes: style.Footnotes, title: str) -> list[Bar]:
    """The bars of one group; a failure's reason goes to ``notes``."""
    found = []
    routed = pd.Series(_routed(rows), index=rows.index)
    for name, routing in _sides(rows):
        own = rows[(rows["record"] == "measurement") & (rows["implementation"] == name) & (routed == routing)]
        row = table.best_row(own, "tokens_per_day")
        label = style.label(name, texts) + ("" if routing == TOP_K else f", {routing}")
        if row is None:
            continue
        if row["status"] not in table.NUMBERS_ALLOWED:
            mark = notes.mark(label, row["status"], row["reason"], title)
            found.append(Bar(name, label, text=f"{style.STATUS_TEXT.get(row['status'], row['status'])}{mark}"))
            continue
        value, low, high = (row[f"tokens_per_day{part}"] / 1e9 for part in ("", "_low", "_high"))
        found.append(Bar(name, label, value, low, high, row["status"] == "unstable", ratio(rows, name, routing)))
    return found


def paper_bars() -> list[Bar]:
    """The paper's rates for each GPU, ScatterMoE's with the ratio to SonicMoE's."""
    rates = {who: tokens / gpus / 1e9 for gpus, (who, tokens) in PAPER.items()}
    best = max(rates.values())
    return [
        Bar(table.PAPER_NAMES[who], f"{who}, the paper's, {gpus} H100", rates[who], paper=True,
            ratio=Ratio(best / rates[who]) if rates[who] < best else Ratio())
        for gpus, (who, _) in PAPER.items()
    ]  # fmt: skip


def bar_text(bar: Bar) -> str:
    """What stands at the end of a bar: its length, and its ratio."""
    if math.isnan(bar.value):
        return bar.text
    text = f"{bar.value:.2f}"
    if math.isnan(bar.ratio.value):
        return text
    interval = "" if math.isnan(bar.ratio.low) else f" [{bar.ratio.low:.2f}, {bar.ratio.high:.2f}]"
    return f"{text}    {bar.ratio.value:.2f}×{interval}{', unstable' if bar.ratio.unstable else ''}"


def _panel(axes: Axes, bars: Sequence[Bar]) -> None:
    palette = style.colours([bar.name for bar in bars])
    ends = [max(n for n in (bar.value, bar.high, 0.0) if not math.isnan(n)) for bar in bars]
    limit = max(ends) * 1.42
    axes.set_xlim(0, limit)
    half = 0.5 + EDGE / BAR / 2
    axes.set_ylim(len(bars) - 1 + half, -half)
    for place, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        colour = palette[bar.name]
        if bar.paper:
            axes.barh(place, bar.value, height=0.62, fill=False, edgecolor=style.edge(colour, 0.85), linewidth=1.1)
        elif not math.isnan(bar.value):
            axes.barh(place, bar.value, height=0.72, color=colour, linewidth=0, zorder=2,
                      hatch="/////" if bar.unstable else None, edgecolor=style.edge(colour))  # fmt: skip
            axes.hlines(place, bar.low, bar.high, color=style.INK, linewidth=1.0, zorder=5)
            axes.vlines([bar.low, bar.high], place - 0.16, place + 0.16, color=style.INK, linewidth=1.0, zorder=5)
        axes.text(end + 0.01 * limit, place, bar_text(bar), va="center", ha="left", fontsize=7.5)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    style.plain_grid(axes, "x")


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``training_steps.svg`` and ``.png`` into ``output``; returns the files: none where no step has a rate.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    everything = table.one_gpu(rows)
    notes = style.Footnotes()
    panels = {
        title: bars_of(its, labels(everything), notes, title) for title, its in groups(everything).items()
    }  # fmt: skip
    if not panels:
        return []
    whole = f"{OF_THE_PAPER}, {load_config(OF_THE_PAPER).layers} layers,"
    beside = any(title.startswith(whole) for title in panels)
    for title, bars in panels.items():
        bars += paper_bars() if title.startswith(whole) else []
    legend: list[tuple[Any, str]] = [(style.key_measured(), "filled: measured")]
    legend += [(style.key_paper(), "outline: the paper's, H100")] if beside else []
    if any(bar.unstable for bars in panels.values() for bar in bars):
        legend.append((style.key_unstable(), "hatched: unstable"))
    heights = [BAR * len(bars) + EDGE for bars in panels.values()]
    with style.figure_style():
        page = style.Page(
            width=WIDTH, panels_height=sum(heights) + GAP * (len(heights) - 1), legend=legend, left=2.25,
            title="Training steps: billion tokens a day on each GPU",
            subtitle=f"{style.gpu_text(table.gpus(everything))}; whole steps of a model, wall clock, the last run of "
            "each; whiskers: 95 % interval of the median.",
            notes=style.below(WIDTH, notes, (CAPTION, PAPER_CAPTION)[: 1 + beside]),
        )  # fmt: skip
        figure, margins = page.make()
        gap = GAP / (sum(heights) / len(heights))
        grid = figure.add_gridspec(len(panels), 1, height_ratios=heights, hspace=gap, **margins)
        for index, (title, bars) in enumerate(panels.items()):
            axes = figure.add_subplot(grid[index])
            _panel(axes, bars)
            axes.set_title(title)
        axes.set_xlabel("billion tokens a day on each GPU")
        return style.save(figure, output, NAME)
