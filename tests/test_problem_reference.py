"""Inputs do what they say; the streamed reference equals a dense layer that autograd differentiates."""

from __future__ import annotations

import pytest
import torch
from conftest import RightLayer, point_of, problem_of
from torch import Tensor

from harness.correctness import check_routing, evaluate
from harness.errors import UserError
from harness.interface import DISTRIBUTIONS, GRADIENTS, ROUTER_CONVENTIONS, Problem
from harness.operations import DenseBound, MoELayer, get_operation
from harness.problem import make_problem, planted_logits
from harness.reference import ErrorSums, compare_dense, compare_layer
from harness.routing import choose_experts, expert_counts, routing_outcome

FIELDS = ("x", "gate", "up", "down", "router", "grad_output")


def tensors(problem: Problem) -> dict[str, Tensor]:
    return {name: getattr(problem, name) for name in FIELDS}


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, again, other = (tensors(problem_of("32,16,8,4,2", seed=seed)) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in FIELDS)
    assert not any(torch.equal(first[name], other[name]) for name in FIELDS)


def test_another_input_set_keeps_the_weights() -> None:
    point = point_of("32,16,8,4,2")
    first, second = (tensors(make_problem(point, "cpu", index)) for index in (0, 1))
    for name in FIELDS:
        assert torch.equal(first[name], second[name]) == (name not in ("x", "grad_output")), name


def test_inputs_have_the_scale_of_a_trained_layer() -> None:
    problem = problem_of("512,256,128,8,2", "bfloat16")
    for name, std in (("x", 1.0), ("grad_output", 1.0), ("gate", 1 / 16), ("down", 128**-0.5), ("router", 1 / 16)):
        value = getattr(problem, name)
        assert value.dtype == torch.bfloat16 and not value.requires_grad
        assert value.float().std().item() == pytest.approx(std, rel=0.05), name
        assert (value == 0).float().mean() < 1e-3


def counts_of(shape: str, distribution: str, dtype: str = "float32") -> Tensor:
    problem = problem_of(shape, dtype, distribution)
    return expert_counts(choose_experts(problem.x, problem.router, problem.shape.K), problem.shape.E)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_group_uses_exactly_k_experts(dtype: str) -> None:
    counts = counts_of("256,64,16,16,4", "one_group", dtype)
    assert counts.tolist() == [256] * 4 + [0] * 12


