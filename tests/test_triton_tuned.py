"""The table of tuned choices and what becomes of it: every entry makes a kernel, and reaches it by the widths of real
tensors. Nothing is compiled or launched."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.shapes import MoEShape
from implementations.sonicmoe_triton import (
    aggregation,
    gluon_contiguous,
    gluon_gathered,
    gluon_hidden_gradient,
    gluon_up_projection,
    gluon_weight_gradient,
    kernels,
    tiles,
    tune,
    tuned,
)
from implementations.sonicmoe_triton.kernels import Choice
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.tuned import PLAIN

EVERY: list[dict[str, Any]] = json.loads(tuned.TABLE.read_text())["choices"]
#: Of the GEMMs.
ENTRIES = [entry for entry in EVERY if entry["kernel"] != tiles.AGGREGATION]
#: Keyword arguments of which options, for each kernel.
MAKE: dict[str, Callable[..., Any]] = {
    tiles.UP_PROJECTION: gluon_gathered.make_options,
    tiles.DOWN_PROJECTION: gluon_contiguous.Options,
    tiles.INPUT_GRADIENT: gluon_contiguous.Options,
    tiles.HIDDEN_GRADIENT: gluon_gathered.make_options,
    tiles.UP_WEIGHT_GRADIENT: gluon_weight_gradient.Options,
    tiles.DOWN_WEIGHT_GRADIENT: gluon_weight_gradient.Options,
}
#: Those whose second width is H's.
SEES_H = (tiles.INPUT_GRADIENT, tiles.UP_WEIGHT_GRADIENT)
#: For each kernel: (module of the Gluon kernel, of the twin), in which both have the kernel's name.
MODULES: dict[str, tuple[Any, Any]] = {
    tiles.UP_PROJECTION: (gluon_up_projection, kernels.plain_up_projection),
    tiles.DOWN_PROJECTION: (gluon_contiguous, kernels.contiguous_gemm),
    tiles.INPUT_GRADIENT: (gluon_contiguous, kernels.contiguous_gemm),
    tiles.HIDDEN_GRADIENT: (gluon_hidden_gradient, kernels.plain_hidden_gradient),
    tiles.UP_WEIGHT_GRADIENT: (gluon_weight_gradient, kernels.weight_gradient),
    tiles.DOWN_WEIGHT_GRADIENT: (gluon_weight_gradient, kernels.weight_gradient),
}


def plan(kernel: str, options: Any, d: int, width: int) -> object:
    """What a kernel is compiled for at these widths, activation gated."""
    if kernel == tiles.UP_PROJECTION:
        return gluon_gathered.make_plan(d, width, "swiglu", 2, options.tile.block_n // 2, 132, options)
    if kernel == tiles.HIDDEN_GRADIENT:
        return gluon_gathered.make_plan(d, width, "swiglu", 2, options.tile.block_n, 132, options)
    if kernel in (tiles.DOWN_PROJECTION, tiles.INPUT_GRADIENT):
        return gluon_contiguous.make_plan(d, width, kernel == tiles.DOWN_PROJECTION, False, 128, 132, options)
    options = gluon_weight_gradient.narrowed(options, d, width)
    return gluon_weight_gradient.make_plan(options, kernel == tiles.UP_WEIGHT_GRADIENT, 128, d, width, 132)


def routing_of(rows: int) -> Routing:
    """What is looked at of a routing with so many rows for each of two experts."""
    found: Any = types.SimpleNamespace(rows=2 * rows, num_experts=2)
    return found


def call(kernel: str, d: int, width: int, rows: int, activation: str = "swiglu") -> Any:
    """The layer's call, with tensors that have these widths and no elements, and a routing of so many rows for each
    expert."""
    halves = 2 if kernels.is_gated(activation) else 1
    n, hidden = (width // halves, width) if kernel in SEES_H else (width, halves * width)
    empty = functools.partial(torch.empty, dtype=torch.bfloat16)
    x, w1, w2, h, a = empty(0, d), empty(0, hidden, d), empty(0, d, n), empty(0, hidden), empty(0, n)
    routing = routing_of(rows)
    arguments: dict[str, tuple[Any, ...]] = {
        tiles.UP_PROJECTION: (x, w1, routing, activation),
        tiles.DOWN_PROJECTION: (a, w2, routing),
        tiles.INPUT_GRADIENT: (h, w1, routing),
        tiles.HIDDEN_GRADIENT: (x, w2, h, torch.empty(0), routing, activation),
        tiles.UP_WEIGHT_GRADIENT: (h, x, routing),
        tiles.DOWN_WEIGHT_GRADIENT: (x, a, routing),
    }
    return getattr(kernels, kernel)(*arguments[kernel])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The layer's calls return the Gluon kernel's options (None: its own choice), or "plain"."""
    monkeypatch.setattr(kernels, "on_hopper", lambda tensor: tensor.dtype != torch.float32)
    for kernel, (gluon, plain) in MODULES.items():
        monkeypatch.setattr(gluon, kernel, lambda *arguments: arguments[-1])
        monkeypatch.setattr(plain, kernel, lambda *_: "plain")
    kernels._tuned.cache_clear()
    yield
    kernels._tuned.cache_clear()


