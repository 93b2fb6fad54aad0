"""Token rounding as a part of `moe_layer`: the gate, its reference, what rows say of it, who offers it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import test_method_ratios
import torch
from conftest import RightLayer, point_of
from test_method_ratios import REGISTRY, Ratio
from test_sweep import METHODS_HEAD, load
from torch import Tensor

from harness import reference
from harness.correctness import Correctness, evaluate, judge
from harness.errors import UserError
from harness.interface import DISTRIBUTIONS, ROUTER_CONVENTIONS, Implementation, Layer, Point, Problem
from harness.measure import Context, measure_point
from harness.operations import get_operation
from harness.points import point_from_dict, point_to_dict
from harness.problem import make_problem
from harness.record import check
from harness.reference import compare_layer
from harness.rounding_check import check_rounding, kept_tokens
from harness.timing import TimingSettings
from harness.token_rounding import METHODS, ROUNDINGS, TOP_K, GeneralRouting, token_rounding, top_k

OPERATION = get_operation("moe_layer")
LOOP = REGISTRY.get("torch_loop")
PASSES = ("forward", "backward")
#: Offered by no layer with a router of its own.
OTHERS = tuple(method for method in METHODS if method not in (TOP_K, *ROUNDINGS))

# Fixtures of the tests of `routed_experts`.
seen, ratio, _no_collection = test_method_ratios.seen, test_method_ratios.ratio, test_method_ratios._no_collection


def rounded(shape: str = "40,16,8,6,2", method: str = "nearest", m_tile: int = 8, **kwargs: object) -> Point:
    point = point_of(shape, name="torch_loop", **kwargs)  # type: ignore[arg-type]
    return replace(point, routing=replace(point.routing, method=method, m_tile=m_tile))


def routing_of(problem: Problem) -> GeneralRouting:
    """The point's routing of the problem's own tokens."""
    point, routing = problem.point, problem.point.routing
    return token_rounding(
        problem.x @ problem.router.T,
        point.shape.K,
        routing.m_tile,
        routing.method,
        point.layer.router_convention,
        generator=torch.Generator().manual_seed(routing.seed),
    )


# Another way than the harness's: a selection in plain Python, weights as a (T, E) matrix, every expert on every token


def plain_target(count: int, tokens: int, m_tile: int, method: str, expert: int) -> int:
    """Of any rounding but `balanced`; `stochastic` goes up for odd experts."""
    if count % m_tile == 0 or (count // m_tile + 1) * m_tile > tokens:
        return count
    tiles = {
        "nearest": round(count / m_tile),  # half to even
        "up": count // m_tile + 1,
        "down": count // m_tile,
        "stochastic": count // m_tile + expert % 2,
    }[method]
    return tiles * m_tile


def plain_targets(counts: list[int], tokens: int, m_tile: int, method: str) -> list[int]:
    if method != "balanced":
        return [plain_target(count, tokens, m_tile, method, e) for e, count in enumerate(counts)]
    targets = [plain_target(count, tokens, m_tile, "down", e) for e, count in enumerate(counts)]
    left = [count - target for count, target in zip(counts, targets, strict=True)]
    ups = min(range(len(counts)), key=lambda number: abs(sum(left) - number * m_tile))
    for e in sorted(range(len(counts)), key=lambda e: -left[e])[:ups]:
        targets[e] += m_tile
    return targets


def plain_rounding(logits: Tensor, point: Point, ranks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which pairs are of top-K and which are kept, (T, E) bool each.

    Args:
        ranks: (T, E), what experts rank tokens by, in place of a chosen pair's weight and another's p.
    """
    T, E = logits.shape
    chosen, kept = (torch.zeros(T, E, dtype=torch.bool) for _ in range(2))
    for t, row in enumerate(logits.tolist()):
        chosen[t, sorted(range(E), key=lambda e, row=row: -row[e])[: point.shape.K]] = True  # type: ignore[misc]
    if ranks is None:
        ranks = torch.softmax(logits.double(), 1)
        if point.layer.router_convention != "softmax_topk":
            ranks = torch.where(chosen, ranks / (ranks * chosen).sum(1, keepdim=True), ranks)
    targets = plain_targets(chosen.sum(0).tolist(), T, point.routing.m_tile, point.routing.method)
    for e, target in enumerate(targets):
        first, rank = chosen[:, e].tolist(), ranks[:, e].tolist()
        kept[sorted(range(T), key=lambda t, f=first, r=rank: (not f[t], -r[t]))[:target], e] = True  # type: ignore[misc]
    return chosen, kept


def indices_of(chosen: Tensor) -> Tensor:
    return chosen.nonzero()[:, 1].view(len(chosen), -1)


def pairs_of(kept: Tensor) -> tuple[Tensor, Tensor]:
    offsets = torch.zeros(len(kept) + 1, dtype=torch.int32)
    offsets[1:] = kept.sum(1).cumsum(0)
    return kept.nonzero()[:, 1].int(), offsets


