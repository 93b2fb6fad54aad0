"""Token rounding and the other general routings: against plain Python lists, and property by property."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS
from harness.routing import expert_counts, router_scores
from harness.token_rounding import (
    ADDED_WEIGHTS,
    METHODS,
    ROUNDINGS,
    GeneralRouting,
    expert_choice,
    method_counts,
    round_counts,
    route_by,
    token_drop,
    token_rounding,
    top_k,
)

KINDS = ("normal", "few values", "constant", "equal rows", "skewed", "one expert", "underflowing")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
thorough = settings(max_examples=150, deadline=None)


class Case(NamedTuple):
    """logits (T, E) fp32, K and the tile; T, E and the generator that drew the logits."""

    logits: Tensor
    k: int
    m_tile: int
    generator: torch.Generator

    @property
    def tokens(self) -> int:
        return self.logits.shape[0]

    @property
    def experts(self) -> int:
        return self.logits.shape[1]


def logits_of(kind: str, tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(tokens, experts, generator=generator)
    if kind == "few values":
        return torch.randint(3, (tokens, experts), generator=generator).float()
    if kind == "constant":
        return torch.zeros(tokens, experts)
    if kind == "equal rows":  # whole tokens tie, with p that are all different
        return torch.randn(3, experts, generator=generator)[torch.randint(3, (tokens,), generator=generator)]
    if kind == "skewed":
        return normal - 0.7 * torch.arange(experts)
    if kind == "one expert":
        return normal + 8.0 * (torch.arange(experts) == experts // 2)
    return normal * 150.0 if kind == "underflowing" else normal


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens, experts = draw(st.integers(0, 40)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    logits = logits_of(draw(st.sampled_from(KINDS)), tokens, experts, generator)
    return Case(logits, draw(st.integers(1, experts)), draw(st.integers(1, 16)), generator)


def chosen_of(logits: Tensor, k: int) -> list[set[int]]:
    """Each token's top-K."""
    return [set(sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]) for row in logits.tolist()]


def frequencies(chosen: list[set[int]], experts: int) -> list[int]:
    return [sum(e in mine for mine in chosen) for e in range(experts)]


def p_and_weights(logits: Tensor, chosen: list[set[int]], convention: str) -> tuple[list[list[float]], ...]:
    """p and the weight of every pair, both rounded to fp32 as the routing's are, for ties depend on the rounding."""
    p = torch.softmax(logits, dim=1)
    mask = torch.tensor([[e in mine for e in range(logits.shape[1])] for mine in chosen], device=logits.device)
    if convention == "softmax_topk" or not chosen:
        return p.tolist(), p.tolist()
    return p.tolist(), (p / (p * mask).sum(1, keepdim=True)).tolist()


def is_exempt(count: int, tokens: int, m_tile: int) -> bool:
    return count % m_tile != 0 and math.ceil(count / m_tile) * m_tile > tokens


