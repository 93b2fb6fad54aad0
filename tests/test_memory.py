"""Held memory: hand-made layers of known size, and the layers at the paper's full size under fake tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from conftest import point_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.costs import held_bytes_grouped_mm, held_bytes_loop, held_bytes_sonicmoe
from harness.interface import Layer
from harness.memory import storage_bytes, tracked_memory
from harness.problem import make_problem
from harness.registry import default_registry
from harness.shapes import MoEShape

ROWS, WIDTH = 64, 32
UNIT = ROWS * WIDTH * 4


class _Function(Layer):
    """A layer made of one function of the input and a (32, 32) weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function
        self.weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def parameters(self) -> Sequence[Tensor]:
        return [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {}


class _Keeps(torch.autograd.Function):
    """Keeps three copies of its input, and makes five that it does not keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        temporaries = [x + i for i in range(5)]
        ctx.save_for_backward(*(x * i for i in range(3)))
        return sum(temporaries, torch.zeros_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + ctx.saved_tensors[2]


def _in_place(x: Tensor, weight: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    y += 3
    return y


def _view_of_a_large_one(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([x, x, x, x])[:ROWS]


#: A function, and what it holds in units of one (ROWS, WIDTH) fp32 tensor, its output included.
HELD: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "the output alone": (lambda x, w: x * 2, 1),
    "a matrix product keeps its inputs": (lambda x, w: x @ w, 1),
    "an intermediate that the backward needs": (lambda x, w: x.sin().sin(), 2),
    "an intermediate that it does not": (lambda x, w: (x * 2) * 3, 1),
    "views are free": (lambda x, w: (x * 2).view(-1).view(ROWS, WIDTH).t().t(), 1),
    "in place": (_in_place, 1),
    "a view holds its whole storage": (_view_of_a_large_one, 4),
    "the input returned": (lambda x, w: x.view_as(x), 0),
    "a function of one's own": (lambda x, w: _Keeps.apply(x), 4),
    "half precision": (lambda x, w: x.bfloat16().sin().float(), 1.5),
    "a broadcast is not materialised": (lambda x, w: (x[:, :1] * 2).expand(ROWS, WIDTH), 1 / WIDTH),
    "metadata": (lambda x, w: x.gather(1, torch.argsort(x, 1)), 3),
}


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
@pytest.mark.parametrize("name", list(HELD))
def test_layers_of_known_size(name: str, fake: bool) -> None:
    function, units = HELD[name]
    mode = FakeTensorMode()
    if fake:
        mode.__enter__()
    try:
        layer = _Function(function)
        x, grad = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        found = tracked_memory(layer, x, grad)
    finally:
        if fake:
            mode.__exit__(None, None, None)
    assert found["held"] == units * UNIT
    assert found["static"] == UNIT + WIDTH * WIDTH * 4
    assert found["layer"] == found["static"] + found["held"]
    assert found["peak"] >= found["held"]


def test_the_peak_counts_temporaries_and_gradients() -> None:
    x, grad = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    # Five temporaries and three kept copies; the sum adds into new tensors, two alive at once.
    forward_peak = tracked_memory(_Function(lambda x, w: _Keeps.apply(x)), x, grad)["peak"]
    assert 9 * UNIT <= forward_peak <= 11 * UNIT
    found = tracked_memory(_Function(lambda x, w: x @ w), x, grad)
    # The output and both gradients.
    assert found["peak"] == 2 * UNIT + WIDTH * WIDTH * 4


def test_what_a_layer_caches_between_calls_counts_in_each_call() -> None:
    kept: list[Tensor] = []

    def grows(x: Tensor, weight: Tensor) -> Tensor:
        kept.append(x * 3)
        return x * 2

    layer = _Function(grows)
    x, grad = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    assert [tracked_memory(layer, x, grad)["held"] for _ in range(3)] == [2 * UNIT] * 3
    workspace = torch.empty(ROWS, WIDTH)
    reuses = _Function(lambda x, w: torch.mul(x.detach(), 2, out=workspace) * x)
    # A buffer allocated once, before, is the layer's own and not held by the call.
    assert tracked_memory(reuses, x, grad)["held"] <= 2 * UNIT


def test_storages_count_once() -> None:
    base = torch.zeros(100)
    assert storage_bytes([base, base[:10], base.view(10, 10), torch.zeros(3)]) == 412


# At the paper's full size.


@cache
def traced(name: str, shape: str, dtype: str = "bfloat16") -> dict[str, int]:
    point = point_of(shape, dtype, name=name)
    with FakeTensorMode():
        problem = make_problem(point, "cpu")
        layer = default_registry().get(name).build(problem)
        return tracked_memory(layer, problem.x, problem.grad_output)


FORMULAS = {
    "sonicmoe_torch": held_bytes_sonicmoe,
    "torch_grouped_mm": held_bytes_grouped_mm,
    "torch_loop": held_bytes_loop,
}
FINE, MIDDLE, COARSE = "24576,1536,256,128,8", "24576,1536,512,64,4", "24576,1536,1024,32,2"
CASES = [
    *itertools.product(("sonicmoe_torch", "torch_grouped_mm"), (FINE, COARSE, "32768,4096,512,256,16")),
    ("sonicmoe_torch", "40960,768,512,64,4"),
    # A loop traces every expert, so that many experts take long.
    *itertools.product(("torch_loop",), (COARSE, "40960,768,1024,32,2")),
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_the_trace_holds_what_the_formula_says(name: str, shape: str) -> None:
    size = MoEShape.parse(shape)
    assert traced(name, shape)["held"] == pytest.approx(FORMULAS[name](size), rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(FORMULAS))
def test_formulas_hold_in_other_dtypes(name: str, dtype: str) -> None:
    size = MoEShape.parse("512,64,32,8,2")
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    assert traced(name, str(size), dtype)["held"] == pytest.approx(FORMULAS[name](size, itemsize), rel=0.01)


def test_only_the_algorithm_is_constant_over_granularity() -> None:
    held = {name: [traced(name, s)["held"] for s in (FINE, MIDDLE, COARSE)] for name in list(FORMULAS)[:2]}
    assert max(held["sonicmoe_torch"]) <= 1.02 * min(held["sonicmoe_torch"])
    fine, middle, coarse = held["torch_grouped_mm"]
    assert fine > 1.5 * middle > 1.5**2 * coarse / 1.5
    loop = [held_bytes_loop(MoEShape.parse(s)) for s in (FINE, COARSE)]
    assert loop[0] > 2 * loop[1]


def test_a_real_layer_holds_what_a_fake_one_does() -> None:
    shape = "256,64,32,8,2"
    for name in FORMULAS:
        point = point_of(shape, "float32", "one_group", name=name)
        problem = make_problem(point, "cpu")
        layer = default_registry().get(name).build(problem)
        real = tracked_memory(layer, problem.x, problem.grad_output)
        fake = traced(name, shape, "float32")
        assert real["held"] == pytest.approx(fake["held"], rel=0.01), name
        assert real["static"] == fake["static"]
