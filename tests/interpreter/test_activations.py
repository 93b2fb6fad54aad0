"""Every activation and its derivative, against torch's own and its autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from implementations.sonicmoe_triton.activations import ACTIVATIONS, GATED, activate, activation_backward, is_gated

SIZE = 64
REFERENCE: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "reglu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}


@triton.jit
def _probe(gate_ptr, up_ptr, grad_ptr, out_ptr, SIZE: tl.constexpr, ACTIVATION: tl.constexpr):
    at = tl.arange(0, SIZE)
    gate, up, grad = tl.load(gate_ptr + at), tl.load(up_ptr + at), tl.load(grad_ptr + at)
    tl.store(out_ptr + at, activate(gate, up, ACTIVATION))
    grad_gate, grad_up, activated = activation_backward(gate, up, grad, ACTIVATION)
    tl.store(out_ptr + SIZE + at, activated)
    tl.store(out_ptr + 2 * SIZE + at, grad_gate)
    tl.store(out_ptr + 3 * SIZE + at, grad_up)


def _run(activation: str, gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    out = torch.empty(4, SIZE)
    _probe[(1,)](gate, up, grad, out, SIZE=SIZE, ACTIVATION=activation)
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_value_and_gradients(activation: str) -> None:
    generator = torch.Generator().manual_seed(1)
    gate, up, grad = (3 * torch.randn(SIZE, generator=generator) for _ in range(3))
    gate[:3] = torch.tensor([0.0, 20.0, -20.0])
    got = _run(activation, gate, up, grad)
    gate, up = gate.double().requires_grad_(), up.double().requires_grad_()
    want = REFERENCE[activation](gate) * (up if is_gated(activation) else 1.0)
    grad_gate, grad_up = torch.autograd.grad(want, [gate, up], grad.double(), allow_unused=True, materialize_grads=True)
    expected = torch.stack([want.detach(), want.detach(), grad_gate, grad_up])
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan(activation: str) -> None:
    ones = torch.ones(SIZE)
    got = _run(activation, torch.full((SIZE,), float("nan")), ones, ones)
    assert got[:2].isnan().all()
    if activation in GATED:
        assert got[3].isnan().all()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown activation 'tanh'; choose from swiglu"):
        is_gated("tanh")
