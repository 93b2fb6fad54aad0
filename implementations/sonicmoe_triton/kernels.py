"""The six grouped GEMMs as the layer calls them: on Hopper the warp-specialised kernels in Gluon, elsewhere (and for
float32 and in the interpreter) their plain twins in `tl.dot`. Both compute the same, so that the twins check them.
"""

from __future__ import annotations

import functools
import os
from typing import Any

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
from implementations.sonicmoe_triton.tuned import PLAIN, overrides

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return not _INTERPRETED and torch.cuda.get_device_capability(device) == (9, 0)


def on_hopper(tensor: Tensor) -> bool:
    """Whether the Gluon kernels take this tensor: 16-bit elements on a GPU of compute capability 9.0."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _is_hopper(tensor.device)


@functools.cache
def _tuned(kernel: str, d: int, width: int, halves: int) -> Any:
    found = overrides(kernel, d, width)
    if found is None or found is PLAIN:
        return found
    if kernel in (tiles.UP_PROJECTION, tiles.HIDDEN_GRADIENT):
        return gluon_gathered.make_options(halves=halves, **found)
    contiguous = kernel in (tiles.DOWN_PROJECTION, tiles.INPUT_GRADIENT)
    return gluon_contiguous.Options(**found) if contiguous else gluon_weight_gradient.Options(**found)


def _choice(kernel: str, d: int, width: int, operand: Tensor, halves: int = 1) -> Any:
    """The Gluon kernel's options by the table (None: its own choice), or `PLAIN`: the plain twin must do."""
    return _tuned(kernel, d, width, halves) if on_hopper(operand) else PLAIN


def up_projection(
    x: Tensor, w1: Tensor, routing: Routing, activation: str, bias1: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(h (R, 2n), a (R, n)); see the twin in `up_projection`."""
    halves = 2 if is_gated(activation) else 1
    found = _choice(tiles.UP_PROJECTION, w1.shape[2], w1.shape[1] // halves, x, halves)
    if found is PLAIN:
        return plain_up_projection.up_projection(x, w1, routing, activation, bias1)
    return gluon_up_projection.up_projection(x, w1, routing, activation, bias1, found)


def down_projection(a: Tensor, w2: Tensor, routing: Routing, bias2: Tensor | None = None) -> Tensor:
    """y (R, d); see the twin in `contiguous_gemm`."""
    found = _choice(tiles.DOWN_PROJECTION, w2.shape[1], w2.shape[2], a)
    if found is PLAIN:
        return contiguous_gemm.down_projection(a, w2, routing, bias2)
    return gluon_contiguous.down_projection(a, w2, routing, bias2, found)


def input_gradient(grad_h: Tensor, w1: Tensor, routing: Routing) -> Tensor:
    """grad_rows (R, d); see the twin in `contiguous_gemm`."""
    found = _choice(tiles.INPUT_GRADIENT, w1.shape[2], w1.shape[1], grad_h)
    if found is PLAIN:
        return contiguous_gemm.input_gradient(grad_h, w1, routing)
    return gluon_contiguous.input_gradient(grad_h, w1, routing, found)


def hidden_gradient(
    grad_out: Tensor, w2: Tensor, h: Tensor, row_scores: Tensor, routing: Routing, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_h like h, scaled_a (R, n), partial_scores (C, R)); see the twin in `hidden_gradient`."""
    found = _choice(tiles.HIDDEN_GRADIENT, w2.shape[1], w2.shape[2], grad_out, 2 if is_gated(activation) else 1)
    if found is PLAIN:
        return plain_hidden_gradient.hidden_gradient(grad_out, w2, h, row_scores, routing, activation)
    return gluon_hidden_gradient.hidden_gradient(grad_out, w2, h, row_scores, routing, activation, found)


def up_weight_gradient(grad_h: Tensor, x: Tensor, routing: Routing) -> Tensor:
    """grad_w1 (E, 2n, d); see the twin in `weight_gradient`."""
    found = _choice(tiles.UP_WEIGHT_GRADIENT, x.shape[1], grad_h.shape[1], x)
    if found is PLAIN:
        return weight_gradient.up_weight_gradient(grad_h, x, routing)
    return gluon_weight_gradient.up_weight_gradient(grad_h, x, routing, found)


def down_weight_gradient(grad_out: Tensor, scaled_a: Tensor, routing: Routing) -> Tensor:
    """grad_w2 (E, d, n); see the twin in `weight_gradient`."""
    found = _choice(tiles.DOWN_WEIGHT_GRADIENT, grad_out.shape[1], scaled_a.shape[1], grad_out)
    if found is PLAIN:
        return weight_gradient.down_weight_gradient(grad_out, scaled_a, routing)
    return gluon_weight_gradient.down_weight_gradient(grad_out, scaled_a, routing, found)
