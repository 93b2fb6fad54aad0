"""Routing metadata, made on the device without atomics on an order and without a host synchronisation.

Pairs (token, expert) come ordered by token; rows are the same pairs sorted stably by expert. With h[b, e] the number of
pairs of expert e in block b of consecutive pairs, a pair's row is

    row = expert_offsets[e] + sum over b' < b of h[b', e] + rank among the block's own pairs of e.

Three small kernels: h; its exclusive prefix over the blocks, and each expert's count; the rows, with the scores in
their order, and beside them expert_offsets and the tile map. The last sorts each block by (expert, position): the rank
is then the sorted position minus where the expert's run starts, which costs less than comparing all positions with
each other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2

#: Pairs of one program, at most. Longer blocks make h smaller and the sort deeper.
PAIRS_PER_BLOCK = 512
#: Of the programs that count and sort a block: more threads shorten the sort, a chain of exchanges.
BLOCK_WARPS = 4
#: Blocks that the scan takes at once; no less than its 128 threads, for it works in place.
SCAN_BLOCKS = 1024
#: Tile-map entries that an expert writes at once.
TILES_PER_STORE = 128
MAX_EXPERTS = 1024


@dataclass(frozen=True)
class Routing:
    """Who goes where. All tensors are int32 on one device; T tokens, P = R pairs or rows, E experts.

    Attributes:
        gather: (R,), token of each row; rows are sorted by expert, within an expert by token.
        reverse: (P,), row of each pair; pairs are ordered by token (top-K: pair t * K + k).
        token_offsets: (T + 1,), first pair of each token; None where every token has ``k`` pairs.
        k: pairs of each token, or an upper bound of them where ``token_offsets`` is given.
        experts: (P,), expert of each pair.
        expert_offsets: (E + 1,), first row of each expert.
        tile_expert, tile_row: (max_tiles,), expert and first row of each tile of ``block_m`` rows, in row order. An
            unused entry names the last expert and row R: a tile without rows.
        num_tiles: (1,), how many tiles are used.
        block_m: rows of a tile.
    """

    gather: Tensor
    reverse: Tensor
    token_offsets: Tensor | None
    k: int
    experts: Tensor
    expert_offsets: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    num_tiles: Tensor
    block_m: int = 128

    @property
    def rows(self) -> int:
        """R, routed rows."""
        return self.gather.numel()

    @property
    def tokens(self) -> int:
        """T."""
        return self.rows // self.k if self.token_offsets is None else self.token_offsets.numel() - 1

    @property
    def num_experts(self) -> int:
        """E."""
        return self.expert_offsets.numel() - 1

    @property
    def row_tiles(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a kernel over tiles of rows is given."""
        return self.tile_expert, self.tile_row, self.expert_offsets, self.num_tiles

    @property
    def max_tiles(self) -> int:
        """R // block_m + E: what the host knows of the number of tiles."""
        return self.tile_expert.numel()


