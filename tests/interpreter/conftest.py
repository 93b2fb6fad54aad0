"""Kernels run by Triton's interpreter on the CPU: `TRITON_INTERPRET=1 python -m pytest tests/interpreter`.

bfloat16 is wrong in the interpreter: float16 and float32 only. A step of a kernel's loop takes milliseconds, so sizes
are tiny.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from .quicker import quicker_interpreter


def pytest_configure(config: pytest.Config) -> None:
    # -inf - -inf in lanes that a mask drops afterwards: a GPU says nothing, numpy warns.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning:triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="Triton 3.6's interpreter needs numpy < 2.4"))


@pytest.fixture(autouse=True, scope="session")
def _quicker() -> Iterator[None]:
    with quicker_interpreter():
        yield


@pytest.fixture(autouse=True)
def _dirty_memory() -> Iterator[None]:
    """`torch.empty` and its kin are full of NaN (of the largest integer, where integers): whoever reads what nobody
    wrote is found out."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
