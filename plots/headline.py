"""The headline: how much faster, how much leaner, how far from the bound, in one wide picture."""

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
from plots.figure13_memory import implementation_legend, labels, memory_bar
from plots.figure14_throughput import BOUNDS, PASSES, bound_legend, bound_text, draw_bounds, throughput_bar

NAME = "headline"
MODEL = "7B"
#: Whose time the ratios are over, the first that has any ratio.
REFERENCES = ("sonicmoe_official", "sonicmoe_triton", "sonicmoe_torch")
#: Width of the number beside a bar, in widths of the panel.
NUMBER_WIDTH = 0.15


@dataclass(frozen=True)
class Ratio:
    """A ratio of times and its 95 % interval; ``points`` of them went into a mean. All NaN where there is none.
    ``found_choices``: as the column of `plots.rows.COLUMNS`."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    points: int = 0
    unstable: bool = False
    text: str = ""
    found_choices: bool = False


def ratios(rows: pd.DataFrame, reference: str, baseline: str) -> dict[str, Ratio]:
    """By shape: device time of forward + backward of ``baseline`` over that of ``reference``, from ratio rows; one
    measured the other way round is turned over."""
    chosen = table.by_precedence(
        rows[
            (rows["record"] == "ratio")
            & rows["operation"].isin(["moe_layer", ""])
            & (rows["pass"] == "forward_backward")
            & (rows["time_kind"] == "device")
            & (rows["measured_on"] == "cuda")
            & rows["dtype"].isin(["bfloat16", ""])
            & rows["method"].isin(["top_k", ""])
            & rows["distribution"].isin(["uniform", ""])
        ]
    )
    found: dict[str, Ratio] = {}
    for turned, (above, below) in ((True, (reference, baseline)), (False, (baseline, reference))):
        for _, row in chosen[(chosen["numerator"] == above) & (chosen["denominator"] == below)].iterrows():
            if row["status"] not in table.NUMBERS_ALLOWED or not row["value"] > 0:
                found.setdefault(row["shape"], Ratio(text=style.STATUS_TEXT.get(row["status"], row["status"])))
                continue
            value, low, high = row["value"], row["value_low"], row["value_high"]
            if turned:
                value, low, high = 1 / value, 1 / high, 1 / low
            found[row["shape"]] = Ratio(
                value, low, high, 1, row["status"] == "unstable", found_choices=row["found_choices"] > 0
            )
    return found


def geometric_mean(found: Iterable[Ratio]) -> Ratio:
    """The geometric mean of stable ratios. Its interval takes the shapes' errors as independent: half-widths of the
    logarithms add in squares. NaN bounds where one of the ratios has none."""
    stable = [ratio for ratio in found if not math.isnan(ratio.value) and not ratio.unstable]
    if not stable:
        return Ratio()
    mean = sum(math.log(ratio.value) for ratio in stable) / len(stable)
    if any(not (ratio.low > 0 and ratio.high > 0) for ratio in stable):
        return Ratio(math.exp(mean), points=len(stable))
    half = math.sqrt(sum((math.log(ratio.high / ratio.low) / 2) ** 2 for ratio in stable)) / len(stable)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(stable))


def paper_ratio(tflops: pd.DataFrame, baseline: str, shape: str) -> float:
    """The paper's forward + backward time of ``baseline`` over SonicMoE's, from the TFLOPS of its Figure 14 (FLOPs 6
    and 12 for forward and backward); NaN where it has no bar."""

    def time(name: str) -> float:
        forward, backward = (table.paper_value(tflops, name, shape, direction) for direction in PASSES)
        return 6 / forward + 12 / backward

    return time(baseline) / time("sonicmoe_official")


def _speed(axes: Axes, rows: pd.DataFrame, names: Sequence[str], palette: Mapping[str, str]) -> str:
    tflops, claim = table.paper_tflops(), table.claims()["throughput-vs-scattermoe-7b"]
    ratio_rows = rows[(rows["record"] == "ratio") & rows["operation"].isin(["moe_layer", ""])]
    involved = set(ratio_rows["numerator"]) | set(ratio_rows["denominator"])
    reference = next((name for name in REFERENCES if name in involved), REFERENCES[0])
    baselines = [name for name in names if name != reference]
    by_name = {name: ratios(rows, reference, name) for name in baselines}
    known = {
        name: paper_ratio(tflops, name, table.HEADLINE_SHAPE) if reference == REFERENCES[0] else math.nan
        for name in baselines
    }
    baselines = [name for name in baselines if by_name[name] or not math.isnan(known[name])]
    here = {name: by_name[name].get(table.HEADLINE_SHAPE, Ratio()) for name in baselines}
    # Layers of other models are measured too, by other sweeps.
    paper = {shape for _, shape in table.paper_shapes()}
    means = {
        name: geometric_mean(ratio for shape, ratio in by_name[name].items() if shape in paper) for name in baselines
    }
    numbers = [claim["value"], 1.0, *known.values()]
    numbers += [r.high if not math.isnan(r.high) else r.value for r in [*here.values(), *means.values()]]
    end = max(number for number in numbers if not math.isnan(number)) * 1.36
    axes.set_xlim(0, end)
    axes.set_ylim(len(baselines) - 0.4, -0.6)
    for place, name in enumerate(baselines):
        colour, ratio, mean = palette[name], here[name], means[name]
        if not math.isnan(ratio.value):
            axes.barh(place, ratio.value, height=0.62, color=colour, zorder=2, linewidth=0,
                      hatch="/////" if ratio.unstable else None, edgecolor=style.edge(colour))  # fmt: skip
            if not math.isnan(ratio.low):
                axes.hlines(place, ratio.low, ratio.high, color=style.INK, linewidth=1.1, zorder=5)
                axes.vlines([ratio.low, ratio.high], place - 0.13, place + 0.13, color=style.INK, linewidth=1.1,
                            zorder=5)  # fmt: skip
        if not math.isnan(known[name]):
            outline = style.edge(colour, 0.5 if not math.isnan(ratio.value) else 0.85)
            axes.barh(place, known[name], height=0.56, fill=False, edgecolor=outline, linewidth=1.1, zorder=4)
        if not math.isnan(mean.value):
            if not math.isnan(mean.low):
                axes.hlines(place, mean.low, mean.high, color=style.INK, linewidth=1.1, zorder=6)
            axes.plot([mean.value], [place], linestyle="none", marker="o", markersize=4.8, markerfacecolor="white",
                      markeredgecolor=style.INK, markeredgewidth=1.0, zorder=7)  # fmt: skip
        ends = [n for n in (ratio.value, ratio.high, known[name], mean.value, mean.high) if not math.isnan(n)]
        if name == "scattermoe" and reference == REFERENCES[0]:
            axes.plot([claim["value"]], [place - 0.40], linestyle="none", marker="v", markersize=6, color=style.INK,
                      zorder=8, clip_on=False)  # fmt: skip
            ends.append(claim["value"])
        text = f"{ratio.value:.2f}×" if not math.isnan(ratio.value) else ratio.text
        if not text and not math.isnan(known[name]):
            text = f"paper {known[name]:.2f}×"
        right = max(ends, default=0)
        # The line at 1 would go through it.
        if 1 - NUMBER_WIDTH * end < right < 1:
            right = 1
        axes.text(right + 0.02 * end, place, text, va="center", ha="left", fontsize=7.5)
    axes.axvline(1, color=style.INK, linewidth=0.8, zorder=3)
    axes.set_yticks(range(len(baselines)), [style.label(name, labels(rows)) for name in baselines])
    style.plain_grid(axes, "x")
    axes.set_xlabel("device time over that of\n" + style.label(reference, labels(rows)))
    counts = sorted({mean.points for mean in means.values()} - {0})
    if not counts:
        return ""
    if len(counts) == 1:
        return f"circle: geometric mean ({counts[0]} of the twelve layers)"
    return f"circle: geometric mean of what ran ({counts[0]} – {counts[-1]} of the twelve layers)"


def _memory(axes: Axes, layers: pd.DataFrame, names: Sequence[str], palette: Mapping[str, str]) -> bool:
    paper = table.paper_memory()
    (tokens, d), experts = table.MODELS[MODEL]
    notes = style.Footnotes()
    traced, top = False, 0.0
    for name in names:
        points = [
            memory_bar(layers, paper, name, MODEL, f"{tokens},{d},{n},{E},{K}", notes) for n, E, K in experts
        ]  # fmt: skip
        granularity = [d / n for n, _, _ in experts]
        dark = style.edge(palette[name])
        axes.plot(granularity, [p.paper for p in points], linestyle=(0, (2.5, 1.8)), linewidth=1.0,
                  color=style.edge(palette[name], 0.85), marker="o", markersize=4.6, markerfacecolor="white",
                  markeredgewidth=1.1, zorder=3)  # fmt: skip
        axes.plot(granularity, [p.value for p in points], linewidth=1.9, color=palette[name], marker="o",
                  markersize=5.2, markeredgecolor=dark, markeredgewidth=0.5, zorder=4)  # fmt: skip
        if any(not math.isnan(p.fake) for p in points):
            traced = True
            axes.plot(granularity, [p.fake for p in points], linestyle="none", marker="D", markersize=4.4,
                      markerfacecolor=style.pale(palette[name]), markeredgecolor=dark, zorder=5)  # fmt: skip
        top = max([top, *(p.top for p in points)])
    axes.set_xscale("log", base=2)
    axes.set_xticks([d / n for n, _, _ in experts], [f"{d / n:g}\n(n = {n})" for n, _, _ in experts])
    axes.minorticks_off()
    axes.set_xlim(d / experts[-1][0] * 0.82, d / experts[0][0] * 1.62)
    axes.set_ylim(0, (top or 1.0) * 1.08)
    # The claim is an arrow from the paper's MoMoE to its SonicMoE, beside the finest experts.
    claim = table.claims()["activation-memory-7b"]["value"]
    start = table.paper_value(paper, "momoe", table.HEADLINE_SHAPE)
    place = d / experts[0][0] * 1.13
    axes.annotate("", xy=(place, start * (1 - claim)), xytext=(place, start), zorder=6,
                  arrowprops={"arrowstyle": "-|>", "color": style.INK, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0,
                              "mutation_scale": 9})  # fmt: skip
    axes.text(place * 1.03, start * (1 - claim / 2), f"−{claim:.0%}".replace("%", " %"), fontsize=8, va="center")
    axes.set_xlabel("granularity d / n")
    axes.set_ylabel("GiB per layer")
    style.plain_grid(axes)
    return traced


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``headline.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    everything = table.one_gpu(rows)
    layers, tflops = table.layers(everything), table.paper_tflops()
    layers = layers[layers["shape"].isin([shape for _, shape in table.paper_shapes()])]
    names = style.ordered(set(layers["implementation"]) | set(tflops["implementation"]))
    palette = style.colours(names)
    notes = style.Footnotes()
    throughput = {
        (group, name): throughput_bar(layers, tflops, name, MODEL, table.HEADLINE_SHAPE, direction, notes)
        for group, direction in enumerate(PASSES)
        for name in names
    }
    bounds = {
        (group, variant): table.bound(everything, variant, direction, table.HEADLINE_SHAPE)
        for group, direction in enumerate(PASSES)
        for variant in BOUNDS
    }
    measured = any(not math.isnan(bar.value) for bar in throughput.values())
    measured |= bool(layers.loc[layers["measured_on"] == "cuda", "memory_layer"].notna().any())
    measured |= bool(everything.loc[everything["record"] == "ratio", "value"].notna().any())
    unstable = any(bar.unstable for bar in throughput.values())
    legend = implementation_legend(names, labels(layers))
    if measured:
        legend.append((style.key_measured(), "filled: measured"))
    legend.append((style.key_paper(), "outline: the paper's, H100"))
    legend.append((Line2D([], [], linestyle="none", marker="v", color=style.INK, markersize=6), "the paper's claim"))
    if len(layers[layers["measured_on"] == "fake"]):
        legend.append((style.key_fake(), "traced with fake tensors"))
    if unstable:
        legend.append((style.key_unstable(), "hatched: unstable"))
    legend += bound_legend((variant, value) for (_, variant), value in bounds.items())
    width = 12.0
    with style.figure_style():
        page = style.Page(
            width=width, panels_height=3.45, legend=legend, left=1.88, gap=0.1,
            title="SonicMoE: speed, memory, distance from the bound",
            subtitle=f"{style.gpu_text(table.gpus(everything))}, bfloat16, uniform routing, top-K; whiskers: 95 % "
            f"interval.{bound_text(bounds.values())}\n{style.PAPER_NOTE}.",
            notes=style.below(width, notes, most=8),
        )  # fmt: skip
        figure, margins = page.make()
        margins["bottom"] += 0.20 / figure.get_size_inches()[1]
        grid = figure.add_gridspec(1, 3, width_ratios=[1.05, 1.0, 1.45], wspace=0.22, **margins)
        left, middle, right = (figure.add_subplot(grid[0, column]) for column in range(3))
        said = _speed(left, everything, names, palette)
        left.set_title("Forward + backward, 7B, n = 256", pad=14)
        left.text(0, 1.015, said, transform=left.transAxes, fontsize=7.5, color=style.FAINT)
        _memory(middle, layers, names, palette)
        middle.set_title("Memory per layer, 7B", pad=14)
        middle.text(0, 1.015, "arrow: the paper's claim, against MoMoE", transform=middle.transAxes, fontsize=7.5,
                    color=style.FAINT)  # fmt: skip
        right.set_ylim(0, bars.limit(throughput, list(bounds.values())))
        bars.draw(right, throughput, list(PASSES), names)
        draw_bounds(right, bounds)
        right.set_ylabel("TFLOPS")
        right.set_title("Throughput, 7B, n = 256", pad=14)
        right.text(
            0, 1.015, "model FLOPs over the GPU's busy time", transform=right.transAxes, fontsize=7.5, color=style.FAINT
        )
        return style.save(figure, output, NAME)
