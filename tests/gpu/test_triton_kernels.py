"""Each Triton kernel on a GPU at the scale it is for, against plain torch expert by expert."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS
from harness.routing import router_scores
from harness.shapes import MoEShape

from .common import FULL_SCALE, random, relative

pytest.importorskip("triton")

from implementations.sonicmoe_triton import tune
from implementations.sonicmoe_triton.aggregation import Options, aggregate
from implementations.sonicmoe_triton.biases import expert_sum, row_products
from implementations.sonicmoe_triton.contiguous_gemm import down_projection, input_gradient
from implementations.sonicmoe_triton.hidden_gradient import hidden_gradient
from implementations.sonicmoe_triton.metadata import Routing, route
from implementations.sonicmoe_triton.router import router_backward, top_k
from implementations.sonicmoe_triton.up_projection import up_projection
from implementations.sonicmoe_triton.weight_gradient import down_weight_gradient, up_weight_gradient

pytestmark = pytest.mark.usefixtures("exact_float32")


@dataclass
class Big:
    """Operands of every kernel at one layer's size; bf16, real values (H and dH come from the kernels' formulas)."""

    shape: MoEShape
    x: Tensor
    grad_out: Tensor
    w1: Tensor
    w2: Tensor
    bias1: Tensor
    bias2: Tensor
    logits: Tensor
    scores: Tensor  # (T, K)
    experts: Tensor  # (T, K)
    routing: Routing
    row_scores: Tensor
    h: Tensor
    a: Tensor
    offsets: list[int]

    def rows(self) -> Iterator[tuple[int, slice, Tensor]]:
        """(expert, its rows, their tokens) of every expert with rows."""
        for e in range(self.shape.E):
            own = slice(self.offsets[e], self.offsets[e + 1])
            if own.stop > own.start:
                yield e, own, self.routing.gather[own].long()


LIMIT = 1e-2


@pytest.fixture(scope="module", params=list(FULL_SCALE))
def big(request: pytest.FixtureRequest) -> Iterator[Big]:
    shape = MoEShape.parse(FULL_SCALE[request.param])
    T, d, n, E, K = (getattr(shape, name) for name in "TdnEK")
    x, router = random(T, d), random(E, d, scale=d**-0.5)
    logits = x @ router.T
    experts = torch.topk(logits.float(), K).indices.int()
    scores = router_scores(logits.float(), experts.long(), "topk_softmax")
    routing, row_scores = route(scores, experts, E)
    h = random(T * K, 2 * n)
    gate, up = h.chunk(2, dim=1)
    yield Big(
        shape=shape,
        x=x,
        grad_out=random(T, d) * 0.5,
        w1=random(E, 2 * n, d, scale=d**-0.5),
        w2=random(E, d, n, scale=n**-0.5),
        bias1=random(E, 2 * n, scale=0.5),
        bias2=random(E, d, scale=0.5),
        logits=logits,
        scores=scores,
        experts=experts,
        routing=routing,
        row_scores=row_scores,
        h=h,
        a=F.silu(gate) * up,
        offsets=routing.expert_offsets.tolist(),
    )


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def test_top_k(big: Big) -> None:
    best = torch.sort(big.logits.float(), dim=1, descending=True, stable=True).indices[:, : big.shape.K]
    for convention in ROUTER_CONVENTIONS:
        scores, chosen = top_k(big.logits, big.shape.K, convention)
        assert torch.equal(chosen.long(), best)
        torch.testing.assert_close(scores, router_scores(big.logits.float(), best, convention))


def test_routing_metadata(big: Big) -> None:
    routing, pairs, E = big.routing, big.experts.reshape(-1).long(), big.shape.E
    order = torch.argsort(pairs, stable=True)
    counts = torch.bincount(pairs, minlength=E)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    assert torch.equal(routing.gather.long(), order // big.shape.K)
    assert torch.equal(routing.reverse.long()[order], torch.arange(pairs.numel(), device=pairs.device))
    assert torch.equal(routing.expert_offsets.long(), offsets)
    tiles = (counts + routing.block_m - 1) // routing.block_m
    used = int(tiles.sum())
    owner = torch.repeat_interleave(torch.arange(E, device=pairs.device), tiles)
    within = torch.arange(used, device=pairs.device) - (tiles.cumsum(0) - tiles)[owner]
    assert routing.num_tiles.tolist() == [used]
    assert torch.equal(routing.tile_expert[:used].long(), owner)
    assert torch.equal(routing.tile_row[:used].long(), offsets[owner] + routing.block_m * within)
    assert (routing.tile_row[used:] == pairs.numel()).all()
    assert torch.equal(big.row_scores, big.scores.reshape(-1)[order])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_up_projection(big: Big, bias: bool) -> None:
    h, a = up_projection(big.x, big.w1, big.routing, "swiglu", big.bias1 if bias else None)

    def want(e: int, tokens: Tensor) -> Tensor:
        rows = big.x[tokens].float() @ big.w1[e].float().T
        return rows + big.bias1[e].float() if bias else rows

    assert relative((h[own], want(e, tokens)) for e, own, tokens in big.rows()) < LIMIT
    assert relative((a[own], swiglu(want(e, tokens))) for e, own, tokens in big.rows()) < LIMIT


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_down_projection(big: Big, bias: bool) -> None:
    y = down_projection(big.a, big.w2, big.routing, big.bias2 if bias else None)
    parts = (
        (y[own], big.a[own].float() @ big.w2[e].float().T + (big.bias2[e].float() if bias else 0.0))
        for e, own, _ in big.rows()
    )
    assert relative(parts) < LIMIT


def test_hidden_gradient(big: Big) -> None:
    grad_h, scaled_a, grad_scores = hidden_gradient(big.grad_out, big.w2, big.h, big.row_scores, big.routing, "swiglu")
    grad_scores = grad_scores.sum(0)
    for e, own, tokens in big.rows():
        h = big.h[own].float().requires_grad_()
        scores = big.row_scores[own].clone().requires_grad_()
        scaled = swiglu(h) * scores[:, None]
        want_h, want_scores = torch.autograd.grad(scaled, (h, scores), big.grad_out[tokens].float() @ big.w2[e].float())
        for name, value, expected in (
            ("grad_h", grad_h[own], want_h),
            ("scaled_a", scaled_a[own], scaled.detach()),
            ("grad_scores", grad_scores[own], want_scores),
        ):
            error = relative([(value, expected)])
            assert error < LIMIT, (name, e, error)


def test_weight_gradients(big: Big) -> None:
    grad_w1 = up_weight_gradient(big.h, big.x, big.routing)
    parts = ((grad_w1[e], big.h[own].float().T @ big.x[tokens].float()) for e, own, tokens in big.rows())
    assert relative(parts) < LIMIT
    del grad_w1
    grad_w2 = down_weight_gradient(big.grad_out, big.a, big.routing)
    parts = ((grad_w2[e], big.grad_out[tokens].float().T @ big.a[own].float()) for e, own, tokens in big.rows())
    assert relative(parts) < LIMIT


def test_input_gradient(big: Big) -> None:
    grad_rows = input_gradient(big.h, big.w1, big.routing)
    assert relative((grad_rows[own], big.h[own].float() @ big.w1[e].float()) for e, own, _ in big.rows()) < LIMIT


def test_aggregation(big: Big) -> None:
    rows = random(big.routing.rows, big.shape.d)
    want, weighted = (torch.zeros(big.x.shape, device=rows.device) for _ in range(2))
    for _, own, tokens in big.rows():
        want.index_add_(0, tokens, rows[own].float())
        weighted.index_add_(0, tokens, rows[own].float() * big.row_scores[own, None])
    assert relative([(aggregate(rows, big.routing, base=big.x), want + big.x.float())]) < LIMIT
    for candidate in tune.AGGREGATIONS:
        options = None if candidate is None else Options(**candidate)
        found = aggregate(rows, big.routing, weights=big.row_scores, options=options)
        assert relative([(found, weighted)]) < LIMIT, candidate


def test_biases_gradients(big: Big) -> None:
    sums = expert_sum(big.h, big.routing)
    assert relative((sums[e], big.h[own].float().sum(0)) for e, own, _ in big.rows()) < LIMIT
    gathered = expert_sum(big.grad_out, big.routing, weights=big.row_scores, gathered=True)
    parts = ((gathered[e], big.row_scores[own] @ big.grad_out[tokens].float()) for e, own, tokens in big.rows())
    assert relative(parts) < LIMIT
    products = row_products(big.grad_out, big.bias2, big.routing)
    parts = ((products[own], big.grad_out[tokens].float() @ big.bias2[e].float()) for e, own, tokens in big.rows())
    assert relative(parts) < LIMIT


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_router_backward(big: Big, convention: str) -> None:
    scores, chosen = top_k(big.logits, big.shape.K, convention)
    grad = random(*scores.shape, dtype=torch.float32)
    logits = big.logits.float().requires_grad_()
    (want,) = torch.autograd.grad(router_scores(logits, chosen.long(), convention), logits, grad)
    arguments: tuple[str, Tensor | None, int, torch.dtype] = (
        convention, big.logits if convention == "softmax_topk" else None, big.shape.E, torch.bfloat16,
    )  # fmt: skip
    got = router_backward(scores, chosen, grad, *arguments)
    assert relative([(got, want)]) < LIMIT
    routing, row_scores = route(scores, chosen, big.shape.E)
    row_grad = torch.empty_like(row_scores)
    row_grad[routing.reverse.long()] = grad.reshape(-1)
    by_rows = router_backward(row_scores, chosen, row_grad, *arguments, reverse=routing.reverse)
    # Not bit for bit: two kernels, and their compilers contract products and sums differently.
    assert relative([(by_rows, want)]) < LIMIT
    assert relative([(by_rows, got)]) < LIMIT
    if convention != "softmax_topk":
        of_chosen = torch.full_like(row_scores, torch.nan)
        router_backward(row_scores, chosen, row_grad, *arguments, routing.reverse, of_chosen)
        by_pair = of_chosen[routing.reverse.long()].reshape(chosen.shape)
        assert relative([(by_pair, want.gather(1, chosen.long()))]) < LIMIT
