"""The tables of the report, each built once and rendered by every form."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness import store
from harness.conformance import OPERATION
from harness.record import MEASURED_STATUSES
from harness.report import text
from harness.report.rows import Stored, latest, point_key, times
from harness.report.text import NONE

GIB = 2**30


@dataclass(frozen=True)
class Number:
    """A cell that sorts by ``value`` (None: last) and reads ``text``."""

    value: float | None
    text: str


@dataclass(frozen=True)
class Place:
    """A cell that names a row's place: file below the results folder and line."""

    file: str
    line: int

    @property
    def text(self) -> str:
        return f"{text.plain(self.file)}:{self.line}"


Cell = str | Number | Place


@dataclass(frozen=True)
class Column:
    """``kind`` is ``text``, ``number``, ``place`` or ``status`` (shown as a column titled so is); ``filter``: one value
    can be chosen; ``wide``: prose, may wrap."""

    title: str
    kind: str = "text"
    filter: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table in any form.

    Attributes:
        name: its anchor.
        title, about: the heading, and a sentence on what the columns mean.
        columns, rows: each row has one cell for each column.
        empty: what stands in place of a table without rows.
    """

    name: str
    title: str
    about: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    empty: str = "No rows."


def cell_text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def _number(value: float | None, digits: int = 4) -> Number:
    return Number(value, text.number(value, digits))


def _count(things: float | None) -> Number:
    return Number(things, NONE if things is None else f"{things:,.0f}")


def _interval(found: tuple[float, float, float] | None) -> Number:
    return Number(found[0], text.with_interval(*found)) if found else Number(None, NONE)


def _device(stored: Stored) -> tuple[tuple[float, float, float] | None, str]:
    """Device time and what it rests on."""
    for kind, found in times(stored).items():
        if kind.startswith("device"):
            return found, kind.removeprefix("device, ")
    return None, ""


def _as_number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def day(stored: Stored) -> str:
    """``2026-01-31 12:00``."""
    return stored.text("timestamp")[:16].replace("T", " ")


#: Where a line of one row comes from, the last columns of its table; their cells are `origin`.
ORIGIN = (Column("date (UTC)"), Column("reason", wide=True), Column("row", "place"))


def origin(stored: Stored) -> tuple[Cell, Cell, Cell]:
    """A line's cells under `ORIGIN`."""
    return day(stored), stored.text("reason"), Place(stored.file, stored.line)


_MEASUREMENT_COLUMNS = (
    Column("GPU", filter=True), Column("implementation", filter=True), Column("operation", filter=True),
    Column("variant"), Column("shape T,d,n,E,K"), Column("pass", filter=True), Column("status", filter=True),
    Column("device ms", "number"), Column("basis"), Column("host ms", "number"), Column("TFLOPS", "number"),
    Column("GB/s", "number"), Column("memory GiB", "number"), Column("routing"), Column("dtype"), Column("mode"),
    Column("sweep", filter=True), *ORIGIN,
)  # fmt: skip


def measurements(rows: Sequence[Stored]) -> Table:
    """The latest row of each point."""
    lines: list[tuple[Cell, ...]] = []
    for stored in rows:
        if stored.row["record"] != "measurement":
            continue
        device, basis = _device(stored)
        memory = _as_number(stored.get("memory_bytes", "layer"))
        lines.append((
            stored.machine, stored.text("implementation"), stored.text("operation"),
            stored.text("variant"), stored.shape, stored.text("pass"), stored.text("status"),
            _interval(device), basis, _interval(times(stored).get("host")),
            _number(_as_number(stored.get("tflops", "device"))), _number(_as_number(stored.get("gb_per_s", "device"))),
            _number(None if memory is None else memory / GIB), stored.routing, stored.text("dtype"), stored.mode,
            stored.text("sweep"), *origin(stored),
        ))  # fmt: skip
    return Table(
        "measurements", "Measurements",
        "The latest row of each point, with the 95 % interval of each median. Device ms: the GPU's own time, by replay "
        "of a graph or as the kernels' busy time (basis); host ms: what a host that launches the calls sees; TFLOPS: "
        "model FLOPs over device ms; memory: allocated after the forward pass, weights and input included.",
        _MEASUREMENT_COLUMNS, tuple(lines), "No measurements.",
    )  # fmt: skip


