"""The Triton layer under compilers, CUDA graphs, an optimiser, and a watch for synchronisations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.interface import DTYPES, ROUTER_CONVENTIONS
from harness.timing import GraphCalls, L2Eviction

from . import common
from .common import (
    MEDIUM,
    NAME,
    assert_close,
    assert_equal,
    both_dtypes,
    built,
    gradients,
    no_synchronisation,
    problem_of,
    random,
    run,
)

pytest.importorskip("triton")

import triton
import triton.language as tl

from harness import tuners
from implementations.sonicmoe_triton import SonicMoETriton, function
from implementations.sonicmoe_triton.layer import SonicMoE, load_balancing_loss

pytestmark = pytest.mark.usefixtures("exact_float32")


@both_dtypes
@pytest.mark.parametrize(("convention", "bias"), [("topk_softmax", False), ("softmax_topk", True)])
def test_compiles_whole(bias: bool, convention: str, dtype: str) -> None:
    torch.compiler.reset()
    of = DTYPES[dtype]
    layer = SonicMoE(256, 128, 8, 2, router_convention=convention, bias=bias, dtype=of, device=common.DEVICE)
    compiled = torch.compile(layer, fullgraph=True)
    x, grad = random(4, 96, 256, dtype=of).requires_grad_(), random(4, 96, 256, dtype=of)
    leaves = [x, *layer.parameters()]
    want = gradients(layer(x), leaves, grad)
    for _ in range(2):
        assert_equal(gradients(compiled(x), leaves, grad), want)


def test_compiles_with_a_loss_of_the_router_and_any_number_of_tokens() -> None:
    torch.compiler.reset()
    layer = SonicMoE(256, 128, 8, 2, dtype=torch.bfloat16, device=common.DEVICE)
    parameters = list(layer.parameters())

    def loss(x: Tensor) -> Tensor:
        out, router = layer.forward_with_router(x)
        return out.float().square().mean() + load_balancing_loss(router)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for tokens in (300, 517, 64):
        x = random(tokens, 256)
        want, got = loss(x), compiled(x)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
        assert_close(torch.autograd.grad(got, parameters), torch.autograd.grad(want, parameters), (1e-2, 1e-2))


@both_dtypes
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("distribution", ["uniform", "empty_experts"])
def test_a_graph_replays_on_new_inputs(distribution: str, convention: str, dtype: str) -> None:
    """Other inputs route otherwise: the captured launches must serve any routing."""
    arguments = (MEDIUM, dtype, distribution, convention)
    problems = [problem_of(NAME, *arguments, input_set=index) for index in range(3)]
    # Every token to the same experts: another distribution than at the capture.
    problems[2].x = problems[2].x[:1].expand_as(problems[2].x).contiguous()
    layer = SonicMoETriton().build(problems[0])
    want = [run(layer, problem) for problem in problems]
    calls = GraphCalls(layer, problems, L2Eviction())
    for index in (0, 1, 2, 1, 0):
        calls(index)
        output, found = calls.outputs()
        assert_equal([output, *(g for g in found if g is not None)], want[index])


def test_one_graph_of_both_passes_with_biases() -> None:
    layer = SonicMoE(512, 256, 16, 4, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    x, grad = random(1000, 512).requires_grad_(), random(1000, 512)
    leaves = [x, *layer.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gradients(layer(x), leaves, grad)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = gradients(layer(x), leaves, grad)
    for seed in (1, 2):
        with torch.no_grad():
            x.copy_(torch.roll(random(1000, 512) + seed, seed, 0))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(captured, gradients(layer(x), leaves, grad))


def test_the_watch_for_synchronisations_works() -> None:
    one = torch.ones((), device=common.DEVICE)
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        one.item()


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_the_layer_waits_for_no_device(convention: str) -> None:
    layer, problem = built(MEDIUM, convention=convention)
    x = problem.x.detach().requires_grad_()
    leaves = [x, *layer.parameters()]
    for _ in range(2):
        torch.autograd.grad(layer.forward(x), leaves, problem.grad_output)
    with no_synchronisation():
        torch.autograd.grad(layer.forward(x), leaves, problem.grad_output)


def test_neither_do_biases_the_routers_output_or_the_callers_routing() -> None:
    layer = SonicMoE(512, 256, 16, 4, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    x, grad = random(1000, 512).requires_grad_(), random(1000, 512)
    parameters = list(layer.parameters())
    scores, experts = random(1000, 4, dtype=torch.float32).abs().requires_grad_(), layer_experts(layer, x)
    offsets = torch.arange(0, 4001, 4, device=x.device)

    def both() -> None:
        out, router = layer.forward_with_router(x)
        torch.autograd.grad([out, load_balancing_loss(router)], [x, *parameters], [grad, None])
        for pairs in (None, offsets):
            flat = (scores, experts) if pairs is None else (scores.reshape(-1), experts.reshape(-1))
            routed = function.routed_experts(x, layer.w1, layer.w2, *flat, pairs, "swiglu", layer.bias1, layer.bias2)
            torch.autograd.grad(routed, [x, scores, layer.w1, layer.w2], grad)

    both()
    both()
    with no_synchronisation():
        both()


def layer_experts(layer: SonicMoE, x: Tensor) -> Tensor:
    return function.choose_experts(x, layer.router, layer.k, layer.router_convention)[1]


def test_steps_of_an_optimiser() -> None:
    torch.manual_seed(0)
    layer = SonicMoE(256, 128, 8, 2, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    x, target = random(1000, 256), random(1000, 256, scale=0.5)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = F.mse_loss(layer(x).float(), target.float())
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    assert all(bool(p.isfinite().all()) for p in layer.parameters())
    assert losses[-1] < losses[0], losses


@triton.jit
def _twice_kernel(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def test_what_a_tuner_finds_on_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Triton's own tuner and cache: the first to ask chooses, the next finds it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuners, "_found", 0)
    tuners.watch_found()
    x = torch.ones(512, device=common.DEVICE)
    for found in ("", "1 choice of Triton's tuner found on the machine"):
        configs = [triton.Config({"BLOCK": block}) for block in (64, 128)]
        tuned = triton.autotune(configs, key=["n"], restore_value=["x"], cache_results=True)(_twice_kernel)
        tuned[lambda meta: (triton.cdiv(512, meta["BLOCK"]),)](x, 512)
        assert tuners.found_note().startswith(found) and bool(tuners.found_note()) == bool(found)
    assert (x == 4).all()
