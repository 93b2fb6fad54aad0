"""Notices compilation and tuning, which must not happen while timing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

#: Compilers that offer no hook: module -> environment variable and, if it is unset, where they keep what they built.
_CACHES: dict[str, tuple[str, str]] = {
    "quack": ("QUACK_CACHE_DIR", "~/.cache/moebench/quack"),
    "deep_gemm": ("DG_JIT_CACHE_DIR", "~/.deep_gemm/cache"),
}
#: All variables that name a folder in which a compiler keeps what it built: those, Triton's and torch's.
_FOLDERS = (*(variable for variable, _ in _CACHES.values()), "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def cold_caches(folder: Path) -> dict[str, str]:
    """Environment variables with which a process finds no compiled kernel: each compiler's cache is a folder of its own
    below ``folder``."""
    return {variable: str(folder / variable.lower()) for variable in _FOLDERS}


class CompilationCounter:
    """Counts compilations since it was made: graphs that torch.compile traced, Triton kernels (once `watch_triton` was
    called), and new entries in the cache folders of compilers that offer no hook and that this process has imported:
    what another process compiles there meanwhile is nothing that this one could wait for.

    Args:
        alone: whether no other process uses the same compilers meanwhile; with False the folders, which all share, do
            not count.
    """

    def __init__(self, alone: bool = True) -> None:
        self._folders = [
            Path(os.environ.get(variable) or default).expanduser()
            for module, (variable, default) in _CACHES.items()
            if alone and module in sys.modules
        ]
        self._start = self._total()

    def _total(self) -> int:
        # Folders that come and go while another process compiles must not end a measurement.
        files = 0
        for folder in self._folders:
            try:
                files += sum(1 for _ in os.scandir(folder))
            except OSError:
                continue
        return files + _dynamo_graphs() + _triton_kernels()

    def since_start(self) -> int:
        return max(self._total() - self._start, 0)


def _dynamo_graphs() -> int:
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils else 0


_triton_count = 0


def _triton_kernels() -> int:
    return _triton_count


def watch_triton() -> None:
    """Count every Triton kernel that this process compiles or loads for the first time. Call once, before use."""
    try:
        from triton import knobs
    except ImportError:
        return

    def compiled(*args: Any, **kwargs: Any) -> None:
        global _triton_count
        _triton_count += 1

    knobs.runtime.jit_post_compile_hook = compiled
