"""The regression gate's four forms, and its command line."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fake_gate import COMMIT, FORWARD, GPU, OLMOE, FakeGpu, Gate, what
from rich.console import Console

from harness import regress as gate
from harness.errors import UserError
from harness.regress import judge
from harness.sweep import Sweep

HOSTILE = "\u202e<script>alert(1)</script> | [red]x[/] @somebody `tick`\n\x1b[31mred\x00\ud800\ufffe ]]> &amp; **bold**"
Run = Callable[..., tuple[int, str, str]]


# The forms.


def hostile(gated: Gate, **files: Path) -> None:
    gpu = FakeGpu(failing={FORWARD: ("crashed", HOSTILE)}, environment={"driver": HOSTILE})
    gpu.extra_kernels = [{"name": "<b>k|@x</b>\x07", "calls": 1.0, "us": 500.0, "role": None}]
    gpu.slower = {(OLMOE, "forward"): 1.2}
    gpu.ratios = {(OLMOE, "forward"): 1.2}
    code, text = gated.run(gpu, **files)
    assert code == 1 and "\u202e" not in text and "\x1b" not in text and "\x00" not in text and "\x07" not in text
    assert "[red]x[/]" in text


def test_json_holds_everything(gated: Gate) -> None:
    file = gated.folder / "deep" / "found.json"
    hostile(gated, json_file=file)
    data = json.loads(file.read_text(encoding="ascii"))
    point = next(point for point in data["points"] if point["what"] == what())
    assert HOSTILE.replace("\ud800", "\ufffd") in point["reason"]
    assert point["outcome"] == "failed" and point["change"] is None
    assert [point["failing"] for point in data["points"]].count(True) == 2 and data["points"][0]["failing"]
    assert data["baseline"]["file"] == str(gated.path) and data["environment"]["commit"] == COMMIT


def test_junit_has_a_case_for_each_point(gated: Gate) -> None:
    file = gated.folder / "junit.xml"
    hostile(gated, junit_file=file)
    root = ElementTree.fromstring(file.read_bytes())
    [suite] = root.findall("testsuite")
    cases = suite.findall("testcase")
    assert len(cases) == 12 == int(suite.attrib["tests"]) and suite.attrib["failures"] == "2"
    failures = {case.attrib["name"]: case.find("failure") for case in cases if case.find("failure") is not None}
    assert set(failures) == {what(), what(OLMOE)}
    assert "\u202e" not in file.read_text(encoding="utf-8")
    bad = failures[what()]
    assert bad is not None and "<script>" in (bad.text or "") and "\n" not in bad.attrib["message"]
    slow = failures[what(OLMOE)]
    assert slow is not None and "up (main_kernel): +20.0%" in (slow.text or "") and slow.attrib["type"] == "regression"


def test_markdown_is_a_verdict_a_table_and_details(gated: Gate) -> None:
    file = gated.folder / "summary.md"
    hostile(gated, markdown_file=file)
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0].startswith("❌ **Regression gate failed on NVIDIA H200: 12 points")
    assert (
        "\u202e" not in text
        and "<script>" not in text
        and "@somebody" not in text
        and "\x1b" not in text
        and "<b>" not in text
    )
    tables = [line for line in lines if line.startswith("|")]
    columns = {unescaped_bars(line) for line in tables}
    assert columns == {8, 6, 4}
    assert text.count("<details>") == text.count("</details>") == 1
    assert sum(what(OLMOE).split()[2] in line for line in tables) == 2
    gated.run(markdown_file=file)
    assert file.read_text(encoding="utf-8").startswith("✅ **Regression gate passed")


def unescaped_bars(line: str) -> int:
    return line.replace("\\|", "").count("|")


def test_a_form_that_cannot_be_written_is_found_before_measuring(gated: Gate) -> None:
    (gated.folder / "file").write_text("")
    for path, reason in ((gated.folder, "is a folder"), (gated.folder / "file" / "x.json", "file is not a folder")):
        for form in ("json", "junit", "markdown"):
            with pytest.raises(UserError, match=f"--{form} .*{reason}"):
                gated.run(**{f"{form}_file": path})
            assert not gated.gpu.asked
    with pytest.raises(UserError, match="--json: --update compares nothing"):
        gated.run(update=True, json_file=gated.folder / "x.json")


# The command line.


def test_on_the_command_line(gated: Gate, command_line: Run) -> None:
    rows = ("--output", gated.folder / "rows")
    assert command_line("regress", *rows)[0] == 0
    gated.gpu = FakeGpu(slower={FORWARD: 1.1}, ratios={FORWARD: 1.1})
    forms = [gated.folder / name for name in ("x.json", "x.xml", "x.md")]
    options: Iterable[object] = ("--json", forms[0], "--junit", forms[1], "--markdown", forms[2], "--repeat", 2)
    code, text, _ = command_line("regress", *rows, *options)
    assert code == 1 and "failed" in text and all(form.stat().st_size for form in forms)
    assert command_line("regress", *rows, "--threshold", "median:12%")[0] == 0
    assert command_line("regress", *rows, "--update")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        ((), GPU, "nvidia_h200.json: no baseline for NVIDIA H200; moebench regress --update makes one"),
        ((), None, "this machine has none"),
        (("--update",), None, "this machine has none"),
        (("--baseline", "none.json"), GPU, "none.json: no baseline"),
        (("--threshold", "fast"), GPU, "--threshold 'fast': write median:5%"),
        (("--repeat", "0"), GPU, "--repeat 0"),
        (("--update", "--junit", "x.xml"), GPU, "--junit: --update compares nothing"),
    ],
)
def test_bad_input_is_one_line(
    bare: Gate, command_line: Run, arguments: tuple[str, ...], name: str | None, reason: str
) -> None:
    bare.name = name
    code, _, error = command_line("regress", *arguments)
    assert code == 2 and reason in error and error.count("\n") == 1 and error.startswith("moebench: ")
    assert not bare.gpu.asked


class WatchedGpu(FakeGpu):
    """Tries to add rows while it measures, as another process would."""

    def run_sweep(self, out: Console, sweep: Sweep, registry: Any, path: Path, **options: Any) -> int:
        refused(path)
        return super().run_sweep(out, sweep, registry, path, **options)


def refused(path: Path) -> None:
    with path.open("ab") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_nobody_else_adds_rows_from_the_first_look_to_the_second(gated: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their rows would count as this run's, and their lock would keep it from the second look."""
    path = gated.folder / "rows" / "ci.jsonl"
    looked: list[None] = []

    def first_look(*arguments: Any) -> Any:
        looked.append(refused(path))
        return judge.first_look(*arguments)

    monkeypatch.setattr(gate, "first_look", first_look)
    gpu = WatchedGpu(slower={FORWARD: 1.1}, ratios={FORWARD: 1.1})
    assert gated.run(gpu)[0] == 1
    assert looked and len(gpu.asked) == 2
    bare = WatchedGpu()
    assert gated.run(bare, update=True)[0] == 0 and len(bare.asked) == 2
