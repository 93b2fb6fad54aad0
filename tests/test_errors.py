"""What others have written, made fit to be shown."""

from __future__ import annotations

import signal
import subprocess
import sys
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from hostile import SAME, TEXTS
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError, describe, printable
from harness.registry import ROOT


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\r\nc\rd\n", "a\tb\nc\nd\n"),
        ("\x1b[1;31mred\x1b[0m, \x1b]0;title\x07", "red, \ufffd]0;title\ufffd"),
        ("\ud83d\udcff halves, \ufffe none", "\ufffd halves, \ufffd none"),
        ("\u202egnp.exe\u2066", "\ufffdgnp.exe\ufffd"),
        # A space that does not break, a soft hyphen, a joined family: all that they do is to stand there.
        ("5\xa0%, Band\xadbreite, 👨‍👩‍👧", "5\xa0%, Band\xadbreite, 👨‍👩‍👧"),
    ],
)
def test_what_does_more_than_stand_there_is_replaced(text: str, shown: str) -> None:
    assert printable(text) == shown


@SAME
@given(st.one_of(st.text(), st.sampled_from(TEXTS)))
def test_whatever_it_is_utf8_and_xml_hold_it(text: str) -> None:
    shown = printable(text)
    assert ElementTree.fromstring(f"<a>{escape(shown)}</a>").text == (shown or None)
    assert printable(shown) == shown and shown.encode().decode() == shown
    assert str(UserError(text)).isprintable()


def test_an_exception_is_one_line() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(Mute()) == "Mute" and describe(KeyError()) == "KeyError"
    assert describe(ValueError("two\n lines \x1b[31mred")) == "ValueError: two lines red"
    # Where a machine keeps its files stands in no row.
    traced = 'from user code:\n  File "/some/where/else/layers/moe.py", line 4, in forward\n    self.mlp(x)'
    assert describe(TypeError(traced)) == (
        'TypeError: from user code: File "layers/moe.py", line 4, in forward self.mlp(x)'
    )
    assert (
        describe(RuntimeError("CUDA error\nException raised from f at x.cpp:1\n#0 0x1")) == "RuntimeError: CUDA error"
    )


def test_a_module_whose_reader_has_gone_ends_without_a_word() -> None:
    program = "from harness.errors import refusals\nwith refusals('x'):\n  for _ in range(10**5): print('a' * 100)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"a" * 100 + b"\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(30)) == (b"", 128 + signal.SIGPIPE)
