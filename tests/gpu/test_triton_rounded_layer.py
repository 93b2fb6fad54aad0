"""The Triton layer with token rounding inside, on a GPU: the harness's gate, graphs, compilers, repetition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from harness.correctness import TOLERANCES
from harness.interface import DTYPES, ROUTER_CONVENTIONS, Layer, Problem
from harness.operations import get_operation
from harness.problem import make_problem
from harness.reference import full_precision
from harness.timing import GraphCalls, L2Eviction
from harness.token_rounding import ROUNDINGS, round_counts

from . import common
from .common import (
    NAME,
    assert_close,
    assert_equal,
    both_dtypes,
    gradients,
    leaves_of,
    no_synchronisation,
    point_of,
    random,
    run,
)

pytest.importorskip("triton")

from expert_reference import plain_rounded_layer

from implementations.sonicmoe_triton import SonicMoETriton, function
from implementations.sonicmoe_triton.activations import is_gated
from implementations.sonicmoe_triton.layer import SonicMoE, load_balancing_loss
from implementations.sonicmoe_triton.rounding import RoundedRouting, round_routing

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


@pytest.fixture
def routings(monkeypatch: pytest.MonkeyPatch) -> list[RoundedRouting]:
    """Those that the layer makes, one after the other."""
    made: list[RoundedRouting] = []

    def make(*args: object) -> RoundedRouting:
        made.append(round_routing(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(function, "round_routing", make)
    return made


def kept_of(routing: RoundedRouting) -> Tensor:
    """(P,), the experts of the pairs that there are."""
    return routing.experts[: int(routing.token_offsets[-1])]


def tensors_of(
    dtype: torch.dtype, activation: str, T: int = 600, d: int = 264, n: int = 136, E: int = 6
) -> list[Tensor]:
    """x, w1, w2, router, bias1, bias2."""
    hidden = 2 * n if is_gated(activation) else n
    return [
        random(T, d, dtype=dtype),
        random(E, hidden, d, dtype=dtype, scale=d**-0.5),
        random(E, d, n, dtype=dtype, scale=n**-0.5),
        random(E, d, dtype=dtype, scale=d**-0.5),
        random(E, hidden, dtype=dtype, scale=0.5),
        random(E, d, dtype=dtype, scale=0.5),
    ]


@both_dtypes
@pytest.mark.parametrize("method", ["nearest", "up"])
@pytest.mark.parametrize(
    ("activation", "convention"),
    [("swiglu", "topk_softmax"), ("relu2", "softmax_topk"), ("gelu", "softmax_topk_renormalised")],
)
def test_biases_and_activations_against_autograd(
    activation: str, convention: str, method: str, dtype: str, routings: list[RoundedRouting]
) -> None:
    """With the pairs that the layer has kept: which of two near-equal weights is larger is a matter of rounding."""
    k, m_tile = 3, 128
    tensors = tensors_of(DTYPES[dtype], activation)
    leaves = leaves_of(*tensors)
    x, w1, w2, router, bias1, bias2 = leaves
    out, said = function.rounded_moe_layer(x, w1, w2, router, k, m_tile, method, convention, activation, bias1, bias2)
    kept, grad = kept_of(routings[0]), random(*x.shape, dtype=DTYPES[dtype], scale=2.0)
    assert kept.numel() != int(said.counts.sum())
    indices = function.choose_experts(tensors[0], tensors[3], k, convention)[1]
    with full_precision():
        plain = leaves_of(*(t.float() for t in tensors))
        want = plain_rounded_layer(plain, indices, kept, routings[0].token_offsets, convention, activation)
        expected = gradients(want, plain, grad.float())
    assert_close(gradients(out, leaves, grad), expected, TOLERANCES[dtype])


def test_a_graph_draws_anew_at_every_replay(routings: list[RoundedRouting]) -> None:
    """``stochastic`` with the default generator: whatever it has drawn, each expert has one of two numbers of tokens,
    and the layer computes the pairs that were kept."""
    m_tile, experts = 128, 16
    leaves = leaves_of(*tensors_of(torch.bfloat16, "swiglu", T=3000, d=512, n=256, E=experts)[:4])
    grad = random(3000, 512)

    def step() -> tuple[Tensor, Tensor, list[Tensor]]:
        out, said = function.rounded_moe_layer(*leaves, 4, m_tile, "stochastic")
        return out, said.counts, list(torch.autograd.grad(out, leaves[1:3], grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out, counts, found = step()
    captured, numbers = routings[-1], set()
    for _ in range(6):
        graph.replay()
        torch.cuda.synchronize()
        kept = torch.bincount(kept_of(captured), minlength=experts)
        down, up = (round_counts(counts, 3000, m_tile, method) for method in ("down", "up"))
        assert bool(((kept == down) | (kept == up)).all())
        assert bool((kept % m_tile == 0)[down % m_tile == 0].all())
        numbers.add(tuple(kept.tolist()))
        x, w1, w2, _ = leaves
        alone = function.routed_experts(x, w1, w2, captured.scores.detach(), captured.experts, captured.token_offsets)
        assert_equal([out, *found], [alone, *torch.autograd.grad(alone, [w1, w2], grad)])
    assert len(numbers) > 1


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
