"""The SonicMoE layer (arXiv 2512.14080) for autograd: one step for the forward, one for the backward.

The router is inside, so that the gradient of x is written once. Between the two passes lie X (the caller's), H, the
scores and the routing, nothing of size TK·d: beside the output (2Td bytes in a 2-byte dtype) 4TKn for H, 16TK for
scores, experts, gather and reverse index, and O(E + tiles). No GEMM runs twice and nothing waits for the host. Eagerly
the backward frees H once it has dH (unless the graph is kept), before it needs the most memory.

Eagerly a pass is a plain `autograd.Function`, which costs the host little, since it has to stay ahead of the GPU. Where
somebody looks on (a compiler, fake tensors, a dispatch mode) each pass is one `torch.library` operator with a fake twin
that only tells shapes: one opaque step to torch.compile, and traced without a GPU. CUDA graphs capture either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.nn import Parameter

from implementations.sonicmoe_triton.activations import is_gated
from implementations.sonicmoe_triton.aggregation import aggregate
from implementations.sonicmoe_triton.biases import expert_sum, row_products
from implementations.sonicmoe_triton.kernels import (
    down_projection,
    down_weight_gradient,
    hidden_gradient,
    input_gradient,
    up_projection,
    up_weight_gradient,
)
from implementations.sonicmoe_triton.metadata import Routing, route
from implementations.sonicmoe_triton.router import router_backward, top_k

CONVENTIONS = ("topk_softmax", "softmax_topk", "softmax_topk_renormalised")
#: M tile of the grouped GEMMs over rows.
BLOCK_M = 128
#: What the router's kernels and 16-byte loads take.
MAX_EXPERTS, MAX_K, ROW_BYTES = 1024, 64, 16
MAX_PAIRS = 2**30
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class RouterOutput(NamedTuple):
    """What the router said: ``logits`` (T, E) in the layer's dtype, differentiable; ``counts`` (E,) int32, the rows of
    each expert."""

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
        ValueError: a shape, dtype or device does not fit, or a width is no multiple of 16 bytes; the message names it.
        NotImplementedError: under `torch.func.grad`, `jvp` and what they make (`vmap` alone works).
    """
    _check_router(x, router, w1, k, convention)
    _check_experts(x, w1, w2, bias1, bias2, activation)
    arguments = x, w1, w2, router, bias1, bias2, k, convention, activation, False
    return _LayerFunction.apply(*arguments) if _is_plain(*arguments[:6]) else _moe_layer(*arguments)[0]


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
    _check_router(x, router, w1, k, convention)
    _check_experts(x, w1, w2, bias1, bias2, activation)
    arguments = x, w1, w2, router, bias1, bias2, k, convention, activation, True
    if _is_plain(*arguments[:6]):
        out, logits, counts = _LayerFunction.apply(*arguments)
        return out, RouterOutput(logits, counts)
    out, logits, *held = _moe_layer(*arguments)
    return out, RouterOutput(logits, torch.diff(_Held(*held).expert_offsets))


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
            number outside [0, E), such as -1, names none: the pair adds nothing to output and gradients, though a row
            is computed for it.
        token_offsets: (T+1,) first pair of each token, then P, where tokens have different numbers of pairs (none
            included: their rows of the output are zero); None where each has P / T.

    Returns:
        (T, d), differentiable with respect to x, w1, w2, scores and the biases.

    Raises:
        ValueError, NotImplementedError: as for `moe_layer`.
    """
    _check_experts(x, w1, w2, bias1, bias2, activation)
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
    _check_pairs(scores.numel())
    # Outside of the numbers a kernel would read and write beside its tensors.
    named = (experts >= 0) & (experts < w1.shape[0])
    scores = torch.where(named, scores, 0.0).reshape(-1).float()
    pairs = experts.clamp(0, w1.shape[0] - 1).reshape(-1).int()
    arguments = x, w1, w2, scores, pairs, token_offsets, bias1, bias2, k, activation
    return _RoutedFunction.apply(*arguments) if _is_plain(*arguments[:8]) else _routed_experts(*arguments)[0]


def choose_experts(x: Tensor, router: Tensor, k: int, convention: str = "topk_softmax") -> tuple[Tensor, Tensor]:
    """(scores (T, K) fp32, experts (T, K) int32) exactly as `moe_layer` chooses them; not differentiable."""
    with torch.no_grad(), _guard(x):
        return top_k(_logits(x, router), k, convention)


# The algorithm.


class _Held(NamedTuple):
    """What the forward leaves for the backward. R = P rows; see `metadata.Routing`."""

    h: Tensor  # (R, 2n); taken out (None) where the backward is to free it
    row_scores: Tensor  # (R,) fp32
    experts: Tensor  # (P,)
    gather: Tensor  # (R,)
    reverse: Tensor  # (P,)
    expert_offsets: Tensor  # (E+1,)
    tile_expert: Tensor  # (max_tiles,)
    tile_row: Tensor  # (max_tiles,)
    num_tiles: Tensor  # (1,)

    def routing(self, k: int, token_offsets: Tensor | None = None) -> Routing:
        return Routing(
            gather=self.gather,
            reverse=self.reverse,
            token_offsets=token_offsets,
            k=k,
            experts=self.experts,
            expert_offsets=self.expert_offsets,
            tile_expert=self.tile_expert,
            tile_row=self.tile_row,
            num_tiles=self.num_tiles,
            block_m=BLOCK_M,
        )


def _hold(h: Tensor, row_scores: Tensor, routing: Routing) -> _Held:
    return _Held(
        h,
        row_scores,
        routing.experts,
        routing.gather,
        routing.reverse,
        routing.expert_offsets,
        routing.tile_expert,
        routing.tile_row,
        routing.num_tiles,
    )


@contextmanager
def _guard(x: Tensor) -> Iterator[None]:
    """On x's device, and without autocast: the kernels would not see it, and torch's own products beside them would."""
    with torch.cuda.device_of(x):
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                yield
        else:
            yield


def _logits(x: Tensor, router: Tensor) -> Tensor:
    return torch.mm(x, router.t())


_PLAIN = frozenset({Tensor, Parameter, type(None)})


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether nobody looks on who could not see through an `autograd.Function` that launches kernels: no compiler, no
    fake or other subclass of tensors, no dispatch mode, no functional transform."""
    x = tensors[0]
    if torch._C._are_functorch_transforms_active():
        _refuse_functional_derivatives()
    return (
        not torch.compiler.is_compiling()
        and _PLAIN.issuperset(map(type, tensors))
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and x is not None
        and not x.is_meta
    )


