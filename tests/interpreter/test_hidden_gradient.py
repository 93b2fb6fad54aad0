"""The hidden gradient's three results against autograd in fp32."""

from __future__ import annotations

import pytest
import torch

from implementations.sonicmoe_triton.activations import ACTIVATIONS, is_gated
from implementations.sonicmoe_triton.hidden_gradient import hidden_gradient
from implementations.sonicmoe_triton.tiles import Tile

from . import grouped_cases as cases

ONE_COLUMN_TILE = cases.SMALL_TILE
TWO_COLUMN_TILES = Tile(16, 16, 32, warps=4, stages=3, flatten=True)
#: Wider than a slice of the epilogue.
SEVERAL_SLICES = Tile(16, 128, 32, warps=4, stages=3)


def check(d: int, n: int, dtype: torch.dtype, name: str = "swiglu", tile: Tile | None = ONE_COLUMN_TILE) -> None:
    routing = cases.routing_of(block_m=16 if tile else 128)
    grad_out = cases.random(routing.tokens, d, dtype=dtype)
    w2 = cases.random(routing.num_experts, d, n, dtype=dtype, scale=n**-0.5)
    h = cases.random(routing.rows, 2 * n if is_gated(name) else n, dtype=dtype)
    scores = torch.rand(routing.rows, generator=torch.Generator().manual_seed(3))
    leaves = h.float().requires_grad_(), scores.clone().requires_grad_()
    scaled = cases.activation(leaves[0], name) * leaves[1][:, None]
    grad_scaled = cases.per_expert(grad_out[routing.gather], w2.mT, routing)
    want_h, want_scores = torch.autograd.grad(scaled, leaves, grad_scaled)
    grad_h, scaled_a, grad_scores = hidden_gradient(grad_out, w2, h, scores, routing, name, tile)
    assert grad_h.dtype == scaled_a.dtype == dtype and grad_scores.dtype == torch.float32
    grad_scores = grad_scores.sum(0)
    cases.assert_close(grad_h, want_h, dtype)
    cases.assert_close(scaled_a, scaled.detach(), dtype)
    cases.assert_close(grad_scores, want_scores, dtype)


@pytest.mark.parametrize("tile", [ONE_COLUMN_TILE, TWO_COLUMN_TILES])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("widths", cases.WIDTHS)
def test_against_autograd(widths: str, dtype: torch.dtype, tile: Tile) -> None:
    check(*cases.WIDTHS[widths], dtype, tile=tile)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    check(16, 24, torch.float32, name)


def test_several_slices() -> None:
    check(32, 136, torch.float32, tile=SEVERAL_SLICES)


def test_chosen_tile() -> None:
    check(16, 16, torch.float32, tile=None)


def test_partial_sums_repeat_bit_for_bit() -> None:
    routing = cases.routing_of()
    arguments = (cases.random(19, 40), cases.random(5, 40, 24), cases.random(36, 48), torch.ones(36), routing, "swiglu")
    first, second = (hidden_gradient(*arguments, tile=TWO_COLUMN_TILES) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_token_stays_in_its_own_rows(value: float) -> None:
    routing = cases.routing_of()
    grad_out = cases.random(routing.tokens, 40)
    grad_out[1] = value  # what token 0's last step would read past its row
    h, scores = cases.random(routing.rows, 48), torch.ones(routing.rows)
    *results, partial_scores = hidden_gradient(
        grad_out, cases.random(routing.num_experts, 40, 24), h, scores, routing, "swiglu", cases.SMALL_TILE
    )
    others = routing.gather != 1
    assert all(torch.isfinite(result[others]).all() for result in [*results, partial_scores.sum(0)])


def test_an_infinite_gradient_meets_no_overhanging_column() -> None:
    """inf times the zeros past the last column is NaN: a row whose sum is infinite must stay infinite."""
    routing = cases.routing_of((1,))
    grad_out, w2 = torch.full((1, 16), float("inf")), torch.ones(1, 16, 24)
    _, _, grad_scores = hidden_gradient(
        grad_out, w2, torch.ones(1, 48), torch.ones(1), routing, "swiglu", cases.SMALL_TILE
    )
    assert grad_scores.sum(0).tolist() == [float("inf")]


def test_no_rows() -> None:
    routing = cases.routing_of((0, 0))
    grad_h, scaled_a, grad_scores = hidden_gradient(
        torch.empty(0, 32), torch.ones(2, 32, 16), torch.empty(0, 32), torch.empty(0), routing, "swiglu"
    )
    assert grad_h.shape == (0, 32) and scaled_a.shape == (0, 16) and grad_scores.shape == (1, 0)


def test_bad_arguments_are_named() -> None:
    routing = cases.routing_of()
    grad_out, w2, scores = torch.ones(19, 16), torch.ones(5, 16, 16), torch.ones(36)
    with pytest.raises(ValueError, match="h is"):
        hidden_gradient(grad_out, w2, torch.ones(36, 16), scores, routing, "swiglu")
    with pytest.raises(ValueError, match="row_scores is"):
        hidden_gradient(grad_out, w2, torch.ones(36, 32), scores.half(), routing, "swiglu")
    with pytest.raises(ValueError, match="n = 6: must be a multiple of 4"):
        hidden_gradient(grad_out, torch.ones(5, 16, 6), torch.ones(36, 12), scores, routing, "swiglu")
