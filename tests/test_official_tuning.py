"""The table of what the official kernels' tuner chose: read back from its cache, merged, and written as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from harness.errors import UserError
from harness.shapes import MoEShape
from implementations import _sonicmoe_official_tuning as official_tuning
from implementations._sonicmoe_official_tuning import GEMMS, collect, gemms_of, merged, sizes_of, text_of

TABLE = ROOT / "results" / "nvidia_h200" / "tuning" / "sonicmoe_official.json"
HEADLINE = "24576,1536,256,128,8"


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
        entry.parent.mkdir(parents=True)
        entry.write_text(json.dumps({"key": winner["key"], "configs_timings": [*others, [config, ms]]}))


def test_the_committed_winners_are_the_gemms_they_are_said_to_be(table: dict[str, Any]) -> None:
    for winner in table["winners"]:
        function = winner["file"].split("/")[1].removesuffix(".autotune.json")
        place = function, tuple(sizes_of(winner["key"])[:3])
        assert gemms_of(MoEShape.parse(winner["shape"]))[place] == winner["gemm"]
    by_shape = {winner["shape"]: [] for winner in table["winners"]}
    for winner in table["winners"]:
        by_shape[winner["shape"]].append(winner["gemm"])
    assert all(sorted(gemms) == sorted(GEMMS) for gemms in by_shape.values())


def test_the_fastest_tile_of_each_gemm_is_kept(table: dict[str, Any], tmp_path: Path) -> None:
    fill(tmp_path, table["winners"])
    (tmp_path / "x").mkdir()
    fp16 = {"key": ["torch.Size([8, 8])", "[2, 1]", "torch.float16"], "configs_timings": [["c", [1.0, 1.0, 1.0]]]}
    (tmp_path / "x" / "gemm_tuned.autotune.json").write_text(json.dumps(fp16))
    found = list(collect(tmp_path, [MoEShape.parse(HEADLINE)]))
    own = {winner["gemm"]: winner for winner in table["winners"] if winner["shape"] == HEADLINE}
    assert [winner["gemm"] for winner in found] == list(GEMMS)
    for winner in found:
        assert winner == own[winner["gemm"]] | {"candidates": 3}


def test_a_layer_that_was_not_tuned_is_said(table: dict[str, Any], tmp_path: Path) -> None:
    fill(tmp_path, [winner for winner in table["winners"] if winner["gemm"] != "dX"])
    with pytest.raises(UserError, match=f"no entry for dX at {HEADLINE}"):
        list(collect(tmp_path, [MoEShape.parse(HEADLINE)]))


def test_new_winners_take_the_place_of_the_old_of_their_shape(table: dict[str, Any]) -> None:
    found = [{**winner, "candidates": 7} for winner in table["winners"] if winner["shape"] == HEADLINE]
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

    def build(shape: MoEShape) -> None:
        built.append(str(shape))
        fill(tmp_path / "cache", [winner for winner in table["winners"] if winner["shape"] == str(shape)])

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
    path = official_tuning.tune([HEADLINE, HEADLINE])
    found = json.loads(path.read_text())
    assert path == tmp_path / "tuning.json" and built == [HEADLINE]
    assert len(found["winners"]) == len(table["winners"])
    assert [winner["candidates"] for winner in found["winners"][-6:]] == [3] * 6
