"""The SonicMoE layer (arXiv 2512.14080) for autograd: one step for the forward, one for the backward.

The router is inside, so that the gradient of x is written once. Between the two passes lie X (the caller's), H, the
scores and the routing, nothing of size TK·d: beside the output (2Td bytes in a 2-byte dtype) 4TKn for H, 16TK for
scores, experts, gather and reverse index, and O(E + tiles). No GEMM runs twice and nothing waits for the host. Eagerly
the backward frees H once it has dH (unless the graph is kept), before it needs the most memory.

Widths that are no multiples of 16 bytes are padded with zeros first, for which `widths` states the price: copies of x
and of the weights are held as well.

With token rounding inside, p lies between the passes too, 4TE bytes, with its sums over top-K (4T); and H and the 16
bytes are those of `rounding.pairs_bound` rows, the most that there may be, in place of TK.

Eagerly a pass is a plain `autograd.Function`, which costs the host little, since it has to stay ahead of the GPU. Where
somebody looks on (a compiler, fake tensors, a dispatch mode) each pass is one `torch.library` operator with a fake twin
that only tells shapes: one opaque step to torch.compile, and traced without a GPU. CUDA graphs capture either.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from implementations.sonicmoe_triton.algorithm import (
    Held,
    Needs,
    SavedH,
    autocasts,
    guard,
    layer_backward,
    layer_forward,
    logits_of,
    routed_backward,
    routed_forward,
)
from implementations.sonicmoe_triton.checks import (
    check_experts,
    check_method,
    check_pairs,
    check_rounded_pairs,
    check_router,
    check_tile,
)
from implementations.sonicmoe_triton.dispatch import is_plain
from implementations.sonicmoe_triton.operators import (
    in_routed_order,
    moe_layer_backward_operator,
    moe_layer_operator,
    needs_of_routed,
    routed_experts_backward_operator,
    routed_experts_operator,
    wanted,
)
from implementations.sonicmoe_triton.rounding import pairs_bound, round_routing
from implementations.sonicmoe_triton.router import top_k
from implementations.sonicmoe_triton.widths import fits, widen_columns, widen_experts


class RouterOutput(NamedTuple):
    """What the router said: ``logits`` (T, E) in the layer's dtype, differentiable; ``counts`` (E,) int32, the rows of
    each expert, before a rounding."""

    logits: Tensor
    counts: Tensor


def moe_layer(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    router: Tensor,
    k: int,
    convention: str = "topk_softmax",
    activation: str = "swiglu",
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """out[t] = Σ_k S[t,k] · (W2[e] act(W1[e] x[t] + bias1[e]) + bias2[e]), e the k-th of the token's K experts.

    Args:
        x: (T, d).
        w1: (E, 2n, d), gate rows then up rows; (E, n, d) for an ungated activation. Every 2n below is n there.
        w2: (E, d, n).
        router: (E, d).
        k: experts for each token.
        convention: ``topk_softmax``, ``softmax_topk`` or ``softmax_topk_renormalised`` (see `router.top_k`).
        activation: ``swiglu``, ``geglu``, ``reglu``; ungated ``silu``, ``gelu``, ``relu2``.
        bias1, bias2: (E, 2n) and (E, d), or None.

    Returns:
        (T, d), differentiable with respect to every tensor given. Autocast changes nothing here: all tensors have one
        dtype, bfloat16, float16 or float32, and so has the result.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names it.
        NotImplementedError: under `torch.func.grad`, `jvp` and what they make (`vmap` alone works).
    """
    check_router(x, router, w1, k, convention)
    check_experts(x, w1, w2, bias1, bias2, activation)
    if not fits(w2):
        wide, biases = _widened(x, w1, w2, router, bias1, bias2, activation)
        return _narrowed(moe_layer(*wide, k, convention, activation, *biases), x)
    arguments = x, w1, w2, router, bias1, bias2, k, convention, activation, False
    return _LayerFunction.apply(*arguments) if is_plain(*arguments[:6]) else moe_layer_operator(*arguments)[0]


def moe_layer_with_router(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    router: Tensor,
    k: int,
    convention: str = "topk_softmax",
    activation: str = "swiglu",
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
) -> tuple[Tensor, RouterOutput]:
    """`moe_layer` and what its router said; the logits are kept, 2TE bytes more. A loss made of the logits adds its
    gradient to the router's."""
    check_router(x, router, w1, k, convention)
    check_experts(x, w1, w2, bias1, bias2, activation)
    if not fits(w2):
        wide, biases = _widened(x, w1, w2, router, bias1, bias2, activation)
        out, said = moe_layer_with_router(*wide, k, convention, activation, *biases)
        return _narrowed(out, x), said
    arguments = x, w1, w2, router, bias1, bias2, k, convention, activation, True
    if is_plain(*arguments[:6]):
        out, logits, counts = _LayerFunction.apply(*arguments)
        return out, RouterOutput(logits, counts)
    out, logits, *held = moe_layer_operator(*arguments)
    return out, RouterOutput(logits, torch.diff(Held(*held).expert_offsets))


