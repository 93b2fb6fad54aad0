"""The Triton layer on a GPU against autograd in fp32: activations, biases, float32, the caller's routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.correctness import TOLERANCES
from harness.interface import DTYPES, ROUTER_CONVENTIONS
from harness.reference import full_precision
from harness.routing import router_scores

from . import common
from .common import assert_close, both_dtypes, gradients, leaves_of, random

pytest.importorskip("triton")

from expert_reference import plain_experts

from implementations.sonicmoe_triton import function
from implementations.sonicmoe_triton.activations import ACTIVATIONS, is_gated

pytestmark = pytest.mark.usefixtures("exact_float32")


def plain_layer(indices: Tensor, convention: str, activation: str, *tensors: Tensor | None) -> Tensor:
    """With the experts given: which of two near-equal logits is larger is a matter of rounding."""
    x, w1, w2, router, bias1, bias2 = tensors
    assert x is not None and w1 is not None and w2 is not None and router is not None
    scores = router_scores(x @ router.T, indices, convention).reshape(-1)
    tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(indices.shape[1])
    return plain_experts(x, w1, w2, scores, indices.reshape(-1), tokens, activation, bias1, bias2)


def compare_with_autograd(
    dtype: str, activation: str, bias: bool, convention: str, T: int = 600, d: int = 264, n: int = 136, E: int = 6
) -> None:
    of, k = DTYPES[dtype], 3
    hidden = 2 * n if is_gated(activation) else n
    tensors = [
        random(T, d, dtype=of),
        random(E, hidden, d, dtype=of, scale=d**-0.5),
        random(E, d, n, dtype=of, scale=n**-0.5),
        random(E, d, dtype=of, scale=d**-0.5),
    ]
    if bias:
        tensors += [random(E, hidden, dtype=of, scale=0.5), random(E, d, dtype=of, scale=0.5)]
    grad = random(T, d, dtype=of, scale=2.0)
    leaves = leaves_of(*tensors)
    x, w1, w2, router, bias1, bias2 = [*leaves, None, None][:6]
    assert x is not None and w1 is not None and w2 is not None and router is not None
    out = function.moe_layer(x, w1, w2, router, k, convention, activation, bias1, bias2)
    indices = function.choose_experts(tensors[0], tensors[3], k, convention)[1].long()
    with full_precision():
        plain = leaves_of(*(t.float() for t in tensors))
        want = plain_layer(indices, convention, activation, *plain, *[None] * (6 - len(plain)))
        expected = gradients(want, plain, grad.float())
    assert_close(gradients(out, leaves, grad), expected, TOLERANCES[dtype])


@both_dtypes
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str, bias: bool, dtype: str) -> None:
    compare_with_autograd(dtype, activation, bias, "topk_softmax")


@both_dtypes
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_biases_with_every_convention(convention: str, dtype: str) -> None:
    compare_with_autograd(dtype, "swiglu", True, convention)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_float32(activation: str) -> None:
    compare_with_autograd("float32", activation, True, "topk_softmax", T=200, d=68, n=36, E=4)


@both_dtypes
def test_routing_of_the_caller(dtype: str) -> None:
    """Tokens with no pair, with one and with all experts; an expert without rows; biases and gradients of scores."""
    of, T, d, n, E = DTYPES[dtype], 400, 264, 136, 7
    counts = torch.arange(T) % E  # 0 to 6 of the first six experts: the last one gets none
    experts = torch.cat([torch.randperm(E - 1, generator=torch.Generator().manual_seed(t))[:c] for t, c in
                         enumerate(counts.tolist())]).to(common.DEVICE)  # fmt: skip
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(common.DEVICE)
    tokens = torch.arange(T).repeat_interleave(counts).to(common.DEVICE)
    tensors = (
        random(T, d, dtype=of),
        random(E, 2 * n, d, dtype=of, scale=d**-0.5),
        random(E, d, n, dtype=of, scale=n**-0.5),
        random(experts.numel(), dtype=torch.float32).abs(),
        random(E, 2 * n, dtype=of, scale=0.5),
        random(E, d, dtype=of, scale=0.5),
    )
    grad = random(T, d, dtype=of, scale=2.0)
    leaves = leaves_of(*tensors)
    x, w1, w2, scores, bias1, bias2 = leaves
    out = function.routed_experts(x, w1, w2, scores, experts, offsets, bias1=bias1, bias2=bias2)
    got = gradients(out, leaves, grad)
    with full_precision():
        plain = leaves_of(*(t.float() for t in tensors))
        x, w1, w2, scores, bias1, bias2 = plain
        want = plain_experts(x, w1, w2, scores, experts, tokens, "swiglu", bias1, bias2)
        expected = gradients(want, plain, grad.float())
    assert_close(got, expected, TOLERANCES[dtype])
    none = (counts == 0).to(common.DEVICE)
    assert not got[0][none].any() and not got[1][none].any()
    assert not any(got[i][E - 1].any() for i in (2, 3, 5, 6))


@pytest.mark.parametrize("between", [False, True], ids=["behind", "between"])
def test_pairs_without_an_expert_are_as_if_they_were_not_there(between: bool) -> None:
    """Rows, their order and their tiles are the same, so that weights' and scores' gradients are equal bit for bit,
    whatever lies in the rows too many. A token's sum over its pairs may be added up in another order where some between
    them have no row."""
    T, d, n, E = 5000, 264, 136, 12
    generator = torch.Generator().manual_seed(2)
    counts = torch.randint(0, 7, (T,), generator=generator)
    experts = torch.cat([torch.randperm(E, generator=generator)[:count] for count in counts.tolist()])
    experts = torch.cat([experts, torch.full((3000,), -1)])
    if between:
        experts[torch.rand(len(experts), generator=generator) < 0.3] = -1
    named = experts >= 0
    tokens = torch.arange(T).repeat_interleave(counts)[named[: int(counts.sum())]]

    def offsets_of(number: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), number.cumsum(0)]).to(common.DEVICE)

    of = torch.bfloat16
    weights = random(T, d, dtype=of), random(E, 2 * n, d, dtype=of, scale=d**-0.5), random(E, d, n, dtype=of)
    scores, grad = random(len(experts), dtype=torch.float32).abs(), random(T, d, dtype=of)
    more = leaves_of(*weights, scores)
    fewer = leaves_of(*weights, scores[named.to(common.DEVICE)])
    on = experts.to(common.DEVICE)
    out = function.routed_experts(*more, on, offsets_of(counts))
    own = offsets_of(torch.bincount(tokens, minlength=T))
    want = gradients(function.routed_experts(*fewer, on[named.to(common.DEVICE)], own), fewer, grad)
    found = gradients(out, more, grad)
    assert not found[-1][~named.to(common.DEVICE)].any()
    found[-1] = found[-1][named.to(common.DEVICE)]
    if between:
        # Sums of a few terms in fp32 that are then rounded: some last bits differ.
        assert_close(found[:2], want[:2], (1e-3, 1e-3))
        found, want = found[2:], want[2:]
    common.assert_equal(found, want)