_RATIO_COLUMNS = (
    Column("GPU", filter=True), Column("numerator", filter=True), Column("denominator", filter=True),
    Column("operation", filter=True), Column("variant"), Column("shape T,d,n,E,K"), Column("pass", filter=True),
    Column("status", filter=True), Column("ratio", "number"), Column("samples", "number"), Column("time"),
    Column("routing"), Column("sweep", filter=True), *ORIGIN,
)  # fmt: skip


def ratios(rows: Sequence[Stored]) -> Table:
    """The latest ratio of each point."""
    lines: list[tuple[Cell, ...]] = []
    for stored in rows:
        if stored.row["record"] != "ratio":
            continue
        low, high = stored.get("ci95") or (None, None)
        value, samples = _as_number(stored.get("value")), _as_number(stored.get("samples"))
        bound, method = stored.text("denominator_variant"), stored.text("denominator_routing", "method")
        routing = f"{stored.routing} / {method}" if method else stored.routing
        lines.append((
            stored.machine, stored.text("numerator"),
            stored.text("denominator") + (f" ({bound})" if bound else ""), stored.text("operation"),
            stored.text("variant"), stored.shape, stored.text("pass"), stored.text("status"),
            Number(value, text.with_interval(value, low, high)), _count(samples), stored.text("time_kind"), routing,
            stored.text("sweep"), *origin(stored),
        ))  # fmt: skip
    return Table(
        "ratios", "Ratios",
        "The numerator's time over the denominator's, both in one process, call by call on the same data: above 1 the "
        "denominator is faster. The interval is of 95 %.",
        _RATIO_COLUMNS, tuple(lines), "No ratios.",
    )  # fmt: skip


#: The reason of every point for a GPU on a machine without one: how many there are is all that it says.
_NO_GPU = "this machine has no NVIDIA GPU"


def failures(rows: Sequence[Stored]) -> Table:
    """Points without numbers, those of one reason together."""
    found: dict[tuple[str, str, str, str, str], list[Stored]] = {}
    for stored in rows:
        if stored.row["status"] == "ok":
            continue
        who = stored.text("implementation") or f"{stored.text('numerator')} / {stored.text('denominator')}"
        operation, reason = stored.text("operation"), stored.text("reason")
        if reason == _NO_GPU:
            who = operation = "several"
        found.setdefault((stored.machine, who, operation, stored.text("status"), reason), []).append(stored)
    lines: list[tuple[Cell, ...]] = []
    for (machine, who, operation, status, reason), group in found.items():
        shapes = list(dict.fromkeys(stored.shape for stored in group))
        more = f"; {len(shapes) - 3} more" if len(shapes) > 3 else ""
        lines.append((machine, who, operation, status, _count(len(group)), "; ".join(shapes[:3]) + more, reason,
                      Place(group[0].file, group[0].line)))  # fmt: skip
    return Table(
        "failures", "Failures",
        "Rows whose status is not ok, those of one reason together, with the first of them. A point that cannot be "
        "measured is a row with its reason, never a gap.",
        (Column("GPU", filter=True), Column("implementation", filter=True), Column("operation", filter=True),
         Column("status", filter=True), Column("rows", "number"), Column("shapes T,d,n,E,K"),
         Column("reason", wide=True), Column("first row", "place")),
        tuple(lines), "No failures: every row is ok.",
    )  # fmt: skip


