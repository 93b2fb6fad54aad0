"""Launches of Triton and Gluon kernels that cost the host microseconds.

`kernel[grid](...)` binds and specialises its arguments in Python, makes a string of its options and asks the driver
about every pointer, each time. A `Launcher` lets Triton do so once for every kind of arguments and keeps the compiled
kernel. From then on it hands addresses and integers straight to that kernel, as `CompiledKernel.__getitem__` does.

The kind of arguments is all that compiled code depends on beside constants and options: the device, dtypes, boxes of
descriptors, which integers are 1 or multiples of 16, and that pointers are multiples of 16 bytes. Whatever else there
may be goes Triton's way: the interpreter, launch hooks (profilers), unaligned pointers, tensors of another device than
the current one, wide or negative integers, arguments of other types. One thing is not looked at again: whether a global
that a kernel reads has changed since it was compiled.

One thing Triton leaves undone: a thread has no CUDA context before its first call that needs one, such as autograd's
where a backward pass is the first that it ever runs; a launch makes good for it, but only once its tensor maps, which
need one too, have been encoded.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor


class _Loaded(NamedTuple):
    """A compiled kernel on its device."""

    run: Callable[..., None]
    function: int
    metadata: tuple[int, ...]


class _Thread(threading.local):
    """Of the thread that asks: whether it has had a CUDA context."""

    bound = False


_thread = _Thread()


@functools.cache
def _libcuda() -> Any:
    """CUDA's driver; None where there is none (another maker's GPU)."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def bind_context(device: int) -> None:
    """Make the device's primary context the calling thread's own where it has none. Waits for nothing, so that it may
    happen while a graph is captured. The reference to the context that this takes is kept: the process needs it anyway.
    """
    cuda, handle, context = _libcuda(), ctypes.c_int(), ctypes.c_void_p()
    if cuda is None or (cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context):
        _thread.bound = True
        return
    steps: tuple[Callable[[], int], ...] = (
        lambda: cuda.cuDeviceGet(ctypes.byref(handle), device),
        lambda: cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle),
        lambda: cuda.cuCtxSetCurrent(context),
    )
    # A failure shows itself in the launch that follows, and the next launch tries again.
    _thread.bound = all(step() == 0 for step in steps)


class Launcher:
    """A kernel with its constants and options; called with the rest, it launches. Callers keep it: making one is slow.

    Args:
        kernel: a function under `triton.jit` or `gluon.jit` whose constexprs are its last parameters.
        constants: the constexprs, by name.
        options: ``num_warps``, ``num_stages``, ``maxnreg``, …

    Raises:
        ValueError: a constexpr stands before another parameter.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], **options: Any) -> None:
        self._kernel = kernel
        self._arguments = {**constants, **options}
        self._loaded: dict[tuple[Any, ...], _Loaded] = {}
        #: Stands for the constants, which a compiled kernel's own launcher takes and does not read.
        self._blank: tuple[None, ...] = ()
        self._interpreted = not isinstance(kernel, JITFunction)
        if not self._interpreted:
            constant = [parameter.is_constexpr for parameter in kernel.params]
            if constant != sorted(constant):
                raise ValueError(f"{kernel.__name__}: constexprs must be its last parameters")
            self._blank = (None,) * sum(constant)

    def __call__(self, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        """``kernel[grid](*args, **constants, **options)`` on the device of the first tensor and its current stream.

        Args:
            grid: one to three integers.
            args: all that are no constexprs, in order: tensors (one at least, or a descriptor), integers, host tensor
                descriptors of either kind, None.
        """
        if self._interpreted:
            self._launch_ordinarily(grid, args)
            return
        active, runtime = driver.active, knobs.runtime
        device = active.get_current_device()
        if not _thread.bound:
            bind_context(device)
        ordinary = _watched(runtime.launch_enter_hook) or _watched(runtime.launch_exit_hook)
        kinds: list[Any] = [device, runtime.debug, knobs.compilation.instrumentation_mode]
        values: list[Any] = []
        addresses = 0
        for arg in args:
            kind = type(arg)
            if kind is Tensor or kind is Parameter:
                address = arg.data_ptr()
                addresses |= address
                ordinary |= arg.get_device() != device
                kinds.append(arg.dtype)
                values.append(address)
            elif kind is int:
                ordinary |= not 0 <= arg < 2**31
                kinds.append(1 if arg == 1 else 16 if arg % 16 == 0 else 0)
                values.append(arg)
            elif kind is TensorDescriptor or kind is GluonDescriptor:
                base = arg.base
                ordinary |= base.get_device() != device
                # Its base is aligned, or the descriptor would not exist; shape and strides are arguments.
                kinds.append((base.dtype, tuple(arg.block_shape), arg.layout if kind is GluonDescriptor else None))
                values.append(arg)
            else:
                ordinary |= arg is not None
                kinds.append(None)
                values.append(None)
        if ordinary or addresses % 16 or self._kernel.pre_run_hooks:
            self._launch_ordinarily(grid, args)
            return
        key = tuple(kinds)
        found = self._loaded.get(key)
        if found is None:
            compiled = self._launch_ordinarily(grid, args)
            # Otherwise it is being compiled in the background, or the backend looks at more than a tensor's alignment.
            if isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda":
                self._loaded[key] = _Loaded(compiled.run, compiled.function, compiled.packed_metadata)
            return
        run, function, metadata = found
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None, *values, *self._blank)

    def _launch_ordinarily(self, grid: tuple[int, ...], args: Sequence[Any]) -> Any:
        """Triton's own launch; returns what it does: the compiled kernel."""
        operands = (getattr(arg, "base", arg) for arg in args)
        with torch.cuda.device_of(next(operand for operand in operands if isinstance(operand, Tensor))):
            return self._kernel[grid](*args, **self._arguments)


_launchers: dict[tuple[Any, ...], Launcher] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """A `Launcher` made, or found again, and called: one or two microseconds more, for callers who keep none. The
    constants' values must be hashable."""
    key = id(kernel), *constants, *constants.values(), *options, *options.values()
    launcher = _launchers.get(key)
    if launcher is None:
        launcher = _launchers[key] = Launcher(kernel, constants, **options)
    launcher(grid, args)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. On the host `triton.cdiv` takes as long as half a launch; so does `triton.next_power_of_2`."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def _watched(hook: Any) -> bool:
    """Whether a launch hook has anybody behind it: Triton's own is a chain, which may be empty."""
    return hook is not None and bool(getattr(hook, "calls", True))
