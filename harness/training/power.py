"""How small a difference of losses an experiment with few seeds can tell, and what it then says.

    python -m harness.training.power RUN_FOLDER...
    python -m harness.training.power --plan DEVIATION SEEDS

An arm is what is trained alike but for the seed: a routing. A seed gives the initial weights and the order of the data,
the same in every arm, so arms are compared seed by seed: what a seed does to both cancels. The differences' standard
deviation, pooled over the arms that have several seeds, is the yardstick, also for an arm with one seed. A difference
that the experiment could not have detected is not measured. It is not called similar.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from scipy import optimize, stats

from harness.errors import UserError, refusals
from harness.token_rounding import TOP_K, routing_name
from harness.training import log

#: Of the two-sided test: the probability of seeing a difference where none is, and of seeing one that is there.
ALPHA, POWER = 0.05, 0.8
#: Of a plan.
MOST_SEEDS, MOST_DEVIATION = 1_000_000, 1_000_000
#: A run, in whatever form.
Run = TypeVar("Run")


@dataclass(frozen=True)
class Comparison:
    """An arm's validation losses beside another's.

    Attributes:
        difference: mean over seeds of the arm's loss minus the other's, nats a token.
        ci95: its 95 % interval.
        detectable: the smallest difference that such an experiment finds with a probability of `POWER`.
        verdict: ``worse`` or ``better`` where the interval excludes 0, else ``not measured``.
    """

    difference: float
    ci95: tuple[float, float]
    detectable: float
    verdict: str


def pooled_deviation(arms: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The standard deviation of differences over all arms, and its degrees of freedom.

    Args:
        arms: of each arm, its loss minus the other's for each seed.

    Raises:
        UserError: no arm has two seeds: there is nothing to compare a difference with.
    """
    freedom = sum(len(arm) - 1 for arm in arms if arm)
    if freedom < 1:
        raise UserError("no two arms share two seeds, so nothing says how far seeds move a difference")
    squares = sum((len(arm) - 1) * statistics.variance(arm) for arm in arms if len(arm) > 1)
    return math.sqrt(squares / freedom), freedom


def detectable_difference(
    deviation: float, seeds: int, freedom: int, alpha: float = ALPHA, power: float = POWER
) -> float:
    """The smallest mean difference over so many seeds that a two-sided t-test finds with this power.

    Args:
        deviation: the differences' standard deviation.
        freedom: degrees of freedom of the deviation.

    Raises:
        ValueError: a size that makes no sense.
    """
    if deviation < 0 or min(seeds, freedom) < 1 or not alpha < power < 1:
        raise ValueError("deviation must not be negative, seeds and freedom at least 1, power between alpha and 1")
    critical = stats.t.ppf(1 - alpha / 2, freedom)

    def lacking(shift: float) -> float:
        # The square of a t is an F, of which both tails are one.
        return float(stats.ncf.sf(critical**2, 1, freedom, shift**2)) - power

    shift = optimize.brentq(lacking, 1e-3, 10 * (critical + 3))
    return float(shift) * deviation / math.sqrt(seeds)


