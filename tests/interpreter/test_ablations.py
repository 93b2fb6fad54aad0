"""The ablations on the interpreter: each passes the gate, with the same results as the fused kernels."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from harness.interface import Implementation, Kernel, Point, Problem, RoutingSpec
from harness.operations import get_operation
from harness.registry import default_registry
from harness.shapes import MoEShape
from implementations import _separate_kernels as kernels
from implementations._ablation_layers import BUILD
from tests.interpreter.grouped_cases import assert_close, random

#: More than a tile of rows for an expert, widths that no block divides, and one token.
SHAPES = ("150,32,16,3,2", "20,40,24,6,3", "1,32,16,4,2")
CASES = [
    (name, operation, variant)
    for name, operations in BUILD.items()
    for operation in operations
    for variant in (("dW1", "dW2") if operation == "grouped_gemm_gather_k" else ("",))
]


def plugin(name: str) -> Implementation:
    return default_registry().get(name)


def problem_of(
    name: str, operation: str, variant: str, shape: str, dtype: str = "float32", distribution: str = "uniform"
) -> Problem:
    if operation == "grouped_gemm_gather_m":
        variant = "up"
    routing = RoutingSpec(distribution=distribution)
    point = Point(operation, name, MoEShape.parse(shape), dtype, routing=routing, variant=variant, device="cpu")
    return get_operation(operation).make_problem(point, "cpu")


def outputs(name: str, problem: Problem) -> Mapping[str, Tensor]:
    layer = plugin(name).build(problem)
    assert isinstance(layer, Kernel)
    return layer.outputs(layer.forward(problem.x))


@pytest.mark.parametrize(("dtype", "distribution"), [("float32", "uniform"), ("float16", "empty_experts")])
@pytest.mark.parametrize(("name", "operation", "variant"), CASES)
def test_gate(name: str, operation: str, variant: str, distribution: str, dtype: str) -> None:
    for shape in SHAPES if dtype == "float32" else SHAPES[1:]:
        problem = problem_of(name, operation, variant, shape, dtype, distribution)
        layer = plugin(name).build(problem)
        result = get_operation(operation).check(layer, problem)
        assert result.reason is None, (shape, result.reason)
        assert layer.notes


@pytest.mark.parametrize(("name", "operation", "variant"), [case for case in CASES if case[0] == "ablation_gather"])
def test_copied_rows_change_no_bit(name: str, operation: str, variant: str) -> None:
    problem = problem_of(name, operation, variant, SHAPES[1], "float16")
    expected = outputs("sonicmoe_triton", problem)
    for key, found in outputs(name, problem).items():
        assert torch.equal(found, expected[key]), key


def test_scattered_stores_change_no_bit() -> None:
    problem = problem_of("ablation_scatter", "down_aggregation", "", SHAPES[0], "float16")
    found = {name: outputs(name, problem)["output"] for name in ("ablation_scatter", "ablation_plain")}
    assert torch.equal(*found.values())


def test_no_tokens() -> None:
    for name, operation, variant in CASES:
        problem = problem_of(name, operation, variant, "0,32,16,4,2")
        result = get_operation(operation).check(plugin(name).build(problem), problem)
        assert result.reason is None, (name, operation, result.reason)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [64, 320, 24])
def test_activation_and_its_backward(n: int, dtype: torch.dtype) -> None:
    rows = 37
    h, grad_a = random(rows, 2 * n, dtype=dtype), random(rows, n, dtype=dtype, seed=1)
    scores = random(rows).abs()
    leaf, weight = h.float().requires_grad_(), scores.clone().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    a = torch.nn.functional.silu(gate) * up
    scaled = weight[:, None] * a
    grad_h, grad_scores = torch.autograd.grad(scaled, [leaf, weight], grad_a.float())
    assert_close(kernels.swiglu(h), a.detach(), dtype)
    apart = kernels.swiglu_backward(grad_a, h, scores), kernels.scaled_swiglu(h, scores)
    apart += (kernels.score_gradient(grad_a, h),)
    for found in (apart, kernels.epilogue(grad_a, h, scores)):
        for got, want in zip(found, (grad_h, scaled.detach(), grad_scores), strict=True):
            assert_close(got, want, dtype)


def test_gather() -> None:
    x = random(40, 640)[:, ::2]
    gather = torch.arange(39, -1, -1, dtype=torch.int32).repeat_interleave(2)
    assert torch.equal(kernels.gather_rows(x, gather), x[gather.long()])
