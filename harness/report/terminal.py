"""The report's short form: what a terminal holds. Text from rows is never read as rich's markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from harness.claims import ClaimResult
from harness.report import conformance, data, training
from harness.report.data import SUBJECTS, Report
from harness.report.tables import Table, cell_text
from harness.report.text import NONE, count, in_unit, number, one_line, plain

#: Verdict -> colour; the words say it too.
COLOURS = {"better": "green", "reproduced": "green", "not reproduced": "red", "not measured": "yellow"}
#: Lines of a list or table before the rest is only counted.
MOST = 12
#: Characters of a reason.
MOST_CHARACTERS = 280
#: Points on several GPUs.
MOST_POINTS = 40
#: Characters that a column of claims needs to be read.
NARROW = 18


def render(out: Console, report: Report) -> None:
    """Print head, claims, the paper's layers, what changed and what failed."""
    out.print(Text(data.TITLE, style="bold"))
    for line in report.summary:
        _line(out, line)
    for machine in report.machines:
        facts = "; ".join(f"{what} {', '.join(values)}" for what, values in machine.facts)
        statuses = ", ".join(f"{points:,} {status}" for status, points in machine.statuses)
        _line(out, f"{machine.name}: {statuses}; {facts}", indent=2)
    _list(out, "Missing", report.missing, "yellow")
    _list(out, "Not used", report.problems, "yellow")
    _claims(out, report)
    _layers(out, report)
    _training(out, report)
    for name in ("against", "repeated"):
        table = report.table(name)
        if table is not None and (table.rows or name == "against"):
            changes(out, table)
    _failures(out, report)
    _conformance(out, report)


def _line(out: Console, line: str, indent: int = 0, style: str = "") -> None:
    out.print(Padding(Text(one_line(line), style=style), (0, 0, 0, indent)))


def _list(out: Console, title: str, lines: Sequence[str], style: str) -> None:
    if lines:
        out.print(Text(title, style="bold"))
        for line in lines[:MOST]:
            _line(out, line, 2, style)
        if len(lines) > MOST:
            _line(out, f"… {len(lines) - MOST} more", 2)


def _table(out: Console, title: str, columns: Iterable[tuple[str, str]], rows: Iterable[Sequence[str | Text]]) -> None:
    heading = Text(title, style="bold") if title else None
    table = RichTable(title=heading, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name, kind in columns:
        table.add_column(Text(name), justify="right" if kind == "number" else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row))
    out.print(table)


def _claims(out: Console, report: Report) -> None:
    pairs = data.verdict_counts(report.claims)
    rows: list[list[str | Text]] = []
    for result in report.claims:
        claim = result.claim
        found = {(finding.gpu, finding.subject): finding for finding in result.findings}
        # Words, so that a narrow column breaks between them.
        cells: list[str | Text] = [plain(claim.id).replace("-", " "), in_unit(claim.paper, claim.unit)]
        for gpu, subject, _ in pairs:
            finding = found.get((gpu, subject))
            if finding is None:
                cells.append(NONE)
                continue
            value = f"{in_unit(finding.value, claim.unit, finding.ci95)} " if finding.value is not None else ""
            cells.append(Text(f"{value}{plain(finding.verdict)}", style=COLOURS.get(finding.verdict, "")))
        values = [in_unit(prediction.value, claim.unit) for prediction in result.predictions]
        # Of the official kernels, then of ours.
        cells.append(NONE if set(values) <= {NONE} else " / ".join(values))
        rows.append(cells)
    known = [one.gpu for result in report.claims for one in result.predictions if one.value is not None]
    predicted = ", ".join(dict.fromkeys(known))
    columns = [("claim", "text"), ("paper, H100", "number")]
    columns += [(f"{plain(gpu)}: {SUBJECTS.get(subject, subject)}", "text") for gpu, subject, _ in pairs]
    columns += [(f"{plain(predicted)}: predicted, not measured", "number")] if predicted else []
    title = "The paper's claims, with 95 % intervals"
    if out.width >= NARROW * len(columns):
        _table(out, title, columns, [row[: len(columns)] for row in rows])
    else:  # a line for each finding
        out.print(Text(title, style="bold"))
        for name, *cells in rows:
            _line(out, str(name), 2, "bold")
            for (column, _), cell in zip(columns[1:], cells, strict=False):
                _line(out, f"{column}: {cell.plain if isinstance(cell, Text) else cell}", 4)
    _list(out, "Not measured", [line for result in report.claims for line in _reasons(result)], "")


def _reasons(result: ClaimResult) -> list[str]:
    """Why nothing was measured of a claim, on whichever GPU; none where something was. What was run and told nothing
    stands first, and then each finding names whose it is."""
    findings = [finding for finding in result.findings if finding.reason]
    if not findings or any(finding.verdict != "not measured" for finding in result.findings):
        return []
    name = plain(result.claim.id)
    if not any(finding.rows for finding in findings):
        return [f"{name}: {one_line(plain(findings[0].reason), MOST_CHARACTERS)}"]
    return [
        f"{name}, {plain(finding.gpu)}, {SUBJECTS.get(finding.subject, finding.subject)}: "
        f"{one_line(plain(finding.reason), MOST_CHARACTERS)}"
        for finding in sorted(findings, key=lambda finding: not finding.rows)
    ]


