"""The claims on training: steps of two implementations, or of two routings, in turns (`moebench train --against`)."""

from __future__ import annotations

from harness.claims.model import Finding
from harness.claims.paper import Entry
from harness.claims.rows import GpuRows, Line, failure, number_of
from harness.claims.subjects import SUBJECTS, Measure, measured, sentences, unmeasured


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
