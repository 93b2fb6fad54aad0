"""Results files under attack: cut anywhere, filled with zeros, on full disks, moved away, written by two at once."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_store import row

from harness import runner, session, store
from harness.errors import UserError
from harness.measure import Context, count_rows
from harness.points import point_from_dict
from harness.store import WriteError, append, hold, read


def ids(path: Path) -> list[str]:
    """The rows in order, by the id that the test gave them; each line must be a row."""
    rows, problems = read(path)
    assert problems == []
    return [one["run_id"] for one in rows]


def line_of(name: str) -> bytes:
    return json.dumps(row(run_id=name), separators=(",", ":")).encode()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the disk."""
    monkeypatch.setattr(store.os, "fsync", lambda descriptor: None)


# Cut and spoiled files.


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("zeros", [0, 7], ids="{} zeros".format)
def test_a_last_row_cut_at_any_byte_costs_itself_only(tmp_path: Path, zeros: int) -> None:
    path = tmp_path / "rows.jsonl"
    last = line_of("last")
    for cut in range(len(last) + 1):
        path.write_bytes(line_of("first") + b"\n" + last[:cut] + b"\0" * zeros)
        whole = cut == len(last)
        rows, problems = read(path)
        assert [one["run_id"] for one in rows] == (["first", "last"] if whole and not zeros else ["first"])
        assert len(problems) == (0 if whole and not zeros else int(cut > 0 or zeros > 0))
        append(path, row(run_id="next"))
        assert ids(path) == (["first", "last", "next"] if whole else ["first", "next"]), cut


@pytest.mark.parametrize("size", [1 << 16, (1 << 16) - 1, (1 << 16) + 1, 200_000])
def test_a_long_torn_end_is_cut_off(tmp_path: Path, size: int) -> None:
    path = tmp_path / "rows.jsonl"
    torn = b'{"schema":1,"reason":"' + b"x" * size
    for before in (b"", line_of("first") + b"\n"):
        path.write_bytes(before + torn)
        append(path, row(run_id="next"))
        assert ids(path) == (["first", "next"] if before else ["next"])


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("content", "found", "broken"),
    [
        (line_of("a") + b"\n" + line_of("b")[:99] + b"\n" + line_of("c") + b"\n", ["a", "c"], [2]),
        (line_of("a") + b"\r\n" + line_of("b") + b"\r\n", ["a", "b"], []),
        (line_of("a") + b"\r\n" + line_of("b") + b"\r", ["a", "b"], []),
        (MARK + line_of("a") + b"\n" + MARK + line_of("b"), ["a", "b"], []),
        (b"\n\n \n" + line_of("a") + b"\n\t\n", ["a"], []),
        (line_of("a") + b"\n" + b"\0" * 9 + b"\n" + line_of("b") + b"\n", ["a", "b"], [2]),
        (line_of("a") + b"\n" + line_of("b")[:50] + b"\0" * 9 + line_of("c") + b"\n", ["a"], [2]),
        (line_of("a").replace(b"Demo", b"D\xff") + b"\n" + line_of("b") + b"\n", ["b"], [1]),
        (line_of("a").replace(b"Demo", b"\xed\xa0\x80") + b"\n" + line_of("b") + b"\n", ["b"], [1]),
        (line_of("a").replace(b"Demo", b"\\ud800") + b"\n" + line_of("b") + b"\n", ["b"], [1]),
        (line_of("a") + line_of("b") + b"\n" + line_of("c") + b"\n", ["c"], [1]),
        (line_of("a").decode().encode("utf-16"), [], [1]),
    ],
    ids=["cut in the middle", "CRLF", "CR at the end", "marks", "blank", "zeros", "zeros inside", "no UTF-8",
         "surrogate", "escaped surrogate", "two in one line", "UTF-16"],
)  # fmt: skip
def test_spoiled_lines_cost_themselves_only(
    tmp_path: Path, content: bytes, found: list[str], broken: list[int]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    for more in ([], ["next"]):
        rows, problems = read(path)
        assert [one["run_id"] for one in rows] == found + more
        assert [problem.line for problem in problems] == broken
        assert all("\n" not in str(problem) and str(problem).isprintable() for problem in problems)
        if not more:
            append(path, row(run_id="next"))
    assert path.read_bytes().startswith(content)


def test_zeros_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line_of("a") + b"\n" + b"\0" * 5)
    (problem,) = read(path)[1]
    assert "holds zeros (the machine went down while it was written)" in str(problem)


def test_texts_that_utf8_cannot_hold_are_stored_without_what_it_cannot(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, row(notes=["half \ud800, whole \ud83d\ude00, é"], overhead_s={"\udcff": 1.0}))
    (one,) = read(path)[0]
    assert one["notes"] == ["half \ufffd, whole 😀, é"] and one["overhead_s"] == {"\ufffd": 1.0}


