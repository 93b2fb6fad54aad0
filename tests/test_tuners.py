"""Where nothing is timed, tuners take their first configuration that runs; where something may be, they are as ever."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from conftest import ROOT
from fake_conformance import MET
from test_runner import rows_of, write_sweep
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from harness import runner, tuners
from harness.check import ask
from harness.conformance import suite
from harness.measure import notes_of
from harness.points import point_to_dict
from harness.process import WorkerProcess
from harness.registry import load_registry
from harness.session import works_of
from harness.shapes import MoEShape
from harness.sweep import load_sweep
from harness.timing import TimingSettings
from harness.tuners import nothing_is_timed, take_first
from harness.worker import UNTIMED
from implementations import _sonicmoe_official_kernels as official_kernels
from implementations.sonicmoe_official import SonicMoEOfficial

pytestmark = pytest.mark.usefixtures("forked_workers")

#: Of the fake kernel: the largest is the fastest.
BLOCKS = (16, 32, 64, 128)
PLUGIN = """
from harness import tuners
from harness.interface import Implementation, Layer, Problem
from implementations._template import _TemplateLayer


class Says(Implementation):
    name, label, upstream, licence = "says", "Says", "none", "none"
    devices, dtypes = ("cpu",), ("float32",)

    def build(self, problem: Problem) -> Layer:
        layer = _TemplateLayer(problem)
        layer.notes = ("untimed",) if tuners.untimed() else ("timed",)
        return layer
"""


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker does for good ends here with the test."""
    for name in ("_mode", "_taken", "_found"):
        monkeypatch.setattr(tuners, name, getattr(tuners, name))
    monkeypatch.setattr(Autotuner, "prune_configs", Autotuner.prune_configs)
    monkeypatch.setattr(Autotuner, "check_disk_cache", Autotuner.check_disk_cache)


class FakeKernel:
    """`triton.autotune` wraps it. `asked`: the block of each launch that was tried; `ran`: of each that came about."""

    arg_names = ("x", "n")

    def __init__(self, too_large: Sequence[int] = ()) -> None:
        def kernel(x: object, n: object, BLOCK: int) -> None:
            raise AssertionError

        self.fn = kernel
        self.too_large = too_large
        self.asked: list[int] = []
        self.ran: list[int] = []

    def run(self, x: torch.Tensor, n: int, *, BLOCK: int, grid: Any, warmup: bool, **options: int) -> int:
        assert not warmup and options["num_warps"] == 4
        self.asked.append(BLOCK)
        if BLOCK in self.too_large:
            raise OutOfResources(BLOCK, 8, "shared memory")
        self.ran.append(BLOCK)
        x += n
        return BLOCK

    def warmup(self, x: object, n: int, *, BLOCK: int, **options: object) -> int:
        self.asked.append(BLOCK)
        return BLOCK

    def bench(self, call: Callable[[], None], quantiles: Sequence[float]) -> list[float]:
        call()
        return [1 / self.ran[-1]] * len(quantiles)


def tuned(kernel: FakeKernel, blocks: Sequence[int] = BLOCKS, **options: Any) -> Any:
    configs = [triton.Config({"BLOCK": block}) for block in blocks]
    return triton.autotune(configs, key=["n"], do_bench=kernel.bench, **options)(kernel)


def launch(tuner: Any, n: int = 3) -> int:
    """The block that the call at this key went with."""
    return int(tuner[(1,)](torch.zeros(4), n))


def test_the_first_that_runs_is_taken_and_no_other_tried() -> None:
    nothing_is_timed()
    kernel = FakeKernel(too_large=(16, 32))
    tuner = tuned(kernel)
    assert launch(tuner) == 64
    assert set(kernel.asked) == {16, 32, 64} and kernel.asked.count(16) == kernel.asked.count(32) == 1
    kernel.asked.clear()
    # It stays with its choice; another key is another choice.
    assert launch(tuner) == 64 and kernel.asked == [64]
    kernel.too_large = ()
    assert launch(tuner, n=5) == 16 and launch(tuner) == 64


def test_a_tuner_that_was_made_before_is_told_too() -> None:
    kernel = FakeKernel()
    tuner = tuned(kernel)
    nothing_is_timed()
    assert launch(tuner) == 16 and set(kernel.asked) == {16}


def test_tensors_that_a_trial_changed_are_restored() -> None:
    nothing_is_timed()
    tuner = tuned(FakeKernel(too_large=(16,)), restore_value=["x"])
    x = torch.zeros(4)
    tuner[(1,)](x, 3)
    assert x.tolist() == [3] * 4


def test_where_nothing_runs_the_tuner_fails_as_it_would() -> None:
    messages = []
    for untimed in (False, True):
        if untimed:
            nothing_is_timed()
        kernel = FakeKernel(too_large=BLOCKS)
        with pytest.raises(OutOfResources) as refused:
            launch(tuned(kernel))
        assert set(kernel.asked) == set(BLOCKS)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


