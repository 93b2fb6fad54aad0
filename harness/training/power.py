"""How small a difference of losses an experiment with few seeds can tell, and what it then says.

    python -m harness.training.power RUN_FOLDER...

An arm is what is trained alike but for the seed (a routing, say). Seeds move the validation loss at random; its
standard deviation, pooled over the arms that have several, is the yardstick for every comparison, also of an arm with
one seed. A difference that the experiment could not have detected is not measured. It is not called similar.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import optimize, stats

from harness.errors import UserError
from harness.token_rounding import ROUNDINGS, TOP_K
from harness.training import log

#: Of the two-sided test: the probability of seeing a difference where none is, and of seeing one that is there.
ALPHA, POWER = 0.05, 0.8


@dataclass(frozen=True)
class Comparison:
    """Two arms' mean validation losses.

    Attributes:
        difference: of the other arm minus the first one, nats a token.
        ci95: its 95 % interval.
        detectable: the smallest difference that such an experiment finds with a probability of `POWER`.
        verdict: ``worse``, ``better`` (the other arm; the interval excludes 0), else ``not measured``.
    """

    difference: float
    ci95: tuple[float, float]
    detectable: float
    verdict: str


def pooled_deviation(arms: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The seeds' standard deviation over all arms, and its degrees of freedom.

    Raises:
        UserError: no arm has two seeds: there is nothing to compare a difference with.
    """
    freedom = sum(len(arm) - 1 for arm in arms)
    if freedom < 1:
        raise UserError("no arm has two seeds, so nothing says how far seeds move the loss")
    squares = sum((len(arm) - 1) * statistics.variance(arm) for arm in arms if len(arm) > 1)
    return math.sqrt(squares / freedom), freedom


def detectable_difference(
    deviation: float, seeds: int, other_seeds: int, freedom: int, alpha: float = ALPHA, power: float = POWER
) -> float:
    """The smallest difference of two arms' means that a two-sided t-test finds with this power.

    Args:
        deviation: the seeds' standard deviation.
        seeds, other_seeds: of the two arms.
        freedom: degrees of freedom of the deviation.

    Raises:
        ValueError: a size that makes no sense.
    """
    if deviation < 0 or min(seeds, other_seeds, freedom) < 1 or not alpha < power < 1:
        raise ValueError("deviation must not be negative, seeds and freedom at least 1, power between alpha and 1")
    critical = stats.t.ppf(1 - alpha / 2, freedom)

    def lacking(shift: float) -> float:
        # The square of a t is an F, of which both tails are one.
        return float(stats.ncf.sf(critical**2, 1, freedom, shift**2)) - power

    shift = optimize.brentq(lacking, 1e-3, 10 * (critical + 3))
    return float(shift) * deviation * math.sqrt(1 / seeds + 1 / other_seeds)


def compare(arm: Sequence[float], other: Sequence[float], deviation: float, freedom: int) -> Comparison:
    """Two arms' losses, each one for each seed, by the deviation pooled over all arms."""
    difference = statistics.fmean(other) - statistics.fmean(arm)
    error = deviation * math.sqrt(1 / len(arm) + 1 / len(other))
    half = float(stats.t.ppf(1 - ALPHA / 2, freedom)) * error
    ci95 = difference - half, difference + half
    verdict = "worse" if ci95[0] > 0 else "better" if ci95[1] < 0 else "not measured"
    return Comparison(difference, ci95, detectable_difference(deviation, len(arm), len(other), freedom), verdict)


def arm_name(config: Mapping[str, Any]) -> str:
    """A routing, with the tile that it rounds to."""
    name = str(config["routing"])
    return f"{name}-{config['m_tile']}" if name in ROUNDINGS else name


def arms_of(folders: Sequence[Path]) -> dict[str, list[float]]:
    """Arm (see `arm_name`) -> last validation loss of each run.

    Raises:
        UserError: a folder without a run or without a validation, runs that differ in more than routing and seed, or
            in the step of their last validation.
    """
    arms: dict[str, list[float]] = {}
    seen: Mapping[str, object] | None = None
    for folder in folders:
        config = log.read_config(folder)
        validations = [line for line in log.read(folder) if "validation_loss" in line]
        if not validations:
            raise UserError(f"{folder}: has no validation loss yet")
        apart = ("routing", "m_tile", "seed", "name", "recompute", "checkpoint_every", "keep")
        same = {key: value for key, value in config.items() if key not in apart} | {"step": validations[-1]["step"]}
        if seen is not None and same != seen:
            field = next(key for key in same if same[key] != seen.get(key))
            raise UserError(f"{folder}: {field} = {same[field]!r}, {seen.get(field)!r} in the runs before")
        seen = same
        arms.setdefault(arm_name(config), []).append(float(validations[-1]["validation_loss"]))
    return arms


def table(arms: Mapping[str, Sequence[float]], deviation: float, freedom: int) -> list[str]:
    """A line for the seeds, and one for each arm: its loss, and beside top-K's, where that is among the arms."""
    lines = [f"seeds move the loss by {deviation:.4f} nats (standard deviation, {freedom} degrees of freedom)"]
    for arm, losses in arms.items():
        line = f"{arm}: {statistics.fmean(losses):.4f}, {len(losses)} seeds"
        if arm != TOP_K and TOP_K in arms:
            found = compare(arms[TOP_K], losses, deviation, freedom)
            line += f"; {found.difference:+.4f} [{found.ci95[0]:+.4f}, {found.ci95[1]:+.4f}] against top-K: "
            line += found.verdict
            if found.verdict == "not measured":
                line += f" (less than {found.detectable:.4f} cannot be told)"
        lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each arm beside top-K."""
    parser = argparse.ArgumentParser(description="Validation losses of runs that differ in routing and seed.")
    parser.add_argument("runs", type=Path, nargs="+")
    try:
        arms = arms_of(parser.parse_args(arguments).runs)
        print("\n".join(table(arms, *pooled_deviation(list(arms.values())))))
    except UserError as error:
        sys.exit(f"power: {error}")


if __name__ == "__main__":
    main()
