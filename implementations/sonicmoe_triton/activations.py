"""Activations of an expert's hidden layer, inlined into the epilogues that need them.

Gated, of the halves gate | up of H:      swiglu  silu(gate) * up     geglu  gelu(gate) * up     reglu  relu(gate) * up
Ungated, of H alone (called ``gate`` here): silu                      gelu                       relu2  relu(gate)^2

gelu is the exact one, x Φ(x) with the normal distribution's Φ and density φ, as torch.nn.functional.gelu computes it.
All values are fp32 tensors of one shape, in registers; ``ACTIVATION`` is a name known at compile time.
"""

from __future__ import annotations

import triton
import triton.language as tl

GATED = ("swiglu", "geglu", "reglu")
UNGATED = ("silu", "gelu", "relu2")
ACTIVATIONS = GATED + UNGATED

_SQRT_HALF = tl.constexpr(0.7071067811865476)  # 1 / sqrt(2)
_DENSITY_AT_ZERO = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)


def is_gated(activation: str) -> bool:
    """Whether H has the halves gate | up (2n columns) rather than n columns; ValueError for an unknown name."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; choose from {', '.join(ACTIVATIONS)}")
    return activation in GATED


@triton.jit
def _value_and_slope(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """f(gate) and f'(gate), where the activation is f(gate) * up, or f(gate) for an ungated one."""
    tl.static_assert(
        (ACTIVATION == "swiglu")
        | (ACTIVATION == "silu")
        | (ACTIVATION == "geglu")
        | (ACTIVATION == "gelu")
        | (ACTIVATION == "reglu")
        | (ACTIVATION == "relu2"),
        "unknown activation",
    )
    if (ACTIVATION == "swiglu") or (ACTIVATION == "silu"):
        sigmoid = tl.sigmoid(gate)
        value = gate * sigmoid
        slope = sigmoid + value * (1.0 - sigmoid)
    elif (ACTIVATION == "geglu") or (ACTIVATION == "gelu"):
        below = 0.5 + 0.5 * tl.erf(gate * _SQRT_HALF)
        value = gate * below
        slope = below + gate * (tl.exp(-0.5 * gate * gate) * _DENSITY_AT_ZERO)
    # gate <= 0 and not gate > 0 decides, so that NaN stays NaN.
    elif ACTIVATION == "reglu":
        value = tl.where(gate <= 0.0, 0.0, gate)
        slope = tl.where(gate <= 0.0, 0.0, 1.0)
    else:
        positive = tl.where(gate <= 0.0, 0.0, gate)
        value = positive * positive
        slope = 2.0 * positive
    return value, slope


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """A. An ungated activation ignores ``up``."""
    value, _ = _value_and_slope(gate, ACTIVATION)
    if (ACTIVATION == "swiglu") or (ACTIVATION == "geglu") or (ACTIVATION == "reglu"):
        value = value * up
    return value


@triton.jit
def activation_backward(gate, up, grad, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """(grad_gate, grad_up, activated) for ``grad``, the gradient of A; grad_up of an ungated activation is zero."""
    value, slope = _value_and_slope(gate, ACTIVATION)
    if (ACTIVATION == "swiglu") or (ACTIVATION == "geglu") or (ACTIVATION == "reglu"):
        grad_gate = grad * up * slope
        grad_up = grad * value
        activated = value * up
    else:
        grad_gate = grad * slope
        grad_up = tl.zeros_like(grad)
        activated = value
    return grad_gate, grad_up, activated
