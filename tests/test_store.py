"""The results file: whole lines, broken ones lost alone, several writers at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.interface import Point
from harness.record import RecordError, point_fields
from harness.shapes import MoEShape
from harness.store import append, latest, point_inputs, read, read_folder, resume_key, resume_keys

POINT = Point("moe_layer", "demo", MoEShape(64, 32, 16, 4, 2), "float32", device="cpu")


def row(**changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "record": "measurement",
        "run_id": "r1",
        "timestamp": "2026-01-31T12:00:00+00:00",
        "sweep": "smoke",
        **point_fields(POINT),
        "pass": "forward",
        "label": "Demo",
        "status": "ok",
        "measured_on": "cpu",
        "environment": {"cpu": "a"},
        **changes,
    }


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    for run in ("a", "b", "ü\n"):
        append(path, row(run_id=run))
    rows, problems = read(path)
    assert [r["run_id"] for r in rows] == ["a", "b", "ü\n"]
    assert problems == []
    assert path.read_bytes().count(b"\n") == 3


def test_a_bad_row_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(RecordError, match="reason"):
        append(path, row(status="crashed"))
    assert not path.exists()


def test_an_interrupted_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, row(run_id="a"))
    with path.open("ab") as file:
        file.write(b'{"schema":1,"rec')
    rows, problems = read(path)
    assert len(rows) == 1 and problems[0].line == 2 and "interrupted" in problems[0].message
    append(path, row(run_id="b"))
    rows, problems = read(path)
    assert [r["run_id"] for r in rows] == ["a", "b"]
    assert problems == []


def test_what_is_no_end_of_a_row_stays(tmp_path: Path) -> None:
    """A file without a last newline may be somebody's notes."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"my notes\n{of mine}")
    append(path, row())
    assert path.read_bytes().startswith(b'my notes\n{of mine}\n{"schema":1,')
    rows, problems = read(path)
    assert len(rows) == 1 and [problem.line for problem in problems] == [1, 2]
    assert str(problems[0]).startswith(f"{path}:1: not a JSON object")
    assert "\n" not in str(problems[0])


def test_problems_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row()), "", "[]", "\xff", json.dumps(row(schema=9)), json.dumps(row(label=None)), '{"a": NaN}']
    path.write_bytes("\n".join(lines).encode("latin-1"))
    rows, problems = read(path)
    assert len(rows) == 1
    assert [problem.line for problem in problems] == [3, 4, 5, 6, 7]
    assert "newer than this harness reads" in problems[2].message


def test_lines_that_no_parser_survives_are_problems(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, row())
    with path.open("ab") as file:
        file.write(b"[" * 200_000 + b"\n" + b'{"schema":' + b"9" * 9000 + b"}\n" + b"\xff\x00\n")
    rows, problems = read(path)
    assert len(rows) == 1 and [problem.line for problem in problems] == [2, 3, 4]


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="no such folder"):
        read_folder(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        append(tmp_path / "file" / "rows.jsonl", row())


def test_folder(tmp_path: Path) -> None:
    append(tmp_path / "b" / "rows.jsonl", row(run_id="b"))
    append(tmp_path / "a" / "rows.jsonl", row(run_id="a"))
    (tmp_path / "a" / "notes.txt").write_text("no rows")
    # Of a layer that is slow on purpose: it belongs into no figure, table or claim.
    append(tmp_path / "a" / "ci_planted.jsonl", row(run_id="slow"))
    rows, problems = read_folder(tmp_path)
    assert [r["run_id"] for r in rows] == ["a", "b"] and problems == []


def test_two_writers_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    program = (
        "import json, sys\n"
        "from harness.store import append\n"
        "row = json.loads(sys.argv[2])\n"
        "for i in range(60): append(sys.argv[1], {**row, 'run_id': sys.argv[3] + str(i), 'notes': ['x' * 20000]})\n"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path), json.dumps(row()), name], cwd=Path(__file__).parents[1]
        )
        for name in "ab"
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    rows, problems = read(path)
    assert problems == []
    assert {r["run_id"] for r in rows} == {f"{name}{i}" for name in "ab" for i in range(60)}


def test_resume_key_depends_on_everything() -> None:
    base = (point_inputs(POINT, "forward", mode="burst"), "code", {"torch": "2.11.0"}, "NVIDIA H200")
    key = resume_key(*base)
    assert len(key) == 64 and key == resume_key(*base)
    other_seed = point_inputs(POINT, "backward", mode="burst")
    others = {
        resume_key(other_seed, *base[1:]),
        resume_key(point_inputs(POINT, "forward", mode="sustained"), *base[1:]),
        resume_key(base[0], "changed", *base[2:]),
        resume_key(*base[:2], {"torch": "2.13.0"}, base[3]),
        resume_key(*base[:3], "NVIDIA H100"),
    }
    assert len(others) == 5 and key not in others
    assert resume_key({"b": 1, "a": 2}, "", {}, "") == resume_key({"a": 2, "b": 1}, "", {}, "")


def test_resume_skips_what_is_final() -> None:
    rows = [
        row(resume_key="1"),
        row(resume_key="2", status="unsupported", reason="x"),
        row(resume_key="3", status="crashed", reason="x"),
        row(resume_key="4", status="unstable", reason="x"),
        row(),
    ]
    assert resume_keys(rows) == {"1", "2"}


def test_latest_keeps_one_row_of_each_measurement() -> None:
    failed = row(status="crashed", reason="x", run_id="old")
    good = row(run_id="new", timestamp="2026-02-01T12:00:00+00:00", routing={**row()["routing"], "routed_rows": 128})
    other = row(**{"pass": "backward"})
    kept = latest([failed, other, good])  # type: ignore[list-item]
    assert [(r["run_id"], r["pass"]) for r in kept] == [("new", "forward"), ("r1", "backward")]
    elsewhere = row(environment={"cpu": "b"})
    assert len(latest([good, elsewhere])) == 2  # type: ignore[list-item]


def test_a_missing_package_takes_no_numbers_back() -> None:
    """In whichever order the rows come, and whatever else came of the point."""
    rows = [
        row(timestamp=f"2026-01-0{day}T00:00:00+00:00", status=status)
        for day, status in ((1, "not_installed"), (2, "ok"), (3, "crashed"), (4, "not_installed"), (5, "not_installed"))
    ]
    for number, status in ((1, "not_installed"), (2, "ok"), (3, "crashed"), (4, "crashed"), (5, "crashed")):
        for order in (rows[:number], rows[:number][::-1]):
            (kept,) = latest(order)  # type: ignore[arg-type]
            assert kept["status"] == status
    (kept,) = latest([rows[0], rows[4], rows[3]])  # type: ignore[list-item]
    assert kept is rows[4]
