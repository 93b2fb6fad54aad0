"""Throughput of one MoE layer of each of six open models, by implementation."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from plots import bars, style
from plots import rows as table
from plots.bars import Bar
from plots.figure13_memory import implementation_legend, labels
from plots.figure14_throughput import throughput_bar
from plots.headline import Ratio, ratios

NAME = "open_models"
SWEEP = table.ROOT / "sweeps" / "open_models.toml"
PASSES = {"forward_backward": "Forward + backward", "forward": "Forward", "backward": "Backward"}
#: Whose time the ratios are over, and whose time is compared with it.
REFERENCE, BASELINES = "sonicmoe_triton", ("sonicmoe_official", "scattermoe")
#: Beside a ratio whose tiles were found on the machine.
FOUND_MARK = "*"
NO_ROWS = (
    "No rows yet: nobody has measured the layers of open models here.\n"
    "On a machine with a GPU:  moebench run open_models"
)
CAPTION = (
    "Routed experts only, as SwiGLU without biases, softmax over the K chosen logits: shared experts and the models' "
    "own scores are left out. gpt-oss-20b has expert biases and a clamped SwiGLU, which are left out too. Sizes are "
    "those of each model's config.json (sweeps/open_models.toml). TFLOPS: model FLOPs over the GPU's busy time.",
    "Ratios are of GPU time, forward + backward, both implementations in one process; above 1 our layer is faster.",
)


def models(sweep: Path = SWEEP) -> dict[str, str]:
    """Model -> the text of its layer's shape, in the order of the sweep's group ``models``."""
    with sweep.open("rb") as file:
        groups = tomllib.load(file)["shapes"]
    return {name: groups[name][0] for name in groups["models"]}


def implementations(sweep: Path = SWEEP) -> list[str]:
    """The implementations whose layers the sweep measures, in its order."""
    with sweep.open("rb") as file:
        points = tomllib.load(file)["points"]
    return [name for entry in points if entry["operation"] == "moe_layer" for name in entry["implementations"]]


def model_bar(layers: pd.DataFrame, name: str, model: str, shape: str, direction: str, notes: style.Footnotes) -> Bar:
    """One implementation's TFLOPS at one model's layer; a point without any row says that it was not measured."""
    bar = throughput_bar(layers, table.paper_tflops(), name, model, shape, direction, notes)
    missing = math.isnan(bar.value) and not bar.text
    return replace(bar, paper=math.nan, text="not measured") if missing else replace(bar, paper=math.nan)


def _not_measured(names: list[str], texts: dict[str, str]) -> list[str]:
    """A line of the implementations that nobody has measured on this GPU, where there are any."""
    return [f"Not measured yet: {', '.join(style.label(name, texts) for name in names)}."] if names else []


def group_name(model: str, shape: str) -> str:
    """Three lines: the model, then the sizes that differ between models."""
    _, d, n, experts, k = shape.split(",")
    return f"{model}\nd = {d}, n = {n}\nE = {experts}, K = {k}"


def _found_choices(
    layers: pd.DataFrame, names: Iterable[str], compared: Mapping[str, Mapping[str, Ratio]], texts: dict[str, str]
) -> list[str]:
    """A sentence on the ratios and bars with tiles that were found on the machine (`harness.tuners.tiles_found`), where
    there are any."""
    places = []
    for name in dict.fromkeys((*compared, *names)):
        shapes = table.found_choices(layers, name)
        by_shape = compared.get(name, {})
        at = {
            f"ratios ({FOUND_MARK})": [model for model, shape in models().items() if _found(by_shape.get(shape))],
            "bars": [model for model, shape in models().items() if shape in shapes],
        }
        told = " and ".join(f"{what} at {', '.join(where)}" for what, where in at.items() if where)
        places += [f"{style.label(name, texts)}'s {told}"] if told else []
    if not places:
        return []
    return [f"{table.FOUND_CHOICES}: {'; '.join(places)}."]


def _found(ratio: Ratio | None) -> bool:
    return ratio is not None and ratio.found_choices


def ratio_text(found: Mapping[str, Mapping[str, Ratio]], shape: str, texts: dict[str, str]) -> str:
    """A line for each baseline that has a ratio at this shape: its time over ours."""
    lines = []
    for baseline, by_shape in found.items():
        ratio = by_shape.get(shape)
        # That a baseline cannot run here, its bar's place says.
        if ratio is None or ratio.text == "unsupported":
            continue
        marks = FOUND_MARK * ratio.found_choices + ", unstable" * ratio.unstable
        value = ratio.text if math.isnan(ratio.value) else f"{ratio.value:.2f}×{marks}"
        lines.append(f"{style.label(baseline, texts).split(' (')[0]} / ours {value}")
    return "\n".join(lines)


def _panel(
    axes: Axes, direction: str, found: Mapping[tuple[int, str], Bar], groups: list[str], names: list[str]
) -> None:  # fmt: skip
    axes.set_ylim(0, bars.limit(found))
    bars.draw(axes, found, groups, names)
    axes.set_title(PASSES[direction])
    axes.set_ylabel("TFLOPS")


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``open_models.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    everything = table.one_gpu(rows)
    shapes = models()
    layers = table.layers(everything)
    layers = layers[layers["shape"].isin(shapes.values()) & (layers["measured_on"] == "cuda")]
    # Of an implementation without any row a bar would be a gap everywhere: a sentence says it once.
    names = style.ordered(layers["implementation"])
    absent = [name for name in style.ordered(implementations()) if name not in names]
    texts = labels(everything)
    notes = style.Footnotes()
    panels = {
        direction: {
            (group, name): model_bar(layers, name, model, shape, direction, notes)
            for group, (model, shape) in enumerate(shapes.items())
            for name in names
        }
        for direction in PASSES
    }  # fmt: skip
    compared = {baseline: ratios(everything, REFERENCE, baseline) for baseline in BASELINES}
    found_choices = _found_choices(layers, names, compared, texts)
    groups = [group_name(model, shape) for model, shape in shapes.items()]
    tokens = ", ".join(sorted({shape.split(",")[0] for shape in shapes.values()}))
    measured = len(layers) > 0
    below = (*CAPTION, *found_choices, *_not_measured(absent, texts)) if measured else ()
    legend: list[tuple[Any, str]] = implementation_legend(names, texts) if measured else []
    if any(bar.unstable for found in panels.values() for bar in found.values()):
        legend.append((style.key_unstable(), "hatched: unstable"))
    width = 10.0
    with style.figure_style():
        page = style.Page(
            width=width, panels_height=7.3 if measured else 0.9, legend=legend,
            title="One MoE layer of each of six open models",
            subtitle=f"{style.gpu_text(table.gpus(layers))}, T = {tokens}, bfloat16, uniform routing, top-K.",
            notes=style.below(width, notes, below),
        )  # fmt: skip
        figure, margins = page.make()
        if not measured:
            style.sentence(figure.add_subplot(figure.add_gridspec(1, 1, **margins)[0]), NO_ROWS)
            return style.save(figure, output, NAME)
        # Group names have more lines than the margin below allows for.
        margins["bottom"] += 0.30 / figure.get_size_inches()[1]
        grid = figure.add_gridspec(len(PASSES), 1, hspace=0.60, **margins)
        for index, (direction, found) in enumerate(panels.items()):
            under = groups
            if direction == "forward_backward":
                lines = [ratio_text(compared, shape, texts) for shape in shapes.values()]
                under = [f"{group}\n{line}" if line else group for group, line in zip(groups, lines, strict=True)]
            _panel(figure.add_subplot(grid[index]), direction, found, under, names)
        return style.save(figure, output, NAME)
