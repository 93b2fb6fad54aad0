"""The ablations on a GPU: sizes that fill no tile, and results that a fusion taken apart must not change."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from harness.interface import DISTRIBUTIONS, Kernel, Problem
from harness.operations import get_operation
from harness.registry import default_registry

from . import common
from .common import both_dtypes

pytest.importorskip("triton")

from implementations import _ablation_gluon, _ablation_kernels
from implementations._ablation_layers import BUILD
from implementations.sonicmoe_triton import gluon_hidden_gradient, gluon_up_projection, kernels, tiles
from implementations.sonicmoe_triton.gluon_gathered import make_options
from implementations.sonicmoe_triton.metadata import make_routing

pytestmark = pytest.mark.usefixtures("exact_float32")

VARIANTS = {"grouped_gemm_gather_m": ("up",), "grouped_gemm_gather_k": ("dW1", "dW2")}
CASES = [
    (name, operation, variant)
    for name, operations in BUILD.items()
    for operation in operations
    for variant in VARIANTS.get(operation, ("",))
]
SIZES = ("777,264,136,10,3", "1,256,128,8,2", "4097,4096,64,12,3", "2048,512,1024,16,2")
every = pytest.mark.parametrize(("name", "operation", "variant"), CASES)


def problem_of(name: str, operation: str, variant: str, shape: str, *args: str) -> Problem:
    point = common.point_of(name, shape, *args, operation=operation, variant=variant)
    return get_operation(operation).make_problem(point, common.DEVICE)


def outputs(name: str, problem: Problem) -> Mapping[str, Tensor]:
    layer = default_registry().get(name).build(problem)
    assert isinstance(layer, Kernel)
    return layer.outputs(layer.forward(problem.x))


def check(problem: Problem) -> None:
    plugin = default_registry().get(problem.point.implementation)
    assert plugin.unsupported_reason(problem.point) is None
    result = get_operation(problem.point.operation).check(plugin.build(problem), problem)
    assert result.reason is None, result.reason


@every
@both_dtypes
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_distributions(name: str, operation: str, variant: str, distribution: str, dtype: str) -> None:
    check(problem_of(name, operation, variant, common.MEDIUM, dtype, distribution))


@every
@pytest.mark.parametrize("shape", SIZES)
def test_sizes(name: str, operation: str, variant: str, shape: str) -> None:
    check(problem_of(name, operation, variant, shape))


@every
@pytest.mark.parametrize("shape", list(common.FULL_SCALE.values()), ids=list(common.FULL_SCALE))
def test_full_scale(name: str, operation: str, variant: str, shape: str) -> None:
    check(problem_of(name, operation, variant, shape))


@pytest.mark.parametrize(("name", "operation", "variant"), [case for case in CASES if case[0] == "ablation_gather"])
def test_copied_rows_change_no_bit(name: str, operation: str, variant: str) -> None:
    problem = problem_of(name, operation, variant, common.MEDIUM)
    expected = outputs(common.NAME, problem)
    for key, found in outputs(name, problem).items():
        assert torch.equal(found, expected[key]), key


def test_h_does_not_depend_on_where_the_activation_is() -> None:
    problem = problem_of("ablation_activation", "grouped_gemm_gather_m", "up", common.MEDIUM)
    assert torch.equal(outputs("ablation_activation", problem)["h"], outputs(common.NAME, problem)["h"])


def test_scattered_stores_change_no_bit() -> None:
    problem = problem_of("ablation_scatter", "down_aggregation", "", common.MEDIUM)
    found = [outputs(name, problem)["output"] for name in ("ablation_scatter", "ablation_plain")]
    assert torch.equal(*found)


@both_dtypes
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("transposed", [True, False], ids=["up", "dH"])
@pytest.mark.parametrize(("d", "n"), [(256, 128), (776, 72), (64, 512)])
def test_gluon_equals_plain_bit_for_bit(d: int, n: int, transposed: bool, ragged: bool, dtype: str) -> None:
    """Sums in the same order."""
    of = getattr(torch, dtype)
    x = common.random(500, d, dtype=of)
    if not kernels.on_hopper(x):
        pytest.skip("the Gluon kernels are for Hopper")
    experts = torch.randint(6, (500, 1), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    experts[:, 1] = 7
    routing = make_routing(experts.to(common.DEVICE), 9, 128)
    size = (9, 2 * n, d) if transposed else (9, d, n)
    w = common.random(*size, dtype=of, scale=d**-0.5)
    kernel, halves = (tiles.UP_PROJECTION, 2) if transposed else (tiles.HIDDEN_GRADIENT, 1)
    tile = tiles.choose(kernel, d, n, 2, halves=halves)
    fused = gluon_up_projection.choose(n) if transposed else gluon_hidden_gradient.choose(n)
    options = make_options(fused.tile.block_n, ragged, 2)
    expected = _ablation_kernels.gathered_gemm(x, w, routing, transposed, tile)
    for _ in range(3):
        assert torch.equal(_ablation_gluon.gathered_gemm(x, w, routing, transposed, options), expected)
