"""Runs of `moebench train`: what they learn, that they go on exactly, and how they end when something goes wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MoeBench
from torch import Tensor
from training_runs import (
    EVERY,
    STEPS,
    first_step_alone,
    flipped,
    read_past_the_end,
    train,
    train_and_count,
    train_together,
)

from harness import store
from harness.errors import UserError
from harness.record import utc_now
from harness.registry import default_registry
from harness.training import checkpoints, data, log, pairs, profiled, rows
from harness.training.config import load_config
from harness.training.model import Transformer

CommandLine = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two processes, undisturbed."""
    folder = tmp_path_factory.mktemp("together")
    codes, said = train_together(folder)
    assert codes == [0, 0], said
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder)
    return folder


def curve(folder: Path) -> list[dict[str, Any]]:
    """Every line of the run's log, without what is time."""
    return [{k: v for k, v in line.items() if k != "seconds"} for line in log.read(folder / "run")]


def losses(folder: Path) -> Tensor:
    return torch.tensor([line["loss"] for line in curve(folder) if "loss" in line])


def unigram_loss() -> float:
    """What a model reaches on the validation text that knows how often each byte occurs, and nothing else; nats."""
    training, validation = (torch.bincount(text.long(), minlength=256) + 1.0 for text in data.python_text())
    return float(-(validation / validation.sum() * (training / training.sum()).log()).sum())


def same_curve(found: Path, expected: Path) -> None:
    """Up to the order of sums: after many steps that decides a near-tie of a router the other way, once in a while."""
    one, other = losses(found), losses(expected)
    torch.testing.assert_close(one[:20], other[:20], rtol=0, atol=1e-4)
    torch.testing.assert_close(one, other, rtol=0, atol=0.03)


def test_two_processes_learn_more_than_how_often_bytes_occur(together: Path) -> None:
    validation = [line["validation_loss"] for line in curve(together) if "validation_loss" in line]
    assert len(losses(together)) == STEPS and len(validation) == 1
    assert losses(together)[0] > 5.4  # ln 256 = 5.55: it knows nothing
    assert 2.9 < unigram_loss() < 3.2
    assert validation[0] < 2.8 and float(losses(together)[-5:].mean()) < 2.9


def test_a_training_step_is_a_row(together: Path) -> None:
    rows, problems = store.read_folder(together)  # the run's own files are below it
    assert not problems and len(rows) == 1
    row = rows[0]
    assert (row["operation"], row["status"], row["implementation"]) == ("training_step", "ok", "sonicmoe_torch")
    numbers = row["training"]
    assert (numbers["world_size"], numbers["layers"], numbers["steps"], numbers["mfu"]) == (2, 2, STEPS, None)
    assert numbers["validation_loss"] == next(
        line["validation_loss"] for line in curve(together) if "validation_loss" in line
    )
    assert numbers["loss"] == pytest.approx(float(losses(together)[-1]))
    per_step = row["latency_ms"]["median"] / 1e3
    assert numbers["tokens_per_s"] == pytest.approx(8 * 64 / per_step)
    assert numbers["tokens_per_day_per_gpu"] == pytest.approx(numbers["tokens_per_s"] * 86_400 / 2)
    assert row["latency_ms"]["samples"] == STEPS - 3


def test_one_process_and_two_have_the_same_curve(together: Path, alone: Path) -> None:
    same_curve(alone, together)


def test_another_implementation_has_the_same_curve(alone: Path, tmp_path: Path) -> None:
    train(tmp_path, implementation="torch_loop", checkpoint_every=0, recompute=True)
    same_curve(tmp_path, alone)


#: Few steps, of two micro-batches or more on each of up to four processes.
FEW: dict[str, Any] = {"steps": 8, "checkpoint_every": 4, "micro_batch": 1}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few")
    train(folder, **FEW)
    return folder


def numbers(folder: Path) -> Tensor:
    """Loss and the gradient's norm of each step."""
    return torch.tensor([(line["loss"], line["gradient_norm"]) for line in curve(folder) if "loss" in line])


