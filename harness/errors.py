"""Errors that a user can act on, and what others have written, fit to be shown."""

from __future__ import annotations

import os
import re
import signal
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DIRECTIONS = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F)}
#: Characters of the longest message: what a file holds may be of any size.
_MOST = 4000


def one_line(text: str) -> str:
    """The text on one line: white space as single spaces, what no terminal should obey (control characters, marks that
    turn the direction of writing, lone surrogates) by its number, the middle of a very long text left out."""
    line = " ".join(text.split())
    if len(line) > _MOST:
        line = f"{line[: _MOST * 2 // 3]} … {line[-_MOST // 4 :]}"
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in line
    )


class UserError(Exception):
    """Bad input, or a place that cannot be written to. The command line prints its message, which is always one line
    (`one_line`), and exits with code 2."""

    def __str__(self) -> str:
        return one_line(super().__str__())


@contextmanager
def refusals(program: str) -> Iterator[None]:
    """For a module that runs by itself: a `UserError` becomes its line, and exit code 2. Where nobody reads what it
    prints any more (``| head``), it ends as the signal would end it: exit code 141, and no word."""
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        # Nothing else may go there, at the interpreter's end neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def printable(text: str) -> str:
    """What others have written, fit for a terminal, a page, a picture and JSON: without colours, and with one
    replacement character for each run of control characters, of marks that turn the direction of writing and of what is
    no character; ends of lines and tabs stay."""
    if text.isprintable():
        return text
    text = _COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return re.sub("\ufffd+", "\ufffd", "".join(c if _fits(c) else "\ufffd" for c in text))


def _fits(character: str) -> bool:
    if character.isprintable() or character in "\n\t":
        return True
    return character not in _DIRECTIONS and unicodedata.category(character) in ("Cf", "Zs")


def describe(error: BaseException) -> str:
    """An exception of code that is not ours, as one line: its type and what it says."""
    try:
        text = str(error)
    except Exception:  # a plugin's own class
        text = ""
    # What C++ adds to a message is a stack of addresses.
    text = " ".join(printable(text.split("Exception raised from ")[0]).split())
    # A traceback within a message: where a machine keeps its files tells nobody else anything.
    text = re.sub(r'File "/[^"]*/([^/"]+/[^/"]+)"', r'File "\1"', text)
    return f"{type(error).__name__}: {text[:600]}" if text else type(error).__name__
