"""`moebench train` on a GPU: every installed implementation trains the same small model, and its rows are whole."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from harness import store
from harness.errors import UserError
from harness.registry import default_registry
from harness.training import log, loop
from harness.training.config import Config, load_config
from harness.training.experts import point_of

STEPS = 12
NAMES = [
    plugin.name for plugin in default_registry().all() if "cuda" in plugin.devices and "moe_layer" in plugin.operations
]


def small(**changes: object) -> Config:
    sizes = {"d": 256, "n": 128, "E": 16, "K": 4, "sequence": 256, "dtype": "bfloat16", "steps": STEPS, "m_tile": 128}
    return load_config("tiny", {**sizes, "checkpoint_every": 0, **changes})


def train(config: Config, folder: Path) -> list[float]:
    out = Console(file=io.StringIO())
    loop.train(out, config, device="cuda", run_folder=folder / "run", rows_folder=folder)
    return [line["loss"] for line in log.read(folder / "run") if "loss" in line]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(small(implementation="torch_loop"), tmp_path_factory.mktemp("loop"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_implementation_learns_alike(name: str, recompute: bool, expected: list[float], tmp_path: Path) -> None:
    config, plugin = small(implementation=name, recompute=recompute), default_registry().get(name)
    try:
        point_of(plugin, config, "cuda", config.routing)
    except UserError as error:
        pytest.skip(str(error))
    found = torch.tensor(train(config, tmp_path))
    assert found[-1] < found[0] - 0.5
    torch.testing.assert_close(found[:3], torch.tensor(expected[:3]), rtol=0, atol=0.02)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=0.15)
    [row], problems = store.read_folder(tmp_path)
    assert not problems and row["status"] in ("ok", "unstable") and row["memory_bytes"]["peak"] > 0
    assert row["environment"]["gpu"] and row["training"]["tokens_per_day_per_gpu"] > 0


@pytest.mark.parametrize("routing", ["nearest", "stochastic", "expert_choice"])
def test_our_layer_learns_with_other_routings(routing: str, expected: list[float], tmp_path: Path) -> None:
    found = train(small(implementation="sonicmoe_triton", routing=routing), tmp_path)
    assert found[-1] < found[0] - 0.5 and abs(found[-1] - expected[-1]) < 0.5