def test_upstreams_own_pruning_comes_first() -> None:
    nothing_is_timed()
    kernel = FakeKernel(too_large=(32,))
    prune = {"early_config_prune": lambda configs, named, **more: configs[1:]}
    assert launch(tuned(kernel, prune_configs_by=prune)) == 64 and 16 not in kernel.asked
    only = FakeKernel()
    assert launch(tuned(only, blocks=BLOCKS[:1])) == 16 and only.asked == [16]


def test_where_something_may_be_timed_all_are() -> None:
    before = vars(Autotuner)["prune_configs"]
    assert not take_first("triton.runtime.autotuner") and vars(Autotuner)["prune_configs"] is before
    kernel = FakeKernel(too_large=(16,))
    assert launch(tuned(kernel)) == 128 and set(kernel.asked) == set(BLOCKS)


def test_saying_it_twice_is_harmless() -> None:
    nothing_is_timed()
    once = vars(Autotuner)["prune_configs"]
    nothing_is_timed()
    assert take_first("triton.runtime.autotuner") and vars(Autotuner)["prune_configs"] is once
    kernel = FakeKernel()
    assert launch(tuned(kernel)) == 16
    # The trial, the tuner's own timing of the one that is left, the call.
    assert kernel.asked == [16] * 3


def test_compiling_alone_runs_nothing() -> None:
    nothing_is_timed()
    kernel = FakeKernel()
    tuned(kernel).warmup(torch.float32, 3, grid=(1,))
    assert kernel.asked == list(BLOCKS) and not kernel.ran


def test_an_untimed_choice_is_kept_on_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def check_disk_cache(tuner: Any, key: Any, configs: Sequence[Any], benchmark: Callable[[], None]) -> bool:
        asked.append(len(configs))
        benchmark()
        return False

    monkeypatch.setattr(Autotuner, "check_disk_cache", check_disk_cache)

    def cached() -> Any:
        tuner = tuned(FakeKernel())
        tuner.cache_results = True  # the interpreter's kernels have none
        return tuner

    assert launch(cached()) == 128 and asked == [len(BLOCKS)]
    nothing_is_timed()
    assert launch(cached()) == 16 and asked == [len(BLOCKS)]


def test_what_was_found_on_disk_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    disk: dict[Any, Any] = {}

    def check_disk_cache(tuner: Any, key: Any, configs: Sequence[Any], benchmark: Callable[[], None]) -> bool:
        if key in disk:
            tuner.cache[key] = disk[key]
            return True
        benchmark()
        disk[key] = tuner.cache[key]
        return False

    monkeypatch.setattr(Autotuner, "check_disk_cache", check_disk_cache)
    tuners.watch_found()
    tuners.watch_found()  # twice is harmless

    def cached() -> Any:
        tuner = tuned(FakeKernel())
        tuner.cache_results = True  # the interpreter's kernels have none
        return tuner

    tuner = cached()
    assert launch(tuner) == launch(tuner) == 128 and tuners.found_note() == ""
    tuner = cached()  # as another process would
    assert launch(tuner) == launch(tuner) == 128
    assert tuners.found_note() == "1 choice of Triton's tuner found on the machine by this process, not made in it"
    assert launch(tuner, 4) == 128 and tuners.found_note().startswith("1 choice of")
    assert launch(cached(), 4) == 128 and tuners.found_note().startswith("2 choices of")


