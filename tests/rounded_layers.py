"""A layer with token rounding in plain Python, wrong ones made of it, and what tests of the gate need beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from conftest import RightLayer, point_of
from test_correctness_gate import GradientsOfEmptyExperts, InputChanged
from test_method_ratios import REGISTRY
from torch import Tensor

from harness.correctness import Correctness
from harness.interface import Implementation, Layer, Point, Problem
from harness.operations import get_operation
from harness.token_rounding import ROUNDINGS, TOP_K, GeneralRouting, token_rounding, top_k

OPERATION = get_operation("moe_layer")
LOOP = REGISTRY.get("torch_loop")


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


def passes(layer: Layer, problem: Problem) -> Correctness:
    found = OPERATION.check(layer, problem)
    assert found.reason is None, found.reason
    assert found.counts is not None
    return found


def chosen_and_kept(problem: Problem, ranks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return plain_rounding(problem.x @ problem.router.T, problem.point, ranks)


def top_k_of(problem: Problem) -> Tensor:
    return top_k(problem.x @ problem.router.T, problem.shape.K).experts


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


class GradientsOfExpertsRoundedToNothing(GradientsOfEmptyExperts, PlainRounded):
    """The same fault: an expert that rounding leaves without tokens is empty too."""


class OverwritesX(InputChanged, PlainRounded):
    """The same fault."""


class TellsPairsOfAnotherShape(PlainRounded):
    def kept_pairs(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        experts, offsets = pairs_of(self.select(x)[1])
        return experts, offsets[1:]


class LeaksIntoTokensAlone(PlainRounded):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-9


class NoGradientOfUp(PlainRounded):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        del right["grad_up"]
        return right


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
