"""The Triton layer on a GPU gives the same bits for equal inputs, whatever their strides and alignment."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.interface import Problem

from . import common
from .common import MEDIUM, NAME, assert_equal, both_dtypes, built, check, gradients, problem_of, random, run

pytest.importorskip("triton")

from implementations.sonicmoe_triton import function
from implementations.sonicmoe_triton.layer import SonicMoE

pytestmark = pytest.mark.usefixtures("exact_float32")


@both_dtypes
@pytest.mark.parametrize("distribution", ["uniform", "skewed"])
@pytest.mark.parametrize("shape", ["4097,768,256,64,8", "1000,776,72,10,3"])
def test_identical_calls_agree(shape: str, distribution: str, dtype: str) -> None:
    layer, problem = built(shape, dtype, distribution)
    first = run(layer, problem)
    for _ in range(2):
        assert_equal(run(layer, problem), first)


def test_biases_agree_with_themselves() -> None:
    layer = SonicMoE(512, 256, 16, 4, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    x, grad = random(2048, 512).requires_grad_(), random(2048, 512)
    leaves = [x, *layer.parameters()]
    first = gradients(layer(x), leaves, grad)
    for _ in range(2):
        assert_equal(gradients(layer(x), leaves, grad), first)


def test_strides_change_nothing() -> None:
    layer, problem = built(MEDIUM)
    want = run(layer, problem)
    wide = torch.zeros(problem.shape.T, 2 * problem.shape.d, dtype=problem.x.dtype, device=problem.x.device)
    wide[:, ::2] = problem.x
    strided = Problem(
        problem.point, wide[:, ::2], problem.gate, problem.up, problem.down, problem.router,
        problem.grad_output.T.contiguous().T,
    )  # fmt: skip
    assert not strided.x.is_contiguous() and not strided.grad_output.is_contiguous()
    assert_equal(run(layer, strided), want)
    strided.x = problem.x.T.contiguous().T
    assert_equal(run(layer, strided), want)
    # A sum's gradient has strides zero.
    strided.grad_output = torch.ones((), dtype=problem.x.dtype, device=problem.x.device).expand(problem.x.shape)
    problem.grad_output = strided.grad_output.contiguous()
    assert_equal(run(layer, strided), run(layer, problem))


def test_strides_of_the_experts_weights_change_nothing() -> None:
    x, router = random(2048, 512), random(16, 512, scale=0.05)
    w1, w2 = random(16, 512, 512, scale=0.05), random(16, 512, 256, scale=0.05)
    grad = random(2048, 512)
    found = []
    for first, second in ((w1, w2), (w1.mT.contiguous().mT, w2.mT.contiguous().mT)):
        leaves = [x.requires_grad_(), first.requires_grad_(), second.requires_grad_(), router.requires_grad_()]
        found.append(gradients(function.moe_layer(x, first, second, router, 4), leaves, grad))
    assert_equal(found[0], found[1])


def test_tensors_off_their_alignment() -> None:
    """Rows that begin two bytes past a multiple of 16."""
    problem = problem_of(NAME, MEDIUM)

    def moved(tensor: Tensor) -> Tensor:
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        view = buffer[1:].view(tensor.shape)
        return view.copy_(tensor)

    for name in ("x", "down", "router", "grad_output"):
        setattr(problem, name, moved(getattr(problem, name)))
    assert common.DEVICE != "cuda" or problem.x.data_ptr() % 16 == 2
    check(problem)


def test_two_widths_in_one_process() -> None:
    """What is compiled or cached for one width must not serve another."""
    pairs = [built(shape) for shape in (MEDIUM, "1000,768,128,8,2", "1000,520,248,10,3")]
    first = [run(layer, problem) for layer, problem in pairs]
    for _ in range(2):
        for (layer, problem), want in zip(pairs, first, strict=True):
            assert_equal(run(layer, problem), want)
    for _, problem in pairs:
        check(problem)
