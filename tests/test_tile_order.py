"""In which order programs take output tiles: the kernels' own arithmetic, run with numbers in place of pointers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton.experimental.gluon import language as gl

from harness.shapes import MoEShape
from implementations import _ablation_gluon, _ablation_layers
from implementations.sonicmoe_triton import (
    gluon_common,
    gluon_contiguous,
    gluon_gathered,
    gluon_hidden_gradient,
    gluon_up_projection,
    kernels,
)
from implementations.sonicmoe_triton.gluon_contiguous import by_expert

BLOCK = 128
SIZES = st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 256, 257, 700]), min_size=1, max_size=7)


class Pointer:
    """Into a list; `gl.load` of what is at an offset."""

    def __init__(self, values: Sequence[int], at: int = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.at + number(offset))


def number(value: Any) -> int:
    """A constexpr's, where the kernels' arithmetic makes one."""
    return int(getattr(value, "value", value))


@pytest.fixture(autouse=True)
def _loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gl, "load", lambda pointer: pointer.values[pointer.at])
    for module in (gluon_gathered, gluon_contiguous):
        monkeypatch.setattr(module, "locate_tile", gluon_common.locate_tile.fn)


def tiles_of(kernel: str, sizes: list[int], column_tiles: int, ordered: bool) -> list[tuple[int, int, int, int]]:
    """(expert, first row, rows of the expert from there on, tile of columns) of every output tile, in order."""
    offsets = [sum(sizes[:expert]) for expert in range(len(sizes) + 1)]
    tiles = [(e, row) for e, size in enumerate(sizes) for row in range(offsets[e], offsets[e] + size, BLOCK)]
    row_tiles = Pointer([e for e, _ in tiles]), Pointer([row for _, row in tiles]), Pointer(offsets)
    plan = SimpleNamespace(column_tiles=column_tiles, by_expert=ordered, block_m=BLOCK, block_n=1)
    found = []
    for tile in range(len(tiles) * column_tiles):
        if kernel == "gathered":
            expert, first, size, column = gluon_gathered.locate.fn(tile, row_tiles, 0, plan)
        else:
            expert, first, end, column = gluon_contiguous._place.fn(tile, row_tiles, plan)
            size = number(end) - number(first)
        found.append(tuple(map(number, (expert, first, size, column))))
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=SIZES, column_tiles=st.integers(1, 5), kernel=st.sampled_from(["gathered", "contiguous"]))
def test_both_orders_take_every_tile_once(sizes: list[int], column_tiles: int, kernel: str) -> None:
    by_rows, by_experts = (tiles_of(kernel, sizes, column_tiles, ordered) for ordered in (False, True))
    offsets = [sum(sizes[:expert]) for expert in range(len(sizes) + 1)]
    wanted = [
        (expert, first, offsets[expert + 1] - first, column)
        for expert, size in enumerate(sizes)
        for first in range(offsets[expert], offsets[expert] + size, BLOCK)
        for column in range(column_tiles)
    ]
    assert by_rows == wanted
    # The same tiles: by expert, then by column, then by row.
    assert by_experts == sorted(wanted, key=lambda tile: (tile[0], tile[3], tile[1]))


def test_which_order_a_contiguous_gemm_takes() -> None:
    # dX of the 120B layer, 16.8 MB an expert; with many rows for each expert; and of a small expert.
    assert by_expert(4096, 2048, 2048) and by_expert(4096, 2048, 256)
    assert not by_expert(4096, 2048, 8192) and not by_expert(1536, 512, 256)
    assert gluon_contiguous.choose(4096, 2048, True).by_expert and not gluon_contiguous.choose(4096, 2048).by_expert


def test_which_order_a_gathering_gemm_takes() -> None:
    """As measured (`tune`): the up-projection at 256 and 512 rows of experts of 16.8 MB, not at 1024; dH, whose
    columns are half as many, by the table alone there."""
    tuned = json.loads((ROOT / "results" / "nvidia_h200" / "tuning" / "sonicmoe_triton.json").read_text())["measured"]
    layers = {row["shape"]: MoEShape.parse(row["shape"]) for row in tuned}
    taken = {}
    for shape, its in layers.items():
        ms = {
            json.dumps(row["options"], sort_keys=True): row["ms"]
            for row in tuned
            if (row["shape"], row["kernel"]) == (shape, "up_projection") and "ms" in row
        }
        # What kernels choose themselves, at layers tuned since, has the order already.
        if its.d == 4096 and gluon_gathered.by_expert(2 * its.n, its.d, its.routed_rows // its.E):
            chosen = {"block_n": 256, "ragged": True, "by_expert": True}
            taken[shape] = ms["null"] / ms[json.dumps(chosen, sort_keys=True)]
    assert set(taken) == {"16384,4096,1024,512,8", "16384,4096,1024,256,8"}
    assert min(taken.values()) > 1.02
    few = gluon_up_projection.choose(1024, ordered_by_expert=True)
    assert (few.by_expert, few.ragged, few.tile.block_n) == (True, True, 256)
    usual = gluon_up_projection.choose(1024)
    assert not usual.by_expert and not usual.ragged
    assert gluon_hidden_gradient.choose(2048, ordered_by_expert=True).by_expert
    assert not gluon_hidden_gradient.choose(2048).by_expert


@pytest.mark.parametrize("rows", [128, 256, 512, 513, 1024, 0.01])
@pytest.mark.parametrize(("d", "n", "experts"), [(4096, 1024, 16), (7168, 2048, 8), (1536, 256, 128)])
def test_the_layer_and_its_ablations_choose_alike(
    d: int, n: int, experts: int, rows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors without data, up to where the tile is known. ``rows``: of an expert; all may be fewer than experts."""
    routing: Any = SimpleNamespace(rows=max(1, int(rows * experts)), num_experts=experts, block_m=BLOCK)
    chosen: list[Any] = []

    class Chosen(Exception):
        pass

    def known(tile: object, block_m: int) -> None:
        raise Chosen

    def recorded(choose: Any) -> Any:
        def of(*widths: Any, **order: Any) -> Any:
            chosen.append(choose(*widths, **order))
            return chosen[-1]

        return of

    monkeypatch.setattr(gluon_up_projection.tiles, "check_block_m", known)
    monkeypatch.setattr(kernels, "_choice", lambda *asked: kernels.Choice(plain=False))
    monkeypatch.setattr(_ablation_gluon, "gathered_gemm", lambda *operands: chosen.append(operands[-1]))
    for module in (gluon_up_projection, gluon_hidden_gradient):
        monkeypatch.setattr(module, "choose", recorded(module.choose))
    x, w1, w2 = (torch.empty(*size, device="meta", dtype=torch.bfloat16) for size in
                 ((8, d), (experts, 2 * n, d), (experts, d, n)))  # fmt: skip
    h = torch.empty(routing.rows, 2 * n, device="meta", dtype=torch.bfloat16)
    scores = torch.empty(routing.rows, device="meta")
    with pytest.raises(Chosen):
        gluon_up_projection.up_projection(x, w1, routing, "swiglu")
    _ablation_layers.up_projection(x, w1, routing)
    with pytest.raises(Chosen):
        gluon_hidden_gradient.hidden_gradient(x, w2, h, scores, routing, "swiglu")
    _ablation_layers.hidden_gradient(x, w2, routing)
    up, _, up_apart, hidden, _, hidden_apart = chosen
    assert up == up_apart and hidden == hidden_apart
    assert up.by_expert == gluon_gathered.by_expert(2 * n, d, routing.rows // experts)
    assert hidden.by_expert == gluon_gathered.by_expert(n, d, routing.rows // experts)