class _SavedH:
    """H, which the backward has done with long before it needs the most memory.

    Args:
        tensor: (R, 2n). Letting go frees it where nobody else refers to it: eagerly, not within an operator.
        context: of the `autograd.Function` that has saved it; what is saved is freed with it, unless the graph is to
            be kept. (A backward that fails after this cannot be repeated.)
    """

    def __init__(self, tensor: Tensor, context: Any = None) -> None:
        self.tensor = tensor
        # What compiled functions of torch itself call for the same end; not every version may have it.
        self._release = getattr(context, "maybe_clear_saved_tensors", None)

    def let_go(self) -> None:
        del self.tensor
        if self._release is not None:
            self._release()


def _refuse_functional_derivatives() -> None:
    """An operator's gradient is unknown to functorch, which would drop the tangent of one without a word."""
    active = {interpreter.key() for interpreter in retrieve_all_functorch_interpreters()}
    if active & {TransformType.Grad, TransformType.Jvp}:
        raise NotImplementedError("torch.func.grad and jvp do not know this layer; use torch.autograd.grad or backward")


class _Parameters(NamedTuple):
    """The experts' own, shaped as for `moe_layer`."""

    w1: Tensor
    w2: Tensor
    bias1: Tensor | None
    bias2: Tensor | None


def _experts_forward(
    x: Tensor, parameters: _Parameters, row_scores: Tensor, routing: Routing, activation: str
) -> tuple[Tensor, Tensor]:
    """Steps 3 to 5: (out (T, d), h (R, 2n))."""
    h, a = up_projection(x, parameters.w1, routing, activation, parameters.bias1)
    y = down_projection(a, parameters.w2, routing, parameters.bias2)
    del a
    return aggregate(y, routing, weights=row_scores), h


