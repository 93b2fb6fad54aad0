"""What each grouped GEMM demands of its operands, whichever of its two kernels computes it.

Each function raises ValueError where d or n is no multiple of 16 bytes, or where a tensor's shape, dtype or device does
not fit the others, and returns the sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implementations.sonicmoe_triton.activations import is_gated
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.tiles import check_shape, check_width


class RouterTerm(NamedTuple):
    """What the router adds to the gradient of a routed row's input, where a token's chosen experts alone have a
    gradient: row_gradients[r] * router[e] for row r of expert e."""

    row_gradients: Tensor  # (R,) fp32, of the logits
    router: Tensor  # (E, d)


def check_up_projection(x: Tensor, w1: Tensor, activation: str, bias1: Tensor | None) -> tuple[int, int, int, int]:
    """(halves, E, d, n). ValueError too for an unknown activation."""
    halves = 2 if is_gated(activation) else 1
    experts, hidden, d = w1.shape
    n = hidden // halves
    check_width("d", d, x.dtype)
    check_width("n", n, x.dtype)
    check_shape("x", x, (x.shape[0], d), x.dtype, x.device)
    check_shape("w1", w1, (experts, halves * n, d), x.dtype, x.device)
    if bias1 is not None:
        check_shape("bias1", bias1, (experts, halves * n), bias1.dtype, x.device)
    return halves, experts, d, n


def check_down_projection(a: Tensor, w2: Tensor, routing: Routing, bias2: Tensor | None) -> tuple[int, int]:
    """(d, n)."""
    experts, d, n = w2.shape
    check_width("d", d, a.dtype)
    check_width("n", n, a.dtype)
    check_shape("a", a, (routing.rows, n), a.dtype, a.device)
    check_shape("w2", w2, (experts, d, n), a.dtype, a.device)
    if bias2 is not None:
        check_shape("bias2", bias2, (experts, d), bias2.dtype, a.device)
    return d, n


def check_input_gradient(
    grad_h: Tensor, w1: Tensor, routing: Routing, router_term: RouterTerm | None
) -> tuple[int, int]:
    """(d, H's width)."""
    experts, hidden, d = w1.shape
    check_width("d", d, grad_h.dtype)
    check_width("H's width", hidden, grad_h.dtype)
    check_shape("grad_h", grad_h, (routing.rows, hidden), grad_h.dtype, grad_h.device)
    check_shape("w1", w1, (experts, hidden, d), grad_h.dtype, grad_h.device)
    if router_term is not None:
        check_shape("row_gradients", router_term.row_gradients, (routing.rows,), torch.float32, grad_h.device)
        check_shape("router", router_term.router, (experts, d), router_term.router.dtype, grad_h.device)
    return d, hidden


def check_hidden_gradient(
    grad_out: Tensor, w2: Tensor, h: Tensor, row_scores: Tensor, routing: Routing, activation: str
) -> tuple[int, int, int, int]:
    """(halves, E, d, n). ValueError too for an unknown activation."""
    halves = 2 if is_gated(activation) else 1
    experts, d, n = w2.shape
    dtype, device = grad_out.dtype, grad_out.device
    check_width("d", d, dtype)
    check_width("n", n, dtype)
    check_shape("grad_out", grad_out, (grad_out.shape[0], d), dtype, device)
    check_shape("w2", w2, (experts, d, n), dtype, device)
    check_shape("h", h, (routing.rows, halves * n), dtype, device)
    check_shape("row_scores", row_scores, (routing.rows,), torch.float32, device)
    return halves, experts, d, n


def check_up_weight_gradient(grad_h: Tensor, x: Tensor, routing: Routing) -> tuple[int, int]:
    """(H's width, d)."""
    hidden, d = grad_h.shape[-1], x.shape[-1]
    check_width("d", d, x.dtype)
    check_width("H's width", hidden, x.dtype)
    check_shape("x", x, (x.shape[0], d), x.dtype, x.device)
    check_shape("grad_h", grad_h, (routing.rows, hidden), x.dtype, x.device)
    return hidden, d


def check_down_weight_gradient(grad_out: Tensor, scaled_a: Tensor, routing: Routing) -> tuple[int, int]:
    """(d, n)."""
    d, n = grad_out.shape[-1], scaled_a.shape[-1]
    dtype, device = grad_out.dtype, grad_out.device
    check_width("d", d, dtype)
    check_width("n", n, dtype)
    check_shape("grad_out", grad_out, (grad_out.shape[0], d), dtype, device)
    check_shape("scaled_a", scaled_a, (routing.rows, n), dtype, device)
    return d, n