def name_of(entry: dict[str, Any]) -> str:
    return f"{entry['kernel']}-{entry['d']}-{entry['width']}-{tuned.bucket(entry['rows'])}"


each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=name_of)


def test_entries_are_complete_and_different() -> None:
    assert ENTRIES and len(set(map(name_of, EVERY))) == len(EVERY)
    assert all(set(entry) == {"kernel", "d", "width", "rows", "options", "commit", "dirty"} for entry in EVERY)
    assert set(MAKE) == set(tune.CANDIDATES)


@each_entry
def test_every_entry_is_a_candidate_that_makes_a_kernel(entry: dict[str, Any]) -> None:
    kernel, options = entry["kernel"], entry["options"]
    assert options in tune.CANDIDATES[kernel]
    if options is not tune.DEFAULT and options != PLAIN:
        plan(kernel, MAKE[kernel](**options), entry["d"], entry["width"])


@pytest.mark.usefixtures("hopper")
@each_entry
def test_every_entry_reaches_its_kernel(entry: dict[str, Any]) -> None:
    kernel, options, rows = entry["kernel"], entry["options"], entry["rows"]
    want = "plain" if options == PLAIN else None if options is tune.DEFAULT else MAKE[kernel](**options)
    assert call(kernel, entry["d"], entry["width"], rows) == want
    assert call(kernel, entry["d"], entry["width"] + 16, rows) is None
    ungated = call(kernel, entry["d"], entry["width"], rows, "silu")
    if kernel in (tiles.UP_PROJECTION, tiles.HIDDEN_GRADIENT):
        assert ungated is None
    else:
        assert ungated == want


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("kernel", MAKE)
def test_choices_by_a_table(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        (kernel, 64, 1 << number): {9: candidate}
        for number, candidate in enumerate(tune.CANDIDATES[kernel])
        if candidate is not tune.DEFAULT
    }
    monkeypatch.setattr(tuned, "_choices", lambda: table)
    make, operand = MAKE[kernel], torch.empty(0, dtype=torch.bfloat16)
    for number, candidate in enumerate(tune.CANDIDATES[kernel]):
        want: Choice[Any] = Choice(plain=False)
        if candidate == PLAIN:
            want = Choice(plain=True)
        elif candidate is not None:
            want = Choice(plain=False, options=make(**candidate))
        assert kernels._tuned(kernel, make, 64, 1 << number, 5) == want
        assert kernels._choice(kernel, make, 64, 1 << number, operand, routing_of(20)) == want
        assert kernels._choice(kernel, make, 64, 1 << number, operand, routing_of(20), gated=False) == Choice(
            plain=False
        )
        assert kernels._choice(kernel, make, 64, 1 << number, operand.float(), routing_of(20)) == Choice(plain=True)


def test_of_several_entries_the_one_with_the_nearest_number_of_rows_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    few: dict[str, Any] = {"by_expert": True}
    table = {(tiles.DOWN_PROJECTION, 64, 64): {tuned.bucket(256): few, tuned.bucket(2048): None, 20: PLAIN}}
    monkeypatch.setattr(tuned, "_choices", lambda: table)
    found = {
        rows: tuned.overrides(tiles.DOWN_PROJECTION, 64, 64, tuned.bucket(rows))
        for rows in (0, 1, 255, 511, 512, 1023, 1024, 2048, 4095, 1 << 17, 1 << 30)
    }
    # 512 .. 1023 are one step away from 256 .. 511, two from 2048 .. 4095.
    assert [rows for rows, options in found.items() if options == few] == [0, 1, 255, 511, 512, 1023]
    assert [rows for rows, options in found.items() if options is None] == [1024, 2048, 4095]
    assert [rows for rows, options in found.items() if options == PLAIN] == [1 << 17, 1 << 30]
    assert tuned.overrides(tiles.DOWN_PROJECTION, 64, 128, 9) is None


def test_the_aggregations_entries_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def cleared() -> None:
        aggregation.choose.cache_clear()

    for entry in EVERY:
        if entry["kernel"] == tiles.AGGREGATION:
            assert entry["options"] in tune.AGGREGATIONS and entry["rows"] == 0
    table = {(tiles.AGGREGATION, 64, number): {0: candidate} for number, candidate in enumerate(tune.AGGREGATIONS, 1)}
    monkeypatch.setattr(tuned, "_choices", lambda: table)
    cleared()
    for k, candidate in enumerate(tune.AGGREGATIONS, 1):
        found = aggregation.choose(k, 64)
        assert found == (None if candidate is None else aggregation.Options(**candidate))
        if found is not None:
            sizes, how = aggregation.configuration(None, 768, 2, found)
            assert (sizes["BLOCK_D"], sizes["ROWS"], sizes["TOKENS"]) == (1024, found.rows, 1)
            assert how == {"num_warps": found.warps}
    assert aggregation.choose(None, 64) is None and aggregation.choose(1, 128) is None
    cleared()