class _Needs(NamedTuple):
    """Which gradients are wanted; ``routing``: that of the router, or of the caller's scores."""

    x: bool
    w1: bool
    w2: bool
    routing: bool
    bias1: bool
    bias2: bool


class _Gradients(NamedTuple):
    """None where not wanted; ``routing`` as in `_Needs`."""

    x: Tensor | None  # (T, d)
    w1: Tensor | None  # (E, 2n, d)
    w2: Tensor | None  # (E, d, n)
    routing: Tensor | None  # (E, d) or (P,)
    bias1: Tensor | None  # (E, 2n)
    bias2: Tensor | None  # (E, d)


def _experts_backward(
    grad_out: Tensor,
    x: Tensor,
    parameters: _Parameters,
    held: _Held,
    routing: Routing,
    activation: str,
    routing_backward: Callable[[Tensor], tuple[Tensor | None, Tensor | None]],
    needs: _Needs,
    saved_h: _SavedH,
) -> _Gradients:
    """Steps 6 to 10.

    Args:
        held: its h is not looked at: see ``saved_h``.
        routing_backward: called with parts (C, R) fp32 in row order whose sum is dS; returns the routing's gradient and
            what dX gains by the router.
    """
    w1, w2, bias1, bias2 = parameters
    grad_x = grad_w1 = grad_w2 = grad_bias1 = grad_bias2 = None
    # 6. dA' = dO W2, then dS, A' = S A and dH in its epilogue: neither Y nor dY is needed.
    grad_h, scaled_a, partial_scores = hidden_gradient(
        grad_out, w2, saved_h.tensor, held.row_scores, routing, activation
    )
    saved_h.let_go()
    # 7. dW2.
    if needs.w2:
        grad_w2 = down_weight_gradient(grad_out, scaled_a, routing)
    del scaled_a
    if bias1 is not None and needs.bias1:
        grad_bias1 = expert_sum(grad_h, routing)
    if bias2 is not None:
        partial_scores[0] += row_products(grad_out, bias2, routing)
        if needs.bias2:
            grad_bias2 = expert_sum(grad_out, routing, weights=held.row_scores, gathered=True)
    grad_routing, base = routing_backward(partial_scores)
    # 8. and 9. dX.
    if needs.x:
        grad_rows = input_gradient(grad_h, w1, routing)
        grad_x = aggregate(grad_rows, routing, base=base, over_base=True)
        del grad_rows
    # 10. dW1.
    if needs.w1:
        grad_w1 = up_weight_gradient(grad_h, x, routing)
    return _Gradients(grad_x, grad_w1, grad_w2, grad_routing, grad_bias1, grad_bias2)


# The layer, router inside.


def _layer_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    router: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    k: int,
    convention: str,
    activation: str,
    keep_logits: bool,
) -> tuple[Tensor, Tensor | None, _Held]:
    """(out, logits if they are asked for or the backward needs them, held)."""
    x = x.contiguous()
    with _guard(x):
        # 1. Router: logits in the layer's dtype, compared and normalised in fp32.
        logits = _logits(x, router)
        scores, experts = top_k(logits, k, convention)
        # 2. Routing.
        routing, row_scores = route(scores, experts, router.shape[0], BLOCK_M)
        del scores
        kept = logits if keep_logits or convention == "softmax_topk" else None
        del logits
        out, h = _experts_forward(x, _Parameters(w1, w2, bias1, bias2), row_scores, routing, activation)
    return out, kept, _hold(h, row_scores, routing)