def rounded_reference(counts: list[int], tokens: int, m_tile: int, rounding: str) -> list[int]:
    """`round_counts`, but for ``stochastic``, which has no one answer."""
    down = [count // m_tile * m_tile for count in counts]
    free = [e for e, count in enumerate(counts) if count % m_tile and not is_exempt(count, tokens, m_tile)]
    up: set[int] = set()
    if rounding == "up":
        up = set(free)
    elif rounding == "nearest":
        up = {e for e in free if round(Fraction(counts[e], m_tile)) * m_tile > counts[e]}
    elif rounding == "balanced":
        left = sum(counts[e] % m_tile for e in free)
        number = min(range(len(free) + 1), key=lambda n: abs(n * m_tile - left))
        up = set(sorted(free, key=lambda e: (-(counts[e] % m_tile), e))[:number])
    return [
        count if is_exempt(count, tokens, m_tile) else down[e] + m_tile * (e in up) for e, count in enumerate(counts)
    ]


def selected_reference(
    case: Case, method: str, convention: str, targets: list[int], chosen: list[set[int]]
) -> set[tuple[int, int]]:
    """The kept pairs, from how many each expert keeps."""
    p, weights = p_and_weights(case.logits, chosen, convention)
    kept = set()
    for e, target in enumerate(targets):
        if method == "expert_choice":
            ranked = sorted(range(case.tokens), key=lambda t: (-p[t][e], t))
        else:
            mine = sorted((t for t in range(case.tokens) if e in chosen[t]), key=lambda t: (-weights[t][e], t))
            others = sorted((t for t in range(case.tokens) if e not in chosen[t]), key=lambda t: (-p[t][e], t))
            ranked = mine + others
        kept |= {(t, e) for t in ranked[:target]}
    return kept


def pairs_of(routing: GeneralRouting) -> list[tuple[int, int]]:
    """(token, expert) of every pair, in the routing's order."""
    offsets, experts = routing.token_offsets.tolist(), routing.experts.tolist()
    return [(t, e) for t, (a, b) in enumerate(itertools.pairwise(offsets)) for e in experts[a:b]]


def counts_of(routing: GeneralRouting, experts: int) -> list[int]:
    return expert_counts(routing.experts, experts).tolist()


# ---------------------------------------------------------------- against plain lists


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=80, deadline=None)
@given(
    case=cases(),
    convention=st.sampled_from(ROUTER_CONVENTIONS),
    added_weight=st.sampled_from(ADDED_WEIGHTS),
    factor=st.sampled_from((0.3, 0.5, 1.0, 1.25)),
)
def test_against_plain_lists(device, method, case, convention, added_weight, factor) -> None:
    case = case._replace(logits=case.logits.to(device))
    routing = route_by(case.logits, case.k, method, case.m_tile, convention, added_weight, factor, case.generator)
    chosen = chosen_of(case.logits, case.k)
    counts = frequencies(chosen, case.experts)
    mean = Fraction(case.tokens * case.k, case.experts)
    if method == "expert_choice":
        targets = [math.ceil(mean)] * case.experts
    elif method == "token_drop":
        targets = [min(count, math.ceil(Fraction(str(factor)) * mean)) for count in counts]
    elif method == "top_k":
        targets = counts
    elif method == "stochastic":
        targets = counts_of(routing, case.experts)
    else:
        targets = rounded_reference(counts, case.tokens, case.m_tile, method)
    kept = selected_reference(case, method, convention, targets, chosen)
    assert pairs_of(routing) == sorted(kept)
    before = {(t, e) for t, mine in enumerate(chosen) for e in mine}
    assert (routing.dropped, routing.added) == (len(before - kept), len(kept - before))
    raw = "softmax_topk" if method == "expert_choice" else convention
    p, weights = p_and_weights(case.logits, chosen, raw)
    expected = [(p if added_weight == "raw" and e not in chosen[t] else weights)[t][e] for t, e in sorted(kept)]
    assert routing.scores.tolist() == pytest.approx(expected, rel=1e-6)
    assert routing.scores.shape == routing.experts.shape
    assert routing.token_offsets.shape == (case.tokens + 1,)
    assert (routing.scores.dtype, routing.experts.dtype, routing.token_offsets.dtype) == (
        torch.float32,
        torch.int32,
        torch.int32,
    )
    assert {part.device.type for part in routing[:3]} == {device}


@pytest.mark.parametrize("rounding", [name for name in ROUNDINGS if name != "stochastic"])
@thorough
@given(counts=st.lists(st.integers(0, 60), max_size=9), spare=st.integers(0, 40), m_tile=st.integers(1, 16))
def test_rounded_counts_against_plain_lists(rounding, counts, spare, m_tile) -> None:
    tokens = max(counts, default=0) + spare
    found = round_counts(torch.tensor(counts, dtype=torch.int64), tokens, m_tile, rounding)
    assert found.dtype == torch.int64
    assert found.tolist() == rounded_reference(counts, tokens, m_tile, rounding)


# ---------------------------------------------------------------- counts, property by property


