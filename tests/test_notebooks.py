"""The notebooks run from a clean state without an error, leave nothing behind, and are committed without outputs.

Their cells are executed here in one namespace, as a kernel would, without starting one. Every statement of theirs is an
assertion in a cell, so running them is the test.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import pytest
import torch

from harness.registry import PLUGINS_VARIABLE, ROOT

FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: What they must not write into.
KEPT = ("implementations", "notebooks", "plots", "results/figures", "results/nvidia_h200", "sweeps")


def cells(path: Path, kind: str = "") -> list[Any]:
    found: list[Any] = nbformat.read(path, as_version=4).cells
    return [cell for cell in found if kind in ("", cell.cell_type)]


def run(source: str, namespace: dict[str, Any], name: str) -> None:
    """Execute a cell; its last expression is shown in plain text and, where it can, in HTML, as a kernel does."""
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, name, "exec"), namespace)
    else:
        exec(compile(ast.Module(tree.body[:-1], []), name, "exec"), namespace)
        shown = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        print(repr(shown) if shown is not None else "")
        getattr(shown, "_repr_html_", lambda: "")()


def files(folders: tuple[str, ...] = KEPT) -> dict[Path, int]:
    """Every file that lies there, with its size."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    return {path: path.stat().st_size for path in found if path.is_file()}


@pytest.fixture
def clean_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Whatever a notebook sets is taken back."""
    import matplotlib.pyplot as plt

    matplotlib.use("Agg")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT])
    for variable in (PLUGINS_VARIABLE, "PYTHONPATH"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    # Threads of several processes on few cores wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with torch.random.fork_rng(), torch.enable_grad():
        yield monkeypatch
    plt.close("all")


def test_there_are_notebooks() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {"explore", "add_a_baseline", "memory_efficient_backward"}


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_leaves_nothing(path: Path, clean_state: pytest.MonkeyPatch) -> None:
    clean_state.chdir(FOLDER)
    before = files()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(path, "code")):
        run(cell.source, namespace, f"{path.name}, code cell {number}")
    assert files() == before


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("place", [ROOT, FOLDER], ids=["root", "notebooks"])
def test_its_first_cell_finds_the_repository(path: Path, place: Path, clean_state: pytest.MonkeyPatch) -> None:
    clean_state.chdir(place)
    namespace: dict[str, Any] = {}
    run(cells(path, "code")[0].source, namespace, path.name)
    assert namespace["ROOT"].resolve() == ROOT and Path(sys.path[0]).resolve() == ROOT


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_small_and_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4 and path.stat().st_size < 50_000
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in cells(path, "code"):
        assert cell.outputs == [] and cell.execution_count is None and cell.source.strip()
    assert cells(path)[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_place_of_a_machine(path: Path) -> None:
    for cell in cells(path):
        assert not re.search(r"(?:^|[\s\"'(`=])(?:/[A-Za-z_]|~/|[A-Z]:\\\w)", cell.source, re.MULTILINE), cell.source
        # Shell commands and magics are not Python, and would not run here.
        assert cell.cell_type == "markdown" or not re.search(r"^\s*[!%]", cell.source, re.MULTILINE)


def test_a_false_statement_stops_a_notebook(clean_state: pytest.MonkeyPatch) -> None:
    # The sign of one step turned round: the next cells must notice.
    clean_state.chdir(FOLDER)
    namespace: dict[str, Any] = {}
    with pytest.raises(AssertionError):
        for cell in cells(FOLDER / "memory_efficient_backward.ipynb", "code"):
            spoiled = cell.source.replace("dA * U * sigmoid * (1 + G", "dA * U * sigmoid * (1 - G")
            run(spoiled, namespace, "spoiled")
    assert "dH" in namespace and "dW2" not in namespace
