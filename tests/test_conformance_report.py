"""The conformance suite in the report."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from conftest import ROOT
from fake_conformance import MET, StubWorker, run_suite
from rich.console import Console

from harness.conformance import CASES, OPERATION, command, get_case
from harness.registry import default_registry
from harness.report import conformance, data, html, markdown, terminal
from harness.report.rows import read
from harness.report.tables import cell_text


@pytest.fixture
def made(stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> data.Report:
    wrong = {"status": "crashed", "reason": "ValueError: <b>no</b> such | kernel"}
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: wrong if job["case"] == "k-of-1" else {}))
    # Earlier rows, of another size: what came later counts.
    run_suite(tmp_path / "cpu" / "a.jsonl", [replace(get_case("k-of-1"), cpu_shape="8,16,8,4,1")])
    run_suite(tmp_path / "cpu" / "conformance.jsonl", CASES)
    return data.build(tmp_path, tmp_path / "out")


def test_the_report_has_a_table_of_cases_and_one_of_reasons(made: data.Report) -> None:
    table, reasons = made.table("conformance"), made.table("conformance-reasons")
    assert table is not None and reasons is not None
    found = {cell_text(row[1]): [cell_text(cell) for cell in row] for row in table.rows}
    assert list(found) == [case.name for case in CASES]
    assert found["k-of-1"][2:] == ["crashed", "also: K = 1", "one expert for each token"]
    assert found["cuda-graph"][2] == "unsupported" and found["empty-expert"][2] == "ok"
    assert [cell_text(cell) for cell in reasons.rows[0]][1:5] == [
        "torch_loop", "crashed", "k-of-1", "while in build: ValueError: <b>no</b> such | kernel",
    ]  # fmt: skip
    met = made.table("conformance-summary")
    assert met is not None and [cell_text(cell) for cell in met.rows[0]][1:] == [
        "torch_loop", f"{len(CASES) - 3} ok, 1 crashed, 2 unsupported of {len(CASES)} cases", "–",
    ]  # fmt: skip


def test_reasons_of_one_implementation_stand_together() -> None:
    """Workers side by side have left the committed rows of several implementations mixed."""
    stored, _ = read(ROOT / "results" / "nvidia_h200" / "conformance.jsonl")
    assert len(list(groupby(one.text("implementation") for one in stored))) > 10
    lines = [(row[2] == "unsupported", row[1]) for row in conformance.reasons(stored).rows]
    together = [line for line, _ in groupby(lines)]
    # Failures first.
    assert len(together) == len(set(together)) > 5
    assert [late for late, _ in groupby(late for late, _ in lines)] == [False, True]


def test_cases_that_were_not_run_are_counted_and_named(
    stub: type[StubWorker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stub, "does", staticmethod(lambda job: {}))
    cut_off, whole = tmp_path / "cpu" / "conformance.jsonl", tmp_path / "other" / "conformance.jsonl"
    run_suite(cut_off, MET[:-1])
    # On another machine all, by another implementation, and one of a name that is no case's (any more).
    run_suite(whole, [*CASES, replace(CASES[0], name="former-case")])
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    for row in rows:
        row["implementation"] = "sonicmoe_torch"
        row["environment"]["cpu"] = "Another CPU"
    whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = data.build(tmp_path, tmp_path / "out")
    met, table = made.table("conformance-summary"), made.table("conformance")
    assert met is not None and table is not None
    absent = [case.name for case in CASES if case not in MET[:-1]]
    assert len(absent) == len(CASES) - len(MET) + 1 == 3
    words = {cell_text(row[1]): [cell_text(cell) for cell in row[2:]] for row in met.rows}
    said = f"{len(MET) - 1} ok; 3 of {len(CASES)} cases not run"
    assert words["torch_loop"] == [said, ", ".join(absent)]
    assert words["sonicmoe_torch"] == [f"{len(MET) + 1} ok, 2 unsupported of {len(CASES) + 1} cases", "–"]
    # Nothing is said of an implementation on a machine where it has met no case.
    place = [column.title for column in table.columns].index("torch_loop")
    here = next(cell_text(row[0]) for row in met.rows if cell_text(row[1]) == "torch_loop")
    cells = {(cell_text(row[0]), cell_text(row[1])): cell_text(row[place]) for row in table.rows}
    assert len(table.rows) == len(cells) == 2 * len(CASES) + 1
    assert [case for (machine, case), status in cells.items() if (machine, status) == (here, "not run")] == absent
    assert {status for (machine, _), status in cells.items() if machine != here} == {"–"}
    text = io.StringIO()
    terminal.render(Console(file=text, width=160), made)
    for shown in (text.getvalue(), markdown.render(made, tmp_path / "out"), html.render(made)):
        assert said in shown


def test_cases_are_no_measurements(made: data.Report) -> None:
    for name in ("measurements", "failures"):
        table = made.table(name)
        assert table is not None and not table.rows
    runs = made.table("runs")
    assert runs is not None and [cell_text(cell) for cell in runs.rows[0]][2] == OPERATION


def test_every_form_shows_it(made: data.Report, tmp_path: Path) -> None:
    text = io.StringIO()
    terminal.render(Console(file=text, width=160), made)
    assert "35 ok, 1 crashed, 2 unsupported" in text.getvalue()
    assert "crashed: torch_loop on CPU" in text.getvalue() and "a CUDA graph needs a GPU" not in text.getvalue()
    marked = markdown.render(made, tmp_path / "out")
    assert "## Conformance" in marked and "&lt;b&gt;no&lt;/b&gt; such \\| kernel" in marked
    page = html.render(made)
    assert '<section id="conformance"' in page and "<b>no</b>" not in page
    tables = json.loads(page.split('<script type="application/json" id="tables">')[1].split("</script>")[0])
    shown = next(table for table in tables if table["name"] == "conformance")
    assert shown["columns"][2]["kind"] == "status" and shown["columns"][2]["title"] == "torch_loop"


@pytest.mark.parametrize("width", [60, 112, 200])
def test_the_table_fits_a_terminal(width: int) -> None:
    plugins = default_registry().offering("moe_layer")
    statuses = [*command.SHORT, *(["ok"] * len(plugins))]
    rows = [
        {"implementation": plugin.name, "variant": case.name, "status": statuses[index], "reason": "[b]why[/b]"}
        for index, plugin in enumerate(plugins)
        for case in CASES[:2]
    ]
    text = io.StringIO()
    command.show(Console(file=text, width=width), rows, CASES[:2], plugins)
    lines = text.getvalue().splitlines()
    shown = [line.split() for line in lines if line.lstrip().startswith(f"{CASES[0].name} ")]
    assert [cell for line in shown for cell in line[1:]] == [command.SHORT[s] for s in statuses[: len(plugins)]]
    assert max(map(len, lines[: lines.index(next(line for line in lines if "[b]why" in line))])) <= width
    heads = text.getvalue().split(CASES[0].name)[0]
    assert all(plugin.name in " ".join(heads.split()) for plugin in plugins)