def test_a_row_tells_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what the layer says, each sentence once."""
    monkeypatch.setattr(tuners, "_found", 3)
    layer: Any = SimpleNamespace(notes=("its own",))
    assert notes_of([layer, layer], tuners.found_note(), "") == [
        "its own", "3 choices of Triton's tuner found on the machine by this process, not made in it",
    ]  # fmt: skip


def test_all_are_launched_once_where_all_are_to_be_compiled() -> None:
    tuners.all_is_compiled()
    assert tuners.untimed()
    kernel = FakeKernel(too_large=(32,))
    tuner = tuned(kernel)
    tuner.cache_results = True  # a choice that no time is behind must be on no disk
    before = len(kernel.asked)
    assert launch(tuner) == 16 and not tuner.cache_results
    # Each once, then the call itself.
    assert kernel.asked[before:] == [*BLOCKS, 16]
    # Of a kernel of one configuration that is all there ever is.
    assert launch(tuned(FakeKernel(), blocks=BLOCKS[:1])) == 16


def test_own_choices_are_as_ever_and_on_no_disk() -> None:
    tuners.tuners_choose()
    assert tuners.untimed() and not take_first("triton.runtime.autotuner")
    kernel = FakeKernel(too_large=(16,))
    tuner = tuned(kernel)
    tuner.cache_results = True
    assert launch(tuner) == 128 and set(kernel.asked) == set(BLOCKS) and not tuner.cache_results


def test_who_takes_the_first_is_told() -> None:
    told: list[str] = []
    nothing_is_timed(lambda: told.append("taken"))
    kernel = FakeKernel(too_large=BLOCKS[:1])
    assert launch(tuned(kernel, blocks=BLOCKS[1:2])) == 32 and not told
    tuner = tuned(kernel)
    assert launch(tuner) == 32 and told == ["taken"]
    assert launch(tuner) == 32 and told == ["taken"]


# A tuner modelled on Triton's, as quack's is: it calls a function, swallows every error and keeps what it found.


class QuackLike:
    def __init__(self, fn: Callable[..., str], names: Sequence[str], configs: Sequence[str], folder: Path) -> None:
        self.fn, self.arg_names, self.configs, self.folder = fn, names, configs, folder
        self.cache: dict[str, str] = {}
        self.cache_results = True
        self.precompiled: list[str] = []

    def prune_configs(self, kwargs: dict[str, Any]) -> list[str]:
        return [config for config in self.configs if config != kwargs.get("without")]

    def _bench(self, *args: Any, config: str, **kwargs: Any) -> list[float]:
        try:
            self.fn(*args, config=config, **kwargs)
        except ValueError:
            return [math.inf] * 3
        return [1 / ord(config[0])] * 3

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        key = str(sorted({**self.nargs, **kwargs}.items()))
        if key not in self.cache:
            configs = self.prune_configs(kwargs)
            self.precompiled += configs
            times = {config: self._bench(*args, config=config, **kwargs) for config in configs}
            self.cache[key] = min(times, key=lambda config: times[config])
            if self.cache_results:
                (self.folder / f"{len(self.cache)}.autotune.json").write_text(str(times))
        found = self.fn(*args, config=self.cache[key], **kwargs)
        self.nargs = {}
        return found


@pytest.fixture
def quack_like(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[QuackLike]]:
    tuner = type("Autotuner", (QuackLike,), {})
    module = ModuleType("quack_like")
    module.Autotuner = tuner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quack_like", module)
    yield tuner
    assert not hasattr(QuackLike.prune_configs, "takes_first")


@pytest.mark.parametrize("untimed", [False, True])
def test_a_tuner_like_tritons(quack_like: type[QuackLike], tmp_path: Path, untimed: bool) -> None:
    if untimed:
        nothing_is_timed()
    assert take_first("quack_like") is untimed
    calls: list[tuple[int, int, str]] = []

    def gemm(a: int, b: int, config: str, without: str = "") -> str:
        calls.append((a, b, config))
        if config == "b":
            raise ValueError("no such tile")
        return config

    tuner = quack_like(gemm, ("a", "b", "without"), ["a", "b", "c", "d"], tmp_path)
    assert tuner(1, b=2, without="a") == ("c" if untimed else "d")
    assert {call[:2] for call in calls} == {(1, 2)} and "a" not in {call[2] for call in calls}
    # Others are not compiled either, beside it in processes of their own say.
    assert tuner.precompiled == (["c"] if untimed else ["b", "c", "d"])
    assert len(list(tmp_path.iterdir())) == (0 if untimed else 1)


def test_a_tuner_like_tritons_chooses_itself(quack_like: type[QuackLike], tmp_path: Path) -> None:
    tuners.tuners_choose()
    assert not take_first("quack_like")
    tuner = quack_like(lambda a, config: str(config), ("a",), ["b", "c"], tmp_path)
    assert tuner(1) == "c" and tuner.precompiled == ["b", "c"] and not list(tmp_path.iterdir())


def test_a_tuner_like_tritons_takes_its_first_where_all_are_to_be_compiled(
    quack_like: type[QuackLike], tmp_path: Path
) -> None:
    tuners.all_is_compiled()
    assert take_first("quack_like")
    tuner = quack_like(lambda a, config: str(config), ("a",), ["b", "c"], tmp_path)
    assert tuner(1) == "b" and tuner.precompiled == ["b"] and not list(tmp_path.iterdir())


def test_without_the_names_it_tunes_as_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_timed()
    no_bench = type("Autotuner", (), {"prune_configs": lambda tuner, kwargs: []})
    for members in ({}, {"Autotuner": no_bench}, {"Autotuner": object}):
        monkeypatch.setitem(sys.modules, "other_tuner", SimpleNamespace(**members))
        assert not take_first("other_tuner")
    assert not hasattr(no_bench.prune_configs, "takes_first")
    assert not take_first("no_such_package.autotuner")
    monkeypatch.setitem(sys.modules, "triton.runtime.autotuner", None)
    nothing_is_timed()


# Who says it.


@pytest.mark.parametrize("kind", UNTIMED)
def test_who_times_nothing_says_it_and_a_sweep_does_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process for all jobs, which the commands never do: the worst that could happen."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "says.py").write_text(PLUGIN)
    registry = load_registry(extra_folders=[tmp_path / "plugins"])
    sweep = load_sweep(str(write_sweep(tmp_path, "timed", ["says"], ["32,16,8,4,2"])), registry)
    worker = WorkerProcess({"MOEBENCH_PLUGINS": str(tmp_path / "plugins")})
    close = worker.close
    monkeypatch.setattr(worker, "close", lambda patience_s=0.0: None)
    monkeypatch.setattr(runner, "WorkerProcess", lambda: worker)
    monkeypatch.setattr(suite, "WorkerProcess", lambda stop: worker)

    def timed(name: str) -> list[dict[str, Any]]:
        path = tmp_path / f"{name}.jsonl"
        settings = TimingSettings(**sweep.options.settings())
        runner.Runner("timed", works_of(sweep), registry, path, settings=settings, time_limit_s=60, resume=False).run()
        return rows_of(path)

    try:
        first = timed("first")
        assert first and all(row["status"] == "ok" and row["notes"] == ["timed"] for row in first)
        if kind == "conformance":
            (met,) = suite.Suite([registry.get("says")], MET[:1], "cpu", tmp_path / "conformance.jsonl").run()
            assert met["status"] == "ok" and met["notes"][-1] == "untimed"
        else:
            (work, *_) = works_of(sweep)
            job = {"kind": kind, "point": point_to_dict(work.point), "passes": [], "bases": {}, "settings": {}}
            assert ask(worker, job, "checked", 60)[1]["event"] == "checked"
        for row in timed("second"):
            assert row["status"] == "crashed" and "measure in a fresh one" in row["reason"]
    finally:
        close(patience_s=1.0)


@pytest.mark.parametrize("untimed", [False, True])
def test_the_official_kernels_tuner_is_told_once_its_folder_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untimed: bool
) -> None:
    # As the package: it reads the folder's name while it is imported.
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "__init__.py").write_text("import os\nFOLDER = os.environ['QUACK_CACHE_DIR']\n")
    (tmp_path / "quack" / "autotuner.py").write_text(
        "class Autotuner:\n    def prune_configs(self, kwargs): ...\n    def _bench(self, *args, config): ...\n"
    )
    for name in ("quack", "quack.autotuner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    # Unset, and so again after the test.
    monkeypatch.setenv("QUACK_CACHE_DIR", "")
    monkeypatch.delenv("QUACK_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    reduction = ModuleType("sonicmoe.functional.reduction_over_k_gather")
    reduction.token_gather_sum_kernel = SimpleNamespace(cache={})  # type: ignore[attr-defined]
    for name in ("sonicmoe", "sonicmoe.functional"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, reduction.__name__, reduction)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    layer = SimpleNamespace(call_once=lambda problem: None, notes=[])
    monkeypatch.setattr(official_kernels, "build", lambda problem, flags: layer)
    if untimed:
        nothing_is_timed()
    point = SimpleNamespace(
        operation="grouped_gemm", layer=SimpleNamespace(router_convention="topk_softmax"), routing=None
    )
    problem = SimpleNamespace(shape=MoEShape(4, 8, 8, 8, 2), forward_only=True, point=point, routing=None)
    SonicMoEOfficial().build(problem)  # type: ignore[arg-type]
    tiles = "the first of the tuner's that ran, none timed"
    told = [note for note in layer.notes if note.startswith("tiles of the six GEMMs: ")]
    assert [tiles in note for note in told] == [untimed]
    found = sys.modules.get("quack.autotuner")
    assert (found is not None and hasattr(found.Autotuner.prune_configs, "takes_first")) is untimed
    monkeypatch.delitem(sys.modules, "quack", raising=False)
    monkeypatch.delitem(sys.modules, "quack.autotuner", raising=False)


def test_no_kernel_of_ours_is_tuned_at_its_call() -> None:
    """What the suite says of them is of the configurations that timed rows have."""
    sources = [*(ROOT / "implementations").rglob("*.py"), *(ROOT / "harness").rglob("*.py")]
    assert sources and not [path for path in sources if "triton.autotune(" in path.read_text(encoding="utf-8")]


def test_tiles_that_were_found_are_told_from_tuned_ones() -> None:
    told = {tuned: tuners.tiles_found(tuners.tiles_note(tuned, tuners.QUACK_CACHE)) for tuned in (0, 2, 5, 6, 10, 12)}
    assert told == {0: True, 2: True, 5: True, 6: False, 10: False, 12: False}
    assert not tuners.tiles_found(tuners.tiles_note(0, "results/a_gpu/tuning/sonicmoe_official.json"))
    assert not tuners.tiles_found("another note")