@triton.jit
def _routing_count_kernel(  # type: ignore[no-untyped-def]
    experts_ptr, block_counts_ptr, pairs, GENERAL: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # experts (P,) -> block_counts (blocks, E)
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    live = pair < pairs
    expert = tl.load(experts_ptr + pair, mask=live, other=0)
    if GENERAL:
        live = live & (expert >= 0)
        expert = tl.where(live, expert, 0)
    count = tl.histogram(expert, E_PAD, mask=live)
    lane = tl.arange(0, E_PAD)
    tl.store(block_counts_ptr + block * E + lane, count, mask=lane < E)


@triton.jit(do_not_specialize=["blocks"])
def _routing_scan_kernel(  # type: ignore[no-untyped-def]
    block_counts_ptr, blocks, E: tl.constexpr, CHUNK: tl.constexpr
):
    # One program for each expert: block_counts (blocks, E) -> its exclusive prefix over blocks, and its sum below
    expert = tl.program_id(0)
    total = 0
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        at = block_counts_ptr + block * E + expert
        count = tl.load(at, mask=block < blocks, other=0)
        tl.store(at, total + tl.cumsum(count, 0) - count, mask=block < blocks)
        total += tl.sum(count, 0)
    tl.store(block_counts_ptr + blocks * E + expert, total)


@triton.jit
def _store_tiles(  # type: ignore[no-untyped-def]
    expert, counts, lane, expert_offsets_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr, max_tiles,
    E: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    # An expert's part of expert_offsets (E + 1,), tile_expert and tile_row (max_tiles,), from all experts' counts
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    all_rows = tl.sum(counts, 0)
    all_tiles = tl.sum(tiles, 0)
    first_row = tl.sum(tl.where(lane < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(lane < expert, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(lane == expert, tiles, 0), 0)

    tl.store(expert_offsets_ptr + expert, first_row)
    if expert == E - 1:
        tl.store(expert_offsets_ptr + E, all_rows)
        tl.store(num_tiles_ptr, all_tiles)
    for start in range(0, own_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        tl.store(tile_expert_ptr + first_tile + tile, tl.full((TILES,), 0, tl.int32) + expert, mask=tile < own_tiles)
        tl.store(tile_row_ptr + first_tile + tile, first_row + tile * BLOCK_M, mask=tile < own_tiles)
    # At most E entries are unused (each expert's last tile is the only partial one), so one for each expert.
    unused = all_tiles + expert
    if unused < max_tiles:
        tl.store(tile_expert_ptr + unused, E - 1)
        tl.store(tile_row_ptr + unused, all_rows)


# Otherwise a kernel for each kind of number of tokens: `pairs` alone, whose divisibility makes wider loads, is enough.
@triton.jit(do_not_specialize=["blocks", "max_tiles"])
def _routing_rows_kernel(  # type: ignore[no-untyped-def]
    experts_ptr, tokens_ptr, scores_ptr, block_prefix_ptr, gather_ptr, reverse_ptr, row_scores_ptr,
    expert_offsets_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr, pairs, blocks, max_tiles,
    K: tl.constexpr, GENERAL: tl.constexpr, SCORED: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    # experts, scores (P,), block_prefix (blocks + 1, E) -> gather, row_scores (R,), reverse (P,), and the tile map
    # Two jobs side by side, since both need no more than the counts: a block's rows, and an expert's tiles.
    block = tl.program_id(0)
    lane = tl.arange(0, E_PAD)
    counts = tl.load(block_prefix_ptr + blocks * E + lane, mask=lane < E, other=0)
    if block < E:
        _store_tiles(
            block, counts, lane, expert_offsets_ptr, tile_expert_ptr, tile_row_ptr, num_tiles_ptr, max_tiles,
            E, BLOCK_M, TILES,
        )  # fmt: skip
    if block < blocks:
        position = tl.arange(0, BLOCK)
        live = block * BLOCK + position < pairs
        expert = tl.load(experts_ptr + block * BLOCK + position, mask=live, other=0)
        if GENERAL:
            live = live & (expert >= 0)
            expert = tl.where(live, expert, 0)

        # first[e]: the row of the block's first pair of e, less that pair's position in the sorted block.
        count = tl.histogram(expert, E_PAD, mask=live)
        first = tl.cumsum(counts - count, 0) - (counts - count)
        first += tl.load(block_prefix_ptr + block * E + lane, mask=lane < E, other=0)

        # Pairs past the end carry the largest key and stay last, so `live` holds for the sorted positions too.
        key = tl.sort(tl.where(live, expert, E_PAD) * BLOCK + position)
        row = position + tl.gather(first, tl.minimum(key // BLOCK, E_PAD - 1), 0)
        pair = block * BLOCK + key % BLOCK
        if GENERAL:
            # So do pairs without an expert, which have no row.
            live = key < E_PAD * BLOCK
            token = tl.load(tokens_ptr + pair, mask=live, other=0)
            tl.store(reverse_ptr + pair, tl.where(live, row, -1), mask=pair < pairs)
        else:
            token = pair // K
            tl.store(reverse_ptr + pair, row, mask=live)
        tl.store(gather_ptr + row, token, mask=live)
        if SCORED:
            tl.store(row_scores_ptr + row, tl.load(scores_ptr + pair, mask=live, other=0.0), mask=live)


class _Launchers(NamedTuple):
    count_pairs: Launcher
    scan_blocks: Launcher
    sort_rows: Launcher


@functools.cache
def _launchers(
    num_experts: int, k: int, general: bool, scored: bool, block: int, block_m: int, scan: int, tiles: int
) -> _Launchers:
    experts = {"E": num_experts}
    sizes = {**experts, "E_PAD": padded_experts(num_experts), "BLOCK": block}
    kind = {"K": k, "GENERAL": general, "SCORED": scored}
    return _Launchers(
        Launcher(_routing_count_kernel, {"GENERAL": general, **sizes}, num_warps=BLOCK_WARPS),
        Launcher(_routing_scan_kernel, {**experts, "CHUNK": scan}, num_warps=4),
        Launcher(_routing_rows_kernel, {**kind, **sizes, "BLOCK_M": block_m, "TILES": tiles}, num_warps=BLOCK_WARPS),
    )


def padded_experts(num_experts: int) -> int:
    """E as the kernels' vectors hold it: a power of two, and no fewer bins of a histogram than a warp has lanes."""
    return max(next_power_of_2(num_experts), 32)


def make_routing(experts: Tensor, num_experts: int, block_m: int = 128, token_offsets: Tensor | None = None) -> Routing:
    """Sort routed pairs by expert and cut each expert's rows into tiles.

    Args:
        experts: (T, K) integers in [0, E), or (P,) ordered by token with ``token_offsets``, where -1 is no expert: the
            pair has no row, and R is a bound of the rows. Other values out of range are not looked for: that would take
            the host's attention.
        num_experts: E <= 1024.
        block_m: rows of a tile.
        token_offsets: (T + 1,) integers, first pair of each token (general routing: any number of pairs, or none).

    Raises:
        ValueError: the shape does not fit the kind of routing, or E is out of range.
    """
    return _route(None, experts, num_experts, block_m, token_offsets)[0]


def route(
    scores: Tensor, experts: Tensor, num_experts: int, block_m: int = 128, token_offsets: Tensor | None = None
) -> tuple[Routing, Tensor]:
    """`make_routing`, and ``scores`` (shaped as ``experts``, fp32) in row order: (R,)."""
    if scores.numel() != experts.numel():
        raise ValueError(f"{scores.numel()} scores for {experts.numel()} pairs")
    routing, row_scores = _route(scores, experts, num_experts, block_m, token_offsets)
    assert row_scores is not None
    return routing, row_scores


def _route(
    scores: Tensor | None, experts: Tensor, num_experts: int, block_m: int, token_offsets: Tensor | None
) -> tuple[Routing, Tensor | None]:
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"E = {num_experts} is not within 1 to {MAX_EXPERTS}")
    if experts.dim() != (2 if token_offsets is None else 1):
        raise ValueError(f"experts must be (T, K), or (P,) with token_offsets, not {tuple(experts.shape)}")
    # A token chooses an expert at most once, so E bounds a token's pairs where they vary.
    k = experts.shape[1] if token_offsets is None else num_experts
    if k < 1:
        raise ValueError("K = 0: every token needs a pair unless token_offsets says otherwise")
    experts = experts.reshape(-1).to(torch.int32).contiguous()
    if token_offsets is not None:
        token_offsets = token_offsets.to(torch.int32).contiguous()
    pairs = experts.numel()
    max_tiles = pairs // block_m + num_experts
    empty = experts.new_empty
    routing = Routing(
        gather=empty(pairs),
        reverse=empty(pairs),
        token_offsets=token_offsets,
        k=k,
        experts=experts,
        expert_offsets=empty(num_experts + 1),
        tile_expert=empty(max_tiles),
        tile_row=empty(max_tiles),
        num_tiles=empty(1),
        block_m=block_m,
    )
    row_scores = None
    if scores is not None:
        scores = scores.contiguous()
        row_scores = scores.new_empty(pairs)
    if pairs == 0:
        for tensor in (routing.expert_offsets, routing.tile_expert, routing.tile_row, routing.num_tiles):
            tensor.zero_()
        return routing, row_scores

    block = min(max(next_power_of_2(pairs), 64), PAIRS_PER_BLOCK)
    blocks = cdiv(pairs, block)
    general = token_offsets is not None
    launchers = _launchers(
        num_experts, 0 if general else k, general, scores is not None, block, block_m, SCAN_BLOCKS, TILES_PER_STORE
    )
    block_counts = empty((blocks + 1, num_experts))
    launchers.count_pairs((blocks,), (experts, block_counts, pairs))
    launchers.scan_blocks((num_experts,), (block_counts, blocks))
    tokens = experts  # never read where every token has K pairs
    if token_offsets is not None:
        pair = torch.arange(pairs, dtype=torch.int32, device=experts.device)
        tokens = torch.searchsorted(token_offsets, pair, right=True, out_int32=True) - 1
    # Pointers that are never read or written still have to point somewhere.
    launchers.sort_rows(
        (max(blocks, num_experts),),
        (
            experts, tokens, experts if scores is None else scores, block_counts, routing.gather, routing.reverse,
            routing.gather if row_scores is None else row_scores, routing.expert_offsets, routing.tile_expert,
            routing.tile_row, routing.num_tiles, pairs, blocks, max_tiles,
        ),
    )  # fmt: skip
    return routing, row_scores
