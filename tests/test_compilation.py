"""Compilations are counted where they could disturb what is being timed, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from harness.compilation import CompilationCounter


@pytest.mark.parametrize(
    ("module", "variable"),
    [("quack", "QUACK_CACHE_DIR"), ("deep_gemm", "DG_JIT_CACHE_DIR")],
    ids=["quack", "deep_gemm"],
)
def test_entries_in_a_compilers_folder_count_where_it_is_in_use(
    module: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delitem(sys.modules, module, raising=False)
    elsewhere = CompilationCounter()
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    here = CompilationCounter()
    (tmp_path / "kernel.o").touch()
    # A neighbour that compiles does not make this process's times unsteady.
    assert (elsewhere.since_start(), here.since_start()) == (0, 1)
