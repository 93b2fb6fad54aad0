"""Token rounding (arXiv 2512.14080, section 5) on the device: kernels and the order in which they run.

`harness.token_rounding` defines the routing, `rounding` is the door to it here.

With p the fp32 softmax over a token's E logits, its top-K and f_e as there, each expert keeps the first of all T tokens
in the order (chosen before others, larger weight, lower token), as many as its rounded count. A weight lies between 0
and 1, so the bits of a float order as it does and leave bit 30 to whoever chose the expert:

    key[e, t] = bits(weight) + (chosen << 30)

and dropping and adding become one search, for the key of the last token that stays. That is all that is left of the
sort: each expert's threshold and, among the tokens whose key is the threshold, the last that stays. From these two
numbers and p every later kernel finds out by itself what is kept.

1. p, by torch's softmax, and top-K, by the router's kernel `top_k`.
2. `mark`: chosen or not becomes p's sign bit (in place); p of the chosen ones alone, to be summed; counts by block.
3. `keys`: (T, E) -> (E, T).
4. `select`: a program for each expert rounds its count and looks for the threshold, two bits at a time. Up to
   RESIDENT_TOKENS keys stay in registers; more are read again for every two bits.
5. `pairs`: how many each token has; torch's prefix sum makes token_offsets of them.
6. `write`: the pairs. `backward`, in the same manner, the logits' gradient.

Softmax and sum over top-K are torch's since their last bit decides: tokens with the same logits in another order tie or
do not, as the order of summation has it. So the selection is the reference's on the same device, bit for bit.

Nothing here waits for the device: the host knows the number of pairs by its bound alone.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implementations.sonicmoe_triton.algorithm import guard
from implementations.sonicmoe_triton.checks import check_method
from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2
from implementations.sonicmoe_triton.router import top_k

#: Elements of p that a program with whole rows of experts takes: 16 a thread, and for the kernel that counts 32.
ELEMENTS, MARKED_ELEMENTS, ROW_WARPS = 2048, 4096, 4
#: Tokens and experts of a tile that is transposed.
TRANSPOSED_TOKENS, TRANSPOSED_EXPERTS = 64, 64
#: Keys of an expert that its program keeps, at most: 32 registers of each of 1024 threads.
RESIDENT_TOKENS = 32768
#: Keys that it takes at once where there are more, and where it looks for tied ones.
STREAMED_TOKENS, TIED_TOKENS = 4096, 1024
#: Unused entries of the result that a program clears at once.
CLEARED = 128
#: Experts' keys lie a multiple of this apart, so that vectors are aligned whatever T is. It divides TRANSPOSED_TOKENS.
KEY_ALIGNMENT = 32

#: Added to the keys of chosen tokens.
CHOSEN = tl.constexpr(1 << 30)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


class RoundedRouting(NamedTuple):
    """The kept (token, expert) pairs of T tokens in tensors as long as the host's bound P_max of their number P.

    Attributes:
        scores: (P_max,), fp32, the weight of each pair; differentiable with respect to the logits.
        experts: (P_max,), int32, by token, within a token by rising expert.
        token_offsets: (T + 1,), int32: the first pair of each token, then P. From there on experts are -1, scores 0.
        counts: (E,), int32, how many tokens have each expert among their top-K: before the rounding.
    """

    scores: Tensor
    experts: Tensor
    token_offsets: Tensor
    counts: Tensor


@triton.jit
def _rows(tokens, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr):  # type: ignore[no-untyped-def]
    # This program's tokens (BLOCK_T,), the experts (E_PAD,), where the pairs lie in (T, E), and which there are
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, E_PAD)
    return token, lane, token[:, None].to(tl.int64) * E + lane[None, :], (token < tokens)[:, None] & (lane < E)[None, :]


@triton.jit
def _unmark(marked):  # type: ignore[no-untyped-def]
    # -> p, chosen
    bits = marked.to(tl.int32, bitcast=True)
    return (bits & MAGNITUDE).to(tl.float32, bitcast=True), bits < 0


@triton.jit
def _weight(p, chosen, total, DIVIDED: tl.constexpr):  # type: ignore[no-untyped-def]
    # What an expert ranks by. Exactly rounded, as torch's division is: "/" is an approximation here.
    if DIVIDED:
        return tl.div_rn(p, tl.where(chosen, total, 1.0))
    else:
        return p


@triton.jit
def _key(p, chosen, total, DIVIDED: tl.constexpr):  # type: ignore[no-untyped-def]
    weight = _weight(p, chosen, total, DIVIDED)
    weight = tl.where(weight != weight, 0.0, weight)
    return weight.to(tl.int32, bitcast=True) + tl.where(chosen, CHOSEN, 0)


@triton.jit
def _kept_rows(  # type: ignore[no-untyped-def]
    marked_ptr, sums_ptr, thresholds_ptr, tokens,
    DIVIDED: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # Of this program's rows: tokens, experts, places, presence; p, chosen, the sums over top-K (BLOCK_T, 1), kept
    token, lane, at, inside = _rows(tokens, E, E_PAD, BLOCK_T)
    p, chosen = _unmark(tl.load(marked_ptr + at, mask=inside, other=0.0))
    total = tl.full((BLOCK_T, 1), 1.0, tl.float32)
    if DIVIDED:
        total = tl.load(sums_ptr + token, mask=token < tokens, other=1.0)[:, None]
    key = _key(p, chosen, total, DIVIDED)
    threshold = tl.load(thresholds_ptr + lane, mask=lane < E, other=0)[None, :]
    last = tl.load(thresholds_ptr + E + lane, mask=lane < E, other=-1)[None, :]
    kept = inside & ((key > threshold) | ((key == threshold) & (token[:, None] <= last)))
    return token, lane, at, inside, p, chosen, total, kept


@triton.jit
def _score(p, chosen, total, DIVIDED: tl.constexpr, RAW: tl.constexpr):  # type: ignore[no-untyped-def]
    if DIVIDED and not RAW:
        return tl.div_rn(p, total)
    else:
        return _weight(p, chosen, total, DIVIDED)


@triton.jit
def _rounding_mark_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, p_ptr, top_ptr, summands_ptr, block_counts_ptr, tokens,
    DIVIDED: tl.constexpr, K: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # logits (T, E), top (T, K) -> p (T, E) marked, its chosen part (T, E), block_counts (blocks, E)
    token, lane, at, inside = _rows(tokens, E, E_PAD, BLOCK_T)
    # The last of top-K is the least, in the order (logit, lower expert first).
    least = tl.load(top_ptr + token.to(tl.int64) * K + (K - 1), mask=token < tokens, other=0)
    bound = tl.load(logits_ptr + token.to(tl.int64) * E + least, mask=token < tokens, other=0.0)[:, None]
    x = tl.load(logits_ptr + at, mask=inside, other=0.0)
    chosen = inside & ((x > bound) | ((x == bound) & (lane[None, :] <= least[:, None])))
    p = tl.load(p_ptr + at, mask=inside, other=0.0)
    if DIVIDED:
        tl.store(summands_ptr + at, tl.where(chosen, p, 0.0), mask=inside)
    # A NaN may come with its sign bit set.
    bits = (p.to(tl.int32, bitcast=True) & MAGNITUDE) | tl.where(chosen, -1 - MAGNITUDE, 0)
    tl.store(p_ptr + at, bits.to(tl.float32, bitcast=True), mask=inside)
    counts = tl.sum(chosen.to(tl.int32), 0)
    tl.store(block_counts_ptr + tl.program_id(0).to(tl.int64) * E + lane, counts, mask=lane < E)


@triton.jit
def _rounding_keys_kernel(  # type: ignore[no-untyped-def]
    marked_ptr, sums_ptr, keys_ptr, tokens, stride,
    DIVIDED: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    # marked (T, E), sums (T,) -> keys (E, stride), -1 from T on
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = (token < tokens)[:, None] & (expert < E)[None, :]
    p, chosen = _unmark(tl.load(marked_ptr + token[:, None].to(tl.int64) * E + expert[None, :], mask=inside, other=0.0))
    total = tl.full((BLOCK_T, 1), 1.0, tl.float32)
    if DIVIDED:
        total = tl.load(sums_ptr + token, mask=token < tokens, other=1.0)[:, None]
    key = tl.trans(tl.where(inside, _key(p, chosen, total, DIVIDED), -1))
    to = expert[:, None].to(tl.int64) * stride + token[None, :]
    tl.store(keys_ptr + to, key, mask=(expert < E)[:, None] & (token < stride)[None, :])


@triton.jit
def _tiles_and_remainder(count, tokens, m_tile):  # type: ignore[no-untyped-def]
    # -> whole tiles, what is left over (0 where exempt), exempt
    tiles = count // m_tile
    exempt = (tiles + 1) * m_tile > tokens
    return tiles, tl.where(exempt, 0, count - tiles * m_tile), exempt


@triton.jit
def _target(  # type: ignore[no-untyped-def]
    count, expert, counts_ptr, draws_ptr, tokens, m_tile, ROUNDING: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr
):
    # How many tokens an expert keeps. In 64 bits: counts add up to T * K.
    tiles, remainder, exempt = _tiles_and_remainder(count.to(tl.int64), tokens, m_tile)
    if ROUNDING == "nearest":
        up = (2 * remainder > m_tile) | ((2 * remainder == m_tile) & (tiles % 2 == 1))
    elif ROUNDING == "up":
        up = remainder > 0
    elif ROUNDING == "down":
        up = remainder < 0
    elif ROUNDING == "stochastic":
        # Numbers come from the caller: a negative one must round up nobody who needs no rounding.
        up = (remainder > 0) & (tl.load(draws_ptr + expert) < remainder)
    else:
        lane = tl.arange(0, E_PAD)
        counts = tl.load(counts_ptr + lane, mask=lane < E, other=0).to(tl.int64)
        _, others, _ = _tiles_and_remainder(counts, tokens, m_tile)
        others = tl.where(lane < E, others, 0)
        budget = (2 * tl.sum(others, 0) + m_tile - 1) // (2 * m_tile)
        before = (others > remainder) | ((others == remainder) & (lane < expert))
        up = (tl.sum(before.to(tl.int32), 0) < budget) & (remainder > 0)
    return tl.where(exempt, count.to(tl.int64), (tiles + up.to(tl.int64)) * m_tile).to(tl.int32)


@triton.jit(do_not_specialize=["tokens", "m_tile"])
def _rounding_select_kernel(  # type: ignore[no-untyped-def]
    keys_ptr, counts_ptr, draws_ptr, thresholds_ptr, tokens, stride, m_tile,
    ROUNDING: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK: tl.constexpr, RESIDENT: tl.constexpr, TIED: tl.constexpr,
):  # fmt: skip
    # One program for each expert: keys (E, stride), counts (E,) -> thresholds (2, E): the key above which all tokens
    # stay, and, of those that have it, the last that does (-1: none)
    expert = tl.program_id(0)
    count = tl.load(counts_ptr + expert)
    target = _target(count, expert, counts_ptr, draws_ptr, tokens, m_tile, ROUNDING, E, E_PAD)
    if target == count:  # just below every chosen token's key
        tl.store(thresholds_ptr + expert, CHOSEN - 1)
        tl.store(thresholds_ptr + E + expert, -1)
    else:
        keys_ptr += expert.to(tl.int64) * stride
        position = tl.arange(0, BLOCK)
        if RESIDENT:
            key = tl.load(keys_ptr + position, mask=position < stride, other=-1)
        # The largest key that `target` keys reach, and how many do. The top bit is known already.
        threshold = tl.where(target < count, CHOSEN, 0)
        reach = tl.where(target < count, count, tokens)
        for step in range(15):
            unit = 1 << (28 - 2 * step)
            a, b, c = threshold + unit, threshold + 2 * unit, threshold + 3 * unit
            if RESIDENT:
                of_a, of_b, of_c = (key >= a).to(tl.int32), (key >= b).to(tl.int32), (key >= c).to(tl.int32)
            else:
                of_a = tl.zeros((BLOCK,), tl.int32)
                of_b = tl.zeros((BLOCK,), tl.int32)
                of_c = tl.zeros((BLOCK,), tl.int32)
                for first in range(0, stride, BLOCK):
                    other = tl.load(keys_ptr + first + position, mask=first + position < stride, other=-1)
                    of_a += (other >= a).to(tl.int32)
                    of_b += (other >= b).to(tl.int32)
                    of_c += (other >= c).to(tl.int32)
            reach_a, reach_b, reach_c = tl.sum(of_a, 0), tl.sum(of_b, 0), tl.sum(of_c, 0)
            digit = (reach_a >= target).to(tl.int32) + (reach_b >= target).to(tl.int32)
            digit += (reach_c >= target).to(tl.int32)
            threshold += digit * unit
            reach = tl.where(digit == 0, reach, tl.where(digit == 1, reach_a, tl.where(digit == 2, reach_b, reach_c)))
        tl.store(thresholds_ptr + expert, threshold)
        if reach == target:
            tl.store(thresholds_ptr + E + expert, tokens)
        else:
            # Of the tokens whose key is the threshold the last ones go, so many as are too many: from the end on.
            excess = reach - target
            last = tl.full((), -1, tl.int32)
            place = tl.arange(0, TIED)
            blocks = (stride + TIED - 1) // TIED
            for block in range(blocks):
                token = (blocks - 1 - block) * TIED + place
                tied = tl.load(keys_ptr + token, mask=token < stride, other=-1) == threshold
                from_end = tl.cumsum(tied.to(tl.int32), 0, reverse=True)
                last = tl.maximum(last, tl.max(tl.where(tied & (from_end > excess), token, -1), 0))
                excess -= tl.sum(tied.to(tl.int32), 0)
            tl.store(thresholds_ptr + E + expert, last)


@triton.jit
def _rounding_pairs_kernel(  # type: ignore[no-untyped-def]
    marked_ptr, sums_ptr, thresholds_ptr, kept_ptr, token_offsets_ptr, tokens,
    DIVIDED: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # -> kept (T,), and the first of token_offsets
    token, _, _, _, _, _, _, kept = _kept_rows(marked_ptr, sums_ptr, thresholds_ptr, tokens, DIVIDED, E, E_PAD, BLOCK_T)
    tl.store(kept_ptr + token, tl.sum(kept.to(tl.int32), 1), mask=token < tokens)
    if tl.program_id(0) == 0:
        tl.store(token_offsets_ptr, 0)


@triton.jit(do_not_specialize=["max_pairs"])
def _rounding_write_kernel(  # type: ignore[no-untyped-def]
    marked_ptr, sums_ptr, thresholds_ptr, token_offsets_ptr, scores_ptr, experts_ptr, tokens, max_pairs,
    DIVIDED: tl.constexpr, RAW: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    # -> scores, experts (P_max,)
    token, lane, _, _, p, chosen, total, kept = _kept_rows(
        marked_ptr, sums_ptr, thresholds_ptr, tokens, DIVIDED, E, E_PAD, BLOCK_T
    )
    first = tl.load(token_offsets_ptr + token, mask=token < tokens, other=0)[:, None]
    pair = first + tl.cumsum(kept.to(tl.int32), 1) - 1
    # P never exceeds P_max. Were it otherwise, nothing would be written beside the tensors.
    written = kept & (pair < max_pairs)
    tl.store(scores_ptr + pair, _score(p, chosen, total, DIVIDED, RAW), mask=written)
    tl.store(experts_ptr + pair, tl.zeros((BLOCK_T, 1), tl.int32) + lane[None, :], mask=written)
    # All programs share the clearing of what is not used.
    pairs = tl.load(token_offsets_ptr + tokens).to(tl.int64)
    entry = tl.arange(0, CLEARED)
    for start in range(pairs + tl.program_id(0) * CLEARED, max_pairs, tl.num_programs(0) * CLEARED):
        tl.store(scores_ptr + start + entry, tl.zeros((CLEARED,), tl.float32), mask=start + entry < max_pairs)
        tl.store(experts_ptr + start + entry, tl.full((CLEARED,), -1, tl.int32), mask=start + entry < max_pairs)


@triton.jit
def _rounding_backward_kernel(  # type: ignore[no-untyped-def]
    marked_ptr, sums_ptr, thresholds_ptr, token_offsets_ptr, grad_scores_ptr, grad_logits_ptr, tokens,
    DIVIDED: tl.constexpr, RAW: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # grad_scores (P_max,) -> grad_logits (T, E). With s a pair's weight and g its gradient, dx = s g for kept pairs,
    # less, over what the weight was divided by, the share of each logit times the sum of s g.
    token, _, at, inside, p, chosen, total, kept = _kept_rows(
        marked_ptr, sums_ptr, thresholds_ptr, tokens, DIVIDED, E, E_PAD, BLOCK_T
    )
    first = tl.load(token_offsets_ptr + token, mask=token < tokens, other=0)[:, None]
    pair = first + tl.cumsum(kept.to(tl.int32), 1) - 1
    g = tl.load(grad_scores_ptr + pair, mask=kept, other=0.0)
    product = tl.where(kept, g * _score(p, chosen, total, DIVIDED, RAW), 0.0)
    if DIVIDED:
        share = tl.where(chosen, p / total, 0.0)  # of the sum over top-K
        if RAW:
            grad = product - share * tl.sum(tl.where(chosen, product, 0.0), 1)[:, None]
            grad -= p * tl.sum(tl.where(chosen, 0.0, product), 1)[:, None]
        else:
            grad = product - share * tl.sum(product, 1)[:, None]
    else:
        grad = product - p * tl.sum(product, 1)[:, None]
    tl.store(grad_logits_ptr + at, grad.to(grad_logits_ptr.dtype.element_ty), mask=inside)


def row_sizes(num_experts: int, elements: int) -> dict[str, int]:
    """Sizes of the kernels whose programs take whole rows of experts, so many elements of p."""
    padded = max(next_power_of_2(num_experts), 32)
    return {"E": num_experts, "E_PAD": padded, "BLOCK_T": max(1, elements // padded)}


def select_configuration(tokens: int) -> tuple[dict[str, Any], dict[str, int]]:
    """The search's sizes and options: up to 32 keys a thread, and 64 registers, so that a multiprocessor holds 1024
    threads."""
    resident = tokens <= RESIDENT_TOKENS
    block = max(next_power_of_2(tokens), 128) if resident else STREAMED_TOKENS
    warps = min(32, max(4, block // 1024)) if resident else 32
    sizes = {"BLOCK": block, "RESIDENT": resident, "TIED": min(TIED_TOKENS, block)}
    return sizes, {"num_warps": warps, "maxnreg": 64}


class _Launchers(NamedTuple):
    mark: Launcher
    keys: Launcher
    pairs: Launcher
    write: Launcher
    backward: Launcher
    marked_tokens: int  # of a program of `mark`
    row_tokens: int  # of a program of the last three


class Kind(NamedTuple):
    """What the kernels are compiled for, beside the search's; hashable."""

    num_experts: int
    k: int
    divided: bool  # do weights of top-K add up to 1?
    raw: bool  # is an added pair's weight p nevertheless?