@pytest.mark.parametrize(("world", "shard"), [(2, 1), (4, 2)])
def test_copies_learn_as_one_process(few: Path, tmp_path: Path, world: int, shard: int) -> None:
    codes, said = train_together(tmp_path, world, run=train_and_count, shard=shard, **FEW)
    assert codes == [0] * world, said
    undisturbed = curve(tmp_path)
    torch.testing.assert_close(numbers(tmp_path), numbers(few), rtol=0, atol=1e-4)
    # Once a step, of both blocks and of what is around them.
    assert int((tmp_path / "sums").read_text()) == 3 * FEW["steps"]
    [row], problems = store.read(tmp_path / "training.jsonl")
    assert not problems and row["variant"].endswith(f"8 steps, {world} processes, sharded over {shard}")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    if world == 2:
        assert train_together(tmp_path, world, resume=True, shard=shard, **FEW) == ([0] * world, [])
        assert curve(tmp_path) == undisturbed
    else:  # another number of processes, and sharded over all of them
        train(tmp_path, resume=True, **FEW)
        torch.testing.assert_close(numbers(tmp_path), numbers(few), rtol=0, atol=1e-4)


def test_a_killed_run_goes_on_exactly(together: Path, tmp_path: Path) -> None:
    codes, said = train_together(tmp_path, kill=EVERY + 5)
    assert codes == [2, -9]
    [(rank, kind, message)] = said
    assert (rank, kind) == (0, "UserError") and "another process has ended" in message and "--resume" in message
    folder = tmp_path / "run" / "checkpoints"
    assert [checkpoint.step for checkpoint in checkpoints.complete(folder)] == [EVERY]
    # What a kill in the middle of writing leaves: a folder without its name, one without its marker, half a file.
    whole = checkpoints.complete(folder)[0].folder
    for number, name in ((17, "step-00000017.partial"), (18, "step-00000018"), (19, "step-00000019")):
        marker = shutil.copytree(whole, folder / name) / checkpoints.MARKER
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "step": number}))
    (folder / "step-00000018" / checkpoints.MARKER).unlink()
    cut = folder / "step-00000019" / "__1_0.distcp"
    cut.write_bytes(cut.read_bytes()[:-1])
    codes, said = train_together(tmp_path, resume=True)
    assert codes == [0, 0], said
    assert curve(tmp_path) == curve(together)
    assert [checkpoint.step for checkpoint in checkpoints.complete(folder)] == [3 * EVERY, STEPS]


def test_only_the_last_checkpoints_stay(together: Path) -> None:
    assert sorted(path.name for path in (together / "run" / "checkpoints").iterdir()) == [
        f"step-{3 * EVERY:08d}",
        f"step-{STEPS:08d}",
    ]


def test_a_checkpoint_of_two_processes_serves_one(together: Path, tmp_path: Path) -> None:
    shutil.copytree(together / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}")
    train(tmp_path, resume=True)
    assert torch.equal(losses(tmp_path)[: 3 * EVERY], losses(together)[: 3 * EVERY])
    torch.testing.assert_close(losses(tmp_path), losses(together), rtol=0, atol=1e-3)


def test_processes_name_the_same_damage(together: Path, tmp_path: Path) -> None:
    shutil.copytree(together / "run", tmp_path / "run")
    checkpoint = checkpoints.complete(tmp_path / "run" / "checkpoints")[-1]
    assert set(checkpoint.checksums) == {path.name for path in checkpoint.folder.iterdir()} - {checkpoints.MARKER}
    flipped(checkpoint.folder / "__1_0.distcp", 0.5)
    codes, said = train_together(tmp_path, resume=True)
    assert codes == [2, 2] and [kind for _, kind, _ in said] == ["UserError"] * 2
    assert all(f"{checkpoint.folder / '__1_0.distcp'}: damaged" in text for _, _, text in said), said


