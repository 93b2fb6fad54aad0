"""The command line: bad input gets one line, good input does what it says; and the README's steps work."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import FAKE_PLUGINS, ROOT, MoeBench

from harness import cli

Run = Callable[..., tuple[int, str, str]]

SWEEP = """
[sweep]
description = "A test's"

[[points]]
implementations = ["torch_loop"]
shapes = ["{shape}"]
device = "cpu"
{more}
"""


def sweep(folder: Path, shape: str = "8,16,8,4,2", more: str = "") -> Path:
    path = folder / "mine.toml"
    path.write_text(SWEEP.format(shape=shape, more=more))
    return path


def assert_refused(answer: tuple[int, str, str], *parts: str) -> None:
    """Exit code 2 and one line on standard error that holds every part."""
    code, _, err = answer
    assert code == 2, answer
    assert err.startswith("moebench: ") and err.count("\n") == 1, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err, (part, err)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("check", "torch_lop"), ("unknown implementation 'torch_lop'", "did you mean torch_loop?")),
        (("check", "torch_loop", "--shape", "1,2,3"), ("expected five whole numbers",)),
        (("check", "torch_loop", "--shape", "64,64,32,4,8"), ("K=8 experts per token exceed E=4",)),
        (("check", "torch_loop", "--dtype", "float3"), ("--dtype float3", "float32")),
        (("check", "torch_loop", "--device", "tpu"), ("--device tpu", "cpu")),
        (("check", "torch_loop", "--distribution", "zebra"), ("--distribution zebra", "uniform")),
        (("check", "fake_heavy_import"), ("fake_heavy_import is broken: imports numpy at module level",)),
        (("run", "nothing_like_it"), ("nothing_like_it",)),
        (("run", "smoke", "--only", "torch_lop"), ("--only torch_lop", "did you mean torch_loop?")),
        (("run", "smoke", "--skip", "zebra"), ("--skip zebra",)),
        (("run", "smoke", "--only", "torch_loop", "--skip", "torch_loop"), ("leave nothing to measure",)),
        (("run", "smoke", "--shape", "1,2"), ("expected five whole numbers",)),
        (("run", "smoke", "--shape", "64,64,32,4,8"), ("K=8 experts per token exceed E=4",)),
        (("run", "smoke", "--shape", "7,64,32,8,2"), ("--shape 7,64,32,8,2: not in sweep smoke",)),
        (("run", "smoke", "--mode", "warm"), ("--mode warm", "burst, sustained, paced")),
        (("run", "smoke", "sparsty"), ("sparsty", "did you mean sparsity?")),
        (("plot", "--results", "/no/such/folder"), ("--results /no/such/folder: no such folder",)),
        (("plot", "--figure", "zebra"), ("unknown figure 'zebra'",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_gets_one_line(command_line: Run, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_refused(command_line(*arguments), *parts)


def test_a_bad_sweep_gets_one_line(command_line: Run, tmp_path: Path) -> None:
    assert_refused(command_line("run", sweep(tmp_path, more="colour = 1")), "colour", "mine.toml")
    assert_refused(command_line("run", sweep(tmp_path, "64,64,32,4,8")), "K=8 experts per token exceed E=4")
    assert_refused(command_line("run", sweep(tmp_path, "64,64")), "points", "64,64")
    path = sweep(tmp_path)
    path.write_text(path.read_text().replace("torch_loop", "torch_lop"))
    assert_refused(command_line("run", path), "torch_lop", "torch_loop")
    path.write_text("[[points\n")
    assert_refused(command_line("run", path), "mine.toml")
    assert_refused(command_line("run", tmp_path / "none.toml"), "none.toml")


def test_an_output_that_is_a_file_or_cannot_be_made(command_line: Run, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text("mine")
    assert_refused(command_line("run", "smoke", "--output", file), "is a file")
    assert_refused(command_line("run", sweep(tmp_path), "--output", file / "below"), str(file))
    assert file.read_text() == "mine"


def test_figures_into_a_file(command_line: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "rows").mkdir()
    assert_refused(command_line("plot", "--results", tmp_path / "rows", "--output", file), str(file), "is a file")
    below = command_line("plot", "--results", tmp_path / "rows", "--output", file / "below")
    assert_refused(below, "cannot be written")


def test_unknown_commands_and_options_exit_with_2(command_line: Run) -> None:
    for arguments in (("zebra",), ("run",), ("run", "smoke", "--zebra")):
        code, out, err = command_line(*arguments)
        assert code == 2 and "Traceback" not in out + err


def test_a_sweep_for_gpus_without_one(command_line: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from harness import runner, session

    for module in (runner, session):
        monkeypatch.setattr(module, "gpu_name", lambda: None)
    answer = command_line("run", "paper_layers", "--only", "cublas_bound", "--output", tmp_path)
    assert_refused(answer, "needs an NVIDIA GPU", "cpu or smoke")


def test_list(command_line: Run) -> None:
    code, out, _ = command_line("list")
    assert code == 0
    for part in (
        "torch_loop",
        "sonicmoe_torch",
        "fake_ok",
        "Operations: moe_layer, routed_experts, dense_bound",
        "smoke",
        "broken:",
    ):
        assert part in out
    assert re.search(r"fake_missing_package .* no ", out)


def test_names_are_whole_on_a_narrow_terminal(command_line: Run, tmp_path: Path) -> None:
    _, listed, _ = command_line("list", width=80)
    _, planned, _ = command_line("run", "smoke", "--dry-run", "--output", tmp_path, width=80)
    for part in ("sonicmoe_official", "SonicMoE algorithm (PyTorch)", "routed_experts", "down_aggregation"):
        assert part in listed, listed
    for part in ("implementation", "torch_grouped_mm", "(gemm_glue)", "24576,1536,256,128,8", "empty_experts", "time"):
        assert part in planned, planned
    assert max(map(len, [*listed.splitlines(), *planned.splitlines()])) <= 80


def test_doctor(command_line: Run) -> None:
    code, out, _ = command_line("doctor")
    assert code == 0
    for part in ("torch", "GPU:", "pip install no-such-thing", "broken", "this file was never finished", "ready"):
        assert part in out


def test_help_names_every_command(command_line: Run) -> None:
    code, out, _ = command_line("--help")
    assert code == 0
    for command in ("list", "doctor", "check", "run", "plot", "reproduce"):
        assert command in out


def test_dry_run_lists_and_measures_nothing(command_line: Run, tmp_path: Path) -> None:
    code, out, _ = command_line("run", "smoke", "--dry-run", "--output", tmp_path / "rows")
    assert code == 0
    assert "torch_loop" in out and "cublas_bound (gemm_glue)" in out and "fake" in out
    assert re.search(r"\d+ jobs; about \d+ s", out)
    assert not (tmp_path / "rows").exists()


def test_check_in_a_process_of_its_own(warm_moebench: MoeBench) -> None:
    names = ("torch_loop", "fake_wrong", "fake_segfault", "fake_missing_package", "fake_unsupported")
    only = ("--shape", "32,16,8,4,2", "--distribution", "uniform", "--distribution", "empty_experts")
    ended = warm_moebench("check", *names, *only)
    assert ended.returncode == 3 and not ended.stderr
    lines = {name: [line for line in ended.stdout.splitlines() if name in line] for name in names}
    assert len(lines["torch_loop"]) == 4 and all(" ok " in line for line in lines["torch_loop"])
    assert sum("torch_loop routed_experts" in line for line in lines["torch_loop"]) == 2
    assert all("wrong" in line and "output 0.1" in line for line in lines["fake_wrong"])
    assert all("crashed" in line and "SIGSEGV" in line for line in lines["fake_segfault"])
    assert "not installed" in lines["fake_missing_package"][0]
    assert "unsupported" in lines["fake_unsupported"][0]


def test_run_then_plot(command_line: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows" / "cpu"
    code, out, err = command_line("run", "smoke", "--only", "torch_loop", "--output", rows)
    assert code == 0, out + err
    assert "6 rows in" in out
    lines = [json.loads(line) for line in (rows / "smoke.jsonl").read_text().splitlines()]
    assert [row["status"] for row in lines] == ["ok"] * 6
    with (rows / "smoke.jsonl").open("a") as file:
        file.write("not a row\n")
    # That it draws every figure where none is named: test_plots_token_rounding.py.
    code, out, err = command_line(
        "plot", "--results", rows.parent, "--output", tmp_path / "figures", "--figure", "headline"
    )
    assert code == 0, out + err
    assert "smoke.jsonl:7" in out
    assert {path.name for path in (tmp_path / "figures").rglob("*.*")} == {"headline.png", "headline.svg"}


def test_a_user_error_in_a_process_of_its_own(moebench: MoeBench) -> None:
    ended = moebench("check", "zebra")
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.startswith("moebench: unknown implementation 'zebra'") and ended.stderr.count("\n") == 1


# The README's promise: a baseline is one file.


def readme_steps(section: str) -> list[str]:
    """The fenced bash blocks of a section of the README."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^(#+) {re.escape(section)}[^\n]*\n(.*?)(?=^#+ |\Z)", text, re.M | re.S)
    assert found, f"README.md has no section {section!r}"
    return re.findall(r"^ *```(?:bash|sh|shell|console)\n(.*?)^ *```", found.group(2), re.M | re.S)


