"""The six grouped GEMMs as the layer calls them: on Hopper the warp-specialised kernels in Gluon, elsewhere (and for
float32 and in the interpreter) their plain twins in `tl.dot`. Both compute the same, so that the twins check them.

On Hopper the table of `tuned` has its say: for some widths and numbers of rows it has other options than the Gluon
kernel would choose, and for some the plain twin instead. Entries of the up-projection and of dH, whose tiles depend on
the activation's halves, were measured with a gated activation and count for gated ones only; the other kernels do not
know the activation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from implementations.sonicmoe_triton import (
    contiguous_gemm,
    gluon_contiguous,
    gluon_gathered,
    gluon_hidden_gradient,
    gluon_up_projection,
    gluon_weight_gradient,
    tiles,
    weight_gradient,
)
from implementations.sonicmoe_triton import hidden_gradient as plain_hidden_gradient
from implementations.sonicmoe_triton import up_projection as plain_up_projection
from implementations.sonicmoe_triton.activations import is_gated
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import RouterTerm
from implementations.sonicmoe_triton.tuned import PLAIN, bucket, overrides

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return not _INTERPRETED and torch.cuda.get_device_capability(device) == (9, 0)


def on_hopper(tensor: Tensor) -> bool:
    """Whether the Gluon kernels take this tensor: 16-bit elements on a GPU of compute capability 9.0."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _is_hopper(tensor.device)


OptionsT = TypeVar("OptionsT")


class Choice(NamedTuple, Generic[OptionsT]):
    """The plain twin, or the Gluon kernel with its options.

    Attributes:
        plain: take the twin.
        options: the Gluon kernel's; None for those that it chooses itself.
    """

    plain: bool
    options: OptionsT | None = None


def _choice(
    kernel: str,
    make: Callable[..., OptionsT],
    d: int,
    width: int,
    operand: Tensor,
    routing: Routing,
    gated: bool = True,
) -> Choice[OptionsT]:
    """What a kernel of `tiles`, whose options `make` makes, runs as; d and width as `tuned.overrides` has them."""
    if not on_hopper(operand):
        return Choice(plain=True)
    if not gated:
        return Choice(plain=False)
    return _tuned(kernel, make, d, width, bucket(routing.rows // max(routing.num_experts, 1)))


@functools.cache
def _tuned(kernel: str, make: Callable[..., OptionsT], d: int, width: int, rows: int) -> Choice[OptionsT]:
    found = overrides(kernel, d, width, rows)
    if found is None:
        return Choice(plain=False)
    return Choice(plain=True) if found == PLAIN else Choice(plain=False, options=make(**found))


def up_projection(
    x: Tensor, w1: Tensor, routing: Routing, activation: str, bias1: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(h (R, 2n), a (R, n)); see the twin in `up_projection`."""
    gated = is_gated(activation)
    n = w1.shape[1] // (2 if gated else 1)
    choice = _choice(tiles.UP_PROJECTION, gluon_gathered.make_options, w1.shape[2], n, x, routing, gated)
    if choice.plain:
        return plain_up_projection.up_projection(x, w1, routing, activation, bias1)
    return gluon_up_projection.up_projection(x, w1, routing, activation, bias1, choice.options)


def down_projection(a: Tensor, w2: Tensor, routing: Routing, bias2: Tensor | None = None) -> Tensor:
    """y (R, d); see the twin in `contiguous_gemm`."""
    choice = _choice(tiles.DOWN_PROJECTION, gluon_contiguous.Options, w2.shape[1], w2.shape[2], a, routing)
    if choice.plain:
        return contiguous_gemm.down_projection(a, w2, routing, bias2)
    return gluon_contiguous.down_projection(a, w2, routing, bias2, choice.options)


def input_gradient(grad_h: Tensor, w1: Tensor, routing: Routing, router_term: RouterTerm | None = None) -> Tensor:
    """grad_rows (R, d); see the twin in `contiguous_gemm`."""
    choice = _choice(tiles.INPUT_GRADIENT, gluon_contiguous.Options, w1.shape[2], w1.shape[1], grad_h, routing)
    if choice.plain:
        return contiguous_gemm.input_gradient(grad_h, w1, routing, router_term)
    return gluon_contiguous.input_gradient(grad_h, w1, routing, router_term, choice.options)


def hidden_gradient(
    grad_out: Tensor, w2: Tensor, h: Tensor, row_scores: Tensor, routing: Routing, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_h like h, scaled_a (R, n), partial_scores (C, R)); see the twin in `hidden_gradient`."""
    make = gluon_gathered.make_options
    choice = _choice(tiles.HIDDEN_GRADIENT, make, w2.shape[1], w2.shape[2], grad_out, routing, is_gated(activation))
    if choice.plain:
        return plain_hidden_gradient.hidden_gradient(grad_out, w2, h, row_scores, routing, activation)
    return gluon_hidden_gradient.hidden_gradient(grad_out, w2, h, row_scores, routing, activation, choice.options)


def up_weight_gradient(grad_h: Tensor, x: Tensor, routing: Routing) -> Tensor:
    """grad_w1 (E, 2n, d); see the twin in `weight_gradient`."""
    choice = _choice(tiles.UP_WEIGHT_GRADIENT, gluon_weight_gradient.Options, x.shape[1], grad_h.shape[1], x, routing)
    if choice.plain:
        return weight_gradient.up_weight_gradient(grad_h, x, routing)
    return gluon_weight_gradient.up_weight_gradient(grad_h, x, routing, choice.options)


def down_weight_gradient(grad_out: Tensor, scaled_a: Tensor, routing: Routing) -> Tensor:
    """grad_w2 (E, d, n); see the twin in `weight_gradient`."""
    make = gluon_weight_gradient.Options
    choice = _choice(tiles.DOWN_WEIGHT_GRADIENT, make, grad_out.shape[1], scaled_a.shape[1], grad_out, routing)
    if choice.plain:
        return weight_gradient.down_weight_gradient(grad_out, scaled_a, routing)
    return gluon_weight_gradient.down_weight_gradient(grad_out, scaled_a, routing, choice.options)