def test_a_checkpoint_of_another_text(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(alone / "run", tmp_path / "run")
    training, validation = data.python_text()
    monkeypatch.setattr(data, "python_text", lambda: (training[:-1], validation))
    with pytest.raises(UserError, match="continue with the same Python"):
        train(tmp_path, resume=True)


def test_machines_that_see_different_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def with_another(ends: Tensor, op: Any) -> None:  # a process that has found step 16
        ends.copy_(torch.maximum(ends, torch.tensor([16, -16])))

    monkeypatch.setattr(checkpoints.dist, "all_reduce", with_another)
    checkpoints.check_shared(checkpoints.Checkpoint(tmp_path, 16, {}), torch.device("cpu"))
    for other in (None, checkpoints.Checkpoint(tmp_path, 32, {})):
        with pytest.raises(UserError, match="see different checkpoints"):
            checkpoints.check_shared(other, torch.device("cpu"))


def test_torchrun(moebench: MoeBench, tmp_path: Path) -> None:
    """As the README has it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "harness.cli", "train", "tiny", "--steps", "5", "--output", str(tmp_path)]
    done = subprocess.run(command, env=moebench.environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert store.read(tmp_path / "training.jsonl")[0][0]["training"]["world_size"] == 2
    assert done.stdout.count("validation loss") == 1


def test_two_implementations_in_turns(command_line: CommandLine, tmp_path: Path) -> None:
    arguments = ("tiny", "--against", "torch_loop:nearest", "--rounds", 2, "--implementation", "torch_loop")
    code, said, error = command_line("train", *arguments, "--output", tmp_path, "--device", "cpu")
    assert code == 0 and not error and said.count("round ") == 2
    assert re.search(r"PyTorch loop by nearest [\d.]+ ms against PyTorch loop by top_k [\d.]+ ms", said)
    rows, problems = store.read(tmp_path / "training.jsonl")
    assert not problems
    assert [row["record"] for row in rows] == ["measurement", "measurement", "ratio"]
    assert [row["routing"]["method"] for row in rows] == ["nearest", "top_k", "nearest"]
    times = [row["latency_ms"] for row in rows[:2]]
    assert [summary["samples"] for summary in times] == [16, 16]
    ratio = rows[2]
    assert (ratio["numerator"], ratio["denominator"], ratio["samples"]) == ("torch_loop", "torch_loop", 2)
    assert ratio["denominator_routing"] == {**rows[0]["routing"], "method": "top_k"} and ratio["time_kind"] == "host"
    low, high = ratio["ci95"]
    assert low <= ratio["value"] <= high


def test_steps_against_their_own_like_must_hold_one() -> None:
    config = load_config("tiny")
    assert "1 lies outside" in pairs._doubt(config, config, 1.01, 1.02)
    assert "1 lies outside" in pairs._doubt(config, config, 0.97, 0.99)
    assert not pairs._doubt(config, config, 0.99, 1.01)
    for changes in ({"routing": "nearest"}, {"implementation": "scattermoe"}, {"m_tile": 64}):
        assert not pairs._doubt(config, load_config("tiny", changes), 1.01, 1.02)
    assert not pairs._doubt(config, None, 0.8, 0.9)


def test_all_processes_against_each_alone(tmp_path: Path) -> None:
    codes, said = train_together(tmp_path, against="alone", rounds=2, shard=1)
    assert codes == [0, 0], said
    rows, problems = store.read(tmp_path / "training.jsonl")
    assert not problems
    alone, together, ratio = rows
    assert [row["record"] for row in rows] == ["measurement", "measurement", "ratio"]
    assert alone["variant"] == "tiny, 2 layers, 4 sequences, 11 steps, 1 process"
    assert together["variant"] == "tiny, 2 layers, 8 sequences, 11 steps, 2 processes, sharded over 1"
    assert (ratio["variant"], ratio["denominator_variant"]) == (alone["variant"], together["variant"])
    assert ratio["numerator"] == ratio["denominator"] == "sonicmoe_torch" and ratio["samples"] == 2
    assert ratio["ci95"][0] <= ratio["value"] <= ratio["ci95"][1]
    for row, world in ((alone, 1), (together, 2)):
        assert row["latency_ms"]["samples"] == 16 and row["training"]["world_size"] == world
        per_step = row["latency_ms"]["median"] / 1e3
        assert row["training"]["tokens_per_s"] == pytest.approx(4 * world * 64 / per_step)
        assert "communication" not in row["training"]  # on a CPU


def test_a_corpus_that_ends_on_one_process_ends_on_all(tmp_path: Path) -> None:
    codes, said = train_together(tmp_path, run=read_past_the_end)
    assert codes == [0, 0], said
    assert [(tmp_path / f"read-{rank}").read_text() for rank in range(2)] == ["[[1, 1], None]"] * 2


def test_a_corpus_that_ends_with_the_run_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = data.PythonText.batches

    def ends(self: data.PythonText, step: int) -> Iterator[Tensor]:
        if step >= 5:
            raise UserError("corpus python: ended; train fewer --steps")
        return batches(self, step)

    monkeypatch.setattr(data.PythonText, "batches", ends)
    monkeypatch.setattr(profiled, "communicates", lambda _: True)
    train(tmp_path, steps=5, checkpoint_every=0)
    [row], problems = store.read(tmp_path / "training.jsonl")
    assert not problems and row["status"] == "ok" and "communication" not in row["training"]
    assert "communication was not measured: the corpus could not be read any further" in row["notes"]


def test_a_process_alone_waits_for_no_other(alone: Path, tmp_path: Path) -> None:
    codes, said = train_together(tmp_path, run=first_step_alone)
    assert codes == [0, 0], said
    assert float((tmp_path / "loss").read_text()) == pytest.approx(float(losses(alone)[0]), abs=1e-5)


def test_the_allocator_leaves_no_fragments(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for given in ({}, {names[0]: "backend:native"}, {names[1]: "backend:native"}):
        for name in names:
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        refused(command_line, tmp_path, "huge")
        found = {name: os.environ[name] for name in names if name in os.environ}
        assert found == (given or {names[0]: "expandable_segments:True"})


def test_a_shared_gpu_gives_losses_and_no_times(command_line: CommandLine, tmp_path: Path) -> None:
    arguments = ("tiny", "--steps", 2, "--losses-only", "--folder", tmp_path / "run", "--output", tmp_path)
    code, said, error = command_line("train", *arguments, "--device", "cpu")
    assert code == 0 and not error
    assert "step 2/2, loss" in said and "no times" in said and "/s" not in said
    [row], problems = store.read(tmp_path / "training.jsonl")
    assert not problems and row["status"] == "ok" and "latency_ms" not in row
    numbers = row["training"]
    assert [numbers[key] for key in ("tokens_per_s", "tokens_per_day_per_gpu", "mfu")] == [None] * 3
    assert numbers["loss"] > 0 and numbers["validation_loss"] > 0 and any("shared" in note for note in row["notes"])
    assert all("seconds" not in line for line in log.read(tmp_path / "run"))
    assert "--against compares times" in refused(
        command_line, tmp_path, "tiny", "--losses-only", "--against", "torch_loop"
    )


def test_curves_without_a_checkpoint_are_not_lost(command_line: CommandLine, tmp_path: Path) -> None:
    place = ("--folder", tmp_path / "run", "--output", tmp_path, "--device", "cpu", "--checkpoint-every", 0)
    code, said, _ = command_line("train", "tiny", "--steps", 2, *place)
    assert code == 0 and "no row: the first 3 steps are warm-up" in said
    before = curve(tmp_path)
    assert "curves of a run without a checkpoint" in refused(command_line, tmp_path, "tiny", "--steps", 2, *place)
    code, said, _ = command_line("train", "tiny", "--steps", 2, *place, "--resume")
    assert code == 0 and "all 2 steps are done already" in said
    error = refused(command_line, tmp_path, "tiny", "--steps", 3, *place, "--resume")
    assert "steps = 2 there, 3 here" in error and "--folder" in error
    assert curve(tmp_path) == before
    # What was stopped before its first checkpoint begins anew.
    path = tmp_path / "run" / log.FILE
    path.write_text(path.read_text().splitlines()[0] + "\n")
    code, said, _ = command_line("train", "tiny", "--steps", 2, *place, "--resume")
    assert code == 0 and "validation loss" in said and curve(tmp_path) == before


def test_a_failure_takes_the_place_of_its_own_kind(tmp_path: Path) -> None:
    """A timed step, its failure, and a run for losses alone with its failure are two measurements."""
    config = load_config("tiny")
    plugin = default_registry().get(config.implementation)
    found = []
    for losses_only in (False, True):
        base = rows.base_row(config, plugin, 1, "cpu", losses_only)
        times = None if losses_only else [5.0, 4.0]
        found.append([rows.measured_row(base, config, 1, times, 2.5, 2.4, None, [], None),
                      rows.failed_row(base, "crashed", "it broke")])  # fmt: skip
    for row in (*found[0], *found[1]):
        rows.append(tmp_path, row)
    stored, problems = store.read(tmp_path / rows.FILE)
    assert not problems
    timed, its, losses_alone, its_failure = stored
    assert [store.latest([first, then]) for first, then in ((timed, its), (losses_alone, its_failure))] == [
        [its], [its_failure]
    ]  # fmt: skip
    assert store.latest([its, {**timed, "timestamp": utc_now()}])[0]["status"] == "ok"
    assert len(store.latest([timed, losses_alone])) == len(store.latest([timed, its_failure])) == 2
    assert len(store.latest([losses_alone, its])) == 2


def refused(command_line: CommandLine, tmp_path: Path, *arguments: object) -> str:
    """The one line of a run that ends with exit code 2."""
    code, _, error = command_line("train", *arguments, "--output", tmp_path, "--device", "cpu")
    assert code == 2, error
    assert error.startswith("moebench: ") and error.count("\n") == 1, error
    return error


def test_running_out_of_memory(command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr(Transformer, "forward", too_much)
    error = refused(command_line, tmp_path, "tiny")
    assert all(part in error for part in ("out of memory", "--layers", "--recompute", "--micro-batch"))
    [row], problems = store.read(tmp_path / "training.jsonl")
    assert not problems and row["status"] == "out_of_memory" and "training" not in row


def test_a_crash_is_a_row_and_no_message_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any) -> Any:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(Transformer, "forward", breaks)
    with pytest.raises(RuntimeError, match="illegal"):
        train(tmp_path)
    [row], _ = store.read(tmp_path / "training.jsonl")
    assert row["status"] == "crashed" and "illegal memory access" in row["reason"]


def test_a_loss_that_is_no_number(command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nan = torch.tensor(float("nan"), requires_grad=True)
    monkeypatch.setattr(Transformer, "forward", lambda self, *_: (nan * self.norm.weight.sum(), nan * 0))
    monkeypatch.setattr("harness.training.loop.Trainer._check_gradients", lambda _: None)
    assert "the loss is nan at step 1" in refused(command_line, tmp_path, "tiny")


def test_a_checkpoint_of_another_configuration(alone: Path, command_line: CommandLine, tmp_path: Path) -> None:
    same = ("tiny", "--steps", STEPS, "--checkpoint-every", EVERY, "--folder", alone / "run")
    assert "continue it with --resume" in refused(command_line, tmp_path, *same)
    for option, value, said in (
        ("--seed", 3, "seed = 0 there, 3 here"),
        ("--implementation", "torch_loop", "implementation = 'sonicmoe_torch' there, 'torch_loop' here"),
    ):
        error = refused(command_line, tmp_path, *same, "--resume", option, value)
        assert said in error and "--folder" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("huge",), "choose from 1.4B, 1.4B-sparse, 7B, quality, quality-pilot, tiny"),
        (("tiny", "--implementation", "sonic"), "unknown implementation"),
        (("tiny", "--implementation", "sonicmoe_triton"), "does not run on cpu"),
        (("tiny", "--routing", "nearest"), "no moe_layer with the routing method nearest"),
        (("tiny", "--routing", "sideways"), "choose from top_k"),
        (("tiny", "--batch", 9), "must be a multiple of micro_batch = 4"),
        (("tiny", "--layers", 0), "layers = 0 must be at least 1"),
        (("tiny", "--shard", 2), "shard = 2: must divide the number of processes, 1"),
        (("tiny", "--shard", -1), "shard = -1 must be at least 0"),
        (("tiny", "--corpus", "no/such"), "pip install -e '.[training]'"),
        (("tiny", "--timeout", 0), "--timeout 0"),
        (("tiny", "--against", "alone"), "needs several processes"),
    ],
)
def test_what_cannot_be_trained(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Any, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert said in refused(command_line, tmp_path, *arguments)


PLUGIN = """
from harness.interface import Implementation
from implementations._template import _TemplateLayer

class Layer(_TemplateLayer):
    {method}

class Plugin(Implementation):
    name, label, upstream, licence = "spoilt", "Spoilt", "none", "none"
    devices, dtypes = ("cpu",), ("float32",)

    def build(self, problem):
        {build}
"""
BUILT = "return Layer(problem)"


@pytest.mark.parametrize(
    ("method", "build", "said"),
    [
        (
            "def forward(self, x): return super().forward(x).detach() + 0 * x",
            BUILT,
            "Spoilt cannot be trained: its layer gives no gradient for blocks.0.experts.weights.0",
        ),
        (
            "def parameters(self): return [w.clone() for w in super().parameters()]",
            BUILT,
            "Spoilt cannot be trained: it holds parameter 0 where it cannot be replaced",
        ),
        (
            "def parameters(self): return list(self.kept.values())",
            "layer = Layer(problem); layer.kept = dict(vars(layer)); layer.kept.pop('k'); return layer",
            "",
        ),
    ],
)
def test_a_layer_that_cannot_be_trained(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, build: str, said: str
) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    (plugins / "spoilt.py").write_text(PLUGIN.format(method=method, build=build))
    monkeypatch.setattr("conftest.FAKE_PLUGINS", plugins)
    arguments = ("tiny", "--implementation", "spoilt", "--steps", 1)
    if said:
        assert said in refused(command_line, tmp_path, *arguments)
    else:  # the control: the same layer, whose weights lie in two places
        assert command_line("train", *arguments, "--output", tmp_path, "--device", "cpu")[0] == 0


def test_a_log_that_was_cut_off(tmp_path: Path) -> None:
    line = {"step": 1, "loss": 2.0, "tokens": 64}
    (tmp_path / log.FILE).write_text(json.dumps(line) + '\n{"step": 2, "lo')
    assert log.read(tmp_path) == [line]
