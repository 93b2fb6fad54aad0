"""The router: the K largest logits of each token with their scores, and the way back to the logits.

Forward, with x the logits (T, E) and C the K chosen experts of a token:

    topk_softmax, softmax_topk_renormalised    s[c] = exp(x[c]) / sum over C of exp(x)
    softmax_topk                               s[c] = exp(x[c]) / sum over all E of exp(x)

(renormalising a softmax over the chosen ones is the softmax of the chosen ones). Backward, with g = d loss / d s and
D = <s, g> over C: dx[c] = s[c] (g[c] - D); elsewhere 0, or -p D with p = softmax(x) where all E are in the sum.

To choose, a logit and its lane are packed into one integer whose order is (logit, lower lane first), so that each of
the K rounds is one integer maximum, and both come back out of the winner.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2

#: Convention -> does its softmax run over all E logits?
SOFTMAX_OVER_ALL = {"topk_softmax": False, "softmax_topk": True, "softmax_topk_renormalised": False}
MAX_EXPERTS = 1024
MAX_K = 64


@triton.jit
def _pack(x, lane, E_PAD: tl.constexpr):  # type: ignore[no-untyped-def]
    # (logit, lane) -> integer. A negative float's bits grow with its magnitude: flipped, they order as the value does.
    x = tl.where(x == x, x, float("-inf"))  # NaN, which has no order, goes last
    x = tl.where(x == 0, 0.0, x).to(x.dtype)  # -0 ties with 0
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        ordered = tl.where(bits < 0, bits ^ 0x7FFF, bits) << 16
    else:
        bits = x.to(tl.int32, bitcast=True)
        ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) << 32
    return ordered | (E_PAD - 1 - lane).to(ordered.dtype)


@triton.jit
def _unpack_logit(key, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    if dtype.primitive_bitwidth == 16:
        ordered = key >> 16
        bits = tl.where(ordered < 0, ordered ^ 0x7FFF, ordered).to(tl.int16)
    else:
        ordered = (key >> 32).to(tl.int32)
        bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _router_top_k_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, scores_ptr, experts_ptr, tokens,
    E: tl.constexpr, K: tl.constexpr, OVER_ALL: tl.constexpr,
    E_PAD: tl.constexpr, K_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # logits (T, E) -> scores (T, K) fp32, experts (T, K) int32
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, E_PAD)
    slot = tl.arange(0, K_PAD)
    inside = (token < tokens)[:, None] & (lane < E)[None, :]
    x = tl.load(logits_ptr + token[:, None].to(tl.int64) * E + lane[None, :], mask=inside, other=float("-inf"))

    key = _pack(x, lane[None, :], E_PAD)
    # Below every packed logit, -inf included, so that nothing is chosen twice and no padding lane before a real one.
    LEAST: tl.constexpr = -(2**31) if x.dtype.primitive_bitwidth == 16 else -(2**63)
    least = tl.full((BLOCK_T, E_PAD), LEAST, key.dtype)
    key = tl.where((lane < E)[None, :], key, least)
    chosen = tl.full((BLOCK_T, K_PAD), LEAST, key.dtype)
    for k in range(K):
        best = tl.max(key, 1)[:, None]
        key = tl.where(key == best, least, key)
        chosen = tl.where(slot[None, :] == k, best, chosen)

    value = tl.where((slot < K)[None, :], _unpack_logit(chosen, x.dtype), float("-inf"))
    top = tl.max(value, 1)[:, None]
    score = tl.exp(value - top)
    total = tl.sum(tl.exp(x.to(tl.float32) - top), 1) if OVER_ALL else tl.sum(score, 1)
    score = score / total[:, None]
    # A NaN was never chosen before a number; without this it could vanish from a token's output.
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    score = tl.where(has_nan[:, None], float("nan"), score)

    at = token[:, None].to(tl.int64) * K + slot[None, :]
    mask = (token < tokens)[:, None] & (slot < K)[None, :]
    tl.store(scores_ptr + at, score, mask=mask)
    tl.store(experts_ptr + at, E_PAD - 1 - (chosen & (E_PAD - 1)).to(tl.int32), mask=mask)


@triton.jit
def _router_backward_kernel(  # type: ignore[no-untyped-def]
    scores_ptr, experts_ptr, grad_scores_ptr, reverse_ptr, logits_ptr, grad_logits_ptr, tokens,
    E: tl.constexpr, K: tl.constexpr, OVER_ALL: tl.constexpr, ROW_ORDER: tl.constexpr,
    E_PAD: tl.constexpr, K_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    # scores, grad_scores (T, K) or (R,) fp32, experts (T, K) -> grad_logits (T, E)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, E_PAD)
    slot = tl.arange(0, K_PAD)
    pair = token[:, None].to(tl.int64) * K + slot[None, :]
    live = (token < tokens)[:, None] & (slot < K)[None, :]
    expert = tl.load(experts_ptr + pair, mask=live, other=0)
    at = tl.load(reverse_ptr + pair, mask=live, other=0) if ROW_ORDER else pair
    s = tl.load(scores_ptr + at, mask=live, other=0.0)
    g = tl.load(grad_scores_ptr + at, mask=live, other=0.0)
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
    tl.store(grad_logits_ptr + first + expert, (s * (g - dot)).to(grad_logits_ptr.dtype.element_ty), mask=live)


def _launch_shape(num_experts: int, element_size: int) -> tuple[int, int, int]:
    # (padded E, tokens of a program, warps): 64 bytes of logits a thread, which is 32 or, packed, 64 registers. A row
    # stays within one warp, where a maximum needs no shared memory: 32 lanes x 16 bytes hold it, or else the program
    # is a single warp.
    padded = max(next_power_of_2(num_experts), 2)
    warps = 4 if padded * element_size <= 512 else 1
    return padded, min(64, max(1, 32 * warps * 64 // element_size // padded)), warps


@functools.cache
def _top_k_launcher(num_experts: int, k: int, over_all: bool, element_size: int) -> tuple[Launcher, int]:
    """And the tokens of a program."""
    padded, block_t, warps = _launch_shape(num_experts, element_size)
    constants = {"E": num_experts, "K": k, "OVER_ALL": over_all}
    padding = {"E_PAD": padded, "K_PAD": next_power_of_2(k), "BLOCK_T": block_t}
    return Launcher(_router_top_k_kernel, {**constants, **padding}, num_warps=warps), block_t


@functools.cache
def _backward_launcher(
    num_experts: int, k: int, over_all: bool, row_order: bool, element_size: int
) -> tuple[Launcher, int]:
    """And the tokens of a program."""
    padded, block_t, warps = _launch_shape(num_experts, element_size)
    constants = {"E": num_experts, "K": k, "OVER_ALL": over_all, "ROW_ORDER": row_order}
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
) -> Tensor:
    """(T, E) gradient of the logits in ``dtype``, zeros included.

    Args:
        scores, grad_scores: fp32, (T, K), or (R,) in row order with ``reverse``.
        experts: (T, K) int32.
        convention: as in the forward.
        logits: (T, E) as in the forward, for ``softmax_topk`` only.
        num_experts: E.
        reverse: (T * K,) int32, the row of each pair (`metadata.Routing.reverse`).

    Raises:
        ValueError: an unknown convention, or ``softmax_topk`` without logits.
    """
    over_all = _softmax_over_all(convention)
    if over_all and logits is None:
        raise ValueError("the backward of softmax_topk needs the logits")
    tokens, k = experts.shape
    grad_logits = torch.empty((tokens, num_experts), dtype=dtype, device=experts.device)
    if tokens:
        launcher, block_t = _backward_launcher(
            num_experts, k, over_all, reverse is not None, grad_logits.element_size()
        )
        scores, grad_scores = scores.float().contiguous(), grad_scores.float().contiguous()
        experts = experts.contiguous()
        # Pointers that are never read still have to point somewhere.
        launcher(
            (cdiv(tokens, block_t),),
            (
                scores, experts, grad_scores, experts if reverse is None else reverse,
                scores if logits is None else logits.contiguous(), grad_logits, tokens,
            ),
        )  # fmt: skip
    return grad_logits