def rounded_moe_layer(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    router: Tensor,
    k: int,
    m_tile: int = 128,
    rounding: str = "nearest",
    convention: str = "topk_softmax",
    activation: str = "swiglu",
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    added_weight: str = "renormalised",
    generator: torch.Generator | None = None,
    draws: Tensor | None = None,
) -> tuple[Tensor, RouterOutput]:
    """`moe_layer` with token rounding: each expert's number of rows becomes a multiple of ``m_tile``, so no tile is
    multiplied in part. For training; evaluate with `moe_layer`.

    An expert whose number rounded up would exceed T is exempt: it keeps the number that top-K gave it, so that its last
    tile may be full in part. A token may have any number of experts, none included: its row of the output is then zero.

    The rounding is made on the device, which the host does not wait for: it allocates for `rounding.pairs_bound` rows,
    at most m_tile - 1 for each expert more than T·K, of which the kernels compute those that there are. H is held for
    all of these rows, and p of the router for all experts: (T, E) in fp32.

    Under activation checkpointing ``stochastic`` needs ``draws`` or torch's default generator: with another
    ``generator`` the forward that is computed again draws other numbers, see `rounding.round_routing`.

    Args:
        m_tile: 128, the kernels' tile, or a multiple of it gains. Any other is allowed, and leaves tiles of the
            kernels' 128 rows that are full in part.
        rounding, added_weight, generator, draws: as for `rounding.round_routing`.
        x, w1, w2, router, k, convention, activation, bias1, bias2: as for `moe_layer`.

    Returns:
        (T, d), and the router's output: its counts are top-K's.

    Raises:
        ValueError, NotImplementedError: as for `moe_layer` and `rounding.round_routing`.
    """
    check_router(x, router, w1, k, convention)
    check_experts(x, w1, w2, bias1, bias2, activation)
    check_method(rounding)
    check_tile(m_tile)
    tokens, num_experts = x.shape[0], w1.shape[0]
    check_rounded_pairs(pairs_bound(tokens, num_experts, k, m_tile, rounding), tokens, num_experts, m_tile, rounding)
    logits = _logits(x, router)
    scores, experts, token_offsets, counts = round_routing(
        logits, k, m_tile, rounding, convention, added_weight, generator, draws
    )
    out = _routed(x, w1, w2, scores, experts, token_offsets, bias1, bias2, num_experts, activation)
    return out, RouterOutput(logits, counts)


