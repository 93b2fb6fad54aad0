"""The operations on single kernels: references against dense sums and autograd, planted faults, costs, rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, point_of
from torch import Tensor

from harness import measure, store
from harness.interface import DISTRIBUTIONS, KERNELS, ROUTER_CONVENTIONS, Implementation, Kernel, Point, Problem
from harness.measure import Context, measure_point, measure_ratio
from harness.operations import OPERATIONS, get_operation, variants_of
from harness.operations.kernel import KernelOperation
from harness.problem import make_problem
from harness.record import check
from harness.registry import default_registry, load_registry
from harness.runner import Runner, Work
from harness.session import works_of
from harness.sweep import load_sweep
from harness.timing import TimingSettings
from plots.rows import paper_shapes

TORCH = default_registry().get("torch_kernels")
ALL = [(operation, variant) for operation in KERNELS for variant in OPERATIONS[operation].variants]
#: T tokens, no two widths alike, every expert with rows.
SHAPE = "30,24,8,6,3"
EMPTY = "empty_experts"
SETTINGS = TimingSettings(min_samples=4, max_samples=4, time_limit_s=1.0)

every = pytest.mark.parametrize(("operation", "variant"), ALL, ids=["-".join(filter(None, one)) for one in ALL])


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it frees is nothing here, and it takes longer than all the rest."""
    monkeypatch.setattr(measure, "release", lambda: None)


def kernel_point(operation: str, variant: str, shape: str = SHAPE, *args: str, **kwargs: Any) -> Point:
    return point_of(shape, *args, operation=operation, variant=variant, name="torch_kernels", **kwargs)


def made(operation: str, variant: str, *args: str, input_set: int = 0, **kwargs: Any) -> Problem:
    return get_operation(operation).make_problem(kernel_point(operation, variant, *args, **kwargs), "cpu", input_set)


def build(problem: Problem) -> Kernel:
    kernel = TORCH.build(problem)
    assert isinstance(kernel, Kernel)
    return kernel


def verdict(kernel: Kernel, problem: Problem) -> str | None:
    return get_operation(problem.point.operation).check(kernel, problem).reason


# The gate lets PyTorch's kernels pass


@every
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_pytorch_passes(operation: str, variant: str, distribution: str) -> None:
    problem = made(operation, variant, SHAPE, "float32", distribution)
    result = get_operation(operation).check(build(problem), problem)
    assert result.reason is None and result.errors and result.worst.keys() == result.errors.keys()
    if operation not in ("expert_aggregation", "topk_router"):
        assert result.counts is not None and int(result.counts.sum()) == 90
        assert bool((result.counts == 0).any()) == (distribution in ("one_group", "empty_experts"))


@every
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pytorch_passes_in_other_dtypes(operation: str, variant: str, dtype: str) -> None:
    problem = made(operation, variant, SHAPE, dtype)
    assert verdict(build(problem), problem) is None


@every
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("12,24,8,1,1", id="E=1"),
        pytest.param("20,24,8,6,1", id="K=1"),
        pytest.param("12,24,8,4,4", id="K=E"),
        pytest.param("1,24,8,6,2", id="T=1"),
        pytest.param("5,24,8,16,2", id="T=5"),
        pytest.param("0,24,8,6,2", id="T=0"),
    ],
)
def test_edges(operation: str, variant: str, shape: str) -> None:
    problem = made(operation, variant, shape)
    assert verdict(build(problem), problem) is None


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_conventions(convention: str) -> None:
    for operation in ("topk_router", "expert_aggregation", "hidden_gradient"):
        problem = made(operation, get_operation(operation).variants[0], convention=convention)
        assert verdict(build(problem), problem) is None
        assert problem.rows is not None
        one = convention != "softmax_topk"
        assert bool((problem.rows.scores.sum(1) > 0.999).all()) == one


@every
def test_input_sets_differ_in_activations_alone(operation: str, variant: str) -> None:
    first, second = (made(operation, variant, input_set=index) for index in range(2))
    assert first.rows is not None and second.rows is not None and first.forward_only
    assert not torch.equal(first.x, second.x) and first.x.shape == second.x.shape
    for name in ("scores", "indices", "gather", "reverse", "expert_offsets"):
        assert torch.equal(getattr(first.rows, name), getattr(second.rows, name))


