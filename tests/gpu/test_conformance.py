"""Our own implementations meet every case of the conformance suite on a GPU; and what the suite says of measuring."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
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


class _Reading(Layer):
    """Reads a third of the L2 cache and does nothing else worth a time."""

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.weight = torch.randn(l2 // 3 // 4, device=common.DEVICE, requires_grad=True)

    def parameters(self) -> Sequence[Tensor]:
        return [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {}


class _NoEviction(L2Eviction):
    def __init__(self) -> None:
        pass

    def __call__(self) -> None:
        pass


def test_a_replayed_graph_finds_a_cold_l2() -> None:
    """What a captured graph reads has left the cache before each sample: replays without an eviction are quicker."""
    problem = common.problem_of("torch_loop", "16,64,32,4,2")
    layer = _Reading()
    medians = []
    for evict in (L2Eviction(), _NoEviction()):
        calls = GraphCalls(layer, [problem], evict)
        for index in range(5):
            calls(index)
        medians.append(statistics.median(calls(index)[0] for index in range(50)))
    cold, warm = medians
    assert cold > 1.1 * warm, medians
