"""The claims on training: steps of two implementations, or of two routings, in turns (`moebench train --against`)."""

from __future__ import annotations

import math
import statistics

from harness.claims.model import Finding
from harness.claims.paper import Entry
from harness.claims.rows import GpuRows, Line, Number, failure, number_of
from harness.claims.subjects import SUBJECTS, Measure, Part, measured, sentences, unmeasured
from harness.errors import UserError
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
            sets[key] = {**runs, (row["routing"]["method"], row["routing"]["seed"]): line}
    arms: dict[str, list[Line]] = {}
    for runs in sets.values():
        found: dict[str, list[Line]] = {}
        for (method, _), line in runs.items():
            found.setdefault(method, []).append(line)
        if {"top_k", "nearest"} <= set(found):
            arms = found
    command = f"run: moebench train 1.4B --implementation {plugin} --routing nearest --seed 0, and 1, 2; and by top_k"
    if not arms:
        return unmeasured(rows, subject, command)
    losses = {
        method: {line.row["routing"]["seed"]: _validation_loss(line) for line in lines}
        for method, lines in arms.items()
    }
    parts: list[Part] = [
        (f"perplexity, {method}, {len(values)} seeds", math.exp(statistics.fmean(values.values())), None)
        for method, values in losses.items()
    ]
    used = tuple(line for lines in arms.values() for line in lines)
    apart = {method: power.differences(values, losses["top_k"]) for method, values in losses.items()}
    try:
        if not apart["nearest"]:
            raise UserError("the two routings share no seed")
        deviation = power.pooled_deviation([found for method, found in apart.items() if method != "top_k"])
    except UserError as error:
        return unmeasured(rows, subject, sentences(str(error), command), parts, used)
    its = power.compare(apart["nearest"], *deviation)
    limit = f"less than {its.detectable:.4f} nats a token cannot be told by these runs"
    if its.verdict == "not measured":
        said = f"{its.difference:+.4f} nats [{its.ci95[0]:+.4f}, {its.ci95[1]:+.4f}]"
        return unmeasured(rows, subject, f"nearest rounding against top-K: {said}; {limit}", parts, used)
    low, high = its.ci95
    number = Number(math.exp(its.difference), (math.exp(low), math.exp(high)), used)
    remark = f"perplexity with nearest rounding / with top-K, seed by seed: {its.verdict}; {limit}"
    return measured(rows, entry.claim, subject, number, remark, parts)


def _validation_loss(line: Line) -> float:
    """NaN where there was no validation."""
    found = line.row["training"]["validation_loss"]
    return math.nan if found is None else found
