"""Sums over experts' rows and products with their biases, against plain torch."""

from __future__ import annotations

import pytest
import torch

from implementations.sonicmoe_triton.biases import expert_sum, row_products
from implementations.sonicmoe_triton.metadata import Routing, make_routing

T, E, K, D = 75, 4, 2, 72
BLOCK_M = 64


@pytest.fixture
def routing() -> Routing:
    """More rows than a step takes for experts 0 and 3, more than a tile, none for expert 1."""
    second = torch.where(torch.arange(T) % 7 == 0, 2, 3)
    return make_routing(torch.stack([torch.zeros(T, dtype=torch.int64), second], 1).int(), E, BLOCK_M)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("gathered", [False, True])
def test_expert_sum(routing: Routing, gathered: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(T if gathered else T * K, D, generator=generator).to(dtype)
    weights = torch.rand(T * K, generator=generator)
    got = expert_sum(values, routing, weights if gathered else None, gathered)
    rows = values.double()[routing.gather.long()] * weights.double()[:, None] if gathered else values.double()
    owner = torch.repeat_interleave(torch.arange(E), torch.diff(routing.expert_offsets))
    want = torch.zeros(E, D, dtype=torch.float64).index_add_(0, owner, rows)
    assert got.dtype == dtype and not got[1].any()
    torch.testing.assert_close(got.double(), want, rtol=2e-3 if dtype == torch.float16 else 1e-5, atol=1e-4)


def test_row_products(routing: Routing) -> None:
    grad_out, bias = torch.randn(D, T).T, torch.randn(E, D)
    owner = torch.repeat_interleave(torch.arange(E), torch.diff(routing.expert_offsets))
    want = (grad_out[routing.gather.long()] * bias[owner]).sum(1)
    torch.testing.assert_close(row_products(grad_out, bias, routing), want, rtol=1e-4, atol=1e-4)


def test_no_rows() -> None:
    nobody = make_routing(torch.empty(0, K, dtype=torch.int32), E)
    assert torch.equal(expert_sum(torch.empty(0, D), nobody), torch.zeros(E, D))
    assert row_products(torch.empty(0, D), torch.ones(E, D), nobody).shape == (0,)
