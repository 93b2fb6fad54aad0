"""Tests that need a GPU: `python -m pytest tests/gpu`. Elsewhere each file is one skip, and none is even imported."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from harness.reference import full_precision

if not torch.cuda.is_available():
    SKIP = "no CUDA device"
elif os.environ.get("TRITON_INTERPRET") == "1":
    SKIP = "TRITON_INTERPRET=1 would run the kernels on the CPU"
else:
    SKIP = ""


class _Skipped(pytest.Module):
    """A test file that stays unread: its imports take longer than everything else here."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        raise pytest.skip.Exception(SKIP, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if SKIP else None


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    """One test's cached blocks must not be what another's runs out of memory for."""
    yield
    gc.collect()
    free, total = torch.cuda.mem_get_info()
    if free < total // 2:
        torch.cuda.empty_cache()


@pytest.fixture
def exact_float32() -> Iterator[None]:
    with full_precision(), torch.enable_grad():
        yield
