"""Our layer as `torch.library` operators, with fake twins that only tell shapes.

For compilers, fake tensors and dispatch modes, who see one opaque step for a pass. An operator has a tensor for every
output, an empty one where nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from implementations.sonicmoe_triton.algorithm import (
    BLOCK_M,
    Gradients,
    Held,
    Needs,
    SavedH,
    layer_backward,
    layer_forward,
    routed_backward,
    routed_forward,
)


def wanted(gradients: Sequence[Tensor], needs: Needs) -> Gradients:
    """An operator's gradients without the empty ones."""
    return Gradients(*(gradient if need else None for gradient, need in zip(gradients, needs, strict=True)))


def needs_of_routed(ctx: Any) -> Needs:
    x, w1, w2, scores, _, _, bias1, bias2, _, _ = ctx.needs_input_grad
    return Needs(x, w1, w2, scores, bias1, bias2)


def in_routed_order(found: Gradients) -> tuple[Tensor | None, ...]:
    """Gradients of `routed_forward`'s arguments."""
    return *found[:4], None, None, found.bias1, found.bias2, None, None


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
def moe_layer_operator(
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
    out, logits, held = layer_forward(x, w1, w2, router, bias1, bias2, k, convention, activation, keep_logits)
    return out, x.new_empty(0) if logits is None else logits, *held


@moe_layer_operator.register_fake
def _(x: Tensor, w1: Tensor, _w2: Tensor, router: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    _bias1, _bias2, k, convention, _activation, keep_logits = rest
    tokens, experts = x.shape[0], router.shape[0]
    logits = x.new_empty(tokens, experts) if keep_logits or convention == "softmax_topk" else x.new_empty(0)
    return x.new_empty(x.shape), logits, *_fake_held(x, w1, tokens * k)


def _fake_held(x: Tensor, w1: Tensor, rows: int) -> Held:
    experts = w1.shape[0]

    def integers(size: int) -> Tensor:
        return x.new_empty(size, dtype=torch.int32)

    tiles = rows // BLOCK_M + experts
    return Held(
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
def moe_layer_backward_operator(
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
    found = layer_backward(
        grad_out, grad_logits, x, w1, w2, router, bias1, bias2, logits, k, convention, activation,
        held=Held(*tensors), needs=Needs(*needs), saved_h=SavedH(tensors[0]),
    )  # fmt: skip
    return _all(found, x)


@moe_layer_backward_operator.register_fake
def _(_grad_out: Tensor, _grad_logits: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    return _fake_gradients(rest[:6], needs=rest[-1])


def _all(gradients: Gradients, like: Tensor) -> tuple[Tensor, ...]:
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
    needs = Needs(*ctx.needs_input_grad[:6])
    return (
        *wanted(moe_layer_backward_operator(grad_out, grad_logits, *saved, *ctx.rest, needs), needs),
        None,
        None,
        None,
        None,
    )


moe_layer_operator.register_autograd(_moe_layer_gradients, setup_context=_moe_layer_setup)


# The experts alone, routed by the caller.

_ROUTED = (
    "Tensor x, Tensor w1, Tensor w2, Tensor scores, Tensor experts, Tensor? token_offsets, Tensor? bias1, Tensor? bias2"
)


@torch.library.custom_op(
    "sonicmoe_triton::routed_experts",
    mutates_args=(),
    # The experts are an input, which an output must not alias: the held ones leave them out.
    schema=f"({_ROUTED}, int k, str activation) -> (Tensor, {_TENSORS.removesuffix(', Tensor')})",
)
def routed_experts_operator(
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
    out, held = routed_forward(x, w1, w2, scores, experts, token_offsets, bias1, bias2, k, activation)
    h, row_scores, _experts, *others = held
    return out, h, row_scores, *others


@routed_experts_operator.register_fake
def _(x: Tensor, w1: Tensor, w2: Tensor, scores: Tensor, *_: Any) -> tuple[Tensor, ...]:
    h, row_scores, _experts, *others = _fake_held(x, w1, scores.shape[0])
    return x.new_empty(x.shape), h, row_scores, *others


@torch.library.custom_op(
    "sonicmoe_triton::routed_experts_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor x, Tensor w1, Tensor w2, Tensor? token_offsets, Tensor? bias1, Tensor? bias2, "
    f"{_HELD}, int k, str activation, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def routed_experts_backward_operator(
    grad_out: Tensor,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    token_offsets: Tensor | None,
    bias1: Tensor | None,
    bias2: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Gradients of x, w1, w2, scores, bias1, bias2; ``needs`` as in `moe_layer_backward_operator`."""
    *tensors, k, activation, needs = rest
    found = routed_backward(
        grad_out, x, w1, w2, token_offsets, bias1, bias2, k, activation,
        held=Held(*tensors), needs=Needs(*needs), saved_h=SavedH(tensors[0]),
    )  # fmt: skip
    return _all(found, x)


@routed_experts_backward_operator.register_fake
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
    needs = needs_of_routed(ctx)
    found = routed_experts_backward_operator(grad_out, *ctx.saved_tensors, *ctx.rest, needs)
    return in_routed_order(wanted(found, needs))


routed_experts_operator.register_autograd(_routed_experts_gradients, setup_context=_routed_experts_setup)