def differences(arm: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """The arm's loss minus the other's, for each seed that both have."""
    return [arm[seed] - other[seed] for seed in sorted(set(arm) & set(other))]


def compare(found: Sequence[float], deviation: float, freedom: int) -> Comparison:
    """`differences` of one arm (at least one), by the deviation pooled over all arms."""
    difference = statistics.fmean(found)
    half = float(stats.t.ppf(1 - ALPHA / 2, freedom)) * deviation / math.sqrt(len(found))
    ci95 = difference - half, difference + half
    verdict = "worse" if ci95[0] > 0 else "better" if ci95[1] < 0 else "not measured"
    return Comparison(difference, ci95, detectable_difference(deviation, len(found), freedom), verdict)


def beside_top_k(losses: Mapping[str, Mapping[int, float]]) -> tuple[dict[str, Comparison], float, int]:
    """Each arm that shares a seed with top-K beside it; the differences' pooled deviation, and its degrees of freedom.

    Args:
        losses: arm -> seed -> validation loss.

    Raises:
        UserError: as `pooled_deviation`.
    """
    base = losses.get(TOP_K, {})
    apart = {arm: differences(its, base) for arm, its in losses.items() if arm != TOP_K}
    deviation, freedom = pooled_deviation(list(apart.values()))
    return {arm: compare(its, deviation, freedom) for arm, its in apart.items() if its}, deviation, freedom


def in_order(arms: Mapping[str, Mapping[int, Run]]) -> dict[str, Mapping[int, Run]]:
    """Top-K first, then the arms with most seeds, then by name."""
    return {arm: arms[arm] for arm in sorted(arms, key=lambda arm: (arm != TOP_K, -len(arms[arm]), arm))}


def judged(runs: Iterable[tuple[Hashable, str, int, Run]], arm: str) -> dict[str, Mapping[int, Run]]:
    """Arm -> seed -> run, of the set by which an arm is judged: of those that hold it and top-K the one in which most
    seeds have both, of several such sets the one that was touched last. Empty where no set holds both.

    Args:
        runs: what runs of one set share (all but routing and seed), arm, seed and the run, in the order in which they
            were made: of one arm and seed the later run counts.
    """
    sets: dict[Hashable, dict[str, dict[int, Run]]] = {}
    for key, its, seed, run in runs:
        found = sets.pop(key, {})
        found.setdefault(its, {})[seed] = run
        sets[key] = found
    whole = [found for found in sets.values() if {TOP_K, arm} <= set(found)]
    # Of equals `max` takes the first, so the last touched stands first.
    return in_order(max(reversed(whole), key=lambda found: len(set(found[TOP_K]) & set(found[arm])), default={}))


def arms_of(folders: Sequence[Path]) -> dict[str, Mapping[int, float]]:
    """Arm (`routing_name`) -> seed -> last validation loss; top-K first, then the arms with most seeds.

    Raises:
        UserError: a folder without a run or without a validation, runs that differ in more than routing and seed, or
            in the step of their last validation.
    """
    arms: dict[str, dict[int, float]] = {}
    seen: Mapping[str, object] | None = None
    for folder in folders:
        config, same, loss = _run(folder)
        if seen is not None and same != seen:
            field = next(key for key in same if same[key] != seen.get(key))
            raise UserError(f"{folder}: {field} = {same[field]!r}, {seen.get(field)!r} in the runs before")
        seen = same
        arms.setdefault(routing_name(config["routing"], config["m_tile"]), {})[config["seed"]] = loss
    return dict(in_order(arms))


def sets_of(folders: Sequence[Path]) -> list[list[Path]]:
    """The runs, put together where `arms_of` compares them; one without a validation yet is in no set."""
    sets: dict[str, list[Path]] = {}
    for folder in folders:
        with contextlib.suppress(UserError):
            sets.setdefault(json.dumps(_run(folder)[1], sort_keys=True), []).append(folder)
    return list(sets.values())


def _run(folder: Path) -> tuple[dict[str, Any], dict[str, Any], float]:
    """A run's configuration, what of it all arms must share, and the last validation loss. Raises as `arms_of`."""
    config = log.read_config(folder)
    validations = [line for line in log.read(folder) if "validation_loss" in line]
    if not validations:
        raise UserError(f"{folder}: has no validation loss yet")
    apart = ("routing", "m_tile", "seed", "name", "recompute", "shard", "checkpoint_every", "keep")
    same = {key: value for key, value in config.items() if key not in apart} | {"step": validations[-1]["step"]}
    return config, same, float(validations[-1]["validation_loss"])


def table(arms: Mapping[str, Mapping[int, float]]) -> list[str]:
    """A line for each arm: its loss, and beside top-K's, where that is among the arms; and one for the seeds."""
    lines = [
        f"{arm}: {statistics.fmean(its.values()):.4f}, {len(its)} seed{'s' * (len(its) > 1)}"
        for arm, its in arms.items()
    ]
    try:
        compared, deviation, freedom = beside_top_k(arms)
    except UserError as error:
        return [*lines, f"{error}."]
    for i, arm in enumerate(arms):
        if arm in compared:
            found = compared[arm]
            lines[i] += f"; {found.difference:+.4f} [{found.ci95[0]:+.4f}, {found.ci95[1]:+.4f}] against top-K: "
            lines[i] += found.verdict
            if found.verdict == "not measured":
                lines[i] += f" (less than {found.detectable:.4f} cannot be told)"
    degrees = f"{freedom} degree{'s' * (freedom > 1)} of freedom"
    return [*lines, f"A seed moves the difference of two arms by {deviation:.4f} nats (standard deviation, {degrees})."]


def plan(deviation: float, seeds: int) -> str:
    """What top-K and one arm with so many seeds will tell, and an arm with one seed beside them.

    Raises:
        UserError: one seed, or a deviation that is none, or more of either than any experiment has.
    """
    if not 2 <= seeds <= MOST_SEEDS or not 0 <= deviation <= MOST_DEVIATION:
        raise UserError(
            f"--plan {deviation:g} {seeds}: a deviation of at least 0 and at most {MOST_DEVIATION}, in nats, and at "
            f"least 2 and at most {MOST_SEEDS} seeds"
        )
    many, one = (detectable_difference(deviation, count, seeds - 1) for count in (seeds, 1))
    return (
        f"Two arms with {seeds} seeds each, whose difference a seed moves by {deviation:g} nats: a difference of "
        f"{many:.4f} nats is found with a probability of {POWER:.0%}; of an arm with one seed, {one:.4f}."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print each arm beside top-K, or what a plan can tell."""
    parser = argparse.ArgumentParser(description="Validation losses of runs that differ in routing and seed.")
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--plan", nargs=2, metavar=("DEVIATION", "SEEDS"), help="before any run: what could be told")
    given = parser.parse_args(arguments)
    with refusals("power"):
        if bool(given.runs) == bool(given.plan):
            raise UserError("name the folders of runs, or --plan DEVIATION SEEDS")
        if given.plan:
            try:
                deviation, seeds = float(given.plan[0]), int(given.plan[1])
            except ValueError as error:
                raise UserError(f"--plan {' '.join(given.plan)}: a number of nats, and a number of seeds") from error
            print(plan(deviation, seeds))
            return
        print("\n".join(table(arms_of(given.runs))))


if __name__ == "__main__":
    main()