# The references against sums written out by token, and against autograd


class Dense:
    """The layer in float64: row (expert, token) by row, and the same as one autograd graph."""

    def __init__(self, distribution: str = "uniform") -> None:
        self.layer = make_problem(point_of(SHAPE, "float32", distribution), "cpu")
        self.d, self.n, self.experts = self.layer.shape.d, self.layer.shape.n, self.layer.shape.E
        self.x, self.grad = self.layer.x.double(), self.layer.grad_output.double()
        self.gate, self.up, self.down = (
            w.double().requires_grad_() for w in (self.layer.gate, self.layer.up, self.layer.down)
        )
        top = torch.topk(self.layer.x @ self.layer.router.T, self.layer.shape.K)
        self.scores, self.indices = torch.softmax(top.values, 1).double(), top.indices
        #: (expert, token, k), in the rows' order.
        self.rows = sorted(
            (expert, token, k)
            for token, experts in enumerate(self.indices.tolist())
            for k, expert in enumerate(experts)
        )

    def by_row(self, of: Callable[[int, int, int], Tensor]) -> Tensor:
        return torch.stack([of(*row) for row in self.rows])

    def hidden(self) -> Tensor:
        return self.by_row(lambda e, t, k: torch.cat([self.gate[e] @ self.x[t], self.up[e] @ self.x[t]]))

    def activated(self, h: Tensor) -> Tensor:
        return F.silu(h[:, : self.n]) * h[:, self.n :]

    def output(self, h: Tensor, scores: Tensor) -> Tensor:
        a = self.activated(h)
        rows = [scores[t, k] * (self.down[e] @ a[r]) for r, (e, t, k) in enumerate(self.rows)]
        return torch.stack([sum(row for row, (_, t, _) in zip(rows, self.rows, strict=True) if t == token)  # type: ignore[misc]
                            for token in range(len(self.x))])  # fmt: skip


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.detach().double(), rtol=1e-5, atol=1e-5)


def reference(operation: str, variant: str, distribution: str) -> dict[str, Tensor]:
    its = get_operation(operation)
    assert isinstance(its, KernelOperation)
    return its.reference(made(operation, variant, SHAPE, "float32", distribution))


@pytest.mark.parametrize("distribution", ["uniform", EMPTY])
def test_references_are_the_layers_own_steps(distribution: str) -> None:
    dense = Dense(distribution)
    h = dense.hidden()
    a = dense.activated(h)
    close(reference("grouped_gemm", "up", distribution)["output"], h)
    close(reference("grouped_gemm", "down", distribution)["output"],
          torch.stack([dense.down[e] @ a[r] for r, (e, _, _) in enumerate(dense.rows)]))  # fmt: skip
    found = reference("grouped_gemm_gather_m", "up", distribution)
    close(found["h"], h)
    close(found["a"], a)
    close(reference("down_aggregation", "", distribution)["output"], dense.output(h, dense.scores))


@pytest.mark.parametrize("distribution", ["uniform", EMPTY])
def test_gradients_are_autograds(distribution: str) -> None:
    dense = Dense(distribution)
    scores = dense.scores.clone().requires_grad_()
    gate, up, down = torch.autograd.grad(
        dense.output(dense.hidden(), scores), [dense.gate, dense.up, dense.down], dense.grad
    )
    close(reference("grouped_gemm_gather_k", "dW1", distribution)["output"], torch.cat([gate, up], dim=1))
    close(reference("grouped_gemm_gather_k", "dW2", distribution)["output"], down)
    h = dense.hidden().detach().requires_grad_()
    grad_h, grad_scores = torch.autograd.grad(dense.output(h, scores), [h, scores], dense.grad)
    found = reference("hidden_gradient", "", distribution)
    close(found["grad_h"], grad_h)
    close(found["grad_scores"], dense.by_row(lambda _, t, k: grad_scores[t, k]))
    row_scores = dense.by_row(lambda _, t, k: dense.scores[t, k])
    close(found["scaled_a"], row_scores[:, None] * dense.activated(h))


