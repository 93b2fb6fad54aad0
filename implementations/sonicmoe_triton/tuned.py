"""The committed choices of `tune`: for a kernel and the widths it sees, what differs from the kernel's own default."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The choice of the plain twin.
PLAIN: Mapping[str, Any] = {"plain": True}
#: What `tune` writes: {"gpu", "commit", …, "choices": [{"kernel", "d", "width", "options"}, …]}.
TABLE = Path(__file__).parent / "tuned.json"


@functools.cache
def _choices() -> dict[tuple[str, int, int], Mapping[str, Any]]:
    if not TABLE.exists():
        return {}
    table = json.loads(TABLE.read_text())
    return {
        (choice["kernel"], choice["d"], choice["width"]): PLAIN if choice["options"] == PLAIN else choice["options"]
        for choice in table["choices"]
    }


def overrides(kernel: str, d: int, width: int) -> Mapping[str, Any] | None:
    """Keyword arguments for the kernel's options, `PLAIN` for the plain twin, None where nothing was tuned.

    Args:
        kernel: one of the names in `tiles`.
        d: width of an embedding.
        width: of the other operand: n, but H's width for INPUT_GRADIENT and UP_WEIGHT_GRADIENT.

    Entries of UP_PROJECTION and HIDDEN_GRADIENT are for gated activations."""
    return _choices().get((kernel, d, width))
