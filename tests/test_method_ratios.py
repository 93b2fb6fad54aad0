"""Two routing methods against each other: what the rows of a ratio say and what tells them apart. And faults planted in
layers, one for each step of the gate of `routed_experts`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_routed_experts import OPERATION, DenseExperts, routed
from torch import Tensor

from harness import measure, store
from harness.correctness import forward_backward
from harness.interface import ROUTER_CONVENTIONS, Implementation, Layer, Point, Problem
from harness.measure import Context, measure_point, measure_ratio
from harness.problem import make_problem
from harness.record import check
from harness.registry import load_registry
from harness.routing import expert_counts
from harness.runner import Runner, Work
from harness.timing import TimingSettings

Rows = list[dict[str, Any]]
Ratio = Callable[..., Rows]

REGISTRY = load_registry()
SETTINGS = TimingSettings(min_samples=6, max_samples=6)
PASSES = ("forward", "backward")
METHODS = ("nearest", "up", "down")


def work_of(point: Point, method: str, denominator: str = "torch_loop") -> Work:
    other = replace(point, implementation=denominator, routing=replace(point.routing, method=method))
    return Work("ratio", point, PASSES, denominator, other)


def runner_of(works: Sequence[Work], path: Path = Path("unused.jsonl"), resume: bool = False) -> Runner:
    return Runner("s", works, REGISTRY, path, settings=SETTINGS, time_limit_s=5, resume=resume)


def outcome(method: str) -> dict[str, int]:
    """What must come of a method's routing of `routed()`'s tokens, counted from the routing itself."""
    point = routed(method=method)
    routing = OPERATION.make_problem(point, "cpu").routing
    assert routing is not None
    counts = expert_counts(routing.experts, point.shape.E).tolist()
    return {
        "routed_rows": len(routing.experts),
        "padded_rows": sum(-(-count // point.routing.m_tile) * point.routing.m_tile for count in counts),
        "dropped": routing.dropped,
        "added": routing.added,
        "empty_experts": counts.count(0),
    }


class Dense(Implementation):
    """Another implementation than the loop; wrong where told so."""

    name = label = "dense"
    upstream = licence = "this test"
    operations = ("routed_experts",)
    devices = ("cpu",)
    dtypes = ("float32",)

    def __init__(self, wrong_method: str = "") -> None:
        self.wrong_method = wrong_method

    def build(self, problem: Problem) -> Layer:
        layer = DenseExperts(problem)
        if problem.point.routing.method == self.wrong_method:
            layer.gate = (2 * layer.gate).detach().requires_grad_()
        return layer


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it frees is nothing here, and it takes longer than all the rest."""
    monkeypatch.setattr(measure, "release", lambda: None)


@pytest.fixture
def seen() -> list[Sequence[Problem]]:
    """The input sets of each layer that was timed."""
    return []


@pytest.fixture
def ratio(monkeypatch: pytest.MonkeyPatch, seen: list[Sequence[Problem]]) -> Ratio:
    """`measure_ratio` with stand-ins for what only a GPU has: ratio(method, denominator's method, …) gives the rows,
    each of which keeps the record's rules."""

    class Calls:
        def __init__(self, layer: Layer, problems: Sequence[Problem], evict: object) -> None:
            seen.append(problems)
            self.time = 1.0 + len(seen)
            self.layer, self.problem = layer, problems[0]

        def __call__(self, index: int) -> tuple[float, float]:
            return self.time + index, 2 * self.time

        def outputs(self) -> tuple[Any, Sequence[Any]]:
            return forward_backward(self.layer, self.problem.x, self.problem.grad_output)

    class OnCpu(Context):
        def start_cuda(self) -> None:
            self.evict, self.monitor = object(), self  # type: ignore[assignment]

        def sample(self) -> dict[str, Any]:
            return {"sm_clock_mhz": 1500, "power_w": 500.0, "throttle_reasons": []}

    machine = {"measured_on": "cuda", "gpu": "NVIDIA H200"}
    monkeypatch.setattr(measure, "GraphCalls", Calls)
    monkeypatch.setattr(measure, "environment", lambda *_: dict(machine))

    def run(
        method: str,
        other_method: str,
        numerator: Implementation | None = None,
        denominator: Implementation | None = None,
    ) -> Rows:
        loop = REGISTRY.get("torch_loop")
        first, second = numerator or loop, denominator or loop
        for implementation in (first, second):
            monkeypatch.setattr(implementation, "no_graph_reason", None, raising=False)
        work = work_of(replace(routed(method=method), implementation=first.name), other_method, second.name)
        (job,) = runner_of([work]).jobs
        point, other = work.points
        rows = list(measure_ratio((point, other), PASSES, first, second, job.bases, OnCpu(lambda _: None, SETTINGS)))
        for row in rows:
            check(row)
        assert [row["pass"] for row in rows] == list(PASSES)
        return rows

    return run


# What the rows say