@pytest.mark.parametrize("variant", ["gather", "contiguous"])
def test_sums_are_of_each_tokens_own_rows(variant: str) -> None:
    dense, problem = Dense(), made("expert_aggregation", variant)
    want = torch.zeros_like(dense.x)
    for r, (_, t, k) in enumerate(dense.rows):
        place = r if variant == "gather" else t * 3 + k
        want[t] += dense.scores[t, k] * problem.x[place].double()
    close(reference("expert_aggregation", variant, "uniform")["output"], want)
    # No two rows of a token are alike, so that a wrong row shows.
    rows = problem.x[problem.rows.reverse]  # type: ignore[union-attr]
    assert bool((torch.cdist(rows, rows) + torch.eye(3) > 1e-3).all())


def test_the_routers_logits_are_the_layers() -> None:
    dense, found = Dense(), reference("topk_router", "", "uniform")
    assert torch.equal(found["indices"].sort(1).values, dense.indices.sort(1).values)
    close(found["scores"], dense.scores)


# Planted faults


class Spoiled(Kernel):
    """PyTorch's kernel on a spoiled problem, or with spoiled results."""

    def __init__(
        self,
        problem: Problem,
        operands: Mapping[str, Tensor] | None = None,
        rows: Mapping[str, Tensor] | None = None,
        after: Callable[[dict[str, Tensor]], object] = lambda found: None,
        before: Callable[[Tensor], object] = lambda x: None,
    ) -> None:
        assert problem.rows is not None
        own = replace(
            problem,
            operands={**problem.operands, **(operands or {})},
            rows=replace(problem.rows, **(rows or {})),  # type: ignore[arg-type]
        )
        self.kernel, self.before, self.after = build(own), before, after

    def forward(self, x: Tensor) -> Any:
        changed = self.before(x)
        return self.kernel.forward(changed if isinstance(changed, Tensor) else x)

    def outputs(self, found: Any) -> dict[str, Tensor]:
        named = {name: tensor.clone() for name, tensor in self.kernel.outputs(found).items()}
        self.after(named)
        return named


def refused(kernel: Kernel, problem: Problem, part: str = "") -> None:
    reason = verdict(kernel, problem)
    assert reason is not None and part in reason, reason


def halves_swapped(tensor: Tensor, dim: int) -> Tensor:
    return torch.cat(list(reversed(tensor.chunk(2, dim))), dim)


def flipped(tensor: Tensor, rows: slice) -> Tensor:
    """One expert's rows in another order."""
    out = tensor.clone()
    out[rows] = tensor[rows].flip(0)
    return out


def rows_of_expert(problem: Problem, expert: int = 1) -> slice:
    assert problem.rows is not None
    first, last = problem.rows.expert_offsets[expert : expert + 2].tolist()
    assert last - first > 1
    return slice(first, last)


@every
def test_nothing_spoiled_passes(operation: str, variant: str) -> None:
    problem = made(operation, variant)
    assert verdict(Spoiled(problem), problem) is None


@pytest.mark.parametrize(
    ("operation", "variant", "weight"),
    [
        ("grouped_gemm", "up", "weight"),
        ("grouped_gemm", "down", "weight"),
        ("grouped_gemm_gather_m", "up", "gate"),
        ("grouped_gemm_gather_m", "up", "up"),
        ("hidden_gradient", "", "down"),
        ("down_aggregation", "", "down"),
    ],
)
def test_another_experts_weight(operation: str, variant: str, weight: str) -> None:
    problem = made(operation, variant)
    refused(Spoiled(problem, {weight: problem.operands[weight].roll(1, 0)}), problem, "above tolerance")


@pytest.mark.parametrize("variant", ["dW1", "dW2"])
def test_another_experts_gradient(variant: str) -> None:
    problem = made("grouped_gemm_gather_k", variant)
    refused(Spoiled(problem, after=lambda found: found["output"].copy_(found["output"].roll(1, 0))), problem)


def test_gate_and_up_swapped() -> None:
    for operation, variant, name, dim in (
        ("grouped_gemm", "up", "weight", 1),
        ("grouped_gemm_gather_k", "dW1", "rows", 1),
        ("hidden_gradient", "", "h", 1),
    ):
        problem = made(operation, variant)
        refused(Spoiled(problem, {name: halves_swapped(problem.operands[name], dim)}), problem)
    problem = made("grouped_gemm_gather_m", "up")
    operands = problem.operands
    refused(Spoiled(problem, {"gate": operands["up"], "up": operands["gate"]}), problem, "h ")