@pytest.mark.usefixtures("hopper")
def test_no_experts_and_no_rows_have_a_choice() -> None:
    routing: Any = types.SimpleNamespace(rows=0, num_experts=0)
    operand = torch.empty(0, dtype=torch.bfloat16)
    for kernel, make in MAKE.items():
        kernels._choice(kernel, make, 4096, 1024, operand, routing)


def test_elsewhere_the_twins_run() -> None:
    operand: Tensor = torch.empty(0, dtype=torch.bfloat16)
    for kernel, make in MAKE.items():
        assert kernels._choice(kernel, make, 4096, 256, operand, routing_of(20)) == Choice(plain=True)


def test_a_winner_must_beat_the_default() -> None:
    def row(shape: str, options: Any, ms: float | None, d: int) -> dict[str, Any]:
        found = {"shape": shape, "kernel": tiles.DOWN_PROJECTION, "d": d, "width": 256}
        found |= {"rows": 2000, "options": options}
        return found | ({"problem": "?"} if ms is None else {"ms": ms})

    quick: dict[str, Any] = {"by_expert": True}
    measured = [
        *(row("won", None, 1.0, 64), row("won", quick, 0.9, 64), row("won", PLAIN, 0.95, 64)),
        *(row("too little", None, 1.0, 128), row("too little", quick, 0.995, 128)),
        *(row("no default", None, None, 192), row("no default", quick, 2.0, 192)),
        *(row("plain", quick, 1.0, 256), row("plain", PLAIN, 0.5, 256), row("plain", None, 0.8, 256)),
        *(row("nothing ran", None, None, 320), row("nothing ran", quick, None, 320)),
    ]
    winners = tune.choices(measured)
    assert {choice["d"]: choice["options"] for choice in winners.values()} == {
        64: quick,
        128: None,
        192: quick,
        256: PLAIN,
    }
    # Another number of rows stands beside, another shape with as many rows takes the place.
    old = [row("old", PLAIN, None, 64) | {"rows": 100}, row("old", PLAIN, None, 64) | {"rows": 1500}]
    table = [(its["d"], its["rows"], its["options"]) for its in tune.merged(old, winners)]
    assert table == [(64, 100, PLAIN), (64, 2000, quick), (128, 2000, None), (192, 2000, quick), (256, 2000, PLAIN)]
    for candidates in tune.CANDIDATES.values():
        assert candidates[0] is tune.DEFAULT and candidates.count(tune.DEFAULT) == candidates.count(PLAIN) == 1


class _NoRoom:
    """A layer of a shape; the second kernel of the first shape runs out of memory, as does the second shape itself."""

    alive = 0

    def __init__(self, shape: MoEShape, tokens: int) -> None:
        if shape.E == 2:
            raise torch.OutOfMemoryError("no room for the layer")
        assert _NoRoom.alive == 0, "the layer before is still there"
        self.shape = shape
        _NoRoom.alive += 1

    def __del__(self) -> None:
        if hasattr(self, "shape"):
            _NoRoom.alive -= 1


class _Pool:
    """No processes: nothing is compiled."""

    def __init__(self, workers: int) -> None:
        pass

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def imap_unordered(self, function: object, jobs: list[Any]) -> list[tuple[Any, str]]:
        return [(job, "") for job in jobs]


def test_what_memory_ends_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(layer: Any, kernel: str, failed: Any) -> list[dict[str, Any]]:
        if (layer.shape.E, kernel) == (1, tiles.DOWN_PROJECTION):
            raise torch.OutOfMemoryError("no room for its operands")
        return [{"shape": str(layer.shape), "kernel": kernel, "options": None, "ms": 1.0, "tflops": 1.0}]

    monkeypatch.setattr(tune, "Layer", _NoRoom)
    monkeypatch.setattr(tune, "_measure", measure)
    monkeypatch.setattr(tune.multiprocessing, "get_context", lambda how: types.SimpleNamespace(Pool=_Pool))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    shapes = [MoEShape(8, 8, 8, experts, 1) for experts in (1, 2, 3)]
    kernels_ = [tiles.UP_PROJECTION, tiles.DOWN_PROJECTION, tiles.INPUT_GRADIENT]
    found = [[(row["shape"], row["kernel"]) for row in rows] for rows in tune.tune(shapes, kernels_, 1)]
    first, third = str(shapes[0]), str(shapes[2])
    assert found[0] == [(first, tiles.UP_PROJECTION), (first, tiles.INPUT_GRADIENT)]
    assert found[1] == [] and found[2] == [(third, kernel) for kernel in kernels_]


def test_measurements_of_other_shapes_stay() -> None:
    old = [{"shape": "a", "kernel": "up", "ms": 1}, {"shape": "b", "kernel": "up", "ms": 2}]
    new = [{"shape": "b", "kernel": "up", "ms": 3}, {"shape": "b", "kernel": "down", "ms": 4}]
    assert tune.with_earlier(old, new) == [old[0], *new]


def test_a_difference_is_relative_and_nan_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_PIECE", 3)
    expected = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    found = expected + 0.1
    want = float((found - expected).norm() / expected.norm())
    assert tune.difference(found, expected) == pytest.approx(want, rel=1e-5)
    found[3, 4] = torch.nan
    assert not tune.difference(found, expected) < 1e9
