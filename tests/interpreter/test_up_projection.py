"""The up-projection, gathered rows and activation included, against plain fp32."""

from __future__ import annotations

import pytest
import torch

from implementations.sonicmoe_triton.activations import ACTIVATIONS, is_gated
from implementations.sonicmoe_triton.tiles import Tile
from implementations.sonicmoe_triton.up_projection import up_projection

from . import grouped_cases as cases


def check(
    widths: str, dtype: torch.dtype, name: str = "swiglu", bias: bool = False, tile: Tile = cases.SMALL_TILE
) -> None:
    d, n = cases.WIDTHS[widths]
    routing = cases.routing_of()
    hidden = 2 * n if is_gated(name) else n
    x = cases.random(routing.tokens, d, dtype=dtype)
    w1 = cases.random(routing.num_experts, hidden, d, dtype=dtype, scale=d**-0.5)
    bias1 = cases.random(routing.num_experts, hidden, dtype=dtype) if bias else None
    want = cases.per_expert(x[routing.gather], w1, routing)
    if bias1 is not None:
        want += torch.cat([bias1[e].float().expand(own.stop - own.start, -1) for e, own in cases.experts_of(routing)])
    h, a = up_projection(x, w1, routing, name, bias1, tile)
    assert h.dtype == a.dtype == dtype
    cases.assert_close(h, want, dtype)
    cases.assert_close(a, cases.activation(want, name), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("widths", cases.WIDTHS)
def test_against_fp32(widths: str, dtype: torch.dtype) -> None:
    check(widths, dtype)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_bias(name: str) -> None:
    check("uneven", torch.float32, name, bias=True)


def test_flattened_loop_and_several_programs() -> None:
    check("uneven", torch.float32, tile=Tile(16, 16, 32, warps=4, stages=3, flatten=True))


def test_chosen_tile() -> None:
    routing = cases.routing_of((5, 3), block_m=128)
    x, w1 = cases.random(5, 16), cases.random(2, 16, 16)
    h, a = up_projection(x, w1, routing, "swiglu")
    cases.assert_close(h, cases.per_expert(x[routing.gather], w1, routing), torch.float32)
    cases.assert_close(a, cases.activation(h, "swiglu"), torch.float32)


def test_non_contiguous_inputs() -> None:
    routing = cases.routing_of()
    x, w1 = cases.random(routing.tokens, 16), cases.random(routing.num_experts, 16, 16)
    h, _ = up_projection(x.T.contiguous().T, w1.mT.contiguous().mT, routing, "swiglu", tile=cases.SMALL_TILE)
    cases.assert_close(h, cases.per_expert(x[routing.gather], w1, routing), torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_token_stays_in_its_own_rows(value: float) -> None:
    routing = cases.routing_of()
    x, w1 = cases.random(routing.tokens, 40), cases.random(routing.num_experts, 48, 40)
    x[1] = value  # what token 0's last step would read past its row
    h, a = up_projection(x, w1, routing, "swiglu", tile=cases.SMALL_TILE)
    others = routing.gather != 1
    assert torch.isfinite(h[others]).all() and torch.isfinite(a[others]).all()
    assert not torch.isfinite(h[~others]).any()


def test_no_rows() -> None:
    h, a = up_projection(torch.empty(0, 16), torch.ones(2, 32, 16), cases.routing_of((0, 0)), "swiglu")
    assert h.shape == (0, 32) and a.shape == (0, 16)


def test_bad_arguments_are_named() -> None:
    routing = cases.routing_of()
    tokens, experts = routing.tokens, routing.num_experts
    half = {"dtype": torch.float16}
    with pytest.raises(ValueError, match="d = 12: must be a multiple of 8"):
        up_projection(torch.ones(tokens, 12, **half), torch.ones(experts, 32, 12, **half), routing, "swiglu")
    with pytest.raises(ValueError, match="n = 12: must be a multiple of 8"):
        up_projection(torch.ones(tokens, 16, **half), torch.ones(experts, 24, 16, **half), routing, "swiglu")
    with pytest.raises(ValueError, match="w1 is"):
        up_projection(torch.ones(tokens, 16, **half), torch.ones(experts, 32, 16), routing, "swiglu")
    with pytest.raises(ValueError, match="unknown activation"):
        up_projection(torch.ones(tokens, 16), torch.ones(experts, 32, 16), routing, "tanh")
    with pytest.raises(ValueError, match="block_m = 32, the routing was made for 16"):
        up_projection(
            torch.ones(tokens, 16), torch.ones(experts, 32, 16), routing, "swiglu", tile=Tile(32, 16, 16, 4, 2)
        )
