"""Widths that the kernels do not take as they are: padded with zeros to the next that they do.

TMA wants each row to begin at a multiple of 16 bytes, so that d and n are multiples of 8 in a 2-byte dtype and of 4 in
float32. Any other is padded here. The added columns of x meet zeros in W1 and the router; an added hidden unit has
gate = up = 0, thus 0 after every activation, and weights of zero behind it; and what the output gets at the added
columns is dropped. So output, logits and gradients are exactly those of the widths as given. (What is infinite may
become NaN, in its own token: an infinite x times an added unit's zeros.)

This costs copies, which other widths do not have: of x and of all weights in every forward, held until the backward;
of the output; and of the gradients. H has the padded n.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from implementations.sonicmoe_triton.activations import is_gated

ROW_BYTES = 16


def missing(width: int, element_size: int) -> int:
    """Elements that a row lacks to a multiple of 16 bytes."""
    return -width % (ROW_BYTES // element_size)


def fits(w2: Tensor) -> bool:
    """Whether the kernels take the widths d and n of w2 (E, d, n) as they are."""
    _, d, n = w2.shape
    return not (missing(d, w2.element_size()) or missing(n, w2.element_size()))


def widen_columns(tensor: Tensor) -> Tensor:
    """(…, width) -> (…, next multiple of 16 bytes), differentiable; the tensor itself where nothing is missing."""
    return _widen(tensor, missing(tensor.shape[-1], tensor.element_size()))


def widen_experts(
    x: Tensor, w1: Tensor, w2: Tensor, bias1: Tensor | None, bias2: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The arguments with d and n as the kernels take them, differentiable; shapes as for `function.moe_layer`."""
    experts, d, n = w2.shape
    of_d, of_n = missing(d, w2.element_size()), missing(n, w2.element_size())
    # Gate and up rows are padded each for themselves.
    halves = 2 if is_gated(activation) else 1
    if bias1 is not None:
        bias1 = _widen(bias1.reshape(experts, halves, n), of_n).flatten(1)
    return (
        _widen(x, of_d),
        _widen(w1.reshape(experts, halves, n, d), of_d, of_n).flatten(1, 2),
        _widen(w2, of_n, of_d),
        bias1,
        None if bias2 is None else _widen(bias2, of_d),
    )


def _widen(tensor: Tensor, columns: int, rows: int = 0) -> Tensor:
    # Padding by nothing would copy.
    return pad(tensor, (0, columns, 0, rows) if rows else (0, columns)) if columns or rows else tensor
