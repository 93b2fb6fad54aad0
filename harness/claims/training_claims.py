"""The claims on training: steps of two implementations, or of two routings, in turns (`moebench train --against`)."""

from __future__ import annotations

import math
import statistics

from harness.claims.model import Finding
from harness.claims.paper import Entry
from harness.claims.rows import GpuRows, Line, Number, failure, number_of
from harness.claims.subjects import SUBJECTS, Measure, Part, measured, sentences, unmeasured
from harness.errors import UserError
from harness.token_rounding import TOP_K
from harness.training import power


def step_ratio(configuration: str, numerator: str | None, method: str) -> Measure:
    """The measure of a claim on the time of a baseline's training step over SonicMoE's.

    Args:
        configuration: whose layers and model are meant, with however many layers were trained.
        numerator: the baseline; None: SonicMoE itself, by top-K.
        method: SonicMoE's routing.
    """

    def measure(rows: GpuRows, entry: Entry, subject: str) -> Finding:
        plugin = SUBJECTS[subject]
        other = numerator or plugin

        def fits(line: Line) -> bool:
            row = line.row
            return (
                row["record"] == "ratio"
                and row["operation"] == "training_step"
                and row["variant"].split(",")[0] == configuration
                and (row["numerator"], row["denominator"]) == (other, plugin)
                and row["routing"]["method"] == "top_k"
                and (row.get("denominator_routing") or row["routing"])["method"] == method
            )

        found = sorted((line for line in rows.every if fits(line)), key=lambda line: line.moment)
        if not found or found[-1].row["status"] != "ok":
            against = other if method == "top_k" else f"{other}:top_k"
            routing = "" if method == "top_k" else f" --routing {method}"
            command = f"run: moebench train {configuration} --implementation {plugin}{routing} --against {against}"
            return unmeasured(rows, subject, sentences(command, failure(found)))
        remark = f"a whole training step, {found[-1].row['variant']}"
        return measured(rows, entry.claim, subject, number_of(found[-1]), remark)

    return measure


#: The arm that the claim is about; every other one is listed, and says how far seeds move a difference.
ROUNDED = "nearest-128"


def quality(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """Validation perplexity after training with nearest rounding / with top-K, of runs that differ in seed and routing
    alone: the newest such set. A difference that the seeds cannot tell is not measured."""
    plugin = SUBJECTS[subject]
    sets: dict[tuple[str, str], dict[tuple[str, int], Line]] = {}
    for line in sorted(rows.every, key=lambda line: line.moment):
        row = line.row
        if (row["record"], row["operation"], row["status"]) != ("measurement", "training_step", "ok"):
            continue
        if row["implementation"] == plugin and not math.isnan(_validation_loss(line)):
            # Of one arm and seed the newer run counts; what was touched last is the newest set.
            key = row["variant"], str(row["shape"])
            runs = sets.pop(key, {})
            routing = row["routing"]
            arm = power.arm_name({"routing": routing["method"], "m_tile": routing["m_tile"]})
            sets[key] = {**runs, (arm, routing["seed"]): line}
    arms: dict[str, list[Line]] = {}
    for runs in sets.values():
        found: dict[str, list[Line]] = {}
        for (arm, _), line in runs.items():
            found.setdefault(arm, []).append(line)
        if {TOP_K, ROUNDED} <= set(found):
            arms = found
    command = f"run: moebench train quality --implementation {plugin} --routing nearest --seed 0, to 3; and by top_k"
    if not arms:
        return unmeasured(rows, subject, command)
    losses = {
        arm: {line.row["routing"]["seed"]: _validation_loss(line) for line in lines} for arm, lines in arms.items()
    }
    parts: list[Part] = [
        (f"perplexity, {arm}, {len(its)} seed{'s' * (len(its) > 1)}", math.exp(statistics.fmean(its.values())), None)
        for arm, its in losses.items()
    ]
    used = tuple(line for lines in arms.values() for line in lines)
    apart = {arm: power.differences(its, losses[TOP_K]) for arm, its in losses.items() if arm != TOP_K}
    try:
        if not apart[ROUNDED]:
            raise UserError("the two routings share no seed")
        deviation = power.pooled_deviation(list(apart.values()))
    except UserError as error:
        return unmeasured(rows, subject, sentences(str(error), command), parts, used)
    against = power.compare(apart[ROUNDED], *deviation)
    limit = f"less than {against.detectable:.4f} nats a token cannot be told by these runs"
    if against.verdict == "not measured":
        said = f"{against.difference:+.4f} nats [{against.ci95[0]:+.4f}, {against.ci95[1]:+.4f}]"
        return unmeasured(rows, subject, f"nearest rounding against top-K: {said}; {limit}", parts, used)
    low, high = against.ci95
    number = Number(math.exp(against.difference), (math.exp(low), math.exp(high)), used)
    remark = f"perplexity with nearest rounding / with top-K, seed by seed: {against.verdict}; {limit}"
    return measured(rows, entry.claim, subject, number, remark, parts)


def _validation_loss(line: Line) -> float:
    """NaN where there was no validation."""
    found = line.row["training"]["validation_loss"]
    return math.nan if found is None else found
