"""What the gate found, on the terminal, as JSON, as JUnit XML and as Markdown for a pull request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.errors import UserError
from harness.regress.baseline import BUSY, Baseline, Interval
from harness.regress.judge import DRIFT, FASTER, NEW, OVERLAP, REGRESSION, SAME, Finding, change
from harness.report.markdown import escape as markdown_escape
from harness.report.text import NONE, count, one_line, plain, with_interval

SCHEMA = 1
#: Kernels that a table names; JSON and JUnit name all.
_MOST_KERNELS = 3
#: Characters of a reason in a table; JSON and JUnit have all of it.
_MOST_REASON = 300


@dataclass(frozen=True)
class Report:
    """All that the four forms show.

    Attributes:
        path: of the baseline.
        environment: of this run; empty where no row has any.
        warnings: sentences on what may move times without a change of the code.
    """

    gpu: str
    path: str
    baseline: Baseline
    environment: dict[str, Any]
    warnings: tuple[str, ...]
    repeat: int
    findings: tuple[Finding, ...]

    @property
    def failing(self) -> list[Finding]:
        """What lets the gate fail: regressions first, the largest change before smaller ones."""
        found = [one for one in self.findings if one.failing]
        return sorted(found, key=lambda one: (one.outcome != REGRESSION, -(_change(one) or 0.0), one.what))

    @property
    def notable(self) -> list[Finding]:
        """What does not fail and is worth a line."""
        order = (DRIFT, OVERLAP, FASTER, NEW)
        found = [one for one in self.findings if one.outcome in order]
        return sorted(found, key=lambda one: (order.index(one.outcome), one.what))

    @property
    def exit_code(self) -> int:
        return 1 if self.failing else 0

    @property
    def verdict(self) -> str:
        """One line."""
        counts = [(name, sum(one.outcome == name for one in self.findings)) for name in _order(self.findings)]
        parts = ", ".join(f"{number} {name}" for name, number in counts)
        head = "failed" if self.failing else "passed"
        return f"Regression gate {head} on {self.gpu}: {count(len(self.findings), 'point')}, of which {parts or 'none'}"


def _order(findings: Iterable[Finding]) -> list[str]:
    """Outcomes that occur, failing ones first, ``ok`` last."""
    found = dict.fromkeys(one.outcome for one in findings)
    return sorted(found, key=lambda name: (name == SAME, not Finding("", "", name).failing))


def _change(found: Finding) -> float | None:
    if found.now is None or found.before is None:
        return None
    return change(found.now, found.before)


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:+.1%}"


def _interval(value: Interval | None) -> str:
    return NONE if value is None else with_interval(value.median, value.low, value.high)


def _second(found: Finding) -> str:
    look = found.second
    if look is None:
        return NONE
    return (
        f"{look.how}: {_percent(change(look.now, look.before))}, {_interval(look.now)} after {_interval(look.before)}"
    )


def _kernels(found: Finding, most: int = 0) -> list[str]:
    """A line for each kernel that grew, the one that lost most first; most = 0: all of them."""
    if not found.kernels:
        # Only where there were times to compare.
        asked = found.outcome in (REGRESSION, DRIFT, OVERLAP) and found.now is not None
        return [f"no single kernel grew beyond {found.threshold}"] if asked else []
    lines = []
    for kernel in found.kernels[: most or None]:
        if kernel.before is None:
            lines.append(f"{kernel.name}: new, {kernel.now:.1f} µs")
        else:
            by = _percent(kernel.now / kernel.before - 1.0) if kernel.before else "grew"
            lines.append(f"{kernel.name}: {by}, {kernel.before:.1f} to {kernel.now:.1f} µs")
    more = len(found.kernels) - len(lines)
    return [*lines, f"and {more} more"] if more else lines


def _by(found: Finding) -> list[str]:
    """A line where the times are not the usual ones."""
    return ["by its kernels' busy time"] if found.by == BUSY and found.before is not None else []


_COLUMNS = ("point", "outcome", "change", "ms now", "ms baseline", "second look", "kernels that grew")


def _cells(found: Finding, most: int) -> list[list[str]]:
    """The columns of `_COLUMNS`, each as lines."""
    reason = one_line(plain(found.reason), _MOST_REASON)
    outcome = [found.outcome, *_by(found), *([reason] if reason else [])]
    return [
        [found.what], outcome, [_percent(_change(found))], [_interval(found.now)], [_interval(found.before)],
        [_second(found)], _kernels(found, most) or [NONE],
    ]  # fmt: skip


def terminal(out: Console, report: Report) -> None:
    """A table of what is not simply as before, what is known of each of its lines, what else may have moved times, and
    the verdict."""
    shown = [*report.failing, *report.notable]
    if shown:
        table = Table(title="What changed", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("point", "outcome", "change", "kernel that grew most"):
            table.add_column(column, overflow="fold")
        for found in shown:
            kernel = (_kernels(found, 1) or [NONE])[0]
            cells = (found.what, found.outcome, _percent(_change(found)), kernel)
            table.add_row(*(escape(one_line(plain(cell))) for cell in cells))
        out.print(table, highlight=False)
        for found in shown:
            first, *others = _told(found).splitlines()
            colour = "red" if found.failing else "yellow"
            out.print(f"[{colour}]{escape(plain(first))}[/]", highlight=False, soft_wrap=True)
            for line in others:
                out.print(f"  {escape(one_line(plain(line), _MOST_REASON))}", highlight=False, soft_wrap=True)
    for warning in report.warnings:
        out.print(f"[yellow]warning[/] {escape(one_line(plain(warning)))}", highlight=False, soft_wrap=True)
    colour = "red" if report.failing else "green"
    out.print(f"[{colour}]{escape(one_line(plain(report.verdict)))}[/]", highlight=False, soft_wrap=True)


def as_dict(found: Finding) -> dict[str, Any]:
    """A finding in JSON types: times in ms, kernels in microseconds, changes as fractions."""

    def interval(value: Interval | None) -> dict[str, Any] | None:
        return None if value is None else {"median": value.median, "ci95": [value.low, value.high]}

    look = found.second
    return {
        "what": found.what,
        "key": found.key,
        "outcome": found.outcome,
        "failing": found.failing,
        "reason": found.reason,
        "threshold": str(found.threshold) if found.threshold else None,
        "judged_by": found.by,
        "change": _change(found),
        "now_ms": interval(found.now),
        "baseline_ms": interval(found.before),
        "second_look": None
        if look is None
        else {
            "how": look.how,
            "change": change(look.now, look.before),
            "now": interval(look.now),
            "baseline": interval(look.before),
        },
        "kernels": [{"name": one.name, "us": one.now, "baseline_us": one.before} for one in found.kernels],
    }


def as_json(report: Report) -> str:
    """Everything, for programs."""
    data = {
        "schema": SCHEMA,
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        "gpu": report.gpu,
        "environment": report.environment,
        "baseline": {
            "file": report.path,
            "made": report.baseline.made,
            "environment": report.baseline.environment,
            "threshold": str(report.baseline.threshold),
        },
        "repeat": report.repeat,
        "warnings": list(report.warnings),
        "points": [as_dict(found) for found in [*report.failing, *report.notable, *_same(report)]],
    }
    # As ASCII it holds whatever a reason has in it, lone surrogates too.
    return json.dumps(data, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def _same(report: Report) -> list[Finding]:
    return sorted((one for one in report.findings if one.outcome == SAME), key=lambda one: one.what)


def junit(report: Report) -> str:
    """One test case for each point; its name is the point's, its class ``moebench.regress``."""
    failing = report.failing
    attributes = {
        "name": "moebench regress",
        "tests": str(len(report.findings)),
        "failures": str(len(failing)),
        "errors": "0",
        "skipped": "0",
    }
    suites = ElementTree.Element("testsuites", attributes)
    suite = ElementTree.SubElement(suites, "testsuite", attributes)
    properties = ElementTree.SubElement(suite, "properties")
    facts = {"gpu": report.gpu, "baseline": report.path, "baseline made": report.baseline.made}
    for name, value in facts.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": plain(value)})
    for found in [*failing, *report.notable, *_same(report)]:
        case = ElementTree.SubElement(suite, "testcase", {"classname": "moebench.regress", "name": plain(found.what)})
        if found.failing:
            changed = f" {_percent(_change(found))}" if found.now is not None and found.before is not None else ""
            reason = f": {found.reason}" if found.reason else ""
            message = one_line(plain(f"{found.outcome}{changed}{reason}"), _MOST_REASON)
            failure = ElementTree.SubElement(case, "failure", {"type": found.outcome, "message": message})
            failure.text = plain(_told(found))
        elif found.outcome != SAME:
            ElementTree.SubElement(case, "system-out").text = plain(_told(found))
    if report.warnings:
        ElementTree.SubElement(suite, "system-out").text = plain("\n".join(report.warnings))
    ElementTree.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suites, encoding="unicode") + "\n"


