"""The tool that compares tiles of 64 rows with tiles of 128, as far as a machine without a GPU can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

pytest.importorskip("triton")

from implementations.sonicmoe_triton import gluon_contiguous, gluon_gathered, row_tiles, tiles
from implementations.sonicmoe_triton.tiles import Tile


def test_refuses_a_machine_without_a_gpu_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = typer.Typer(add_completion=False)
    app.command()(row_tiles.main)
    for arguments, reason in (
        ((), "comparing tiles needs a Hopper GPU (compute capability 9.0)"),
        (("--shape", "8,64,64"), "shape '8,64,64': expected five whole numbers"),
    ):
        rows = tmp_path / "rows.json"
        result = CliRunner().invoke(app, [*arguments, "--rows", str(rows)])
        assert result.exit_code == 2 and not rows.exists()
        assert reason in result.output and result.output.count("\n") == 1, result.output


def test_every_candidate_has_the_height_it_stands_for_and_can_be_planned() -> None:
    d, n = 4096, 1024
    for kernel, heights in row_tiles.CANDIDATES.items():
        assert set(heights) == set(row_tiles.HEIGHTS)
        for height, candidates in heights.items():
            for candidate in candidates:
                if isinstance(candidate, Tile):
                    tiles.check_block_m(candidate, height)
                elif kernel in (tiles.DOWN_PROJECTION, tiles.INPUT_GRADIENT):
                    options = gluon_contiguous.Options(**candidate)
                    gluon_contiguous.make_plan(d, n, kernel == tiles.DOWN_PROJECTION, "", height, 132, options)
                else:
                    assert height == 128
                    gluon_gathered.make_options(**candidate)


def test_the_fastest_of_each_height_counts() -> None:
    measured = [
        {"kernel": "up", "rows": 64, "ms": 2.0},
        {"kernel": "up", "rows": 64, "ms": 1.5},
        {"kernel": "up", "rows": 64, "problem": "too large"},
        {"kernel": "up", "rows": 128, "ms": 1.0},
        {"kernel": "down", "rows": 128, "ms": 3.0},
    ]
    assert row_tiles.best(measured) == {"up": {64: 1.5, 128: 1.0}, "down": {128: 3.0}}
