"""Routings with a variable number of experts for each token: top-K, token rounding, expert choice, token drop.

A grouped GEMM pads each expert's rows to a multiple of its M tile. Token rounding (arXiv 2512.14080) makes each
expert's number of tokens such a multiple, by changing it by less than one tile.

Common to all of them: p is the fp32 softmax over a token's E logits; its top-K are its K largest logits in fp32 (of
tied ones, the lower expert); f_e is how many tokens have expert e among their top-K. p and the weights that tokens are
ranked by are rounded to fp32, so a near-tie may be decided differently on another device.

NaN: a NaN logit counts as the largest when top-K is chosen. All p of a token with a NaN or +inf logit, or with nothing
but -inf, are NaN, and so are its weights; where tokens are ranked they count as zero, so it is the first that an expert
drops and the last that it adds. Other tokens' weights are not touched.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS

ROUNDINGS = ("nearest", "up", "down", "stochastic", "balanced")
TOP_K = "top_k"
METHODS = (TOP_K, *ROUNDINGS, "expert_choice", "token_drop")
ADDED_WEIGHTS = ("renormalised", "raw")
#: Largest tile: multiples of it must fit into the 64 bits of the counts.
MOST_M_TILE = 2**31 - 1


def routing_name(method: str, m_tile: object) -> str:
    """A method in one word, with the tile where it rounds to one: ``nearest-128``."""
    return f"{method}-{m_tile}" if method in ROUNDINGS else method


class GeneralRouting(NamedTuple):
    """The kept (token, expert) pairs of T tokens.

    Attributes:
        scores: (P,), fp32, the weight of each pair; differentiable with respect to the logits.
        experts: (P,), int32, by token, within a token by rising expert.
        token_offsets: (T + 1,), int32: the first pair of each token, then P.
        dropped: how many pairs of top-K are not kept.
        added: how many kept pairs are not among top-K.
    """

    scores: Tensor
    experts: Tensor
    token_offsets: Tensor
    dropped: int
    added: int


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known: {', '.join(known)}")


def _check_convention(convention: str) -> None:
    _check("convention", convention, ROUTER_CONVENTIONS)


def _check_k(k: int, experts: int) -> None:
    if not 1 <= k <= experts:
        raise ValueError(f"k must be in 1..E = 1..{experts}, not {k}")


def _check_m_tile(m_tile: int) -> None:
    if not 1 <= m_tile <= MOST_M_TILE:
        raise ValueError(f"m_tile must be in 1..{MOST_M_TILE}, not {m_tile}")


def _check_counts(counts: Tensor, tokens: int) -> None:
    if counts.dim() != 1 or counts.is_floating_point() or counts.is_complex() or counts.dtype == torch.bool:
        raise ValueError(f"counts must be (E,) integers, not {tuple(counts.shape)} {counts.dtype}")
    if tokens < 0:
        raise ValueError(f"tokens must not be negative, but is {tokens}")


def _check_logits(logits: Tensor, k: int) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be (T, E) floating-point, not {tuple(logits.shape)} {logits.dtype}")
    _check_k(k, logits.shape[1])


def _capacity(tokens: int, k: int, experts: int, factor: float = 1.0) -> int:
    """⌈factor · T · K / E⌉, exactly, for the factor as it is written: 1.1 · 100 is 110, not 111; at most T, all that an
    expert can have."""
    if not (factor > 0 and math.isfinite(factor)):
        raise ValueError(f"capacity_factor must be positive and finite, not {factor}")
    return min(math.ceil(Fraction(str(float(factor))) * tokens * k / experts), tokens)


def round_counts(
    counts: Tensor, tokens: int, m_tile: int, rounding: str, generator: torch.Generator | None = None
) -> Tensor:
    """(E,) int64, how many tokens each expert has after token rounding (arXiv 2512.14080), from top-K's ``counts``.

    A count that is a multiple of ``m_tile`` stays. An expert whose count rounded *up* would exceed ``tokens`` is exempt
    and keeps its count, in every rounding, also where it would have been rounded down. Any other becomes one of the two
    multiples around it:

    - ``nearest``: the nearer; half-way, the even multiple (0, 2, 4, … tiles).
    - ``up``, ``down``: the one above, the one below.
    - ``stochastic``: the one above with probability (f_e mod m_tile) / m_tile, so that f_e is the expectation.
    - ``balanced``: the one above for the experts with the largest remainders (of tied ones, the lower expert), as many
      as keep the sum over the experts that are not exempt nearest to what it was, so within m_tile / 2 (of two equally
      near sums, the smaller).

    Args:
        counts: (E,), integers, f_e, each 0..T.
        tokens: T.
        generator: for ``stochastic``, on any device; torch's default one of the counts' device where None.

    Raises:
        ValueError: unknown ``rounding``, ``m_tile`` out of 1..`MOST_M_TILE`, ``counts`` not (E,) integers, negative
            ``tokens``.
    """
    _check("rounding", rounding, ROUNDINGS)
    _check_m_tile(m_tile)
    _check_counts(counts, tokens)
    counts = counts.long()
    tiles = counts // m_tile
    exempt = (tiles + 1) * m_tile > tokens
    remainders = torch.where(exempt, 0, counts - tiles * m_tile)  # zero: nothing to decide
    if rounding == "nearest":
        up = (2 * remainders > m_tile) | ((2 * remainders == m_tile) & (tiles % 2 == 1))
    elif rounding == "up":
        up = remainders > 0
    elif rounding == "down":
        up = torch.zeros_like(exempt)
    elif rounding == "stochastic":
        device = counts.device if generator is None else generator.device
        draws = torch.randint(m_tile, counts.shape, generator=generator, device=device).to(counts.device)
        up = draws < remainders
    else:
        budget = (2 * remainders.sum() + m_tile - 1) // (2 * m_tile)  # Σ remainders / m_tile, half down
        order = torch.argsort(remainders, descending=True, stable=True)
        up = torch.empty_like(exempt).scatter_(0, order, torch.arange(len(order), device=order.device) < budget)
    return torch.where(exempt, counts, (tiles + up) * m_tile)


def method_counts(
    counts: Tensor,
    tokens: int,
    k: int,
    method: str,
    m_tile: int,
    capacity_factor: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """(E,) int64, how many tokens each expert has in `route_by`'s routing, from top-K's counts without T × E work.

    ``stochastic`` gives `route_by`'s counts where the generator is in the same state.

    Args:
        counts: (E,), integers, top-K's tokens of each expert.
        tokens: T.

    Raises:
        ValueError: as `round_counts`; unknown ``method``, ``k`` out of 1..E, ``capacity_factor`` not positive.
    """
    _check("method", method, METHODS)
    _check_m_tile(m_tile)
    _check_counts(counts, tokens)
    _check_k(k, len(counts))
    capacity = _capacity(tokens, k, len(counts), capacity_factor)
    if method in ROUNDINGS:
        return round_counts(counts, tokens, m_tile, method, generator)
    counts = counts.long()
    if method == "expert_choice":
        return torch.full_like(counts, _capacity(tokens, k, len(counts)))
    return counts.clamp(max=capacity) if method == "token_drop" else counts.clone()


def _choose(logits: Tensor, k: int) -> Tensor:
    """(T, E), bool: each token's K largest logits; of tied ones, the lower expert; NaN is largest."""
    logits = logits.masked_fill(logits.isnan(), math.inf)
    least = torch.topk(logits, k, dim=1).values[:, -1:]  # its values are exact; which of ties it takes is not defined
    above, tied = logits > least, logits == least
    return above | (tied & (tied.cumsum(1, dtype=torch.int32) <= k - above.sum(1, keepdim=True)))


