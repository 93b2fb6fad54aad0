"""Problems on the GPU, runs of a layer on them, relative errors, and the Triton layer's sizes and gate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.correctness import forward_backward
from harness.interface import Layer, LayerSpec, Point, Problem, RoutingSpec
from harness.operations import get_operation
from harness.problem import make_problem
from harness.shapes import MoEShape
from implementations.sonicmoe_triton import SonicMoETriton

DEVICE = "cuda"

# The Triton layer.
NAME = SonicMoETriton.name
MEDIUM = "2048,512,256,16,4"
HEADLINE = "24576,1536,256,128,8"
FULL_SCALE = {"7B": HEADLINE, "120B": "32768,4096,1024,128,8"}

both_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def point_of(
    implementation: str,
    shape: str,
    dtype: str = "bfloat16",
    distribution: str = "uniform",
    convention: str = "topk_softmax",
    operation: str = "moe_layer",
    variant: str = "",
) -> Point:
    size = MoEShape.parse(shape)
    # One token's router gradient is a difference that nearly cancels in some draws; seed 2 is not such a draw.
    routing = RoutingSpec(distribution=distribution, seed=2 if size.T == 1 else 0)
    layer = LayerSpec(router_convention=convention)
    return Point(operation, implementation, size, dtype, layer, routing, variant, DEVICE)


def problem_of(implementation: str, shape: str, *args: str, input_set: int = 0, **kwargs: str) -> Problem:
    """`point_of`'s arguments."""
    return make_problem(point_of(implementation, shape, *args, **kwargs), DEVICE, input_set)


def random(
    *size: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, device: torch.device | str | None = None
) -> Tensor:
    """Normal numbers that depend on the size alone."""
    device = device or DEVICE
    generator = torch.Generator(device=device).manual_seed(sum(size) + len(size))
    return (scale * torch.randn(size, generator=generator, device=device)).to(dtype)


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def run(layer: Layer, problem: Problem) -> list[Tensor]:
    """Output, then the gradients of x and of every parameter."""
    output, gradients = forward_backward(layer, problem.x, problem.grad_output)
    found = [output]
    for gradient in gradients:
        assert gradient is not None
        found.append(gradient)
    return found


def gradients(output: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The output and the leaves' gradients."""
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def relative(parts: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Relative L2 error over all parts (value, reference) of one tensor; not finite where a value is not."""
    difference = reference = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for value, expected in parts:
        assert value.shape == expected.shape
        difference = difference + torch.linalg.vector_norm(value.float() - expected).double().square()
        reference = reference + torch.linalg.vector_norm(expected).double().square()
    return float((difference / reference).sqrt())


def assert_close(
    got: Sequence[Tensor] | Mapping[str, Tensor],
    want: Sequence[Tensor] | Mapping[str, Tensor],
    tolerances: tuple[float, float],
) -> None:
    """Relative L2 errors within (the output's, the gradients') tolerance; the output comes first."""
    pairs, expected = _named(got), _named(want)
    assert list(pairs) == list(expected)
    errors = {name: relative([(value, expected[name].float())]) for name, value in pairs.items()}
    output, gradient = tolerances
    limits = [output] + [gradient] * (len(errors) - 1)
    wrong = {name: error for (name, error), limit in zip(errors.items(), limits, strict=True) if not error <= limit}
    assert not wrong, f"relative L2 errors {wrong}"


def _named(tensors: Sequence[Tensor] | Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(tensors) if isinstance(tensors, Mapping) else {str(i): tensor for i, tensor in enumerate(tensors)}


def assert_equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    """Bit for bit (but for NaN, which equals nothing)."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        if not torch.equal(a, b):
            differ = float((a != b).double().mean())
            raise AssertionError(f"tensor {index}: {differ:.2%} differ, relative {relative([(a, b.float())]):.2e}")


def check(problem: Problem) -> None:
    """The harness's gate, all gradients included."""
    reason = SonicMoETriton().unsupported_reason(problem.point) if DEVICE == "cuda" else None
    assert reason is None, reason
    result = get_operation("moe_layer").check(SonicMoETriton().build(problem), problem)
    assert result.reason is None, result.reason


def built(shape: str, *args: str, **kwargs: Any) -> tuple[Layer, Problem]:
    problem = problem_of(NAME, shape, *args, **kwargs)
    return SonicMoETriton().build(problem), problem


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whatever waits for the device in it raises, as far as torch can tell."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