def _layer_backward(
    grad_out: Tensor,
    grad_logits: Tensor | None,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    router: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    logits: Tensor | None,
    k: int,
    convention: str,
    activation: str,
    *,
    held: _Held,
    needs: _Needs,
    saved_h: _SavedH,
) -> _Gradients:
    """Gradients of the first six tensors of `_layer_forward`. ``logits``: for ``softmax_topk`` only."""
    x, grad_out = x.contiguous(), grad_out.contiguous()

    def router_gradients(partial_scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """11. dS -> dlogits -> dWr, and the router's term of dX."""
        if not needs.x and not needs.routing:
            return None, None
        experts = held.experts.view(-1, k)
        total = router_backward(
            held.row_scores, experts, partial_scores, convention, logits, router.shape[0], x.dtype, held.reverse
        )
        if grad_logits is not None:
            total += grad_logits
        return torch.mm(total.t(), x) if needs.routing else None, torch.mm(total, router) if needs.x else None

    parameters = _Parameters(w1, w2, bias1, bias2)
    with _guard(x):
        return _experts_backward(
            grad_out, x, parameters, held, held.routing(k), activation, router_gradients, needs, saved_h
        )


#: Where H, and with it what is held, begins among the tensors that a function saves: behind x, w1, w2, router, the
#: biases and the logits; or behind x, w1, w2, token_offsets and the biases.
_H_OF_LAYER, _H_OF_ROUTED = 7, 6


class _LayerFunction(torch.autograd.Function):
    """`_layer_forward` and `_layer_backward`; returns out or, if logits are kept, (out, logits, counts)."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, k, convention, activation, keep_logits = arguments
        out, logits, held = _layer_forward(*arguments)
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
        needs = _Needs(*ctx.needs_input_grad[:6])
        saved = list(ctx.saved_tensors)
        if grad_out is None:
            if grad_logits is None:
                return (None,) * 10
            grad_out = torch.zeros_like(saved[0])
        if _is_eager_backward(grad_out, grad_logits, saved[0]):
            saved_h, saved[_H_OF_LAYER] = _SavedH(saved[_H_OF_LAYER], ctx), None
            found = _layer_backward(
                grad_out,
                grad_logits,
                *saved[:_H_OF_LAYER],
                *ctx.rest,
                held=_Held(*saved[_H_OF_LAYER:]),
                needs=needs,
                saved_h=saved_h,
            )
        else:
            found = _wanted(_moe_layer_backward(grad_out, grad_logits, *saved, *ctx.rest, needs), needs)
        return *found, None, None, None, None


def _is_eager_backward(*tensors: Tensor | None) -> bool:
    """Whether the backward may run as it is. A backward that is to be differentiated itself (``create_graph``) is left
    to the operator, whose gradients refuse that with a message when it comes to it."""
    return not torch.is_grad_enabled() and _is_plain(*tensors)


def _wanted(gradients: Sequence[Tensor], needs: _Needs) -> _Gradients:
    """An operator's gradients without the empty ones."""
    return _Gradients(*(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)))


# The same as operators.

_HELD = (
    "Tensor h, Tensor row_scores, Tensor experts, Tensor gather, Tensor reverse, Tensor expert_offsets, "
    "Tensor tile_expert, Tensor tile_row, Tensor num_tiles"
)
_WEIGHTS = "Tensor x, Tensor w1, Tensor w2, Tensor router, Tensor? bias1, Tensor? bias2"
_TENSORS = ", ".join(["Tensor"] * 9)


@torch.library.custom_op(
    "sonicmoe_triton::moe_layer",
    mutates_args=(),
    schema=f"({_WEIGHTS}, int k, str convention, str activation, bool keep_logits) -> (Tensor, Tensor, {_TENSORS})",
)
def _moe_layer(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    router: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    k: int,
    convention: str,
    activation: str,
    keep_logits: bool,
) -> tuple[Tensor, ...]:
    """(out, logits or nothing, *held)."""
    out, logits, held = _layer_forward(x, w1, w2, router, bias1, bias2, k, convention, activation, keep_logits)
    return out, x.new_empty(0) if logits is None else logits, *held


