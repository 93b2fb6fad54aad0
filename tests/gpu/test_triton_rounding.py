"""Token rounding on a GPU at the size of the paper's comparison, against the harness's, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS
from harness.token_rounding import ADDED_WEIGHTS, ROUNDINGS, GeneralRouting, route_by

from .common import DEVICE, assert_equal, no_synchronisation, random, relative

pytest.importorskip("triton")

from implementations.sonicmoe_triton.rounding import RoundedRouting, pairs_bound, round_routing
from implementations.sonicmoe_triton.rounding_kernels import RESIDENT_TOKENS

pytestmark = pytest.mark.usefixtures("exact_float32")

TOKENS, EXPERTS, K, M_TILE = 16384, 256, 8, 128


def numbers(seed: int) -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(seed)


def check(got: RoundedRouting, want: GeneralRouting) -> None:
    pairs = want.experts.numel()
    assert pairs <= got.experts.numel() == got.scores.numel()
    assert torch.equal(got.token_offsets, want.token_offsets)
    assert torch.equal(got.experts[:pairs], want.experts)
    assert torch.equal(got.scores[:pairs].nan_to_num(-1.0), want.scores.detach().nan_to_num(-1.0))
    assert bool((got.experts[pairs:] == -1).all()) and bool((got.scores[pairs:] == 0).all())


def compare(logits: Tensor, k: int, m_tile: int, method: str, convention: str = "topk_softmax") -> None:
    got = round_routing(logits, k, m_tile, method, convention, generator=numbers(1) if method == "stochastic" else None)
    want = route_by(logits, k, method, m_tile, convention, generator=numbers(1))
    assert got.experts.numel() == pairs_bound(*logits.shape, k, m_tile, method)
    check(got, want)


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("method", ROUNDINGS)
def test_paper_size(method: str, convention: str) -> None:
    compare(random(TOKENS, EXPERTS), K, M_TILE, method, convention)
    # Logits of few bits: ties at every threshold. Skewed: exempt experts, and some that nobody chose.
    compare(random(TOKENS, EXPERTS).round(), K, M_TILE, method, convention)
    skew = 0.05 * torch.arange(EXPERTS, device=DEVICE)
    compare((random(TOKENS, EXPERTS).float() - skew).bfloat16(), K, M_TILE, method, convention)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "m_tile"),
    [
        (1, 1, 1, 1),
        (100, 8, 2, 128),
        (1000, 100, 22, 16),
        (3001, 1024, 64, 128),
        (RESIDENT_TOKENS, 64, 4, 128),
        (RESIDENT_TOKENS + 1, 32, 2, 128),
        (100_003, 9, 3, 100),
        (500, 128, 8, 1),
    ],
)
def test_other_sizes(tokens: int, experts: int, k: int, m_tile: int, dtype: torch.dtype) -> None:
    for method in ("nearest", "up"):
        logits = random(tokens, experts, dtype=dtype)
        compare(logits, k, m_tile, method)
        compare(logits.round(), k, m_tile, method)


def test_infinities_and_nans() -> None:
    logits = random(2000, 64, dtype=torch.float32)
    logits[::7, 3], logits[::11, 5], logits[::5, 1], logits[13] = math.nan, math.inf, -math.inf, -math.nan
    for method in ("up", "down"):
        compare(logits, 4, 128, method)


@pytest.mark.parametrize("added_weight", ADDED_WEIGHTS)
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("method", ["nearest", "up"])
def test_gradient(method: str, convention: str, added_weight: str) -> None:
    logits = random(TOKENS, EXPERTS, dtype=torch.float32).requires_grad_()
    got = round_routing(logits, K, M_TILE, method, convention, added_weight)
    want = route_by(logits, K, method, M_TILE, convention, added_weight)
    grad = random(*got.scores.shape, dtype=torch.float32)
    (found,) = torch.autograd.grad(got.scores, logits, grad)
    (expected,) = torch.autograd.grad(want.scores, logits, grad[: want.scores.numel()])
    assert relative([(found, expected)]) < 1e-5


def step(logits: Tensor, method: str, grad: Tensor, draws: Tensor | None = None) -> list[Tensor]:
    routing = round_routing(logits, K, M_TILE, method, draws=draws)
    return [*routing, *torch.autograd.grad(routing.scores, logits, grad)]


def gradient_of(method: str) -> Tensor:
    return random(pairs_bound(TOKENS, EXPERTS, K, M_TILE, method), dtype=torch.float32)


@pytest.mark.parametrize("method", ROUNDINGS)
def test_runs_repeat_whatever_is_in_memory(method: str) -> None:
    logits, grad = random(TOKENS, EXPERTS).requires_grad_(), gradient_of(method)
    draws = torch.arange(EXPERTS, device=DEVICE) % M_TILE if method == "stochastic" else None
    first = step(logits, method, grad, draws)
    for value in (-1, 0x7FFFFFFF):
        garbage = [torch.full((2**22 >> i,), value, dtype=torch.int32, device=DEVICE) for i in range(16)]
        del garbage
        assert_equal(step(logits, method, grad, draws), first)


@pytest.mark.parametrize("method", ROUNDINGS)
def test_it_waits_for_no_device(method: str) -> None:
    logits, grad = random(TOKENS, EXPERTS).requires_grad_(), gradient_of(method)
    step(logits, method, grad)
    with no_synchronisation():
        step(logits, method, grad)


@pytest.mark.parametrize("method", ROUNDINGS)
def test_a_graph_replays_on_new_logits(method: str) -> None:
    logits, grad = random(TOKENS, EXPERTS).requires_grad_(), gradient_of(method)
    draws = torch.arange(EXPERTS, device=DEVICE) % M_TILE if method == "stochastic" else None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(logits, method, grad, draws)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step(logits, method, grad, draws)
    for shift in (1, 2):
        with torch.no_grad():
            logits.copy_(torch.roll(random(TOKENS, EXPERTS), shift, 1) * shift)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(captured, step(logits, method, grad, draws))