@pytest.mark.parametrize("rounding", ROUNDINGS)
@thorough
@given(case=cases())
def test_counts_are_multiples_less_than_a_tile_away(rounding, case) -> None:
    counts = frequencies(chosen_of(case.logits, case.k), case.experts)
    routing = token_rounding(case.logits, case.k, case.m_tile, rounding, generator=case.generator)
    for before, after in zip(counts, counts_of(routing, case.experts), strict=True):
        if before % case.m_tile == 0 or is_exempt(before, case.tokens, case.m_tile):
            assert after == before
        else:
            assert after % case.m_tile == 0 and 0 < abs(after - before) < case.m_tile
            assert rounding != "up" or after > before
            assert rounding != "down" or after < before


@thorough
@given(case=cases())
def test_balanced_total(case) -> None:
    chosen = chosen_of(case.logits, case.k)
    counts = frequencies(chosen, case.experts)
    found = counts_of(token_rounding(case.logits, case.k, case.m_tile, "balanced"), case.experts)
    # Exempt experts do not move, so the bound holds with them as well.
    assert 2 * abs(sum(found) - case.tokens * case.k) <= case.m_tile
    free = [e for e in range(case.experts) if counts[e] % case.m_tile and found[e] != counts[e]]
    remainders = {e: counts[e] % case.m_tile for e in free}
    for a, b in itertools.permutations(free, 2):
        if found[a] > counts[a] and found[b] < counts[b]:
            assert (remainders[a], -a) > (remainders[b], -b)


def test_half_way() -> None:
    counts = torch.tensor([4, 12, 20, 28, 3, 5])
    assert round_counts(counts, 100, 8, "nearest").tolist() == [0, 16, 16, 32, 0, 8]
    # Remainders 4, 4, 4, 4, 3, 5: three tiles and one row, so three go up: the 5, then the first of the 4s.
    assert round_counts(counts, 100, 8, "balanced").tolist() == [8, 16, 16, 24, 0, 8]
    # Remainders 6, 6: a tile and a half; of 8 and 16 rows the smaller.
    assert round_counts(torch.tensor([6, 6]), 100, 8, "balanced").tolist() == [8, 0]


def test_exempt_experts_keep_their_count_in_every_rounding() -> None:
    counts = torch.tensor([9, 3, 8, 16, 0])
    for rounding in ROUNDINGS:
        found = round_counts(counts, 15, 8, rounding, torch.Generator().manual_seed(0)).tolist()
        assert found[0] == 9 and found[2:] == [8, 16, 0] and found[1] in (0, 8)
    # T itself is a multiple that may be reached.
    assert round_counts(counts, 16, 8, "up").tolist() == [16, 8, 8, 16, 0]
    # The exempt remainder, 2, is no part of the budget: with it, 3 + 2 of 8 would make one more tile.
    assert round_counts(torch.tensor([10, 3]), 15, 8, "balanced").tolist() == [10, 0]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("m_tile", [8, 128])
