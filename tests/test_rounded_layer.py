"""Token rounding as a part of `moe_layer`: right layers, the reference, planted wrong layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import RightLayer
from rounded_layers import (
    LOOP,
    OPERATION,
    AddedPairsAreConstants,
    AddedPairsWeighP,
    ComputesTopK,
    DropsKeepTheirGradient,
    GradientOfSumsOverKeptPairs,
    GradientsOfExpertsRoundedToNothing,
    LeaksIntoTokensAlone,
    OneAddedPairIsMissing,
    OverwritesX,
    PlainRounded,
    RoundsTheFirstCall,
    RoundsTheOtherWay,
    SumsAreConstants,
    SumsOverKeptPairs,
    TellsNothing,
    TellsPairsOfAnotherShape,
    TellsTopK,
    indices_of,
    passes,
    plain_rounding,
    rounded,
    routing_of,
    top_k_of,
)
from torch import Tensor

from harness import reference
from harness.correctness import evaluate, judge
from harness.interface import DISTRIBUTIONS, ROUTER_CONVENTIONS
from harness.problem import make_problem
from harness.reference import compare_layer
from harness.rounding_check import kept_tokens
from harness.token_rounding import ROUNDINGS

# Right layers


@pytest.mark.parametrize("method", ROUNDINGS)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_loop_passes_the_gate(distribution: str, method: str) -> None:
    for convention in ROUTER_CONVENTIONS:
        problem = make_problem(rounded(method=method, distribution=distribution, convention=convention), "cpu")
        layer = LOOP.build(problem)
        found, routing = passes(layer, problem), routing_of(problem)
        assert set(found.errors) == {"output", "grad_x", *(f"grad_{w}" for w in ("gate", "up", "down", "router"))}
        assert found.counts is not None and torch.equal(found.counts, torch.bincount(routing.experts, minlength=6))
        assert found.moved == (routing.dropped, routing.added)
        before = torch.bincount(indices_of(plain_rounding(problem.x @ problem.router.T, problem.point)[0]).flatten())
        assert any(routing[3:]) == any(count % 8 and (count // 8 + 1) * 8 <= 40 for count in before.tolist())
        if distribution in ("uniform", "empty_experts"):
            assert any(found.moved)
    if method == "stochastic":
        assert "same numbers in every call" in layer.notes[0]


EDGES = [
    ("5,16,8,6,2", 8),  # fewer tokens than a tile: every expert is exempt
    ("40,16,8,1,1", 16),  # one expert
    ("24,16,8,4,4", 16),  # every expert for every token
    ("40,16,8,6,1", 8),  # one expert for each token
    ("1,16,8,6,2", 1),
    ("1,16,8,1,1", 8),
    ("0,16,8,6,2", 8),
    ("40,16,8,6,2", 16),  # half of it dropped by `down`: tokens without an expert
    ("40,16,8,6,2", 32),  # all of it
    ("33,19,7,5,3", 4),
]


@pytest.mark.parametrize("method", ROUNDINGS)
@pytest.mark.parametrize(("shape", "m_tile"), EDGES)
def test_the_loop_passes_the_gate_at_the_edges(shape: str, m_tile: int, method: str) -> None:
    for convention in ROUTER_CONVENTIONS:
        problem = make_problem(rounded(shape, method, m_tile, convention=convention), "cpu")
        found, routing = passes(LOOP.build(problem), problem), routing_of(problem)
        assert found.counts is not None and int(found.counts.sum()) == routing.experts.numel()
        assert found.moved == (routing.dropped, routing.added)
        alone = int((routing.token_offsets.diff() == 0).sum())
        if shape == "40,16,8,6,2" and method == "down":
            assert alone if m_tile == 16 else alone == problem.shape.T


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_loop_passes_in_half_precision(dtype: str, convention: str) -> None:
    for method in ROUNDINGS:
        problem = make_problem(rounded("96,32,16,8,2", method, 16, dtype=dtype, convention=convention), "cpu")
        assert any(passes(LOOP.build(problem), problem).moved)


@pytest.mark.parametrize("method", ROUNDINGS)
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_the_reference_equals_a_dense_layer_in_fp64(convention: str, method: str) -> None:
    for distribution in ("uniform", "skewed", "empty_experts"):
        problem = make_problem(rounded(method=method, distribution=distribution, convention=convention), "cpu")
        tensors = ("x", "gate", "up", "down", "router", "grad_output")
        wide = replace(problem, **{name: getattr(problem, name).double() for name in tensors})
        layer = PlainRounded(wide)
        found = evaluate(layer, wide)
        assert found.output.dtype == torch.float64
        indices, pairs = layer.expert_indices(wide.x), layer.kept_pairs(wide.x)
        assert pairs is not None
        kept = kept_tokens(pairs[1]), pairs[0]
        comparison = compare_layer(problem, indices, found.output, found.grad_x, found.gradients, kept)
        assert set(comparison.errors) == {"output", "grad_x", "grad_gate", "grad_up", "grad_down", "grad_router"}
        assert max(*comparison.errors.values(), *comparison.worst.values()) < 1e-5
        assert not comparison.nonzero_empty_experts
        # What was kept is what was compared with.
        without = compare_layer(problem, indices, found.output, found.grad_x, found.gradients)
        assert min(without.errors.values()) > 1e-3
        # The gate has nothing to add, and takes it from a layer in fp32.
        assert judge(comparison, "float32") is None and any(passes(PlainRounded(problem), problem).moved)


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_the_floor_knows_how_weights_move_with_logits(convention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """scores^2 (1 - 2 own + concentration) is the squared norm of a weight's gradient, added pairs included."""
    asked: list[tuple[Tensor, ...]] = []
    own_floor = reference.cancellation_floor

    def ask(*args: Tensor) -> Tensor:
        asked.append(args)
        return own_floor(*args)

    monkeypatch.setattr(reference, "cancellation_floor", ask)
    problem = make_problem(rounded(convention=convention), "cpu")
    assert all(passes(LOOP.build(problem), problem).moved)
    ((norms, scores, own, _, _, concentration),) = asked
    logits = (problem.x @ problem.router.T).requires_grad_()
    chosen, kept = plain_rounding(logits.detach(), problem.point)
    weights = PlainRounded(problem).weights(logits, chosen, kept)[kept]
    expected = [torch.autograd.grad(weight, logits, retain_graph=True)[0].square().sum() for weight in weights]
    torch.testing.assert_close(scores, weights.detach())
    torch.testing.assert_close(scores.square() * (1 - 2 * own + concentration), torch.stack(expected))
    torch.testing.assert_close(norms, problem.x.norm(dim=1)[kept.nonzero()[:, 0]])


