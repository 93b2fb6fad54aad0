"""Two implementations live: what is asked of the runner, what the table says of its rows, and what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from rich.console import Console

from harness import compare
from harness.errors import UserError
from harness.sweep import Sweep

SIZES = "512,256,128,8,2"


def row(numerator: str, denominator: str, pass_: str, value: float | None, low: float, high: float) -> dict[str, Any]:
    made: dict[str, Any] = {"record": "ratio", "numerator": numerator, "denominator": denominator, "pass": pass_}
    if value is None:
        return made | {"status": "out_of_memory", "reason": "[red] tried to allocate 3 GiB"}
    return made | {"status": "ok", "reason": "", "value": value, "ci95": [low, high]}


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, names: tuple[str, str], *args: str) -> tuple[str, list[Sweep]]:
    """The printed table, and the sweeps that were run, with rows that say the same of every ratio asked for."""
    asked: list[Sweep] = []

    def measured(out: Console, sweep: Sweep, registry: Any, path: Path, **_: Any) -> int:
        asked.append(sweep)
        values = {"forward": (1.2, 1.1, 1.3), "backward": (0.8, 0.7, 0.9), "forward_backward": (None, 0, 0)}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            for ratio in sweep.ratios:
                for pass_ in ratio.passes:
                    numbers = (1.0, 0.99, 1.01) if ratio.is_a_a else values[pass_]
                    file.write(json.dumps(row(ratio.numerator, ratio.denominator, pass_, *numbers)) + "\n")
        return 0

    monkeypatch.setattr(compare, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(compare, "run_sweep", measured)
    monkeypatch.setattr(compare.store, "read", lambda path: (list(map(json.loads, path.open())), []))
    out = Console(file=io.StringIO(), width=160)
    defaults = [SIZES, "moe_layer", "", ""]
    assert compare.compare(out, names, *[*args, *defaults[len(args) :]], output=folder) == 0
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue(), asked


def test_the_table_says_who_is_faster_and_how_far_the_method_is_from_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text, [sweep] = run(monkeypatch, tmp_path, ("torch_loop", "sonicmoe_torch"))
    assert [(r.numerator, r.denominator) for r in sweep.ratios] == [
        ("torch_loop", "sonicmoe_torch"),
        ("sonicmoe_torch", "sonicmoe_torch"),
    ]
    assert sweep.ratios[0].point.device == "cuda" and str(sweep.ratios[0].point.shape) == SIZES
    assert "SonicMoE algorithm (PyTorch) is 20.0% faster" in text
    assert "PyTorch loop is 25.0% faster" in text
    assert "out_of_memory: [red] tried to allocate 3 GiB" in text
    assert text.count("as it should be") == 3
    # Rows of an earlier comparison are not shown again.
    text, _ = run(monkeypatch, tmp_path, ("torch_loop", "torch_loop"))
    assert text.count("no difference that the interval excludes") == 3 and "faster" not in text


def test_single_kernels_take_a_variant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, [sweep] = run(monkeypatch, tmp_path, ("torch_kernels", "torch_kernels"), SIZES, "grouped_gemm", "down")
    assert [(r.point.variant, r.passes) for r in sweep.ratios] == [("down", ("forward",))]
    _, [sweep] = run(monkeypatch, tmp_path, ("torch_kernels", "torch_kernels"), SIZES, "grouped_gemm", "", "float16")
    assert (sweep.ratios[0].point.variant, sweep.ratios[0].point.dtype) == ("up", "float16")


@pytest.mark.parametrize(
    ("names", "changed", "reason"),
    [
        (("torch_lop", "torch_loop"), {}, "did you mean torch_loop?"),
        (("torch_loop", "torch_kernels"), {}, "torch_kernels does not offer moe_layer"),
        (("torch_loop", "torch_loop"), {"operation": "moe"}, "--operation moe"),
        (("torch_loop", "torch_loop"), {"variant": "up"}, "moe_layer has no variants"),
        (("torch_loop", "torch_loop"), {"dtype": "float17"}, "did you mean float16?"),
        (("torch_loop", "torch_loop"), {"shape": "8,8"}, "expected five whole numbers"),
        (("megablocks", "torch_loop"), {}, "megablocks is not installed"),
        (("torch_loop", "torch_loop"), {}, "times are compared on a GPU, and this machine has none"),
    ],
)
def test_refusals_are_one_line(
    names: tuple[str, str], changed: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compare, "gpu_name", lambda: None)
    given = {"shape": SIZES, "operation": "moe_layer", "variant": "", "dtype": ""} | changed
    with pytest.raises(UserError) as raised:
        compare.compare(Console(file=io.StringIO()), names, **given, output=tmp_path)
    assert reason in str(raised.value) and "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


MEASURED = ROOT / "results" / "nvidia_h200" / "open_models.jsonl"


def changed(folder: Path, name: str, gpu: str, factor: float) -> Path:
    """The committed rows of open models as of a GPU, all times by a factor longer."""
    lines = []
    for line in MEASURED.read_text().splitlines():
        row = json.loads(line)
        row["environment"]["gpu"] = gpu
        for field in ("device_ms", "busy_ms", "latency_ms"):
            for key in ("median", "p05", "p95"):
                if row.get(field) and key in row[field]:
                    row[field][key] *= factor
            if row.get(field):
                row[field]["ci95"] = [end * factor for end in row[field]["ci95"]]
        lines.append(json.dumps(row))
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def printed(earlier: Path, later: Path) -> str:
    out = Console(file=io.StringIO(), width=160)
    compare.compare_rows(out, earlier, later)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_two_files_of_one_gpu_say_what_got_slower(tmp_path: Path) -> None:
    slower = changed(tmp_path, "slower", "NVIDIA H200", 1.5)
    text = printed(MEASURED, slower)
    rows = map(json.loads, MEASURED.read_text().splitlines())
    timed = ("measurement", "ok", "cuda")
    good = [row for row in rows if (row["record"], row["status"], row["measured_on"]) == timed]
    points = len({json.dumps([row[name] for name in ("implementation", "variant", "shape", "pass")]) for row in good})
    assert f"{points} slower" in text and "1.50 [" in text and "several GPUs" not in text
    assert f"{points} within intervals" in printed(MEASURED, MEASURED)


def test_two_files_of_two_gpus_stand_beside_each_other(tmp_path: Path) -> None:
    text = printed(MEASURED, changed(tmp_path, "other", "NVIDIA H300", 0.5))
    assert "The same points on several GPUs" in text and "times as fast as NVIDIA H200" in text and "2.00" in text
    assert "slower" not in text


def test_files_on_the_command_line(command_line: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, output, _ = command_line("compare", MEASURED, MEASURED)
    assert code == 0 and "within intervals" in output
    for second, reason in ((tmp_path / "none.jsonl", "no such file"), (tmp_path, "no rows there")):
        code, _, error = command_line("compare", MEASURED, second)
        assert code == 2 and reason in error and error.count("\n") == 1


def test_folders_however_they_are_written(
    command_line: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("before", "after", "torch_loop"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_bytes(MEASURED.read_bytes())
    for first, second in (("before", "after"), ("before/", "./after"), ("./torch_loop", "after")):
        code, output, _ = command_line("compare", first, second)
        assert code == 0 and "within intervals" in output, (first, second)
    # A name that an implementation has means the implementation, whatever lies there.
    assert not compare.are_rows("torch_loop", "sonicmoe_torch")
    assert compare.are_rows("nowhere.jsonl", "after") and not compare.are_rows("torch_lop", "torch_loop")
