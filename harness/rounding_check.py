"""Is what a layer's own token rounding kept a legitimate rounding of its router's choices?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.interface import Problem
from harness.reference import full_precision
from harness.token_rounding import round_counts

#: Share of a token's largest |logit| by which rounding the logits to the point's dtype may move each of them; in fp32 a
#: few roundings.
LOGIT_SLACK = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-20}
#: Share of |x_t| · |router_e| by which adding up a logit in another order in fp32 may move it.
SUM_SLACK = 2.0**-22
#: By how much a few roundings to fp32 may move the logarithm of a weight; below the least one weights are all the same,
#: since fp32 has no more normal numbers there.
WEIGHT_SLACK = 2.0**-20
LEAST_LOG_WEIGHT = math.log(torch.finfo(torch.float32).tiny)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _pairs_fault(problem: Problem, experts: Tensor, token_offsets: Tensor) -> str | None:
    shape = problem.shape
    if not (_is_integer(experts) and _is_integer(token_offsets)):
        return f"kept pairs' experts and offsets must be integers, not {experts.dtype} and {token_offsets.dtype}"
    if experts.dim() != 1 or tuple(token_offsets.shape) != (shape.T + 1,):
        sizes = f"{tuple(experts.shape)} and {tuple(token_offsets.shape)}"
        return f"kept pairs have shapes {sizes}, expected (P,) and {(shape.T + 1,)}"
    steps = token_offsets.long().diff()
    if int(token_offsets[0]) != 0 or int(token_offsets[-1]) != experts.numel() or bool((steps < 0).any()):
        return f"the kept pairs' offsets do not rise from 0 to P = {experts.numel()}"
    if bool(((experts < 0) | (experts >= shape.E)).any()):
        return "a kept pair's expert is out of range"
    return None


def kept_tokens(token_offsets: Tensor) -> Tensor:
    """(P,), int64: the token of each pair."""
    pairs = token_offsets.long().diff()
    return torch.repeat_interleave(torch.arange(pairs.numel(), device=pairs.device), pairs)


def as_mask(tokens: Tensor, experts: Tensor, shape: tuple[int, int]) -> Tensor:
    """(T, E), bool: which pairs there are."""
    mask = torch.zeros(shape, dtype=torch.bool, device=experts.device)
    mask[tokens.reshape(-1), experts.reshape(-1).long()] = True
    return mask


def check_rounding(problem: Problem, indices: Tensor, experts: Tensor, token_offsets: Tensor) -> str | None:
    """A sentence where the kept pairs are no rounding of top-K's by the point's method; None where they are.

    How many tokens each expert keeps follows exactly from its number under top-K (one of two for ``stochastic``). It
    drops only where it adds nothing; and it drops the chosen tokens of least weight and adds the best of the others,
    where the logits differ by more than rounding them to the point's dtype may move. Where every chosen pair weighs
    exactly 1 (K = 1 and weights that add up to 1) the later tokens are dropped.

    Args:
        indices: (T, K) the layer's top-K, which `harness.correctness.check_routing` has found legitimate.
        experts, token_offsets: see `harness.interface.Layer.kept_pairs`.
    """
    fault = _pairs_fault(problem, experts, token_offsets)
    if fault:
        return fault
    shape, routing = problem.shape, problem.point.routing
    size = (shape.T, shape.E)
    kept = as_mask(kept_tokens(token_offsets), experts, size)
    if int(kept.sum()) != experts.numel():
        return "a token has one expert twice among its kept pairs"
    rows = torch.arange(shape.T, device=indices.device)[:, None].expand_as(indices)
    chosen = as_mask(rows, indices, size)
    counts, found = chosen.sum(0), kept.sum(0)
    methods = ("down", "up") if routing.method == "stochastic" else (routing.method,)
    allowed = torch.stack([round_counts(counts, shape.T, routing.m_tile, method) for method in methods])
    wrong = (found != allowed).all(0)
    if bool(wrong.any()):
        expert = int(wrong.nonzero()[0])
        wanted = " or ".join(str(int(count)) for count in allowed[:, expert])
        return (
            f"{int(wrong.sum())} experts keep another number of tokens than {routing.method} gives: "
            f"expert {expert} {int(found[expert])} of {int(counts[expert])}, expected {wanted}"
        )
    dropped, added = chosen & ~kept, kept & ~chosen
    both = dropped.any(0) & added.any(0)
    if bool(both.any()):
        return f"{int(both.sum())} experts drop chosen tokens and add others"
    if not shape.T:
        return None
    low, high, finite = _weight_bounds(problem, indices)
    if bool(_outranked(low, high, out=dropped, within=chosen & kept).any()):
        return "an expert drops a chosen token of more weight than one that it keeps"
    if bool(_outranked(low, high, out=~chosen & ~kept, within=added).any()):
        return "an expert adds a token of less weight than one that it leaves"
    if _all_weigh_one(problem) and bool(_overtaken(dropped & finite, chosen & kept & finite).any()):
        return "an expert drops a chosen token and keeps a later one, where all of them weigh 1"
    return None


def _adds_up_to_one(problem: Problem) -> bool:
    """Whether the weights of a token's top-K do."""
    return problem.point.layer.router_convention != "softmax_topk"


def _all_weigh_one(problem: Problem) -> bool:
    """Whether every chosen pair of finite logits weighs exactly 1. (With E = 1 too, but such an expert is exempt.)"""
    return problem.shape.K == 1 and _adds_up_to_one(problem)


def _weight_bounds(problem: Problem, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(T, E) each: the least and the largest logarithm of p that a layer may have found, or, for an expert of top-K, of
    the weight that it is ranked by. Without bounds where a token's logits are not all finite; (T, 1): where they are.
    """
    x, router = problem.x.float(), problem.router.float()
    with full_precision():
        logits = x @ router.T
    over_all = logits.logsumexp(1, keepdim=True)
    weights = logits - over_all
    if _adds_up_to_one(problem):
        top = torch.gather(logits, 1, indices.long())
        weights.scatter_(1, indices.long(), top - top.logsumexp(1, keepdim=True))
    off = LOGIT_SLACK[problem.point.dtype] * logits.abs().amax(1, keepdim=True)
    off += SUM_SLACK * x.norm(dim=1, keepdim=True) * router.norm(dim=1).max()
    # The logit and the logarithm of the sum may each be off.
    slack = 2 * off + WEIGHT_SLACK
    finite = logits.isfinite().all(1, keepdim=True)
    low, high = ((weights + by).clamp_min(LEAST_LOG_WEIGHT) for by in (-slack, slack))
    return torch.where(finite, low, -torch.inf), torch.where(finite, high, torch.inf), finite


def _outranked(low: Tensor, high: Tensor, out: Tensor, within: Tensor) -> Tensor:
    """(E,), bool: does the expert leave ``out`` a token that outranks one ``within`` beyond doubt?"""
    best_out = torch.where(out, low, -torch.inf).amax(0)
    least_within = torch.where(within, high, torch.inf).amin(0)
    return best_out > least_within


def _overtaken(out: Tensor, within: Tensor) -> Tensor:
    """(E,), bool: does the expert leave ``out`` a token that comes before one ``within``?"""
    token = torch.arange(len(out), device=out.device)[:, None]
    first_out = torch.where(out, token, len(out)).amin(0)
    return first_out < torch.where(within, token, -1).amax(0)
