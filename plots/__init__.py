"""Figures: rows, or the curves of training runs beside them, in; PNG and SVG out. `draw` makes all for each GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from plots import (
    ablations,
    breakdown,
    cost_models,
    figure13_memory,
    figure14_throughput,
    granularity,
    headline,
    kernels,
    open_models,
    token_rounding,
    training_curves,
    training_steps,
)
from plots import rows as _rows

Figure = Callable[[pd.DataFrame | Iterable[Mapping[str, Any]], Path], list[Path]]

#: Name -> function(rows of one GPU, output folder) -> files written; none where there is nothing to draw.
FIGURES: dict[str, Figure] = {
    figure13_memory.NAME: figure13_memory.draw,
    figure14_throughput.NAME: figure14_throughput.draw,
    headline.NAME: headline.draw,
    granularity.NAME: granularity.draw,
    token_rounding.NAME: token_rounding.draw,
    cost_models.NAME: cost_models.draw,
    open_models.NAME: open_models.draw,
    breakdown.NAME: breakdown.draw,
    ablations.NAME: ablations.draw,
    kernels.NAME: kernels.draw,
    training_steps.NAME: training_steps.draw,
}
#: Name -> function(folders of one GPU's training runs, output folder) -> files written, if there is what to compare.
RUN_FIGURES: dict[str, Callable[[Sequence[Path], Path], list[Path]]] = {
    training_curves.NAME: training_curves.draw_largest,
}
#: Folder of the figures where no row was measured on a GPU.
NO_GPU = "no_gpu"


def draw(
    results: Path = _rows.RESULTS, output: Path | None = None, names: Iterable[str] | None = None
) -> tuple[list[Path], list[str]]:
    """Draw figures for every GPU in a results folder into ``output/<gpu>/``, or ``output/no_gpu/`` without any.

    Args:
        results: folder that holds ``<gpu>/*.jsonl`` and ``<gpu>/training/<run>/``; may be missing or empty.
        output: where to write; ``results/figures`` by default.
        names: which of `FIGURES` and `RUN_FIGURES`; all by default. KeyError for an unknown one.

    Returns:
        The files written, and one sentence for each stored line that could not be read.
    """
    table, problems = _rows.load(results)
    output = Path(output) if output is not None else Path(results) / "figures"
    chosen = list(names if names is not None else [*FIGURES, *RUN_FIGURES])
    found = _rows.gpus(table)
    parts = [(_rows.slug(gpu), _rows.of_gpu(table, gpu)) for gpu in found]
    if not parts:
        parts = [(NO_GPU, _rows.of_no_gpu(table))]
    written = []
    for folder, part in parts:
        for name in chosen:
            if name in RUN_FIGURES:
                written += RUN_FIGURES[name](training_curves.runs_beside(part, results), output / folder)
            else:
                written += FIGURES[name](part, output / folder)
    return written, problems
