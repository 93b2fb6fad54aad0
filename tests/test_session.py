"""Running sweeps: figures after the rows, what needs a GPU, the plan; with routings that are only counted, which is
fast."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import FAKE_PLUGINS
from rich.console import Console

import plots
from harness import accounts, runner, session
from harness.errors import UserError
from harness.interface import Point, RoutingSpec
from harness.process import WorkerProcess
from harness.record import validate
from harness.registry import load_registry
from harness.shapes import MoEShape
from harness.sweep import load_sweep
from harness.token_rounding import METHODS

pytestmark = pytest.mark.usefixtures("forked_workers")

COUNTED = """
[sweep]
description = "Counted"
{figure}

[[routing]]
methods = {methods}
shapes = ["{shape}"]
m_tile = 16
{more}
"""
GPU_PART = """
[[points]]
operation = "routed_experts"
implementations = ["sonicmoe_triton"]
shapes = ["64,64,32,8,2"]

[[ratios]]
operation = "routed_experts"
numerator = "sonicmoe_triton"
denominator = "sonicmoe_triton"
denominator_method = "nearest"

[[ratios]]
operation = "routed_experts"
numerator = "sonicmoe_triton"
denominator = "sonicmoe_triton"
"""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch, one_worker: WorkerProcess) -> None:
    monkeypatch.setenv("MOEBENCH_PLUGINS", str(FAKE_PLUGINS))
    monkeypatch.setattr(runner, "WorkerProcess", lambda: one_worker)
    for module in (runner, session):
        monkeypatch.setattr(module, "gpu_name", lambda: None)


def sweep(
    folder: Path, name: str = "mine", *, figure: str = "token_rounding", shape: str = "64,64,32,8,2", more: str = "",
    methods: tuple[str, ...] = ("top_k", "nearest"),
) -> str:  # fmt: skip
    path = folder / f"{name}.toml"
    line = f'figure = "{figure}"' if figure else ""
    path.write_text(COUNTED.format(figure=line, shape=shape, more=more, methods=json.dumps(methods)))
    return str(path)


def run(*names: str, output: Path, only: tuple[str, ...] = (), skip: tuple[str, ...] = (), **options: Any) -> str:
    """What the run prints; fails where rows did."""
    out = Console(file=io.StringIO(), width=200)
    assert session.run_sweeps(out, names, only, skip, options.pop("shapes", ()), output=output, **options) == 0
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# No tokens.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("distribution", ["uniform", "skewed", "one_group", "empty_experts"])
def test_without_tokens_nothing_is_routed(method: str, distribution: str) -> None:
    shape = MoEShape.parse("0,64,32,8,2")
    point = Point(accounts.OPERATION, accounts.NAME, shape, routing=RoutingSpec(method, distribution), device="cpu")
    found = accounts.account(point)
    assert found["routing"] == {
        "routed_rows": 0, "padded_rows": 0, "dropped": 0, "added": 0, "empty_experts": 8
    }  # fmt: skip
    assert found["costs"] == {"flops": 0, "hardware_flops": 0}
    assert [tuple(block.shape) for block in accounts._drawn(shape, point.routing)] == [(0, 8)]


def test_a_sweep_without_tokens_is_stored_and_leaves_the_figure_empty(tmp_path: Path) -> None:
    text = run(sweep(tmp_path, shape="0,64,32,8,2", methods=METHODS), output=tmp_path / "rows")
    stored = rows(tmp_path / "rows" / "mine.jsonl")
    assert [row["status"] for row in stored] == ["ok"] * len(METHODS)
    assert all(validate(row) == [] for row in stored)
    assert "not drawn" not in text and "token_rounding.png" in text


# Figures.


def test_figures_are_drawn_once_after_all_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    run_sweep, draw = session.run_sweep, plots.draw

    def measured(*args: Any) -> int:
        events.append(args[1].name)
        return run_sweep(*args)

    def drawn(results: Path, target: Path, names: list[str]) -> Any:
        assert (results, target) == (tmp_path / "rows", tmp_path / "rows" / "figures")
        events.extend(names)
        return draw(results, target, names)

    monkeypatch.setattr(session, "run_sweep", measured)
    monkeypatch.setattr(plots, "draw", drawn)
    names = [sweep(tmp_path, "first"), sweep(tmp_path, "second"), sweep(tmp_path, "third", figure="")]
    text = run(*names, output=tmp_path / "rows")
    assert events == ["first", "second", "third", "token_rounding"]
    assert text.count("token_rounding.png") == 1
    assert {path.suffix for path in (tmp_path / "rows" / "figures").rglob("*.*")} == {".svg", ".png"}

    events.clear()
    run(names[0], output=tmp_path / "rows", figures=False)
    run(names[0], output=tmp_path / "rows", dry_run=True)
    assert events == ["first", "first"]


def test_a_file_where_the_figures_go_is_refused_before_measuring(tmp_path: Path) -> None:
    output = tmp_path / "rows"
    output.mkdir()
    (output / "figures").write_text("mine")
    names = [sweep(tmp_path, "plain", figure=""), sweep(tmp_path)]
    with pytest.raises(UserError) as caught:
        run(*names, output=output)
    message = str(caught.value)
    assert message.startswith(f"{output / 'figures'}: is not a folder") and "move it" in message
    assert "\n" not in message and "--output OUT/figures" not in message
    assert [path.name for path in output.iterdir()] == ["figures"]
    assert (output / "figures").read_text() == "mine"
    # What draws nothing does not mind.
    run(names[0], output=output)
    run(names[1], output=output, figures=False)
    run(names[1], output=output, dry_run=True)


def test_a_figure_that_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(rows: Any, folder: Path) -> list[Path]:
        raise ValueError("no such\ncolour [red]")

    monkeypatch.setitem(plots.FIGURES, "headline", breaks)
    names = [sweep(tmp_path, "first", figure="headline"), sweep(tmp_path, "second")]
    text = run(*names, output=tmp_path / "rows")
    assert "not drawn headline: ValueError: no such colour [red]\n" in text
    assert "token_rounding.png" in text
    assert len(rows(tmp_path / "rows" / "second.jsonl")) == 2


def test_a_figure_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    place = tmp_path / "rows" / "figures" / plots.NO_GPU / "token_rounding.png"
    place.mkdir(parents=True)
    text = run(sweep(tmp_path), output=tmp_path / "rows")
    (line,) = (line for line in text.splitlines() if line.startswith("not drawn"))
    assert line.startswith(f"not drawn token_rounding: {place}: cannot be written: ") and "--output" not in line
    assert len(rows(tmp_path / "rows" / "mine.jsonl")) == 2


def test_a_run_complains_about_its_folders_own_rows_only(tmp_path: Path) -> None:
    other = tmp_path / "rows" / "other"
    other.mkdir(parents=True)
    (other / "foreign.jsonl").write_text("not a row\n")
    (tmp_path / "rows" / "mine.jsonl").write_text("cut\n")
    text = run(sweep(tmp_path), output=tmp_path / "rows")
    assert "foreign.jsonl" not in text
    assert text.count(f"ignored {tmp_path / 'rows' / 'mine.jsonl'}:1: ") == 1


def test_reproduce_draws_every_figure_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(session, "RESULTS", tmp_path)
    monkeypatch.setattr(session, "CPU_SWEEPS", (sweep(tmp_path),))

    def draw(results: Path, target: Path, names: Any) -> Any:
        calls.append((results, target, names))
        return [], []

    monkeypatch.setattr(plots, "draw", draw)
    session.reproduce(Console(file=io.StringIO()))
    session.reproduce(Console(file=io.StringIO()))
    assert calls == [(tmp_path, tmp_path / "figures", None)] * 2
    assert len(rows(tmp_path / "local" / "cpu" / "mine.jsonl")) == 2


# What needs a GPU.


def test_what_filters_leave_may_need_a_gpu_where_the_sweep_does_not(tmp_path: Path) -> None:
    first, mixed = sweep(tmp_path, "first"), sweep(tmp_path, more=GPU_PART)
    for filters in ({"only": ("sonicmoe_triton",)}, {"skip": ("routing",)}):
        with pytest.raises(UserError) as caught:
            run(mixed, output=tmp_path / "rows", **filters)
        assert str(caught.value).startswith("what the filters leave of sweep mine needs an NVIDIA GPU")
    # Without filters its rows are counted; no sweep starts where a later one cannot.
    assert "11 rows in" in run(mixed, output=tmp_path / "rows")
    whole = tmp_path / "whole.toml"
    whole.write_text(f'[sweep]\ndescription = "On GPUs"\n{GPU_PART}')
    for filters in ({}, {"only": ("sonicmoe_triton",)}):
        with pytest.raises(UserError) as caught:
            run(str(whole), output=tmp_path / "none", **filters)
        assert str(caught.value).startswith("sweep whole needs an NVIDIA GPU")
    with pytest.raises(UserError, match="sweep whole needs an NVIDIA GPU"):
        run(first, str(whole), output=tmp_path / "none")
    assert not (tmp_path / "none").exists()
    run(str(whole), output=tmp_path / "none", dry_run=True)


# The plan.


def test_the_plan_tells_two_methods_from_one_against_itself(tmp_path: Path) -> None:
    lines = run(sweep(tmp_path, more=GPU_PART), output=tmp_path / "rows", dry_run=True).splitlines()
    ratios = [line for line in lines if " ratio " in line]
    assert len(ratios) == 2
    assert sum("sonicmoe_triton (top_k / nearest) " in line for line in ratios) == 1
    assert sum("sonicmoe_triton / sonicmoe_triton " in line for line in ratios) == 1


def test_the_plan_names_bounds() -> None:
    names = {session._planned(work) for work in session.works_of(load_sweep("paper_layers", load_registry()))}
    assert any(name.endswith(" / cublas_bound (bound gemm_glue)") for name in names)
    assert "cublas_bound (gemm_glue)" in names and "torch_grouped_mm" in names


def test_list_shows_the_counted_routings(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import cli

    out = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(cli, "out", out)
    cli.list_()
    assert isinstance(out.file, io.StringIO)
    lines = [line.strip() for line in out.file.getvalue().splitlines()]
    (head,) = (line for line in lines if "ratios" in line and "fake" in line)
    assert head.split() == ["name", "points", "ratios", "fake", "counted", "what"]
    (line,) = (line for line in lines if line.startswith("token_rounding "))
    assert line.split()[4] == "144"
    (line,) = (line for line in lines if line.startswith("smoke "))
    assert line.split()[4] == "0"