@pytest.mark.parametrize(("method", "other"), [("top_k", "nearest"), ("down", "up"), ("nearest", "top_k")])
def test_a_ratio_of_two_methods_says_what_came_of_both(
    ratio: Ratio, seen: list[Sequence[Problem]], method: str, other: str
) -> None:
    assert outcome(method)["routed_rows"] != outcome(other)["routed_rows"]
    for row in ratio(method, other):
        assert row["status"] == "ok" and row["basis"] == "graph" and row["value"] > 0
        assert row["routing"] == {**routed(method=method).routing.as_dict(), **outcome(method)}
        assert row["denominator_routing"] == {**routed(method=other).routing.as_dict(), **outcome(other)}
        assert row["numerator"] == row["denominator"] == "torch_loop"
        assert list(row["correctness"]) == [f"torch_loop ({method})", f"torch_loop ({other})"]
        for told in row["correctness"].values():
            assert "grad_scores" in told["relative_l2"]
    # Both layers saw the same tensors.
    assert len(seen) == 2 and seen[0] is seen[1]


def test_a_ratio_of_one_method_has_no_second_routing(ratio: Ratio) -> None:
    for row in ratio("nearest", "nearest", denominator=Dense()):
        assert "denominator_routing" not in row
        assert row["routing"] == {**routed().routing.as_dict(), **outcome("nearest")}
        assert list(row["correctness"]) == ["torch_loop", "dense"]


def test_two_implementations_need_no_methods_to_be_told_apart(ratio: Ratio) -> None:
    for row in ratio("top_k", "down", numerator=Dense()):
        assert list(row["correctness"]) == ["dense", "torch_loop"]
        assert row["denominator_routing"]["routed_rows"] == outcome("down")["routed_rows"]


@pytest.mark.parametrize(("wrong", "right"), [("down", "up"), ("up", "down")])
def test_the_side_that_is_wrong_is_named(ratio: Ratio, wrong: str, right: str) -> None:
    layer = Dense(wrong)
    for methods in ((wrong, right), (right, wrong)):
        for row in ratio(*methods, numerator=layer, denominator=layer):
            assert row["status"] == "wrong_result" and "value" not in row
            assert f"dense ({wrong}): " in row["reason"] and f"({right})" not in row["reason"]
            assert row["denominator_routing"]["method"] == methods[1]


# What rows are told apart by


def test_ratios_of_different_methods_are_different_measurements(ratio: Ratio) -> None:
    by_method = {method: ratio("top_k", method) for method in ("top_k", *METHODS)}
    rows: list[Any] = [row for found in by_method.values() for row in found]
    assert store.latest(rows) == rows
    later = {**by_method["up"][0], "timestamp": "2999-01-01T00:00:00+00:00"}
    found = store.latest([*rows, later])  # type: ignore[list-item]
    assert found == [later if row is by_method["up"][0] else row for row in rows]