@functools.cache
def _launchers(kind: Kind, elements: int, marked_elements: int, tile: tuple[int, int]) -> _Launchers:
    experts, divided = kind.num_experts, {"DIVIDED": kind.divided}
    marked, rows = row_sizes(experts, marked_elements), row_sizes(experts, elements)
    weighted = {**divided, "RAW": kind.raw, **rows}
    transposed = {"E": experts, "BLOCK_T": tile[0], "BLOCK_E": tile[1]}
    return _Launchers(
        mark=Launcher(_rounding_mark_kernel, {**divided, "K": kind.k, **marked}, num_warps=ROW_WARPS),
        keys=Launcher(_rounding_keys_kernel, {**divided, **transposed}, num_warps=ROW_WARPS),
        pairs=Launcher(_rounding_pairs_kernel, {**divided, **rows}, num_warps=ROW_WARPS),
        write=Launcher(_rounding_write_kernel, {**weighted, "CLEARED": CLEARED}, num_warps=ROW_WARPS),
        backward=Launcher(_rounding_backward_kernel, weighted, num_warps=ROW_WARPS),
        marked_tokens=marked["BLOCK_T"],
        row_tokens=rows["BLOCK_T"],
    )


def _launchers_of(kind: Kind) -> _Launchers:
    return _launchers(kind, ELEMENTS, MARKED_ELEMENTS, (TRANSPOSED_TOKENS, TRANSPOSED_EXPERTS))


