"""The launcher of kernels with a driver that only notes what it is told: what is launched, and when Triton is asked."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from implementations.sonicmoe_triton import launching
from implementations.sonicmoe_triton.launching import Launcher, cdiv, launch, next_power_of_2

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")


class NotingDriver:
    """Compiles for Hopper, and notes (grid, stream, constants of the compiled kernel, hooks, arguments)."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.bound: list[int] = []
        self.stream = 5
        self.utils = self
        self.launcher_cls = self._launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # what `Tensor.get_device` says on a CPU

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def load_binary(self, *_: object) -> tuple[int, ...]:
        return 7, 8, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def _launcher(self, source: Any, metadata: Any) -> Any:
        compiled = source.fn.__name__, metadata.num_warps, tuple(source.signature.items()), str(source.attrs)

        def run(x: int, y: int, z: int, stream: int, function: int, packed: Any, *rest: Any) -> None:
            _launch_metadata, enter, leave, *args = rest
            assert function == 8 and packed[0] == metadata.num_warps
            names = source.fn.arg_names
            assert len(args) == len(names)
            # What the compiled kernel does not take may be anything.
            taken = [a for a, name in zip(args, names, strict=True) if source.signature[name] != "constexpr"]
            plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in taken]
            self.launches.append(((x, y, z), stream, compiled, *plain))
            for hook in (enter, leave):
                if hook is not None:
                    hook(_launch_metadata)

        return run


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotingDriver]:
    noting = NotingDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", noting)
    monkeypatch.setattr(launching, "_launchers", {})
    monkeypatch.setattr(launching, "bind_context", noting.bound.append)
    yield noting
    for kernel in (scale_kernel, boxes_kernel, gluon_boxes_kernel):
        kernel.device_caches.clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched Triton's way."""
    names: list[str] = []
    run = JITFunction.run

    def noted(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        names.append(self.__name__)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", noted)
    return names


@triton.jit
def scale_kernel(x, y, n, other, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    tl.store(y + at, value * 2 if TWICE else value, mask=at < n)


@triton.jit
def boxes_kernel(boxes, y, BLOCK: tl.constexpr):
    value = boxes.load([0, 0])
    tl.store(y + tl.arange(0, BLOCK), tl.sum(value, 1))


@gluon.jit
def gluon_boxes_kernel(boxes, y, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    at = gl.arange(0, BLOCK, layout)
    gl.store(y + at, at + boxes.block_type.shape[0])


def scaling(**options: int) -> Launcher:
    return Launcher(scale_kernel, {"BLOCK": 32, "TWICE": True}, num_warps=1, **options)


def test_triton_is_asked_once_and_both_ways_launch_alike(noting: NotingDriver, asked: list[str]) -> None:
    x, y = torch.randn(100), torch.randn(100)
    launcher = scaling()
    for n in (100, 100, 99):
        launcher((4,), (x, y, n, None))
    assert asked == ["scale_kernel"]
    first, second, third = noting.launches
    assert first == second
    assert first[0] == (4, 1, 1) and first[1] == 5
    assert first[3:] == (x.data_ptr(), y.data_ptr(), 100)
    assert third[2] == first[2] and third[5] == 99
    noting.stream = 6
    launcher((4, 2), (torch.nn.Parameter(y), x, 98, None))
    launcher((1, 2, 3), (y, x, 98, None))
    assert [line[:2] for line in noting.launches[3:]] == [((4, 2, 1), 6), ((1, 2, 3), 6)]
    assert noting.launches[3][3:5] == (y.data_ptr(), x.data_ptr())


@pytest.mark.parametrize("n", [0, 1, 2, 15, 16, 17, 2**31 - 1, 2**31, -1, -16])
def test_what_is_specialised_is_told_apart(noting: NotingDriver, n: int) -> None:
    """After launches of every other kind, a launch runs the code that Triton would have run."""
    x, y = torch.randn(100), torch.randn(100)
    launcher = scaling()
    kinds: list[tuple[Any, ...]] = [
        (x, y, 7, None), (x, y, 1, None), (x, y, 32, None), (x, y, 7, 1), (x, y, 7, x), (x[1:], y, 7, None),
        (x, y.int(), 7, None), (x.half(), y, 7, None), (x, y, 2**40, None),
    ]  # fmt: skip
    for kind in kinds:
        launcher((1,), kind)
    for kind in [*kinds, (x, y, n, None), (y, x[2:], n, None)]:
        noting.launches.clear()
        launcher((1,), kind)
        launcher((1,), kind)
        scale_kernel[(1,)](*kind, BLOCK=32, TWICE=True, num_warps=1)
        assert noting.launches[0] == noting.launches[1] == noting.launches[2]


def test_constants_and_options_are_told_apart(noting: NotingDriver, asked: list[str]) -> None:
    x = torch.randn(100)
    for _ in range(2):
        for block, twice, warps in [(32, True, 1), (64, True, 1), (32, False, 1), (32, True, 2)]:
            launch(scale_kernel, (1,), (x, x, 7, None), {"BLOCK": block, "TWICE": twice}, {"num_warps": warps})
    assert len(asked) == 4
    assert noting.launches[:4] == noting.launches[4:]


def test_descriptors_of_both_kinds(noting: NotingDriver, asked: list[str]) -> None:
    y = torch.empty(64, dtype=torch.int32)
    wide, tall = torch.randn(64, 32).half(), torch.randn(128, 32).half()
    layouts = [gl.NVMMASharedLayout(swizzle, 16) for swizzle in (32, 64)]
    for kernel in (boxes_kernel, gluon_boxes_kernel):
        asked.clear()
        noting.launches.clear()
        launcher = Launcher(kernel, {"BLOCK": 32}, num_warps=1)

        def boxes(tensor: torch.Tensor, kind: int, gluonic: bool = kernel is gluon_boxes_kernel) -> Any:
            if gluonic:
                return GluonDescriptor.from_tensor(tensor, [32, 32], layouts[kind])
            return TensorDescriptor.from_tensor(tensor, [32, 16 * (kind + 1)])

        for tensor, kind in [(wide, 0), (wide, 1), (tall, 0), (tall, 1), (wide, 0)]:
            launcher((1,), (boxes(tensor, kind), y))
        assert len(asked) == 2
        assert noting.launches[0][2] != noting.launches[1][2]
        for i, tensor, same in [(2, tall, 0), (3, tall, 1), (4, wide, 0)]:
            assert noting.launches[i][2] == noting.launches[same][2]
            assert noting.launches[i][3].base is tensor


def test_hooks_see_every_launch(noting: NotingDriver, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100)
    launcher = scaling()
    launcher((1,), (x, x, 7, None))
    seen: list[str] = []

    def note(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(note)
    try:
        launcher((1,), (x, x, 7, None))
    finally:
        knobs.runtime.launch_enter_hook.remove(note)
    launcher((1,), (x, x, 7, None))
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", note)
    launcher((1,), (x, x, 7, None))
    assert seen == ["scale_kernel"] * 2 and len(asked) == 3 and len(noting.launches) == 4


def test_another_device_goes_tritons_way(
    noting: NotingDriver, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(100)
    launcher = scaling()
    monkeypatch.setattr(noting, "get_current_device", lambda: 1)
    for _ in range(2):
        launcher((1,), (x, x, 7, None))
    assert len(asked) == 2


def test_constants_come_last() -> None:
    @triton.jit
    def mixed_kernel(BLOCK: tl.constexpr, x):
        tl.store(x + tl.arange(0, BLOCK), 0.0)

    with pytest.raises(ValueError, match="mixed_kernel: constexprs must be its last parameters"):
        Launcher(mixed_kernel, {"BLOCK": 32})


def test_host_arithmetic() -> None:
    assert [cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert all(next_power_of_2(n) == triton.next_power_of_2(n) for n in range(1, 300))


class FakeCuda:
    """libcuda of a thread with, or without, a context; notes what it is asked for. ``failing``: what it cannot do."""

    def __init__(self, current: int, failing: str = "") -> None:
        self.current, self.failing, self.asked = current, failing, list[str]()

    def _answer(self, asked: str) -> int:
        self.asked.append(asked)
        return int(asked.startswith(self.failing)) if self.failing else 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.current
        return 0

    def cuDeviceGet(self, handle: Any, device: int) -> int:
        handle._obj.value = 10 + device
        return self._answer(f"device {device}")

    def cuDevicePrimaryCtxRetain(self, context: Any, handle: Any) -> int:
        context._obj.value = 77
        return self._answer(f"retain {handle.value}")

    def cuCtxSetCurrent(self, context: Any) -> int:
        return self._answer(f"set {context.value}")


@pytest.mark.parametrize(
    ("current", "failing", "asked", "bound"),
    [
        (0, "", ["device 3", "retain 13", "set 77"], True),
        (0, "retain", ["device 3", "retain 13"], False),
        (5, "", [], True),
    ],
)
def test_a_thread_gets_a_context_once_and_only_if_it_has_none(
    current: int, failing: str, asked: list[str], bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(current, failing)
    monkeypatch.setattr(launching, "_libcuda", lambda: cuda)
    monkeypatch.setattr(launching, "_thread", launching._Thread())
    launching.bind_context(3)
    assert cuda.asked == asked and launching._thread.bound == bound
    other: list[bool] = []
    thread = threading.Thread(target=lambda: other.append(launching._thread.bound))
    thread.start()
    thread.join()
    assert other == [False]


def test_where_there_is_no_cuda_there_is_nothing_to_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_libcuda", lambda: None)
    monkeypatch.setattr(launching, "_thread", launching._Thread())
    launching.bind_context(0)
    assert launching._thread.bound


def test_a_launch_sees_to_the_context_of_a_thread_that_has_had_none(
    noting: NotingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_thread", launching._Thread())
    x = torch.ones(16)
    launcher = Launcher(scale_kernel, {"BLOCK": 16, "TWICE": False})
    launcher((1,), (x, x, 16, None))
    assert noting.bound == [-1] and len(noting.launches) == 1
    launching._thread.bound = True
    launcher((1,), (x, x, 16, None))
    assert noting.bound == [-1] and len(noting.launches) == 2
