"""The operation `routed_experts`: its reference, its gate, what it records, and the implementations that a CPU has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import point_of
from torch import Tensor

from harness.accounts import _top_k_counts
from harness.correctness import evaluate
from harness.interface import DISTRIBUTIONS, Layer, Point, Problem
from harness.measure import Context, count_rows, measure_point
from harness.operations import get_operation
from harness.points import point_from_dict, point_to_dict
from harness.record import check
from harness.reference import compare_routed
from harness.registry import load_registry
from harness.routing import expert_counts
from harness.shapes import MoEShape
from harness.timing import TimingSettings
from harness.token_rounding import METHODS

OPERATION = get_operation("routed_experts")


def routed(shape: str = "40,16,8,6,2", method: str = "nearest", m_tile: int = 8, **kwargs: object) -> Point:
    point = point_of(shape, operation="routed_experts", name="torch_loop", **kwargs)  # type: ignore[arg-type]
    return replace(point, routing=replace(point.routing, method=method, m_tile=m_tile))


class DenseExperts(Layer):
    """Every expert sees every token, weighted by a (T, E) matrix: another way than the streamed reference."""

    def __init__(self, problem: Problem) -> None:
        assert problem.routing is not None
        weights = (problem.gate, problem.up, problem.down, problem.routing.scores)
        self.gate, self.up, self.down, self.scores = (w.detach().requires_grad_() for w in weights)
        self.tokens = torch.repeat_interleave(
            torch.arange(problem.shape.T), problem.routing.token_offsets.long().diff()
        )
        self.experts = problem.routing.experts.long()

    def parameters(self) -> Sequence[Tensor]:
        return [self.gate, self.up, self.down, self.scores]

    def weights(self) -> Tensor:
        zeros = torch.zeros(int(self.tokens.max()) + 1 if len(self.tokens) else 0, len(self.gate))
        return zeros.index_put((self.tokens, self.experts), self.scores)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("td,end->etn", x, self.gate)) * torch.einsum("td,end->etn", x, self.up)
        weights = F.pad(self.weights(), (0, 0, 0, len(x) - len(self.weights())))
        return torch.einsum("te,etn,edn->td", weights, hidden, self.down)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(("grad_gate", "grad_up", "grad_down", "grad_scores"), gradients, strict=True))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_streamed_reference_equals_a_dense_layer(method: str, distribution: str) -> None:
    problem = OPERATION.make_problem(routed(method=method, distribution=distribution), "cpu")
    found = evaluate(DenseExperts(problem), problem)
    comparison = compare_routed(problem, found.output, found.grad_x, found.gradients)
    assert set(comparison.errors) == {"output", "grad_x", "grad_gate", "grad_up", "grad_down", "grad_scores"}
    assert max(comparison.errors.values()) < 1e-5 and not comparison.nonzero_empty_experts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", ["40,16,8,6,2", "3,8,8,4,2", "1,8,8,1,1", "30,16,8,12,3"])
def test_the_loop_passes_the_gate(shape: str, method: str) -> None:
    problem = OPERATION.make_problem(routed(shape, method), "cpu")
    layer = load_registry().get("torch_loop").build(problem)
    correctness = OPERATION.check(layer, problem)
    assert correctness.reason is None, correctness.reason
    assert correctness.counts is not None and problem.routing is not None
    assert int(correctness.counts.sum()) == len(problem.routing.experts)


def test_input_sets_differ_in_x_alone() -> None:
    first, second = (OPERATION.make_problem(routed(), "cpu", index) for index in (0, 1))
    assert not torch.equal(first.x, second.x) and torch.equal(first.gate, second.gate)
    assert first.routing is not None and second.routing is None
    again = OPERATION.make_problem(routed(method="stochastic"), "cpu").routing
    assert again is not None
    assert torch.equal(again.experts, OPERATION.make_problem(routed(method="stochastic"), "cpu").routing.experts)  # type: ignore[union-attr]


class Spoilt(DenseExperts):
    """Wrong in one way."""

    way = ""

    def weights(self) -> Tensor:
        weights = super().weights()
        if self.way == "a pair is missing":
            mask = torch.ones_like(weights)
            mask[self.tokens[-1], self.experts[-1]] = 0
            return weights * mask
        if self.way == "no gradient of the scores":
            return weights.detach() + 0 * weights
        if self.way == "a pair too many":
            extra = torch.zeros_like(weights)
            extra[self.tokens[0], (self.experts[0] + 1) % weights.shape[1]] = 0.5
            return weights + extra
        return weights

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + 1e-3 if self.way == "tokens without experts get something" else out

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        found = super().canonical_gradients(gradients)
        if self.way == "gate and up are swapped":
            found["grad_gate"], found["grad_up"] = found["grad_up"], found["grad_gate"]
        if self.way == "scores in another order":
            found["grad_scores"] = found["grad_scores"].flip(0)
        return found


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("a pair is missing", "output"),
        ("no gradient of the scores", "grad_scores"),
        ("a pair too many", "output"),
        ("tokens without experts get something", "without an expert"),
        ("gate and up are swapped", "grad_gate"),
        ("scores in another order", "grad_scores"),
    ],
)
def test_the_gate_refuses_planted_faults(way: str, named: str) -> None:
    problem = OPERATION.make_problem(routed(method="down"), "cpu")
    assert problem.routing is not None and bool((problem.routing.token_offsets.diff() == 0).any())
    layer = Spoilt(problem)
    assert OPERATION.check(layer, problem).reason is None
    layer.way = way
    reason = OPERATION.check(layer, problem).reason
    assert reason and named in reason, reason


class Meddling(DenseExperts):
    """Right, but for the routing that it was handed, which it changes: while it is built, or in a call."""

    def __init__(self, problem: Problem, when: str) -> None:
        super().__init__(problem)
        assert problem.routing is not None
        self.routing, self.when = problem.routing, when
        if when == "built":
            self.scores.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "scores":
            self.scores.data.zero_()
        elif self.when == "experts":
            self.routing.experts.fill_(0)
        elif self.when == "token_offsets":
            self.routing.token_offsets[1:-1] = 0
        return super().forward(x)


@pytest.mark.parametrize(
    ("when", "named"),
    [
        ("built", "while it was built"),
        ("scores", "the routing's scores"),
        ("experts", "the routing's experts"),
        ("token_offsets", "the routing's token_offsets"),
    ],
)
def test_a_layer_that_changes_the_routing_is_refused(when: str, named: str) -> None:
    problem = OPERATION.make_problem(routed(), "cpu")
    reason = OPERATION.check(Meddling(problem, when), problem).reason
    assert reason and named in reason, reason


def test_a_row_says_what_came_of_the_routing() -> None:
    point = routed(method="nearest")
    implementation = load_registry().get("torch_loop")
    base = {"schema": 1, "record": "measurement", "run_id": "r", "sweep": "s", "implementation": "torch_loop"}
    context = Context(lambda _: None, TimingSettings(min_samples=2, max_samples=2, time_limit_s=0.1))
    (row,) = measure_point(
        point, ["forward"], implementation, {"forward": {**base, "label": "L", "pass": "forward"}}, context
    )
    check(row)
    problem = OPERATION.make_problem(point, "cpu")
    assert problem.routing is not None
    counts = expert_counts(problem.routing.experts, 6)
    routing = row["routing"]
    assert row["status"] == "ok" and routing["method"] == "nearest"
    assert routing["routed_rows"] == int(counts.sum()) == routing["padded_rows"]
    assert (routing["dropped"], routing["added"]) == (problem.routing.dropped, problem.routing.added)
    assert routing["dropped"] or routing["added"]
    assert row["costs"]["flops"] == 6 * routing["routed_rows"] * 8 * 16


def test_points_survive_the_pipe() -> None:
    point = routed(method="balanced", m_tile=64)
    assert point_from_dict(point_to_dict(point)) == point


# Accounts, which need no layer.


def counted(point: Point) -> dict[str, object]:
    base = {"schema": 1, "record": "measurement", "run_id": "r", "sweep": "s", "implementation": "routing"}
    (row,) = count_rows(point, {"forward": {**base, "label": "L", "pass": "forward"}}, Context(lambda _: None))
    check(row)
    return row


def account_point(method: str, shape: str = "2048,64,32,16,4", distribution: str = "uniform") -> Point:
    point = point_of(shape, "bfloat16", distribution, operation="token_rounding", name="routing")
    return replace(point, routing=replace(point.routing, method=method))


@pytest.mark.parametrize("distribution", ["uniform", "skewed", "empty_experts"])
@pytest.mark.parametrize("method", METHODS)
def test_accounts(method: str, distribution: str) -> None:
    row = counted(account_point(method, distribution=distribution))
    routing, costs = row["routing"], row["costs"]
    assert isinstance(routing, dict) and isinstance(costs, dict)
    pairs = 2048 * 4
    assert routing["routed_rows"] == pairs - routing["dropped"] + routing["added"]
    assert costs["flops"] == 6 * routing["routed_rows"] * 32 * 64
    assert costs["hardware_flops"] == 6 * routing["padded_rows"] * 32 * 64
    waste = routing["padded_rows"] - routing["routed_rows"]
    if method in ("nearest", "up", "down", "stochastic", "balanced"):
        # What is left is the padding of experts that one more tile would give more tokens than there are.
        before = _top_k_counts(MoEShape.parse("2048,64,32,16,4"), distribution, 0)
        exempt = before[(before // 128 + 1) * 128 > 2048]
        assert waste == int((-exempt % 128).sum())
        assert (routing["added"], routing["dropped"])[method == "up"] == 0 or method in (
            "nearest", "stochastic", "balanced",
        )  # fmt: skip
    elif method == "top_k":
        assert waste > 0 and routing["dropped"] == routing["added"] == 0
    elif method == "expert_choice":
        assert routing["routed_rows"] == pairs and (routing["dropped"] > 0) == (routing["added"] > 0)
    else:
        assert routing["added"] == 0 and routing["dropped"] > 0


def test_accounts_count_what_the_layers_inputs_would_route() -> None:
    """Not the same numbers, for no product is computed, but the same distribution: waste agrees within its noise."""
    shape = "4096,64,8,64,4"
    counted_waste = counted(account_point("top_k", shape))["routing"]
    problem = OPERATION.make_problem(replace(routed(shape, "top_k", 128)), "cpu")
    assert problem.routing is not None and isinstance(counted_waste, dict)
    padded = int((-(-expert_counts(problem.routing.experts, 64) // 128) * 128).sum())
    assert counted_waste["padded_rows"] == pytest.approx(padded, rel=0.06)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import accounts

    def whole(make: Callable[[], dict[str, object]]) -> dict[str, object]:
        accounts._top_k_counts.cache_clear()
        return make()

    first = whole(lambda: accounts.account(account_point("nearest")))
    monkeypatch.setattr(accounts, "CHUNK", 4096)
    assert whole(lambda: accounts.account(account_point("nearest"))) == first