def _select(ranks: Tensor, preferred: Tensor, targets: Tensor) -> Tensor:
    """(T, E), bool: of each expert the first ``targets`` tokens, the preferred ones before the others, by falling
    rank within both, by rising token within ties.

    Args:
        ranks: (T, E), fp32, 0..1 or NaN, which counts as 0.
        preferred: (T, E), bool.
        targets: (E,), int64, each 0..T.
    """
    # Non-negative floats order as their bits do, and those below 2.0 leave bit 30 free.
    keys = ranks.nan_to_num(0.0).view(torch.int32) + (preferred.int() << 30)
    order = torch.sort(keys.t().contiguous(), dim=1, descending=True, stable=True).indices
    within = torch.arange(order.shape[1], device=order.device) < targets[:, None]
    return torch.zeros_like(within).scatter_(1, order, within).t()


class _Router:
    """p, top-K and the sums of p over top-K of one call's logits."""

    def __init__(self, logits: Tensor, k: int, convention: str) -> None:
        _check_convention(convention)
        _check_logits(logits, k)
        logits = logits.float()
        self.convention = convention
        self.chosen = _choose(logits.detach(), k)
        self.counts = self.chosen.sum(0)
        self.p = torch.softmax(logits, dim=1)
        self.sums = torch.where(self.chosen, self.p, 0.0).sum(1)

    @property
    def ranks(self) -> Tensor:
        """(T, E), what an expert ranks tokens by: the weight of a chosen pair, p of another; no gradient."""
        p = self.p.detach()
        if self.convention == "softmax_topk":
            return p
        return p / torch.where(self.chosen, self.sums.detach()[:, None], 1.0)

    def routing(self, kept: Tensor, added_weight: str = "renormalised") -> GeneralRouting:
        """The kept pairs, (T, E) bool, with their weights in the router's convention."""
        offsets = torch.zeros(len(kept) + 1, dtype=torch.int32, device=kept.device)
        offsets[1:] = kept.sum(1).cumsum(0)
        tokens, experts = kept.nonzero(as_tuple=True)
        chosen = self.chosen[tokens, experts]
        scores = self.p[tokens, experts]
        if self.convention != "softmax_topk":
            divisors = self.sums[tokens]
            scores = scores / (torch.where(chosen, divisors, 1.0) if added_weight == "raw" else divisors)
        unchanged = int(chosen.sum())
        return GeneralRouting(
            scores, experts.int(), offsets, int(self.counts.sum()) - unchanged, experts.numel() - unchanged
        )