@every
def test_the_rows_of_one_expert_in_another_order(operation: str, variant: str) -> None:
    if operation == "topk_router" or variant == "contiguous":
        pytest.skip("has no expert's rows")
    problem = made(operation, variant)
    rows = rows_of_expert(problem)
    if operation == "grouped_gemm_gather_k":
        spoiled = Spoiled(problem, {"rows": flipped(problem.operands["rows"], rows)})
    elif operation in ("down_aggregation", "expert_aggregation"):
        spoiled = Spoiled(problem, before=lambda x: flipped(x, rows))
    else:
        spoiled = Spoiled(problem, after=lambda found: found.update({k: flipped(v, rows) for k, v in found.items()}))
    refused(spoiled, problem)


@pytest.mark.parametrize("by", [1, -1])
def test_a_gather_that_is_off_by_one(by: int) -> None:
    for operation, variant, name in (
        ("grouped_gemm_gather_m", "up", "gather"),
        ("grouped_gemm_gather_k", "dW1", "gather"),
        ("grouped_gemm_gather_k", "dW2", "gather"),
        ("hidden_gradient", "", "gather"),
        ("down_aggregation", "", "reverse"),
        ("expert_aggregation", "gather", "reverse"),
    ):
        problem = made(operation, variant)
        places = getattr(problem.rows, name)
        refused(Spoiled(problem, rows={name: places.flatten().roll(by).view_as(places)}), problem)
    problem = made("expert_aggregation", "contiguous")
    refused(Spoiled(problem, before=lambda x: x.roll(by, 0)), problem)
    problem = made("expert_aggregation", "contiguous")
    refused(build(replace(problem, point=replace(problem.point, variant="gather"))), problem)


@pytest.mark.parametrize("fault", ["permuted", "missing", "rounded away"])
def test_scores(fault: str) -> None:
    def spoil(scores: Tensor) -> Tensor:
        if fault == "permuted":
            return scores.flip(-1)
        return torch.ones_like(scores) if fault == "missing" else scores.round()

    for operation, variant in (("down_aggregation", ""), ("expert_aggregation", "gather"),
                               ("expert_aggregation", "contiguous")):  # fmt: skip
        problem = made(operation, variant)
        refused(Spoiled(problem, {"scores": spoil(problem.operands["scores"])}), problem, "output")
    problem = made("hidden_gradient", "")
    refused(Spoiled(problem, {"row_scores": spoil(problem.operands["row_scores"])}), problem, "scaled_a")
    problem = made("topk_router", "")
    refused(Spoiled(problem, after=lambda found: found["scores"].copy_(spoil(found["scores"]))), problem, "scores")