def test_stochastic_expectation_is_the_count(seed, m_tile) -> None:
    draws = 20_000
    counts = torch.tensor([0, 1, m_tile // 2, m_tile - 1, m_tile, m_tile + 1, 3 * m_tile + m_tile // 4])
    generator = torch.Generator().manual_seed(seed)
    found = round_counts(counts.repeat(draws), 8 * m_tile, m_tile, "stochastic", generator).reshape(draws, -1)
    assert bool((found % m_tile == 0).all()) and int((found - counts).abs().max()) < m_tile
    fraction = (counts % m_tile) / m_tile
    deviation = m_tile * (fraction * (1 - fraction)).sqrt().double()
    error = found.double().mean(0) - counts
    assert error[deviation == 0].abs().max() == 0
    z = error / deviation * math.sqrt(draws)
    assert float(z[deviation > 0].abs().max()) < 4
    # Experts are drawn independently: the total varies as the experts' variances add up.
    assert float(found.sum(1).double().std()) == pytest.approx(float(deviation.square().sum().sqrt()), rel=0.04)


def test_stochastic_follows_the_generator() -> None:
    counts = torch.arange(100)
    first, again, other = (
        round_counts(counts, 1000, 16, "stochastic", torch.Generator().manual_seed(seed)).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other
    torch.manual_seed(7)
    default = round_counts(counts, 1000, 16, "stochastic").tolist()
    torch.manual_seed(7)
    assert default == round_counts(counts, 1000, 16, "stochastic").tolist()


@pytest.mark.parametrize("method", METHODS)
@thorough
@given(case=cases(), factor=st.sampled_from((0.1, 0.7, 1.0, 1.3)), seed=st.integers(0, 1000))
def test_method_counts_are_those_of_the_routing(method, case, factor, seed) -> None:
    counts = torch.tensor(frequencies(chosen_of(case.logits, case.k), case.experts))
    kept = counts.clone()
    found = method_counts(counts, case.tokens, case.k, method, case.m_tile, factor, torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed)
    routing = route_by(case.logits, case.k, method, case.m_tile, capacity_factor=factor, generator=generator)
    assert found.dtype == torch.int64
    assert found.tolist() == counts_of(routing, case.experts)
    found += 1
    assert torch.equal(counts, kept)  # the result is no view of the argument


def test_capacity_takes_the_factor_as_written() -> None:
    counts = torch.tensor([1000] + [0] * 9)
    # 1.1 in binary is above 1.1: rounded up without care, the capacity would be 111.
    assert method_counts(counts, 1000, 1, "token_drop", 1, 1.1).tolist()[0] == 110
    assert method_counts(counts, 1001, 1, "token_drop", 1, 1.0).tolist()[0] == 101
    assert method_counts(counts, 1001, 1, "expert_choice", 1, 7.0).tolist() == [101] * 10


# ---------------------------------------------------------------- selection, property by property


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@thorough
@given(case=cases())
def test_down_drops_only_the_chosen_of_least_weight(convention, case) -> None:
    chosen = chosen_of(case.logits, case.k)
    _, weights = p_and_weights(case.logits, chosen, convention)
    kept = set(pairs_of(token_rounding(case.logits, case.k, case.m_tile, "down", convention)))
    assert kept <= {(t, e) for t, mine in enumerate(chosen) for e in mine}
    for e in range(case.experts):
        mine = [t for t in range(case.tokens) if e in chosen[t]]
        stays = [(weights[t][e], -t) for t in mine if (t, e) in kept]
        goes = [(weights[t][e], -t) for t in mine if (t, e) not in kept]
        assert not stays or not goes or min(stays) > max(goes)


@thorough
@given(case=cases())
def test_up_keeps_the_chosen_and_adds_the_best_of_the_others(case) -> None:
    chosen = chosen_of(case.logits, case.k)
    p = torch.softmax(case.logits, dim=1).tolist()
    kept = set(pairs_of(token_rounding(case.logits, case.k, case.m_tile, "up")))
    assert kept >= {(t, e) for t, mine in enumerate(chosen) for e in mine}
    for e in range(case.experts):
        others = [t for t in range(case.tokens) if e not in chosen[t]]
        comes = [(p[t][e], -t) for t in others if (t, e) in kept]
        stays_out = [(p[t][e], -t) for t in others if (t, e) not in kept]
        assert not comes or not stays_out or min(comes) > max(stays_out)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(case=cases(), convention=st.sampled_from(ROUTER_CONVENTIONS))
@thorough
def test_tile_one_is_top_k(rounding, case, convention) -> None:
    rounded = token_rounding(case.logits, case.k, 1, rounding, convention, generator=case.generator)
    plain = top_k(case.logits, case.k, convention)
    assert all(torch.equal(a, b) for a, b in zip(rounded[:3], plain[:3], strict=True))
    assert rounded[3:] == plain[3:] == (0, 0)


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_top_k_weighs_as_the_router_does(convention) -> None:
    logits = torch.randn(30, 9, generator=torch.Generator().manual_seed(0))
    indices = torch.topk(logits, 4, dim=1).indices.sort(1).values
    routing = top_k(logits, 4, convention)
    assert routing.experts.reshape(30, 4).tolist() == indices.tolist()
    torch.testing.assert_close(routing.scores.reshape(30, 4), router_scores(logits, indices, convention))


def test_ties_go_to_the_lower_expert_and_the_lower_token() -> None:
    tied = torch.zeros(6, 4)
    assert pairs_of(top_k(tied, 2)) == [(t, e) for t in range(6) for e in (0, 1)]
    # Experts 0 and 1 have all six tokens: exempt from a tile of 4, since two tiles would be 8.
    assert counts_of(token_rounding(tied, 2, 4, "down"), 4) == [6, 6, 0, 0]
    # Of eight tokens they are not exempt: tokens 4 and 5 go.
    wider = torch.cat([tied, torch.tensor([[-9.0, -9.0, 0.0, 0.0]] * 2)])
    down = pairs_of(token_rounding(wider, 2, 4, "down"))
    assert [t for t, e in down if e == 0] == [0, 1, 2, 3]
    # Experts 2 and 3 have two tokens; the two that rounding up adds are the lowest of six tied ones.
    up = pairs_of(token_rounding(wider, 2, 4, "up"))
    assert [t for t, e in up if e == 2] == [0, 1, 6, 7]
    assert [t for t, e in pairs_of(expert_choice(tied, 2)) if e == 3] == [0, 1, 2]
    assert [t for t, e in pairs_of(token_drop(tied, 2, 0.5)) if e == 0] == [0, 1]


def test_chosen_come_before_others_of_larger_p() -> None:
    # Expert 1 is the second of token 0 with p of almost zero, and is no choice of tokens 1 and 2, with p near 1/3.
    logits = torch.tensor([[9.0, -9.0, -19.0], [0.2, 0.0, 0.1], [0.2, 0.0, 0.1], [0.2, 0.0, 0.1]])
    assert pairs_of(top_k(logits, 2))[:2] == [(0, 0), (0, 1)]
    up = pairs_of(token_rounding(logits, 2, 2, "up"))
    assert [t for t, e in up if e == 1] == [0, 1]
    # Expert choice has no such preference.
    assert [t for t, e in pairs_of(expert_choice(logits, 2)) if e == 1] == [1, 2, 3]


def test_order_follows_the_weight_of_the_convention() -> None:
    # Expert 0 is chosen by tokens 0..2; token 0 has the largest p but the least share of its top-2.
    logits = torch.tensor([[0.42, 0.40, 0.18], [0.40, 0.30, 0.30], [0.36, 0.20, 0.44], [0.1, 0.5, 0.4]]).log()
    assert 0.42 / 0.82 < 0.40 / 0.70 and 0.36 / 0.80 < 0.42 / 0.82
    renormalised = pairs_of(token_rounding(logits, 2, 2, "down"))
    raw = pairs_of(token_rounding(logits, 2, 2, "down", "softmax_topk"))
    assert [t for t, e in renormalised if e == 0] == [0, 1] == [t for t, e in raw if e == 0]
    one = token_drop(logits, 2, 0.375)
    assert [t for t, e in pairs_of(one) if e == 0] == [1]
    assert [t for t, e in pairs_of(token_drop(logits, 2, 0.375, "softmax_topk")) if e == 0] == [0]


# ---------------------------------------------------------------- weights


def test_both_weights_of_added_pairs() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.15, 0.25, 0.6]], dtype=torch.float64)
    logits = p.log().float()
    # Top-1 gives experts 1 and 2 one token each; to fill a tile of 2, they add token 1 and token 2, both with p 0.3.
    for added_weight, added in (("renormalised", (0.3 / 0.6, 0.3 / 0.5)), ("raw", (0.3, 0.3))):
        routing = token_rounding(logits, 1, 2, "up", added_weight=added_weight)
        pairs = pairs_of(routing)
        assert pairs == [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 2)]
        assert routing.scores.tolist() == pytest.approx([1.0, 1.0, added[0], 1.0, added[1], 1.0], rel=1e-5)
        assert (routing.dropped, routing.added) == (0, 2)
    raw_p = token_rounding(logits, 1, 2, "up", "softmax_topk").scores.tolist()
    assert raw_p == pytest.approx([0.7, 0.6, 0.3, 0.5, 0.3, 0.6], rel=1e-5)


