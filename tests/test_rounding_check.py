"""`harness.rounding_check`: what a layer's own rounding may keep, and what it may not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rounded_layers import (
    LOOP,
    chosen_and_kept,
    indices_of,
    pairs_of,
    passes,
    plain_rounding,
    plain_target,
    rounded,
    routing_of,
    top_k_of,
)
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS, Point, Problem
from harness.problem import make_problem
from harness.rounding_check import check_rounding, kept_tokens
from harness.token_rounding import ROUNDINGS, token_rounding, top_k


def planted(logits: Tensor, point: Point) -> Problem:
    """A problem whose router gives exactly these logits."""
    problem = make_problem(point, "cpu")
    problem.router.copy_(torch.eye(*problem.router.shape))
    problem.x[:, : logits.shape[1]] = logits
    return problem


def verdict(problem: Problem, chosen: Tensor, kept: Tensor) -> str | None:
    return check_rounding(problem, indices_of(chosen), *pairs_of(kept))


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


INTEGERS = "kept pairs' experts and offsets must be integers, not "


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
        (lambda experts, offsets: (experts.float(), offsets), f"{INTEGERS}torch.float32 and torch.int32"),
        (lambda experts, offsets: (experts, offsets.double()), f"{INTEGERS}torch.int32 and torch.float64"),
        (lambda experts, offsets: (experts > 0, offsets), f"{INTEGERS}torch.bool and torch.int32"),
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
LATER = "an expert drops a chosen token and keeps a later one, where all of them weigh 1"


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


@pytest.mark.parametrize(
    ("dtype", "ratio_of_weights", "refused"),
    [
        ("bfloat16", 1.0, False),
        ("bfloat16", 1.1, False),
        ("bfloat16", 1.16, True),
        ("bfloat16", 1.5, True),
        ("float16", 1.01, False),
        ("float16", 1.02, True),
        ("float32", 1.0, False),
        ("float32", 1.00001, False),
        ("float32", 1.00005, True),
        ("float32", 1.1, True),
    ],
)
@pytest.mark.parametrize("method", ["up", "down"])
def test_only_what_rounding_logits_may_move_is_a_tie(
    method: str, dtype: str, ratio_of_weights: float, refused: bool
) -> None:
    """Logits of magnitude 4 may be off by 2^-7 of it, and so may the logarithm of their sum, for both tokens: 0.125.
    In fp16 an eighth of that; in fp32 2^-13 of it, and what adding them up may move."""
    if method == "down":
        # Twelve tokens choose the first expert, which keeps eight: the last of these weighs less than the next.
        p = [0.9] * 7 + [0.55, 0.55 * ratio_of_weights] + [0.52] * 3 + [0.2] * 4
    else:
        # Four choose it, and it adds four: the last of these weighs less than the first of those left.
        p = [0.9] * 4 + [0.45] * 3 + [0.15, 0.15 * ratio_of_weights] + [0.05] * 7
    problem = planted(logits_of(p), rounded("16,16,8,3,1", method, 8, convention="softmax_topk", dtype=dtype))
    found = torch.softmax((problem.x @ problem.router.T).float(), 1)[:, 0]
    off = {"bfloat16": 1e-2, "float16": 1e-3, "float32": 1e-6}[dtype]
    torch.testing.assert_close(found, torch.tensor(p), rtol=off, atol=0.0)
    chosen, right = chosen_and_kept(problem)
    assert int(chosen[:, 0].sum()) == (12 if method == "down" else 4) and int(right[:, 0].sum()) == 8
    kept = right.clone()
    kept[:, 0] = False
    kept[:8, 0] = True
    assert (not torch.equal(kept, right)) == (ratio_of_weights > 1)
    assert verdict(problem, chosen, kept) == ((ADDS if method == "up" else DROPS) if refused else None)


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("method", [m for m in ROUNDINGS if m != "stochastic"])
def test_what_logits_in_the_points_dtype_select_is_accepted(method: str, convention: str) -> None:
    """And of a point in fp32 what logits in bf16 select is refused."""
    differ = refused = 0
    for seed in range(12):
        point = rounded("2048,16,8,8,2", method, 32, convention=convention, seed=seed, dtype="bfloat16")
        problem = make_problem(point, "cpu")
        exact = problem.x.float() @ problem.router.float().T
        routings = [token_rounding(logits, 2, 32, method, convention) for logits in (exact, exact.bfloat16())]
        indices = top_k(exact.bfloat16(), 2).experts.view(-1, 2)
        pairs = routings[1].experts, routings[1].token_offsets
        assert check_rounding(problem, indices, *pairs) is None
        fine = replace(problem, point=replace(point, dtype="float32"))
        refused += check_rounding(fine, indices, *pairs) in (DROPS, ADDS)
        masks = [torch.zeros(2048, 8, dtype=torch.bool) for _ in range(2)]
        for mask, routing in zip(masks, routings, strict=True):
            mask[kept_tokens(routing.token_offsets), routing.experts.long()] = True
        differ += not torch.equal(*masks)
    assert differ and refused


@pytest.mark.parametrize("method", ["up", "down"])
@pytest.mark.parametrize("width", [16, 4096])
def test_what_another_order_of_summation_selects_is_accepted(width: int, method: str) -> None:
    """Tokens that differ by less than fp32's roundings of their logits, in two crowds."""
    for seed in range(3):
        problem = make_problem(rounded(f"400,{width},8,8,2", method, 32, seed=seed), "cpu")
        generator = torch.Generator().manual_seed(seed)
        noise = 1 + 2e-7 * torch.randn(400, width, generator=generator)
        problem.x.copy_(problem.x[:2].repeat_interleave(200, 0) * noise)
        exact = (problem.x.double() @ problem.router.double().T).float()
        other = torch.zeros(400, 8)
        for column, weights in zip(problem.x.T.flip(0), problem.router.T.flip(0), strict=True):
            other += column[:, None] * weights
        moved = 0
        for logits in (exact, other, problem.x @ problem.router.T):
            routing = token_rounding(logits, 2, 32, method)
            indices = top_k(logits, 2).experts.view(-1, 2)
            moved += routing.dropped + routing.added
            assert check_rounding(problem, indices, routing.experts, routing.token_offsets) is None
        assert moved