def routed_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    scores: Tensor,
    experts: Tensor,
    token_offsets: Tensor | None = None,
    activation: str = "swiglu",
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """The experts alone, for callers who route by themselves: out[t] = Σ_p scores[p] · expert_p(x[t]), p of token t.

    Args:
        x, w1, w2, activation, bias1, bias2: as for `moe_layer`.
        scores: weights of the pairs: (T, K), or (P,) ordered by token.
        experts: expert of each pair, any integer dtype, shaped as ``scores``; a token names an expert at most once. A
            number outside [0, E), such as -1, names none: the pair adds nothing to output and gradients. Without
            ``token_offsets`` a row is computed for it all the same.
        token_offsets: (T+1,) first pair of each token, then P, where tokens have different numbers of pairs (none
            included: their rows of the output are zero); None where each has P / T.

    Returns:
        (T, d), differentiable with respect to x, w1, w2, scores and the biases.

    Raises:
        ValueError, NotImplementedError: as for `moe_layer`.
    """
    check_experts(x, w1, w2, bias1, bias2, activation)
    tokens = x.shape[0]
    for name, given in (("scores", scores), ("experts", experts), ("token_offsets", token_offsets)):
        if given is not None and given.device != x.device:
            raise ValueError(f"{name} are on {given.device}, x is on {x.device}")
    if scores.shape != experts.shape or scores.dim() not in (1, 2):
        raise ValueError(
            f"scores {tuple(scores.shape)} and experts {tuple(experts.shape)}: both must be (T, K), or (P,)"
        )
    if not scores.dtype.is_floating_point or experts.dtype.is_floating_point:
        raise ValueError(f"scores are {scores.dtype} and experts {experts.dtype}; expected floats and integers")
    if scores.dim() == 2 and scores.shape[0] != tokens:
        raise ValueError(f"T: scores have {scores.shape[0]} rows, x has {tokens}")
    if token_offsets is not None:
        if tuple(token_offsets.shape) != (tokens + 1,):
            raise ValueError(f"token_offsets has shape {tuple(token_offsets.shape)}, expected (T+1,) = ({tokens + 1},)")
        token_offsets = token_offsets.int()
        k = w1.shape[0]
    else:
        if scores.dim() == 1 and scores.shape[0] % max(tokens, 1):
            raise ValueError(f"P = {scores.shape[0]} pairs are no multiple of T = {tokens}: give token_offsets")
        k = scores.shape[1] if scores.dim() == 2 else scores.shape[0] // max(tokens, 1)
        if k == 0:
            token_offsets = experts.new_zeros(tokens + 1, dtype=torch.int32)
    check_pairs(scores.numel())
    # Outside of the numbers a kernel would read and write beside its tensors.
    named = (experts >= 0) & (experts < w1.shape[0])
    scores = torch.where(named, scores, 0.0).reshape(-1).float()
    if token_offsets is None:
        pairs = experts.clamp(0, w1.shape[0] - 1).reshape(-1).int()
    else:
        pairs = torch.where(named, experts, -1).int()
    return _routed(x, w1, w2, scores, pairs, token_offsets, bias1, bias2, k, activation)


def _logits(x: Tensor, router: Tensor) -> Tensor:
    """(T, E), differentiable; autocast changes neither them nor their gradient."""
    if is_plain(x, router):
        return _LogitsFunction.apply(x, router)
    if autocasts(x):
        with torch.autocast(x.device.type, enabled=False):
            return logits_of(x, router)
    return logits_of(x, router)


def _widened(
    x: Tensor, w1: Tensor, w2: Tensor, router: Tensor, bias1: Tensor | None, bias2: Tensor | None, activation: str
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None]]:
    """`moe_layer`'s tensors as the kernels take them: the first four, and the biases."""
    x, w1, w2, bias1, bias2 = widen_experts(x, w1, w2, bias1, bias2, activation)
    return (x, w1, w2, widen_columns(router)), (bias1, bias2)


def _narrowed(out: Tensor, x: Tensor) -> Tensor:
    """As many columns of the output as x has; a copy, where these are fewer, so that the wider one is freed."""
    return out[:, : x.shape[1]].contiguous()


def _routed(*arguments: Any) -> Tensor:
    """`algorithm.routed_forward`'s arguments, checked."""
    x, w1, w2, scores, experts, token_offsets, bias1, bias2, k, activation = arguments
    if not fits(w2):
        wide, w1, w2, bias1, bias2 = widen_experts(x, w1, w2, bias1, bias2, activation)
        return _narrowed(_routed(wide, w1, w2, scores, experts, token_offsets, bias1, bias2, k, activation), x)
    return _RoutedFunction.apply(*arguments) if is_plain(*arguments[:8]) else routed_experts_operator(*arguments)[0]


