"""The down-projection and the input gradient against plain fp32."""

from __future__ import annotations

import pytest
import torch

from implementations.sonicmoe_triton.contiguous_gemm import down_projection, input_gradient
from implementations.sonicmoe_triton.operands import RouterTerm
from implementations.sonicmoe_triton.tiles import Tile

from . import grouped_cases as cases

FLATTENED = Tile(16, 16, 32, warps=4, stages=3, flatten=True)


@pytest.mark.parametrize("tile", [cases.SMALL_TILE, FLATTENED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("widths", cases.WIDTHS)
def test_against_fp32(widths: str, dtype: torch.dtype, tile: Tile) -> None:
    d, n = cases.WIDTHS[widths]
    routing = cases.routing_of()
    a = cases.random(routing.rows, n, dtype=dtype)
    w2 = cases.random(routing.num_experts, d, n, dtype=dtype, scale=n**-0.5)
    cases.assert_close(down_projection(a, w2, routing, tile=tile), cases.per_expert(a, w2, routing), dtype)
    grad_h = cases.random(routing.rows, 2 * n, dtype=dtype)
    w1 = cases.random(routing.num_experts, 2 * n, d, dtype=dtype, scale=n**-0.5)
    cases.assert_close(input_gradient(grad_h, w1, routing, tile=tile), cases.per_expert(grad_h, w1.mT, routing), dtype)


def test_bias() -> None:
    routing = cases.routing_of()
    a, w2 = cases.random(routing.rows, 24), cases.random(routing.num_experts, 40, 24)
    bias2 = cases.random(routing.num_experts, 40)
    want = cases.per_expert(a, w2, routing)
    for expert, own in cases.experts_of(routing):
        want[own] += bias2[expert]
    cases.assert_close(down_projection(a, w2, routing, bias2, cases.SMALL_TILE), want, torch.float32)


@pytest.mark.parametrize("tile", [cases.SMALL_TILE, FLATTENED])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_routers_term(dtype: torch.dtype, tile: Tile) -> None:
    routing = cases.routing_of()
    grad_h, w1 = cases.random(routing.rows, 24, dtype=dtype), cases.random(routing.num_experts, 24, 40, dtype=dtype)
    term = RouterTerm(cases.random(routing.rows), cases.random(routing.num_experts, 40, dtype=dtype))
    want = cases.per_expert(grad_h, w1.mT, routing)
    for expert, own in cases.experts_of(routing):
        want[own] += term.row_gradients[own, None] * term.router[expert].float()
    cases.assert_close(input_gradient(grad_h, w1, routing, term, tile), want, dtype)


def test_chosen_tile_and_non_contiguous_inputs() -> None:
    routing = cases.routing_of((5, 3), block_m=128)
    a, w2 = cases.random(8, 16), cases.random(2, 16, 16)
    y = down_projection(a.T.contiguous().T, w2.mT.contiguous().mT, routing)
    cases.assert_close(y, cases.per_expert(a, w2, routing), torch.float32)
    w1 = cases.random(2, 16, 16)
    grad_rows = input_gradient(a.T.contiguous().T, w1.mT.contiguous().mT, routing)
    cases.assert_close(grad_rows, cases.per_expert(a, w1.mT, routing), torch.float32)


def test_a_bad_row_or_expert_stays_alone() -> None:
    """The contraction's overhang must not reach the next row's or the next expert's values."""
    routing = cases.routing_of()
    a, w2 = cases.random(routing.rows, 24), cases.random(routing.num_experts, 40, 24)
    a[16] = float("nan")  # the first row of expert 2
    w2[3] = float("inf")
    y = down_projection(a, w2, routing, tile=cases.SMALL_TILE)
    finite = torch.isfinite(y).all(1)
    assert finite.tolist() == [row not in (16, 35) for row in range(routing.rows)]
    w1 = cases.random(routing.num_experts, 24, 40)
    w1[3] = float("inf")
    grad_rows = input_gradient(a, w1, routing, tile=cases.SMALL_TILE)
    assert torch.isfinite(grad_rows).all(1).tolist() == finite.tolist()


def test_no_rows() -> None:
    routing = cases.routing_of((0, 0))
    assert down_projection(torch.empty(0, 16), torch.ones(2, 32, 16), routing).shape == (0, 32)
    assert input_gradient(torch.empty(0, 32), torch.ones(2, 32, 16), routing).shape == (0, 16)


def test_bad_arguments_are_named() -> None:
    routing = cases.routing_of()
    rows, experts = routing.rows, routing.num_experts
    with pytest.raises(ValueError, match="n = 6: must be a multiple of 4"):
        down_projection(torch.ones(rows, 6), torch.ones(experts, 16, 6), routing)
    with pytest.raises(ValueError, match="d = 6: must be a multiple of 4"):
        input_gradient(torch.ones(rows, 16), torch.ones(experts, 16, 6), routing)
    grad_h, w1 = torch.ones(rows, 16), torch.ones(experts, 16, 8)
    with pytest.raises(ValueError, match=rf"router is .*expected \({experts}, 8\)"):
        input_gradient(grad_h, w1, routing, RouterTerm(torch.ones(rows), torch.ones(experts, 16)))
    with pytest.raises(ValueError, match="row_gradients"):
        input_gradient(grad_h, w1, routing, RouterTerm(torch.ones(rows + 1), torch.ones(experts, 8)))
    with pytest.raises(ValueError, match="a is"):
        down_projection(torch.ones(rows + 1, 16), torch.ones(experts, 16, 16), routing)
