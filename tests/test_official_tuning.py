"""The table of what the official kernels' tuner chose: read back from its cache, merged, and written as it was."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT

from harness.documents import save
from harness.errors import UserError
from harness.shapes import MoEShape
from implementations import _sonicmoe_official_tuning as official_tuning
from implementations._sonicmoe_official_tuning import GEMMS, Asked, collect, gemms_of, merged, sizes_of, text_of
from implementations.sonicmoe_official import committed_tuning, read_tuning, winner_of, winners_at

TABLE = ROOT / "results" / "nvidia_h200" / "tuning" / "sonicmoe_official.json"
HEADLINE = "24576,1536,256,128,8"
HEADLINES = (MoEShape.parse(HEADLINE), 24576 * 8)


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    return dict(json.loads(TABLE.read_text()))


def where(table: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"gpu": table["gpu"], "date": "2030-01-02", "driver": "600", "packages": table["packages"], **changed}


def fill(cache: Path, winners: list[dict[str, Any]], slower: int = 2) -> None:
    """Entries as the tuner writes them: every tile with its times, the fastest not first."""
    for winner in winners:
        (config, ms) = winner["configs_timings"][0]
        others = [[f"config: other {index}", [value * (1.1 + index) for value in ms]] for index in range(slower)]
        entry = cache / winner["file"]
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_text(json.dumps({"key": winner["key"], "configs_timings": [*others, [config, ms]]}))


def faster(winner: dict[str, Any]) -> dict[str, Any]:
    """The same tile, timed anew."""
    ((config, ms),) = winner["configs_timings"]
    return {**winner, "configs_timings": [[config, [round(value / 2, 4) for value in ms]]]}


def test_the_committed_winners_are_the_gemms_they_are_said_to_be(table: dict[str, Any]) -> None:
    for winner in table["winners"]:
        function = winner["file"].split("/")[1].removesuffix(".autotune.json")
        place = function, tuple(sizes_of(winner["key"])[:3])
        shape, rows = winner_of(winner)
        assert gemms_of(MoEShape.parse(shape), rows)[place] == winner["gemm"]
    by_layer: dict[tuple[str, int], list[str]] = {winner_of(winner): [] for winner in table["winners"]}
    for winner in table["winners"]:
        by_layer[winner_of(winner)].append(winner["gemm"])
    assert all(sorted(gemms) == sorted(GEMMS) for gemms in by_layer.values())


def test_the_fastest_tile_of_each_gemm_is_kept(table: dict[str, Any], tmp_path: Path) -> None:
    fill(tmp_path, table["winners"])
    (tmp_path / "x").mkdir()
    fp16 = {"key": ["torch.Size([8, 8])", "[2, 1]", "torch.float16"], "configs_timings": [["c", [1.0, 1.0, 1.0]]]}
    (tmp_path / "x" / "gemm_tuned.autotune.json").write_text(json.dumps(fp16))
    found = list(collect(tmp_path, [HEADLINES]))
    own = {winner["gemm"]: winner for winner in table["winners"] if winner["shape"] == HEADLINE}
    assert [winner["gemm"] for winner in found] == list(GEMMS)
    for winner in found:
        assert winner == own[winner["gemm"]] | {"candidates": 3}


def test_a_layer_that_was_not_tuned_is_said(table: dict[str, Any], tmp_path: Path) -> None:
    fill(tmp_path, [winner for winner in table["winners"] if winner["gemm"] != "dX"])
    with pytest.raises(UserError, match=f"no entry for dX at {HEADLINE} with 196608 routed rows"):
        list(collect(tmp_path, [HEADLINES]))


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "\0\0", '{"key": ["torch.Size([8, 8])"', '{"key": 7, "configs_timings": []}',
        '{"configs_timings": [["c", [1.0]]]}', '{"key": ["a"], "configs_timings": [["c", []]]}',
        '{"key": [1], "configs_timings": [["c", [1.0]]]}', '{"key": ["a"], "configs_timings": [["c", [Infinity]]]}',
    ],
)  # fmt: skip
def test_a_cache_entry_that_cannot_be_read_costs_only_itself(table: dict[str, Any], text: str, tmp_path: Path) -> None:
    fill(tmp_path, table["winners"])
    broken = tmp_path / "cut" / "gemm_tuned.autotune.json"
    broken.parent.mkdir()
    broken.write_text(text)
    assert [winner["gemm"] for winner in collect(tmp_path, [HEADLINES])] == list(GEMMS)
    own = next(winner for winner in table["winners"] if (winner["shape"], winner["gemm"]) == (HEADLINE, "dW2"))
    (tmp_path / own["file"]).write_text(text)
    with pytest.raises(UserError, match=r"no entry for dW2 at .* cannot be read.*cut") as caught:
        list(collect(tmp_path, [HEADLINES]))
    assert own["file"] in str(caught.value)


def test_a_tile_that_could_not_be_timed_does_not_win(table: dict[str, Any], tmp_path: Path) -> None:
    fill(tmp_path, table["winners"])
    own = next(winner for winner in table["winners"] if (winner["shape"], winner["gemm"]) == (HEADLINE, "up"))
    ((config, ms),) = own["configs_timings"]
    timings = [["config: broken", [float("nan")] * 3], [config, ms], ["config: late", [float("inf")] * 3]]
    (tmp_path / own["file"]).write_text(json.dumps({"key": own["key"], "configs_timings": timings}))
    assert next(collect(tmp_path, [HEADLINES]))["configs_timings"] == [[config, ms]]


def test_of_two_entries_for_one_gemm_the_last_written_counts(table: dict[str, Any], tmp_path: Path) -> None:
    """Other versions of quack leave theirs in folders of another name."""
    fill(tmp_path, table["winners"])
    own = next(winner for winner in table["winners"] if (winner["shape"], winner["gemm"]) == (HEADLINE, "up"))
    for folder, age_s in (("AAAA", 100), ("ZZZZ", 200)):
        stale = tmp_path / folder / own["file"].split("/")[1]
        stale.parent.mkdir()
        stale.write_text(json.dumps({"key": own["key"], "configs_timings": [["config: stale", [0.001] * 3]]}))
        then = (tmp_path / own["file"]).stat().st_mtime - age_s
        os.utime(stale, (then, then))
    assert next(collect(tmp_path, [HEADLINES]))["file"] == own["file"]


def test_two_shapes_may_share_gemms(table: dict[str, Any], tmp_path: Path) -> None:
    """Equal rows and widths: the GEMMs over contiguous rows are the same, those that gather from other tokens are not.
    K need be no power of two."""
    first, second = MoEShape(1280, 256, 128, 32, 10), MoEShape(2560, 256, 128, 32, 5)
    names = {gemm: winner["file"].split("/")[1] for winner in table["winners"] for gemm in [winner["gemm"]]}
    written = set()
    for shape in (first, second):
        for (function, sizes), gemm in gemms_of(shape, 12800).items():
            assert names[gemm] == f"{function}.autotune.json"
            key = [text for size in sizes for text in (f"torch.Size({list(size)})", "[2, 1]", "torch.bfloat16")]
            folder = tmp_path / re.sub(r"\W+", "_", " ".join(key))
            folder.mkdir(exist_ok=True)
            entry = {"key": key, "configs_timings": [[f"config: {sizes}", [1.0, 0.9, 1.1]]]}
            (folder / names[gemm]).write_text(json.dumps(entry))
            written.add(f"{folder.name}/{names[gemm]}")
    assert len(written) == 10
    found = list(collect(tmp_path, [(first, 12800), (second, 12800)]))
    assert [(winner["shape"], winner["gemm"]) for winner in found] == [
        (str(shape), gemm) for shape in (first, second) for gemm in GEMMS
    ]
    by_gemm = [{winner["gemm"]: winner["file"] for winner in found[start : start + 6]} for start in (0, 6)]
    assert {gemm for gemm in GEMMS if by_gemm[0][gemm] == by_gemm[1][gemm]} == {"down", "dX"}


def test_new_winners_take_the_place_of_the_old_of_their_shape(table: dict[str, Any]) -> None:
    found = [faster(winner) | {"candidates": 7} for winner in table["winners"] if winner["shape"] == HEADLINE]
    after = merged(table, found, where(table))
    assert len(after["winners"]) == len(table["winners"])
    assert [winner["shape"] for winner in after["winners"][-6:]] == [HEADLINE] * 6
    assert {(winner["candidates"], winner["date"], winner["driver"]) for winner in after["winners"][-6:]} == {
        (7, "2030-01-02", "600")
    }
    assert {key: value for key, value in after.items() if key != "winners"} == {
        key: value for key, value in table.items() if key != "winners"
    }
    assert merged({}, found, where(table))["packages"] == table["packages"]
    # What the plugin had taken from the table is no choice of now, nor is it where another layer has the same GEMM.
    own = [winner for winner in table["winners"] if winner["shape"] == "24576,1536,256,32,8"]
    assert [(winner["date"], winner["driver"]) for winner in own] == [("2026-12-02", "580.159.04")] * 6
    other = [{**winner, "shape": "12288,1536,256,32,16"} for winner in own]
    for its in (own, other):
        after = merged(table, [{**winner, "date": "", "driver": ""} for winner in its], where(table))
        assert after["winners"][-6:] == [{**winner, "shape": its[0]["shape"]} for winner in own]
    # The first entries have the table's own date.
    first = [winner for winner in table["winners"] if winner["shape"] == HEADLINE]
    assert "date" not in first[0]
    assert {winner["date"] for winner in merged(table, first, where(table))["winners"][-6:]} == {table["date"]}


def test_the_rows_of_a_rounded_routing_are_a_layer_of_their_own(table: dict[str, Any], tmp_path: Path) -> None:
    """Beside that of top-K at the same shape; the same number of rows is the same layer, whatever the method."""
    assert Asked.parse(f"{HEADLINE}:nearest").point.routing.method == "nearest"
    assert Asked.parse(f"{HEADLINE}:top_k").point.operation == "routed_experts" != Asked.parse(HEADLINE).point.operation
    shape, rows = MoEShape.parse(HEADLINE), 196608 + 128
    rounded = []
    for winner in table["winners"]:
        if winner["shape"] == HEADLINE:
            key = [re.sub(r"\b196608\b", str(rows), text) for text in winner["key"]]
            file = f"{winner['gemm']}/{winner['file'].split('/')[1]}"
            rounded.append({**winner, "routed_rows": rows, "key": key, "file": file})
    fill(tmp_path, rounded)
    with pytest.raises(UserError, match="no entry for"):
        list(collect(tmp_path, [HEADLINES]))
    found = list(collect(tmp_path, [(shape, rows)]))
    assert [winner_of(winner) for winner in found] == [(HEADLINE, rows)] * 6
    after = merged(table, found, where(table))
    assert after["winners"][:-6] == table["winners"] and after["winners"][-6]["routed_rows"] == rows
    assert len(merged(after, found, where(table))["winners"]) == len(after["winners"])
    # What the plugin takes.
    assert winners_at(after, shape, rows) == after["winners"][-6:]
    assert winners_at(after, *HEADLINES) == [winner for winner in table["winners"] if winner["shape"] == HEADLINE]
    assert not winners_at(after, shape, rows + 128)
    fill(tmp_path / "both", table["winners"])
    assert "routed_rows" not in next(collect(tmp_path / "both", [HEADLINES]))


def test_choices_of_other_packages_are_not_mixed(table: dict[str, Any]) -> None:
    packages = table["packages"] | {"quack-kernels": "9.9"}
    with pytest.raises(UserError, match=re.escape("quack-kernels 0.3.11") + ".*" + re.escape("quack-kernels 9.9")):
        merged(table, [], where(table, packages=packages))


def test_the_table_is_written_as_it_is_read(table: dict[str, Any]) -> None:
    assert text_of(table) == TABLE.read_text()


def test_without_a_gpu_nothing_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official_tuning, "gpu_name", lambda: None)
    with pytest.raises(UserError, match="this machine has none"):
        official_tuning.tune([HEADLINE])
    with pytest.raises(UserError, match="T,d,n,E,K"):
        official_tuning.tune(["1,2"])


def test_tuning_writes_what_building_left_in_the_cache(
    table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def build(asked: Asked) -> int:
        """As quack: what its folder holds is not tuned again."""
        built.append(str(asked))
        rows = asked.shape.routed_rows + 128 * (asked.method == "nearest")
        for winner in table["winners"]:
            if winner_of(winner) == (str(asked.shape), asked.shape.routed_rows):
                key = [text.replace(str(asked.shape.routed_rows), str(rows)) for text in winner["key"]]
                file = f"{asked.method or ''}{winner['file']}" if rows != asked.shape.routed_rows else winner["file"]
                if not (tmp_path / "cache" / file).exists():
                    fill(tmp_path / "cache", [{**faster(winner), "key": key, "file": file}])
        return rows

    # Chosen by another process: with these nothing would be tuned at the headline's layer.
    left = [winner for winner in table["winners"] if winner["shape"] == HEADLINE]
    fill(tmp_path / "cache", left)
    before = {path: path.read_text() for path in (tmp_path / "cache").glob("*/*")}
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "cache"))
    machine = {"driver": "600", "torch": table["packages"]["torch"]}
    versions = table["packages"] | {"torch": "2.11.0"}
    for name, replacement in {
        "gpu_name": lambda: table["gpu"],
        "installed_reason": lambda plugin: None,
        "committed_tuning": lambda gpu: (Path("tuning.json"), table),
        "environment": lambda measured_on: machine,
        "package_version": versions.get,
        "ROOT": tmp_path,
        "_build": build,
    }.items():
        monkeypatch.setattr(official_tuning, name, replacement)
    path, number = official_tuning.tune([HEADLINE, HEADLINE, HEADLINE.replace(",", ", ")])
    found = json.loads(path.read_text())
    assert path == tmp_path / "tuning.json" and built == [HEADLINE] and number == 6
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["tuning.json"]
    assert len(found["winners"]) == len(table["winners"])
    assert [winner["candidates"] for winner in found["winners"][-6:]] == [3] * 6
    assert [winner["configs_timings"] for winner in found["winners"][-6:]] == [
        faster(winner)["configs_timings"] for winner in left
    ]
    assert all(winner["date"] != table["date"] for winner in found["winners"][-6:])
    now = {path: path.read_text() for path in (tmp_path / "cache").glob("*/*")}
    assert set(now) == set(before) and not [path for path in now if now[path] == before[path]]
    # A rounded routing has rows of its own, and a second name of a layer is no second tuning.
    path, number = official_tuning.tune([f"{HEADLINE}:nearest", f"{HEADLINE}:top_k", HEADLINE])
    found = json.loads(path.read_text())
    assert number == 12
    rows = [winner_of(winner)[1] for winner in found["winners"] if winner["shape"] == HEADLINE]
    assert rows == [196608 + 128] * 6 + [196608] * 6
    del built[1:]
    # A layer that cannot be tuned takes nothing from those before it.
    path.unlink()
    fine, unknown = "40960,768,256,128,8", "16384,1024,512,64,8"
    assert all(winner["shape"] != unknown for winner in table["winners"])
    with pytest.raises(UserError, match=f"no entry for up, down, dH, dW2, dX, dW1 at {unknown}"):
        official_tuning.tune([fine, unknown, HEADLINE])
    assert built == [HEADLINE, fine, unknown]
    assert [winner["shape"] for winner in json.loads(path.read_text())["winners"][-6:]] == [fine] * 6
    del built[1:]
    # What would be refused at the end is refused before anything is tuned.
    monkeypatch.setattr(official_tuning, "package_version", {**versions, "quack-kernels": "9.9"}.get)
    with pytest.raises(UserError, match="remove it or install those"):
        official_tuning.tune([HEADLINE])
    with pytest.raises(UserError, match=r"shape 64,60,64,8,2: .* must divide by 8"):
        official_tuning.tune([HEADLINE, "64,60,64,8,2"])
    with pytest.raises(UserError, match=r"after the colon must be a routing method: top_k, nearest, "):
        official_tuning.tune([HEADLINE, f"{HEADLINE}:neerest"])
    assert built == [HEADLINE]


def test_what_lay_in_the_cache_is_there_again(tmp_path: Path) -> None:
    """What was set aside, by a run that was killed too, but for what was made anew; compiled kernels stay."""
    for name in ("a/x.autotune.json", "b/x.autotune.json", "c/y.autotune.aside", "d/kernel.o"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("before")
    with pytest.raises(UserError, match="stopped"), official_tuning.nothing_found(tmp_path):
        assert not list(tmp_path.glob("*/*.autotune.json")) and (tmp_path / "d/kernel.o").exists()
        (tmp_path / "b/x.autotune.json").write_text("anew")
        raise UserError("stopped")
    now = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.glob("*/*")}
    assert now == {
        "a/x.autotune.json": "before", "b/x.autotune.json": "anew", "c/y.autotune.json": "before",
        "d/kernel.o": "before",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"No space left"), official_tuning.nothing_found(tmp_path):
        raise OSError(28, "No space left on device")


def test_what_does_not_build_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def out(*args: object) -> None:
        raise RuntimeError("CUDA error:\nan illegal memory access")

    empty = SimpleNamespace(routing=SimpleNamespace(experts=torch.empty(0)))
    for make, message in ((lambda *args: empty, "no expert has a row"), (out, "RuntimeError: CUDA error: an illegal")):
        monkeypatch.setattr(
            official_tuning, "get_operation", lambda name, make=make: SimpleNamespace(make_problem=make)
        )
        with pytest.raises(UserError, match=f"shape 256,64,64,512,1:down: {message}"):
            official_tuning._build(Asked.parse("256,64,64,512,1:down"))


def test_a_table_that_cannot_be_written_is_one_line_and_the_old_one_stays(
    table: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("old")

    def full(self: Path, text: str, encoding: str) -> int:
        with self.open("w", encoding=encoding) as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match=r"tuning\.json: cannot be written: No space left"):
        save(path, text_of(table))
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"packages": {}, "winn', "not valid JSON"),
        ("[]", "no table of tuned tiles"),
        ('{"winners": []}', "no table of tuned tiles"),
        ('{"packages": {}, "winners": {}}', "winners: must be a list"),
        ('{"packages": {}, "winners": [{"shape": "1,1,1,1,1"}]}', r"winners\[1\]: gemm is missing or malformed"),
        ('{"packages": {}, "winners": [7]}', r"winners\[1\]: shape is missing or malformed"),
        (
            '{"packages": {}, "winners": [{"shape": "1,1,1,1", "gemm": "", "file": "", "key": [], '
            '"configs_timings": []}]}',
            r"winners\[1\]: shape '1,1,1,1': expected five",
        ),
        (
            '{"packages": {}, "winners": [{"shape": "1,1,1,1,1", "gemm": "", "file": "", "key": [], '
            '"configs_timings": [], "routed_rows": "1"}]}',
            r"winners\[1\]: routed_rows is malformed",
        ),
        ('{"packages": {}, "aggregation": [{"key": [1]}]}', r"aggregation\[1\]: config is missing or malformed"),
    ],
)
def test_a_malformed_table_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sonicmoe_official.json"
    path.write_text(text)
    with pytest.raises(UserError, match=rf"sonicmoe_official\.json: .*{message}") as caught:
        read_tuning(path)
    assert "\n" not in str(caught.value)


def test_the_committed_table_is_one(table: dict[str, Any]) -> None:
    assert committed_tuning(table["gpu"]) == (TABLE.relative_to(ROOT), table)
    assert committed_tuning("Another GPU")[1] == {}
