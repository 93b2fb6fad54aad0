"""Widths that are no multiple of 16 bytes, which the layer pads for its kernels, on the interpreter: against the
harness's fp32 reference, and against plain autograd for what that does not have."""

from __future__ import annotations

import pytest
import torch
from expert_reference import plain_experts, plain_rounded_layer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from harness.interface import Point, Problem, RoutingSpec
from harness.operations import get_operation
from harness.shapes import MoEShape
from implementations.sonicmoe_triton import SonicMoETriton, function, widths
from implementations.sonicmoe_triton.activations import ACTIVATIONS, is_gated
from implementations.sonicmoe_triton.layer import SonicMoE
from implementations.sonicmoe_triton.rounding import round_routing

from .test_layer import assert_all_close, gradients, leaves_of, plain_layer, problem_of, random

#: Odd d, odd n, both, and fewer than 16 bytes.
SHAPES = ["20,37,16,4,2", "20,32,13,4,2", "20,5,3,4,2", "9,1,1,3,2", "0,37,13,4,2"]


def check(problem: Problem) -> None:
    plugin = SonicMoETriton()
    assert plugin.restriction(problem.point) is None
    layer = plugin.build(problem)
    result = get_operation(problem.point.operation).check(layer, problem)
    assert result.reason is None, result.reason
    size = problem.shape
    x = problem.x.detach().requires_grad_()
    found = torch.autograd.grad(layer.forward(x), [x, *layer.parameters()], problem.grad_output)
    shapes = {name: tuple(its.shape) for name, its in layer.canonical_gradients(found[1:]).items()}
    assert found[0].shape == x.shape and shapes["grad_down"] == (size.E, size.d, size.n)
    assert shapes["grad_gate"] == shapes["grad_up"] == (size.E, size.n, size.d)


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, "float16") for shape in SHAPES), ("20,37,13,4,2", "float32"), (SHAPES[2], "float32")]
)
def test_the_gate_passes(shape: str, dtype: str) -> None:
    check(problem_of(shape, dtype))


@pytest.mark.parametrize(
    ("operation", "method"),
    [("moe_layer", "nearest"), ("moe_layer", "stochastic"), ("routed_experts", "expert_choice")],
)
def test_the_gate_passes_rounded_and_with_the_routing_given(operation: str, method: str) -> None:
    shape, routing = MoEShape.parse("24,13,7,5,2"), RoutingSpec(method, m_tile=8)
    point = Point(operation, "sonicmoe_triton", shape, "float16", routing=routing, device="cpu")
    check(get_operation(operation).make_problem(point, "cpu"))


def tensors(T: int, d: int, n: int, E: int, activation: str) -> list[Tensor]:
    """x, w1, w2, router, bias1, bias2."""
    hidden = 2 * n if is_gated(activation) else n
    return [
        random(T, d), random(E, hidden, d, scale=0.3), random(E, d, n), random(E, d), random(E, hidden), random(E, d)
    ]  # fmt: skip


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str) -> None:
    given = tensors(10, 13, 7, 3, activation)
    got, want, grad = leaves_of(*given), leaves_of(*given), random(10, 13) + 0.5
    out = function.moe_layer(*got[:4], 2, activation=activation, bias1=got[4], bias2=got[5])
    plain = plain_layer(*want[:4], 2, activation, *want[4:])
    assert out.is_contiguous()
    assert_all_close(gradients(out, got, grad), gradients(plain, want, grad))


