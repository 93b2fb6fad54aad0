"""Our kernels one by one pass the harness's gate of the operations on single kernels."""

from __future__ import annotations

import pytest

from harness.interface import DISTRIBUTIONS, KERNELS, ROUTER_CONVENTIONS, LayerSpec, Point, RoutingSpec
from harness.operations import OPERATIONS, get_operation
from harness.shapes import MoEShape
from implementations.sonicmoe_triton import SonicMoETriton

ALL = [(operation, variant) for operation in KERNELS for variant in OPERATIONS[operation].variants]
#: The second: widths that fill no tile, K that is no power of two.
SHAPES = ("20,32,16,4,2", "11,40,24,5,3")

every = pytest.mark.parametrize(("operation", "variant"), ALL, ids=["-".join(filter(None, one)) for one in ALL])


def check(
    operation: str,
    variant: str,
    shape: str,
    dtype: str = "float32",
    distribution: str = "uniform",
    convention: str = "topk_softmax",
) -> None:
    layer, routing = LayerSpec(router_convention=convention), RoutingSpec(distribution=distribution)
    point = Point(operation, "sonicmoe_triton", MoEShape.parse(shape), dtype, layer, routing, variant, "cpu")
    its = get_operation(operation)
    problem = its.make_problem(point, "cpu")
    reason = its.check(SonicMoETriton().build(problem), problem).reason
    assert reason is None, reason


@every
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gate(operation: str, variant: str, shape: str, dtype: str) -> None:
    check(operation, variant, shape, dtype)


@every
@pytest.mark.parametrize("distribution", [name for name in DISTRIBUTIONS if name not in ("uniform", "skewed")])
def test_experts_without_rows(operation: str, variant: str, distribution: str) -> None:
    check(operation, variant, SHAPES[0], "float32", distribution)


@every
@pytest.mark.parametrize("shape", [pytest.param("0,32,16,4,2", id="T=0"), pytest.param("1,32,16,4,4", id="T=1, K=E")])
def test_sizes(operation: str, variant: str, shape: str) -> None:
    check(operation, variant, shape)


@pytest.mark.parametrize("convention", [name for name in ROUTER_CONVENTIONS if name != "topk_softmax"])
def test_conventions(convention: str) -> None:
    check("topk_router", "", SHAPES[1], convention=convention)
