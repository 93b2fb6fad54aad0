"""What the Triton layer reads of a GPU's memory, what it lets spread, and how much it holds."""

from __future__ import annotations

import gc

import pytest
import torch

from harness.interface import ROUTER_CONVENTIONS
from harness.memory import let_autograd_go

from . import common
from .common import HEADLINE, assert_equal, both_dtypes, built, check, gradients, random, run

pytest.importorskip("triton")

from implementations.sonicmoe_triton.layer import SonicMoE

pytestmark = pytest.mark.usefixtures("exact_float32")


def dirty_memory(gigabytes: int = 4) -> None:
    """Leave every kind of cached block full of NaN (-1 as an integer): small ones, middle ones, one large."""
    if common.DEVICE != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    small = [torch.full((2**size,), 255, dtype=torch.uint8, device="cuda") for size in range(9, 21) for _ in range(40)]
    middle = [torch.full((2**23,), 255, dtype=torch.uint8, device="cuda") for _ in range(40)]
    large = [torch.full((2**29,), 255, dtype=torch.uint8, device="cuda") for _ in range(2 * gigabytes)]
    assert small[0].view(torch.bfloat16).isnan().all() and large[0][:64].view(torch.float32).isnan().all()
    torch.cuda.synchronize()
    del small, middle, large


@both_dtypes
@pytest.mark.parametrize("distribution", ["empty_experts", "one_group", "uniform"])
def test_nothing_unwritten_is_read(distribution: str, dtype: str) -> None:
    layer, problem = built("2050,520,248,16,4", dtype, distribution)
    want = run(layer, problem)
    for _ in range(2):
        dirty_memory()
        got = run(layer, problem)
        assert all(bool(tensor.isfinite().all()) for tensor in got)
        assert_equal(got, want)
    check(problem)


def test_biases_read_nothing_unwritten() -> None:
    layer = SonicMoE(520, 248, 16, 4, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    x, grad = random(300, 520).requires_grad_(), random(300, 520)
    leaves = [x, *layer.parameters()]
    want = gradients(layer(x), leaves, grad)
    dirty_memory()
    assert_equal(gradients(layer(x), leaves, grad), want)


@both_dtypes
def test_nan_stays_with_its_token_and_its_experts(dtype: str) -> None:
    layer, problem = built("300,256,128,12,2", dtype, "one_group")
    x = problem.x.clone()
    x[5, 3] = float("nan")
    indices = layer.expert_indices(x)
    assert indices is not None
    touched = torch.zeros(12, dtype=torch.bool, device=x.device)
    touched[indices[5].long()] = True
    others = torch.arange(300, device=x.device) != 5
    problem.x = x
    output, grad_x, grad_w1, grad_w2, _ = run(layer, problem)
    assert output[5].isnan().all() and output[others].isfinite().all()
    assert grad_x[others].isfinite().all()
    assert grad_w1[~touched].isfinite().all() and grad_w2[~touched].isfinite().all()


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_held_memory_is_the_algorithms(convention: str) -> None:
    """Output, H, and 16 bytes of each routed row; softmax_topk keeps its logits too."""
    layer, problem = built(HEADLINE, convention=convention)
    T, d, n, E, K = (getattr(problem.shape, name) for name in "TdnEK")
    x = problem.x.detach().requires_grad_()
    run(layer, problem)
    let_autograd_go()
    before = torch.cuda.memory_allocated()
    output = layer.forward(x)
    torch.cuda.synchronize()
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    expected = 2 * T * d + 4 * T * K * n + 16 * T * K + 4 * (E + 1) + 8 * (T * K // 128 + E) + 4
    if convention == "softmax_topk":
        expected += 2 * T * E
    assert output.requires_grad
    assert held == pytest.approx(expected, rel=0.01)
    torch.autograd.grad(output, [x, *layer.parameters()], problem.grad_output)
    del output
    let_autograd_go()
    assert torch.cuda.memory_allocated() - before < 0.01 * expected
