"""What a run keeps, under attack: full disks, bytes that changed, kills at any moment."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_store_attacked import largest_file
from test_training_runs import curve
from training_runs import flipped, train, train_together, train_until

from harness.errors import UserError
from harness.store import WriteError
from harness.training import checkpoints, log, loop
from harness.training.config import load_config
from harness.training.model import Transformer

CommandLine = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("one_process")
#: A run with a checkpoint after every step.
FEW: dict[str, Any] = {"steps": 6, "checkpoint_every": 1}


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


# Damage.


def without_checksums(folder: Path) -> None:
    """As checkpoints were before there were any."""
    for path in (folder / "run" / "checkpoints").glob(f"*/{checkpoints.MARKER}"):
        marker = json.loads(path.read_text())
        del marker["checksums"]
        path.write_text(json.dumps(marker))


def test_every_file_of_a_checkpoint_has_a_checksum(stopped: Path) -> None:
    for checkpoint in checkpoints.complete(stopped / "run" / "checkpoints"):
        files = {path.name for path in checkpoint.folder.iterdir()} - {checkpoints.MARKER}
        assert set(checkpoint.checksums) == files == {".metadata", "__0_0.distcp", "corpus-0.json"}
        for name, checksum in checkpoint.checksums.items():
            assert checksum == zlib.crc32((checkpoint.folder / name).read_bytes())


@pytest.mark.parametrize(("name", "place"), [("__0_0.distcp", 0.5), (".metadata", 0.3), ("corpus-0.json", 0.0)])
def test_a_damaged_checkpoint_is_named_and_an_older_one_serves(
    undisturbed: Path, stopped: Path, name: str, place: float
) -> None:
    folder = stopped / "run" / "checkpoints" / "step-00000003"
    before = curve(stopped)
    flipped(folder / name, place)
    with pytest.raises(UserError) as refused:
        train(stopped, resume=True, **FEW)
    assert str(refused.value) == (
        f"{folder / name}: damaged, not what was written; remove the folder {folder} to continue from an older "
        "checkpoint, or else from the beginning"
    )
    assert curve(stopped) == before and not (stopped / "training.jsonl").exists()
    shutil.rmtree(folder)
    train(stopped, resume=True, **FEW)
    assert curve(stopped) == curve(undisturbed)


def test_a_checkpoint_from_before_checksums_serves(undisturbed: Path, stopped: Path) -> None:
    without_checksums(stopped)
    train(stopped, resume=True, **FEW)
    assert curve(stopped) == curve(undisturbed)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("corpus-0.json", b"\xff"),
        ("corpus-0.json", b"["),
        ("corpus-0.json", b"[" * 100_000),
        (".metadata", b""),
        (".metadata", b"\x80\x05N."),
        ("__0_0.distcp", b""),
        ("__0_0.distcp", b"\0" * 5_000_000),
    ],
)
def test_damage_without_checksums_is_one_line(stopped: Path, name: str, content: bytes) -> None:
    folder = stopped / "run" / "checkpoints" / "step-00000003"
    without_checksums(stopped)
    (folder / name).write_bytes(content)
    path = folder / checkpoints.MARKER
    marker = json.loads(path.read_text())
    path.write_text(json.dumps({**marker, "files": {**marker["files"], name: len(content)}}))
    with pytest.raises(UserError) as refused:
        train(stopped, resume=True, **FEW)
    text = str(refused.value)
    assert text.startswith(f"{folder / name if 'corpus' in name else folder}: cannot be read (") and text.isprintable()
    assert f"; remove the folder {folder} to" in text and "Traceback" not in text and len(text) < 1000
    assert not (stopped / "training.jsonl").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"[" * 100_000, b'{"step": 1e999, "config": {}, "files": {}}',
     b'{"step": 7, "config": {}, "files": {}}', b'{"step": 4, "config": {}, "files": {}, "checksums": []}'],
)  # fmt: skip
def test_a_damaged_marker_is_passed_over(stopped: Path, content: bytes) -> None:
    """With whatever step it bears: the folder's name says which one it is."""
    (stopped / "run" / "checkpoints" / "step-00000003" / checkpoints.MARKER).write_bytes(content)
    assert steps_saved(stopped) == [2]


# Kills.


@pytest.mark.parametrize("moment", ["step-00000002*", "step-00000004"], ids=["while it saves", "after"])
def test_a_run_that_is_killed_goes_on_exactly(undisturbed: Path, tmp_path: Path, moment: str) -> None:
    """As soon as a checkpoint's folder is there, under its name or not yet."""
    assert train_until(tmp_path, f"run/checkpoints/{moment}", **FEW) == -signal.SIGKILL
    assert len(curve(tmp_path)) < len(curve(undisturbed))
    train(tmp_path, resume=True, **FEW)
    assert curve(tmp_path) == curve(undisturbed)
    assert steps_saved(tmp_path) == steps_saved(undisturbed) == [5, 6]
