"""The command line with bad files and arguments of every kind: exit code 2 and one line, or an answer; never a
traceback."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from conftest import MoeBench
from hostile import SAME
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import assert_refused
from test_fuzz_files import number_texts, shape_texts

from harness import cli, regress
from harness.errors import UserError
from harness.shapes import MoEShape

Run = Callable[..., tuple[int, str, str]]
DEEP = b"[" * 100_000
#: What stands in place of a file's proper content.
CONTENTS = {
    "empty": b"",
    "prose": b"Dear reader,\nthis is no such file.\n",
    "zeros": b"\0" * 4096,
    "not UTF-8": b"\xff\xfe\xfa",
    "UTF-16": "[sweep]\n".encode("utf-16"),
    "deep": b"a = " + DEEP,
    "deep JSON": DEEP,
    "deep keys": b"[sweep]\nname" + b".a" * 5000 + b" = 1",
    "digits": b"a = " + b"9" * 9000,
    "hexadecimal": b"[sweep]\nname = 0x" + b"f" * 9000,
    "digits in JSON": b'{"schema": ' + b"9" * 9000 + b"}",
    "a string of escapes": b'"\\ud800\\u0000\\u001b[31m"',
    "terminal": b'"\x1b]0;x\x07" = 1\n',
    "no end": b'{"schema": 1, "points": [{"what": "',
}


def bad_place(folder: Path, what: str, suffix: str) -> Path:
    """A path where there is no file that can be read."""
    path = folder / f"place{suffix}"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "endless":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "long":
        return folder / f"{'x' * 300}{suffix}"
    return path


PLACES = ("nothing", "folder", "pipe", "endless", "loop", "long")


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regress, "gpu_name", lambda: "NVIDIA H200")


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize("what", [*CONTENTS, *PLACES])
def test_bad_files_are_refused_in_one_line(command_line: Run, tmp_path: Path, what: str) -> None:
    def path(suffix: str) -> Path:
        if what not in CONTENTS:
            return bad_place(tmp_path, what, suffix)
        (tmp_path / f"bad{suffix}").write_bytes(CONTENTS[what])
        return tmp_path / f"bad{suffix}"

    for suffix, arguments in (
        (".toml", ("run", "FILE", "--output", tmp_path / "rows")),
        (".json", ("regress", "--baseline", "FILE")),
        (".jsonl", ("compare", "FILE", "FILE")),
    ):
        file = path(suffix)
        answer = command_line(*(file if part == "FILE" else part for part in arguments))
        assert_refused(answer, "" if what == "long" else file.name)
        assert answer[2].rstrip("\n").isprintable() and len(answer[2]) < 5000
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("what", [*CONTENTS, *PLACES])
def test_a_bad_file_among_others_costs_itself_only(command_line: Run, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    if what in CONTENTS:
        (folder / "bad.jsonl").write_bytes(CONTENTS[what])
    elif what != "long":
        bad_place(folder, what, ".jsonl")
    code, out, err = command_line("report", "--results", folder, "--output", tmp_path / "page", "--format", "terminal")
    assert code == 0 and not err and "Traceback" not in out
    if what in CONTENTS and what != "empty":
        assert "bad.jsonl" in out


#: What a shell can hand over.
arguments = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=30
) | st.sampled_from(["", " ", "-", "--", "a\nb", "\x1b[31m", "\udcff", "../..", "9" * 5000, "[red]", "*"])
words = st.one_of(shape_texts, number_texts, arguments).filter(
    lambda text: "\0" not in text and not any("\ud800" <= character <= "\udc7f" for character in text)
)


def no_shape(text: str) -> bool:
    try:
        MoEShape.parse(text)
    except UserError:
        return True
    return False


@pytest.mark.usefixtures("with_gpu")
@given(
    st.one_of(
        words.filter(no_shape).map(lambda text: ("check", "torch_loop", f"--shape={text}")),
        words.map(lambda text: ("compare", "torch_loop", "torch_loop", f"--shape={text}")),
        words.map(lambda text: ("run", "smoke", f"--shape={text}x")),
        words.map(lambda text: ("run", "smoke", f"--only=x{text}")),
        words.map(lambda text: ("run", "smoke", f"--mode=x{text}")),
        words.map(lambda text: ("run", "--", f"none{text}")),
        words.map(lambda text: ("regress", f"--threshold=x{text}")),
        number_texts.map(lambda text: ("regress", "--threshold=median:5%", f"--repeat=-{text}")),
        words.map(lambda text: ("check", "--", f"none{text}")),
        words.map(lambda text: ("plot", f"--figure=x{text}")),
        words.map(lambda text: ("report", f"--format=x{text}")),
        words.map(lambda text: ("compare", "--", f"/none/{text}", "/none/either")),
    )
)
@settings(SAME, max_examples=80)
def test_bad_arguments_are_refused(command_line: Run, asked: tuple[str, ...]) -> None:
    code, out, err = command_line(*asked)
    assert code == 2 and "Traceback" not in out + err, (asked, err)
    if not err.startswith("Usage:"):
        assert_refused((code, out, err))


@pytest.mark.parametrize("repeat", [0, -1, 1001, 10**30])
def test_a_number_of_repetitions_that_no_run_could_hold(command_line: Run, repeat: int) -> None:
    assert_refused(command_line("regress", "--repeat", repeat), f"--repeat {repeat}: must be at least 1")


def into(monkeypatch: pytest.MonkeyPatch, stream: TextIO) -> None:
    """Let the command line that runs in this process write to another standard output."""
    run = cli.main

    def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stream)
            run()

    monkeypatch.setattr(cli, "main", main)


def test_a_terminal_that_knows_ascii_only(command_line: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    into(monkeypatch, stream)
    code, _, err = command_line("report", "--results", tmp_path, "--format", "terminal")
    stream.seek(0)
    assert code == 0 and not err and "\\u" in stream.read()


def test_a_full_disk_behind_standard_output(command_line: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    stream = open("/dev/full", "w")
    into(monkeypatch, stream)
    assert_refused(command_line("list"), "standard output or a file: No space left on device")
    with contextlib.suppress(OSError):
        stream.close()


def test_a_reader_that_has_gone(moebench: MoeBench) -> None:
    read, write = os.pipe()
    os.close(read)
    process = moebench.start("list", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert process.communicate(timeout=60)[1] == b"" and process.returncode == 141
