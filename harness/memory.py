"""Activation memory: what a layer holds between forward and backward, and the peak over both.

On a GPU the caching allocator counts. On a CPU, and under fake tensors at any scale, a dispatch mode follows every
storage that the layer's operators allocate.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.interface import Layer, Problem


class _StorageTracker(TorchDispatchMode):
    """Follows every storage that operators make while the mode is on, by weak reference."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._since_sweep = 0
        self._bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        entry = self._live.get(key)
        if entry is not None and not entry[0].expired():
            return
        self._sweep()
        size = storage.nbytes()
        self._live[key] = (StorageWeakRef(storage), size)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)

    def _sweep(self) -> None:
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            self._bytes -= self._live.pop(key)[1]

    def live_bytes(self) -> int:
        gc.collect()
        self._sweep()
        return self._bytes


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(sizes.values())


def tracked_memory(layer: Layer, x: Tensor, grad_output: Tensor) -> dict[str, int]:
    """``static``, ``held``, ``peak``, ``layer`` and ``left`` bytes of one forward and backward, by following storages.

    Works on CPU tensors and, inside a ``FakeTensorMode``, at any scale without computing. ``static`` counts the
    layer's parameters and ``x``; ``peak`` includes the gradients, which the backward returns; ``left`` is what is still
    allocated when output and gradients are gone, and so held by the layer beyond its call.
    """
    x = x.detach().requires_grad_()
    parameters = list(layer.parameters())
    gc.collect()
    tracker = _StorageTracker([x, grad_output, *parameters])
    with tracker:
        output = layer.forward(x)
    held = tracker.live_bytes()
    with tracker:
        gradients = torch.autograd.grad(output, [x, *parameters], grad_output, allow_unused=True)
    del gradients, output
    left = tracker.live_bytes()
    static = storage_bytes([x, *parameters])
    return {"static": static, "held": held, "peak": tracker.peak, "layer": static + held, "left": left}


def let_autograd_go() -> None:
    """Wait until nothing of earlier backwards on this GPU is allocated only because autograd's thread has not come to
    free it: it refers to the gradients that it has handed out until a little after the caller has them, on a busy
    machine for long. It begins another backward only after that."""
    gc.collect()
    # Without elements: neither its gradient nor anything else of it is allocated.
    with torch.enable_grad():
        nothing = torch.zeros(0, device="cuda", requires_grad=True)
        torch.autograd.grad(nothing * 2, nothing, torch.zeros_like(nothing))
    torch.cuda.synchronize()


def cuda_memory(layer: Layer, problem: Problem, static: int) -> dict[str, int]:
    """The same from the caching allocator; the layer must be warm (workspaces allocated).

    Args:
        static: bytes that the built layer and its input occupy, measured by the caller.
    """
    x = problem.x.detach().requires_grad_()
    let_autograd_go()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output = layer.forward(x)
    torch.cuda.synchronize()
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    gradients = torch.autograd.grad(output, [x, *layer.parameters()], problem.grad_output, allow_unused=True)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del gradients, output
    let_autograd_go()
    left = torch.cuda.memory_allocated() - before
    return {"static": static, "held": held, "peak": peak, "layer": static + held, "left": left}


#: The share of what a layer holds that may stay allocated after its backward without being worth a word.
LEFT_SHARE = 0.01


def leak_note(memory: dict[str, int]) -> str:
    """A sentence where a call leaves memory behind that is counted as held, and may grow; empty where it does not."""
    if memory["left"] <= LEFT_SHARE * memory["held"]:
        return ""
    return (
        f"{memory['left']} of the {memory['held']} bytes held stay allocated after the backward: "
        "the layer keeps or leaks them in each call"
    )