def runs(rows: Iterable[Stored]) -> Table:
    """One line for each run, the newest first."""
    found: dict[tuple[str, str, str], list[Stored]] = {}
    for stored in rows:
        found.setdefault((stored.text("run_id"), stored.text("sweep"), stored.machine), []).append(stored)
    lines: list[tuple[Cell, ...]] = []
    for (run, sweep, machine), group in found.items():
        dates = sorted(map(day, group))
        commits = sorted({commit_text(stored) for stored in group} - {""})
        statuses = Counter(stored.text("status") for stored in group)
        others = ", ".join(f"{number} {status}" for status, number in sorted(statuses.items()) if status != "ok")
        lines.append((dates[0], dates[-1], sweep, machine, ", ".join(commits), _count(len(group)),
                      _count(statuses["ok"]), others or NONE, run))  # fmt: skip
    lines.sort(key=lambda line: (line[0], line[-1], line[3]), reverse=True)
    return Table(
        "runs", "Runs", "Every run that left rows, earlier rows of repeated points included.",
        (Column("first row (UTC)"), Column("last row (UTC)"), Column("sweep", filter=True), Column("GPU", filter=True),
         Column("commit"), Column("rows", "number"), Column("ok", "number"), Column("other statuses", wide=True),
         Column("run")),
        tuple(lines), "No runs.",
    )  # fmt: skip


def commit_text(stored: Stored) -> str:
    """``4962de3`` or ``4962de3 (changed)``, where the code differed from the commit."""
    commit = stored.text("environment", "commit")[:7]
    return f"{commit} (changed)" if commit and stored.get("environment", "dirty") else commit


_POINT_COLUMNS = (
    Column("GPU", filter=True), Column("implementation", filter=True), Column("operation", filter=True),
    Column("variant"), Column("shape T,d,n,E,K"), Column("pass", filter=True), Column("routing"), Column("dtype"),
    Column("mode"),
)  # fmt: skip


def _point(stored: Stored) -> tuple[str, ...]:
    return (stored.machine, stored.text("implementation"), stored.text("operation"), stored.text("variant"),
            stored.shape, stored.text("pass"), stored.routing, stored.text("dtype"), stored.mode)  # fmt: skip


def _changes(pairs: Iterable[tuple[Stored, Stored]]) -> list[tuple[Cell, ...]]:
    """A line for each (before, after) that can be compared, the one that got slower the most first."""
    lines: list[tuple[float, tuple[Cell, ...]]] = []
    for before, after in pairs:
        place = (Place(after.file, after.line),)
        statuses = before.row["status"], after.row["status"]
        if statuses != ("ok", "ok"):
            measured = [status in MEASURED_STATUSES for status in statuses]
            if measured[0] == measured[1]:
                continue
            word = "fails now" if measured[0] else "works now"
            cells = (word, Number(None, NONE), "", Number(None, statuses[0]), Number(None, statuses[1]))
            lines.append((math.inf if measured[0] else -math.inf, (*_point(after), *cells, *place)))
            continue
        old, new = times(before), times(after)
        kind = next((kind for kind in old if kind in new), None)
        if kind is None:
            continue
        a, b = old[kind], new[kind]
        ratio, low, high = b[0] / a[0], b[1] / a[2], b[2] / a[1]
        word = "slower" if low > 1 else "faster" if high < 1 else "within intervals"
        cells = (word, Number(ratio, text.with_interval(ratio, low, high, 3)), kind, _interval(a), _interval(b))
        lines.append((ratio, (*_point(after), *cells, *place)))
    lines.sort(key=lambda line: (-line[0], *map(str, line[1][:6])))
    return [cells for _, cells in lines]


_CHANGE_COLUMNS = (
    *_POINT_COLUMNS, Column("change", filter=True), Column("after / before", "number"), Column("time"),
    Column("before, ms", "number"), Column("after, ms", "number"), Column("row", "place"),
)  # fmt: skip
_CHANGE_ABOUT = (
    "Slower and faster are said where the two 95 % intervals do not meet; above 1 the later row is slower. Runs differ "
    "by more than their intervals say, since a power cap moves the clock: a hint, while ratios decide."
)