@pytest.mark.parametrize("added_weight", ADDED_WEIGHTS)
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_against_fp64(method, convention, added_weight) -> None:
    generator = torch.Generator().manual_seed(3)
    k = 3
    logits = (2.0 * torch.randn(25, 7, generator=generator)).requires_grad_()
    routing = route_by(logits, k, method, 4, convention, added_weight, 0.8, generator)
    upstream = torch.randn(routing.scores.shape, generator=generator)
    (found,) = torch.autograd.grad(routing.scores, logits, upstream)

    exact = logits.detach().double().requires_grad_()
    chosen = chosen_of(logits.detach(), k)
    total = exact.new_zeros(())
    scores = []
    for (t, e), weight in zip(pairs_of(routing), upstream.double(), strict=True):
        over_all = sum(exact[t, other].exp() for other in range(7))
        over_chosen = sum(exact[t, other].exp() for other in chosen[t])
        raw = (
            method == "expert_choice" or convention == "softmax_topk" or (added_weight == "raw" and e not in chosen[t])
        )
        scores.append(exact[t, e].exp() / (over_all if raw else over_chosen))
        total = total + weight * scores[-1]
    (expected,) = torch.autograd.grad(total, exact)
    assert float(expected.abs().max()) > 0.1
    torch.testing.assert_close(routing.scores.detach().double(), torch.stack(scores).detach(), rtol=2e-6, atol=1e-7)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_converted_to_fp32(dtype) -> None:
    logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(5)).to(dtype).requires_grad_()
    routing = token_rounding(logits, 2, 4)
    exact = token_rounding(logits.detach().float(), 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(routing[:3], exact[:3], strict=True))
    (gradient,) = torch.autograd.grad(routing.scores.sum(), logits)
    assert gradient.dtype == dtype


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens(method) -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    routing = route_by(logits, 2, method)
    assert routing.scores.shape == routing.experts.shape == (0,)
    assert routing.token_offsets.tolist() == [0]
    assert routing[3:] == (0, 0)
    assert method_counts(torch.zeros(5, dtype=torch.int64), 0, 2, method, 128).tolist() == [0] * 5
    (gradient,) = torch.autograd.grad(routing.scores.sum(), logits)
    assert gradient.shape == (0, 5)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_fewer_tokens_than_a_tile_leaves_top_k(rounding) -> None:
    logits = torch.randn(100, 6, generator=torch.Generator().manual_seed(1))
    routing = token_rounding(logits, 2, 128, rounding)
    assert pairs_of(routing) == pairs_of(top_k(logits, 2))
    assert routing[3:] == (0, 0)


