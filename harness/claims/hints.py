"""What a user can run to measure a claim that was not."""

from __future__ import annotations

from functools import cache
from typing import Any

from harness.documents import load_toml
from harness.errors import UserError
from harness.registry import ROOT
from harness.shapes import MoEShape


def command(sweep: str, *plugins: str, shape: MoEShape | None = None) -> str:
    """What to run: a command line that measures these implementations, and the ratios between them, in a sweep."""
    only = "".join(f" --only {plugin}" for plugin in dict.fromkeys(plugins))
    return f"run: moebench run {sweep}{only}{f' --shape {shape}' if shape else ''} --resume"


def _names(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@cache
def _pairs(sweep: str) -> frozenset[tuple[str, str]]:
    """(numerator, denominator) of every ratio that a sweep's file asks for; none where it cannot be read."""
    try:
        content = load_toml(ROOT / "sweeps" / f"{sweep}.toml")
        return frozenset(
            (top, bottom)
            for entry in content.get("ratios", [])
            for top in _names(entry["numerator"])
            for bottom in _names(entry["denominator"])
        )
    except (UserError, KeyError, TypeError):
        return frozenset()


def ratio_command(sweep: str, *pairs: tuple[str, str], shape: MoEShape | None = None) -> str:
    """A sentence's end that says how to measure ratios; with what to add to the sweep's file where it lacks one."""
    line = command(sweep, *(name for pair in pairs for name in pair), shape=shape)
    missing = [pair for pair in pairs if pair not in _pairs(sweep)]
    if missing:
        lacking = " and ".join(f"{top} / {bottom}" for top, bottom in missing)
        return f"add the ratio {lacking} to sweeps/{sweep}.toml, then {line}"
    return line
