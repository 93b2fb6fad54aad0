"""What the layer's kernels compile to is what the committed table says, and a change of it reads as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("triton")

from implementations.sonicmoe_triton.compiled import CASES, TABLE, Facts, differences
from implementations.sonicmoe_triton.tiles import SHARED_MEMORY

FACTS = Facts(registers=168, stack=0, shared=1024, wgmma=8, tma_loads=1, tma_stores=0, cp_async=4)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it takes the driver's place."""
    line = [sys.executable, "-m", "implementations.sonicmoe_triton.compiled", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not built")
def test_kernels_compile_to_what_the_table_says(tmp_path: Path) -> None:
    done = command()
    assert done.returncode == 0, done.stdout + done.stderr
    # And it can fail: another number in the table, and only that is told.
    changed = json.loads(TABLE.read_text())
    case = next(iter(CASES))
    changed["kernels"][case]["gluon_up_projection_kernel"]["wgmma"] += 1
    (tmp_path / "table.json").write_text(json.dumps(changed))
    done = command("--table", str(tmp_path / "table.json"))
    first, hint = done.stdout.splitlines()
    wgmma = changed["kernels"][case]["gluon_up_projection_kernel"]["wgmma"]
    assert first == f"{case}: gluon_up_projection_kernel: wgmma {wgmma} -> {wgmma - 1}" and "--update" in hint
    assert done.returncode == 1


def test_the_table_has_every_case_and_no_kernel_that_spills() -> None:
    kernels = json.loads(TABLE.read_text())["kernels"]
    assert list(kernels) == list(CASES)
    for case, facts in kernels.items():
        for name, its in facts.items():
            assert set(its) == set(asdict(FACTS)) and its["stack"] == 0, (case, name)
            assert its["shared"] <= SHARED_MEMORY, (case, name)
    names = {name.split(" #")[0] for facts in kernels.values() for name in facts}
    for part in ("up_projection", "down_projection", "hidden_gradient", "input_gradient", "up_weight_gradient"):
        assert f"gluon_{part}_kernel" in names
    assert {"gluon_down_weight_gradient_kernel", "_aggregation_kernel", "_router_top_k_kernel"} <= names
    # float32 takes the plain twins, which leave the tensor cores alone: those would round to TF32.
    exact = kernels["7B, float32"]
    assert {"up_projection_kernel", "hidden_gradient_kernel", "down_weight_gradient_kernel"} <= set(exact)
    assert not any(its["wgmma"] for its in exact.values())


def test_differences_are_told_kernel_by_kernel() -> None:
    old = {"a": {"same": asdict(FACTS), "slower": asdict(FACTS), "gone": asdict(FACTS)}}
    new = {"a": {"same": FACTS, "slower": replace(FACTS, registers=255, stack=16)}, "b": {"new": FACTS}}
    assert differences(old, new) == [
        "a: slower: registers 168 -> 255, stack 0 -> 16",
        "a: gone: gone",
        "b: new: new, registers 168, shared 1024, wgmma 8, tma_loads 1, cp_async 4",
    ]
    assert differences(old, {"a": {name: FACTS for name in old["a"]}}) == []


def test_a_table_of_another_triton_is_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from implementations.sonicmoe_triton import compiled

    (tmp_path / "table.json").write_text(json.dumps({"triton": "2.0.0", "kernels": {}}))
    monkeypatch.setattr(compiled, "measure", lambda: {})
    with pytest.raises(compiled.typer.Exit) as ended:
        compiled.main(update=False, table=tmp_path / "table.json")
    assert ended.value.exit_code == 2