@functools.cache
def _select_launcher(num_experts: int, rounding: str, tokens: int, *module_constants: int) -> Launcher:
    """``tokens``: a power of two that is not below T; what is compiled differs for no other reason."""
    sizes, options = select_configuration(tokens)
    constants = {"ROUNDING": rounding, "E": num_experts, "E_PAD": row_sizes(num_experts, ELEMENTS)["E_PAD"]}
    return Launcher(_rounding_select_kernel, {**constants, **sizes}, **options)


def pairs_bound(tokens: int, num_experts: int, k: int, m_tile: int, rounding: str) -> int:
    """P_max: no routing of ``tokens`` has more pairs than this.

    Top-K has T·K pairs. With m = m_tile and r = f_e mod m, an expert that is rounded up gains m - r of them. It has
    r pairs at least, and all experts have T·K together.

    - ``down`` adds none.
    - ``up``, ``stochastic``: whoever is rounded up has r >= 1, so there are at most min(E, T·K) of them, and each gains
      at most m - 1.
    - ``nearest``: whoever is rounded up has 2r >= m, so r >= m - m // 2. There are at most
      min(E, T·K // (m - m // 2)) of them, and each gains m - r <= m // 2.
    - ``balanced``: the sum over the experts that change stays within m / 2 of what it was, and of two equally near sums
      the smaller is taken: (m - 1) // 2 in all.

    Where m_tile exceeds T nobody changes, and no token has more than E pairs.

    Raises:
        ValueError: unknown ``rounding``.
    """
    check_method(rounding)
    top = tokens * k
    if m_tile > tokens or rounding == "down":
        return top
    if rounding == "balanced":
        return min(tokens * num_experts, top + (m_tile - 1) // 2)
    least, more = (m_tile - m_tile // 2, m_tile // 2) if rounding == "nearest" else (1, m_tile - 1)
    return min(tokens * num_experts, top + min(num_experts, top // least) * more)


class Held(NamedTuple):
    """What the forward leaves for the backward: p (T, E) with the sign bit for those of top-K, its sum over them (T,),
    thresholds (2, E), token_offsets (T + 1,)."""

    marked: Tensor
    sums: Tensor
    thresholds: Tensor
    token_offsets: Tensor


def forward(
    logits: Tensor, kind: Kind, m_tile: int, rounding: str, draws: Tensor | None
) -> tuple[RoundedRouting, Held]:
    """`round_routing` without its checks, for T > 0 and contiguous logits in fp32 or 16 bits."""
    with guard(logits):
        return _forward(logits, kind, m_tile, rounding, draws)


def backward(grad_scores: Tensor, held: Held, kind: Kind, dtype: torch.dtype) -> Tensor:
    """The gradient of the logits, (T, E) in ``dtype``, for that of the scores (P_max,), the selection being fixed."""
    with guard(grad_scores):
        tokens, launchers = len(held.marked), _launchers_of(kind)
        grad_logits = torch.empty_like(held.marked, dtype=dtype)
        programs = cdiv(tokens, launchers.row_tokens)
        launchers.backward((programs,), (*held, grad_scores.float().contiguous(), grad_logits, tokens))
    return grad_logits


def _forward(
    logits: Tensor, kind: Kind, m_tile: int, rounding: str, draws: Tensor | None
) -> tuple[RoundedRouting, Held]:
    tokens, num_experts = logits.shape
    max_pairs = pairs_bound(tokens, num_experts, kind.k, m_tile, rounding)
    launchers = _launchers_of(kind)
    empty = functools.partial(torch.empty, dtype=torch.int32, device=logits.device)

    marked = torch.softmax(logits.float(), 1)
    # Where top-K is chosen NaN is largest, as infinity is; the router has it least.
    ordered = torch.nan_to_num(logits, nan=math.inf, posinf=math.inf, neginf=-math.inf)
    _, top = top_k(ordered, kind.k)
    # Pointers that are never read or written still have to point somewhere.
    summands = torch.empty_like(marked) if kind.divided else marked
    programs = cdiv(tokens, launchers.marked_tokens)
    block_counts = empty((programs, num_experts))
    launchers.mark((programs,), (ordered, marked, top, summands, block_counts, tokens))
    counts = block_counts.sum(0, dtype=torch.int32)
    sums = summands.sum(1) if kind.divided else marked.new_empty(1)
    del ordered, top, summands, block_counts

    stride = cdiv(tokens, KEY_ALIGNMENT) * KEY_ALIGNMENT
    keys = empty((num_experts, stride))
    grid = cdiv(tokens, TRANSPOSED_TOKENS), cdiv(num_experts, TRANSPOSED_EXPERTS)
    launchers.keys(grid, (marked, sums, keys, tokens, stride))
    thresholds = empty((2, num_experts))
    select = _select_launcher(
        num_experts, rounding, next_power_of_2(tokens), RESIDENT_TOKENS, STREAMED_TOKENS, TIED_TOKENS
    )
    # Nobody changes from m_tile = T + 1 on, and wider integers would be another kernel.
    select(
        (num_experts,),
        (keys, counts, counts if draws is None else draws, thresholds, tokens, stride, min(m_tile, tokens + 1)),
    )
    del keys

    programs = cdiv(tokens, launchers.row_tokens)
    kept, token_offsets = empty(tokens), empty(tokens + 1)
    launchers.pairs((programs,), (marked, sums, thresholds, kept, token_offsets, tokens))
    torch.cumsum(kept, 0, dtype=torch.int32, out=token_offsets[1:])
    scores, experts = empty(max_pairs, dtype=torch.float32), empty(max_pairs)
    launchers.write((programs,), (marked, sums, thresholds, token_offsets, scores, experts, tokens, max_pairs))
    return RoundedRouting(scores, experts, token_offsets, counts), Held(marked, sums, thresholds, token_offsets)