def top_k(logits: Tensor, k: int, convention: str = "topk_softmax") -> GeneralRouting:
    """Each token keeps its K largest logits.

    A pair weighs p divided by the token's sum of p over its top-K, which is the softmax over its K chosen logits
    (conventions ``topk_softmax`` and ``softmax_topk_renormalised``), or p (``softmax_topk``); see
    `harness.routing.router_scores`.

    Raises:
        ValueError: see `route_by`.
    """
    router = _Router(logits, k, convention)
    return router.routing(router.chosen)


def token_rounding(
    logits: Tensor,
    k: int,
    m_tile: int = 128,
    rounding: str = "nearest",
    convention: str = "topk_softmax",
    added_weight: str = "renormalised",
    generator: torch.Generator | None = None,
) -> GeneralRouting:
    """Top-K with each expert's number of tokens made a multiple of ``m_tile``, see `round_counts` (arXiv 2512.14080).

    Each expert ranks the tokens: those that chose it first, by falling weight (`top_k`'s, in the same convention), then
    the others by falling p; of tied ones, the lower token first. It keeps the first of them, as many as its rounded
    count. So rounding down drops only chosen tokens of least weight, and rounding up adds only the best of the others.
    A token may end with any number of experts, none included.

    Args:
        added_weight: what a pair weighs that is not among top-K. ``renormalised``: p divided by its token's sum of p
            over its top-K, as a chosen pair does. ``raw``: p, as the official benchmark script has it. The convention
            ``softmax_topk`` weighs every pair p, so there both are the same.

    Raises:
        ValueError: see `route_by`.
    """
    _check("rounding", rounding, ROUNDINGS)
    _check("added_weight", added_weight, ADDED_WEIGHTS)
    _check_m_tile(m_tile)
    router = _Router(logits, k, convention)
    targets = round_counts(router.counts, len(logits), m_tile, rounding, generator)
    return router.routing(_select(router.ranks, router.chosen, targets), added_weight)


def expert_choice(logits: Tensor, k: int) -> GeneralRouting:
    """Each expert takes the ⌈T·K/E⌉ tokens of largest p; of tied ones, the lower token.

    A pair weighs p, divided by nothing: the gate of Zhou et al. 2022 (arXiv 2202.09368) is the softmax over the experts
    as it is. ``dropped`` and ``added`` compare with top-K.

    Raises:
        ValueError: see `route_by`.
    """
    router = _Router(logits, k, "softmax_topk")
    targets = torch.full_like(router.counts, _capacity(len(logits), k, logits.shape[1]))
    return router.routing(_select(router.ranks, torch.zeros_like(router.chosen), targets))


def token_drop(
    logits: Tensor, k: int, capacity_factor: float = 1.0, convention: str = "topk_softmax"
) -> GeneralRouting:
    """Top-K of which each expert keeps at most ⌈capacity_factor·T·K/E⌉ tokens, those of largest weight; of tied ones,
    the lower token.

    The weights are `top_k`'s: a token's remaining pairs are not rescaled.

    Raises:
        ValueError: see `route_by`.
    """
    router = _Router(logits, k, convention)
    targets = router.counts.clamp(max=_capacity(len(logits), k, logits.shape[1], capacity_factor))
    return router.routing(_select(router.ranks, router.chosen, targets))


def route_by(
    logits: Tensor,
    k: int,
    method: str,
    m_tile: int = 128,
    convention: str = "topk_softmax",
    added_weight: str = "renormalised",
    capacity_factor: float = 1.0,
    generator: torch.Generator | None = None,
) -> GeneralRouting:
    """The routing of the router's ``logits`` by one of `METHODS`.

    Every argument is checked, also one that the method does not use. The selection is not differentiable; the weights
    are, through the softmax and the sum over top-K. Counting the pairs synchronises with the device.

    Args:
        logits: (T, E), any floating-point dtype; T may be 0.
        k: experts for each token (on average, in `expert_choice`).
        method: `top_k`, a rounding of `token_rounding`, `expert_choice` or `token_drop`.
        m_tile: multiple of `token_rounding`.
        convention: see `top_k`; `expert_choice` has its own.
        added_weight: see `token_rounding`.
        capacity_factor: see `token_drop`.
        generator: see `round_counts`.

    Raises:
        ValueError: unknown ``method``, ``convention`` or ``added_weight``; ``logits`` not (T, E) floating-point; ``k``
            out of 1..E; ``m_tile`` out of 1..`MOST_M_TILE`; ``capacity_factor`` not positive and finite.
    """
    _check("method", method, METHODS)
    _check_convention(convention)
    _check("added_weight", added_weight, ADDED_WEIGHTS)
    _check_logits(logits, k)
    _check_m_tile(m_tile)
    _capacity(0, k, logits.shape[1], capacity_factor)
    if method in ROUNDINGS:
        return token_rounding(logits, k, m_tile, method, convention, added_weight, generator)
    if method == "expert_choice":
        return expert_choice(logits, k)
    if method == "token_drop":
        return token_drop(logits, k, capacity_factor, convention)
    return top_k(logits, k, convention)