@every
def test_stale_results(operation: str, variant: str) -> None:
    problem = made(operation, variant)
    seen: list[Tensor] = []

    def first(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return seen[0]

    refused(Spoiled(problem, before=first), problem)


@every
def test_changes_to_what_was_given(operation: str, variant: str) -> None:
    problem = made(operation, variant)
    refused(Spoiled(problem, before=lambda x: x.mul_(2)), problem)
    problem = made(operation, variant)
    refused(Spoiled(problem, after=lambda found: problem.x.mul_(2)), problem, "its input")
    for name in problem.operands:
        problem = made(operation, variant)
        operand = problem.operands[name]
        refused(Spoiled(problem, after=lambda found, o=operand: o.mul_(2)), problem, f"the problem's operand {name}")
    for name in ("gather", "reverse", "expert_offsets", "scores", "indices"):
        problem = made(operation, variant)
        tensor = getattr(problem.rows, name)
        refused(Spoiled(problem, after=lambda found, t=tensor: t.copy_(t.flip(0))), problem, f"the rows' {name}")


@every
def test_not_a_number_missing_and_misshapen(operation: str, variant: str) -> None:
    problem = made(operation, variant)
    names = list(build(problem).outputs(build(problem).forward(problem.x)))
    for name in names:
        refused(Spoiled(problem, after=lambda found, n=name: found.pop(n)), problem, f"{name} is missing")
        refused(Spoiled(problem, after=lambda found, n=name: found.update({n: found[n][:-1]})), problem, "has shape")
        if name != "indices":
            nan = Spoiled(problem, after=lambda found, n=name: found[n].flatten()[:1].fill_(torch.nan))
            refused(nan, problem, name)


@every
def test_one_part_among_very_many(operation: str, variant: str) -> None:
    """One wrong row, token or expert hardly moves the error of the whole."""
    by_expert = operation == "grouped_gemm_gather_k"
    problem = made(operation, variant, "700,16,8,160,2" if by_expert else "20100,16,8,4,2", "bfloat16")
    assert problem.rows is not None
    counts = problem.rows.expert_offsets.diff()
    place = int(torch.where(counts > 0, counts, counts.max()).argmin()) if by_expert else 7

    def spoil(found: dict[str, Tensor]) -> None:
        for name in found.keys() - {"indices"}:
            found[name][place] *= 0.8

    result = get_operation(operation).check(Spoiled(problem, after=spoil), problem)
    assert result.reason is not None and "for one " in result.reason, (result.reason, result.worst)


@pytest.mark.parametrize("variant", ["dW1", "dW2"])
def test_an_expert_without_rows_has_exactly_zero(variant: str) -> None:
    problem = made("grouped_gemm_gather_k", variant, SHAPE, "float32", EMPTY)
    assert problem.rows is not None
    empty = problem.rows.expert_offsets.diff() == 0
    assert bool(empty.any())

    def leak(found: dict[str, Tensor]) -> None:
        found["output"][empty, 0, 0] = 1e-9

    refused(Spoiled(problem, after=leak), problem, "experts without rows have gradients that are not zero")


# The router's choice


def test_any_order_and_any_of_tied_experts() -> None:
    problem = made("topk_router", "", "4,24,8,6,2")
    problem.x.copy_(torch.tensor([[3.0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [2, 2, 0, 0, 0, 0], [0, 5, 4, 3, 2, 1]]))

    class Choice(Kernel):
        def __init__(self, indices: list[list[int]], scores: Tensor | None = None) -> None:
            self.indices, self.given = torch.tensor(indices), scores

        def forward(self, x: Tensor) -> Tensor:
            return x

        def outputs(self, found: Tensor) -> dict[str, Tensor]:
            scores = torch.softmax(found.gather(1, self.indices), 1) if self.given is None else self.given
            return {"scores": scores, "indices": self.indices.int()}

    for right in ([[0, 1], [0, 1], [0, 1], [1, 2]], [[2, 0], [5, 3], [1, 0], [2, 1]]):
        assert verdict(Choice(right), problem) is None
    right = [[0, 1], [0, 1], [0, 1], [1, 2]]
    for wrong, part in (
        ([[0, 3], *right[1:]], "1 tokens chose an expert that is not among their top K"),
        ([[0, 0], *right[1:]], "chose one expert twice"),
        ([[0, 6], *right[1:]], "out of range"),
        ([[-1, 0], *right[1:]], "out of range"),
    ):
        reason = verdict(Choice(wrong, torch.full((4, 2), 0.5)), problem)
        assert reason is not None and part in reason
    scores = torch.softmax(problem.x.gather(1, torch.tensor(right)), 1)
    assert verdict(Choice(right, scores.bfloat16()), problem) is not None
    assert verdict(Choice(right, scores + 1e-2), problem) is not None
    assert verdict(Choice(right, scores), problem) is None


def test_indices_are_integers() -> None:
    problem = made("topk_router", "")
    floats = Spoiled(problem, after=lambda found: found.update(indices=found["indices"].float()))
    refused(floats, problem, "not integers")


def test_scores_may_come_in_the_points_dtype() -> None:
    problem = made("topk_router", "", SHAPE, "bfloat16")
    rounded = Spoiled(problem, after=lambda found: found.update(scores=found["scores"].bfloat16()))
    assert verdict(rounded, problem) is None


# Costs and sizes


#: T = 100, d = 40, n = 24, E = 8, K = 2, two bytes an element; R = 200 rows. FLOPs, bytes, M, N, K, gather.
COSTS: dict[tuple[str, str], tuple[int, int, int, int, int, bool]] = {
    # x, W1, H
    ("grouped_gemm", "up"): (2 * 200 * 48 * 40, 2 * (200 * 40 + 8 * 48 * 40 + 200 * 48), 200, 48, 40, False),
    # A, W2, Y
    ("grouped_gemm", "down"): (2 * 200 * 40 * 24, 2 * (200 * 24 + 8 * 40 * 24 + 200 * 40), 200, 40, 24, False),
    # X, W1, H, A
    ("grouped_gemm_gather_m", "up"): (
        2 * 200 * 48 * 40, 2 * (100 * 40 + 8 * 48 * 40 + 200 * 48 + 200 * 24), 200, 48, 40, True,
    ),
    # X, dH, dW1
    ("grouped_gemm_gather_k", "dW1"): (
        2 * 200 * 48 * 40, 2 * (100 * 40 + 200 * 48 + 8 * 48 * 40), 200, 48, 40, True,
    ),
    # dO, A', dW2
    ("grouped_gemm_gather_k", "dW2"): (
        2 * 200 * 40 * 24, 2 * (100 * 40 + 200 * 24 + 8 * 40 * 24), 200, 40, 24, True,
    ),
    # dO, W2, H, dH, A'; scores and their gradients
    ("hidden_gradient", ""): (
        2 * 200 * 40 * 24, 2 * (100 * 40 + 8 * 40 * 24 + 200 * (48 + 48 + 24)) + 2 * 4 * 200, 200, 24, 40, True,
    ),
    # A, W2, Y twice, O; scores and places
    ("down_aggregation", ""): (
        2 * 200 * 40 * 24, 2 * (200 * 24 + 8 * 40 * 24 + 2 * 200 * 40 + 100 * 40) + 2 * 4 * 200, 200, 40, 24, False,
    ),
    # Y, O; scores and places
    ("expert_aggregation", "gather"): (0, 2 * (200 * 40 + 100 * 40) + 2 * 4 * 200, 100, 40, 2, True),
    ("expert_aggregation", "contiguous"): (0, 2 * (200 * 40 + 100 * 40) + 4 * 200, 100, 40, 2, False),
    # logits; scores and indices
    ("topk_router", ""): (0, 2 * 100 * 8 + 2 * 4 * 200, 100, 8, 2, False),
}  # fmt: skip


@every
def test_costs_and_sizes(operation: str, variant: str) -> None:
    flops, bytes_, m, n, k, gather = COSTS[operation, variant]
    point, its = kernel_point(operation, variant, "100,40,24,8,2", "bfloat16"), get_operation(operation)
    assert its.flops(point, "forward", 200) == flops
    assert its.algorithm_bytes(point, "forward", 200) == bytes_
    between = 2 * 2 * 200 * 40 if operation == "down_aggregation" else 0
    assert its.boundary_bytes(point, "forward", 200) == bytes_ - between
    groups = 1 if operation in ("expert_aggregation", "topk_router") else 8
    assert its.sizes(point) == {"M": m, "N": n, "K": k, "groups": groups, "gather": gather}
    assert its.flops(point, "forward", 400) == 2 * flops
    assert its.passes == ("forward",) and its.reports_bandwidth and not its.reports_memory


# Rows


def bases(passes: tuple[str, ...], **fields: str) -> dict[str, dict[str, Any]]:
    common = {"schema": 1, "record": "measurement", "run_id": "r", "sweep": "s", **fields}
    return {pass_: {**common, "pass": pass_} for pass_ in passes}


@every
def test_rows(operation: str, variant: str) -> None:
    point = kernel_point(operation, variant, SHAPE, "float32")
    base = bases(("forward",), implementation="torch_kernels", label="PyTorch")
    (row,) = measure_point(point, ("forward",), TORCH, base, Context(lambda _: None, SETTINGS))
    its = get_operation(operation)
    assert check(row)["status"] == "ok"
    assert row["pass"] == "forward" and row["operation"] == operation and row["variant"] == variant
    assert row["problem"] == its.sizes(point)
    assert ("tflops" in row) == (its.flops(point, "forward", 90) > 0)
    bytes_ = its.algorithm_bytes(point, "forward", 90)
    assert row["gb_per_s"]["host"] == pytest.approx(bytes_ / row["latency_ms"]["median"] / 1e6)
    assert row["costs"] == {
        "flops": its.flops(point, "forward", 90),
        "algorithm_bytes": bytes_,
        "boundary_bytes": its.boundary_bytes(point, "forward", 90),
    }
    assert "memory_bytes" not in row
    assert ("routed_rows" in row["routing"]) == its.reports_routing
    if its.reports_routing:
        assert row["routing"]["routed_rows"] == 90


def test_a_wrong_kernel_has_a_row_without_numbers() -> None:
    class Wrong(type(TORCH)):  # type: ignore[misc]
        def build(self, problem: Problem) -> Kernel:
            return Spoiled(problem, before=lambda x: x * 1.01)

    point = kernel_point("grouped_gemm", "up")
    base = bases(("forward",), implementation="torch_kernels", label="PyTorch")
    (row,) = measure_point(point, ("forward",), Wrong(), base, Context(lambda _: None, SETTINGS))
    assert check(row)["status"] == "wrong_result" and "tflops" not in row and row["problem"]["M"] == 90


@pytest.mark.parametrize(("operation", "variant"), [("grouped_gemm", "up"), ("topk_router", "")])
def test_a_kernel_that_is_wrong_once_it_was_timed_has_none_either(operation: str, variant: str) -> None:
    calls = itertools.count(1)

    class Late(type(TORCH)):  # type: ignore[misc]
        def build(self, problem: Problem) -> Kernel:
            # The check calls it twice.
            return Spoiled(problem, before=lambda x: x if next(calls) <= 2 else x * 1.1)

    point = kernel_point(operation, variant)
    base = bases(("forward",), implementation="torch_kernels", label="PyTorch")
    (row,) = measure_point(point, ("forward",), Late(), base, Context(lambda _: None, SETTINGS))
    assert check(row)["status"] == "wrong_result" and "right when it was checked" in row["reason"]


def test_a_ratio_of_two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Calls:
        """Stands in for the replay of a graph."""

        def __init__(self, layer: Kernel, problems: list[Problem], evict: object) -> None:
            seen.append(problems)
            self.layer, self.problems, self.ms = layer, problems, float(len(seen))

        def __call__(self, index: int) -> tuple[float, float]:
            self.layer.forward(self.problems[index % len(self.problems)].x)
            return self.ms, 0.0

        def outputs(self) -> tuple[Any, tuple[()]]:
            return self.layer.forward(self.problems[0].x), ()

    class OnCpu(Context):
        def start_cuda(self) -> None:
            self.evict, self.monitor = object(), self  # type: ignore[assignment]

        def sample(self) -> dict[str, Any]:
            return {"sm_clock_mhz": 1500, "power_w": 500.0, "throttle_reasons": []}

    monkeypatch.setattr(measure, "GraphCalls", Calls)
    monkeypatch.setattr(measure, "environment", lambda *_: {"measured_on": "cuda", "gpu": "NVIDIA H200"})
    for operation, variant in (("grouped_gemm_gather_m", "up"), ("topk_router", "")):
        seen.clear()
        point = kernel_point(operation, variant)
        base = bases(("forward",), record="ratio", numerator="torch_kernels", denominator="other", time_kind="device")
        other = type(TORCH)()
        monkeypatch.setattr(other, "name", "other", raising=False)
        points = (point, replace(point, implementation="other"))
        (row,) = measure_ratio(points, ("forward",), TORCH, other, base, OnCpu(lambda _: None, SETTINGS))
        row.pop("implementation", None)
        assert check(row)["status"] == "ok" and row["value"] == pytest.approx(0.5) and row["basis"] == "graph"
        assert seen[0] is seen[1]
        assert set(row["correctness"]) == {"torch_kernels", "other"}


def test_a_run_keeps_the_forward_alone() -> None:
    sweep = load_sweep("kernels", default_registry())
    passes = ("forward", "backward", "forward_backward")
    wide = replace(sweep, options=replace(sweep.options, passes=passes))
    works = works_of(wide)
    assert {work.passes for work in works if work.kind == "point"} == {("forward",)}
    assert works_of(replace(wide, options=replace(wide.options, passes=("backward",)), ratios=())) == []


# The sweep


def test_the_sweep() -> None:
    registry = default_registry()
    sweep = load_sweep("kernels", registry)
    assert sweep.figure == "kernels" and sweep.options.passes == ("forward",)
    shapes = [shape for _, shape in paper_shapes()]
    offered = [(o, v) for o, v in ALL if o != "down_aggregation"]
    names = ("sonicmoe_triton", "sonicmoe_official", "torch_kernels")
    found = [(p.operation, p.variant, p.implementation, str(p.shape)) for p in sweep.points]
    assert sorted(found) == sorted((o, v, name, shape) for o, v in offered for name in names for shape in shapes)
    for name in names:
        for operation in KERNELS:
            assert variants_of(registry.get(name), operation) == OPERATIONS[operation].variants
    ratios = [(r.point.operation, r.point.variant, r.numerator, r.denominator) for r in sweep.ratios]
    assert len(ratios) == len(offered) * 2 * len(shapes) + 1
    assert ratios.count(("grouped_gemm_gather_m", "up", "sonicmoe_triton", "sonicmoe_triton")) == 1
    assert {(o, v) for o, v, _, _ in ratios} == set(offered)
    assert {denominator for *_, denominator in ratios} == {"sonicmoe_triton"}
    cuda = [replace(point, device="cuda") for point in sweep.points]
    assert not [p for p in cuda if registry.get(p.implementation).unsupported_reason(p)]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"operation": "moe_layer"}, "does not offer the operation moe_layer"),
        ({"shape": "30,23,8,6,3"}, "multiples of 4 in torch.float32, not d=23"),
        ({"method": "nearest"}, "no grouped_gemm with the routing method nearest"),
    ],
)
def test_refusals_are_words(changes: dict[str, str], part: str) -> None:
    point = kernel_point("grouped_gemm", "up", changes.get("shape", SHAPE))
    if "method" in changes:
        point = replace(point, routing=replace(point.routing, method=changes["method"]))
    reason = TORCH.unsupported_reason(replace(point, operation=changes.get("operation", "grouped_gemm")))
    assert reason is not None and part in reason
    ours = default_registry().get("sonicmoe_triton")
    assert ours.unsupported_reason(point) == "SonicMoE (ours, Triton) does not run on cpu"


