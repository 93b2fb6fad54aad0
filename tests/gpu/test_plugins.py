"""Every plugin that runs on a GPU and whose package is installed passes the harness's gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness.check import Checker
from harness.interface import DISTRIBUTIONS, Implementation, Point
from harness.operations import get_operation, variants_of
from harness.registry import default_registry, installed_reason, refusal

from . import common

#: Building counts: upstream kernels may compile and tune for minutes at a new shape.
TIME_LIMIT_S = 600.0
SHAPES = {"small": "512,256,128,8,2", "medium": "4096,768,256,32,4"}
#: Plugins whose code is this project's.
OWN = ("sonicmoe_torch", "sonicmoe_triton", "torch_grouped_mm", "torch_loop")
NAMES = [plugin.name for plugin in default_registry().all() if "cuda" in plugin.devices]


class PluginChecker:
    """A plugin in a process of its own, as a sweep runs it: what one breaks, no other meets."""

    def __init__(self, plugin: Implementation) -> None:
        self.plugin = plugin
        self._checker = Checker(TIME_LIMIT_S)
        self.close = self._checker.close

    def check(self, point: Point) -> None:
        """Assert that the point passes the gate; skip with the reason where it is refused."""
        impossible = get_operation(point.operation).unsupported_reason(point)
        refused = ("unsupported", impossible) if impossible else refusal(self.plugin, point)
        if refused:
            assert refused[0] == "unsupported", refused
            pytest.skip(refused[1])
        passed, result, text = self._checker.verdict(point)
        assert passed, f"{result}: {text}"


@pytest.fixture(scope="module", params=NAMES)
def plugin(request: pytest.FixtureRequest) -> Iterator[PluginChecker]:
    found = default_registry().get(request.param)
    missing = installed_reason(found)
    if missing:
        pytest.skip(missing)
    checker = PluginChecker(found)
    yield checker
    checker.close()


def test_no_plugin_is_broken() -> None:
    registry = default_registry()
    registry.all()
    assert not registry.broken


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))
def test_gate(plugin: PluginChecker, shape: str, distribution: str) -> None:
    refused = []
    checked = 0
    for operation in plugin.plugin.operations:
        for variant in variants_of(plugin.plugin, operation):
            dtype = "bfloat16" if "bfloat16" in plugin.plugin.dtypes else plugin.plugin.dtypes[0]
            point = common.point_of(
                plugin.plugin.name, shape, dtype, distribution, operation=operation, variant=variant
            )
            if operation == "routed_experts":
                # Tokens with more, with fewer and without experts.
                point = replace(point, routing=replace(point.routing, method="expert_choice"))
            try:
                plugin.check(point)
                checked += 1
            except pytest.skip.Exception as skipped:
                refused.append(str(skipped))
    if not checked:
        pytest.skip("; ".join(refused) or "offers no operation")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes(plugin: PluginChecker, dtype: str) -> None:
    plugin.check(common.point_of(plugin.plugin.name, SHAPES["small"], dtype))


@pytest.mark.parametrize("convention", ["softmax_topk", "softmax_topk_renormalised"])
def test_other_conventions(plugin: PluginChecker, convention: str) -> None:
    plugin.check(common.point_of(plugin.plugin.name, SHAPES["small"], convention=convention))


@pytest.mark.parametrize("shape", ["1,256,128,8,2", "256,256,128,8,8", "300,256,128,10,3", "129,256,128,8,1"])
def test_awkward_sizes(plugin: PluginChecker, shape: str) -> None:
    """T = 1; K = E; E = 10 with a ragged number of rows; K = 1."""
    if plugin.plugin.name not in OWN:
        pytest.skip("what an upstream package makes of these is a finding, not this project's failure")
    plugin.check(common.point_of(plugin.plugin.name, shape))
