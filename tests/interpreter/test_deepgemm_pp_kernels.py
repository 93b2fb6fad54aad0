"""DeepGEMM++ on the interpreter: its padding, and the layer with DeepGEMM's package replaced by loops."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from fake_deep_gemm import FakeDeepGemm
from torch import Tensor

from harness.interface import DISTRIBUTIONS, ROUTER_CONVENTIONS, Layer, LayerSpec, Point, Problem, RoutingSpec
from harness.memory import tracked_memory
from harness.operations import get_operation
from harness.problem import make_problem
from harness.routing import expert_counts
from harness.shapes import MoEShape
from implementations import _deepgemm_pp_kernels as kernels
from implementations._deepgemm_ops import ALIGNMENT
from implementations.deepgemm_pp import DeepGemmPP
from implementations.sonicmoe_triton.metadata import route
from implementations.sonicmoe_triton.router import top_k
from tests.interpreter.grouped_cases import random


def routed(tokens: int, experts: int, k: int, skew: float = 0.0) -> tuple[Tensor, Tensor, Tensor, kernels.Padded]:
    """(scores, experts, row scores, padded); the larger the skew, the more tokens for the first experts."""
    logits = random(tokens, experts) + skew * torch.arange(experts, 0.0, -1.0)
    scores, chosen = top_k(logits, k)
    routing, row_scores = route(scores, chosen, experts, ALIGNMENT)
    return scores, chosen, row_scores, kernels.pad(routing, row_scores)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "skew"),
    [
        (140, 4, 2, 0.0),
        (140, 4, 2, 9.0),
        (100, 5, 3, 0.5),
        (128, 2, 1, 9.0),
        (1, 8, 2, 0.0),
        (0, 8, 2, 0.0),
        (9, 1, 1, 0.0),
    ],
)
def test_padded_rows(tokens: int, experts: int, k: int, skew: float) -> None:
    scores, chosen, _, padded = routed(tokens, experts, k, skew)
    counts = expert_counts(chosen, experts).tolist()
    assert padded.counts_host == padded.counts.tolist() == [math.ceil(n / ALIGNMENT) * ALIGNMENT for n in counts]
    assert padded.counts.dtype == torch.int32
    assert padded.expert_of_row.tolist() == [e for e, rows in enumerate(padded.counts_host) for _ in range(rows)]
    routing = padded.routing
    assert (routing.tokens, routing.rows) == (tokens, sum(padded.counts_host))
    rows = routing.reverse.view(tokens, k).long()
    assert rows.unique().numel() == tokens * k
    assert torch.equal(padded.expert_of_row[rows], chosen)
    assert torch.equal(routing.gather[rows].long(), torch.arange(tokens)[:, None].expand(tokens, k))
    assert torch.equal(padded.scores[rows], scores)
    # Padding: no weight, and a token that chose the expert anyway.
    padding = torch.ones(routing.rows, dtype=torch.bool).index_fill(0, rows.reshape(-1), False)
    assert not padded.scores[padding].any()
    assert bool((chosen[routing.gather.long()] == padded.expert_of_row[:, None]).any(1).all())


def built(
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
    distribution: str = "uniform",
    convention: str = "topk_softmax",
    dtype: str = "float32",
) -> tuple[Problem, Layer, FakeDeepGemm]:
    size = MoEShape.parse(shape)
    routing = RoutingSpec(distribution=distribution, seed=2 if size.T == 1 else 0)
    layer = LayerSpec(router_convention=convention)
    problem = make_problem(Point("moe_layer", "deepgemm_pp", size, dtype, layer, routing, "", "cpu"), "cpu")
    fake = FakeDeepGemm(dtype=problem.x.dtype)
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    return problem, DeepGemmPP().build(problem), fake


def gradients(layer: Layer, x: Tensor, grad_output: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    grads = torch.autograd.grad(layer.forward(x), [x, *layer.parameters()], grad_output)
    return {"grad_x": grads[0], **layer.canonical_gradients(grads[1:])}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", ["140,64,64,3,1", "20,128,64,6,2"])
def test_layer(monkeypatch: pytest.MonkeyPatch, shape: str, distribution: str) -> None:
    problem, layer, _ = built(monkeypatch, shape, distribution)
    result = get_operation("moe_layer").check(layer, problem)
    assert result.reason is None, result.reason


@pytest.mark.parametrize("shape", ["12,64,64,4,4", "9,64,64,1,1", "1,64,64,8,2", "0,64,64,8,2"])
def test_layer_of_unusual_sizes(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    problem, layer, _ = built(monkeypatch, shape)
    result = get_operation("moe_layer").check(layer, problem)
    assert result.reason is None, result.reason


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_layer_of_each_convention(monkeypatch: pytest.MonkeyPatch, convention: str) -> None:
    problem, layer, _ = built(monkeypatch, "15,64,64,4,2", convention=convention)
    result = get_operation("moe_layer").check(layer, problem)
    assert result.reason is None, result.reason


def test_layer_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, layer, _ = built(monkeypatch, "40,64,64,3,2", dtype="float16")
    result = get_operation("moe_layer").check(layer, problem)
    assert result.reason is None, result.reason


def test_calls_of_one_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six GEMMs: nothing is multiplied twice."""
    problem, layer, fake = built(monkeypatch, "10,64,64,4,2")
    fake.calls.clear()
    gradients(layer, problem.x, problem.grad_output)
    assert fake.calls == ["nt", "nt", "nn", "tn", "nn", "tn"]


def test_infinity_stays_with_its_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, layer, _ = built(monkeypatch, "12,64,64,6,2")
    indices = layer.expert_indices(problem.x)
    assert indices is not None
    grad_output = problem.grad_output.clone()
    grad_output[0] = float("inf")
    touched = torch.zeros(6, dtype=torch.bool).index_fill(0, indices[0].long(), True)
    grads = gradients(layer, problem.x, grad_output)
    for name in ("grad_gate", "grad_up", "grad_down"):
        assert torch.equal(~grads[name].isfinite().flatten(1).all(1), touched), name


def test_what_the_forward_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """H and O; neither Y nor gathered X."""
    problem, layer, _ = built(monkeypatch, "60,512,64,3,2")
    size, indices = problem.shape, layer.expert_indices(problem.x)
    assert indices is not None
    rows = sum(math.ceil(n / ALIGNMENT) * ALIGNMENT for n in expert_counts(indices, size.E).tolist())
    held = tracked_memory(layer, problem.x, problem.grad_output)["held"]
    tensors = 4 * rows * 2 * size.n + 4 * size.T * size.d
    assert tensors <= held <= tensors + 12 * rows + 40 * size.T * size.K + 1024


def test_a_forward_alone_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, layer, _ = built(monkeypatch, "10,64,64,4,2")
    with torch.no_grad():
        out = layer.forward(problem.x)
    assert torch.equal(out, layer.forward(problem.x).detach())
