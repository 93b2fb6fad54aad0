"""The Triton layer on a GPU against the harness's fp32 reference: awkward sizes, distributions, conventions."""

from __future__ import annotations

import pytest
import torch

from harness.interface import DISTRIBUTIONS, ROUTER_CONVENTIONS
from harness.routing import expert_counts

from .common import FULL_SCALE, MEDIUM, NAME, both_dtypes, built, check, problem_of, run

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("exact_float32")

SIZES = {
    "E=10": "700,256,128,10,3",
    "E=12": "700,256,128,12,4",
    "E=1024": "2048,128,64,1024,4",
    "K=22": "512,256,128,32,22",
    "K=64": "300,128,64,128,64",
    "K=1": "1000,256,128,8,1",
    "K=E": "300,256,128,6,6",
    "E=1": "300,256,128,1,1",
    "T=1": "1,256,128,8,2",
    "T=0": "0,256,128,8,2",
    "T=5": "5,4096,128,8,2",
    "T=127": "127,256,128,2,1",
    "T=4097": "4097,768,256,64,4",
    "d=776, n=72": "500,776,72,8,2",
    "2880": "512,2880,2880,8,4",
    "d=8, n=8": "100,8,8,4,2",
    "n=192": "512,512,192,8,2",
    "fine-grained": "2048,1536,128,48,24",
    "coarse": "4096,512,1024,16,2",
}


@both_dtypes
@pytest.mark.parametrize("shape", list(SIZES.values()), ids=list(SIZES))
def test_sizes(shape: str, dtype: str) -> None:
    check(problem_of(NAME, shape, dtype))


@both_dtypes
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [MEDIUM, "1607,2048,768,6,2", "4097,776,72,12,3"])
def test_distributions(shape: str, distribution: str, dtype: str) -> None:
    check(problem_of(NAME, shape, dtype, distribution))


@both_dtypes
@pytest.mark.parametrize("distribution", ["uniform", "skewed"])
@pytest.mark.parametrize("shape", ["1000,256,128,10,3", "300,256,128,6,6", "300,256,128,8,1", "1,256,128,8,2"])
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_conventions(convention: str, shape: str, distribution: str, dtype: str) -> None:
    check(problem_of(NAME, shape, dtype, distribution, convention))


def test_more_than_two_to_the_31_elements() -> None:
    """Y and its gradient have 640000 x 4096 elements."""
    check(problem_of(NAME, "40000,4096,64,64,16"))


@both_dtypes
def test_experts_without_tokens_get_exactly_zero(dtype: str) -> None:
    for distribution in ("one_group", "empty_experts"):
        layer, problem = built(MEDIUM, dtype, distribution)
        indices = layer.expert_indices(problem.x)
        assert indices is not None
        empty = expert_counts(indices, problem.shape.E) == 0
        assert empty.any()
        _, _, grad_w1, grad_w2, _ = run(layer, problem)
        for gradient in (grad_w1, grad_w2):
            assert not gradient[empty].any() and gradient[~empty].any()


@both_dtypes
def test_exact_ties_go_to_the_lower_experts(dtype: str) -> None:
    layer, problem = built(MEDIUM, dtype)
    problem.x[::2] = 0
    indices = layer.expert_indices(problem.x)
    assert indices is not None
    k = problem.shape.K
    assert torch.equal(indices[::2].long(), torch.arange(k, device=indices.device).expand(indices[::2].shape))
    check(problem)


@pytest.mark.parametrize("shape", list(FULL_SCALE.values()), ids=list(FULL_SCALE))
def test_the_whole_layer_at_full_scale(shape: str) -> None:
    check(problem_of(NAME, shape))
