"""The weight gradients against plain fp32: gathered sides, tails, empty experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.tiles import Tile
from implementations.sonicmoe_triton.weight_gradient import down_weight_gradient, up_weight_gradient

from . import grouped_cases as cases

#: block_k 16 meets a whole step (16 rows), a step and a tail (19) and a tail alone (1).
TILES = (Tile(32, 16, 16, warps=4, stages=2), Tile(16, 32, 8, warps=4, stages=3))


def reference(left: Tensor, right: Tensor, routing: Routing) -> Tensor:
    """sum over the rows of each expert of left^T right."""
    return torch.stack([left[own].float().T @ right[own].float() for _, own in cases.experts_of(routing)])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("widths", cases.WIDTHS)
def test_against_fp32(widths: str, dtype: torch.dtype, tile: Tile) -> None:
    d, n = cases.WIDTHS[widths]
    routing = cases.routing_of()
    x, grad_h = cases.random(routing.tokens, d, dtype=dtype), cases.random(routing.rows, 2 * n, dtype=dtype)
    grad_w1 = up_weight_gradient(grad_h, x, routing, tile)
    cases.assert_close(grad_w1, reference(grad_h, x[routing.gather], routing), dtype)
    scaled_a = cases.random(routing.rows, n, dtype=dtype)
    grad_w2 = down_weight_gradient(x, scaled_a, routing, tile)
    cases.assert_close(grad_w2, reference(x[routing.gather], scaled_a, routing), dtype)
    for expert in (1, 4):
        assert not grad_w1[expert].any() and not grad_w2[expert].any()


def test_chosen_tile_and_non_contiguous_inputs() -> None:
    routing = cases.routing_of((5, 3), block_m=128)
    x, rows = cases.random(5, 16), cases.random(8, 16)
    got = up_weight_gradient(rows.T.contiguous().T, x.T.contiguous().T, routing)
    cases.assert_close(got, reference(rows, x[routing.gather], routing), torch.float32)
    got = down_weight_gradient(x.T.contiguous().T, rows.T.contiguous().T, routing)
    cases.assert_close(got, reference(x[routing.gather], rows, routing), torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tails_do_not_see_the_next_expert(value: float) -> None:
    """Expert 2's tail step overhangs expert 3's only row and the end of the rows. That row's token is 0, which a masked
    row index also reads: neither operand may reach another expert's sum."""
    routing = cases.routing_of((3, 0, 19, 1, 0))
    x, rows = cases.random(routing.tokens, 40), cases.random(routing.rows, 24)
    rows[22] = value
    for got in (up_weight_gradient(rows, x, routing, TILES[0]), down_weight_gradient(x, rows, routing, TILES[0])):
        assert [bool(torch.isfinite(got[e]).all()) for e in range(5)] == [True, True, True, False, True]
    rows, x[3:] = cases.random(routing.rows, 24), cases.random(routing.tokens - 3, 40)
    x[3:] = value  # tokens of expert 2 alone
    for got in (up_weight_gradient(rows, x, routing, TILES[0]), down_weight_gradient(x, rows, routing, TILES[0])):
        assert [bool(torch.isfinite(got[e]).all()) for e in range(5)] == [True, True, False, True, True]


def test_a_bad_token_zero_is_not_read_by_masked_rows() -> None:
    """A tail's masked row indices are 0: token 0 must not enter the sum of an expert that it did not choose."""
    routing = Routing(
        gather=torch.tensor([0, 1, 2], dtype=torch.int32),
        reverse=torch.arange(3, dtype=torch.int32),
        token_offsets=None,
        k=1,
        experts=torch.tensor([0, 1, 1], dtype=torch.int32),
        expert_offsets=torch.tensor([0, 1, 3], dtype=torch.int32),
        tile_expert=torch.tensor([0, 1], dtype=torch.int32),
        tile_row=torch.tensor([0, 1], dtype=torch.int32),
        num_tiles=torch.tensor([2], dtype=torch.int32),
    )
    x, rows = cases.random(3, 16), cases.random(3, 16)
    x[0] = float("nan")
    for got in (up_weight_gradient(rows, x, routing, TILES[0]), down_weight_gradient(x, rows, routing, TILES[0])):
        assert got[0].isnan().any() and torch.isfinite(got[1]).all()


def test_no_rows() -> None:
    routing = cases.routing_of((0, 0))
    assert torch.equal(up_weight_gradient(torch.empty(0, 32), torch.empty(0, 16), routing), torch.zeros(2, 32, 16))
    assert torch.equal(down_weight_gradient(torch.empty(0, 16), torch.empty(0, 32), routing), torch.zeros(2, 16, 32))


def test_bad_arguments_are_named() -> None:
    routing = cases.routing_of()
    with pytest.raises(ValueError, match="H's width = 6: must be a multiple of 4"):
        up_weight_gradient(torch.ones(36, 6), torch.ones(19, 16), routing)
    with pytest.raises(ValueError, match="n = 6: must be a multiple of 4"):
        down_weight_gradient(torch.ones(19, 16), torch.ones(36, 6), routing)
    with pytest.raises(ValueError, match="grad_h is"):
        up_weight_gradient(torch.ones(35, 16), torch.ones(19, 16), routing)
