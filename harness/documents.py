"""TOML and JSON files that people edit: read whole, or refused in one line; and written whole, or not at all."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.errors import UserError

#: Largest whole number of either sign: what 64 bits hold, and TOML promises.
WHOLE = 2**63 - 1
#: Tables and lists within each other. Real files need five; `repr`, `json` and every reader recurse.
DEPTH = 32
#: Half a surrogate pair: JSON can spell it, UTF-8 cannot.
LONE = re.compile("[\\ud800-\\udfff]")


def beyond(value: Any, strict: bool = False) -> str:
    """Why a value that a parser made cannot be used, with the place in it: a whole number beyond 64 bits, tables or
    lists nested too deeply and, with ``strict``, a number that is NaN or infinite, or half a surrogate pair in a text.
    Empty where nothing is wrong."""
    waiting: list[tuple[Any, int, Any]] = [(value, 0, ())]
    while waiting:
        item, depth, place = waiting.pop()
        if isinstance(item, str):
            if strict and LONE.search(item):
                return f"{_place(place)}holds half a surrogate pair, which is no character"
            continue
        if isinstance(item, (Mapping, list, tuple)):
            if depth >= DEPTH:
                return f"{_place(place)}nested more than {DEPTH} deep"
            inner = item.items() if isinstance(item, Mapping) else enumerate(item, 1)
            waiting += [(one, depth + 1, (place, key)) for key, one in inner]
            if strict and isinstance(item, Mapping):
                waiting += [(key, depth + 1, place) for key in item]
        elif isinstance(item, int):
            if not -WHOLE <= item <= WHOLE:
                # Without the number: Python refuses to write one of thousands of digits.
                return f"{_place(place)}a whole number beyond 64 bits"
        elif strict and isinstance(item, float) and not math.isfinite(item):
            return f"{_place(place)}{item} is not a finite number"
    return ""


def plain(value: Any) -> bool:
    """Whether all in a value is of JSON's own types, nested no deeper than `beyond` allows, its whole numbers within 64
    bits, its other numbers finite, its texts ASCII: then strict `beyond` finds nothing. Much faster, for what is good
    nearly always; False says nothing."""
    level: list[Any] = [value]
    for _ in range(DEPTH + 1):
        inner: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict:
                if not all(type(key) is str and key.isascii() for key in item):
                    return False
                inner += item.values()
            elif kind is list:
                inner += item
            elif kind is str:
                if not item.isascii():
                    return False
            elif kind is float:
                if not math.isfinite(item):
                    return False
            elif kind is int:
                if not -WHOLE <= item <= WHOLE:
                    return False
            elif item is not None and kind is not bool:
                return False
        if not inner:
            return True
        level = inner
    return False


def _place(place: Any) -> str:
    """``points[1].device_ms: ``, from (((), "points"), 1), …; empty for the whole."""
    keys = []
    while place:
        place, key = place
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    text = "".join(reversed(keys)).removeprefix(".")
    return f"{text[:200]}: " if text else ""


def load_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file in UTF-8 (a byte-order mark is allowed).

    Raises:
        UserError: it cannot be read, is no TOML, or `beyond` speaks against it.
    """
    return _parsed(path, content(path), tomllib.loads, "TOML")


def load_json(path: Path) -> Any:
    """The value of a JSON file in UTF-8 (a byte-order mark is allowed).

    Raises:
        UserError: as `load_toml`.
    """
    return parse_json(path, content(path))


def content(path: Path, most: int = 0) -> bytes:
    """All bytes of a file. Raises `UserError` where it cannot be read, or has more of them than ``most`` (0: any)."""
    try:
        # Of a pipe or a device there may be no end.
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: cannot be read: not a file")
        if most and path.exists() and path.stat().st_size > most:
            raise UserError(f"{path}: cannot be read: larger than {most} bytes")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a path that holds what no path can
        raise UserError(f"{path}: cannot be read: {error}") from error


def parse_json(path: Path, text: bytes) -> Any:
    """The value of a JSON file's bytes; `UserError`, with the file's name, as in `load_json`."""
    return _parsed(path, text, json.loads, "JSON")


def _parsed(path: Path, text: bytes, parse: Callable[[str], Any], form: str) -> Any:
    try:
        found = parse(text.decode("utf-8-sig"))
    except RecursionError:
        raise UserError(f"{path}: nested more than {DEPTH} deep") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid {form}: {error}") from error
    wrong = beyond(found, strict=form == "JSON")
    if wrong:
        raise UserError(f"{path}: {wrong}")
    return found


def save(path: Path, text: str) -> None:
    """Write a file in UTF-8, whole or not at all: what was there stays until all of the new text is.

    Raises:
        UserError: it cannot be written.
    """
    try:
        put(path, text)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def put(path: Path, text: str) -> None:
    """`save`, for who has more to say about an `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A place beside a file. What lies there takes the file's place once the block has ended well, and goes otherwise.

    Raises:
        OSError: a device, a pipe or a folder is in the file's place, which would be taken away.
    """
    if path.exists() and not path.is_file():
        raise OSError("not a file")
    # The end of its name may say what it holds.
    fresh = path.with_name(f".new.{path.name}")
    try:
        yield fresh
        if fresh.exists():
            fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
