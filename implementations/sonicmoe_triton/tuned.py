"""The committed choices of `tune`: for a kernel and the widths it sees, what differs from the kernel's own default."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The choice of the plain twin.
PLAIN: Mapping[str, Any] = {"plain": True}
#: What `tune` writes: {"gpu", …, "choices": [{"kernel", "d", "width", "rows", "options", "commit", "dirty"}, …]}.
TABLE = Path(__file__).parent / "tuned.json"


def bucket(rows_per_expert: int) -> int:
    """The power of two that decides which of several entries for the same widths counts."""
    return rows_per_expert.bit_length()


@functools.cache
def _choices() -> dict[tuple[str, int, int], dict[int, Mapping[str, Any] | None]]:
    """(kernel, d, width) -> bucket -> options."""
    found: dict[tuple[str, int, int], dict[int, Mapping[str, Any] | None]] = {}
    if TABLE.exists():
        for choice in json.loads(TABLE.read_text())["choices"]:
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

    Entries of UP_PROJECTION and HIDDEN_GRADIENT are for gated activations."""
    entries = _choices().get((kernel, d, width))
    if not entries:
        return None
    return entries[min(entries, key=lambda its: (abs(its - rows), -its))]
