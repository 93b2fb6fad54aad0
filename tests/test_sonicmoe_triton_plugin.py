"""The Triton layer as far as a CPU without the interpreter can tell: discovery, refusals, and traces at full scale.

What its kernels compute is tested in tests/interpreter.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT, point_of
from torch._subclasses.fake_tensor import FakeTensorMode

import implementations.sonicmoe_triton as package
from harness.costs import held_bytes_sonicmoe
from harness.interface import DTYPES, ROUTER_CONVENTIONS, LayerSpec, Point
from harness.memory import tracked_memory
from harness.problem import make_problem
from harness.registry import default_registry
from harness.shapes import MoEShape

PAPER = ["24576,1536,256,128,8", "24576,1536,1024,32,2", "32768,4096,512,256,16"]
PLUGIN = package.SonicMoETriton()


def on_gpu(shape: str, dtype: str = "bfloat16", **layer: object) -> Point:
    return Point("moe_layer", PLUGIN.name, MoEShape.parse(shape), dtype, LayerSpec(**layer))


def kernel(shape: str, dtype: str = "bfloat16") -> Point:
    return replace(on_gpu(shape, dtype), operation="grouped_gemm", variant="up")


def test_the_registry_finds_it_without_importing_its_kernels() -> None:
    program = (
        "import sys; from harness.registry import load_registry; found = load_registry(entry_points=False)\n"
        "assert 'sonicmoe_triton' in found and not found.broken_reason('sonicmoe_triton'), found.broken\n"
        "assert found.get('sonicmoe_triton').unsupported_reason\n"
        "loaded = [name for name in sys.modules if name.startswith('implementations.sonicmoe_triton.')]\n"
        "assert not loaded and 'triton' not in sys.modules, loaded\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)
    plugin = default_registry().get("sonicmoe_triton")
    assert plugin.label == "SonicMoE (ours, Triton)" and "moe_layer" in plugin.operations


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_it_takes(convention: str, dtype: str) -> None:
    for shape in [*PAPER, "0,8,8,1,1", "5,64,64,10,3", "100,72,40,1024,64", "8,100,36,4,2", "7,5,3,4,2"]:
        assert PLUGIN.unsupported_reason(on_gpu(shape, dtype, router_convention=convention)) is None, shape


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        (kernel("8,100,36,4,2"), "multiples of 8 (16 bytes) in bfloat16, not d=100 and n=36"),
        (kernel("8,102,36,4,2", "float32"), "multiples of 4 (16 bytes) in float32, not d=102"),
        (on_gpu("8,64,64,1025,2"), "at most 1024 experts, not E=1025"),
        (on_gpu("8,64,64,128,65"), "at most 64 experts per token, not K=65"),
        (on_gpu("8,64,64,4,2", activation="geglu"), "SwiGLU experts without bias only"),
        (point_of("8,64,64,4,2", "bfloat16", name="sonicmoe_triton"), "does not run on cpu"),
    ],
)
def test_what_it_refuses(point: Point, reason: str) -> None:
    assert reason in (PLUGIN.unsupported_reason(point) or "")


@pytest.mark.parametrize("shape", PAPER)
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_it_holds_what_the_algorithm_does_at_full_scale(shape: str, convention: str) -> None:
    point = point_of(shape, "bfloat16", convention=convention, name="sonicmoe_triton")
    with FakeTensorMode():
        problem = make_problem(point, "cpu")
        layer = PLUGIN.build(problem)
        held = tracked_memory(layer, problem.x, problem.grad_output)["held"]
        x = problem.x.requires_grad_()
        grads = torch.autograd.grad(layer.forward(x), [x, *layer.parameters()], problem.grad_output)
        shapes = {name: tuple(g.shape) for name, g in layer.canonical_gradients(grads[1:]).items()}
    size = point.shape
    tile_map = 8 * (size.routed_rows // 128 + size.E) + 4
    logits = 2 * size.T * size.E if convention == "softmax_topk" else 0
    assert held == held_bytes_sonicmoe(size) + tile_map + logits
    up, down = (size.E, size.n, size.d), (size.E, size.d, size.n)
    assert shapes == {"grad_gate": up, "grad_up": up, "grad_down": down, "grad_router": (size.E, size.d)}


def test_every_kernel_of_the_layer_has_a_role() -> None:
    found: dict[str, set[str | None]] = {}
    for path in Path(package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                found.setdefault(path.stem, set()).add(PLUGIN.kernel_role(node.name))
    expected = {
        "up_projection": {"up"},
        "contiguous_gemm": {"down", "dX"},
        "hidden_gradient": {"dH"},
        "weight_gradient": {"dW1", "dW2"},
        "aggregation": {"aggregation"},
        "router": {"router"},
        "metadata": {"router"},
    }
    assert {stem: found.get(stem) for stem in expected} == expected


def test_the_door() -> None:
    layer = package.SonicMoE(64, 32, 8, 2, bias=True, dtype=torch.bfloat16, device="meta")
    sizes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert sizes == {
        **{"w1": (8, 64, 64), "w2": (8, 64, 32), "router": (8, 64)},
        **{"bias1": (8, 64), "bias2": (8, 64)},
    }
    assert "activation=swiglu" in repr(layer)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'moe_player'"):
        _ = package.moe_player


def test_a_meta_layer_tells_its_output() -> None:
    layer = package.SonicMoE(64, 32, 8, 2, dtype=torch.bfloat16, device="meta")
    assert layer(torch.empty(3, 5, 64, dtype=torch.bfloat16, device="meta")).shape == (3, 5, 64)
