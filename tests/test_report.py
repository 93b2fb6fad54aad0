"""The report: every state of a results folder, foreign text in each form, comparison of runs, figures in the page."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import multiprocessing
import re
import signal
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from rich.console import Console
from test_plots import GPU, failed, fake, ratio, synthetic

import plots
from harness import report as reports
from harness.errors import UserError
from harness.record import validate
from harness.report import data, figures, html, markdown, terminal
from harness.report import rows as stored_rows
from harness.report.figures import Figure
from harness.report.rows import read
from harness.report.tables import Number, Place, Table, cell_text
from harness.report.text import in_unit, number, plain, with_interval
from plots import rows as table

Row = dict[str, Any]
EVIL = (
    "</script><script>alert(1)</script> a|b `c` [red]x[/red] [l](javascript:1) \"q\" 'q' & <img src=x onerror=y>\n"
    "next *s*"
)
CommandLine = Callable[..., tuple[int, str, str]]
#: As matplotlib writes them, and with what has no business there.
SVG = """<?xml version="1.0"?>
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="72pt" height="36pt"
 viewBox="0 0 72 36" onload="alert(1)"><metadata><x/></metadata><defs><style>*{stroke:red}</style></defs>
<script>alert(1)</script><foreignObject><b>no</b></foreignObject>
<g id="figure_1"><defs><path id="m1" d="M 0 0
L 0 3"/></defs><use xlink:href="#m1" x="1" style="fill: #222222"/><image xlink:href="http://example.org/x.png"/>
<path d="M 0 0 L 9 9" clip-path="url(#p1)" style="fill: url(http://example.org/y)"/><!-- note --></g>
<defs><clipPath id="p1"><rect width="9" height="9"/></clipPath></defs></svg>"""


def store(folder: Path, rows: Sequence[Mapping[str, Any]], name: str = "gpu/sweep.jsonl", more: str = "") -> Path:
    """A results folder with one file; ``more`` is added as it is."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    for row in rows:
        assert not validate(row), validate(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + more, encoding="utf-8")
    return folder


def some_rows(gpu: str = GPU) -> list[Row]:
    where = {"environment": {"gpu": gpu, "driver": "1.2", "torch": "2.9", "triton": "3.5", "commit": "abcdef0123"}}
    return [
        *(synthetic(name, direction=direction, **where) for name in ("sonicmoe_official", "scattermoe")
          for direction in ("forward", "backward", "forward_backward")),
        failed("out_of_memory", "torch.OutOfMemoryError: 3 GiB", implementation="megablocks", **where),
        ratio("scattermoe", "sonicmoe_official", table.HEADLINE_SHAPE, 2.0, **where),
        fake("sonicmoe_torch", table.HEADLINE_SHAPE),
    ]  # fmt: skip


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that are there already, in place of those that take seconds to draw."""
    made = []
    for folder, name in (("one", "headline"), ("one", "granularity"), ("two", "headline")):
        path = tmp_path / "drawn" / folder / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SVG, encoding="utf-8")
        made.append(Figure(name, folder, f"About <{name}>", path))
    monkeypatch.setattr(figures, "draw", lambda results, output: (made, []))
    return made


def on_terminal(report: data.Report, width: int = 200) -> str:
    out = io.StringIO()
    terminal.render(Console(file=out, width=width), report)
    return out.getvalue()


def build(results: Path, **options: Any) -> data.Report:
    return data.build(results, results / "out", **options)


def titled(made: data.Report, name: str) -> Table:
    found = made.table(name)
    assert found is not None
    return found


def column(found: Table, title: str) -> list[str]:
    place = [column.title for column in found.columns].index(title)
    return [cell_text(row[place]) for row in found.rows]


class Page(HTMLParser):
    """The page's elements, their attributes, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: list[str] = []
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


