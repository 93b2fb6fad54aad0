"""What a run keeps, under attack: full disks, bytes that changed, kills at any moment."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_store_attacked import largest_file
from test_training_runs import curve
from training_runs import train, train_together

from harness.errors import UserError
from harness.store import WriteError
from harness.training import checkpoints, log, loop
from harness.training.config import load_config
from harness.training.model import Transformer

CommandLine = Callable[..., tuple[int, str, str]]
#: A run with a checkpoint after every step.
FEW: dict[str, Any] = {"steps": 6, "checkpoint_every": 1}


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder, **FEW)
    return folder


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped in the fourth step: checkpoints after two and three."""
    folder = tmp_path_factory.mktemp("stopped")
    step = loop.Trainer.step

    def stops(self: loop.Trainer, number: int, counts: bool = True) -> dict[str, Any]:
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number, counts)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(loop.Trainer, "step", stops)
        with pytest.raises(KeyboardInterrupt):
            train(folder, **FEW)
    return folder


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A copy of that run, to spoil."""
    shutil.copytree(stopped_once, tmp_path, dirs_exist_ok=True)
    return tmp_path


def steps_saved(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in checkpoints.complete(folder / "run" / "checkpoints")]


# Full disks.


@pytest.mark.parametrize(
    ("size", "name", "steps"),
    [(100_000, "checkpoints/step-00000004", 4), (100, log.FILE, 3)],
    ids=["checkpoint", "configuration"],
)
def test_a_full_disk_keeps_earlier_checkpoints_and_curves(
    undisturbed: Path, stopped: Path, size: int, name: str, steps: int
) -> None:
    with largest_file(size), pytest.raises(UserError) as refused:
        train(stopped, resume=True, **FEW)
    text = str(refused.value)
    assert text.startswith(f"{stopped / 'run' / name}: cannot be written: File too large; raise the limit on the size")
    assert text.endswith("or name another folder by --folder")
    assert not (stopped / "training.jsonl").exists(), "no implementation is blamed"
    assert steps_saved(stopped) == [2, 3] and len(list((stopped / "run" / "checkpoints").iterdir())) == 2
    assert (stopped / "run" / log.FILE).read_bytes().endswith(b"\n")
    assert curve(stopped) == curve(undisturbed)[:steps]
    assert log.read_config(stopped / "run") == log.read_config(undisturbed / "run")
    train(stopped, resume=True, **FEW)
    assert curve(stopped) == curve(undisturbed)


def test_a_line_of_the_curves_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    curves = log.Log(tmp_path, 0, load_config("tiny").as_dict())
    lines = [{"step": step, "loss": 5.0, "tokens": 64 * step} for step in range(1, 4)]
    curves.write(**lines[0])
    size = (tmp_path / log.FILE).stat().st_size
    with largest_file(size + 9), pytest.raises(WriteError, match=r"log\.ndjson: cannot be written: File too large"):
        curves.write(**lines[1])
    assert (tmp_path / log.FILE).stat().st_size == size
    curves.write(**lines[2])
    curves.close()
    assert log.read(tmp_path) == [lines[0], lines[2]]


def train_limited(folder: Path, size: int, **changes: Any) -> None:
    with largest_file(size):
        train(folder, **changes)


def test_a_full_disk_under_two_processes(tmp_path: Path) -> None:
    codes, said = train_together(tmp_path, run=train_limited, size=100_000, **FEW)
    assert codes == [2, 2] and [kind for _, kind, _ in said] == ["UserError"] * 2
    assert all("step-00000001: cannot be written: File too large" in text for _, _, text in said), said
    assert steps_saved(tmp_path) == [] and not (tmp_path / "training.jsonl").exists()


def test_a_full_disk_elsewhere_is_no_crash_of_the_implementation(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/cache")

    monkeypatch.setattr(Transformer, "forward", forward)
    code, _, said = command_line("train", "tiny", "--output", tmp_path, "--device", "cpu")
    assert code == 2 and said.startswith("moebench: /a/cache: No space left on device") and said.count("\n") == 1
    assert not (tmp_path / "training.jsonl").exists()