def test_the_readmes_steps_to_add_a_baseline(tmp_path: Path) -> None:
    if not (ROOT / "README.md").exists():
        pytest.skip("there is no README.md yet")
    steps = [textwrap.dedent(step) for step in readme_steps("Add a baseline")]
    assert steps, "the section has no fenced steps"
    copy = tmp_path / "copy"
    folders = ("harness", "implementations", "plots", "sweeps")
    for folder in folders:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", ".ruff_cache"))
    for file in ("pyproject.toml", "README.md", "Makefile"):
        shutil.copy(ROOT / file, copy / file)
    (copy / "results").mkdir()
    # The console script and the tools, from this environment but with the copy's code.
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name, module in (("moebench", "harness.cli"), ("pytest", "pytest"), ("python", "")):
        script = binaries / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {f"-m {module}" if module else ""} "$@"\n')
        script.chmod(0o755)
    venv = copy / ".venv" / "bin"
    venv.parent.mkdir()
    venv.symlink_to(binaries)
    environment = {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "EDITOR": "true",
    }
    environment.pop("MOEBENCH_PLUGINS", None)
    for step in steps:
        commands = re.sub(r"^\$ ", "", step, flags=re.M)
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, f"{commands}\n{ended.stdout}\n{ended.stderr}"


def test_fake_plugins_stay_out_of_the_ordinary_registry(command_line: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.registry import load_registry

    monkeypatch.delenv("MOEBENCH_PLUGINS", raising=False)
    assert not [name for name in load_registry().names() if name.startswith("fake")]
    assert len(load_registry(extra_folders=[FAKE_PLUGINS]).broken) == 2


def test_ratios_on_a_cpu_are_refused_in_words(command_line: Run, tmp_path: Path) -> None:
    text = """
[sweep]
description = "A ratio without a GPU"

[[ratios]]
numerator = "torch_loop"
denominator = "torch_loop"
shapes = ["8,16,8,4,2"]
device = "cpu"
"""
    (tmp_path / "ratio.toml").write_text(text)
    code, _, err = command_line("run", str(tmp_path / "ratio.toml"), "--output", str(tmp_path))
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "ratio.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["unsupported"] * 3
    assert all("only a GPU has" in row["reason"] for row in rows)


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP,), (signal.SIGINT, signal.SIGHUP)])
def test_a_signal_that_is_ignored_stays_so(ignored: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``nohup`` a sweep outlives the terminal that began it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    during: dict[int, object] = {}
    monkeypatch.setattr(cli, "app", lambda: during.update({number: signal.getsignal(number) for number in numbers}))
    try:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        cli.main()
        after = {number: signal.getsignal(number) for number in numbers}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    heeded = {number: handler is cli._end for number, handler in during.items()}
    assert heeded == {number: number not in ignored for number in numbers}
    assert all(after[number] is (signal.SIG_IGN if number in ignored else signal.SIG_DFL) for number in numbers)
