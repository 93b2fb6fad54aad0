"""Figures: rows, or the curves of training runs beside them, in; PNG and SVG out. `draw` makes all for each GPU.

A figure's module is imported when it is drawn: what only asks for figures' names need not wait for matplotlib.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

Figure = Callable[["pd.DataFrame | Iterable[Mapping[str, Any]]", Path], list[Path]]


@dataclass(frozen=True)
class InModule:
    """A function of the module ``plots.<name>``, which is imported when it is called."""

    name: str
    function: str = "draw"

    def module(self) -> ModuleType:
        return importlib.import_module(f"{__name__}.{self.name}")

    def __call__(self, *arguments: Any) -> list[Path]:
        written: list[Path] = getattr(self.module(), self.function)(*arguments)
        return written


#: Name -> function(rows of one GPU, output folder) -> files written; none where there is nothing to draw.
FIGURES: dict[str, Figure] = {
    name: InModule(name)
    for name in (
        "figure13_memory",
        "figure14_throughput",
        "headline",
        "granularity",
        "token_rounding",
        "cost_models",
        "open_models",
        "breakdown",
        "ablations",
        "kernels",
        "training_steps",
    )
}
#: Name -> function(folders of one GPU's training runs, output folder) -> files written, if there is what to compare.
RUN_FIGURES: dict[str, Callable[[Sequence[Path], Path], list[Path]]] = {
    "training_curves": InModule("training_curves", "draw_largest"),
}
#: Folder of the figures where no row was measured on a GPU.
NO_GPU = "no_gpu"


def draw(
    results: Path | None = None, output: Path | None = None, names: Iterable[str] | None = None
) -> tuple[list[Path], list[str]]:
    """Draw figures for every GPU in a results folder into ``output/<gpu>/``, or ``output/no_gpu/`` without any.

    Args:
        results: folder that holds ``<gpu>/*.jsonl`` and ``<gpu>/training/<run>/``; may be missing or empty; the
            project's own by default.
        output: where to write; ``results/figures`` by default.
        names: which of `FIGURES` and `RUN_FIGURES`; all by default. KeyError for an unknown one.

    Returns:
        The files written, and one sentence for each stored line that could not be read.
    """
    from plots import rows

    results = rows.RESULTS if results is None else Path(results)
    table, problems = rows.load(results)
    output = results / "figures" if output is None else Path(output)
    chosen = list(names if names is not None else [*FIGURES, *RUN_FIGURES])
    parts = [(rows.slug(gpu), rows.of_gpu(table, gpu)) for gpu in rows.gpus(table)]
    if not parts:
        parts = [(NO_GPU, rows.of_no_gpu(table))]
    written = []
    for folder, part in parts:
        for name in chosen:
            if name in RUN_FIGURES:
                from plots.training_curves import runs_beside

                written += RUN_FIGURES[name](runs_beside(part, results), output / folder)
            else:
                written += FIGURES[name](part, output / folder)
    return written, problems
