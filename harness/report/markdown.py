"""The report as Markdown. Text from rows is escaped, so that it can neither break a table nor turn into markup."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from harness.claims import Finding, Prediction
from harness.report import data
from harness.report.data import GLOSSARY, METHOD, SUBJECTS, Report
from harness.report.tables import Place, Table, cell_text
from harness.report.text import NONE, in_unit, number, one_line, plain

#: Tables with more rows are summed up; the page and the rows themselves have them all.
MOST = 200
_SPECIAL = re.compile(r"([\\`*\[\]|~$!#])")
_UNDERSCORE = re.compile(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def escape(text: str) -> str:
    """Text as Markdown that shows it as it is, on one line."""
    line = one_line(plain(text)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _UNDERSCORE.sub(r"\\_", _SPECIAL.sub(r"\\\1", line))


def _table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table of cells that are escaped already."""
    yield f"| {' | '.join(escape(name) for name, _ in columns)} |"
    yield f"| {' | '.join('---:' if kind == 'number' else '---' for _, kind in columns)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def render(report: Report, output: Path) -> str:
    """The whole file. ``output``: the folder that it will stand in."""
    lines = [f"# {data.TITLE}", ""]
    for sentence in report.summary:
        lines += [escape(sentence), ""]
    lines += _machines(report)
    for title, sentences in (("Missing", report.missing), ("Not used", report.problems)):
        if sentences:
            lines += [f"**{title}**", "", *(f"- {escape(sentence)}" for sentence in sentences), ""]
    lines += _claims(report)
    lines += _layers(report)
    for table in report.tables:
        if table.name != "layers":
            lines += _generic(report, table)
    lines += _figures(report, output)
    lines += ["## Method", "", METHOD, "", "## Glossary", ""]
    lines += [f"- **{escape(term)}**: {escape(meaning)}" for term, meaning in GLOSSARY]
    return "\n".join(lines) + "\n"


def _machines(report: Report) -> Iterator[str]:
    if report.machines:
        rows = []
        for machine in report.machines:
            facts = "; ".join(f"{what} {', '.join(values)}" for what, values in machine.facts)
            statuses = ", ".join(f"{points:,} {status}" for status, points in machine.statuses)
            dates = machine.first if machine.first == machine.last else f"{machine.first} to {machine.last}"
            rows.append([escape(machine.name), f"{machine.rows:,}", escape(statuses), dates, escape(facts)])
        columns = [("GPU", ""), ("rows", "number"), ("latest row of each point", ""), ("dates", ""), ("with", "")]
        yield from _table(columns, rows)
        yield ""


def _rows_behind(report: Report, finding: Finding) -> str:
    places = [Place(ref.file, ref.line) for ref in finding.rows]
    links = [f"[{number}]({report.href(place)})" for number, place in enumerate(places[:6], 1)]
    more = f" and {len(places) - 6} more" if len(places) > 6 else ""
    return f"rows {', '.join(links)}{more}" if links else ""


def _predicted(prediction: Prediction) -> str:
    return "*no prediction*" if prediction.value is None else "*predicted*"


def _claims(report: Report) -> Iterator[str]:
    yield from ("## The paper's claims", "")
    rows = []
    for result in report.claims:
        claim = result.claim
        name, value = f"**{escape(claim.text)}** ({escape(claim.measure)})", in_unit(claim.paper, claim.unit)
        for finding in result.findings:
            parts = "; ".join(
                f"{escape(what)}: {in_unit(part, claim.unit, ci95)}" for what, part, ci95 in data.finding_parts(finding)
            )
            remarks = ". ".join(filter(None, (escape(finding.reason), parts, _rows_behind(report, finding))))
            who = escape(f"{finding.gpu}, {SUBJECTS.get(finding.subject, finding.subject)}")
            found = in_unit(finding.value, claim.unit, finding.ci95)
            rows.append([name, value, who, found, f"**{escape(finding.verdict)}**", remarks])
            name = value = ""
        for prediction in result.predictions:
            found = in_unit(prediction.value, claim.unit)
            rows.append([name, value, escape(prediction.gpu), found, _predicted(prediction), escape(prediction.how)])
            name = value = ""
        if name:
            rows.append([name, value, NONE, NONE, "not measured", "no rows of a GPU"])
    columns = [("claim", ""), ("paper, H100", "number"), ("where, whose", ""), ("measured", "number"),
               ("verdict", ""), ("remarks and rows", "")]  # fmt: skip
    yield from _table(columns, rows)
    yield ""


def _layers(report: Report) -> Iterator[str]:
    """A table for each quantity: layers down, implementations across, the paper's line above each GPU's."""
    table = report.table("layers")
    if table is None:
        return
    yield from (f"## {table.title}", "", escape(table.about), "")
    for quantity in dict.fromkeys(line.quantity for line in report.layers):
        lines = [line for line in report.layers if line.quantity == quantity]
        labels = list(dict.fromkeys(line.label for line in lines))
        rows = []
        for model, shape in dict.fromkeys((line.model, line.shape) for line in lines):
            here = {line.label: line for line in lines if line.shape == shape}
            paper = [number(here[label].paper) if label in here else NONE for label in labels]
            rows.append([f"{model} {shape}", "paper, H100", *paper])
            for gpu in report.layer_gpus:
                found = [here[label].measured.get(gpu) if label in here else None for label in labels]
                texts = [NONE if value is None else escape(value.text.split(" [")[0]) for value in found]
                rows.append(["", escape(gpu), *texts])
        yield from (f"### {quantity[0].upper()}{quantity[1:]}", "")
        yield from _table([("layer T,d,n,E,K", ""), ("where", ""), *((label, "number") for label in labels)], rows)
        yield ""


def _generic(report: Report, table: Table) -> Iterator[str]:
    yield from (f"## {escape(table.title)}", "", escape(table.about), "")
    if not table.rows:
        yield from (escape(table.empty), "")
        return
    if table.name in ("against", "repeated"):
        place = [column.title for column in table.columns].index("change")
        rows = [row for row in table.rows if cell_text(row[place]) != "within intervals"]
        same = len(table.rows) - len(rows)
        yield from (f"{len(rows)} points changed; {same} stayed within their intervals.", "")
    else:
        rows = list(table.rows)
    if len(rows) > MOST:
        yield from (f"{len(rows):,} rows, too many for this form; report.html has them all. By what they are:", "")
        kept = [index for index, column in enumerate(table.columns) if column.filter]
        counts: dict[tuple[str, ...], int] = {}
        for row in rows:
            key = tuple(cell_text(row[index]) for index in kept)
            counts[key] = counts.get(key, 0) + 1
        columns = [*((table.columns[index].title, "") for index in kept), ("rows", "number")]
        yield from _table(columns, ([*map(escape, key), str(number)] for key, number in counts.items()))
    elif rows:
        cells = (
            [f"[{escape(cell.text)}]({report.href(cell)})" if isinstance(cell, Place) else escape(cell_text(cell))
             for cell in row]
            for row in rows
        )  # fmt: skip
        yield from _table([(column.title, column.kind) for column in table.columns], cells)
    yield ""


def _figures(report: Report, output: Path) -> Iterator[str]:
    if report.figures:
        yield from ("## Figures", "")
    for figure in report.figures:
        path = quote(os.path.relpath(figure.svg, output).replace(os.sep, "/"))
        yield from (
            f"![{escape(figure.caption)}]({path})",
            "",
            f"{escape(figure.folder)}: {escape(figure.caption)}",
            "",
        )
