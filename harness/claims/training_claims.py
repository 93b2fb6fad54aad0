"""The claims on training: steps of two implementations, or of two routings, in turns (`moebench train --against`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from harness.claims.model import Finding
from harness.claims.paper import Entry
from harness.claims.rows import GpuRows, Line, Number, failure, number_of
from harness.claims.subjects import SUBJECTS, Measure, Part, measured, sentences, unmeasured
from harness.errors import UserError
from harness.token_rounding import TOP_K, routing_name
from harness.training import power
from harness.training.rows import asked

#: The arm that claims on rounding are about, as the paper rounds; of losses every other one is listed, and says how far
#: seeds move a difference.
ROUNDED = "nearest-128"


def step_ratio(configuration: str, numerator: str | None, arm: str, beside: str = "") -> Measure:
    """The measure of a claim on the time of a baseline's training step over SonicMoE's: by the newest row of those
    with the most layers.

    Args:
        configuration: whose layers and model are meant, with however many of them and on however many GPUs, the same
            of both.
        numerator: the baseline; None: SonicMoE itself, by top-K.
        arm: SonicMoE's routing (`routing_name`).
        beside: a configuration whose ratio is told where there is no other, but without a verdict: the claim is not
                about its like.
    """

    def measure(rows: GpuRows, entry: Entry, subject: str) -> Finding:
        plugin = SUBJECTS[subject]
        other = numerator or plugin

        def fits(line: Line, wanted: str) -> bool:
            row = line.row
            return (
                row["record"] == "ratio"
                and row["operation"] == "training_step"
                # The paper's rates are of whole steps, whatever the GPU is busy with.
                and row["time_kind"] == "host"
                and asked(row["variant"]).configuration == wanted
                and not row.get("denominator_variant")
                and (row["numerator"], row["denominator"]) == (other, plugin)
                and row["routing"]["method"] == TOP_K
                and _arm(row.get("denominator_routing") or row["routing"]) == arm
            )

        def of(wanted: str) -> list[Line]:
            fitting = (line for line in rows.every if fits(line, wanted))
            return sorted(fitting, key=lambda line: (asked(line.row["variant"]).layers, line.moment))

        found = of(configuration)
        if not found or found[-1].row["status"] != "ok":
            against = other if arm == TOP_K else f"{other}:{TOP_K}"
            routing = "" if arm == TOP_K else f" --routing {arm.split('-')[0]}"
            command = f"run: moebench train {configuration} --implementation {plugin}{routing} --against {against}"
            others = [line for line in of(beside)[-1:] if line.row["status"] == "ok"] if beside else []
            numbers = [(line.row["variant"], number_of(line)) for line in others]
            parts = [(f"not what is claimed: {what}", number.value, number.ci95) for what, number in numbers]
            return unmeasured(rows, subject, sentences(command, failure(found)), parts, others)
        remark = f"a whole training step, {found[-1].row['variant']}"
        return measured(rows, entry.claim, subject, number_of(found[-1]), remark)

    return measure


def _arm(routing: Mapping[str, Any]) -> str:
    return routing_name(routing["method"], routing["m_tile"])


def quality(rows: GpuRows, entry: Entry, subject: str) -> Finding:
    """Validation perplexity after training with nearest rounding / with top-K, of runs that differ in seed and routing
    alone: of the set in which most seeds have both, of several the newest. A difference that the seeds cannot tell is
    not measured."""
    plugin = SUBJECTS[subject]
    arms = power.judged(_runs(rows, plugin), ROUNDED)
    command = f"run: moebench train quality --implementation {plugin} --routing nearest --seed 0, to 3; and by top_k"
    if not arms:
        return unmeasured(rows, subject, command)
    losses = {arm: {seed: _validation_loss(line) for seed, line in its.items()} for arm, its in arms.items()}
    parts: list[Part] = [
        (f"perplexity, {arm}, {len(its)} seed{'s' * (len(its) > 1)}", math.exp(statistics.fmean(its.values())), None)
        for arm, its in losses.items()
    ]
    used = tuple(line for its in arms.values() for line in its.values())
    seeds = len(power.differences(losses[ROUNDED], losses[TOP_K]))
    try:
        if not seeds:
            raise UserError("the two routings share no seed")
        compared, deviation, _ = power.beside_top_k(losses)
    except UserError as error:
        return unmeasured(rows, subject, sentences(str(error), command), parts, used)
    against = compared[ROUNDED]
    (low, high), over = against.ci95, f"over {seeds} seed{'s' * (seeds > 1)}"
    limit = f"less than {against.detectable:.4f} cannot be told by these runs"
    if against.verdict == "not measured":
        said = f"validation loss with {ROUNDED} minus with top-K: {against.difference:+.4f} nats a token "
        said += f"[{low:+.4f}, {high:+.4f}] {over}, so no difference was seen; {limit}"
        more = f"what more seeds would tell: python -m harness.training.power --plan {deviation:.4f} {2 * seeds}"
        return unmeasured(rows, subject, sentences(said, more), parts, used)
    number = Number(math.exp(against.difference), (math.exp(low), math.exp(high)), used)
    remark = f"perplexity with {ROUNDED} / with top-K, seed by seed {over}: {against.verdict}; in nats a token, {limit}"
    return measured(rows, entry.claim, subject, number, remark, parts)


def _runs(rows: GpuRows, plugin: str) -> Iterator[tuple[tuple[str, ...], str, int, Line]]:
    """The plugin's runs with a validation as `power.judged` takes them."""
    for line in sorted(rows.every, key=lambda line: line.moment):
        row = line.row
        if (row["record"], row["operation"], row["status"]) != ("measurement", "training_step", "ok"):
            continue
        if row["implementation"] == plugin and not math.isnan(_validation_loss(line)):
            corpus = sorted(note for note in row.get("notes") or () if note.startswith("corpus "))
            key = row["variant"], str(row["shape"]), row["dtype"], *corpus
            yield key, _arm(row["routing"]), row["routing"]["seed"], line


def _validation_loss(line: Line) -> float:
    """NaN where there was no validation."""
    found = line.row["training"]["validation_loss"]
    return math.nan if found is None else found