def against(rows: Sequence[Stored], earlier: Sequence[Stored], name: str) -> Table:
    """These rows against an earlier set: points that are in both, on the same machine."""
    before = {point_key(stored): stored for stored in latest(_timed(earlier), point_key)}
    after = {point_key(stored): stored for stored in latest(_timed(rows), point_key)}
    lines = _changes((before[key], stored) for key, stored in after.items() if key in before)
    common = sum(key in before for key in after)
    about = (
        f"{text.count(common, 'point')} of {len(after):,} here and {len(before):,} there are in both. {_CHANGE_ABOUT}"
    )
    return Table("against", f"Against {name}", about, _CHANGE_COLUMNS, tuple(lines),
                 "No point is in both sets with a time to compare: nothing measured here was measured there on the "
                 "same GPU.")  # fmt: skip


def repeated(rows: Sequence[Stored]) -> Table:
    """The latest row of each point against the one before it, where a point was measured more than once."""
    groups: dict[str, list[Stored]] = {}
    for stored in _timed(rows):
        # A package that was missing is no change of its kernels, and takes no row's place (`harness.store.supersedes`).
        if stored.row["status"] != "not_installed":
            groups.setdefault(point_key(stored), []).append(stored)
    pairs = []
    for group in groups.values():
        group.sort(key=lambda stored: store.precedence(stored.row))
        if len(group) > 1:
            pairs.append((group[-2], group[-1]))
    return Table(
        "repeated", "Between runs",
        f"Points measured more than once: the latest row against the one before it. {_CHANGE_ABOUT}",
        _CHANGE_COLUMNS, tuple(_changes(pairs)), "No point was measured more than once.",
    )  # fmt: skip


def _timed(rows: Iterable[Stored]) -> list[Stored]:
    """Measurements on a GPU that have a time or might have had one: no counts, no cases of the conformance suite. A
    CPU's times say nothing."""
    return [
        stored
        for stored in rows
        if stored.row["record"] == "measurement" and stored.on_gpu and stored.row["operation"] != OPERATION
        and (stored.row["status"] not in MEASURED_STATUSES or times(stored))
    ]  # fmt: skip


def across(rows: Sequence[Stored]) -> Table | None:
    """The latest rows of the same points on several GPUs beside each other; None with fewer than two GPUs.

    Times are of one kind for all GPUs of a point: a graph's replay holds gaps that the kernels' busy time does not."""
    newest = [
        one for one in latest(rows, point_key)
        if one.on_gpu and one.row["record"] == "measurement" and one.row["operation"] != OPERATION
    ]  # fmt: skip
    gpus = sorted({one.machine for one in newest if one.row["status"] == "ok"})
    if len(gpus) < 2:
        return None
    points: dict[str, dict[str, Stored]] = {}
    for stored in newest:
        points.setdefault(store.identity(stored.row, None), {})[stored.machine] = stored
    lines: list[tuple[Cell, ...]] = []
    for found in points.values():
        if len(found) < 2:
            continue
        one = next(iter(found.values()))
        timed = {gpu: times(stored) for gpu, stored in found.items() if times(stored)}
        kinds = [kind for kind in next(iter(timed.values()), {}) if kind != "host"]
        kind = next((kind for kind in kinds if all(kind in its for its in timed.values())), "")
        first = timed.get(gpus[0], {}).get(kind)
        cells: list[Cell] = []
        for gpu in gpus:
            there = timed.get(gpu, {}).get(kind)
            status = found[gpu].text("status") if gpu in found else NONE
            if there is None:
                cells.append(Number(None, status))
            else:
                mark = "" if status == "ok" else f" {status}"
                cells.append(Number(there[0], f"{_interval(there).text}{mark}"))
            if gpu != gpus[0]:
                cells.append(_number(first[0] / there[0] if first and there else None, 3))
        lines.append((*_point(one)[1:], kind or NONE, *cells))
    columns = [*_POINT_COLUMNS[1:], Column("time")]
    for gpu in gpus:
        columns.append(Column(f"{gpu}, ms", "number"))
        if gpu != gpus[0]:
            columns.append(Column(f"times as fast as {gpus[0]}", "number"))
    return Table("across", "The same points on several GPUs",
                 "Times of the latest rows, with 95 % intervals, of one kind for all GPUs of a point.",
                 tuple(columns), tuple(lines), "No point was measured on more than one GPU.")  # fmt: skip