# Wrong layers


#: A wrong layer, a part of the sentence that refuses it, and one that is not in it.
WRONG: list[tuple[type[PlainRounded], str, str]] = [
    (SumsOverKeptPairs, "output", "keep another"),
    (GradientOfSumsOverKeptPairs, "grad_router", "output"),
    (SumsAreConstants, "grad_router", "output"),
    (AddedPairsWeighP, "output", "keep another"),
    (AddedPairsAreConstants, "grad_router", "output"),
    (DropsKeepTheirGradient, "grad_router", "output"),
    (OneAddedPairIsMissing, "output", "keep another"),
    (ComputesTopK, "output", "keep another"),
    (TellsTopK, "experts keep another number of tokens than nearest gives", "relative"),
    (RoundsTheOtherWay, "experts keep another number of tokens than nearest gives", "relative"),
    (TellsNothing, "the layer does not tell which pairs its rounding kept", "relative"),
    (RightLayer, "the layer does not tell which pairs its rounding kept", "relative"),  # type: ignore[list-item]
    (RoundsTheFirstCall, "output", "keep another"),
    (OverwritesX, "changed its input", "relative"),
    (TellsPairsOfAnotherShape, "kept pairs have shapes", "relative"),
]


def test_the_least_output_of_a_token_alone_is_refused() -> None:
    problem = make_problem(rounded("40,16,8,6,1", "down"), "cpu")
    passes(PlainRounded(problem), problem)
    found = OPERATION.check(LeaksIntoTokensAlone(problem), problem)
    assert found.reason and "tokens without an expert have outputs" in found.reason


@pytest.mark.parametrize(("layer", "part", "other"), WRONG, ids=[layer.__name__ for layer, _, _ in WRONG])
def test_planted_wrong_layers_are_refused(layer: type[PlainRounded], part: str, other: str) -> None:
    problem = make_problem(rounded(), "cpu")
    assert all(passes(PlainRounded(problem), problem).moved)
    found = OPERATION.check(layer(problem), problem)
    assert found.reason and part in found.reason and other not in found.reason, found.reason
    if "relative" in found.reason:
        # Not by a hair.
        assert max(found.errors.values()) > 0.02
    else:
        assert not found.errors


@pytest.mark.parametrize("convention", ["topk_softmax", "softmax_topk_renormalised"])
def test_the_gradient_of_other_denominators_shows_in_the_router(convention: str) -> None:
    for method in ROUNDINGS:
        problem = make_problem(rounded(method=method, convention=convention), "cpu")
        found = OPERATION.check(GradientOfSumsOverKeptPairs(problem), problem)
        assert found.reason and "grad_router" in found.reason
        assert found.errors["grad_router"] > 0.1 and found.errors["output"] < 1e-5


def test_weights_of_another_convention_are_refused() -> None:
    for convention in ROUTER_CONVENTIONS:
        problem = make_problem(rounded(convention=convention), "cpu")
        layer = PlainRounded(problem)
        layer.convention = "topk_softmax" if convention == "softmax_topk" else "softmax_topk"
        reason = OPERATION.check(layer, problem).reason
        assert reason and "output" in reason


@pytest.mark.parametrize("method", ["up", "down"])
def test_top_k_in_place_of_a_rounding_is_refused(method: str) -> None:
    for layer in (TellsTopK, ComputesTopK, RoundsTheOtherWay):
        problem = make_problem(rounded(method=method), "cpu")
        reason = OPERATION.check(layer(problem), problem).reason
        named = "output" if layer is ComputesTopK else f"another number of tokens than {method} gives"
        assert reason and named in reason, reason


def test_the_least_gradient_of_an_expert_rounded_to_nothing_is_refused() -> None:
    problem = make_problem(rounded(method="down", m_tile=16), "cpu")
    counts, empty = passes(PlainRounded(problem), problem).counts, (torch.bincount(top_k_of(problem)) > 0)
    assert counts is not None and bool(((counts == 0) & empty).any())
    reason = OPERATION.check(GradientsOfExpertsRoundedToNothing(problem), problem).reason
    assert reason and "experts without tokens have weight gradients that are not zero" in reason
