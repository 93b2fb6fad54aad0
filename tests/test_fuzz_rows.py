"""Results files with anything in them: every line is a row that every reader can use, or a problem in one line."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import SAME, as_json, spoiled, values
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness import compare, documents, record, store
from harness.record import clean, validate
from harness.registry import ROOT
from harness.regress.baseline import environment_of
from harness.regress.judge import combine
from harness.report import data, html, markdown, rows, terminal
from plots import rows as table_of


def seeds() -> list[dict[str, Any]]:
    """A committed row of each kind: record, operation, status, place."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path in sorted((ROOT / "results").glob("*/*.jsonl")):
        if path.parent.name == "local":
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            kind = (row["record"], row["status"], row["measured_on"], row["pass"] == "forward", len(row) // 3)
            found.setdefault(kind, row)
    return list(found.values())


SEEDS = seeds()


@st.composite
def lines(draw: st.DrawFn) -> list[bytes]:
    found = []
    for _ in range(draw(st.integers(1, 6))):
        line = as_json(draw(spoiled(draw(st.sampled_from(SEEDS)))))
        kind = draw(st.sampled_from(["whole"] * 8 + ["cut", "bytes", "twice", "raw"]))
        if kind == "cut":
            line = line[: draw(st.integers(0, len(line)))]
        elif kind == "bytes":
            place = draw(st.integers(0, len(line)))
            line = line[:place] + draw(st.binary(max_size=4)) + line[place + draw(st.integers(0, 4)) :]
        elif kind == "twice":
            # A key that stands there twice.
            line = line[:-1] + b', "shape": ' + as_json(draw(values)) + b"}"
        elif kind == "raw":
            line = draw(st.binary(max_size=60))
        found.append(line)
    return found


def use(folder: Path) -> int:
    """Let every reader of results read a folder; returns how many rows there are."""
    out = Console(file=io.StringIO(), width=120)
    found, problems = store.read_folder(folder)
    for problem in problems:
        assert "\n" not in str(problem) and str(problem).isprintable()
    store.resume_keys(found)
    store.latest(found)
    for row in found:
        combine([row])
        environment_of([row])
        assert validate(clean(row)) == []
    table, complaints = table_of.load(folder)
    assert len(table) == len(found) and len(complaints) == len(problems)
    newest = table_of.latest(table)
    for gpu in table_of.gpus(newest):
        table_of.one_gpu(table_of.of_gpu(newest, gpu))
        table_of.slug(gpu)
    table_of.layers(newest)
    stored, sentences = rows.read(folder)
    assert len(stored) == len(found) and all("\n" not in sentence for sentence in sentences)
    made = data.build(folder, folder, folder)
    terminal.render(out, made)
    markdown.render(made, folder).encode()
    html.render(made).encode()
    files = sorted(folder.rglob("*.jsonl"))
    if found:
        compare.compare_rows(out, folder, files[0].parent)
    return len(found)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("rows")


@given(lines(), st.sampled_from([b"\n", b"\r\n"]), st.booleans())
@settings(SAME, max_examples=40)
def test_every_reader_takes_what_the_store_lets_through(
    folder: Path, found: list[bytes], end: bytes, ended: bool
) -> None:
    shutil.rmtree(folder / "gpu", ignore_errors=True)
    (folder / "gpu").mkdir()
    good = as_json(SEEDS[0])
    content = end.join([good, *found, as_json(SEEDS[1])]) + (end if ended else b"")
    (folder / "gpu" / "rows.jsonl").write_bytes(content)
    assert use(folder) >= 2


@given(st.one_of(st.sampled_from(SEEDS).flatmap(spoiled), values))
@settings(SAME, max_examples=100)
def test_the_quick_look_finds_what_the_whole_one_does(value: Any) -> None:
    found = validate(value)
    if documents.plain(value):
        assert documents.beyond(value, strict=True) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "plain", lambda row: False)
        assert validate(value) == found


@pytest.mark.parametrize("seed", SEEDS, ids=lambda row: f"{row['record']}-{row['status']}-{row['measured_on']}")
def test_the_quick_look_is_enough_for_committed_rows(seed: dict[str, Any]) -> None:
    """But for those with a letter beyond ASCII."""
    assert documents.plain(seed) == json.dumps(seed, ensure_ascii=False).isascii()