@pytest.mark.parametrize("shape", ["512,64,16,16,4", "512,64,16,5,4", "512,64,16,4,4", "512,64,16,1,1"])
def test_empty_experts_are_those_planned(shape: str) -> None:
    counts = counts_of(shape, "empty_experts")
    experts, k = (int(v) for v in shape.split(",")[3:])
    planned = planted_logits("empty_experts", experts, k)
    assert planned is not None
    assert torch.equal(counts == 0, planned < 0)
    assert int((counts == 0).sum()) == min(max(experts // 4, 1), experts - k)


def test_skewed_follows_a_zipf_law() -> None:
    counts = counts_of("8192,64,16,16,1", "skewed").double()
    # Octaves fall; single neighbours may swap, since each expert's own weights favour or disfavour it a little.
    octaves = [counts[a:b].mean().item() for a, b in ((0, 1), (1, 3), (3, 7), (7, 16))]
    assert octaves == sorted(octaves, reverse=True)
    assert octaves[0] > 4 * octaves[3]
    expected = 1 / torch.arange(1, 17).double()
    assert torch.corrcoef(torch.stack([counts, expected]))[0, 1] > 0.9


def test_uniform_is_about_even() -> None:
    counts = counts_of("8192,64,16,16,4", "uniform").double()
    assert counts.min() > 0.7 * counts.mean() and counts.max() < 1.3 * counts.mean()


def test_an_unknown_distribution_is_an_error() -> None:
    with pytest.raises(ValueError, match="choose from"):
        planted_logits("zebra", 8, 2)


def test_routing_outcome_counts_rows_and_padding() -> None:
    outcome = routing_outcome(torch.tensor([0, 1, 128, 129]), 128)
    assert outcome == {"routed_rows": 258, "padded_rows": 512, "dropped": 0, "added": 0, "empty_experts": 1}


# The reference against a dense layer in fp64 with autograd.


def dense_layer(problem: Problem, indices: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The layer's definition over all experts at once, gradients by autograd; written without the harness's code."""
    x, gate, up, down, router = (
        t.detach().to(dtype).requires_grad_()
        for t in (problem.x, problem.gate, problem.up, problem.down, problem.router)
    )
    chosen = torch.zeros(x.shape[0], router.shape[0], dtype=torch.bool).scatter(1, indices, True)
    logits = x @ router.T
    if problem.point.layer.router_convention == "softmax_topk":
        weights = torch.softmax(logits, 1) * chosen
    else:
        weights = torch.softmax(logits.masked_fill(~chosen, -torch.inf), 1)
    h = torch.einsum("td,end->etn", x, gate)
    y = torch.einsum("etn,edn->etd", h * torch.sigmoid(h) * torch.einsum("td,end->etn", x, up), down)
    out = torch.einsum("te,etd->td", weights, y)
    gradients = torch.autograd.grad(out, (x, gate, up, down, router), problem.grad_output.to(dtype))
    return {"output": out.detach(), **dict(zip(GRADIENTS, gradients, strict=True))}


SHAPES = ["40,24,16,8,3", "1,24,16,8,2", "0,24,16,8,2", "20,24,16,4,4", "9,24,16,1,1", "30,24,16,5,1", "7,1,1,3,2"]


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_a_dense_layer(shape: str, convention: str) -> None:
    problem = problem_of(shape, convention=convention)
    if problem.shape.T > 4:
        problem.x[:4] = 0  # Exactly tied logits.
    indices = choose_experts(problem.x, problem.router, problem.shape.K)
    right = dense_layer(problem, indices)
    found = compare_layer(problem, indices, right["output"], right["grad_x"], right)
    assert set(found.errors) == {"output", *GRADIENTS}
    assert max(found.errors.values()) < 2e-6, found.errors
    assert found.nonzero_empty_experts == 0
    reason, differs = check_routing(problem, indices)
    assert reason is None and differs == 0


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_reference_under_every_distribution(distribution: str) -> None:
    problem = problem_of("64,24,16,8,2", distribution=distribution)
    indices = choose_experts(problem.x, problem.router, 2)
    right = dense_layer(problem, indices)
    found = compare_layer(problem, indices, right["output"], right["grad_x"], right)
    assert max(found.errors.values()) < 2e-6
    assert found.nonzero_empty_experts == 0


def test_errors_are_relative_l2_and_told_apart_by_tensor() -> None:
    problem = problem_of("64,24,16,8,2")
    indices = choose_experts(problem.x, problem.router, 2)
    right = dense_layer(problem, indices)
    for name in right:
        scaled = {**right, name: right[name] * 1.25}
        errors = compare_layer(problem, indices, scaled["output"], scaled["grad_x"], scaled).errors
        assert errors.pop(name) == pytest.approx(0.25, rel=1e-4)
        assert max(errors.values()) < 2e-6


def test_the_streamed_reference_of_other_indices_differs() -> None:
    problem = problem_of("64,24,16,8,2")
    indices = choose_experts(problem.x, problem.router, 2)
    right = dense_layer(problem, indices)
    errors = compare_layer(problem, (indices + 1) % 8, right["output"], right["grad_x"], right).errors
    assert min(errors.values()) > 0.1


def test_error_sums() -> None:
    sums = ErrorSums()
    assert sums.relative() == 0.0
    sums.add(torch.tensor([3.0]), torch.tensor([0.0]))
    assert sums.relative() == float("inf")
    sums.add(torch.tensor([4.0]), torch.tensor([10.0]))
    assert sums.relative() == pytest.approx((9 + 36) ** 0.5 / 10)
    sums.add(torch.tensor([float("nan")]), torch.tensor([1.0]))
    assert sums.relative() != sums.relative()
    floored = ErrorSums(torch.tensor(100.0))
    floored.add(torch.tensor([1.0]), torch.tensor([0.0]))
    assert floored.relative() == pytest.approx(0.01)


# The dense bound.


def dense_bound(problem: Problem, reduce_k: int) -> dict[str, Tensor]:
    x, gate, up, down = (
        t.detach().double().requires_grad_() for t in (problem.x, problem.gate, problem.up, problem.down)
    )
    rows = x.repeat(reduce_k, 1).view(problem.shape.E, -1, problem.shape.d)
    hidden = torch.nn.functional.silu(rows @ gate.mT) * (rows @ up.mT)
    out = (hidden @ down.mT).reshape(reduce_k, -1, problem.shape.d).sum(0)
    gradients = torch.autograd.grad(out, (x, gate, up, down), problem.grad_output.double())
    return {"output": out.detach(), **dict(zip(GRADIENTS, gradients, strict=False))}


@pytest.mark.parametrize("variant", DenseBound.variants)
@pytest.mark.parametrize("shape", ["32,24,16,8,4", "24,24,16,8,1", "8,24,16,8,8", "6,24,16,8,4"])
def test_dense_bound_reference(variant: str, shape: str) -> None:
    point = point_of(shape, operation="dense_bound", variant=variant)
    operation = DenseBound()
    assert operation.unsupported_reason(point) is None
    problem = operation.make_problem(point, "cpu")
    T, K = problem.shape.T, problem.shape.K
    assert problem.x.shape[0] == (T if variant == "gemm_glue" else T * K)
    reduce_k = K if variant == "gemm_glue" else 1
    right = dense_bound(problem, reduce_k)
    errors = compare_dense(problem, reduce_k > 1, right["output"], right["grad_x"], right).errors
    assert set(errors) == {"output", *GRADIENTS} - {"grad_router"}
    assert max(errors.values()) < 2e-6
    wrong = {**right, "grad_up": right["grad_gate"]}
    assert compare_dense(problem, reduce_k > 1, right["output"], right["grad_x"], wrong).errors["grad_up"] > 0.1


@pytest.mark.parametrize("shape", ["0,24,16,8,4", "13,24,16,8,4"])
def test_dense_bound_needs_balanced_experts(shape: str) -> None:
    reason = DenseBound().unsupported_reason(point_of(shape, operation="dense_bound"))
    assert reason is not None and "multiple of E=8" in reason


def test_unknown_operation() -> None:
    with pytest.raises(UserError, match="choose from moe_layer, routed_experts, dense_bound"):
        get_operation("nothing")


def test_evaluate_turns_a_missing_gradient_into_zeros() -> None:
    class Blind(RightLayer):
        def scores(self, logits: Tensor, indices: Tensor) -> Tensor:
            return super().scores(logits, indices).detach()

    problem = problem_of("16,24,16,8,2")
    assert not evaluate(Blind(problem), problem).gradients["grad_router"].any()
    assert MoELayer().check(RightLayer(problem), problem).reason is None
