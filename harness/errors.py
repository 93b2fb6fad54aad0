"""Errors that a user can act on."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class UserError(Exception):
    """Bad input. The command line prints its message as one line and exits with code 2."""


def printable(text: str) -> str:
    """What others have written, fit for a terminal and for JSON: without colours, and with one replacement character
    for each run of control characters and of halves of characters; ends of lines and tabs stay."""
    plain = "".join(c if c.isprintable() or c in "\n\r\t" else "\ufffd" for c in _COLOURS.sub("", text))
    return re.sub("\ufffd+", "\ufffd", plain)