@pytest.mark.parametrize("method", METHODS)
def test_one_expert(method) -> None:
    logits = torch.randn(8, 1, generator=torch.Generator().manual_seed(2))
    routing = route_by(logits, 1, method, 4)
    assert pairs_of(routing) == [(t, 0) for t in range(8)]
    assert routing.scores.tolist() == [1.0] * 8
    assert counts_of(route_by(logits, 1, method, 5), 1) == [8]  # 10 > 8: exempt


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_an_expert_that_nobody_chose_stays_empty(rounding) -> None:
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)) - 99.0 * (torch.arange(4) == 2)
    assert counts_of(token_rounding(logits, 2, 8, rounding, generator=torch.Generator()), 4)[2] == 0


def test_a_token_may_lose_its_only_expert() -> None:
    logits = torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    # Counts 3 and 2. By share of top-1 all tie, so the highest token goes; by p, the one with least p.
    share, raw = (token_rounding(logits, 1, 2, "down", name) for name in ("topk_softmax", "softmax_topk"))
    assert share.token_offsets.tolist() == [0, 1, 2, 2, 3, 4]
    assert raw.token_offsets.tolist() == [0, 1, 1, 2, 3, 4]
    assert share[3:] == raw[3:] == (1, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_a_token_without_finite_weights_ranks_last(method, bad) -> None:
    logits = torch.tensor([[0.1, bad], [0.0, 1.0], [0.0, 2.0], [3.0, 0.0], [4.0, 0.0], [1.0, 0.0]])
    routing = route_by(logits, 1, method, 2, capacity_factor=0.5, generator=torch.Generator().manual_seed(0))
    pairs = pairs_of(routing)
    assert [math.isnan(score) for score in routing.scores.tolist()] == [t == 0 for t, _ in pairs]
    # Counts 3 and 3: token 0 chose expert 1.
    first = {e: [t for t, other in pairs if other == e] for e in (0, 1)}
    if method in ("top_k", "nearest", "up"):
        assert first[1][:3] == [0, 1, 2]
    if method == "top_k":
        assert first == {0: [3, 4, 5], 1: [0, 1, 2]}
    if method == "up":
        assert first[0] == [1, 3, 4, 5]  # it is not the one that is added
    if method in ("down", "token_drop"):
        assert first == {0: [3, 4], 1: [1, 2]}
    if method == "expert_choice":
        assert first[1] == [1, 2, 5]


def test_minus_infinity_is_a_weight_of_zero() -> None:
    logits = torch.tensor([[0.0, -math.inf, -math.inf], [1.0, 2.0, -math.inf]])
    routing = top_k(logits, 2)
    assert pairs_of(routing) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert routing.scores.tolist()[:2] == [1.0, 0.0]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"method": "topk"}, "method 'topk'"),
        ({"method": "token_rounding"}, "method 'token_rounding'"),
        ({"convention": "sigmoid"}, "convention 'sigmoid'"),
        ({"added_weight": "zero"}, "added_weight 'zero'"),
        ({"k": 0}, "k must"),
        ({"k": 5}, r"k must be in 1\.\.E = 1\.\.4, not 5"),
        ({"m_tile": 0}, "m_tile"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"capacity_factor": -1.0}, "capacity_factor"),
        ({"capacity_factor": math.nan}, "capacity_factor"),
        ({"capacity_factor": math.inf}, "capacity_factor"),
        ({"logits": torch.zeros(4)}, "logits"),
        ({"logits": torch.zeros(2, 3, 4)}, "logits"),
        ({"logits": torch.zeros(3, 4, dtype=torch.int64)}, "logits"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_bad_arguments_are_refused_by_name(method, arguments, name) -> None:
    good = {"logits": torch.zeros(3, 4), "k": 2, "method": method, "m_tile": 2}
    with pytest.raises(ValueError, match=name):
        route_by(**good | arguments)


def test_named_functions_check_their_own_arguments() -> None:
    logits = torch.zeros(3, 4)
    for call, name in (
        (lambda: token_rounding(logits, 2, 2, "top_k"), "rounding 'top_k'"),
        (lambda: token_rounding(logits, 2, 0), "m_tile"),
        (lambda: token_rounding(logits, 2, 2, convention="x"), "convention 'x'"),
        (lambda: token_rounding(logits, 2, 2, added_weight="x"), "added_weight 'x'"),
        (lambda: top_k(logits, 9), "k must"),
        (lambda: top_k(logits, 2, "x"), "convention 'x'"),
        (lambda: expert_choice(logits, 0), "k must"),
        (lambda: expert_choice(logits.long(), 1), "logits"),
        (lambda: token_drop(logits, 2, 0.0), "capacity_factor"),
        (lambda: token_drop(logits, 2, 1.0, "x"), "convention 'x'"),
    ):
        with pytest.raises(ValueError, match=name):
            call()


def test_counting_functions_check_their_arguments() -> None:
    counts = torch.tensor([3, 1])
    for call, name in (
        (lambda: round_counts(counts, 4, 2, "top_k"), "rounding 'top_k'"),
        (lambda: round_counts(counts, 4, 0, "up"), "m_tile"),
        (lambda: round_counts(counts, -1, 2, "up"), "tokens"),
        (lambda: round_counts(counts.float(), 4, 2, "up"), "counts"),
        (lambda: round_counts(counts[None], 4, 2, "up"), "counts"),
        (lambda: method_counts(counts, 4, 1, "x", 2), "method 'x'"),
        (lambda: method_counts(counts, 4, 0, "up", 2), "k must"),
        (lambda: method_counts(counts, 4, 3, "up", 2), "k must"),
        (lambda: method_counts(counts, 4, 1, "top_k", 0), "m_tile"),
        (lambda: method_counts(counts, 4, 1, "top_k", 2, 0.0), "capacity_factor"),
        (lambda: method_counts(counts.double(), 4, 1, "top_k", 2), "counts"),
    ):
        with pytest.raises(ValueError, match=name):
            call()
