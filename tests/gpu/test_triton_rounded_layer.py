"""The Triton layer with token rounding inside, on a GPU: the harness's gate, graphs, compilers, repetition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.interface import DTYPES, ROUTER_CONVENTIONS, Layer, Problem
from harness.operations import get_operation
from harness.problem import make_problem
from harness.timing import GraphCalls, L2Eviction
from harness.token_rounding import ROUNDINGS

from . import common
from .common import NAME, assert_equal, both_dtypes, no_synchronisation, point_of, random, run

pytest.importorskip("triton")

from implementations.sonicmoe_triton import SonicMoETriton
from implementations.sonicmoe_triton.layer import SonicMoE, load_balancing_loss

pytestmark = pytest.mark.usefixtures("exact_float32")

SHAPE = "3000,512,256,16,4"
PAPER = "16384,4096,1024,256,8"


def problem_of(shape: str, method: str, *args: str, m_tile: int = 128, input_set: int = 0) -> Problem:
    point = point_of(NAME, shape, *args)
    point = replace(point, routing=replace(point.routing, method=method, m_tile=m_tile))
    assert SonicMoETriton().unsupported_reason(point) is None
    return make_problem(point, common.DEVICE, input_set)


def built(shape: str, method: str, *args: str) -> tuple[Layer, Problem]:
    problem = problem_of(shape, method, *args)
    return SonicMoETriton().build(problem), problem


def check(problem: Problem) -> tuple[int, int]:
    result = get_operation("moe_layer").check(SonicMoETriton().build(problem), problem)
    assert result.reason is None, result.reason
    return result.moved


@both_dtypes
@pytest.mark.parametrize("method", ROUNDINGS)
def test_roundings(method: str, dtype: str) -> None:
    dropped, added = check(problem_of(SHAPE, method, dtype))
    assert (dropped > 0) == (method != "up") and (added > 0) == (method != "down")


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("distribution", ["skewed", "empty_experts"])
def test_conventions_and_distributions(distribution: str, convention: str) -> None:
    check(problem_of(SHAPE, "nearest", "bfloat16", distribution, convention))


@pytest.mark.parametrize("shape", ["100,256,128,8,2", "1,256,128,8,2", "0,256,128,8,2", "700,256,128,1,1"])
def test_edges(shape: str) -> None:
    check(problem_of(shape, "up"))
    check(problem_of(shape, "nearest", m_tile=16))


def test_paper_size() -> None:
    dropped, added = check(problem_of(PAPER, "nearest"))
    assert dropped > 0 and added > 0


@pytest.mark.parametrize("method", ROUNDINGS)
def test_runs_agree_bit_for_bit_and_wait_for_no_device(method: str) -> None:
    layer, problem = built(SHAPE, method)
    first = run(layer, problem)
    garbage = [torch.full((2**24 >> i,), float("nan"), device=common.DEVICE) for i in range(12)]
    del garbage
    with no_synchronisation():
        second = run(layer, problem)
    assert_equal(second, first)


@pytest.mark.parametrize("method", ["nearest", "up"])
def test_a_graph_replays_on_new_inputs(method: str) -> None:
    problems = [problem_of(SHAPE, method, input_set=index) for index in range(3)]
    problems[2].x = problems[2].x[:1].expand_as(problems[2].x).contiguous()
    layer = SonicMoETriton().build(problems[0])
    want = [run(layer, problem) for problem in problems]
    calls = GraphCalls(layer, problems, L2Eviction())
    for index in (0, 1, 2, 1, 0):
        calls(index)
        output, found = calls.outputs()
        assert_equal([output, *(g for g in found if g is not None)], want[index])


@both_dtypes
def test_compiles_whole(dtype: str) -> None:
    torch.compiler.reset()
    layer = SonicMoE(256, 128, 8, 2, dtype=DTYPES[dtype], device=common.DEVICE, rounding="nearest")
    leaves = list(layer.parameters())

    def loss(x: Tensor) -> Tensor:
        out, router = layer.forward_with_router(x)
        return out.float().square().mean() + 0.01 * load_balancing_loss(router)

    compiled = torch.compile(loss, fullgraph=True)
    for tokens in (640, 1000):
        x = random(tokens, 256, dtype=DTYPES[dtype])
        want, got = loss(x), compiled(x)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
        common.assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), (1e-2, 1e-2))