@_moe_layer.register_fake
def _(x: Tensor, w1: Tensor, _w2: Tensor, router: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _bias1, _bias2, k, convention, _activation, keep_logits = rest
    tokens, experts = x.shape[0], router.shape[0]
    logits = x.new_empty(tokens, experts) if keep_logits or convention == "softmax_topk" else x.new_empty(0)
    return x.new_empty(x.shape), logits, *_fake_held(x, w1, tokens * k)


def _fake_held(x: Tensor, w1: Tensor, rows: int) -> _Held:
    experts = w1.shape[0]

    def integers(size: int) -> Tensor:
        return x.new_empty(size, dtype=torch.int32)

    tiles = rows // BLOCK_M + experts
    return _Held(
        x.new_empty(rows, w1.shape[1]),
        x.new_empty(rows, dtype=torch.float32),
        integers(rows),
        integers(rows),
        integers(rows),
        integers(experts + 1),
        integers(tiles),
        integers(tiles),
        integers(1),
    )


@torch.library.custom_op(
    "sonicmoe_triton::moe_layer_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_logits, {_WEIGHTS}, Tensor? logits, {_HELD}, int k, str convention, "
    "str activation, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _moe_layer_backward(
    grad_out: Tensor,
    grad_logits: Tensor | None,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    router: Tensor,
    bias1: Tensor | None,
    bias2: Tensor | None,
    logits: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Gradients of x, w1, w2, router, bias1, bias2; those that ``needs`` does not want come back empty."""
    *tensors, k, convention, activation, needs = rest
    found = _layer_backward(
        grad_out, grad_logits, x, w1, w2, router, bias1, bias2, logits, k, convention, activation,
        held=_Held(*tensors), needs=_Needs(*needs), saved_h=_SavedH(tensors[0]),
    )  # fmt: skip
    return _all(found, x)


@_moe_layer_backward.register_fake
def _(_grad_out: Tensor, _grad_logits: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(rest[:6], needs=rest[-1])


def _all(gradients: _Gradients, like: Tensor) -> tuple[Tensor, ...]:
    """An operator has a tensor for every output: an empty one, each its own, where nothing is wanted."""
    return tuple(like.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _fake_gradients(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Tensor, ...]:
    x = inputs[0]
    assert x is not None
    return tuple(
        tensor.new_empty(tensor.shape) if tensor is not None and need else x.new_empty(0)
        for tensor, need in zip(inputs, needs, strict=True)
    )


def _moe_layer_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, k, convention, activation, _ = inputs
    _, logits, *held = output
    if logits.dim() == 1:
        ctx.mark_non_differentiable(logits, *held)
    else:
        ctx.mark_non_differentiable(*held)
    # Without this, autograd would hand in a zero gradient of H, as large as H.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, logits if convention == "softmax_topk" else None, *held)
    ctx.rest = k, convention, activation


def _moe_layer_gradients(ctx: Any, grad_out: Tensor | None, grad_logits: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    if grad_out is None:
        if grad_logits is None:
            return (None,) * 10
        grad_out = torch.zeros_like(saved[0])
    needs = _Needs(*ctx.needs_input_grad[:6])
    return *_wanted(_moe_layer_backward(grad_out, grad_logits, *saved, *ctx.rest, needs), needs), None, None, None, None


_moe_layer.register_autograd(_moe_layer_gradients, setup_context=_moe_layer_setup)


# The experts alone, routed by the caller.


def _routed_forward(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    scores: Tensor,
    experts: Tensor,
    token_offsets: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    k: int,
    activation: str,
) -> tuple[Tensor, _Held]:
    x = x.contiguous()
    given = experts.view(-1, k) if token_offsets is None else experts
    with _guard(x):
        routing, row_scores = route(scores, given, w1.shape[0], BLOCK_M, token_offsets)
        out, h = _experts_forward(x, _Parameters(w1, w2, bias1, bias2), row_scores, routing, activation)
    return out, _hold(h, row_scores, routing)


def _routed_backward(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    token_offsets: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    k: int,
    activation: str,
    *,
    held: _Held,
    needs: _Needs,
    saved_h: _SavedH,
) -> _Gradients:
    """Gradients of x, w1, w2, scores, bias1, bias2."""
    x, grad_out = x.contiguous(), grad_out.contiguous()

    def scores_gradient(partial_scores: Tensor) -> tuple[Tensor | None, None]:
        return partial_scores.sum(0)[held.reverse] if needs.routing else None, None

    parameters, routing = _Parameters(w1, w2, bias1, bias2), held.routing(k, token_offsets)
    with _guard(x):
        return _experts_backward(grad_out, x, parameters, held, routing, activation, scores_gradient, needs, saved_h)


def _needs_of_routed(ctx: Any) -> _Needs:
    x, w1, w2, scores, _, _, bias1, bias2, _, _ = ctx.needs_input_grad
    return _Needs(x, w1, w2, scores, bias1, bias2)


def _in_routed_order(found: _Gradients) -> tuple[Tensor | None, ...]:
    """Gradients of `_routed_forward`'s arguments."""
    return *found[:4], None, None, found.bias1, found.bias2, None, None


class _RoutedFunction(torch.autograd.Function):
    """`_routed_forward` and `_routed_backward`."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, w1, w2, _, _, token_offsets, bias1, bias2, k, activation = arguments
        out, held = _routed_forward(*arguments)
        ctx.save_for_backward(x, w1, w2, token_offsets, bias1, bias2, *held)
        ctx.rest = k, activation
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        needs, saved = _needs_of_routed(ctx), list(ctx.saved_tensors)
        if _is_eager_backward(grad_out, saved[0]):
            saved_h, saved[_H_OF_ROUTED] = _SavedH(saved[_H_OF_ROUTED], ctx), None
            found = _routed_backward(
                grad_out,
                *saved[:_H_OF_ROUTED],
                *ctx.rest,
                held=_Held(*saved[_H_OF_ROUTED:]),
                needs=needs,
                saved_h=saved_h,
            )
        else:
            found = _wanted(_routed_experts_backward(grad_out, *saved, *ctx.rest, needs), needs)
        return _in_routed_order(found)


_ROUTED = (
    "Tensor x, Tensor w1, Tensor w2, Tensor scores, Tensor experts, Tensor? token_offsets, Tensor? bias1, Tensor? bias2"
)


@torch.library.custom_op(
    "sonicmoe_triton::routed_experts",
    mutates_args=(),
    # The experts are an input, which an output must not alias: the held ones leave them out.
    schema=f"({_ROUTED}, int k, str activation) -> (Tensor, {_TENSORS.removesuffix(', Tensor')})",
)
def _routed_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    scores: Tensor,
    experts: Tensor,
    token_offsets: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    k: int,
    activation: str,
) -> tuple[Tensor, ...]:
    """(out, *held without experts)."""
    out, held = _routed_forward(x, w1, w2, scores, experts, token_offsets, bias1, bias2, k, activation)
    h, row_scores, _experts, *others = held
    return out, h, row_scores, *others


@_routed_experts.register_fake
def _(x: Tensor, w1: Tensor, w2: Tensor, scores: Tensor, *_: Any) -> tuple[Tensor, ...]:
    h, row_scores, _experts, *others = _fake_held(x, w1, scores.shape[0])
    return x.new_empty(x.shape), h, row_scores, *others


@torch.library.custom_op(
    "sonicmoe_triton::routed_experts_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor x, Tensor w1, Tensor w2, Tensor? token_offsets, Tensor? bias1, Tensor? bias2, "
    f"{_HELD}, int k, str activation, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _routed_experts_backward(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    token_offsets: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Gradients of x, w1, w2, scores, bias1, bias2; ``needs`` as in `_moe_layer_backward`."""
    *tensors, k, activation, needs = rest
    found = _routed_backward(
        grad_out, x, w1, w2, token_offsets, bias1, bias2, k, activation,
        held=_Held(*tensors), needs=_Needs(*needs), saved_h=_SavedH(tensors[0]),
    )  # fmt: skip
    return _all(found, x)


@_routed_experts_backward.register_fake
def _(
    _grad_out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, _token_offsets: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    bias1, bias2, _h, row_scores = rest[:4]
    return _fake_gradients((x, w1, w2, row_scores, bias1, bias2), needs=rest[-1])


def _routed_experts_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w1, w2, _, experts, token_offsets, bias1, bias2, k, activation = inputs
    _, h, row_scores, *rest = output
    ctx.mark_non_differentiable(h, row_scores, *rest)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, w1, w2, token_offsets, bias1, bias2, h, row_scores, experts, *rest)
    ctx.rest = k, activation


def _routed_experts_gradients(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * 10
    needs = _needs_of_routed(ctx)
    found = _routed_experts_backward(grad_out, *ctx.saved_tensors, *ctx.rest, needs)
    return _in_routed_order(_wanted(found, needs))


_routed_experts.register_autograd(_routed_experts_gradients, setup_context=_routed_experts_setup)


# Checks.


def _check_router(x: Tensor, router: Tensor, w1: Tensor, k: int, convention: str) -> None:
    check_convention(convention)
    if router.dim() != 2:
        raise ValueError(f"router has shape {tuple(router.shape)}, expected (E, d)")
    if router.shape[0] != w1.shape[0]:
        raise ValueError(f"E: router has {router.shape[0]} experts, w1 has {w1.shape[0]}")
    if router.shape[1] != x.shape[-1]:
        raise ValueError(f"d: router has {router.shape[1]} columns, x has {x.shape[-1]}")
    check_choice(router.shape[0], k)
    _check_pairs(x.shape[0] * k)
    _check_alike(x, router=router)


def check_convention(convention: str) -> None:
    """ValueError for an unknown router convention."""
    if convention not in CONVENTIONS:
        raise ValueError(f"unknown router convention {convention!r}; choose from {', '.join(CONVENTIONS)}")


def check_choice(experts: int, k: int) -> None:
    """ValueError where K of E experts cannot be chosen."""
    if experts > MAX_EXPERTS:
        raise ValueError(f"E = {experts}: at most {MAX_EXPERTS} experts")
    if not 1 <= k <= min(experts, MAX_K):
        raise ValueError(f"K = {k}: must be between 1 and {min(experts, MAX_K)} for E = {experts}")


def check_dtype(dtype: torch.dtype) -> None:
    """ValueError for a dtype that the kernels do not compute in."""
    if dtype not in DTYPES:
        raise ValueError(f"{dtype}: must be one of {', '.join(map(str, DTYPES))}")


def _check_pairs(pairs: int) -> None:
    """Rows are numbered in 32 bits, with room for a tile past the end."""
    if pairs >= MAX_PAIRS:
        raise ValueError(f"T * K = {pairs}: must be below {MAX_PAIRS}")


def check_width(name: str, width: int, dtype: torch.dtype) -> None:
    """ValueError where rows of a width are no multiple of 16 bytes."""
    multiple = ROW_BYTES // dtype.itemsize
    if width < 1 or width % multiple:
        raise ValueError(f"{name} = {width}: must be a multiple of {multiple} in {dtype} (rows of {ROW_BYTES} bytes)")


def _check_experts(
    x: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor | None, bias2: Tensor | None, activation: str
) -> None:
    halves = 2 if is_gated(activation) else 1
    if x.dim() != 2 or w1.dim() != 3 or w2.dim() != 3:
        raise ValueError(
            f"x {tuple(x.shape)}, w1 {tuple(w1.shape)}, w2 {tuple(w2.shape)}: expected (T, d), (E, 2n, d), (E, d, n)"
        )
    experts, d, n = w2.shape
    if x.shape[1] != d:
        raise ValueError(f"d: x has {x.shape[1]} columns, w2 makes {d}")
    if w1.shape[0] != experts:
        raise ValueError(f"E: w1 has {w1.shape[0]} experts, w2 has {experts}")
    if w1.shape[1] != halves * n:
        raise ValueError(f"n: w1 has {w1.shape[1]} rows, expected {halves * n} for {activation}, as w2 takes n = {n}")
    if w1.shape[2] != d:
        raise ValueError(f"d: w1 takes {w1.shape[2]} columns, w2 makes {d}")
    for name, bias, size in (("bias1", bias1, halves * n), ("bias2", bias2, d)):
        if bias is not None and tuple(bias.shape) != (experts, size):
            raise ValueError(f"{name} has shape {tuple(bias.shape)}, expected ({experts}, {size})")
    check_dtype(x.dtype)
    check_width("d", d, x.dtype)
    check_width("n", n, x.dtype)
    _check_alike(x, w1=w1, w2=w2, bias1=bias1, bias2=bias2)


def _check_alike(x: Tensor, **others: Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise ValueError(
                f"{name} is {other.dtype} on {other.device}, x is {x.dtype} on {x.device}: they must agree"
            )
