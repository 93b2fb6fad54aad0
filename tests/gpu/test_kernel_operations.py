"""Single kernels on a GPU: every implementation's pass the gate (other distributions: `test_plugins`), and a graph
replays the forward alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from harness.interface import KERNELS, Kernel
from harness.operations import OPERATIONS, get_operation, variants_of
from harness.registry import default_registry, installed_reason
from harness.timing import GraphCalls, HostCalls, L2Eviction

from . import common
from .test_plugins import PluginWorker

#: The second: widths that fill no tile, a ragged number of rows, K that is no power of two.
SHAPE, ODD = common.MEDIUM, "777,264,136,10,3"
NAMES = [plugin.name for plugin in default_registry().all() if set(KERNELS) & set(plugin.operations)]
ALL = [(operation, variant) for operation in KERNELS for variant in OPERATIONS[operation].variants]

every = pytest.mark.parametrize(("operation", "variant"), ALL, ids=["-".join(filter(None, one)) for one in ALL])


@pytest.fixture(scope="module", params=NAMES)
def plugin(request: pytest.FixtureRequest) -> Iterator[PluginWorker]:
    found = default_registry().get(request.param)
    missing = installed_reason(found)
    if missing:
        pytest.skip(missing)
    worker = PluginWorker(found)
    yield worker
    worker.close()


def check(worker: PluginWorker, operation: str, variant: str, shape: str, *args: str) -> None:
    if operation not in worker.plugin.operations or variant not in variants_of(worker.plugin, operation):
        pytest.skip(f"{worker.plugin.name} does not offer it")
    worker.check(common.point_of(worker.plugin.name, shape, *args, operation=operation, variant=variant))


@every
def test_gate(plugin: PluginWorker, operation: str, variant: str) -> None:
    check(plugin, operation, variant, SHAPE)


@every
@pytest.mark.parametrize("shape", [ODD, "1,256,128,8,2"])
def test_odd_sizes(plugin: PluginWorker, operation: str, variant: str, shape: str) -> None:
    if plugin.plugin.name != common.NAME:
        pytest.skip("what others make of these is a finding, not this project's failure")
    check(plugin, operation, variant, shape)


@pytest.fixture(scope="module")
def evict() -> L2Eviction:
    return L2Eviction()


@every
def test_a_graph_replays_the_forward_alone(evict: L2Eviction, operation: str, variant: str) -> None:
    point = common.point_of(common.NAME, SHAPE, operation=operation, variant=variant)
    its = get_operation(operation)
    problems = [its.make_problem(point, common.DEVICE, index) for index in range(2)]
    layer = default_registry().get(common.NAME).build(problems[0])
    assert isinstance(layer, Kernel)
    expected: list[dict[str, Tensor]] = [
        {name: tensor.clone() for name, tensor in layer.outputs(layer.forward(problem.x)).items()}
        for problem in problems
    ]
    calls = GraphCalls(layer, problems, evict)
    for index in (0, 1, 0):
        forward_ms, backward_ms = calls(index)
        assert 0 < forward_ms < 1e3 and backward_ms == 0
        output, gradients = calls.outputs()
        replayed = layer.outputs(output)
        assert not gradients and replayed.keys() == expected[index].keys()
        for name, want in expected[index].items():
            if name == "indices":
                common.assert_equal([replayed[name]], [want])
            else:
                assert common.relative([(replayed[name], want.float())]) < 5e-3
    host_ms, none = HostCalls(layer, problems, evict)(0)
    assert host_ms > 0 and none == 0
