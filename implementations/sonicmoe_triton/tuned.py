"""The committed choices of `tune`: for a kernel and the widths it sees, what differs from the kernel's own default."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from harness.documents import load_json
from harness.errors import UserError

#: The choice of the plain twin.
PLAIN: Mapping[str, Any] = {"plain": True}
#: What `tune` writes: {"gpu", …, "choices": [{"kernel", "d", "width", "rows", "options", "commit", "dirty"}, …]}.
TABLE = Path(__file__).parent / "tuned.json"


def bucket(rows_per_expert: int) -> int:
    """The power of two that decides which of several entries for the same widths counts."""
    return rows_per_expert.bit_length()


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a table's ``choices``.

    Raises:
        UserError: the file cannot be read, or an entry is not as `tune` writes it.
    """
    table = load_json(path)

    def fail(where: str, message: str) -> NoReturn:
        remedy = "take the committed file again, or write another: python -m implementations.sonicmoe_triton.tune"
        raise UserError(f"{path}: {where}: {message}; {remedy}")

    choices = table.get("choices") if isinstance(table, dict) else None
    if not isinstance(choices, list):
        fail("choices", "missing or not a list")
    for number, choice in enumerate(choices, 1):
        where = f"choices[{number}]"
        if not isinstance(choice, dict):
            fail(where, "must be an object")
        if not isinstance(choice.get("kernel"), str):
            fail(f"{where}.kernel", "missing or not a text")
        for key in ("d", "width", "rows"):
            if not _is_whole(choice.get(key)):
                fail(f"{where}.{key}", "missing or not a whole number of at least 0")
        options = choice.get("options")
        if options is None and "options" in choice:
            continue
        if not (isinstance(options, dict) and all(isinstance(its, bool) or _is_whole(its) for its in options.values())):
            fail(f"{where}.options", "must be null, or an object of whole numbers, true and false")
    return choices


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@functools.cache
def _choices() -> dict[tuple[str, int, int], dict[int, Mapping[str, Any] | None]]:
    """(kernel, d, width) -> bucket -> options."""
    found: dict[tuple[str, int, int], dict[int, Mapping[str, Any] | None]] = {}
    if TABLE.exists():
        for choice in read(TABLE):
            entries = found.setdefault((choice["kernel"], choice["d"], choice["width"]), {})
            entries[bucket(choice["rows"])] = PLAIN if choice["options"] == PLAIN else choice["options"]
    return found


def overrides(kernel: str, d: int, width: int, rows: int) -> Mapping[str, Any] | None:
    """Keyword arguments for the kernel's options, `PLAIN` for the plain twin, None for the kernel's own choice.

    Args:
        kernel: one of the names in `tiles`.
        d: width of an embedding.
        width: of the other operand: n, but H's width for INPUT_GRADIENT and UP_WEIGHT_GRADIENT; for AGGREGATION, K.
        rows: the `bucket` of the average number of rows of an expert: the fewer, the more often its weights are read
            for the same work. The entry nearest to it counts; of two, the one with more rows.

    Entries of UP_PROJECTION and HIDDEN_GRADIENT are for gated activations. Raises `UserError` as `read` does."""
    entries = _choices().get((kernel, d, width))
    if not entries:
        return None
    return entries[min(entries, key=lambda its: (abs(its - rows), -its))]
