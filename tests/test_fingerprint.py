"""Sketches of results tell other results from the same ones, whichever part of them differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import RightLayer, point_of, problem_of
from torch import Tensor

from harness.correctness import evaluate
from harness.fingerprint import Fingerprint, sketch
from harness.interface import Kernel
from harness.operations import MoELayer, get_operation, variants_of
from harness.reference import full_precision
from harness.registry import default_registry

TOLERANCE = 1e-2


def kept(tensor: Tensor, parts: tuple[float, float] | None = None) -> Fingerprint:
    """Of one tensor, with its own norm and the tolerance above; ``parts``: how single ones are looked at."""
    size = float(tensor.norm())
    return Fingerprint({"t": sketch(tensor)}, {"t": size}, {"t": TOLERANCE}, {"t": parts} if parts else {})


def drawn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("size", [(4096, 64), (16, 48, 64), (1, 64), (200,), (3, 4, 5, 6), (0, 8), (8, 0)])
def test_the_same_tensor_in_whatever_layout_is_the_same(size: tuple[int, ...]) -> None:
    tensor = drawn(*size)
    backwards = tensor.permute(*reversed(range(tensor.dim()))).contiguous().permute(*reversed(range(tensor.dim())))
    assert kept(tensor).difference({"t": backwards, "more": tensor}) is None
    assert sketch(tensor).shape == (size[0], 16)


def test_slices_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in ((100, 7), (10, 6, 7)):
        whole = sketch(drawn(*size))
        monkeypatch.setattr("harness.fingerprint.SLICE", 50)
        torch.testing.assert_close(sketch(drawn(*size)), whole)
        monkeypatch.undo()


@pytest.mark.parametrize("size", [(4096, 64), (16, 48, 64)])
def test_the_difference_has_the_size_of_the_tensors_own(size: tuple[int, ...]) -> None:
    tensor = drawn(*size)
    for error in (0.05, 0.5):
        noise = torch.randn(size, generator=torch.Generator().manual_seed(2))
        told = kept(tensor).difference({"t": tensor + error * noise})
        assert told is not None and told.startswith("t ") and told.endswith(" > 0.02")
        assert float(told.split()[1]) == pytest.approx(error, rel=0.15)
    # What two calls may differ by that the gate accepts, both of them.
    assert kept(tensor).difference({"t": tensor * (1 + 0.9 * TOLERANCE)}) is None


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda t: t * 1.05,
    "negated": lambda t: -t,
    "parts in another order": lambda t: t.roll(1, 0),
    "columns in another order": lambda t: t.roll(1, -1),
    "one NaN": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == t.numel() - 1, torch.nan, t),
    "one infinity": lambda t: torch.where(torch.arange(t.numel()).view(t.shape) == 0, torch.inf, t),
    "zeros": torch.zeros_like,
    "another shape": lambda t: t[1:],
}


@pytest.mark.parametrize("size", [(512, 64), (16, 48, 64), (300,)])
@pytest.mark.parametrize("change", list(CHANGES))
def test_changes_are_seen(change: str, size: tuple[int, ...]) -> None:
    tensor = drawn(*size)
    assert kept(tensor).difference({"t": CHANGES[change](tensor)}) is not None
    assert kept(tensor).difference({}) == "t is missing"


def test_one_part_among_thousands_is_seen_where_parts_are_looked_at() -> None:
    tensor = drawn(50_000, 64)
    changed = tensor.clone()
    changed[777] = 0
    assert kept(tensor).difference({"t": changed}) is None
    told = kept(tensor, (1.0, 10.0)).difference({"t": changed})
    assert told is not None and told.endswith(" > 0.2 for one part")


def test_a_tensor_of_zeros_must_stay_so() -> None:
    zeros = torch.zeros(4, 8)
    assert kept(zeros, (1.0, 10.0)).difference({"t": zeros}) is None
    assert kept(zeros).difference({"t": zeros + 1e-30}) is not None


def test_what_a_plugin_makes_its_processs_defaults_changes_no_sketch() -> None:
    tensor = drawn(16, 48, 64)
    right = sketch(tensor)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(sketch(tensor), right)
            with full_precision():
                assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
                assert torch.ones(1).device.type == "cpu"
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_a_refused_layer_is_not_what_others_are_compared_with() -> None:
    """The fingerprint is that of the judged call, not of another one after it."""

    class Once(RightLayer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1.0 if self.calls == 2 else 1.5)

    problem = problem_of("64,64,32,8,2")
    layer = Once(problem)
    found = MoELayer().check(layer, problem)
    assert found.reason is None and found.fingerprint is not None
    told = found.fingerprint.difference(evaluate(layer, problem).by_name())
    assert told is not None and "output 0.5" in told


OWN = [
    (plugin.name, operation, variant)
    for plugin in default_registry().all()
    if "cpu" in plugin.devices
    for operation in plugin.operations
    for variant in variants_of(plugin, operation)
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "operation", "variant"), OWN)
def test_every_plugin_repeats_itself(name: str, operation: str, variant: str, dtype: str) -> None:
    plugin = default_registry().get(name)
    for shape, distribution in (("64,64,32,8,2", "skewed"), ("3,64,32,8,1", "empty_experts")):
        point = point_of(shape, dtype, distribution, operation=operation, variant=variant, name=name)
        found = get_operation(operation)
        if found.unsupported_reason(point) or plugin.unsupported_reason(point):
            continue
        problem = found.make_problem(point, "cpu")
        layer = plugin.build(problem)
        checked = found.check(layer, problem)
        assert checked.reason is None and checked.fingerprint is not None
        called = layer.forward(problem.x) if isinstance(layer, Kernel) else evaluate(layer, problem)
        assert checked.fingerprint.difference(found.repeatable(layer, called)) is None
        assert set(checked.fingerprint.sketches) == set(checked.errors)
