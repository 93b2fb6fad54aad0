"""The router: the K largest logits of each token with their scores, and the way back to the logits.

Forward, with x the logits (T, E) and C the K chosen experts of a token:

    topk_softmax, softmax_topk_renormalised    s[c] = exp(x[c]) / sum over C of exp(x)
    softmax_topk                               s[c] = exp(x[c]) / sum over all E of exp(x)

(renormalising a softmax over the chosen ones is the softmax of the chosen ones). Backward, with g = d loss / d s and
D = <s, g> over C: dx[c] = s[c] (g[c] - D); elsewhere 0, or -p D with p = softmax(x) where all E are in the sum.

To choose, a logit and its expert are packed into one integer, whose order is (logit, lower expert first) and out of
which both come back. A thread sorts its integers in lists of K, rounded up, then keeps the larger half of every two
lists, its own and at last those of its neighbours: minima and maxima in registers, by sorting networks. For longer
lists than fit there, K rounds take one maximum each.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2
from implementations.sonicmoe_triton.tiles import check_shape

#: Convention -> does its softmax run over all E logits?
SOFTMAX_OVER_ALL = {"topk_softmax": False, "softmax_topk": True, "softmax_topk_renormalised": False}
MAX_EXPERTS = 1024
MAX_K = 64
#: The longest list that a thread keeps sorted in its registers.
MAX_LIST = 16
#: See `_pack`. 16-bit logits leave an fp32's last 13 bits 0: the expert goes there.
BIAS_16 = tl.constexpr(0x7FF000)
BIAS_32 = tl.constexpr(0x7FFFFF)


@triton.constexpr_function
def _partner(i, n, step, sorting):  # type: ignore[no-untyped-def]
    # Whom slot i of n meets in this step of a network; itself: nobody.
    if not sorting:  # bitonic merge
        return i ^ (n >> (step + 1))
    # Batcher's odd-even merge sort: blocks of 2p slots, distances p, p / 2, ... 1, for p = 1, 2, 4, ...
    p, distances = 1, 1
    while step >= distances:
        p, step, distances = 2 * p, step - distances, distances + 1
    distance = p >> step
    first = distance % p
    if i < first:
        return i
    j = i + distance if (i - first) // distance % 2 == 0 else i - distance
    return j if first <= j < n and i // (2 * p) == j // (2 * p) else i


@triton.jit
def _met(mine, other, distance: tl.constexpr):  # type: ignore[no-untyped-def]
    if distance > 0:
        return tl.maximum(mine, other)
    elif distance < 0:
        return tl.minimum(mine, other)
    else:
        return mine


@triton.jit
def _network(v, N: tl.constexpr, STEPS: tl.constexpr, SORTING: tl.constexpr):  # type: ignore[no-untyped-def]
    # N tensors -> each place's N values, descending; who meets whom is known to the compiler: two instructions a pair
    for step in tl.static_range(STEPS):
        after: tl.tuple = ()
        for i in tl.static_range(N):
            after += (_met(v[i], v[_partner(i, N, step, SORTING)], _partner(i, N, step, SORTING) - i),)
        v = after
    return v


@triton.jit
def _load_vectors(  # type: ignore[no-untyped-def]
    logits_ptr, token, tokens, first, E: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    # (T, LANES, VECTOR) logits from expert `first` on, and their experts (1, LANES, VECTOR)
    expert = first + tl.arange(0, LANES)[None, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
    at = token[:, None, None].to(tl.int64) * E + expert
    mask = (token < tokens)[:, None, None]
    if first + LANES * VECTOR > E:
        mask = mask & (expert < E)
    return tl.load(logits_ptr + at, mask=mask, other=0.0), expert


@triton.jit
def _larger_of_lanes(even, odd, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    # (T, LANES) -> (T, LANES / 2), or (T,): of every two lanes, the larger of one's `even` and the other's `odd`
    if LANES > 2:
        even = tl.reshape(even, (even.shape[0], LANES // 2, 2))
        odd = tl.reshape(odd, even.shape)
        return tl.max(tl.where(tl.arange(0, 2)[None, None, :] == 1, odd, even), 2)
    else:
        return tl.max(tl.where(tl.arange(0, 2)[None, :] == 1, odd, even), 1)


@triton.jit
def _split_last(x, N: tl.constexpr, LOG: tl.constexpr):  # type: ignore[no-untyped-def]
    # (T, LANES, N) -> N tensors (T, LANES), in some order
    parts: tl.tuple = (x,)
    for step in tl.static_range(LOG):
        after: tl.tuple = ()
        for i in tl.static_range(1 << step):
            x = parts[i]
            if N >> step > 2:
                x = tl.reshape(x, (x.shape[0], x.shape[1], N >> (step + 1), 2))
            left, right = tl.split(x)
            after += (left, right)
        parts = after
    return parts


@triton.jit
def _join_last(v, N: tl.constexpr, LOG: tl.constexpr):  # type: ignore[no-untyped-def]
    # N tensors (T,) -> (T, N)
    for step in tl.static_range(LOG):
        after: tl.tuple = ()
        for i in tl.static_range(N >> (step + 1)):
            joined = tl.join(v[i], v[i + (N >> (step + 1))])
            after += (tl.reshape(joined, (joined.shape[0], 2 << step)),)
        v = after
    return v[0] if N > 1 else v[0][:, None]


@triton.jit
def _pack(x, expert, E_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    # (logit, expert) -> integer. A float's magnitude, negated where its sign says so, orders as its value does (and -0
    # as 0). The bias lifts infinity to the end of the integers: NaNs, which are beyond, come round to the other end.
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    sign = bits >> 31
    if x.dtype.primitive_bitwidth == 16:
        key = ((bits & 0x7FFFE000) ^ sign) - sign + (BIAS_16 + E_PAD - expert)
    else:
        key = ((bits & 0x7FFFFFFF) ^ sign) - sign + BIAS_32
        key = (key.to(tl.int64) << 32) | (E_PAD - expert).to(tl.int64)
    return key


@triton.jit
def _least(shape: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    # Below every packed logit, NaNs included.
    return tl.full(shape, -(2**31) if dtype == tl.int32 else -(2**63), dtype)


@triton.jit
def _unpack_logit(key):  # type: ignore[no-untyped-def]
    ordered = (key - BIAS_16) & -0x2000 if key.dtype == tl.int32 else (key >> 32).to(tl.int32) - BIAS_32
    magnitude = tl.where(ordered < 0, -ordered, ordered).to(tl.float32, bitcast=True)
    return tl.where(ordered < 0, -magnitude, magnitude)


@triton.jit
def _unpack_expert(key, E_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    return E_PAD - (key & (2 * E_PAD - 1)).to(tl.int32)


@triton.jit
def _store_top_k(  # type: ignore[no-untyped-def]
    chosen, has_nan, logits_ptr, scores_ptr, experts_ptr, token, tokens,
    E: tl.constexpr, K: tl.constexpr, OVER_ALL: tl.constexpr, E_PAD: tl.constexpr, K_PAD: tl.constexpr,
):  # fmt: skip
    # chosen (T, K_PAD) packed, has_nan (T,)
    slot = tl.arange(0, K_PAD)[None, :]
    value = tl.where(slot < K, _unpack_logit(chosen), float("-inf"))
    top = tl.max(value, 1)[:, None]
    score = tl.exp(value - top)
    if OVER_ALL:
        lane = tl.arange(0, E_PAD)[None, :]
        inside = (token < tokens)[:, None] & (lane < E)
        x = tl.load(logits_ptr + token[:, None].to(tl.int64) * E + lane, mask=inside, other=float("-inf"))
        total = tl.sum(tl.exp(x.to(tl.float32) - top), 1)
    else:
        total = tl.sum(score, 1)
    # A NaN was never chosen before a number; without this it could vanish from a token's output.
    score = tl.where(has_nan[:, None], float("nan"), score / total[:, None])

    at = token[:, None].to(tl.int64) * K + slot
    mask = (token < tokens)[:, None] & (slot < K)
    tl.store(scores_ptr + at, score, mask=mask)
    tl.store(experts_ptr + at, _unpack_expert(chosen, E_PAD), mask=mask)


@triton.jit
def _router_top_k_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, scores_ptr, experts_ptr, tokens,
    E: tl.constexpr, K: tl.constexpr, OVER_ALL: tl.constexpr, E_PAD: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr, LANES: tl.constexpr, LOG_LANES: tl.constexpr,
    VECTOR: tl.constexpr, LOG_VECTOR: tl.constexpr, LIST: tl.constexpr, LOG_LIST: tl.constexpr, LOG_K_PAD: tl.constexpr,
):  # fmt: skip
    # logits (T, E) -> scores (T, K) fp32, experts (T, K) int32: LANES threads a token, each with lists of LIST logits
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    vectors: tl.tuple = ()
    for first in tl.static_range(0, E_PAD, LANES * VECTOR):
        vectors += (_load_vectors(logits_ptr, token, tokens, first, E, LANES, VECTOR),)
    lowest = tl.zeros((BLOCK_T, LANES), tl.int32 if logits_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.int64)
    best: tl.tuple = ()
    for start in tl.static_range(0, E_PAD // (LANES * VECTOR), LIST // VECTOR):
        new: tl.tuple = ()
        for i in tl.static_range(start, start + LIST // VECTOR):
            x, expert = vectors[i]
            key = _pack(x, expert, E_PAD)
            if E < E_PAD:
                lowest = tl.minimum(lowest, tl.min(tl.where(expert < E, key, 0), 2))
                key = tl.where(expert < E, key, _least(key.shape, key.dtype))
            new += _split_last(key, VECTOR, LOG_VECTOR)
        new = _network(new, LIST, LOG_LIST * (LOG_LIST + 1) // 2, True)
        if E == E_PAD:
            lowest = tl.minimum(lowest, new[LIST - 1])
        if start == 0:
            best = new
        else:
            # The LIST largest of two descending lists, a bitonic sequence: the larger of a[i] and b[LIST - 1 - i].
            both: tl.tuple = ()
            for i in tl.static_range(LIST):
                both += (tl.maximum(best[i], new[LIST - 1 - i]),)
            best = _network(both, LIST, LOG_LIST, False)
    for step in tl.static_range(LOG_LANES):
        larger: tl.tuple = ()
        for i in tl.static_range(LIST):
            # The same between two lanes; the odd one hands its list over in reverse.
            larger += (_larger_of_lanes(best[i], best[LIST - 1 - i], LANES >> step),)
        best = _network(larger, LIST, LOG_LIST, False)
    if LANES == 1:
        flat: tl.tuple = ()
        for i in tl.static_range(K_PAD):
            flat += (tl.reshape(best[i], (BLOCK_T,)),)
        best = flat
    nothing = tl.full((BLOCK_T,), float("-inf"), logits_ptr.dtype.element_ty)
    has_nan = tl.min(lowest, 1) < _pack(nothing, tl.full((BLOCK_T,), E_PAD, tl.int32), E_PAD)
    chosen = _join_last(best, K_PAD, LOG_K_PAD)
    _store_top_k(chosen, has_nan, logits_ptr, scores_ptr, experts_ptr, token, tokens, E, K, OVER_ALL, E_PAD, K_PAD)


@triton.jit
def _router_top_many_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, scores_ptr, experts_ptr, tokens,
    E: tl.constexpr, K: tl.constexpr, OVER_ALL: tl.constexpr,
    E_PAD: tl.constexpr, K_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # As above, for more than fit a thread's registers: K rounds of one maximum each
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, E_PAD)[None, :]
    slot = tl.arange(0, K_PAD)[None, :]
    inside = (token < tokens)[:, None] & (lane < E)
    x = tl.load(logits_ptr + token[:, None].to(tl.int64) * E + lane, mask=inside, other=0.0)
    key = _pack(x, lane, E_PAD)
    least = _least(key.shape, key.dtype)
    key = tl.where(lane < E, key, least)
    chosen = _least((BLOCK_T, K_PAD), key.dtype)
    for k in range(K):
        best = tl.max(key, 1)[:, None]
        key = tl.where(key == best, least, key)
        chosen = tl.where(slot == k, best, chosen)
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    _store_top_k(chosen, has_nan, logits_ptr, scores_ptr, experts_ptr, token, tokens, E, K, OVER_ALL, E_PAD, K_PAD)


@triton.jit
def _router_backward_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, experts_ptr, grad_scores_ptr, reverse_ptr, logits_ptr, grad_logits_ptr, row_gradients_ptr, tokens,
    E: tl.constexpr, K: tl.constexpr, OVER_ALL: tl.constexpr, ROW_ORDER: tl.constexpr, BY_ROW: tl.constexpr,
    PARTS: tl.constexpr, E_PAD: tl.constexpr, K_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # scores (T, K) or (R,), grad_scores PARTS times as much, fp32, experts (T, K) -> grad_logits (T, E), and BY_ROW the
    # chosen ones in row order (R,), fp32
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, E_PAD)
    slot = tl.arange(0, K_PAD)
    pair = token[:, None].to(tl.int64) * K + slot[None, :]
    live = (token < tokens)[:, None] & (slot < K)[None, :]
    expert = tl.load(experts_ptr + pair, mask=live, other=0)
    at = tl.load(reverse_ptr + pair, mask=live, other=0) if ROW_ORDER else pair
    s = tl.load(scores_ptr + at, mask=live, other=0.0)
    g = tl.load(grad_scores_ptr + at, mask=live, other=0.0)
    for _ in tl.static_range(1, PARTS):
        grad_scores_ptr += tokens * K
        g += tl.load(grad_scores_ptr + at, mask=live, other=0.0)
    dot = tl.sum(s * g, 1)[:, None]

    first = token[:, None].to(tl.int64) * E
    inside = (token < tokens)[:, None] & (lane < E)[None, :]
    if OVER_ALL:
        x = tl.load(logits_ptr + first + lane[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(x - tl.max(x, 1)[:, None])
        rest = -dot * (p / tl.sum(p, 1)[:, None])
    else:
        rest = tl.zeros((BLOCK_T, E_PAD), tl.float32)
    tl.store(grad_logits_ptr + first + lane[None, :], rest.to(grad_logits_ptr.dtype.element_ty), mask=inside)
    # The chosen ones go over the row just written, by other threads of this program.
    tl.debug_barrier()
    chosen = s * (g - dot)
    tl.store(grad_logits_ptr + first + expert, chosen.to(grad_logits_ptr.dtype.element_ty), mask=live)
    if BY_ROW:
        tl.store(row_gradients_ptr + at, chosen, mask=live)


def _launch_shape(num_experts: int, element_size: int) -> tuple[int, int, int]:
    # (padded E, tokens of a program, warps): 64 bytes of logits a thread, which is 32 or, packed, 64 registers. A row
    # stays within one warp, where a maximum needs no shared memory: 32 lanes x 16 bytes hold it, or else the program
    # is a single warp.
    padded = max(next_power_of_2(num_experts), 2)
    warps = 4 if padded * element_size <= 512 else 1
    return padded, min(64, max(1, 32 * warps * 64 // element_size // padded)), warps


def top_k_configuration(
    num_experts: int, k: int, element_size: int, logits_a_lane: int = 64, warps: int = 1
) -> tuple[Any, dict[str, int], int]:
    """The kernel that chooses, its sizes and its warps. ``logits_a_lane``: at most, but for one list."""
    vector, k_pad = 16 // element_size, next_power_of_2(k)
    if k_pad > MAX_LIST:
        padded, block_t, warps = _launch_shape(num_experts, element_size)
        return _router_top_many_kernel, {"E_PAD": padded, "K_PAD": k_pad, "BLOCK_T": block_t}, warps
    a_list = max(vector, k_pad)
    padded = max(next_power_of_2(num_experts), a_list)
    lanes = max(1, padded // max(logits_a_lane, a_list))
    sizes = {"E_PAD": padded, "K_PAD": k_pad, "BLOCK_T": 32 * warps // lanes, "LANES": lanes, "LOG_LANES": _log2(lanes)}
    sizes |= {"VECTOR": vector, "LOG_VECTOR": _log2(vector), "LIST": a_list, "LOG_LIST": _log2(a_list)}
    return _router_top_k_kernel, sizes | {"LOG_K_PAD": _log2(k_pad)}, warps


def _log2(power: int) -> int:
    return power.bit_length() - 1


@functools.cache
def _top_k_launcher(num_experts: int, k: int, over_all: bool, element_size: int) -> tuple[Launcher, int]:
    """And the tokens of a program."""
    kernel, sizes, warps = top_k_configuration(num_experts, k, element_size)
    constants = {"E": num_experts, "K": k, "OVER_ALL": over_all}
    return Launcher(kernel, {**constants, **sizes}, num_warps=warps), sizes["BLOCK_T"]


@functools.cache
def _backward_launcher(
    num_experts: int, k: int, over_all: bool, row_order: bool, by_row: bool, parts: int, element_size: int
) -> tuple[Launcher, int]:
    """And the tokens of a program."""
    padded, block_t, warps = _launch_shape(num_experts, element_size)
    constants = {"E": num_experts, "K": k, "OVER_ALL": over_all, "ROW_ORDER": row_order, "BY_ROW": by_row}
    constants |= {"PARTS": parts}
    padding = {"E_PAD": padded, "K_PAD": next_power_of_2(k), "BLOCK_T": block_t}
    return Launcher(_router_backward_kernel, {**constants, **padding}, num_warps=warps), block_t


def _softmax_over_all(convention: str) -> bool:
    try:
        return SOFTMAX_OVER_ALL[convention]
    except KeyError:
        raise ValueError(f"unknown router convention {convention!r}") from None


def top_k(logits: Tensor, k: int, convention: str = "topk_softmax") -> tuple[Tensor, Tensor]:
    """Scores (T, K) fp32 and experts (T, K) int32 of the K largest logits, largest first.

    Args:
        logits: (T, E), any floating dtype, compared in fp32; equal logits go to the lower expert index. A NaN is
            chosen last and makes its token's scores NaN.
        k: 1 <= K <= min(E, 64).
        convention: see `harness.interface.LayerSpec`.

    Raises:
        ValueError: K or E out of range, or an unknown convention.
    """
    over_all = _softmax_over_all(convention)
    tokens, num_experts = logits.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"E = {num_experts} is not within 1 to {MAX_EXPERTS}")
    if not 1 <= k <= min(num_experts, MAX_K):
        raise ValueError(f"K = {k} is not within 1 to min(E, {MAX_K}) = {min(num_experts, MAX_K)}")
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        logits = logits.float()
    logits = logits.contiguous()
    scores = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    if tokens:
        launcher, block_t = _top_k_launcher(num_experts, k, over_all, logits.element_size())
        launcher((cdiv(tokens, block_t),), (logits, scores, experts, tokens))
    return scores, experts


def router_backward(
    scores: Tensor,
    experts: Tensor,
    grad_scores: Tensor,
    convention: str,
    logits: Tensor | None,
    num_experts: int,
    dtype: torch.dtype,
    reverse: Tensor | None = None,
    row_gradients: Tensor | None = None,
) -> Tensor:
    """(T, E) gradient of the logits in ``dtype``, zeros included.

    Args:
        scores: fp32, (T, K), or (R,) in row order with ``reverse``.
        grad_scores: the same; with ``reverse`` also (C, R), partial sums that are added up in order.
        experts: (T, K) int32.
        convention: as in the forward.
        logits: (T, E) as in the forward, for ``softmax_topk`` only.
        num_experts: E.
        reverse: (T * K,) int32, the row of each pair (`metadata.Routing.reverse`).
        row_gradients: (R,) fp32, takes the gradients of the chosen logits in row order, unrounded. Those are all that
            are not zero, but for ``softmax_topk``, where this is refused.

    Raises:
        ValueError: an unknown convention, ``softmax_topk`` without logits, gradients that do not fit the scores, or
            row_gradients that cannot be filled.
    """
    over_all = _softmax_over_all(convention)
    if over_all and logits is None:
        raise ValueError("the backward of softmax_topk needs the logits")
    if grad_scores.shape != scores.shape and (reverse is None or grad_scores.shape[1:] != scores.shape):
        raise ValueError(f"gradients {tuple(grad_scores.shape)} for scores {tuple(scores.shape)}")
    if row_gradients is not None:
        if over_all or reverse is None:
            raise ValueError("row_gradients need `reverse`, and a convention other than softmax_topk")
        check_shape("row_gradients", row_gradients, (experts.numel(),), torch.float32, experts.device)
    tokens, k = experts.shape
    grad_logits = torch.empty((tokens, num_experts), dtype=dtype, device=experts.device)
    if tokens:
        parts = grad_scores.numel() // experts.numel()
        launcher, block_t = _backward_launcher(
            num_experts, k, over_all, reverse is not None, row_gradients is not None, parts, grad_logits.element_size()
        )
        scores, grad_scores = scores.float().contiguous(), grad_scores.float().contiguous()
        experts = experts.contiguous()
        # Pointers that are never read still have to point somewhere.
        launcher(
            (cdiv(tokens, block_t),),
            (
                scores, experts, grad_scores, experts if reverse is None else reverse,
                scores if logits is None else logits.contiguous(), grad_logits,
                scores if row_gradients is None else row_gradients, tokens,
            ),
        )  # fmt: skip
    return grad_logits