# Disks that refuse.


class Refusing:
    """In place of the module `os`: the disk takes ``room`` more bytes; and may not give back what it took."""

    def __init__(self, room: int, error: OSError | BaseException, truncates: bool = True) -> None:
        self.room = room
        self.error = error
        self.truncates = truncates

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise self.error
        written = os.write(descriptor, data[: self.room])
        self.room -= written
        return written

    def ftruncate(self, descriptor: int, size: int) -> None:
        if not self.truncates:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.ftruncate(descriptor, size)


@pytest.mark.parametrize("room", [0, 1, 9, 300])
@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "make room there"), (errno.EDQUOT, "make room there"), (errno.EIO, "name another folder")],
    ids=errno.errorcode.get,
)
def test_a_full_disk_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, number: int, advice: str
) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, row(run_id="first"))
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(store, "os", Refusing(room, OSError(number, os.strerror(number))))
        with pytest.raises(WriteError) as refused:
            append(path, row(run_id="lost"))
    text = str(refused.value)
    assert text.startswith(f"{path}: cannot be written: {os.strerror(number)}; ") and advice in text
    assert path.read_bytes() == before
    # Where it does not even let go of what it took.
    with monkeypatch.context() as patched:
        patched.setattr(store, "os", Refusing(room, OSError(number, os.strerror(number)), truncates=False))
        with pytest.raises(WriteError, match=os.strerror(number)):
            append(path, row(run_id="lost"))
    assert path.read_bytes().startswith(before)
    append(path, row(run_id="next"))
    assert ids(path) == ["first", "next"]


