"""Direct launches on a GPU: the same bits as Triton's own launches, wherever a call comes from."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.interface import Layer, Problem
from harness.registry import ROOT

from .common import HEADLINE, MEDIUM, assert_equal, built, run

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.jit import JITFunction


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched Triton's way."""
    names: list[str] = []
    ordinary = JITFunction.run

    def noted(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
        names.append(self.__name__)
        return ordinary(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", noted)
    return names


def test_a_second_call_asks_triton_nothing_and_finds_the_same(asked: list[str]) -> None:
    layer, problem = built(MEDIUM)
    first = run(layer, problem)
    asked.clear()
    assert_equal(run(layer, problem), first)
    assert not asked


def test_another_stream_and_another_thread_find_the_same() -> None:
    layer, problem = built(MEDIUM)
    want = run(layer, problem)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_side = run(layer, problem)
    side.synchronize()
    assert_equal(on_side, want)
    found: list[list[Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(run(layer, problem)))
    thread.start()
    thread.join()
    assert_equal(found[0], want)


def test_two_threads_at_once_find_what_each_finds_alone() -> None:
    """Of a layer that nobody has run yet, so that they meet while launchers are made and kernels compiled, too."""
    size = "1000,384,128,8,3"
    pairs = [built(size), built(size)]
    torch.cuda.synchronize()
    together = threading.Barrier(len(pairs))

    def work(layer: Layer, problem: Problem) -> list[list[Tensor]]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            found = []
            for _ in range(5):
                together.wait(timeout=120)
                found.append(run(layer, problem))
        stream.synchronize()
        return found

    with ThreadPoolExecutor(len(pairs)) as pool:
        threads = [pool.submit(work, *pair) for pair in pairs]
        found = [result for thread in threads for result in thread.result()]
    want = run(*pairs[0])
    for result in found:
        assert_equal(result, want)


def test_launch_hooks_see_every_kernel(asked: list[str]) -> None:
    layer, problem = built(MEDIUM)
    want = run(layer, problem)
    seen: list[str] = []

    def look(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    asked.clear()
    knobs.runtime.launch_enter_hook.add(look)
    try:
        watched = run(layer, problem)
    finally:
        knobs.runtime.launch_enter_hook.remove(look)
    assert_equal(watched, want)
    assert len(seen) == len(asked) >= 10
    for part in ("up_projection", "down_projection", "hidden_gradient", "input_gradient", "weight_gradient"):
        assert any(part in name for name in seen), (part, seen)
    asked.clear()
    assert_equal(run(layer, problem), want)
    assert not asked


SNIPPET = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch
from implementations.sonicmoe_triton import moe_layer
t, d, n, e, k = map(int, "{HEADLINE}".split(","))
make = lambda *size: (torch.randn(size, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5).requires_grad_()
leaves = make(t, d), make(e, 2 * n, d), make(e, d, n), make(e, d)
torch.cuda.synchronize()
begin = time.perf_counter()
out = moe_layer(*leaves, k)
torch.autograd.grad(out, leaves, torch.ones_like(out))
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def test_the_first_call_compiles_for_a_minute_at_most(tmp_path: Path) -> None:
    """Not a measurement: limits that a kernel which tunes, or compiles a dozen variants, would break."""
    for limit in (60.0, 5.0):
        done = subprocess.run(
            [sys.executable, "-c", SNIPPET],
            capture_output=True,
            text=True,
            check=True,
            timeout=180,
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        )
        seconds = float(done.stdout.split()[-1])
        assert seconds <= limit, seconds
