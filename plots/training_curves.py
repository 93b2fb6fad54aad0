"""Loss curves of runs that differ in routing and seed, and what they say (from the runs' folders, not from rows).

Of runs that one names: python -m plots.runs RUN_FOLDER... --output FOLDER
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from harness.errors import printable
from harness.token_rounding import TOP_K, routing_name
from harness.training import log, power
from plots import style

NAME = "training_curves"
#: Tokens and losses of a run.
Curve = tuple[np.ndarray, np.ndarray]
#: Steps over which a training loss is averaged, as a share of the run: single batches differ by more than routings do.
WINDOW = 1 / 20


def smooth(values: Sequence[float] | np.ndarray, window: int) -> np.ndarray:
    """Means over ``window`` neighbours: len(values) - window + 1 of them."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[window:] - sums[:-window]) / window


def curves_of(folders: Sequence[Path]) -> dict[str, dict[int, Curve]]:
    """Arm -> seed -> the tokens seen and the training losses, by step.

    Raises:
        UserError: as `harness.training.power.arms_of`.
    """
    found: dict[str, dict[int, Curve]] = {arm: {} for arm in power.arms_of(folders)}
    for folder in folders:
        lines = [line for line in log.read(folder) if "loss" in line]
        curve = np.array([line["tokens"] for line in lines]), np.array([line["loss"] for line in lines])
        config = log.read_config(folder)
        found[routing_name(config["routing"], config["m_tile"])][config["seed"]] = curve
    return found


def runs_beside(rows: pd.DataFrame, results: Path) -> list[Path]:
    """Folders of runs that lie beside these rows, as `moebench train` puts them: ``<folder>/training/<run>``."""
    beside = set(rows.loc[(rows["operation"] == "training_step") & (rows["measured_on"] == "cuda"), "folder"])
    found = sorted(Path(results).resolve().glob(f"**/training/*/{log.CONFIG_FILE}"))
    return [path.parent for path in found if path.parents[2].name in beside]


def draw_largest(folders: Sequence[Path], output: Path) -> list[Path]:
    """`draw` the largest set of runs that differ in routing and seed alone (logs have no date that would last); nothing
    where no run by top-K has another to compare with."""
    sets = [(power.arms_of(runs), runs) for runs in power.sets_of(folders)]
    sets = [(arms, runs) for arms, runs in sets if TOP_K in arms and len(arms) > 1]
    if not sets:
        return []
    return draw(max(sets, key=lambda one: sum(map(len, one[0].values())))[1], output)


def draw(folders: Sequence[Path], output: Path) -> list[Path]:
    """Write ``training_curves.svg`` and ``.png`` into ``output``; returns the files.

    Left: training losses, averaged over a twentieth of the run, a line for each seed. Right: the same minus that of
    top-K with the same seed, where there are runs by top-K; of several seeds the mean, and the range in which they lie.

    Raises:
        UserError: as `curves_of`.
    """
    curves = curves_of(folders)
    config = log.read_config(folders[0])
    # Names of files and of data sets, in which a dollar sign begins no formula.
    name, implementation, corpus = (
        printable(config[key]).replace("$", r"\$") for key in ("name", "implementation", "corpus")
    )
    looks = _looks(list(curves))
    legend = [(Line2D([], [], **looks[arm], linewidth=1.7), f"{arm} ({len(runs)})") for arm, runs in curves.items()]
    with style.figure_style():
        page = style.Page(
            width=8.0,
            panels_height=2.7,
            legend=legend,
            title="Training loss by routing",
            subtitle=f"{name}, {config['layers']} layers, {implementation}, corpus {corpus}; in brackets the seeds.\n"
            "Losses in training, each arm's by its own routing, averaged over a twentieth of the run; right: of\n"
            "several seeds the mean, and their range.",
            notes=[
                "Last validation losses, routed by top-K; each interval is of its arm alone, and all lie beside the "
                "same runs by top-K:",
                *power.table(power.arms_of(folders)),
            ],
            right=0.2,
        )
        figure, margins = page.make()
        grid = figure.add_gridspec(1, 2, wspace=0.28, **margins)
        _panels(figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1]), curves, looks)
        return style.save(figure, output, NAME)


def _looks(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and dashes of each arm: where the colours are used up, they come again in dashes."""
    looks = {arm: {"color": colour} for arm, colour in style.colours([arm for arm in arms if arm != TOP_K]).items()}
    seen: Counter[str] = Counter()
    for look in looks.values():
        look["linestyle"] = ("-", "--", ":")[seen[look["color"]] % 3]
        seen[look["color"]] += 1
    return {TOP_K: {"color": style.INK}, **looks}


def _panels(left: Axes, right: Axes, curves: dict[str, dict[int, Curve]], looks: dict[str, dict[str, Any]]) -> None:
    steps = min(len(losses) for runs in curves.values() for _, losses in runs.values())
    window = max(round(steps * WINDOW), 1)
    base = {seed: smooth(losses[:steps], window) for seed, (_, losses) in curves.get(TOP_K, {}).items()}
    for arm, runs in curves.items():
        apart = []
        for seed, (tokens, losses) in runs.items():
            millions, averaged = tokens[window - 1 : steps] / 1e6, smooth(losses[:steps], window)
            left.plot(millions, averaged, **looks[arm], linewidth=1.0)
            apart += [averaged - base[seed]] if seed in base else []
        if arm == TOP_K or not apart:
            continue
        several = len(apart) > 1
        right.plot(
            millions,
            np.mean(apart, axis=0),
            **looks[arm],
            linewidth=1.8 if several else 1.0,
            zorder=3 if several else 2,
        )
        if several:
            low, high = np.min(apart, axis=0), np.max(apart, axis=0)
            right.fill_between(millions, low, high, color=looks[arm]["color"], alpha=0.15, linewidth=0, zorder=1)
    left.set_title("loss, nats a token")
    if right.lines:
        right.set_title("minus top-K's with the same seed")
        right.axhline(0, color="#404040", linewidth=0.8)
    else:
        style.sentence(right, "no run by top-K to compare with")
    for axes in (left, right):
        axes.set_xlabel("million tokens")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        style.plain_grid(axes)
