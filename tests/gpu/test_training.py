"""`moebench train` on GPUs: every installed implementation trains the same small model, and its rows are whole; two
processes train as one does, and say what their communication costs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from training_runs import train_together

from harness import store
from harness.errors import UserError
from harness.registry import default_registry, installed_reason
from harness.training import log, loop, model, pairs, profiled
from harness.training.config import Config, load_config
from harness.training.experts import point_of

STEPS = 12
NAMES = [
    plugin.name for plugin in default_registry().all() if "cuda" in plugin.devices and "moe_layer" in plugin.operations
]


SMALL: dict[str, Any] = {
    "d": 256,
    "n": 128,
    "E": 16,
    "K": 4,
    "sequence": 256,
    "dtype": "bfloat16",
    "steps": STEPS,
    "m_tile": 128,
    "learning_rate": 2e-3,
    "checkpoint_every": 0,
}

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def small(**changes: object) -> Config:
    return load_config("tiny", {**SMALL, **changes})


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in log.read(folder / "run") if "loss" in line]


def train(config: Config, folder: Path) -> list[float]:
    out = Console(file=io.StringIO())
    loop.train(out, config, device="cuda", run_folder=folder / "run", rows_folder=folder)
    return losses(folder)


def communicates(row: Mapping[str, Any]) -> bool:
    numbers = row["training"]
    return 0 <= numbers["exposed_communication"] <= numbers["communication"] <= 1 and numbers["communication"] > 0


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(small(implementation="torch_loop"), tmp_path_factory.mktemp("loop"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("recompute", [False, True])
def test_every_implementation_learns_alike(name: str, recompute: bool, expected: list[float], tmp_path: Path) -> None:
    config, plugin = small(implementation=name, recompute=recompute), default_registry().get(name)
    if missing := installed_reason(plugin):
        pytest.skip(missing)
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


@two_gpus
@pytest.mark.parametrize("name", [name for name in NAMES if name in ("torch_loop", "sonicmoe_triton")])
@pytest.mark.parametrize("shard", [0, 1])
def test_two_processes_learn_as_one(name: str, shard: int, tmp_path: Path) -> None:
    one = torch.tensor(train(small(implementation=name), tmp_path / "one"))
    codes, said = train_together(tmp_path / "two", device="cuda", implementation=name, shard=shard, **SMALL)
    assert codes == [0, 0], said
    two = torch.tensor(losses(tmp_path / "two"))
    torch.testing.assert_close(two[:3], one[:3], rtol=0, atol=0.01)
    torch.testing.assert_close(two, one, rtol=0, atol=0.15)
    [row], problems = store.read_folder(tmp_path / "two")
    assert not problems and row["training"]["world_size"] == 2 and communicates(row)
    [row], problems = store.read_folder(tmp_path / "one")
    assert not problems and "communication" not in row["training"]


def test_busy_times_of_a_pair_on_one_gpu(tmp_path: Path) -> None:
    ours, other = small(implementation="sonicmoe_triton"), small(implementation="torch_loop")
    out = Console(file=io.StringIO())
    pairs.compare(out, ours, other, device="cuda", rows_folder=tmp_path, rounds=2, timeout_s=60.0)
    found, problems = store.read(tmp_path / "training.jsonl")
    assert not problems and [row.get("time_kind") for row in found] == [None, None, "host", "busy"]
    for row in found[:2]:
        assert row["busy_ms"]["samples"] == 2 * profiled.STEPS
        assert 0 < row["busy_ms"]["median"] <= row["latency_ms"]["median"]


@two_gpus
def test_efficiency_of_two_processes(tmp_path: Path) -> None:
    codes, said = train_together(
        tmp_path, device="cuda", against="alone", rounds=2, implementation="sonicmoe_triton", **SMALL
    )
    assert codes == [0, 0], said
    found, problems = store.read(tmp_path / "training.jsonl")
    assert not problems and [row["record"] for row in found] == ["measurement", "measurement", "ratio"]
    alone, together, ratio = found
    assert not any("busy_ms" in row for row in found)
    assert [row["training"]["world_size"] for row in (alone, together)] == [1, 2]
    assert communicates(together) and "communication" not in alone["training"]
    assert (ratio["variant"], ratio["denominator_variant"]) == (alone["variant"], together["variant"])
    # At this size a step is all launches and waiting, so the efficiency says little; more than twice 1 is wrong.
    assert 0 < ratio["ci95"][0] <= ratio["value"] <= ratio["ci95"][1] and ratio["value"] < 2


def test_rotation_in_one_kernel_is_the_same() -> None:
    config = small()
    width = config.d // config.heads
    table = model.rotary_table(config.sequence, width, config.rotary_base, torch.device("cuda"))
    joint = torch.randn(2, config.sequence, 3, config.heads, width, device="cuda", dtype=torch.bfloat16)
    x = joint.permute(2, 0, 3, 1, 4)[1].requires_grad_()  # strided as the attention's are
    grad = torch.randn_like(x)
    found, expected = model.fused_rotate()(x, table), model.rotate(x, table)
    # Contracted multiplications and additions round once less.
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(
        torch.autograd.grad(found, x, grad)[0], torch.autograd.grad(expected, x, grad)[0], rtol=2**-7, atol=2**-7
    )
