"""Direct launches on a GPU: the same bits as Triton's own launches, wherever a call comes from."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.interface import Layer, Problem

from .common import MEDIUM, assert_equal, built, run

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


def test_a_first_call_compiles_each_kernel_once_and_tunes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda *_, fn, **__: compiled.append(fn.name))
    # Widths that no other test has; numbers of tokens are multiples of 16, as integers are specialised.
    built("1024,1192,136,24,3")
    # Top-K, three kernels of the routing, up, down, dH, dX, dW1, dW2, the router's backward, two aggregations.
    assert 0 < len(compiled) <= 13, compiled
    compiled.clear()
    built("2048,1192,136,24,3")
    assert not compiled


FIRST_BACKWARD = """
import torch
from implementations.sonicmoe_triton import moe_layer
sizes = (256, 256), (8, 256, 256), (8, 256, 128), (8, 256)
tensors = [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes]
out = moe_layer(*tensors, 2)
given = torch.ones_like(out)
# What the backward allocates is there already: not even that gives autograd's thread a context.
torch.empty(64 << 20, device="cuda")
torch.cuda.synchronize()
found = torch.autograd.grad(out, tensors, given)
assert all(bool(gradient.isfinite().all()) for gradient in found)
"""


def test_a_backward_may_be_the_first_call_of_its_thread() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_BACKWARD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
