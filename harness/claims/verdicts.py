"""From a number and the paper's to a verdict: the rule in the header of ``results/paper/claims.toml``."""

from __future__ import annotations

import math
import re

from harness.claims.model import Claim, Interval

#: Reaching this share of the paper's number counts as reproducing it.
REACHED = 0.95
_UP_TO = re.compile(r"reproduced up to (\d+(?:\.\d+)?)")


def limit(claim: Claim) -> float | None:
    """The number from which on a claim counts as reproduced; None where the paper gives no number.

    95 % of the paper's. Where smaller is better, what the claim's ``measure`` states ("reproduced up to 1.02"), else
    the paper's number over 95 %.
    """
    if claim.paper is None:
        return None
    if not claim.smaller_is_better:
        return REACHED * claim.paper
    stated = _UP_TO.search(claim.measure)
    return float(stated.group(1)) if stated else claim.paper / REACHED


def verdict(claim: Claim, value: float | None, ci95: Interval | None = None) -> str:
    """One of `VERDICTS`.

    The whole interval has to lie beyond the paper's number for "better", and beyond `limit` for "reproduced", so that a
    noisier run never passes more easily. A number without an interval (memory) stands for itself. Without a number in
    the paper there is nothing to reach, however good the measured one.
    """
    if value is None or math.isnan(value):
        return "not measured"
    least = limit(claim)
    if claim.paper is None or least is None:
        return "no number in the paper"
    low, high = ci95 if ci95 is not None else (value, value)
    if claim.smaller_is_better:
        return "better" if high < claim.paper else "reproduced" if high <= least else "not reproduced"
    return "better" if low > claim.paper else "reproduced" if low >= least else "not reproduced"
