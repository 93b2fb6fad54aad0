"""The weighted sum of each token's rows against index_add in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implementations.sonicmoe_triton.aggregation import Options, aggregate, column_block
from implementations.sonicmoe_triton.metadata import Routing, make_routing


def top_k_routing(tokens: int, k: int, experts: int = 20) -> Routing:
    generator = torch.Generator().manual_seed(k)
    return make_routing(torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k].int(), experts)


def general_routing(counts: tuple[int, ...], experts: int = 12) -> Routing:
    generator = torch.Generator().manual_seed(1)
    chosen = [torch.rand(experts, generator=generator).argsort()[:count] for count in counts]
    return make_routing(torch.cat(chosen).int(), experts, token_offsets=torch.tensor((0, *counts)).cumsum(0))


def reference(rows: Tensor, routing: Routing, weights: Tensor | None, base: Tensor | None) -> Tensor:
    out = torch.zeros(routing.tokens, rows.shape[1], dtype=torch.float64) if base is None else base.double()
    weighted = rows.double() if weights is None else rows.double() * weights.double()[:, None]
    return out.index_add(0, routing.gather.long(), weighted)


def check(routing: Routing, d: int, dtype: torch.dtype, options: Options | None = None) -> None:
    generator = torch.Generator().manual_seed(d)
    rows = torch.randn(routing.rows, d, generator=generator).to(dtype)
    weights = torch.rand(routing.rows, generator=generator)
    base = torch.randn(routing.tokens, d, generator=generator).to(dtype)
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    for w in (None, weights):
        for b in (None, base):
            out = aggregate(rows, routing, weights=w, base=b, options=options)
            assert out.dtype == dtype and out.shape == (routing.tokens, d)
            torch.testing.assert_close(out.double(), reference(rows, routing, w, b), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "k", "d"), [(1, 1, 8), (37, 1, 8), (5, 2, 264), (17, 4, 48), (4, 10, 32), (3, 16, 768), (2, 20, 1088)]
)
def test_top_k(tokens: int, k: int, d: int, dtype: torch.dtype) -> None:
    check(top_k_routing(tokens, k), d, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("counts", [(2, 0, 3, 0, 11), (0, 9, 0), (8, 1)])
def test_general_routing(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    check(general_routing(counts), 72, dtype)


@pytest.mark.parametrize("options", [Options(4, 1), Options(8, 2), Options(4, 8)])
def test_whole_rows(options: Options) -> None:
    check(top_k_routing(5, 3), 264, torch.float16, options)
    check(top_k_routing(3, 10), 48, torch.float32, options)
    check(general_routing((2, 0, 3, 0, 11)), 72, torch.float16, options)


def test_many_experts_a_token() -> None:
    check(top_k_routing(2, 70, experts=80), 8, torch.float32)


def test_other_dtypes_of_weights_and_base_and_strides() -> None:
    routing = top_k_routing(4, 3)
    rows, weights, base = torch.randn(routing.rows, 16).half(), torch.rand(routing.rows).half(), torch.randn(4, 16)
    out = aggregate(rows, routing, weights, base)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.double(), reference(rows, routing, weights, base), rtol=2e-3, atol=2e-3)
    strided = aggregate(rows.T.contiguous().T, routing, torch.stack([weights, weights], 1)[:, 0], base.T.contiguous().T)
    assert torch.equal(out, strided)


def test_no_rows() -> None:
    none = make_routing(torch.empty(0, 4, dtype=torch.int32), 8)
    assert aggregate(torch.empty(0, 16), none).shape == (0, 16)
    tokens_without_pairs = make_routing(
        torch.empty(0, dtype=torch.int32), 8, token_offsets=torch.zeros(4, dtype=torch.int32)
    )
    base = torch.randn(3, 16)
    assert torch.equal(aggregate(torch.empty(0, 16), tokens_without_pairs), torch.zeros(3, 16))
    out = aggregate(torch.empty(0, 16), tokens_without_pairs, base=base)
    assert torch.equal(out, base) and out.data_ptr() != base.data_ptr()


def test_the_result_may_replace_the_base() -> None:
    routing = top_k_routing(7, 3)
    rows, base = torch.randn(21, 24), torch.randn(7, 24)
    expected = aggregate(rows, routing, base=base)
    assert aggregate(rows, routing, base=base, over_base=True) is base
    assert torch.equal(base, expected)
    base = torch.randn(3, 16)
    assert aggregate(torch.empty(0, 16), general_routing((0, 0, 0)), base=base, over_base=True) is base
    with pytest.raises(ValueError, match="cannot take"):
        aggregate(rows.half(), routing, base=expected, over_base=True)


def test_what_does_not_fit_is_refused() -> None:
    routing = top_k_routing(4, 3)
    with pytest.raises(ValueError, match="d = 12"):
        aggregate(torch.zeros(12, 12).half(), routing)
    with pytest.raises(ValueError, match="11 rows"):
        aggregate(torch.zeros(11, 16), routing)
    with pytest.raises(ValueError, match="weights"):
        aggregate(torch.zeros(12, 16), routing, weights=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="base"):
        aggregate(torch.zeros(12, 16), routing, base=torch.zeros(12, 16))


def test_the_papers_widths_waste_no_lane() -> None:
    assert [column_block(d, 2)[0] for d in (768, 1536, 2048, 4096, 2304, 2880)] == [256, 512, 1024, 1024, 256, 1024]
    for d in (768, 1536, 4096):
        for size in (2, 4):
            assert d % column_block(d, size)[0] == 0
