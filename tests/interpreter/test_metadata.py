"""Routing metadata against a stable sort, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implementations.sonicmoe_triton import metadata
from implementations.sonicmoe_triton.metadata import Routing, make_routing, route


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of pairs and several turns of each loop from few pairs."""
    monkeypatch.setattr(metadata, "PAIRS_PER_BLOCK", 32)
    monkeypatch.setattr(metadata, "SCAN_BLOCKS", 4)
    monkeypatch.setattr(metadata, "TILES_PER_STORE", 2)


def distinct_experts(tokens: int, k: int, experts: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k].int()


def check(routing: Routing, experts: Tensor, token_of_pair: Tensor, num_experts: int, block_m: int) -> None:
    pairs = experts.reshape(-1)
    order = torch.argsort(pairs, stable=True)
    counts = torch.bincount(pairs, minlength=num_experts)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    tiles = [(e, int(offsets[e]) + row) for e in range(num_experts) for row in range(0, int(counts[e]), block_m)]
    assert torch.equal(routing.gather.long(), token_of_pair[order])
    assert torch.equal(routing.reverse.long()[order], torch.arange(pairs.numel()))
    assert torch.equal(routing.experts, pairs)
    assert torch.equal(routing.expert_offsets.long(), offsets)
    assert routing.num_tiles.tolist() == [len(tiles)]
    assert len(tiles) <= routing.max_tiles == pairs.numel() // block_m + num_experts
    tiles += [(num_experts - 1, pairs.numel())] * (routing.max_tiles - len(tiles))
    assert list(zip(routing.tile_expert.tolist(), routing.tile_row.tolist(), strict=True)) == tiles
    for tensor in (routing.gather, routing.reverse, routing.expert_offsets, routing.tile_expert, routing.tile_row):
        assert tensor.dtype == torch.int32


@pytest.mark.parametrize(
    ("tokens", "k", "experts"),
    [(1, 1, 1), (5, 2, 4), (37, 3, 10), (20, 12, 12), (64, 2, 3), (9, 5, 130), (3, 2, 1024)],
)
def test_top_k_routing(small_blocks: None, tokens: int, k: int, experts: int) -> None:
    chosen = distinct_experts(tokens, k, experts)
    routing = make_routing(chosen, experts, block_m=16)
    check(routing, chosen, torch.arange(tokens).repeat_interleave(k), experts, 16)
    assert (routing.tokens, routing.rows, routing.num_experts, routing.k) == (tokens, tokens * k, experts, k)
    assert routing.token_offsets is None


def test_the_default_block() -> None:
    chosen = distinct_experts(300, 2, 6)
    check(make_routing(chosen, 6), chosen, torch.arange(300).repeat_interleave(2), 6, 128)


def test_all_to_one_expert(small_blocks: None) -> None:
    chosen = torch.full((150, 1), 2)  # int64: any integer dtype is taken
    check(make_routing(chosen, 4, block_m=8), chosen.int(), torch.arange(150), 4, 8)


@pytest.mark.parametrize("counts", [(2, 0, 3, 0, 0, 7, 1), (0, 0, 5), (4, 0, 0), (1,) * 40])
def test_general_routing(small_blocks: None, counts: tuple[int, ...]) -> None:
    offsets = torch.tensor((0, *counts)).cumsum(0)
    experts = torch.randint(0, 7, (sum(counts),), generator=torch.Generator().manual_seed(1)).int()
    routing = make_routing(experts, 7, block_m=4, token_offsets=offsets)
    check(routing, experts, torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)), 7, 4)
    assert routing.tokens == len(counts)
    assert routing.token_offsets is not None and routing.token_offsets.dtype == torch.int32


def test_pairs_without_an_expert_have_no_row(small_blocks: None) -> None:
    """Among others, in whole blocks of them, and behind the last token's pairs."""
    generator = torch.Generator().manual_seed(1)
    counts = torch.tensor([3, 0, 9, 40, 1, 7])
    experts = torch.randint(-1, 5, (int(counts.sum()) + 30,), generator=generator).int()
    experts[12:45], experts[-30:] = -1, -1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    scores = torch.rand(len(experts), generator=generator)
    routing, row_scores = route(scores, experts, 5, 4, offsets)
    named = experts >= 0
    tokens = torch.arange(6).repeat_interleave(counts)[named[:-30]]
    own_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(tokens, minlength=6).cumsum(0)])
    want, want_scores = route(scores[named], experts[named], 5, 4, own_offsets)
    rows = int(named.sum())
    assert routing.rows == len(experts) and int(routing.expert_offsets[-1]) == rows
    assert torch.equal(routing.expert_offsets, want.expert_offsets) and torch.equal(routing.num_tiles, want.num_tiles)
    tiles = int(want.num_tiles)
    assert torch.equal(routing.tile_expert[:tiles], want.tile_expert[:tiles])
    assert torch.equal(routing.tile_row[:tiles], want.tile_row[:tiles])
    assert torch.equal(routing.gather[:rows], want.gather) and torch.equal(row_scores[:rows], want_scores)
    assert torch.equal(routing.reverse[named], want.reverse) and bool((routing.reverse[~named] == -1).all())


def test_a_token_may_name_an_expert_twice(small_blocks: None) -> None:
    experts = torch.tensor([1, 1, 0, 1], dtype=torch.int32)
    routing = make_routing(experts, 2, block_m=4, token_offsets=torch.tensor([0, 3, 4]))
    check(routing, experts, torch.tensor([0, 0, 0, 1]), 2, 4)


def test_no_rows() -> None:
    for routing in (
        make_routing(torch.empty(0, 4, dtype=torch.int32), 8),
        make_routing(torch.empty(0, dtype=torch.int32), 8, token_offsets=torch.zeros(6, dtype=torch.int32)),
    ):
        assert routing.rows == 0 and routing.num_tiles.tolist() == [0] and routing.max_tiles == 8
        assert routing.expert_offsets.tolist() == [0] * 9


def test_row_order(small_blocks: None) -> None:
    chosen = distinct_experts(23, 3, 5)
    routing = make_routing(chosen, 5)
    scores = torch.rand(23, 3)
    expected = torch.empty(69)
    expected[routing.reverse.long()] = scores.reshape(-1)
    again, row_scores = route(scores, chosen, 5)
    assert torch.equal(row_scores, expected) and torch.equal(again.reverse, routing.reverse)
    assert torch.equal(route(scores.T.contiguous().T, chosen, 5)[1], expected)
    with pytest.raises(ValueError, match="68 scores for 69 pairs"):
        route(scores.reshape(-1)[1:], chosen, 5)


def test_row_order_of_general_routing(small_blocks: None) -> None:
    """More experts than blocks of pairs, and the other way round."""
    for num_experts, pairs in ((40, 9), (3, 200)):
        experts = torch.randint(0, num_experts, (pairs,), generator=torch.Generator().manual_seed(1)).int()
        scores, offsets = torch.rand(pairs), torch.tensor([0, 2, 2, pairs])
        routing, row_scores = route(scores, experts, num_experts, 4, offsets)
        tokens = torch.arange(3).repeat_interleave(torch.diff(offsets))
        check(routing, experts, tokens, num_experts, 4)
        assert torch.equal(row_scores[routing.reverse.long()], scores)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="E = 1025"):
        make_routing(torch.zeros(1, 1, dtype=torch.int32), 1025)
    with pytest.raises(ValueError, match="token_offsets"):
        make_routing(torch.zeros(4, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="K = 0"):
        make_routing(torch.zeros(4, 0, dtype=torch.int32), 4)