class PlainRounded(RightLayer):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.point = problem.point

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.router.T

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return plain_rounding(self.logits(x.detach()), self.point)

    def divisors(self, p: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        return (p * chosen).sum(1, keepdim=True)

    def weights(self, logits: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        p = torch.softmax(logits, 1)
        return kept * (p if self.convention == "softmax_topk" else p / self.divisors(p, chosen, kept))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(self.logits(x), *self.select(x))
        out = torch.zeros_like(x)
        experts = zip(self.gate.unbind(), self.up.unbind(), self.down.unbind(), strict=True)
        for e, (gate, up, down) in enumerate(experts):
            out = out + weights[:, e, None] * self.expert(e, x, gate, up, down)
        return out

    def expert_indices(self, x: Tensor) -> Tensor:
        return indices_of(self.select(x)[0])

    def kept_pairs(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        return pairs_of(self.select(x)[1])


# Right layers


def passes(layer: Layer, problem: Problem) -> Correctness:
    found = OPERATION.check(layer, problem)
    assert found.reason is None, found.reason
    assert found.counts is not None
    return found


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


class SumsOverKeptPairs(PlainRounded):
    def divisors(self, p: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        return torch.where(kept, p, 0).sum(1, keepdim=True) + ~kept.any(1, keepdim=True)


class GradientOfSumsOverKeptPairs(SumsOverKeptPairs):
    """Right weights, with that gradient."""

    def divisors(self, p: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        right, wrong = PlainRounded.divisors(self, p, chosen, kept), super().divisors(p, chosen, kept)
        return right.detach() + wrong - wrong.detach()


class SumsAreConstants(PlainRounded):
    def divisors(self, p: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        return super().divisors(p, chosen, kept).detach()


class AddedPairsWeighP(PlainRounded):
    def weights(self, logits: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        return torch.where(kept & ~chosen, torch.softmax(logits, 1), super().weights(logits, chosen, kept))


class AddedPairsAreConstants(PlainRounded):
    def weights(self, logits: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        weights = super().weights(logits, chosen, kept)
        return torch.where(kept & ~chosen, weights.detach(), weights)


class DropsKeepTheirGradient(PlainRounded):
    """Of the pairs that top-K chose, dropped ones get a gradient as if they were there."""

    def weights(self, logits: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        dropped = super().weights(logits, chosen, chosen & ~kept)
        return super().weights(logits, chosen, kept) + dropped - dropped.detach()


class OneAddedPairIsMissing(PlainRounded):
    def weights(self, logits: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        t, e = (kept & ~chosen).nonzero()[0].tolist()
        kept = kept.clone()
        kept[t, e] = False
        return super().weights(logits, chosen, kept)


class ComputesTopK(PlainRounded):
    """And tells what it should have computed."""

    def weights(self, logits: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        return super().weights(logits, chosen, chosen)


class TellsTopK(ComputesTopK):
    """Consistent with itself."""

    def kept_pairs(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        return pairs_of(self.select(x)[0])


class RoundsTheOtherWay(PlainRounded):
    """Consistent with itself."""

    def select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        method = {"up": "down", "down": "up"}.get(self.point.routing.method, "down")
        point = replace(self.point, routing=replace(self.point.routing, method=method))
        return plain_rounding(self.logits(x.detach()), point)


class TellsNothing(PlainRounded):
    def kept_pairs(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        return None


class RoundsTheFirstCall(PlainRounded):
    """Computes for ever what it chose in its first call, and tells what it should have chosen."""

    first: tuple[Tensor, Tensor] | None = None

    def weights(self, logits: Tensor, chosen: Tensor, kept: Tensor) -> Tensor:
        self.first = self.first or (chosen, kept)
        return super().weights(logits, *self.first)


class GradientsOfExpertsRoundedToNothing(PlainRounded):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        empty = right["grad_up"].abs().amax((1, 2)) == 0
        right["grad_up"] = right["grad_up"].clone()
        right["grad_up"][empty, 0, 0] = 1e-30
        return right


class OverwritesX(PlainRounded):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x.clone())
        x.data[0, 0] += 1e-2
        return out


class TellsPairsOfAnotherShape(PlainRounded):
    def kept_pairs(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        experts, offsets = pairs_of(self.select(x)[1])
        return experts, offsets[1:]


class LeaksIntoTokensAlone(PlainRounded):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-9


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


def top_k_of(problem: Problem) -> Tensor:
    return top_k(problem.x @ problem.router.T, problem.shape.K).experts


# The check of what was kept


def planted(logits: Tensor, point: Point) -> Problem:
    """A problem whose router gives exactly these logits."""
    problem = make_problem(point, "cpu")
    problem.router.copy_(torch.eye(*problem.router.shape))
    problem.x[:, : logits.shape[1]] = logits
    return problem


def verdict(problem: Problem, chosen: Tensor, kept: Tensor) -> str | None:
    return check_rounding(problem, indices_of(chosen), *pairs_of(kept))


def chosen_and_kept(problem: Problem, ranks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return plain_rounding(problem.x @ problem.router.T, problem.point, ranks)


def falling(experts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    offsets[3] = offsets[-1]
    return experts, offsets


def late(experts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    offsets[0] = 1
    return experts, offsets


def short(experts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return experts[:-1], offsets


def too_large(experts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    experts[5] = 6
    return experts, offsets


def negative(experts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    experts[-1] = -1
    return experts, offsets


def twice(experts: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    first = int(offsets[int((offsets.diff() > 1).nonzero()[0])])
    experts[first + 1] = experts[first]
    return experts, offsets


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (falling, "the kept pairs' offsets do not rise from 0 to P = {P}"),
        (late, "the kept pairs' offsets do not rise from 0 to P = {P}"),
        (short, "the kept pairs' offsets do not rise from 0 to P = {less}"),
        (lambda experts, offsets: (experts[:, None], offsets), "kept pairs have shapes ({P}, 1) and (41,), expected"),
        (lambda experts, offsets: (experts, offsets[1:]), "shapes ({P},) and (40,), expected (P,) and (41,)"),
        (lambda experts, offsets: (experts, offsets[None]), "shapes ({P},) and (1, 41), expected (P,) and (41,)"),
        (too_large, "a kept pair's expert is out of range"),
        (negative, "a kept pair's expert is out of range"),
        (twice, "a token has one expert twice among its kept pairs"),
    ],
)
@pytest.mark.parametrize("method", ROUNDINGS)
def test_pairs_that_are_none_are_refused(
    method: str, plant: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], sentence: str
) -> None:
    problem = make_problem(rounded(method=method), "cpu")
    chosen, kept = chosen_and_kept(problem)
    assert check_rounding(problem, indices_of(chosen), *pairs_of(kept)) is None
    reason = check_rounding(problem, indices_of(chosen), *plant(*pairs_of(kept)))
    P = int(kept.sum())
    assert reason and sentence.format(P=P, less=P - 1) in reason, reason


@pytest.mark.parametrize("method", ROUNDINGS)
def test_another_number_of_tokens_is_refused(method: str) -> None:
    problem = make_problem(rounded(method=method), "cpu")
    chosen, kept = chosen_and_kept(problem)
    counts, found = chosen.sum(0).tolist(), kept.sum(0).tolist()
    for expert in range(6):
        for more in (True, False):
            if not bool((kept[:, expert] != more).any()):
                continue
            spoilt = kept.clone()
            spoilt[int((kept[:, expert] != more).nonzero()[0]), expert] = more
            both = sorted({plain_target(counts[expert], 40, 8, way, 0) for way in ("down", "up")})
            wanted = " or ".join(map(str, both if method == "stochastic" and len(both) > 1 else [found[expert]]))
            if method == "stochastic" and len(both) == 1:
                wanted = f"{both[0]} or {both[0]}"
            assert verdict(problem, chosen, spoilt) == (
                f"1 experts keep another number of tokens than {method} gives: "
                f"expert {expert} {found[expert] + (1 if more else -1)} of {counts[expert]}, expected {wanted}"
            )


def test_the_sum_over_experts_is_not_enough() -> None:
    """A pair handed from one expert to another."""
    problem = make_problem(rounded(), "cpu")
    chosen, kept = chosen_and_kept(problem)
    token = int((kept[:, 2] & ~kept[:, 4]).nonzero()[0])
    kept[token, 2], kept[token, 4] = False, True
    reason = verdict(problem, chosen, kept)
    assert reason and reason.startswith("2 experts keep another number of tokens than nearest gives: expert 2 ")


@pytest.mark.parametrize("method", [m for m in ROUNDINGS if m != "stochastic"])
def test_the_numbers_of_other_roundings_are_refused(method: str) -> None:
    problem = make_problem(rounded(method=method), "cpu")
    targets = chosen_and_kept(problem)[1].sum(0)
    differ = 0
    for other in ROUNDINGS:
        point = replace(problem.point, routing=replace(problem.point.routing, method=other))
        chosen, kept = plain_rounding(problem.x @ problem.router.T, point)
        reason = verdict(problem, chosen, kept)
        differ += not torch.equal(kept.sum(0), targets)
        assert (reason is None) == torch.equal(kept.sum(0), targets)
    assert differ >= 2


def test_stochastic_may_go_either_way_but_nowhere_else() -> None:
    problem = make_problem(rounded(method="stochastic"), "cpu")
    taken = set()
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        routing = token_rounding(problem.x @ problem.router.T, 2, 8, "stochastic", generator=generator)
        indices = top_k_of(problem).view(-1, 2)
        assert check_rounding(problem, indices, routing.experts, routing.token_offsets) is None
        taken.add(tuple(torch.bincount(routing.experts, minlength=6).tolist()))
    assert len(taken) > 2


def exchange(kept: Tensor, expert: int, out: int, into: int) -> Tensor:
    assert kept[out, expert] and not kept[into, expert]
    kept = kept.clone()
    kept[out, expert], kept[into, expert] = False, True
    return kept


def by_rank(mask: Tensor, ranks: Tensor) -> list[int]:
    """The tokens of a mask (T,), best first."""
    return sorted(mask.nonzero()[:, 0].tolist(), key=lambda t: -float(ranks[t]))


DROPS = "an expert drops a chosen token of more weight than one that it keeps"
ADDS = "an expert adds a token of less weight than one that it leaves"


@pytest.mark.parametrize("method", ROUNDINGS)
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_planted_exchanges_are_refused(convention: str, method: str) -> None:
    problem = make_problem(rounded("80,16,8,6,2", method, convention=convention), "cpu")
    chosen, kept = chosen_and_kept(problem)
    assert verdict(problem, chosen, kept) is None
    p = torch.softmax(problem.x @ problem.router.T, 1)
    weights = p if convention == "softmax_topk" else p / (p * chosen).sum(1, keepdim=True)
    dropped, added = chosen & ~kept, kept & ~chosen
    found = set()
    for e in range(6):
        mine, others = chosen[:, e] & kept[:, e], ~chosen[:, e] & ~kept[:, e]
        if bool(others.any()) and bool(mine.any()):
            spoilt = exchange(kept, e, int(mine.nonzero()[0]), int(others.nonzero()[0]))
            assert verdict(problem, chosen, spoilt) == "1 experts drop chosen tokens and add others"
            found.add("both")
        if bool(dropped[:, e].any()):
            best, worst = by_rank(mine, weights[:, e])[0], by_rank(dropped[:, e], weights[:, e])[-1]
            assert verdict(problem, chosen, exchange(kept, e, best, worst)) == DROPS
            found.add("drops")
        if bool(added[:, e].any()):
            best, worst = by_rank(added[:, e], p[:, e])[0], by_rank(others, p[:, e])[-1]
            assert verdict(problem, chosen, exchange(kept, e, best, worst)) == ADDS
            # A chosen token given up for one of the others, where it adds already.
            spoilt = exchange(kept, e, by_rank(mine, weights[:, e])[-1], by_rank(others, p[:, e])[0])
            assert verdict(problem, chosen, spoilt) == "1 experts drop chosen tokens and add others"
            found.add("adds")
    assert found >= {"both", *{"up": {"adds"}, "down": {"drops"}}.get(method, {"drops", "adds"})}


def own_ranks(logits: Tensor, chosen: Tensor) -> dict[str, Tensor]:
    p = torch.softmax(logits.double(), 1)
    share = p / (p * chosen).sum(1, keepdim=True)
    return {"logit": logits.double(), "p": p, "share": share, "ranks of the paper": torch.where(chosen, share, p)}


@pytest.mark.parametrize(
    ("convention", "method", "right"),
    [
        ("topk_softmax", "down", {"share", "ranks of the paper"}),
        ("softmax_topk_renormalised", "down", {"share", "ranks of the paper"}),
        ("softmax_topk", "down", {"p"}),
        ("topk_softmax", "up", {"p", "ranks of the paper"}),
        ("softmax_topk_renormalised", "up", {"p", "ranks of the paper"}),
        ("softmax_topk", "up", {"p", "ranks of the paper"}),
    ],
)
def test_tokens_ranked_by_anything_else_are_refused(convention: str, method: str, right: set[str]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(160, 6, generator=generator) + torch.randn(160, 1, generator=generator)
    problem = planted(logits, rounded("160,16,8,6,2", method, 32, convention=convention))
    chosen, _ = chosen_and_kept(problem)
    for name, ranks in own_ranks(logits, chosen).items():
        reason = verdict(problem, *chosen_and_kept(problem, ranks))
        assert reason == (None if name in right else ADDS if method == "up" else DROPS), name


def logits_of(p: list[float]) -> Tensor:
    """(T, 3) logits, the largest magnitude 4, that give the first of three experts these probabilities; the second has
    most of the rest."""
    first = [math.log(value * (1 + math.exp(-4.0)) / (1 - value)) for value in p]
    return torch.tensor([[value, 0.0, -4.0] for value in first])


@pytest.mark.parametrize(("ratio_of_weights", "refused"), [(1.0, False), (1.1, False), (1.16, True), (1.5, True)])
@pytest.mark.parametrize("method", ["up", "down"])
def test_only_what_rounding_logits_may_move_is_a_tie(method: str, ratio_of_weights: float, refused: bool) -> None:
    """Logits of magnitude 4 may be off by 2^-7 of it, and so may the logarithm of their sum, for both tokens: 0.125."""
    if method == "down":
        # Twelve tokens choose the first expert, which keeps eight: the last of these weighs less than the next.
        p = [0.9] * 7 + [0.55, 0.55 * ratio_of_weights] + [0.52] * 3 + [0.2] * 4
    else:
        # Four choose it, and it adds four: the last of these weighs less than the first of those left.
        p = [0.9] * 4 + [0.45] * 3 + [0.15, 0.15 * ratio_of_weights] + [0.05] * 7
    problem = planted(logits_of(p), rounded("16,16,8,3,1", method, 8, convention="softmax_topk"))
    found = torch.softmax(problem.x @ problem.router.T, 1)[:, 0]
    torch.testing.assert_close(found, torch.tensor(p), rtol=1e-5, atol=1e-6)
    chosen, right = chosen_and_kept(problem)
    assert int(chosen[:, 0].sum()) == (12 if method == "down" else 4) and int(right[:, 0].sum()) == 8
    kept = right.clone()
    kept[:, 0] = False
    kept[:8, 0] = True
    assert (not torch.equal(kept, right)) == (ratio_of_weights > 1)
    assert verdict(problem, chosen, kept) == ((ADDS if method == "up" else DROPS) if refused else None)


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("method", [m for m in ROUNDINGS if m != "stochastic"])
def test_what_logits_in_bf16_select_is_accepted(method: str, convention: str) -> None:
    differ = 0
    for seed in range(4):
        problem = make_problem(rounded("512,16,8,8,2", method, 32, convention=convention, seed=seed), "cpu")
        exact = problem.x @ problem.router.T
        routings = [token_rounding(logits, 2, 32, method, convention) for logits in (exact, exact.bfloat16())]
        indices = top_k(exact.bfloat16(), 2).experts.view(-1, 2)
        assert check_rounding(problem, indices, routings[1].experts, routings[1].token_offsets) is None
        masks = [torch.zeros(512, 8, dtype=torch.bool) for _ in range(2)]
        for mask, routing in zip(masks, routings, strict=True):
            mask[kept_tokens(routing.token_offsets), routing.experts.long()] = True
        differ += not torch.equal(*masks)
    assert differ


@pytest.mark.parametrize("method", ROUNDINGS)
def test_tied_tokens_pass(method: str) -> None:
    for convention in ROUTER_CONVENTIONS:
        for dtype in ("float32", "bfloat16"):
            problem = make_problem(rounded(method=method, convention=convention, dtype=dtype), "cpu")
            problem.x[::2] = 0
            problem.x[3::4] = problem.x[1::4].clone()
            passes(LOOP.build(problem), problem)


@pytest.mark.parametrize(("size", "method"), [(1e-6, "up"), (1e-6, "down"), (300.0, "up")])
def test_p_that_fp32_cannot_tell_apart_is_a_tie(size: float, method: str) -> None:
    """Logits near zero, whose p differ by less than fp32 holds; logits so far apart that p is zero."""
    for convention in ROUTER_CONVENTIONS:
        logits = torch.randn(256, 8, generator=torch.Generator().manual_seed(2)) * size
        problem = planted(logits, rounded("256,16,8,8,2", method, 32, convention=convention))
        routing = routing_of(problem)
        indices = top_k_of(problem).view(-1, 2)
        assert check_rounding(problem, indices, routing.experts, routing.token_offsets) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", ROUNDINGS)
def test_a_token_that_is_not_finite_hides_nothing_and_accuses_nobody(method: str, value: float) -> None:
    for convention in ROUTER_CONVENTIONS:
        problem = make_problem(rounded("80,16,8,6,2", method, convention=convention), "cpu")
        problem.x[7, 3] = value
        logits = problem.x @ problem.router.T
        assert bool(logits[:7].isfinite().all()) and not bool(logits[7].isfinite().any())
        routing = routing_of(problem)
        indices = top_k(logits, 2).experts.view(-1, 2)
        pairs = routing.experts, routing.token_offsets
        assert check_rounding(problem, indices, *pairs) is None
        # The same of other tokens is still refused, in every expert.
        kept, chosen = (torch.zeros(80, 6, dtype=torch.bool) for _ in range(2))
        kept[kept_tokens(routing.token_offsets), routing.experts.long()] = True
        chosen.scatter_(1, indices.long(), True)
        p = torch.softmax(logits, 1)
        weights = p if convention == "softmax_topk" else p / (p * chosen).sum(1, keepdim=True)
        finite = torch.arange(80) != 7
        done = ranked = 0
        for e in range(6):
            dropped, added = chosen[:, e] & ~kept[:, e] & finite, kept[:, e] & ~chosen[:, e] & finite
            mine, others = chosen[:, e] & kept[:, e] & finite, ~chosen[:, e] & ~kept[:, e] & finite
            if bool(dropped.any()) and bool(mine.any()):
                best, worst = by_rank(mine, weights[:, e])[0], by_rank(dropped, weights[:, e])[-1]
                assert verdict(problem, chosen, exchange(kept, e, best, worst)) == DROPS
                done += 1
            if bool(added.any()) and bool(others.any()):
                best, worst = by_rank(added, p[:, e])[0], by_rank(others, p[:, e])[-1]
                assert verdict(problem, chosen, exchange(kept, e, best, worst)) == ADDS
                done += 1
            # Where it is ranked is not judged.
            for out, ranks in ((mine, weights), (added, p)):
                given = chosen[7, e] if out is mine else not chosen[7, e]
                if given and not kept[7, e] and bool(out.any()):
                    assert verdict(problem, chosen, exchange(kept, e, by_rank(out, ranks[:, e])[-1], 7)) is None
                    ranked += 1
        assert done >= 3 and ranked


# What rows say


def outcome(method: str) -> dict[str, int]:
    """What must come of a method's routing of `rounded()`'s tokens, from the selection in plain Python."""
    problem = make_problem(rounded(method=method if method != TOP_K else "up"), "cpu")
    chosen, kept = chosen_and_kept(problem)
    kept = chosen if method == TOP_K else kept
    counts = kept.sum(0).tolist()
    return {
        "routed_rows": sum(counts),
        "padded_rows": sum(-(-count // 8) * 8 for count in counts),
        "dropped": int((chosen & ~kept).sum()),
        "added": int((kept & ~chosen).sum()),
        "empty_experts": counts.count(0),
    }


def rows_of(point: Point, implementation: Implementation = LOOP) -> list[dict[str, Any]]:
    base = {"schema": 1, "record": "measurement", "run_id": "r", "sweep": "s", "implementation": "torch_loop"}
    bases = {pass_: {**base, "label": "L", "pass": pass_} for pass_ in PASSES}
    context = Context(lambda _: None, TimingSettings(min_samples=2, max_samples=2, time_limit_s=0.1))
    rows = list(measure_point(point, PASSES, implementation, bases, context))
    assert [check(row)["pass"] for row in rows] == list(PASSES)
    return rows


@pytest.mark.parametrize("method", ["nearest", "up", "down", "balanced"])
def test_a_row_says_what_came_of_the_rounding(method: str) -> None:
    told, plain = outcome(method), outcome(TOP_K)
    assert told["routed_rows"] == told["padded_rows"]
    assert bool(told["dropped"]) == (method != "up") and bool(told["added"]) == (method != "down")
    more = told["routed_rows"] - plain["routed_rows"]
    assert more or method == "balanced"
    rows, before = rows_of(rounded(method=method)), rows_of(rounded(method=TOP_K))
    # Of each row more, forward: H and A written, A read; Y written and read. Backward: H, A', dH; A'; dH, dX~
    # twice; dH.
    for row, own, gemms, elements in zip(rows, before, (3, 6), (4 * 8 + 2 * 16, 10 * 8 + 2 * 16), strict=True):
        assert row["status"] == "ok", row["reason"]
        assert row["routing"] == {**asdict(rounded(method=method).routing), **told}
        assert own["routing"] == {**asdict(rounded(method=TOP_K).routing), **plain}
        assert row["costs"]["flops"] == 2 * gemms * told["routed_rows"] * 8 * 16
        assert own["costs"]["flops"] == 2 * gemms * 80 * 8 * 16
        assert row["costs"]["algorithm_bytes"] - own["costs"]["algorithm_bytes"] == 4 * more * elements
        assert row["costs"]["boundary_bytes"] == own["costs"]["boundary_bytes"]
        assert "grad_router" in row["correctness"]["relative_l2"]


def test_a_stochastic_row_says_how_it_draws() -> None:
    for row in rows_of(rounded(method="stochastic")):
        assert row["notes"] == ["stochastic rounding draws the same numbers in every call"]
        routing = row["routing"]
        assert routing["routed_rows"] == routing["padded_rows"] == 80 - routing["dropped"] + routing["added"]
        assert routing["dropped"] or routing["added"]


class Plain(Implementation):
    """Another implementation than the loop; of one method another layer where told so."""

    name = label = "plain"
    upstream = licence = "this test"
    devices = ("cpu",)
    dtypes = ("float32",)
    routing_methods = (TOP_K, *ROUNDINGS)

    def __init__(self, wrong_method: str = "", wrong: type[PlainRounded] = TellsNothing) -> None:
        self.wrong_method, self.wrong = wrong_method, wrong

    def build(self, problem: Problem) -> Layer:
        method = problem.point.routing.method
        if method == self.wrong_method:
            return self.wrong(problem)
        return RightLayer(problem) if method == TOP_K else PlainRounded(problem)


class NoGradientOfUp(PlainRounded):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        del right["grad_up"]
        return right


@pytest.mark.parametrize("wrong", [TellsNothing, SumsOverKeptPairs, NoGradientOfUp])
def test_a_wrong_layer_gets_a_row_without_numbers(wrong: type[PlainRounded]) -> None:
    for row in rows_of(rounded(), Plain("nearest", wrong)):
        assert row["status"] == "wrong_result" and row["reason"] and "latency_ms" not in row
        assert row["routing"]["method"] == "nearest"


@pytest.fixture
def layers_ratio(ratio: Ratio, monkeypatch: pytest.MonkeyPatch) -> Ratio:
    """`ratio` of this operation's points."""
    monkeypatch.setattr(test_method_ratios, "routed", rounded)
    return ratio


def test_its_points_are_layers(layers_ratio: Ratio) -> None:
    for row in layers_ratio(TOP_K, "nearest"):
        assert row["operation"] == "moe_layer" and "grad_router" in str(row["correctness"])


@pytest.mark.parametrize(("method", "other"), [(TOP_K, "nearest"), ("down", "up"), ("nearest", TOP_K)])
def test_a_ratio_of_two_methods_says_what_came_of_both(
    layers_ratio: Ratio,
    seen: list[Sequence[Problem]],
    method: str,
    other: str,
) -> None:
    assert outcome(method)["routed_rows"] != outcome(other)["routed_rows"]
    for row in layers_ratio(method, other):
        assert row["status"] == "ok" and row["value"] > 0
        assert row["routing"] == {**asdict(rounded(method=method).routing), **outcome(method)}
        assert row["denominator_routing"] == {**asdict(rounded(method=other).routing), **outcome(other)}
        assert list(row["correctness"]) == [f"torch_loop ({method})", f"torch_loop ({other})"]
    # Both layers saw the same tensors.
    assert len(seen) == 2 and seen[0] is seen[1]


def test_a_ratio_of_one_method_has_no_second_routing(layers_ratio: Ratio) -> None:
    for row in layers_ratio("nearest", "nearest", denominator=Plain()):
        assert "denominator_routing" not in row
        assert row["routing"] == {**asdict(rounded().routing), **outcome("nearest")}
        assert list(row["correctness"]) == ["torch_loop", "plain"]


def test_a_ratio_of_top_k_alone_has_nothing_to_tell(layers_ratio: Ratio) -> None:
    for row in layers_ratio(TOP_K, TOP_K, denominator=Plain()):
        assert "denominator_routing" not in row and row["routing"] == asdict(rounded(method=TOP_K).routing)


@pytest.mark.parametrize("wrong", [TellsNothing, SumsOverKeptPairs, NoGradientOfUp])
@pytest.mark.parametrize("methods", [(TOP_K, "nearest"), ("nearest", TOP_K)])
def test_the_side_that_is_wrong_is_named(
    layers_ratio: Ratio, methods: tuple[str, str], wrong: type[PlainRounded]
) -> None:
    layer = Plain("nearest", wrong)
    for row in layers_ratio(*methods, numerator=layer, denominator=layer):
        assert row["status"] == "wrong_result" and "value" not in row
        assert row["reason"].startswith("plain (nearest): ") and "(top_k)" not in row["reason"]
        assert row["routing"]["method"] == methods[0] and row["denominator_routing"]["method"] == methods[1]


# Who offers it


def on(plugin: Implementation, point: Point) -> Point:
    """The point where the plugin would run it."""
    return replace(point, device=plugin.devices[0], dtype=plugin.dtypes[0])


def test_plugins_refuse_the_methods_that_they_do_not_offer_in_words() -> None:
    refused = set()
    for plugin in REGISTRY.all():
        if "moe_layer" not in plugin.operations:
            continue
        assert TOP_K in plugin.routing_methods and set(plugin.routing_methods) <= {TOP_K, *ROUNDINGS}
        for method in METHODS:
            reason = plugin.unsupported_reason(on(plugin, rounded("64,64,64,8,2", method)))
            if method not in plugin.routing_methods:
                assert reason == f"{plugin.label} has no moe_layer with the routing method {method}"
                refused.add(plugin.name)
            else:
                assert reason is None or "routing method" not in reason
    assert len(refused) > 3


def test_a_plugin_offers_top_k_unless_it_says_more() -> None:
    class Silent(Plain):
        routing_methods = Implementation.routing_methods  # type: ignore[assignment]

    assert Silent().unsupported_reason(rounded(method=TOP_K)) is None
    for method in METHODS[1:]:
        reason = Silent().unsupported_reason(rounded(method=method))
        assert reason == f"plain has no moe_layer with the routing method {method}"


def test_the_loop_offers_every_rounding_and_nothing_else() -> None:
    for method in METHODS:
        for device in ("cpu", "cuda"):
            reason = LOOP.unsupported_reason(replace(rounded(method=method), device=device))
            assert (reason is None) == (method in (TOP_K, *ROUNDINGS)), method
        # It is handed a routing there, by any method.
        assert LOOP.unsupported_reason(replace(rounded(method=method), operation="routed_experts")) is None


def test_a_bound_has_top_k_alone() -> None:
    bound = REGISTRY.get("cublas_bound")
    for method in METHODS:
        point = on(bound, replace(rounded("64,64,64,8,2", method), operation="dense_bound", variant="gemm"))
        sentence = f"{bound.label} has no dense_bound with the routing method {method}"
        assert bound.unsupported_reason(point) == (None if method == TOP_K else sentence)

    class Boasting(Plain):
        """Its layers' methods are not its bound's."""

        operations = ("moe_layer", "dense_bound")

    assert Boasting().unsupported_reason(rounded()) is None
    assert "no dense_bound" in str(Boasting().unsupported_reason(replace(rounded(), operation="dense_bound")))


def test_the_loop_builds_a_layer_of_the_points_method() -> None:
    problem = make_problem(rounded(), "cpu")
    plain = replace(problem, point=rounded(method=TOP_K))
    outputs = [LOOP.build(its).forward(problem.x) for its in (problem, plain)]
    assert LOOP.build(plain).kept_pairs(problem.x) is None and not torch.equal(*outputs)


@pytest.mark.parametrize("method", METHODS)
def test_points_survive_the_pipe(method: str) -> None:
    point = rounded(method=method, m_tile=64)
    assert point_from_dict(point_to_dict(point)) == point


# Sweeps


def test_a_sweep_takes_the_roundings_of_a_layer(tmp_path: Path) -> None:
    methods = ", ".join(f'"{method}"' for method in (TOP_K, *ROUNDINGS))
    text = f'[[points]]\nimplementations = "torch_loop"\nshapes = ["one"]\nm_tile = 16\nmethods = [{methods}]\n'
    for operation in ("", 'operation = "moe_layer"\n'):
        points = load(tmp_path, METHODS_HEAD + text + operation).points
        assert [point.routing.method for point in points] == [TOP_K, *ROUNDINGS]
        assert {(point.operation, point.routing.m_tile) for point in points} == {("moe_layer", 16)}


#: Every sweep with ratios needs one of an implementation with itself.
A_A = """
[[ratios]]
numerator = "torch_loop"
denominator = "torch_loop"
shapes = ["one"]
"""


def test_a_sweep_takes_ratios_of_a_layers_roundings(tmp_path: Path) -> None:
    text = """
[[ratios]]
numerator = "torch_loop"
denominator = "sonicmoe_triton"
shapes = ["one"]
methods = ["top_k", "nearest"]
denominator_method = "nearest"
"""
    _, first, second = load(tmp_path, METHODS_HEAD + A_A + text).ratios
    assert (first.point.operation, first.point.routing.method) == ("moe_layer", TOP_K)
    assert first.denominator_point.routing.method == second.denominator_point.routing.method == "nearest"
    assert second.point.routing.method == "nearest"
    # And one of a rounding without a method of the denominator's own.
    text = text.replace('"top_k", ', "").replace("denominator_method", "#")
    _, alone = load(tmp_path, METHODS_HEAD + A_A + text).ratios
    assert alone.point.routing == alone.denominator_point.routing and alone.point.routing.method == "nearest"


TAKES = rf"moe_layer takes {', '.join((TOP_K, *ROUNDINGS))}, not "


@pytest.mark.parametrize("method", OTHERS)
def test_a_sweep_refuses_methods_that_are_no_roundings(tmp_path: Path, method: str) -> None:
    point = f'[[points]]\nimplementations = "torch_loop"\nshapes = ["one"]\nmethods = ["up", "{method}"]\n'
    with pytest.raises(UserError, match=rf"points\[1\].methods: {TAKES}{method}"):
        load(tmp_path, METHODS_HEAD + point)
    routed = point.replace("torch_loop", "sonicmoe_triton") + 'operation = "routed_experts"\n'
    assert load(tmp_path, METHODS_HEAD + routed).points
    head = '[[ratios]]\nnumerator = "torch_loop"\ndenominator = "torch_loop"\nshapes = ["one"]\n'
    for key in ("methods", "denominator_method"):
        with pytest.raises(UserError, match=rf"ratios\[1\].{key}: {TAKES}{method}"):
            load(tmp_path, METHODS_HEAD + head + f'{key} = "{method}"\n')


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_sweep_refuses_bounds_of_other_methods(tmp_path: Path, method: str) -> None:
    points = '[[points]]\noperation = "dense_bound"\nimplementations = "cublas_bound"\nshapes = ["one"]\n'
    assert load(tmp_path, METHODS_HEAD + points).points
    with pytest.raises(UserError, match=rf"points\[1\].methods: dense_bound takes top_k, not {method}"):
        load(tmp_path, METHODS_HEAD + points + f'methods = "{method}"\n')
    ratios = (
        A_A + '[[ratios]]\nnumerator = "torch_loop"\ndenominator = "cublas_bound"\nbound = "gemm"\nshapes = ["one"]\n'
    )
    assert load(tmp_path, METHODS_HEAD + ratios).ratios
    where = (
        rf"ratios\[2\].methods: {TAKES}" if method in OTHERS else r"ratios\[2\].bound: the bound multiplies T\*K rows"
    )
    for methods in (f'"{method}"', f'["top_k", "{method}"]'):
        with pytest.raises(UserError, match=where):
            load(tmp_path, METHODS_HEAD + ratios + f"methods = {methods}\n")