def test_a_signal_in_the_middle_of_a_line_leaves_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, row(run_id="first"))
    before = path.read_bytes()
    monkeypatch.setattr(store, "os", Refusing(99, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        append(path, row(run_id="lost"))
    assert path.read_bytes() == before


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A limit that holds for root as well; Python ignores the signal that comes with it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, row(run_id="first"))
    before = path.read_bytes()
    with largest_file(len(before) + 50), pytest.raises(WriteError, match=r"File too large; raise the limit .*ulimit"):
        append(path, row(run_id="lost"))
    assert path.read_bytes() == before
    append(path, row(run_id="next"))
    assert ids(path) == ["first", "next"]


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system of its own: {mounted.stderr.strip()}")
    try:
        path = disk / "rows.jsonl"
        stored = 0
        with pytest.raises(WriteError, match="No space left on device; make room"):
            while stored < 99:
                append(path, row(run_id=str(stored), notes=["x" * 3000]))
                stored += 1
        assert ids(path) == [str(number) for number in range(stored)] and 5 < stored < 12
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def unusable(folder: Path) -> dict[str, Callable[[], Path]]:
    """Places where no row can go, whoever asks; each by what makes it."""

    def linked(target: str) -> Path:
        path = folder / "rows.jsonl"
        path.symlink_to(target)
        return path

    def pipe() -> Path:
        os.mkfifo(folder / "rows.jsonl")
        return folder / "rows.jsonl"

    def below_a_file() -> Path:
        (folder / "file").write_text("mine")
        return folder / "file" / "rows.jsonl"

    def a_folder() -> Path:
        (folder / "rows.jsonl").mkdir()
        return folder / "rows.jsonl"

    return {
        "/dev/full": lambda: linked("/dev/full"),
        "/dev/zero": lambda: linked("/dev/zero"),
        "pipe": pipe,
        "loop": lambda: linked("rows.jsonl"),
        "folder": a_folder,
        "below a file": below_a_file,
        "read-only": lambda: Path("/proc/moebench/rows.jsonl"),
        "long": lambda: folder / f"{'x' * 300}.jsonl",
    }


PLACES = sorted(unusable(Path()))


@pytest.mark.parametrize("what", PLACES)
def test_places_where_no_row_can_go(tmp_path: Path, what: str) -> None:
    path = unusable(tmp_path)[what]()
    for use in (lambda: append(path, row()), lambda: hold(path).__enter__()):
        with pytest.raises(WriteError) as refused:
            use()
        text = str(refused.value)
        assert text.startswith(f"{path}: cannot be written: ") and "by --output" in text, text
    with pytest.raises(UserError, match="cannot be read"):
        read(path)
    assert not store._held


# Two at once.


@contextlib.contextmanager
def other_process(path: Path) -> Iterator[None]:
    """Holds the file as another process would: through a descriptor of its own."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def test_a_file_that_is_held_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    for name in ("PATIENCE_S", "HOLD_PATIENCE_S"):
        monkeypatch.setattr(store, name, 0.05)
    with hold(path):
        with hold(path):
            append(path, row(run_id="a"))
        append(path, row(run_id="b"))
        with pytest.raises(BlockingIOError), other_process(path):
            pass
    with other_process(path):
        for use in (lambda: append(path, row(run_id="lost")), lambda: hold(path).__enter__()):
            with pytest.raises(WriteError, match="another run is writing rows there; wait until it ends, or name"):
                use()
    append(path, row(run_id="c"))
    assert ids(path) == ["a", "b", "c"] and not store._held


def test_what_a_block_adds(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append(path, row(run_id="a"))
    with store.additions(path) as added:
        append(path, row(run_id="b"))
        append(path, row(run_id="c"))
        with pytest.raises(BlockingIOError), other_process(path):
            pass
        assert added == []
    assert [one["run_id"] for one in added] == ["b", "c"] and not store._held
    with store.additions(tmp_path / "none.jsonl") as added:
        pass
    assert added == [] and [file.name for file in tmp_path.iterdir()] == [path.name]


def test_holding_leaves_nothing_where_nothing_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    with hold(path):
        assert path.exists()
    assert not path.exists()
    path.write_bytes(b"")
    with hold(path):
        pass
    assert path.exists()


@pytest.mark.parametrize("what", ["moved", "taken away", "replaced"])
def test_a_file_that_disappears_is_made_again(tmp_path: Path, what: str) -> None:
    path, other = tmp_path / "rows.jsonl", tmp_path / "old"
    with hold(path):
        append(path, row(run_id="a"))
        if what == "taken away":
            path.unlink()
        else:
            path.rename(other)
        if what == "replaced":
            other.with_suffix(".new").write_bytes(other.read_bytes())
            other.with_suffix(".new").rename(path)
        append(path, row(run_id="b"))
        append(path, row(run_id="c"))
        with pytest.raises(BlockingIOError), other_process(path):
            pass
    assert ids(path) == (["a", "b", "c"] if what == "replaced" else ["b", "c"])


# Sweeps.


SWEEP = """
[sweep]
description = "Counted"

[[routing]]
methods = ["top_k", "nearest", "up", "down"]
shapes = ["64,64,32,8,2"]
m_tile = 16
"""


class HereWorker:
    """In place of a worker process: counts rows in this one."""

    start_s = 0.0
    phase = "counting"

    def run(self, job: dict[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        for counted in count_rows(point_from_dict(job["point"]), job["bases"], Context(announce=lambda name: None)):
            yield {"event": "row", "row": counted}
        yield {"event": "done", "phases": {}, "poisoned": False}

    def close(self, patience_s: float = 0.0) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run the sweep into ``rows``; what it prints."""
    monkeypatch.setattr(runner, "WorkerProcess", HereWorker)
    path = tmp_path / "counted.toml"
    path.write_text(SWEEP)

    def call(**options: Any) -> str:
        out = Console(file=io.StringIO(), width=200)
        assert session.run_sweeps(out, [str(path)], (), (), (), output=tmp_path / "rows", **options) == 0
        assert isinstance(out.file, io.StringIO)
        return out.file.getvalue()

    return call


def test_a_sweep_stops_at_a_full_disk_and_goes_on_later(
    run: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows" / "counted.jsonl"
    run()
    size = len(path.read_bytes().splitlines()[0])
    path.unlink()
    with largest_file(2 * size + size // 2), pytest.raises(UserError) as refused:
        run()
    text = str(refused.value)
    assert text.startswith(f"{path}: cannot be written: File too large; ")
    assert text.endswith("Every finished row is stored: continue with --resume") and "\n" not in text
    before = path.read_bytes()
    assert before.count(b"\n") == 2 and before.endswith(b"\n")
    assert "2 rows in" in run(resume=True)
    rows, problems = read(path)
    assert problems == [] and path.read_bytes().startswith(before)
    assert [one["routing"]["method"] for one in rows] == ["top_k", "nearest", "up", "down"]


def test_a_second_sweep_that_cannot_store_stops_before_the_first_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WorkerProcess", HereWorker)
    names = [tmp_path / "first.toml", tmp_path / "second.toml"]
    for name in names:
        name.write_text(SWEEP)
    (tmp_path / "rows" / "second.jsonl").mkdir(parents=True)
    with pytest.raises(WriteError, match=r"second\.jsonl: cannot be written: Is a directory"):
        session.run_sweeps(Console(file=io.StringIO()), [*map(str, names)], (), (), (), output=tmp_path / "rows")
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["second.jsonl"] and not store._held


def test_a_sweep_into_a_file_that_another_run_holds_does_nothing(run: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "rows" / "counted.jsonl"
    run()
    before = path.read_bytes()
    with other_process(path), pytest.raises(UserError, match="another run is writing rows there"):
        run(resume=True)
    assert path.read_bytes() == before
    with other_process(path):
        assert "0 jobs, 4 rows there already" in run(resume=True, dry_run=True)
