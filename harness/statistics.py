"""Medians with rank-based confidence intervals, for times and for paired ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

#: Below this many samples no pair of order statistics covers the median with 95 % confidence: 1 - 2 * 0.5**5 = 0.94.
LEAST_SAMPLES = 6


def _checked(samples: Iterable[float]) -> np.ndarray:
    values = np.asarray(list(samples), dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"samples: expected one number each, got an array of shape {values.shape}")
    if values.size == 0:
        raise ValueError("samples: none given")
    if not np.isfinite(values).all():
        raise ValueError("samples: contain NaN or infinity")
    return values


def median_interval(samples: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the median from order statistics: nothing is assumed about the samples' distribution.

    The number of samples below the true median is binomial(n, 1/2); the interval's ends are the two samples whose
    ranks this distribution allows. Coverage is at least ``confidence``, except where there are too few samples for it
    (fewer than six at 95 %): then the interval is the whole range, the widest that the samples support.

    Args:
        samples: independent measurements, in any unit.
        confidence: between 0 and 1.

    Raises:
        ValueError: no samples, NaN or infinity among them, or a confidence outside (0, 1).
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence={confidence}: must lie between 0 and 1")
    ordered = np.sort(_checked(samples))
    n = ordered.size
    # Here, since most processes time nothing.
    from scipy.special import bdtr

    below = bdtr(np.arange(n, dtype=np.float64), n, 0.5)
    rank = max(int(np.searchsorted(below, (1.0 - confidence) / 2.0)), 1)
    return float(ordered[rank - 1]), float(ordered[n - rank])


def summarise(samples: Iterable[float]) -> dict[str, Any]:
    """``median``, ``p05``, ``p95`` and ``ci95`` = [low, high] of the median, in the samples' unit, and the number of
    ``samples``. Raises `ValueError` as `median_interval` does."""
    values = _checked(samples)
    p05, median, p95 = (float(v) for v in np.percentile(values, [5.0, 50.0, 95.0]))
    low, high = median_interval(values)
    return {"median": median, "p05": p05, "p95": p95, "ci95": [low, high], "samples": int(values.size)}


def interval_only(samples: Iterable[float]) -> dict[str, Any]:
    """`summarise` without the percentiles."""
    summary = summarise(samples)
    return {key: summary[key] for key in ("median", "ci95", "samples")}


def relative_width(samples: Sequence[float], confidence: float = 0.95) -> float:
    """Width of the median's interval over the median, for adaptive stopping.

    Infinite while there are too few samples for an interval of this confidence (one sample has a range of zero, which
    would end sampling at once) and where the median is zero."""
    values = _checked(samples)
    if 2.0 * 0.5**values.size > 1.0 - confidence:
        return math.inf
    median = float(np.median(values))
    low, high = median_interval(values, confidence)
    return math.inf if median == 0.0 else (high - low) / abs(median)


def ratio_interval(pairs: Iterable[tuple[float, float]], confidence: float = 0.95) -> dict[str, Any]:
    """Median of the paired ratios numerator / denominator: ``value``, ``ci95`` = [low, high] and ``samples``.

    A pair is taken close together in time, so that what drifts (clock, temperature) cancels within it.

    Args:
        pairs: (time of the numerator, time of the denominator), in one unit, greater than zero.

    Raises:
        ValueError: no pairs, NaN or infinity among them, or a time that is not positive.
    """
    listed = list(pairs)
    if not listed:
        raise ValueError("pairs: none given")
    table = np.asarray(listed, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] != 2:
        raise ValueError("pairs: expected (numerator, denominator) each")
    if not np.isfinite(table).all():
        raise ValueError("pairs: contain NaN or infinity")
    if (table <= 0.0).any():
        raise ValueError("pairs: times must be greater than zero")
    ratios = table[:, 0] / table[:, 1]
    low, high = median_interval(ratios, confidence)
    return {"value": float(np.median(ratios)), "ci95": [low, high], "samples": int(ratios.size)}
