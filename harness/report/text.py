"""Numbers and foreign text as people read them; what the three forms share."""

from __future__ import annotations

import math
from typing import Any

from harness.errors import printable

#: What stands where there is no value.
NONE = "–"


def plain(value: Any) -> str:
    """A value from a row or a plugin as text that does nothing but stand there (`printable`). None gives ""."""
    return "" if value is None else printable(str(value)).strip()


def one_line(text: str, most: int = 0) -> str:
    """Text that is fit to be shown with every run of white space as one space, cut to ``most`` characters (0: not at
    all)."""
    line = " ".join(text.split())
    return line if not most or len(line) <= most else line[: most - 1].rstrip() + "…"


def number(value: float | None, digits: int = 4) -> str:
    """That many significant digits, never an exponent: 0.3592, 12.35, 1481."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(decimals, 0), 12)}f}"


def with_interval(value: float | None, low: float | None, high: float | None, digits: int = 4) -> str:
    """``1.109 [1.106, 1.113]``; without a known interval the value alone."""
    text = number(value, digits)
    if text == NONE or low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return text
    return f"{text} [{number(low, digits)}, {number(high, digits)}]"


def in_unit(value: float | None, unit: str, ci95: tuple[float, float] | None = None) -> str:
    """A claim's number: a ratio as ``1.86×``, a reduction as ``45 %``, anything else with its digits alone."""
    if value is None or not math.isfinite(value):
        return NONE
    values = [value, *(ci95 or ())]
    if unit == "reduction":
        texts = [f"{100 * one:.1f}".removesuffix(".0") for one in values]
        return f"{texts[0]} %" + (f" [{texts[1]}, {texts[2]}]" if ci95 else "")
    # Ratios about 1 differ in their third decimal.
    near_one = all(abs(one - 1) < 0.15 for one in values)
    ratio = unit.startswith("ratio")
    texts = [f"{one:.{3 if near_one else 2}f}" if ratio else number(one) for one in values]
    sign = "×" if ratio else ""
    return f"{texts[0]}{sign}" + (f" [{texts[1]}, {texts[2]}]" if ci95 else "")


def count(things: int, one: str, many: str = "") -> str:
    """``1 row``, ``2 rows``."""
    return f"{things:,} {one if things == 1 else many or one + 's'}"