@pytest.mark.parametrize("operation", ["expert_aggregation", "topk_router"])
def test_widths_matter_to_matrix_products_alone(operation: str) -> None:
    problem = made(operation, get_operation(operation).variants[0], "10,13,7,5,2")
    assert TORCH.unsupported_reason(problem.point) is None
    assert verdict(build(problem), problem) is None


def test_a_router_of_another_convention_is_refused_where_it_is_not_offered() -> None:
    class Narrow(type(TORCH)):  # type: ignore[misc]
        conventions = ("topk_softmax",)

    point = kernel_point("topk_router", "", convention="softmax_topk")
    assert "no router of the convention softmax_topk" in str(Narrow().unsupported_reason(point))
    assert Narrow().unsupported_reason(replace(point, operation="hidden_gradient")) is None


# One more implementation is one file


def readme_kernel() -> str:
    """The plugin that the README shows."""
    text = (ROOT / "README.md").read_text()
    (block,) = [found for found in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "(Kernel)" in found]
    return block


@pytest.mark.usefixtures("forked_workers")
def test_the_readmes_kernel_is_measured_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = readme_kernel()
    assert len(block.splitlines()) <= 24
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "my_kernels.py").write_text(block)
    monkeypatch.setenv("MOEBENCH_PLUGINS", str(tmp_path / "plugins"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    registry = load_registry(tmp_path / "plugins", (), entry_points=False)
    assert registry.names() == ["my_kernels"] and not registry.broken
    plugin: Implementation = registry.get("my_kernels")
    assert variants_of(plugin, "expert_aggregation") == ("gather",)
    point = replace(kernel_point("expert_aggregation", "gather"), implementation="my_kernels")
    path = tmp_path / "rows.jsonl"
    Runner(
        "s", [Work("point", point, ("forward",))], registry, path, settings=SETTINGS, time_limit_s=60, resume=False
    ).run()
    rows, problems = store.read(path)
    assert not problems
    (row,) = rows
    assert row["status"] == "ok", row["reason"]
    assert row["implementation"] == "my_kernels" and row["label"] == "My kernels" and row["gb_per_s"]["host"] > 0