def test_rounded_with_biases() -> None:
    activation = "geglu"
    given = tensors(24, 13, 7, 4, activation)
    got, want, grad = leaves_of(*given), leaves_of(*given), random(24, 13) + 0.5
    out, said = function.rounded_moe_layer(*got[:4], 2, 8, "nearest", "topk_softmax", activation, *got[4:])
    indices = function.choose_experts(*given[0:4:3], 2)[1]
    kept = round_routing(said.logits.detach(), 2, 8, "nearest")
    experts = kept.experts[: int(kept.token_offsets[-1])]
    plain = plain_rounded_layer(want, indices, experts, kept.token_offsets, "topk_softmax", activation)
    found, expected = gradients(out, got, grad), gradients(plain, want, grad)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_routing_of_the_caller() -> None:
    """Tokens with no pair, with one and with all experts; an expert without rows; gradients of scores and biases."""
    experts, offsets = torch.tensor([1, 3, 0, 1, 2, 3, 3, 0, 1, 3]), torch.tensor([0, 2, 2, 6, 7, 7, 10])
    x, w1, w2, _, bias1, bias2 = tensors(6, 11, 5, 5, "swiglu")
    given = [x, w1, w2, random(10).abs(), bias1, bias2]
    got, want, grad = leaves_of(*given), leaves_of(*given), random(6, 11) + 0.5
    out = function.routed_experts(*got[:4], experts, offsets, "swiglu", *got[4:])
    tokens = torch.arange(6).repeat_interleave(offsets.diff())
    found = gradients(out, got, grad)
    assert_all_close(found, gradients(plain_experts(*want[:4], experts, tokens, "swiglu", *want[4:]), want, grad))
    assert not any(found[i][4].any() for i in (2, 3, 5, 6))


def test_the_router_says_what_it_chooses_by() -> None:
    """Logits of the width as given, differentiable, and the experts of the layer itself."""
    x, w1, w2, router = leaves_of(*tensors(30, 13, 7, 6, "swiglu")[:4])
    _, said = function.moe_layer_with_router(x, w1, w2, router, 2)
    torch.testing.assert_close(said.logits, x @ router.T)
    experts = function.choose_experts(x, router, 2)[1]
    assert torch.equal(experts.long().sort(1).values, said.logits.topk(2).indices.sort(1).values)
    grad = random(30, 6)
    found = torch.autograd.grad(said.logits, [x, router], grad)
    torch.testing.assert_close(found[0], grad @ router)
    torch.testing.assert_close(found[1], grad.T @ x)


def test_the_modules_parameters_are_as_given() -> None:
    """Of the widths asked for, in the state that is saved too; loaded, compiled and checkpointed like any other's."""
    d, n = 13, 7
    layer = SonicMoE(d, n, 3, 2)
    gate, up, down = random(3, n, d), random(3, n, d) + 0.1, random(3, d, n)
    layer.load_gate_up_down(torch.stack([gate, up], 2).reshape(3, 2 * n, d), None, down, "interleaved")
    shapes = {name: tuple(its.shape) for name, its in layer.state_dict().items()}
    assert shapes == {"w1": (3, 2 * n, d), "w2": (3, d, n), "router": (3, d)}
    x, grad = random(2, 3, d).requires_grad_(), random(2, 3, d)
    leaves = [x, *layer.parameters()]
    plain = plain_layer(x.view(6, d), torch.cat([gate, up], 1), down, layer.router, 2).view(2, 3, d)
    eager = gradients(layer(x), leaves, grad)
    assert_all_close(eager[:2], gradients(plain, [x], grad))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    again = gradients(compiled(x), leaves, grad)
    out = checkpoint(layer, x, use_reentrant=False)
    assert isinstance(out, Tensor)
    for other in (again, gradients(out, leaves, grad)):
        assert all(torch.equal(a, b) for a, b in zip(eager, other, strict=True))


def test_what_fits_is_not_copied() -> None:
    x, w1, w2, router, bias1, bias2 = tensors(5, 12, 8, 3, "swiglu")
    assert widths.fits(w2) and not widths.fits(w2.half())
    assert widths.widen_columns(router) is router
    # d as it is and n padded: what knows nothing of n stays.
    found = widths.widen_experts(x, w1[:, :14], w2[..., :7], bias1[:, :14], bias2, "swiglu")
    assert found[0] is x and found[4] is bias2
    assert [tuple(tensor.shape) for tensor in found if tensor is not None] == [(5, 12), (3, 16, 12), (3, 12, 8),
                                                                                (3, 16), (3, 12)]  # fmt: skip
    # Gate and up rows each with a row of zeros behind them.
    assert torch.equal(found[1][:, :7], w1[:, :7]) and torch.equal(found[1][:, 8:15], w1[:, 7:14])
    assert not found[1][:, [7, 15]].any() and not found[2][..., 7].any()
