"""What the breakdown shows: the microseconds of each role in one layer's profiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from harness.errors import UserError
from harness.registry import default_registry
from plots import rows as table
from plots import style
from plots.figure13_memory import failure_text

#: Part of a stack -> its text in the legend and its colour, in the order of drawing: first what one role claims, by
#: the layer's order, then what serves several. Paul Tol's and Okabe and Ito's hues, which survive the common kinds of
#: colour blindness; order, gaps and texts in the bars say the same again.
PARTS: dict[str, tuple[str, str]] = {
    "router": ("router", style.YELLOW),
    "gather": ("gather", style.ORANGE),
    "up": ("up-projection", style.BLUE),
    "activation": ("activation", style.GREEN),
    "down": ("down-projection", style.SKY),
    "aggregation": ("aggregation", style.VERMILLION),
    "dH": ("dH", "#332288"),
    "dW2": ("dW2", style.PURPLE),
    "dX": ("dX", "#44AA99"),
    "dW1": ("dW1", "#882255"),
    "dW": ("dW1 and dW2", "#9B4F96"),
    "gemm": ("GEMMs of several roles", "#7A8CA6"),
    "pointwise": ("pointwise, of several roles", "#C9B77A"),
    "fill": ("zeroing", "#BDBDBD"),
    "other": ("roles unknown here", "#666666"),
}
#: What no role claims.
UNCLAIMED = ""
#: Roles that are drawn as another part.
MERGED = {"grouped_gemm": "gemm"}


@dataclass(frozen=True)
class Stack:
    """One implementation's kernels of one call.

    Attributes:
        parts: part (`PARTS`, `UNCLAIMED`) -> µs; empty where there is no number.
        unstable: hatch it.
        text: what stands in the place of a stack that is missing, e.g. ``crashed¹``.
    """

    parts: dict[str, float] = field(default_factory=dict)
    unstable: bool = False
    text: str = ""

    @property
    def total(self) -> float:
        """µs of all kernels."""
        return sum(self.parts.values())

    @property
    def unclaimed(self) -> float:
        """The share that no role claims, of 1."""
        return self.parts.get(UNCLAIMED, 0.0) / self.total if self.total else 0.0


def present_role(implementation: str) -> Callable[[str], str | None]:
    """A plugin's mapping of kernels' names to roles as it is now; one that knows no role where there is no plugin."""
    try:
        return default_registry().get(implementation).kernel_role
    except UserError:
        return lambda name: None


def parts(kernels: Iterable[Mapping[str, Any]], role: Callable[[str], str | None]) -> dict[str, float]:
    """µs of each part.

    Args:
        kernels: ``{"name", "us", "role"}`` as stored.
        role: asked first, by name. What it does not know keeps the role that was stored: names in rows are cut off
            after 200 characters, and some roles are known only to a plugin that has built a layer.
    """
    found: dict[str, float] = {}
    for kernel in kernels:
        its = role(kernel["name"]) or kernel.get("role") or UNCLAIMED
        its = MERGED.get(its, its)
        part = its if its in PARTS or its == UNCLAIMED else "other"
        found[part] = found.get(part, 0.0) + float(kernel["us"])
    return found


def stack(layers: pd.DataFrame, name: str, model: str, shape: str, direction: str, notes: style.Footnotes) -> Stack:
    """One implementation's kernels in one pass; a failure's reason goes to ``notes``."""
    own = layers[(layers["implementation"] == name) & (layers["shape"] == shape) & (layers["measured_on"] == "cuda")]
    this_pass = own["pass"] == direction
    # A point that failed before its passes were timed may have one row for all of them.
    row = table.best_row(own[this_pass | ~own["status"].isin(table.NUMBERS_ALLOWED)], "kernels_us")
    if row is None:
        return Stack(text="no kernels profiled" if len(own[this_pass]) else "not measured")
    if row["status"] not in table.NUMBERS_ALLOWED:
        return Stack(text=failure_text(row, model, notes))
    return Stack(parts=parts(row["kernels"], present_role(name)), unstable=row["status"] == "unstable")
