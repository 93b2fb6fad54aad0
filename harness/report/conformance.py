"""The conformance suite in the report: who meets which public bug report, and why not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from harness.conformance import CASES, COVERED, IN_PART, LINES, OPERATION
from harness.report.rows import Stored, latest
from harness.report.tables import Cell, Column, Place, Table
from harness.report.text import NONE, count

#: Anchors of the tables.
NAME, SUMMARY, REASONS = "conformance", "conformance-summary", "conformance-reasons"
#: What stands where an implementation has met other cases on this machine, and not this one.
NOT_RUN = "not run"
#: Statuses besides ok that are no finding.
EXPECTED = ("unsupported", "not_installed")


def split(rows: Sequence[Stored]) -> tuple[list[Stored], list[Stored]]:
    """Rows of the suite, and all others."""
    of_suite = [stored for stored in rows if stored.row["operation"] == OPERATION]
    return of_suite, [stored for stored in rows if stored.row["operation"] != OPERATION]


def _newest(rows: Sequence[Stored]) -> list[Stored]:
    """The last row of each case and implementation on each machine, whatever the case's shape was then."""
    return latest(rows, lambda one: json.dumps([one.machine, one.text("variant"), one.text("implementation")]))


def table(rows: Sequence[Stored]) -> Table:
    """Cases down, those that nobody met too, implementations across; one machine below the other."""
    newest = _newest(rows)
    names = sorted({stored.text("implementation") for stored in newest})
    found: dict[tuple[str, str], dict[str, Stored]] = {}
    for stored in newest:
        found.setdefault((stored.machine, stored.text("variant")), {})[stored.text("implementation")] = stored
    symptoms = {line.name: line.symptom for line in LINES}
    lines_of = {case.name: case.lines for case in CASES}
    lines: list[tuple[Cell, ...]] = []
    here = {(stored.machine, stored.text("implementation")) for stored in newest}
    # Workers side by side leave rows in any order; cases that this checkout does not know come last.
    machines = list(dict.fromkeys(machine for machine, _ in found))
    suite = [case.name for case in CASES]
    others = [place for place in found if place[1] not in suite]
    places = [*((machine, case) for machine in machines for case in suite), *others]
    for machine, case in sorted(places, key=lambda place: machines.index(place[0])):
        its = found.get((machine, case), {})
        # Nothing where this checkout does not know the case.
        reports = ", ".join(lines_of.get(case, ()))
        absent = {name: NOT_RUN if case in suite and (machine, name) in here else NONE for name in names}
        statuses = [its[name].text("status") if name in its else absent[name] for name in names]
        symptom = "; ".join(dict.fromkeys(symptoms[line] for line in lines_of.get(case, ())))
        lines.append((machine, case, *statuses, reports, symptom))
    covered = ", ".join(dict.fromkeys(one.line for one in COVERED))
    parts = "; ".join(map(str, IN_PART))
    return Table(
        NAME, "Conformance",
        "Public bug reports of MoE kernels, each as its smallest input. ok: output and all gradients agree with the "
        "fp32 reference, and what the case asks for besides holds. Also met by tests of this repository, since they "
        f"concern measuring or our own kernels: {covered}. Met in part: {parts}. The suite has "
        f"{count(len(CASES), 'case')}; {NOT_RUN}: the implementation has met others on this machine, and not this one.",
        (Column("GPU", filter=True), Column("case"), *(Column(name, "status") for name in names),
         Column("reports"), Column("symptom", wide=True)),
        tuple(lines), "Nobody has run moebench conformance yet.",
    )  # fmt: skip


def reasons(rows: Sequence[Stored]) -> Table:
    """Why a case is not ok, those of one reason together."""
    found: dict[tuple[str, str, str, str], list[Stored]] = {}
    for stored in _newest(rows):
        if stored.row["status"] != "ok":
            key = (stored.machine, stored.text("implementation"), stored.text("status"), stored.text("reason"))
            found.setdefault(key, []).append(stored)
    lines: list[tuple[Cell, ...]] = []
    # What somebody must look at stands first; workers side by side leave the rows of implementations mixed.
    places = list(dict.fromkeys(key[:2] for key in found))
    ordered = sorted(found.items(), key=lambda item: (item[0][2] in EXPECTED, places.index(item[0][:2])))
    for (machine, name, status, reason), group in ordered:
        cases = [stored.text("variant") for stored in group]
        lines.append((machine, name, status, _listed(cases), reason, Place(group[0].file, group[0].line)))
    return Table(
        REASONS, "Conformance: what is not ok",
        "Cases of the table above whose status is not ok, those of one reason together, with the first of them.",
        (Column("GPU", filter=True), Column("implementation", filter=True), Column("status", filter=True),
         Column("cases", wide=True), Column("reason", wide=True), Column("first row", "place")),
        tuple(lines), "Every case is ok.",
    )  # fmt: skip


def in_words(counts: Counter[str], not_run: int = 0) -> str:
    """``36 ok, 2 unsupported of 38 cases``; with cases that were not run ``30 ok, 5 unsupported; 3 of 38 cases not
    run``."""
    found = sorted(counts.items(), key=lambda item: (item[0] != "ok", item[0]))
    words = ", ".join(f"{number:,} {status}" for status, number in found)
    total = count(counts.total() + not_run, "case")
    return f"{words}; {not_run:,} of {total} {NOT_RUN}" if not_run else f"{words} of {total}"


def summary(rows: Sequence[Stored]) -> Table:
    """How many cases each implementation meets on each machine, and which it has not met, in the rows' order."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for stored in _newest(rows):
        its = found.setdefault((stored.machine, stored.text("implementation")), {})
        its[stored.text("variant")] = stored.text("status")
    lines: list[tuple[Cell, ...]] = []
    for (machine, name), its in found.items():
        absent = [case.name for case in CASES if case.name not in its]
        words = in_words(Counter(its.values()), len(absent))
        lines.append((machine, name, words, _listed(absent) if absent else NONE))
    return Table(
        SUMMARY, "Conformance: how many cases",
        f"Of {count(len(CASES), 'case')} of the suite, those that each implementation has met on each machine.",
        (Column("GPU", filter=True), Column("implementation", filter=True), Column("cases"),
         Column(NOT_RUN, wide=True)),
        tuple(lines), "Nobody has run moebench conformance yet.",
    )  # fmt: skip


def _listed(cases: Sequence[str]) -> str:
    return ", ".join(cases) if len(cases) <= 4 else f"{', '.join(cases[:3])} and {len(cases) - 3} more"