def keep_later(kept: Tensor, chosen: Tensor) -> Tensor:
    """With the last that an expert drops kept in place of the first that it keeps."""
    for e in range(kept.shape[1]):
        mine, dropped = kept[:, e] & chosen[:, e], chosen[:, e] & ~kept[:, e]
        if bool(mine.any()) and bool(dropped.any()):
            return exchange(kept, e, int(mine.nonzero()[0]), int(dropped.nonzero()[-1]))
    raise AssertionError("nobody drops some of its tokens")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["nearest", "down", "balanced"])
def test_of_chosen_tokens_that_all_weigh_one_the_later_are_dropped(method: str, dtype: str) -> None:
    """Where a token has one expert, and its weight is divided by itself."""
    for convention in ROUTER_CONVENTIONS:
        one = convention != "softmax_topk"
        problem = make_problem(rounded("80,16,8,6,1", method, convention=convention), "cpu")
        problem = replace(problem, point=replace(problem.point, dtype=dtype))
        routing, chosen = routing_of(problem), top_k_of(problem).view(-1, 1)
        mask = torch.zeros(problem.shape.T, problem.shape.E, dtype=torch.bool)
        mask[kept_tokens(routing.token_offsets), routing.experts.long()] = True
        assert check_rounding(problem, chosen, routing.experts, routing.token_offsets) is None
        wrong = keep_later(mask, torch.zeros_like(mask).scatter_(1, chosen.long(), True))
        assert (check_rounding(problem, chosen, *pairs_of(wrong)) == LATER) == one


def test_a_token_that_is_not_finite_has_no_place_among_those_that_weigh_one() -> None:
    problem = make_problem(rounded("80,16,8,6,1", "down"), "cpu")
    problem.x[0] = math.nan
    chosen = top_k_of(problem).view(-1, 1)
    routing = routing_of(problem)
    # It is the first to go where its NaN is ranked as zero, and the last where it is not ranked.
    assert check_rounding(problem, chosen, routing.experts, routing.token_offsets) is None


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