NEWER = {**synthetic(), "schema": 2}
STATES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda folder: folder.mkdir(exist_ok=True),
    "one GPU": lambda folder: store(folder, some_rows()),
    "two GPUs": lambda folder: (
        store(folder, some_rows()),
        store(folder, some_rows("NVIDIA H100 80GB HBM3"), "h100/sweep.jsonl"),
    ),
    "newer schema": lambda folder: store(folder, [], more=(json.dumps(NEWER) + "\n") * 3),
    "only failures": lambda folder: store(
        folder, [failed("crashed", f"line 1\nline 2 of {n}", implementation="momoe", direction=n)
                 for n in table_passes()],
    ),
    "a damaged line": lambda folder: store(folder, some_rows(), more='{"schema": 1, "rec'),
}  # fmt: skip
SAID = {
    "empty": "No rows here yet",
    "one GPU": f" of {GPU}",
    "two GPUs": "NVIDIA H100 80GB HBM3",
    "newer schema": "3 lines, the first is 1: schema 2 is newer than this harness reads",
    "only failures": "crashed",
    "a damaged line": "line 10: not a JSON object",
}


def table_passes() -> tuple[str, ...]:
    return ("forward", "backward", "forward_backward")


@pytest.mark.parametrize("state", STATES)
def test_every_state_gives_three_forms(
    state: str, tmp_path: Path, drawn: list[Figure], command_line: CommandLine
) -> None:
    results = tmp_path / "results"
    STATES[state](results)
    code, out, err = command_line("report", "--results", results, "--output", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "Traceback" not in out and "Warning" not in out
    said = " ".join(SAID[state].split())
    assert said in " ".join(out.split())
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert said in page and said in text
    for name in ("report.html", "report.md"):
        assert f"wrote {tmp_path / 'out' / name}" in out
    assert ("Not measured" in out) == (state in ("one GPU", "two GPUs", "only failures", "a damaged line"))
    # The paper's own values are there whatever was measured.
    assert "1.86×" in out and "1.86×" in page and "1.86×" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--results", "{tmp}/absent"], "no such folder"),
        (["--output", "{tmp}/file"], "is a file"),
        (["--against", "{tmp}/absent"], "no such file or folder"),
        (["--format", "pdf"], "choose from terminal, markdown, html, all"),
        (["--output", "{tmp}/file/below"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, drawn: list[Figure], command_line: CommandLine
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    if "--results" not in given:
        given += ["--results", str(tmp_path / "empty")]
    code, _, err = command_line("report", *given)
    assert code == 2
    assert said in err and err.count("\n") == 1 and err.startswith("moebench: ")


@pytest.mark.parametrize("form", ["terminal", "markdown", "html"])
def test_one_form_alone(form: str, tmp_path: Path, drawn: list[Figure]) -> None:
    out = io.StringIO()
    written = reports.report(
        Console(file=out, width=120), store(tmp_path / "r", some_rows()), tmp_path / "out", form=form
    )
    names = {"terminal": [], "markdown": ["report.md"], "html": ["report.html"]}[form]
    assert [path.name for path in written] == names
    assert ("The paper's claims" in out.getvalue()) == (form == "terminal")


def test_equal_rows_give_equal_files(tmp_path: Path, drawn: list[Figure]) -> None:
    results = store(tmp_path / "r", some_rows())
    files = []
    for _ in range(2):
        reports.report(Console(file=io.StringIO()), results, tmp_path / "out")
        files.append([(tmp_path / "out" / name).read_bytes() for name in ("report.html", "report.md")])
    assert files[0] == files[1]


def evil_rows() -> list[Row]:
    where = {"gpu": EVIL, "driver": EVIL, "torch": EVIL, "commit": EVIL}
    return [
        synthetic(EVIL, label=EVIL, sweep=EVIL, variant=EVIL, operation=EVIL, environment=where),
        failed("crashed", f"{EVIL} \x1b[31mred\x07 \u202egnp \ufffe", label=EVIL, environment=where),
        failed("crashed", EVIL, implementation=EVIL, shape="4,4,4,4,2", environment=where),
        ratio(EVIL, EVIL, table.HEADLINE_SHAPE, 2.0, numerator_label=EVIL, environment=where),
    ]


@pytest.fixture
def evil(tmp_path: Path, drawn: list[Figure]) -> data.Report:
    results = store(tmp_path / "r", evil_rows(), "gpu/<b>|.jsonl", more=f"{EVIL}\n")
    made = build(results)
    drawn[0] = Figure("headline", "one", EVIL, drawn[0].svg)
    return data.Report(**{**vars(made), "figures": tuple(drawn)})


def test_foreign_text_does_nothing_in_the_page(evil: data.Report) -> None:
    page = html.render(evil)
    page.encode()
    parsed = Page(page)
    assert len(parsed.scripts) == 2, "the rows and the page's own script"
    assert not {"img", "b", "image", "iframe", "object", "link", "foreignobject"} & set(parsed.elements)
    assert not [found for found in parsed.attributes if found[1].startswith("on")]
    assert "alert(1)" not in parsed.scripts[1]
    stored = json.loads(parsed.scripts[0])
    measurements = next(one for one in stored if one["name"] == "measurements")
    assert any(
        EVIL.replace("\n", " ") in " ".join(text.split())
        for one in measurements["columns"]
        for text in one.get("d", [])
    )
    assert "\x1b" not in page and "\u202e" not in page and "\\u001b" not in page


def test_foreign_text_does_nothing_in_markdown(evil: data.Report, tmp_path: Path) -> None:
    text = markdown.render(evil, tmp_path)
    text.encode()
    assert not re.search(r"<(?!br>)", text), "no HTML"
    assert "](javascript:" not in text.replace(r"\](", "")
    for number_, line in enumerate(text.split("\n")):
        assert not line.startswith("next"), f"line {number_}: a row's newline ended its cell"
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block
    assert r"a\|b \`c\` \[red\]x\[/red\]" in text


def test_foreign_text_does_nothing_on_the_terminal(evil: data.Report) -> None:
    text = on_terminal(evil, width=400)
    assert "[red]x[/red]" in text
    assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text


def test_the_page_loads_nothing(tmp_path: Path, drawn: list[Figure]) -> None:
    results = store(tmp_path / "r", some_rows())
    made = data.Report(**{**vars(build(results)), "figures": tuple(drawn)})
    page = html.render(made)
    parsed = Page(page)
    assert not [found for found in parsed.attributes if found[1] in ("src", "srcset", "data", "xlink:href", "action")]
    for tag, name, value in parsed.attributes:
        if name == "href":
            assert tag == "a" or value.startswith("#"), (tag, value)
        for target in re.findall(r"url\(([^)]*)\)", value):
            assert target.startswith("#"), value
    assert "@import" not in page and "url(http" not in page
    policy = next(value for tag, name, value in parsed.attributes if tag == "meta" and value.startswith("default-src"))
    digest = base64.b64encode(hashlib.sha256(parsed.scripts[1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"'sha256-{digest}'" in policy
    assert not {"fetch(", "innerHTML", "eval(", "XMLHttpRequest", "document.write"} & set(
        re.findall(r"fetch\(|innerHTML|eval\(|XMLHttpRequest|document\.write", page)
    )


def test_figures_share_a_page(drawn: list[Figure]) -> None:
    svgs = [figures.inline(figure) for figure in drawn]
    ids = [found for svg in svgs for found in re.findall(r'\bid="([^"]*)"', svg)]
    assert len(ids) == len(set(ids)) == 6, "of each figure the two that something refers to"
    for svg in svgs:
        own = set(re.findall(r'\bid="([^"]*)"', svg))
        assert set(re.findall(r'href="#([^"]*)"', svg)) | set(re.findall(r"url\(#([^)]*)\)", svg)) == own
        for word in ("script", "alert", "onload", "foreignObject", "image ", "http", "metadata", "style>", "note"):
            assert word not in svg, word
        assert svg.startswith("<svg ") and 'viewBox="0 0 72 36"' in svg and "pt" not in svg.split(">")[0]
        assert "About &lt;" in svg


def test_figures_are_drawn_by_the_code_of_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One figure that draws and one that fails; in processes of their own, as always."""
    names = ("figure13_memory", "absent")
    monkeypatch.setattr(plots, "FIGURES", {name: plots.FIGURES["figure13_memory"] for name in names})
    results = store(tmp_path / "r", some_rows())
    made, problems = figures.draw(results, tmp_path / "figures")
    assert [(figure.name, figure.folder) for figure in made] == [("figure13_memory", table.slug(GPU))]
    assert made[0].svg.is_file() and made[0].caption.startswith("Figure 13: memory")
    assert len(problems) == 1 and "absent" in problems[0]
    svg = figures.inline(made[0])
    assert len(svg) > 5000 and "<!--" not in svg


def test_an_interruption_does_not_wait_for_figures_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def once_drawing() -> None:
        while not multiprocessing.active_children():
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    monkeypatch.setattr(plots, "FIGURES", {"figure13_memory": plots.FIGURES["figure13_memory"]})
    # Longer than the suite's own limit of a test.
    monkeypatch.setattr(figures, "_worker", functools.partial(time.sleep, 3600))
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Thread(target=once_drawing, daemon=True).start()
        with pytest.raises(Interrupted):
            figures.draw(tmp_path, tmp_path / "figures")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert multiprocessing.active_children() == []


def test_rows_know_their_lines(tmp_path: Path) -> None:
    rows = [json.dumps(synthetic(name)) for name in ("a", "b", "c")]
    path = tmp_path / "gpu" / "x.jsonl"
    path.parent.mkdir()
    path.write_text(f"\n{rows[0]}\n{{broken\n\n{rows[1]}\n{rows[2]}")
    stored, problems = read(tmp_path)
    assert [(one.row["implementation"], one.file, one.line) for one in stored] == [
        ("a", "gpu/x.jsonl", 2), ("b", "gpu/x.jsonl", 5), ("c", "gpu/x.jsonl", 6)
    ]  # fmt: skip
    assert len(problems) == 1 and "gpu/x.jsonl, line 3: not a JSON object" in problems[0]


def test_links_lead_to_the_rows(tmp_path: Path) -> None:
    results = store(tmp_path / "my results", some_rows())
    made = data.build(results, tmp_path / "out")
    place = Place("gpu/sweep.jsonl", 7)
    assert made.href(place) == "../my%20results/gpu/sweep.jsonl#L7"
    assert place in made.in_table
    behind = [ref for result in made.claims for finding in result.findings for ref in finding.rows]
    assert behind, "the ratio is behind a claim"
    page = html.render(made)
    for ref in behind:
        assert f'href="{made.href(Place(ref.file, ref.line))}"' in page
        assert f"#row-{ref.file}%3A{ref.line}" in page


def test_a_failure_without_a_gpus_name_takes_its_neighbours(tmp_path: Path) -> None:
    lost = failed("crashed", "worker died", implementation="momoe", environment={"torch": "2.9"})
    stored, _ = read(store(tmp_path, [*some_rows(), lost]))
    assert stored[-1].machine == GPU


def change(ms: float, **fields: Any) -> Row:
    spread = {"median": ms, "ci95": [ms * 0.99, ms * 1.01], "samples": 9}
    return {**synthetic(**fields), "device_ms": {**spread, "basis": "graph"}, "latency_ms": {**spread, "mode": "burst"}}


def test_against_an_earlier_set(tmp_path: Path) -> None:
    shapes = [f"512,256,{n},16,4" for n in (64, 128, 256, 512, 1024)]
    before = [change(1.0, shape=shape) for shape in shapes[:4]] + [change(1.0, implementation="gone")]
    after = [
        change(1.1, shape=shapes[0]),
        change(0.9, shape=shapes[1]),
        change(1.005, shape=shapes[2], sweep="another"),
        failed("wrong_result", "NaN", shape=shapes[3]),
        change(1.0, shape=shapes[4]),
        change(9.0, shape=shapes[0], environment={"gpu": "Another GPU"}),
    ]
    earlier = store(tmp_path / "before", before)
    made = build(store(tmp_path / "after", after), against=earlier / "gpu" / "sweep.jsonl")
    found = titled(made, "against")
    assert column(found, "change") == ["fails now", "slower", "within intervals", "faster"]
    assert column(found, "after / before")[1] == "1.10 [1.08, 1.12]"
    assert column(found, "before, ms")[0] == "ok" and column(found, "after, ms")[0] == "wrong_result"
    assert "4 points of 6 here and 5 there are in both" in found.about
    assert "1 fails now, 1 slower, 1 within intervals, 1 faster" in on_terminal(made)
    nothing = build(tmp_path / "after", against=store(tmp_path / "other", [change(1.0, dtype="float16")]))
    assert not titled(nothing, "against").rows
    assert "No point is in both sets" in " ".join(on_terminal(nothing).split())


def test_times_of_different_basis_are_not_compared(tmp_path: Path) -> None:
    busy = {"median": 0.8, "ci95": [0.8, 0.8], "samples": 8}
    early = change(1.0, busy_ms=busy)
    late = {**change(0.8, busy_ms=busy), "device_ms": {**busy, "basis": "busy"}}
    found = titled(build(store(tmp_path, [early, late])), "repeated")
    assert column(found, "time") == ["busy"] and column(found, "change") == ["within intervals"]


def test_a_repeated_point_counts_once(tmp_path: Path) -> None:
    made = build(store(tmp_path, [change(3.0), change(2.0), change(1.0)]))
    assert column(titled(made, "measurements"), "device ms") == ["1.000 [0.9900, 1.010]"]
    assert column(titled(made, "repeated"), "after / before") == ["0.500 [0.490, 0.510]"]
    assert made.machines[0].rows == 3 and made.machines[0].statuses == (("ok", 1),)


def test_a_package_that_was_missing_is_no_change_between_runs(tmp_path: Path) -> None:
    """Neither between two runs that had it, nor after them."""
    point = {"implementation": "scattermoe"}
    rows = [change(1.0, **point), failed("not_installed", "no package", **point)]
    rows += [change(2.0, **point), failed("not_installed", "no package", **point)]
    assert column(titled(build(store(tmp_path, rows)), "repeated"), "change") == ["slower"]


def test_gpus_stand_beside_each_other(tmp_path: Path) -> None:
    assert build(store(tmp_path / "one", some_rows())).table("across") is None
    store(tmp_path, [change(2.0), synthetic("scattermoe")])
    store(tmp_path, [change(1.0, environment={"gpu": "NVIDIA H300"})], "other/x.jsonl")
    made = build(tmp_path)
    found = titled(made, "across")
    assert len(found.rows) == 1
    assert column(found, "times as fast as NVIDIA H300") == ["0.500"]
    layers = titled(made, "layers")
    assert {GPU, "NVIDIA H300", "paper, H100"} <= {one.title for one in layers.columns}


def test_layers_stand_beside_the_papers_values(tmp_path: Path) -> None:
    made = build(store(tmp_path, some_rows()))
    line = next(
        line for line in made.layers
        if (line.implementation, line.shape, line.quantity)
        == ("sonicmoe_official", table.HEADLINE_SHAPE, "forward TFLOPS")
    )  # fmt: skip
    assert line.measured[GPU].value == pytest.approx(line.paper * 1.25)
    both = [
        line
        for line in made.layers
        if line.quantity == "forward + backward TFLOPS" and line.shape == table.HEADLINE_SHAPE
    ]
    papers = {line.implementation: line.paper for line in both}
    # 1.857: the ratio of these bars that the claim's entry names.
    assert papers["sonicmoe_official"] / papers["scattermoe"] == pytest.approx(1.857, abs=0.001)
    failure = next(line for line in made.layers if line.implementation == "megablocks" and GPU in line.measured)
    assert failure.measured[GPU].text == "out of memory"


def test_pairs_beside_the_papers_layers_are_as_the_paper_measures(tmp_path: Path) -> None:
    of_paper = ratio("sonicmoe_official", "sonicmoe_triton", table.HEADLINE_SHAPE, 1.25)
    others = [{**of_paper, "value": 2.0, "ci95": [1.9, 2.1]} | its for its in ({"mode": "paced"}, {"dtype": "float16"})]
    made = build(store(tmp_path, [of_paper, *others]))
    assert list(made.paired) == [(GPU, table.HEADLINE_SHAPE)]
    assert made.paired[GPU, table.HEADLINE_SHAPE].startswith("1.25")


def test_failures_of_one_reason_stand_together(tmp_path: Path) -> None:
    rows = [failed("not_installed", "no package", implementation="momoe", direction=d) for d in table_passes()]
    found = titled(build(store(tmp_path, rows)), "failures")
    assert column(found, "rows") == ["3"] and column(found, "reason") == ["no package"]
    assert column(found, "first row") == ["gpu/sweep.jsonl:1"]


def test_long_tables_are_summed_up_in_markdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(store(tmp_path, some_rows()))
    assert "too many for this form" not in markdown.render(made, tmp_path)
    monkeypatch.setattr(markdown, "MOST", 3)
    text = markdown.render(made, tmp_path)
    assert "8 rows, too many for this form; report.html has them all" in text


def test_numbers_as_people_read_them() -> None:
    assert [number(value) for value in (0.35917, 12.345, 1481.4, 0.0, None, float("nan"))] == [
        "0.3592", "12.35", "1481", "0", "–", "–"
    ]  # fmt: skip
    assert with_interval(1.109, 1.1061, 1.1126) == "1.109 [1.106, 1.113]"
    assert in_unit(1.857, "ratio", (1.85, 1.864)) == "1.86× [1.85, 1.86]"
    assert in_unit(1.003, "ratio") == "1.003×" and in_unit(None, "ratio") == "–"
    assert in_unit(0.45, "reduction") == "45 %" and in_unit(0.484, "reduction", (0.48, 0.49)) == "48.4 % [48, 49]"
    assert in_unit(21.5, "validation perplexity") == "21.50"
    assert plain("a\x1b[1m\r\nb\x00\ud800") == "a\nb�"


def test_the_page_sorts_by_value_and_holds_every_row(tmp_path: Path) -> None:
    made = build(store(tmp_path, some_rows()))
    found = html.table_data(titled(made, "measurements"), made)
    device = next(one for one in found["columns"] if one["title"] == "device ms")
    assert found["rows"] == len(device["v"]) == len(titled(made, "measurements").rows)
    assert all(isinstance(value, float) or value is None for value in device["v"])
    assert {one["title"] for one in found["columns"] if one.get("filter")} >= {
        "GPU",
        "implementation",
        "status",
        "operation",
    }
    assert isinstance(titled(made, "measurements").rows[0][7], Number)


def test_what_the_page_is_made_of_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "harness.report" in project["tool"]["setuptools"]["packages"]
    assert set(project["tool"]["setuptools"]["package-data"]["harness.report"]) == {
        html.TEMPLATE,
        html.STYLE,
        html.SCRIPT,
    }
    assert any(one.startswith("jinja2") for one in project["project"]["dependencies"])
    assert "</" not in html._resource(html.SCRIPT), "would end the script's element"


def test_a_reason_in_colours_does_no_harm(
    tmp_path: Path, command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler's escape sequences, through a real figure."""
    monkeypatch.setattr(plots, "FIGURES", {"figure13_memory": plots.FIGURES["figure13_memory"]})
    where = {"environment": {"gpu": GPU, "driver": "1.2", "torch": "2.9", "triton": "3.5", "commit": "abcdef0123"}}
    row = failed("crashed", "\x1b[31mRuntimeError\x1b[0m: CUDA error", implementation="scattermoe", **where)
    store(tmp_path / "results", [row])
    code, out, err = command_line("report", "--results", tmp_path / "results", "--output", tmp_path / "out")
    assert (code, err) == (0, "") and "\x1b[31m" not in out
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "\x1b" not in page and "RuntimeError" in page


def test_paths_that_cannot_be_looked_at_are_one_line(command_line: CommandLine) -> None:
    code, _, err = command_line("report", "--output", "x" * 300)
    assert code == 2 and err.count("\n") == 1 and "too long" in err


def test_one_file_that_cannot_be_read_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store(tmp_path / "results", some_rows())
    bad = next(folder.rglob("*.jsonl")).with_name("bad.jsonl")
    bad.write_text("")
    ordinary = stored_rows.store.read_numbered

    def refusing(path: Path) -> Any:
        if path == bad:
            raise UserError(f"{path}: cannot be read: Permission denied")
        return ordinary(path)

    monkeypatch.setattr(stored_rows.store, "read_numbered", refusing)
    stored, problems = read(folder)
    assert len(stored) == len(some_rows()) and len(problems) == 1 and "Permission denied" in problems[0]
    with pytest.raises(UserError, match="Permission denied"):
        read(bad)
