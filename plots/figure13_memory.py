"""Figure 13: memory of one MoE layer after the forward pass, for the paper's twelve layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from plots import bars, style
from plots import rows as table
from plots.bars import Bar

NAME = "figure13_memory"
DEEPGEMM_PP = (
    "DeepGEMM++ has SonicMoE's backward here, and holds what that needs; the paper's holds what DeepGEMM-pt does."
)


def memory_bar(
    layers: pd.DataFrame, paper: pd.DataFrame, implementation: str, model: str, shape: str, notes: style.Footnotes
) -> Bar:
    """One implementation's layer memory at one shape, in GiB; a failure's reason goes to ``notes``."""
    own = layers[(layers["implementation"] == implementation) & (layers["shape"] == shape)]
    measured = table.best_row(own[own["measured_on"] == "cuda"], "memory_layer")
    traced = table.best_row(own[own["measured_on"] == "fake"], "memory_layer")
    value = fake = math.nan
    text, unstable = "", False
    if traced is not None and traced["status"] in table.NUMBERS_ALLOWED:
        fake = traced["memory_layer"] / table.GIB
    if measured is not None and measured["status"] in table.NUMBERS_ALLOWED:
        value, unstable = measured["memory_layer"] / table.GIB, measured["status"] == "unstable"
    else:
        failure = measured if measured is not None else traced if math.isnan(fake) else None
        if failure is not None:
            text = failure_text(failure, model, notes)
    known = table.paper_value(paper, implementation, shape)
    if not text and math.isnan(value) and math.isnan(fake) and not_in_paper(paper, implementation, shape):
        text = "not supported (paper)"
    return Bar(value=value, paper=known, fake=fake, unstable=unstable, text=text)


def failure_text(row: pd.Series, model: str, notes: style.Footnotes) -> str:
    """What stands in the slot of a point that gave no number, and its reason among the notes."""
    who = style.label(row["implementation"], {row["implementation"]: row["label"]})
    where = f"{model} {int(row['n'])},{int(row['E'])},{int(row['K'])}"
    status = row["status"]
    return style.STATUS_TEXT.get(status, status) + notes.mark(who, status, row["reason"], where)


def not_in_paper(paper: pd.DataFrame, implementation: str, shape: str, direction: str = "") -> bool:
    """Whether the paper names this point as not supported."""
    found = paper[
        (paper["implementation"] == implementation) & (paper["shape"] == shape) & (paper["pass"] == direction)
    ]
    return bool(len(found) and found["value"].isna().all())


def labels(rows: pd.DataFrame) -> dict[str, str]:
    """Labels of implementations as the rows give them, those of ratios included."""
    return {
        name: text
        for column, of in (
            ("numerator", "numerator_label"), ("denominator", "denominator_label"), ("implementation", "label"),
        )
        for name, text in zip(rows[column], rows[of], strict=True)
        if name and text
    }  # fmt: skip


def group_name(shape: str) -> str:
    """``24576,1536,256,128,8`` -> two lines: n, then E and K."""
    _, _, n, experts, k = shape.split(",")
    return f"n = {n}\nE = {experts}, K = {k}"


def implementation_legend(names: list[str], texts: dict[str, str]) -> list[tuple[Any, str]]:
    """Legend entries of the implementations, in their order."""
    palette = style.colours(names)
    return [(style.swatch(palette[name]), style.label(name, texts)) for name in names]


def draw(rows: pd.DataFrame | Iterable[Mapping[str, Any]], output: Path) -> list[Path]:
    """Write ``figure13_memory.svg`` and ``.png`` into ``output``; returns the files.

    Args:
        rows: stored rows or a table of them, of one GPU at most; may be empty.
    """
    everything = table.one_gpu(rows)
    layers, paper = table.layers(everything), table.paper_memory()
    wanted = table.paper_shapes()
    layers = layers[layers["shape"].isin([shape for _, shape in wanted])]
    names = style.ordered(set(layers["implementation"]) | set(paper["implementation"]))
    notes = style.Footnotes()
    bar_of = {
        (model, shape, name): memory_bar(layers, paper, name, model, shape, notes)
        for model, shape in wanted
        for name in names
    }
    legend = implementation_legend(names, labels(layers))
    if any(not math.isnan(bar.value) for bar in bar_of.values()):
        legend.append((style.key_measured(), "filled: measured"))
    legend.append((style.key_paper(), "outline: the paper's, H100"))
    if any(not math.isnan(bar.fake) for bar in bar_of.values()):
        legend.append((style.key_fake(), "traced with fake tensors"))
    if any(bar.unstable for bar in bar_of.values()):
        legend.append((style.key_unstable(), "hatched: unstable"))
    width = 10.0
    lines = style.below(width, notes)
    if any(name == "deepgemm_pp" and not math.isnan(bar.value) for (_, _, name), bar in bar_of.items()):
        lines.append(DEEPGEMM_PP)
    with style.figure_style():
        page = style.Page(
            width=width, panels_height=5.6, legend=legend,
            title="Memory of one MoE layer after its forward pass, weights and input included",
            subtitle=f"{style.gpu_text(table.gpus(layers))}, bfloat16, uniform routing, top-K.\n"
            f"{style.PAPER_NOTE} (read off Figure 13).",
            notes=lines,
        )  # fmt: skip
        figure, margins = page.make()
        grid = figure.add_gridspec(2, 2, hspace=0.34, wspace=0.13, **margins)
        for index, (model, ((tokens, d), experts)) in enumerate(table.MODELS.items()):
            axes = figure.add_subplot(grid[index // 2, index % 2])
            shapes = [f"{tokens},{d},{n},{E},{K}" for n, E, K in experts]
            panel = {(group, name): bar_of[model, shape, name] for group, shape in enumerate(shapes) for name in names}
            axes.set_ylim(0, bars.limit(panel))
            bars.draw(axes, panel, [group_name(shape) for shape in shapes], names)
            axes.set_title(f"{model}: T = {tokens}, d = {d}")
            if index % 2 == 0:
                axes.set_ylabel("GiB per layer")
        return style.save(figure, output, NAME)