def _told(found: Finding) -> str:
    lines = [f"{found.outcome}: {found.what}"]
    if found.reason:
        lines.append(found.reason)
    if found.now is not None and found.before is not None:
        changed = _percent(_change(found))
        times = f"{_interval(found.now)} ms after {_interval(found.before)} ms"
        lines.append("".join([times, *(f", {by}" for by in _by(found)), f": {changed} ({found.threshold})"]))
    if found.second is not None:
        lines.append(_second(found))
    lines += [f"kernel {line}" if found.kernels else line for line in _kernels(found)]
    return "\n".join(lines)


def _markdown(text: str) -> str:
    # A comment between sign and name: no reason shall notify anybody.
    return markdown_escape(text).replace("@", "@<!-- -->")


def markdown(report: Report) -> str:
    """For a pull request: the verdict, a table of what changed, and the rest folded."""
    mark = "❌" if report.failing else "✅"
    lines = [f"{mark} **{_markdown(report.verdict)}**", ""]
    lines += [f"- ⚠️ {_markdown(warning)}" for warning in report.warnings]
    lines += [""] if report.warnings else []
    shown = [*report.failing, *report.notable]
    if shown:
        lines += [*_markdown_table(shown, _MOST_KERNELS), ""]
    same = _same(report)
    lines += [f"<details><summary>Details: {count(len(same), 'point')} as before, environment</summary>", ""]
    if same:
        lines += [*_markdown_table(same, _MOST_KERNELS, columns=5), ""]
    repeated = f", each {report.repeat} times" if report.repeat > 1 else ""
    about = f"Times are the GPU's own, medians with 95 % intervals{repeated}. Baseline: {report.path}, of"
    lines += [_markdown(f"{about} {report.baseline.made}, threshold {report.baseline.threshold}."), ""]
    names = [name for name in report.baseline.environment if name in report.environment]
    lines += ["| environment | now | baseline |", "| --- | --- | --- |"]
    for name in names:
        now, before = report.environment[name], report.baseline.environment[name]
        lines.append(f"| {_markdown(name)} | {_markdown(str(now))} | {_markdown(str(before))} |")
    return "\n".join([*lines, "", "</details>", ""])


def _markdown_table(findings: Sequence[Finding], most: int, columns: int = len(_COLUMNS)) -> list[str]:
    head = _COLUMNS[:columns]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for found in findings:
        cells = ["<br>".join(map(_markdown, cell)) for cell in _cells(found, most)[:columns]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def check_writable(option: str, path: Path) -> None:
    """Refuse a file that cannot be written before anything is measured for it."""
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; name a file")
    above = next((folder for folder in path.absolute().parents if folder.exists()), None)
    if above is not None and not above.is_dir():
        raise UserError(f"{option} {path}: {above} is not a folder")


def write(out: Console, path: Path, text: str) -> None:
    """Write a file and say so. Raises `UserError` where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error
    out.print(f"wrote {path}", highlight=False, soft_wrap=True, markup=False)