def test_a_resumed_sweep_leaves_out_the_methods_that_it_has(ratio: Ratio, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for row in ratio("top_k", "nearest"):
        store.append(path, row)
    works = [work_of(routed(method="top_k"), method) for method in ("top_k", *METHODS)]
    runner = runner_of(works, path, resume=True)
    assert [job.work.points[1].routing.method for job in runner.jobs] == ["top_k", "up", "down"]
    assert runner.summary.skipped == len(PASSES)
    keys = [base["resume_key"] for job in runner_of(works).jobs for base in job.bases.values()]
    assert len(set(keys)) == len(works) * len(PASSES)
    # A denominator routed as the numerator is the same as one without a point of its own.
    alone = replace(works[0], denominator_point=None)
    (job,) = runner_of([alone]).jobs
    assert [base["resume_key"] for base in job.bases.values()] == keys[: len(PASSES)]


def test_ratios_that_were_not_measured_say_their_methods_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    works = [work_of(routed(method="top_k"), method) for method in ("top_k", *METHODS)]
    runner = runner_of(works, path)
    runner.run()
    rows, problems = store.read(path)
    assert not problems and {row["status"] for row in rows} == {"unsupported"}
    expected = [None] + [routed(method=method).routing.as_dict() for method in METHODS]
    assert [row.get("denominator_routing") for row in rows] == [said for said in expected for _ in PASSES]
    assert store.latest(rows) == rows


def test_numbers_that_break_the_rules_keep_the_method(ratio: Ratio, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    runner_of([], path)._store({**ratio("top_k", "up")[0], "value": float("nan")})
    stored = json.loads(path.read_text())
    assert stored["status"] == "crashed" and "breaks the rules" in stored["reason"]
    assert stored["denominator_routing"]["method"] == "up"


@pytest.mark.parametrize("side", [0, 1])
def test_a_side_that_is_wrong_once_it_was_timed_gives_no_ratio(ratio: Ratio, side: int) -> None:
    loop = REGISTRY.get("torch_loop")

    class Late(type(loop)):  # type: ignore[misc]
        name = label = "late"

        def build(self, problem: Problem) -> Layer:
            layer: Layer = super().build(problem)
            right, calls = layer.forward, itertools.count(1)
            # The check calls it twice.
            monkeyed: Any = layer
            monkeyed.forward = lambda x: right(x) * (1.0 if next(calls) <= 2 else 1.1)
            return layer

    rows = ratio("top_k", "top_k", *((loop, Late()) if side else (Late(), loop)))
    for row in rows:
        assert row["status"] == "wrong_result" and "value" not in row
        assert row["reason"].startswith("late: right when it was checked, but after it was timed its results")


def test_costs_count_the_rows_that_there_are() -> None:
    base = {"schema": 1, "record": "measurement", "run_id": "r", "sweep": "s", "implementation": "torch_loop"}
    costs: dict[str, dict[str, dict[str, int]]] = {}
    for method in ("top_k", "down", "up"):
        bases = {pass_: {**base, "label": "L", "pass": pass_} for pass_ in PASSES}
        context = Context(lambda _: None, TimingSettings(min_samples=2, max_samples=2, time_limit_s=0.1))
        implementation = REGISTRY.get("torch_loop")
        rows = list(measure_point(routed(method=method), PASSES, implementation, bases, context))
        assert [check(row)["status"] for row in rows] == ["ok"] * len(PASSES)
        costs[method] = {row["pass"]: row["costs"] for row in rows}
    n, d = 8, 16
    for method in ("down", "up"):
        more = outcome(method)["routed_rows"] - outcome("top_k")["routed_rows"]
        assert (more > 0) == (method == "up") and more
        # Of each row more, forward: H and A written, A read; Y written and read. Backward: H, A', dH; A'; dH, dX~
        # twice; dH.
        for pass_, elements in (("forward", 4 * n + 2 * d), ("backward", 10 * n + 2 * d)):
            own, plain = costs[method][pass_], costs["top_k"][pass_]
            assert own["algorithm_bytes"] - plain["algorithm_bytes"] == 4 * more * elements
            assert own["boundary_bytes"] == plain["boundary_bytes"]


# The gate


class Planted(DenseExperts):
    """Right, but for what a subclass plants."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.first: Tensor | None = None

    def first_of(self, x: Tensor) -> Tensor:
        """The first input that it ever saw, with the gradient going to ``x``."""
        if self.first is None:
            self.first = x.detach().clone()
        return self.first + (x - x.detach())


class FirstResult(Planted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first_of(x))


class FirstGradients(Planted):
    def forward(self, x: Tensor) -> Tensor:
        first = super().forward(self.first_of(x))
        return super().forward(x).detach() + (first - first.detach())


class FirstGradientOfX(Planted):
    def forward(self, x: Tensor) -> Tensor:
        right = super().forward(x.detach())
        frozen = [w.requires_grad_(False) for w in self.parameters()]
        first = super().forward(self.first_of(x))
        for w in frozen:
            w.requires_grad_()
        return right + (first - first.detach())


class OverwritesX(Planted):
    """Right for what it leaves in x."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(2)
        return super().forward(x)


class OverwritesGradient(Planted):
    """Right for what it leaves in the incoming gradient."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.register_hook(lambda grad: grad.data.mul_(2))
        return out


class LeaksIntoGradientOfX(Planted):
    """Far below the tolerance, the output untouched: what only a token without experts shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-7 * (x - x.detach())


class LeaksIntoOutput(Planted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-9


@pytest.mark.parametrize(
    ("planted", "named"),
    [
        (Planted, None),
        (FirstResult, "output"),
        (FirstGradients, "grad_gate"),
        (FirstGradientOfX, "grad_x"),
        (OverwritesX, "changed its input"),
        (OverwritesGradient, "changed the incoming gradient"),
        (LeaksIntoGradientOfX, "tokens without an expert"),
        (LeaksIntoOutput, "tokens without an expert"),
    ],
)
def test_the_gate_finds(planted: type[Planted], named: str | None) -> None:
    problem = OPERATION.make_problem(routed(method="down"), "cpu")
    assert problem.routing is not None and bool((problem.routing.token_offsets.diff() == 0).any())
    reason = OPERATION.check(planted(problem), problem).reason
    assert reason is None if named is None else reason and named in reason, reason


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_the_routings_weights_follow_the_points_convention(convention: str) -> None:
    point = routed(method="top_k", convention=convention)
    plain, routing = make_problem(point, "cpu"), OPERATION.make_problem(point, "cpu").routing
    assert routing is not None
    probabilities = torch.softmax(plain.x @ plain.router.T, dim=1)
    chosen = probabilities.gather(1, routing.experts.view(-1, point.shape.K).long())
    expected = chosen if convention == "softmax_topk" else chosen / chosen.sum(1, keepdim=True)
    assert (chosen.sum(1) < 0.9).any()
    torch.testing.assert_close(routing.scores, expected.reshape(-1), rtol=1e-5, atol=1e-6)
