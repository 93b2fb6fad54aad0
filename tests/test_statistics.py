"""Rank-based intervals: coverage, degenerate inputs, ratios."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.statistics import LEAST_SAMPLES, median_interval, ratio_interval, relative_width, summarise

positive = st.floats(min_value=1e-6, max_value=1e6)


def test_known_ranks() -> None:
    # The usual table for 95 %: n = 6 -> 1..6, n = 10 -> 2..9, n = 20 -> 6..15, n = 50 -> 18..33.
    for n, low, high in ((6, 1, 6), (10, 2, 9), (20, 6, 15), (50, 18, 33)):
        assert median_interval(range(1, n + 1)) == (low, high)


def test_coverage_is_at_least_the_confidence() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        low, high = median_interval(random.lognormal(size=21))
        hits += low <= 1.0 <= high
    assert hits / 2000 >= 0.94


@given(st.lists(positive, min_size=1, max_size=60))
def test_interval_is_ordered_and_contains_the_median(samples: list[float]) -> None:
    summary = summarise(samples)
    low, high = summary["ci95"]
    assert low <= summary["median"] <= high
    assert summary["p05"] <= summary["median"] <= summary["p95"]
    assert summary["samples"] == len(samples)


def test_too_few_samples_give_the_whole_range() -> None:
    assert median_interval([3.0, 1.0]) == (1.0, 3.0)
    assert relative_width([1.0] * (LEAST_SAMPLES - 1)) == math.inf
    assert relative_width([1.0] * LEAST_SAMPLES) == 0.0


def test_higher_confidence_is_wider() -> None:
    low, high = median_interval(range(100), 0.9)
    lower, higher = median_interval(range(100), 0.999)
    assert lower < low < high < higher


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
@pytest.mark.parametrize("function", [median_interval, summarise, relative_width])
def test_bad_samples_are_refused(function, samples) -> None:
    with pytest.raises(ValueError, match="samples"):
        function(samples)


def test_bad_confidence_is_refused() -> None:
    for confidence in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="confidence"):
            median_interval([1.0], confidence)


def test_paired_ratios_cancel_drift() -> None:
    drift = np.linspace(1.0, 2.0, 30)
    result = ratio_interval((2.0 * t, t) for t in drift)
    assert result == {"value": 2.0, "ci95": [2.0, 2.0], "samples": 30}


@pytest.mark.parametrize("pairs", [[], [(1.0, math.nan)], [(1.0, 0.0)], [(-1.0, 1.0)], [(1.0, 2.0, 3.0)]])
def test_bad_pairs_are_refused(pairs) -> None:
    with pytest.raises(ValueError, match="pairs"):
        ratio_interval(pairs)
