"""Errors that a user can act on."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
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


def printable(text: str) -> str:
    """What others have written, fit for a terminal and for JSON: without colours, and with one replacement character
    for each run of control characters and of halves of characters; ends of lines and tabs stay."""
    plain = "".join(c if c.isprintable() or c in "\n\r\t" else "\ufffd" for c in _COLOURS.sub("", text))
    return re.sub("\ufffd+", "\ufffd", plain)