def _layers(out: Console, report: Report) -> None:
    """Forward + backward of SonicMoE: the paper's beside every GPU's, official and ours."""
    wanted = ("sonicmoe_official", "sonicmoe_triton")
    found = [
        line for line in report.layers if line.quantity == "forward + backward TFLOPS" and line.implementation in wanted
    ]
    by_shape: dict[tuple[str, str], dict[str, int]] = {}
    for index, line in enumerate(found):
        by_shape.setdefault((line.model, line.shape), {})[line.implementation] = index
    rows = []
    for (model, shape), names in by_shape.items():
        cells = [f"{model} n={shape.split(',')[2]}"]
        official = found[names[wanted[0]]] if wanted[0] in names else None
        cells.append(number(official.paper if official else None))
        for gpu in report.layer_gpus:
            for name in wanted:
                value = found[names[name]].measured.get(gpu) if name in names else None
                cells.append(value.text.split(" [")[0] if value else NONE)
            cells.append(report.paired.get((gpu, shape), NONE))
        rows.append(cells)
    columns = [("layer", "text"), ("paper, H100", "number")]
    for gpu in report.layer_gpus:
        columns += [(f"{gpu}: official", "number"), ("ours", "number"), ("time, official / ours", "number")]
    _table(out, "Forward + backward of SonicMoE, TFLOPS; times in pairs", columns, rows)


def _training(out: Console, report: Report) -> None:
    """Rates, ratios and projection of training steps; reasons, places and dates are in the other forms."""
    for name, (_, titles) in training.TERMINAL.items():
        table = report.table(name)
        if table is None or not table.rows:
            continue
        kinds = {column.title: column.kind for column in table.columns}
        rows = [row for row in table.rows if not training.losses_alone(table, row)][:MOST_POINTS]
        out.print(Text(table.title, style="bold"))
        for above, lines in training.grouped(table, rows).items():
            _line(out, above, 2)
            # What is "ok" in every line needs no column.
            shown = [i for i, title in enumerate(titles) if title != "status" or {line[i] for line in lines} != {"ok"}]
            columns = [(titles[i], kinds.get(titles[i], "text")) for i in shown]
            _table(out, "", columns, [[line[i] for i in shown] for line in lines])
        if len(table.rows) > len(rows):
            _line(out, f"… {len(table.rows) - len(rows)} more in the other forms", 2)
        if name == training.PROJECTION:
            _line(out, table.about, 2)


def changes(out: Console, table: Table) -> None:
    """Print how many points changed, and the largest changes."""
    place = [column.title for column in table.columns].index("change")
    words: dict[str, int] = {}
    for row in table.rows:
        words[cell_text(row[place])] = words.get(cell_text(row[place]), 0) + 1
    summary = ", ".join(f"{points} {word}" for word, points in words.items()) or table.empty
    _line(out, f"{table.title}: {summary}", style="bold")
    changed = [row for row in table.rows if cell_text(row[place]) != "within intervals"]
    # The slowest and the fastest, whose order is the table's.
    shown = changed if len(changed) <= MOST else [*changed[: MOST // 4], *changed[-(MOST // 4) :]]
    if shown:
        lines = []
        for row in shown:
            cells = [one_line(cell_text(cell)) for cell in row[: place + 2]]
            lines.append([", ".join(filter(None, cells[:place])), *cells[place:]])
        title = f"Largest changes ({len(shown)} of {len(changed)})" if len(changed) > len(shown) else "Changes"
        _table(out, title, [("point", "text"), ("change", "text"), ("after / before", "number")], lines)


def across(out: Console, table: Table) -> None:
    """Print the same points on several GPUs: a line for each point, its names in one column."""
    numbers = [index for index, column in enumerate(table.columns) if column.kind == "number"]
    rows = []
    for row in table.rows:
        cells = [one_line(cell_text(cell)) for cell in row]
        names = [cell for index, cell in enumerate(cells) if index not in numbers and cell not in ("", NONE)]
        rows.append([", ".join(names), *(cells[index] for index in numbers)])
    columns = [("point", "text"), *((table.columns[index].title, "number") for index in numbers)]
    _table(out, table.title, columns, rows[:MOST_POINTS])
    if len(rows) > MOST_POINTS:
        _line(out, f"… {len(rows) - MOST_POINTS} more; moebench report over a folder with both has all", 2)


def _failures(out: Console, report: Report) -> None:
    table = report.table("failures")
    if table is None or not table.rows:
        return
    _line(out, f"Failures, {count(len(table.rows), 'reason')}", style="bold")
    for row in table.rows[:MOST]:
        machine, who, operation, status, points, shapes, reason, place = map(cell_text, row)
        _line(
            out, f"{status} ×{points}: {who}, {operation} on {machine} ({shapes}): {one_line(reason, 240)} [{place}]", 2
        )
    if len(table.rows) > MOST:
        _line(out, f"… {len(table.rows) - MOST} more in the other forms", 2)


def _conformance(out: Console, report: Report) -> None:
    """How many cases each implementation meets, and the reasons for what an implementation gets wrong."""
    met = report.table(conformance.SUMMARY)
    if met is None:
        return
    titles = [(column.title, "text") for column in met.columns if column.title != conformance.NOT_RUN]
    _table(out, "Conformance", titles, [list(map(cell_text, row[: len(titles)])) for row in met.rows])
    table = report.table(conformance.REASONS)
    wrong = [row for row in table.rows if row[2] not in conformance.EXPECTED] if table else []
    for row in wrong[:MOST]:
        machine, name, status, cases, reason, place = map(cell_text, row)
        _line(out, f"{status}: {name} on {machine} ({cases}): {one_line(reason, 240)} [{place}]", 2)
    if len(wrong) > MOST:
        _line(out, f"… {len(wrong) - MOST} more in the other forms", 2)
