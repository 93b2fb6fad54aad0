"""moebench profile: what it shows of a call, the line for Nsight Compute, and one line where it can show nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAKE_PLUGINS, RightLayer, point_of, problem_of
from rich.console import Console
from test_cli import assert_refused

from harness import one_call, profile
from harness.correctness import Correctness, WrongResult
from harness.measure import Built, Context
from harness.process import WorkerProcess
from harness.profiling import KernelInterval
from harness.registry import default_registry, load_registry

pytestmark = pytest.mark.usefixtures("forked_workers")

Run = Callable[..., tuple[int, str, str]]
SIZES = ("--shape", "32,16,8,4,2")


@pytest.fixture(scope="module", autouse=True)
def _fake_plugins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MOEBENCH_PLUGINS", str(FAKE_PLUGINS))
        yield


@pytest.fixture
def ready(one_worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """All points of this file in one worker."""
    monkeypatch.setattr(profile, "WorkerProcess", lambda: one_worker)


def lines_of(out: str) -> dict[str, list[str]]:
    """Cells of the printed table by name."""
    rows = [line.split() for line in out.splitlines() if line.rstrip().endswith("%")]
    return {" ".join(row[:-3]): row[-3:] for row in rows}


@pytest.mark.usefixtures("ready")
def test_the_operators_of_a_cpu(command_line: Run, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    code, out, err = command_line("profile", "torch_loop", *SIZES, "--pass", "forward")
    assert (code, err) == (0, "")
    assert "torch_loop moe_layer, forward, 32,16,8,4,2, float32, cpu" in out
    lines = lines_of(out)
    assert "role" not in out and not any("Backward" in name for name in lines)
    # The router's product, and three for each of four experts.
    assert lines["aten::mm"][0] == "13"
    assert sum(float(cells[2].rstrip("%")) for cells in lines.values()) == pytest.approx(100, abs=2)
    assert "No row is written" in out and sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("ready")
def test_a_chrome_trace_holds_the_pass_alone(command_line: Run, tmp_path: Path) -> None:
    for pass_, has in (("backward", True), ("forward", False)):
        file = tmp_path / f"{pass_}.json"
        code, out, _ = command_line("profile", "torch_loop", *SIZES, "--pass", pass_, "--chrome-trace", file)
        assert code == 0 and f"wrote {file}" in out
        names = [event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]]
        assert any("Backward" in name for name in names) == has
        assert ("aten::topk" in names) != has
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backward.json", "forward.json"]


@pytest.mark.usefixtures("ready")
def test_a_single_kernel_has_a_forward_alone(command_line: Run) -> None:
    code, out, _ = command_line("profile", "torch_kernels", *SIZES, "--operation", "topk_router")
    assert code == 0 and "torch_kernels topk_router, forward," in out and "aten::topk" in lines_of(out)


@pytest.mark.usefixtures("ready")
def test_a_wrong_layer_is_not_shown(command_line: Run, tmp_path: Path) -> None:
    code, out, err = command_line("profile", "fake_wrong", *SIZES, "--chrome-trace", tmp_path / "trace.json")
    assert (code, err) == (3, "") and out.startswith("wrong_result fake_wrong moe_layer, forward + backward, 32,")
    assert out.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_a_crash_is_a_line(command_line: Run) -> None:
    code, out, err = command_line("profile", "fake_segfault", *SIZES)
    assert (code, err) == (3, "") and out.count("\n") == 1
    assert out.startswith("crashed fake_segfault moe_layer, forward + backward, 32,16,8,4,2, float32, cpu: the worker")
    assert "died while in build (ended by signal SIGSEGV)" in out


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "fake_unsupported",
            "unsupported fake_unsupported moe_layer, forward + backward, 32,16,8,4,2, float32, cpu: it",
        ),
        ("fake_missing_package", "get it with: pip install no-such-thing"),
    ],
)
def test_a_refusal_is_a_line(command_line: Run, name: str, line: str) -> None:
    code, out, err = command_line("profile", name, *SIZES)
    assert (code, err) == (3, "") and line in out and out.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("torch_lop",), "did you mean torch_loop?"),
        (("torch_loop", "--shape", "1,2"), "expected five whole numbers"),
        (("torch_loop", "--operation", "moe_layr"), "did you mean moe_layer?"),
        (("torch_loop", "--operation", "topk_router"), "--operation topk_router: torch_loop does not offer it"),
        (("torch_loop", "--variant", "up"), "--variant up: moe_layer has no variants"),
        (("torch_kernels", "--operation", "grouped_gemm", "--variant", "upp"), "did you mean up?"),
        (("torch_kernels", "--pass", "backward"), "has no such pass; choose from forward"),
        (("torch_loop", "--pass", "sideways"), "--pass sideways: choose from forward"),
        (("torch_loop", "--dtype", "float3"), "--dtype float3"),
        (("torch_loop", "--device", "tpu"), "--device tpu"),
        (("torch_loop", "--routing", "neares"), "did you mean nearest?"),
        (("torch_loop", "--distribution", "zebra"), "--distribution zebra"),
        (("torch_loop", "--time-limit", "0"), "--time-limit 0: must be more than 0"),
        (("torch_loop", "--chrome-trace", "."), ".: cannot be written: not a file"),
        (("torch_loop", "--chrome-trace", "there", "--ncu"), "--ncu and --chrome-trace: leave one of both out"),
        (("torch_loop", "--chrome-trace", "/none/there"), "/none/there: cannot be written: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_gets_one_line(command_line: Run, arguments: tuple[str, ...], part: str) -> None:
    assert_refused(command_line("profile", *arguments), part)


def test_a_pipe_is_not_replaced_by_a_file(command_line: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert_refused(command_line("profile", "torch_loop", *SIZES, "--chrome-trace", pipe), f"{pipe}: cannot be written")
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


# For a profiler that starts the process itself.


def test_the_line_for_ncu_runs_without_it(
    command_line: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command_line(
        "profile", "torch_loop", *SIZES, "--pass", "backward", "--distribution", "skewed", "--ncu"
    )
    words = shlex.split(out.splitlines()[0])
    assert code == 0 and words[:3] == ["ncu", "--profile-from-start", "off"] and "on a CPU it will find none" in out
    module = words.index("-m") + 1
    assert words[module - 2] == sys.executable and "--distribution skewed" in out
    monkeypatch.setattr("sys.argv", words[module:])
    monkeypatch.delitem(sys.modules, words[module])
    runpy.run_module(words[module], run_name="__main__")
    assert capsys.readouterr().out == "called once: torch_loop, backward, 32,16,8,4,2, float32, cpu\n"


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["torch_loop", "--shape", "1,2"], 2, "one_call: shape '1,2': expected five whole numbers"),
        (["fake_unsupported", *SIZES], 3, "unsupported: it takes d of at most 8"),
        (["fake_wrong", *SIZES], 3, "wrong_result: "),
    ],
)
def test_a_call_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, line: str
) -> None:
    monkeypatch.setattr("sys.argv", ["one_call", *arguments])
    with pytest.raises(SystemExit) as end:
        one_call.main()
    err = capsys.readouterr().err
    assert end.value.code == code and err.startswith(line) and err.count("\n") == 1


@pytest.mark.parametrize("pass_", ["forward", "backward", "forward_backward"])
def test_what_belongs_to_the_pass_runs_inside(monkeypatch: pytest.MonkeyPatch, pass_: str) -> None:
    problem = problem_of("16,16,8,4,2")
    layer = RightLayer(problem)
    said: list[str] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        said.append("in")
        yield
        said.append("out")

    forward, backward = layer.forward, one_call.run_backward
    monkeypatch.setattr(layer, "forward", lambda x: (said.append("forward"), forward(x))[1])
    monkeypatch.setattr(one_call, "run_backward", lambda *its: (said.append("backward"), backward(*its))[1])
    one_call.call(layer, problem, pass_, around())
    assert (
        said
        == {
            "forward": ["in", "forward", "out"],
            "backward": ["forward", "in", "backward", "out"],
            "forward_backward": ["in", "forward", "backward", "out"],
        }[pass_]
    )


def test_the_switch_encloses_the_call_from_an_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: said.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("stop"))
    with one_call._switched_on("cuda"):
        said.append("call")
    assert said == ["wait", "start", "call", "wait", "stop"]


# What a GPU adds: roles, the share without one, busy time.


def test_a_gpus_kernels_have_roles_and_a_busy_time(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = default_registry().get("sonicmoe_torch")
    windows = {
        f"p:{pass_}:{index}": [KernelInterval("nvjet_gemm", 0, 3000), KernelInterval("mystery[red]", 2000, 4000)]
        for index in range(8)
        for pass_ in ("forward", "backward")
    }
    problem = problem_of("16,16,8,4,2")
    built = Built(RightLayer(problem), [problem], Correctness(), 0.0, 0, plugin)
    monkeypatch.setattr(one_call, "warmed", lambda *its: built)
    monkeypatch.setattr(one_call, "profiled_windows", lambda *its: windows)
    monkeypatch.setattr(plugin, "kernel_role", lambda name: "up" if "gemm" in name else None, raising=False)
    point = point_of("16,16,8,4,2")
    on_gpu = replace(point, device="cuda")
    context = Context(lambda name: None)
    found = one_call.profiled(on_gpu, "forward", plugin, context, "")
    assert found["busy_us"] == pytest.approx(4.0)
    assert one_call.profiled(on_gpu, "forward_backward", plugin, context, "")["busy_us"] == pytest.approx(8.0)
    out = Console(file=io.StringIO(), width=120)
    profile._print(out, "what", found, "cuda")
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert lines_of(text) == {"nvjet_gemm 1": ["3.0", "up", "60.0%"], "mystery[red] 1": ["2.0", "–", "40.0%"]}
    assert "Sum 5.0 µs of one call, of which 40.0% has no role" in text and "runs for 4.0 µs" in text


def test_a_wrong_layer_is_not_warmed() -> None:
    plugin = load_registry().get("fake_wrong")
    with pytest.raises(WrongResult):
        one_call.warmed(point_of("16,16,8,4,2"), "forward", plugin, Context(lambda name: None))


def test_many_small_kernels_share_a_line_and_long_names_lose_their_middle() -> None:
    name = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<int>, std::array<char*, 3ul> >"
    )
    kernels: list[dict[str, Any]] = [{"name": name, "calls": 1, "us": 100.0, "role": None}]
    kernels += [{"name": f"small_{index}", "calls": 2, "us": 1.0, "role": None} for index in range(100)]
    out = Console(file=io.StringIO(), width=120)
    profile._print(out, "what", {"kernels": kernels, "busy_us": None}, "cpu")
    assert isinstance(out.file, io.StringIO)
    lines = lines_of(out.file.getvalue())
    assert lines["69 others"] == ["138", "69.0", "34.5%"] and len(lines) == 33
    (long,) = (line for line in lines if line.startswith("vectorized"))
    assert len(long) == profile._NAME and "…" in long


@pytest.mark.usefixtures("ready")
def test_a_hang_is_a_line(command_line: Run) -> None:
    """The last test: the worker that all others use is still at it."""
    code, out, err = command_line("profile", "fake_hangs", *SIZES, "--time-limit", "0.2")
    assert (code, err) == (3, "") and out.count("\n") == 1
    assert out.startswith("timeout fake_hangs moe_layer, ") and "not finished after 0.2 s, while in build" in out
