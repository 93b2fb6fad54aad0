"""Our own implementations meet every case of the conformance suite on a GPU; and what the suite says of measuring."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from harness.conformance import CASES, OURS, Case
from harness.conformance.checks import fill_free_blocks
from harness.conformance.suite import Suite
from harness.interface import Layer
from harness.registry import default_registry
from harness.timing import GraphCalls, L2Eviction

from . import common

#: What ours refuse, in words; all else must be ok.
REFUSED = {
    ("torch_loop", "cuda-graph"): "read on the host",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """The whole suite once, its implementations side by side."""
    plugins = [default_registry().get(name) for name in OURS]
    path = tmp_path_factory.mktemp("conformance") / "conformance.jsonl"
    # A fresh cache compiles for longer than a user's.
    suite = Suite(plugins, CASES, "cuda", path, time_limit_s=240.0, jobs=2 * len(plugins))
    return {(row["implementation"], row["variant"]): row for row in suite.run()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", OURS)
def test_ours_meet_every_case(rows: dict[tuple[str, str], dict[str, Any]], name: str, case: Case) -> None:
    row = rows[name, case.name]
    if (name, case.name) in REFUSED:
        assert row["status"] == "unsupported" and REFUSED[name, case.name] in row["reason"], row["reason"]
    else:
        assert row["status"] == "ok", row["reason"]


def test_free_blocks_are_filled() -> None:
    """Small and large blocks, whole segments and parts of one: what comes next from them holds NaN."""
    torch.cuda.empty_cache()
    sizes = (512, 3 << 10, 700 << 10, 1536 << 10, 5 << 20, 64 << 20)
    held = [torch.zeros(size // 4, device=common.DEVICE) for size in sizes]
    del held
    fill_free_blocks()
    again = [torch.empty(size // 4, device=common.DEVICE) for size in sizes]
    assert all(bool(tensor.isnan().all()) for tensor in again)


#: Loads of one chain, and how far they lie apart, in int32: no two in a cache line, all together far less than the L2.
HOPS, HOP = 256, 1024


@triton.jit
def _chain_kernel(table, out, hops):  # type: ignore[no-untyped-def]
    """Each load's address is what the one before it loaded: its time is the memory's latency and nothing else."""
    place = 0
    for _ in range(hops):
        place = tl.load(table + place)
    tl.store(out, place)


class _Chain(Layer):
    """A chain of loads, and nothing else worth a time."""

    def __init__(self) -> None:
        self.weight = torch.ones((), device=common.DEVICE, requires_grad=True)
        self.table = torch.arange(HOP, (HOPS + 1) * HOP, HOP, device=common.DEVICE, dtype=torch.int32)
        self.table = self.table.repeat_interleave(HOP)
        self.end = torch.empty((), device=common.DEVICE, dtype=torch.int32)

    def parameters(self) -> Sequence[Tensor]:
        return [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        _chain_kernel[(1,)](self.table, self.end, HOPS)
        return x * self.weight + self.end

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {}


class _Pause(L2Eviction):
    """Longer than an eviction, so that the launch hides behind it too, but without its reads."""

    def __init__(self) -> None:
        pass

    def __call__(self) -> None:
        torch.cuda._sleep(500_000)


def test_a_replayed_graph_finds_a_cold_l2() -> None:
    """What a captured graph reads has left the cache before each sample: after a pause instead it is still there."""
    problem = common.problem_of("torch_loop", "16,64,32,4,2")
    layer = _Chain()
    medians = []
    for evict in (L2Eviction(), _Pause()):
        calls = GraphCalls(layer, [problem], evict)
        for index in range(5):
            calls(index)
        medians.append(statistics.median(calls(index)[0] for index in range(50)))
        assert int(layer.end) == HOPS * HOP
    cold, warm = medians
    assert cold > 1.5 * warm, medians