def choose_experts(x: Tensor, router: Tensor, k: int, convention: str = "topk_softmax") -> tuple[Tensor, Tensor]:
    """(scores (T, K) fp32, experts (T, K) int32) exactly as `moe_layer` chooses them; not differentiable."""
    with torch.no_grad(), guard(x):
        # Padded as there: another width might be another sum's order.
        return top_k(logits_of(widen_columns(x), widen_columns(router)), k, convention)


# Autograd.


def _is_eager_backward(*tensors: Tensor | None) -> bool:
    """Whether the backward may run as it is. A backward that is to be differentiated itself (``create_graph``) is left
    to the operator, whose gradients refuse that with a message when it comes to it."""
    return not torch.is_grad_enabled() and is_plain(*tensors)


#: Where H, and with it what is held, begins among the tensors that a function saves: behind x, w1, w2, router, the
#: biases and the logits; or behind x, w1, w2, token_offsets and the biases.
_H_OF_LAYER, _H_OF_ROUTED = 7, 6


class _LayerFunction(torch.autograd.Function):
    """`layer_forward` and `layer_backward`; returns out or, if logits are kept, (out, logits, counts)."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, k, convention, activation, keep_logits = arguments
        out, logits, held = layer_forward(*arguments)
        # Logits that were only asked for, the backward does not need.
        ctx.save_for_backward(*tensors, logits if convention == "softmax_topk" else None, *held)
        ctx.rest = k, convention, activation
        if not keep_logits:
            return out
        # A loss may be made of the output alone or of the logits alone.
        ctx.set_materialize_grads(False)
        counts = torch.diff(held.expert_offsets)
        ctx.mark_non_differentiable(counts)
        return out, logits, counts

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_logits: Tensor | None = None, *_: Any) -> Any:
        needs = Needs(*ctx.needs_input_grad[:6])
        saved = list(ctx.saved_tensors)
        if grad_out is None:
            if grad_logits is None:
                return (None,) * 10
            grad_out = torch.zeros_like(saved[0])
        if _is_eager_backward(grad_out, grad_logits, saved[0]):
            saved_h, saved[_H_OF_LAYER] = SavedH(saved[_H_OF_LAYER], ctx), None
            found = layer_backward(
                grad_out,
                grad_logits,
                *saved[:_H_OF_LAYER],
                *ctx.rest,
                held=Held(*saved[_H_OF_LAYER:]),
                needs=needs,
                saved_h=saved_h,
            )
        else:
            found = wanted(moe_layer_backward_operator(grad_out, grad_logits, *saved, *ctx.rest, needs), needs)
        return *found, None, None, None, None


class _LogitsFunction(torch.autograd.Function):
    """`logits_of`. Autograd's own backward would run under the autocast of whoever calls it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Tensor) -> Tensor:
        ctx.save_for_backward(x, router)
        with guard(x):
            return logits_of(x, router)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> Any:
        x, router = ctx.saved_tensors
        of_x, of_router = ctx.needs_input_grad
        with guard(x):
            return (
                torch.mm(grad_logits, router) if of_x else None,
                torch.mm(grad_logits.t(), x) if of_router else None,
            )


class _RoutedFunction(torch.autograd.Function):
    """`routed_forward` and `routed_backward`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, w1, w2, _, _, token_offsets, bias1, bias2, k, activation = arguments
        out, held = routed_forward(*arguments)
        ctx.save_for_backward(x, w1, w2, token_offsets, bias1, bias2, *held)
        ctx.rest = k, activation
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        needs, saved = needs_of_routed(ctx), list(ctx.saved_tensors)
        if _is_eager_backward(grad_out, saved[0]):
            saved_h, saved[_H_OF_ROUTED] = SavedH(saved[_H_OF_ROUTED], ctx), None
            found = routed_backward(
                grad_out,
                *saved[:_H_OF_ROUTED],
                *ctx.rest,
                held=Held(*saved[_H_OF_ROUTED:]),
                needs=needs,
                saved_h=saved_h,
            )
        else:
            found = wanted(routed_experts_backward_operator(grad_out, *saved, *ctx.rest, needs), needs)
        return in_routed_order(found)
