"""Rows and ratios of layers with token rounding inside: what they say of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import test_method_ratios
from rounded_layers import (
    LOOP,
    NoGradientOfUp,
    Plain,
    PlainRounded,
    SumsOverKeptPairs,
    TellsNothing,
    chosen_and_kept,
    rounded,
)
from test_method_ratios import Ratio

from harness.interface import Implementation, Point, Problem
from harness.measure import Context, measure_point
from harness.problem import make_problem
from harness.record import check
from harness.timing import TimingSettings
from harness.token_rounding import TOP_K

PASSES = ("forward", "backward")


# Fixtures of the tests of `routed_experts`.
seen, ratio, _no_collection = test_method_ratios.seen, test_method_ratios.ratio, test_method_ratios._no_collection


def outcome(method: str) -> dict[str, int]:
    """What must come of a method's routing of `rounded()`'s tokens, from the selection in plain Python."""
    problem = make_problem(rounded(method=method if method != TOP_K else "up"), "cpu")
    chosen, kept = chosen_and_kept(problem)
    kept = chosen if method == TOP_K else kept
    counts = kept.sum(0).tolist()
    return {
        "routed_rows": sum(counts),
        "padded_rows": sum(-(-count // 8) * 8 for count in counts),
        "dropped": int((chosen & ~kept).sum()),
        "added": int((kept & ~chosen).sum()),
        "empty_experts": counts.count(0),
    }


def rows_of(point: Point, implementation: Implementation = LOOP) -> list[dict[str, Any]]:
    base = {"schema": 1, "record": "measurement", "run_id": "r", "sweep": "s", "implementation": "torch_loop"}
    bases = {pass_: {**base, "label": "L", "pass": pass_} for pass_ in PASSES}
    context = Context(lambda _: None, TimingSettings(min_samples=2, max_samples=2, time_limit_s=0.1))
    rows = list(measure_point(point, PASSES, implementation, bases, context))
    assert [check(row)["pass"] for row in rows] == list(PASSES)
    return rows


@pytest.mark.parametrize("method", ["nearest", "up", "down", "balanced"])
def test_a_row_says_what_came_of_the_rounding(method: str) -> None:
    told, plain = outcome(method), outcome(TOP_K)
    assert told["routed_rows"] == told["padded_rows"]
    assert bool(told["dropped"]) == (method != "up") and bool(told["added"]) == (method != "down")
    more = told["routed_rows"] - plain["routed_rows"]
    assert more or method == "balanced"
    rows, before = rows_of(rounded(method=method)), rows_of(rounded(method=TOP_K))
    # Of each row more, forward: H and A written, A read; Y written and read. Backward: H, A', dH; A'; dH, dX~
    # twice; dH.
    for row, own, gemms, elements in zip(rows, before, (3, 6), (4 * 8 + 2 * 16, 10 * 8 + 2 * 16), strict=True):
        assert row["status"] == "ok", row["reason"]
        assert row["routing"] == {**rounded(method=method).routing.as_dict(), **told}
        assert own["routing"] == {**rounded(method=TOP_K).routing.as_dict(), **plain}
        assert row["costs"]["flops"] == 2 * gemms * told["routed_rows"] * 8 * 16
        assert own["costs"]["flops"] == 2 * gemms * 80 * 8 * 16
        assert row["costs"]["algorithm_bytes"] - own["costs"]["algorithm_bytes"] == 4 * more * elements
        assert row["costs"]["boundary_bytes"] == own["costs"]["boundary_bytes"]
        assert "grad_router" in row["correctness"]["relative_l2"]


def test_a_stochastic_row_says_how_it_draws() -> None:
    for row in rows_of(rounded(method="stochastic")):
        assert row["notes"] == ["stochastic rounding draws the same numbers in every call"]
        routing = row["routing"]
        assert routing["routed_rows"] == routing["padded_rows"] == 80 - routing["dropped"] + routing["added"]
        assert routing["dropped"] or routing["added"]


@pytest.mark.parametrize("wrong", [TellsNothing, SumsOverKeptPairs, NoGradientOfUp])
def test_a_wrong_layer_gets_a_row_without_numbers(wrong: type[PlainRounded]) -> None:
    for row in rows_of(rounded(), Plain("nearest", wrong)):
        assert row["status"] == "wrong_result" and row["reason"] and "latency_ms" not in row
        assert row["routing"]["method"] == "nearest"


@pytest.fixture
def layers_ratio(ratio: Ratio, monkeypatch: pytest.MonkeyPatch) -> Ratio:
    """`ratio` of this operation's points."""
    monkeypatch.setattr(test_method_ratios, "routed", rounded)
    return ratio


def test_its_points_are_layers(layers_ratio: Ratio) -> None:
    for row in layers_ratio(TOP_K, "nearest"):
        assert row["operation"] == "moe_layer" and "grad_router" in str(row["correctness"])


@pytest.mark.parametrize(("method", "other"), [(TOP_K, "nearest"), ("down", "up"), ("nearest", TOP_K)])
def test_a_ratio_of_two_methods_says_what_came_of_both(
    layers_ratio: Ratio,
    seen: list[Sequence[Problem]],
    method: str,
    other: str,
) -> None:
    assert outcome(method)["routed_rows"] != outcome(other)["routed_rows"]
    for row in layers_ratio(method, other):
        assert row["status"] == "ok" and row["value"] > 0
        assert row["routing"] == {**rounded(method=method).routing.as_dict(), **outcome(method)}
        assert row["denominator_routing"] == {**rounded(method=other).routing.as_dict(), **outcome(other)}
        assert list(row["correctness"]) == [f"torch_loop ({method})", f"torch_loop ({other})"]
    # Both layers saw the same tensors.
    assert len(seen) == 2 and seen[0] is seen[1]


def test_a_ratio_of_one_method_has_no_second_routing(layers_ratio: Ratio) -> None:
    for row in layers_ratio("nearest", "nearest", denominator=Plain()):
        assert "denominator_routing" not in row
        assert row["routing"] == {**rounded().routing.as_dict(), **outcome("nearest")}
        assert list(row["correctness"]) == ["torch_loop", "plain"]


def test_a_ratio_of_top_k_alone_has_nothing_to_tell(layers_ratio: Ratio) -> None:
    for row in layers_ratio(TOP_K, TOP_K, denominator=Plain()):
        assert "denominator_routing" not in row and row["routing"] == rounded(method=TOP_K).routing.as_dict()


@pytest.mark.parametrize("wrong", [TellsNothing, SumsOverKeptPairs, NoGradientOfUp])
@pytest.mark.parametrize("methods", [(TOP_K, "nearest"), ("nearest", TOP_K)])
def test_the_side_that_is_wrong_is_named(
    layers_ratio: Ratio, methods: tuple[str, str], wrong: type[PlainRounded]
) -> None:
    layer = Plain("nearest", wrong)
    for row in layers_ratio(*methods, numerator=layer, denominator=layer):
        assert row["status"] == "wrong_result" and "value" not in row
        assert row["reason"].startswith("plain (nearest): ") and "(top_k)" not in row["reason"]
        assert row["routing"]["method"] == methods[0] and row["denominator_routing"]["method"] == methods[1]
