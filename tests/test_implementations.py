"""One conformance suite over every plugin that runs on a CPU."""

from __future__ import annotations

import gc
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import implementations
from harness.interface import DTYPES, GRADIENTS, Implementation, Layer, LayerSpec, Point, Problem, RoutingSpec
from harness.problem import make_problem
from harness.routing import choose_experts, expert_counts
from harness.shapes import MoEShape

PAPER = "24576,1536,256,128,8"
#: Relative L2 error of the output and of the gradients.
TOLERANCES = {"bfloat16": (1e-2, 2e-2), "float16": (2e-3, 4e-3), "float32": (1e-4, 1e-4)}
#: Our own implementations, whose gradients of experts without tokens must be exactly zero.
EXACT_ZEROS = {"torch_loop", "sonicmoe_torch", "template"}

SHAPES = {
    "ordinary": "64,96,64,8,2",
    "E=10": "48,64,32,10,3",
    "E=12": "48,64,32,12,4",
    "K=22": "40,64,32,32,22",
    "K=1": "50,64,32,6,1",
    "K=E": "20,64,32,4,4",
    "E=1": "33,64,32,1,1",
    "T=1": "1,64,32,8,2",
    "T=0": "0,64,32,8,2",
    "T=5": "5,512,32,8,2",
    "d=100": "40,100,48,6,2",
    "n=192": "64,64,192,4,2",
    "odd": "21,37,19,5,2",
    "n=1": "16,8,1,4,2",
}


@cache
def cpu_plugins() -> dict[str, Implementation]:
    """Every plugin with "cpu" in `devices`, and the template, which must be a working example."""
    found = {}
    for module_info in pkgutil.iter_modules(implementations.__path__):
        if module_info.name.startswith("_") and module_info.name != "_template":
            continue
        module = importlib.import_module(f"implementations.{module_info.name}")
        for _, plugin in inspect.getmembers(module, inspect.isclass):
            if not issubclass(plugin, Implementation) or inspect.isabstract(plugin):
                continue
            if plugin.__module__.startswith(module.__name__) and "cpu" in plugin.devices:
                found[plugin.name] = plugin()
    return {name: plugin for name, plugin in found.items() if "moe_layer" in plugin.operations}


def point(
    name: str, shape: str, dtype: str = "float32", distribution: str = "uniform", convention: str = "topk_softmax"
) -> Point:
    size = MoEShape.parse(shape)
    # One token's router gradient is the difference of its K scores' gradients, which nearly cancel in some draws:
    # there no bf16 layer has two correct digits. Seed 2 is not such a draw.
    seed = 2 if size.T == 1 else 0
    return Point(
        "moe_layer",
        name,
        size,
        dtype,
        LayerSpec(router_convention=convention),
        RoutingSpec(distribution=distribution, seed=seed),
        device="cpu",
    )


def built(
    name: str, shape: str, dtype: str = "float32", distribution: str = "uniform", convention: str = "topk_softmax"
) -> tuple[Problem, Layer]:
    plugin = cpu_plugins()[name]
    requested = point(name, shape, dtype, distribution, convention)
    reason = plugin.unsupported_reason(requested)
    if reason is not None:
        pytest.skip(reason)
    problem = make_problem(requested, "cpu")
    return problem, plugin.build(problem)


def run_layer(layer: Layer, x: Tensor, grad_output: Tensor) -> dict[str, Tensor]:
    """Output and gradients in canonical layout."""
    x = x.detach().requires_grad_()
    out = layer.forward(x)
    grads = torch.autograd.grad(out, [x, *layer.parameters()], grad_output)
    return {"output": out.detach(), "grad_x": grads[0], **layer.canonical_gradients(grads[1:])}


def chosen(layer: Layer, x: Tensor, problem: Problem) -> Tensor:
    indices = layer.expert_indices(x)
    return choose_experts(x, problem.router, problem.shape.K) if indices is None else indices


def dense_reference(problem: Problem, indices: Tensor) -> dict[str, Tensor]:
    """The layer in fp32 as dense contractions over all experts, with weights that vanish where nothing was chosen."""
    x, gate, up, down, router = (
        t.detach().float().requires_grad_() for t in (problem.x, problem.gate, problem.up, problem.down, problem.router)
    )
    mask = torch.zeros(x.shape[0], problem.shape.E, dtype=torch.bool).scatter(1, indices.long(), True)
    exponentials = torch.exp((logits := torch.einsum("td,ed->te", x, router)) - logits.detach().amax(1, keepdim=True))
    convention = problem.point.layer.router_convention
    chosen_only = exponentials * mask
    total = (exponentials if convention == "softmax_topk" else chosen_only).sum(1, keepdim=True)
    weights = chosen_only / total
    pre = torch.einsum("td,end->ten", x, gate)
    hidden = pre / (1 + torch.exp(-pre)) * torch.einsum("td,end->ten", x, up)
    out = torch.einsum("te,ten,edn->td", weights, hidden, down)
    grads = torch.autograd.grad(out, [x, gate, up, down, router], problem.grad_output.float())
    return {"output": out.detach(), **dict(zip(GRADIENTS, grads, strict=True))}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], dtype: str) -> None:
    assert set(got) == set(want)
    for key, reference in want.items():
        tolerance = TOLERANCES[dtype][key != "output"]
        assert got[key].shape == reference.shape, key
        assert got[key].dtype == DTYPES[dtype], key
        scale = reference.norm()
        # A gradient that is zero up to rounding (a router that has no choice: K = E = 1) has no relative error.
        if scale < 1e-6:
            assert got[key].float().norm() < 1e-2, key
            continue
        error = ((got[key].float() - reference).norm() / scale).item()
        assert error <= tolerance, f"{key}: relative L2 error {error:.2e} > {tolerance:.0e}"


every_plugin = pytest.mark.parametrize("name", sorted(cpu_plugins()))


@every_plugin
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))
def test_agrees_with_a_dense_reference(name: str, shape: str, dtype: str) -> None:
    problem, layer = built(name, shape, dtype)
    got = run_layer(layer, problem.x, problem.grad_output)
    assert_close(got, dense_reference(problem, chosen(layer, problem.x, problem)), dtype)


@every_plugin
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("distribution", ["skewed", "one_group", "empty_experts"])
def test_uneven_routing(name: str, dtype: str, distribution: str) -> None:
    problem, layer = built(name, "48,64,32,8,2", dtype, distribution)
    got = run_layer(layer, problem.x, problem.grad_output)
    indices = chosen(layer, problem.x, problem)
    assert_close(got, dense_reference(problem, indices), dtype)
    if distribution != "skewed" and name in EXACT_ZEROS:
        empty = expert_counts(indices, problem.shape.E) == 0
        assert empty.any()
        for key in ("grad_gate", "grad_up", "grad_down"):
            assert not got[key][empty].any(), key


@every_plugin
@pytest.mark.parametrize("convention", ["softmax_topk", "softmax_topk_renormalised"])
@pytest.mark.parametrize("shape", ["64,64,32,8,3", "20,64,32,4,4", "33,64,32,1,1"])
def test_router_conventions(name: str, convention: str, shape: str) -> None:
    problem, layer = built(name, shape, "float32", "uniform", convention)
    got = run_layer(layer, problem.x, problem.grad_output)
    assert_close(got, dense_reference(problem, chosen(layer, problem.x, problem)), "float32")


@every_plugin
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_tied_scores(name: str, dtype: str) -> None:
    """Rows of zeros: every logit is equal, so any K experts will do, but exactly K and each with weight 1 / K."""
    problem, layer = built(name, "16,64,32,8,2", dtype)
    problem.x[::2] = 0
    got = run_layer(layer, problem.x, problem.grad_output)
    indices = chosen(layer, problem.x, problem)
    assert all(len(set(row)) == 2 for row in indices.tolist())
    assert_close(got, dense_reference(problem, indices), dtype)


@every_plugin
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_identical_calls_agree_bit_for_bit(name: str, dtype: str) -> None:
    problem, layer = built(name, "64,64,32,8,4", dtype)
    first = run_layer(layer, problem.x, problem.grad_output)
    for _ in range(2):
        again = run_layer(layer, problem.x, problem.grad_output)
        for key, value in first.items():
            assert torch.equal(value, again[key]), key


@every_plugin
def test_nan_stays_with_its_token(name: str) -> None:
    problem, layer = built(name, "24,64,32,8,2", "bfloat16")
    if name == "template":
        pytest.skip("a dense mask multiplies every expert's rows: 0 · NaN")
    clean = layer.forward(problem.x).detach()
    dirty = problem.x.clone()
    dirty[5, 3] = float("nan")
    out = layer.forward(dirty).detach()
    assert out[5].isnan().all()
    others = torch.arange(24) != 5
    # The rows of a GEMM move with the NaN token's experts, and with them the order of summation.
    assert not out[others].isnan().any()
    assert (out[others].float() - clean[others].float()).norm() <= 1e-2 * clean[others].float().norm()


@every_plugin
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poison_in_one_expert_does_not_reach_others(name: str, poison: float) -> None:
    """NaN or inf in one token poisons only the weight gradients of the experts that it chose."""
    if name == "template":
        pytest.skip("a dense mask multiplies every expert's rows: 0 · NaN")
    problem, layer = built(name, "24,64,32,8,2", "float32", "one_group")
    problem.x[5, 3] = poison
    # The router sees the poison as well: ask the layer, or the same router, which experts took the token.
    indices = chosen(layer, problem.x, problem)
    got = run_layer(layer, problem.x, problem.grad_output)
    untouched = [e for e in range(8) if e not in indices[5].tolist()]
    for key in ("grad_gate", "grad_up", "grad_down"):
        assert got[key][untouched].isfinite().all(), key


@every_plugin
def test_inputs_with_strides(name: str) -> None:
    problem, layer = built(name, "40,64,32,8,2")
    wide = torch.zeros(40, 128)
    wide[:, ::2] = problem.x
    tall = problem.grad_output.T.contiguous().T
    got = run_layer(layer, wide[:, ::2], tall)
    assert_close(got, dense_reference(problem, chosen(layer, problem.x, problem)), "float32")
    # out.sum().backward() hands in a gradient of strides zero.
    ones = torch.ones(()).expand(40, 64)
    problem.grad_output = ones
    assert_close(
        run_layer(layer, problem.x, ones), dense_reference(problem, chosen(layer, problem.x, problem)), "float32"
    )


@every_plugin
def test_problem_is_left_alone_and_backward_can_be_repeated(name: str) -> None:
    problem, layer = built(name, "40,64,32,8,2")
    tensors = (problem.x, problem.gate, problem.up, problem.down, problem.router, problem.grad_output)
    before = [t.clone() for t in tensors]
    x = problem.x.detach().requires_grad_()
    out = layer.forward(x)
    leaves = [x, *layer.parameters()]
    first = torch.autograd.grad(out, leaves, problem.grad_output, retain_graph=True)
    second = torch.autograd.grad(out, leaves, problem.grad_output)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(tensors, before, strict=True))
    assert all(p.is_leaf and p.requires_grad for p in layer.parameters())


@every_plugin
def test_step_after_step_with_dirty_memory(name: str) -> None:
    """A step after another one, with memory full of NaN and an expert emptied between, is as good as the first."""
    problem, layer = built(name, "48,64,32,8,2", "float32", "empty_experts")
    for size in (48 * 2 * 64, 8 * 64 * 64, 8 * 64 * 32):
        del size
        _ = [torch.full((s,), float("nan")) for s in (48 * 2 * 64, 8 * 64 * 64, 8 * 64 * 32, 48 * 64)]
        del _
        got = run_layer(layer, problem.x, problem.grad_output)
        assert_close(got, dense_reference(problem, chosen(layer, problem.x, problem)), "float32")


@every_plugin
def test_metadata_of_a_plugin(name: str) -> None:
    plugin = cpu_plugins()[name]
    for field in (plugin.name, plugin.label, plugin.upstream, plugin.licence):
        assert isinstance(field, str) and field
    assert set(plugin.dtypes) <= set(DTYPES)
    assert set(plugin.devices) <= {"cuda", "cpu"}
    assert plugin.unsupported_reason(Point("grouped_gemm_of_nothing", name, MoEShape.parse(PAPER))) is not None


# Held memory, under fake tensors at full scale.


class _Allocations(TorchDispatchMode):
    """Every storage that an operator returned, so that the live ones can be added up."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def live_bytes(self, other_than: set[int]) -> int:
        gc.collect()
        alive = (size for key, (ref, size) in self.storages.items() if key not in other_than and not ref.expired())
        return sum(alive)


@cache
def held_bytes(name: str, shape: str, dtype: str = "bfloat16", convention: str = "topk_softmax") -> int:
    """Bytes that the layer allocates in its forward and still holds after it, its output included. Runs the backward
    too, which must trace."""
    with FakeTensorMode():
        requested = point(name, shape, dtype, convention=convention)
        size, of = requested.shape, requested.torch_dtype
        problem = Problem(
            requested,
            torch.empty(size.T, size.d, dtype=of),
            torch.empty(size.E, size.n, size.d, dtype=of),
            torch.empty(size.E, size.n, size.d, dtype=of),
            torch.empty(size.E, size.d, size.n, dtype=of),
            torch.empty(size.E, size.d, dtype=of),
            torch.empty(size.T, size.d, dtype=of),
        )
        layer = cpu_plugins()[name].build(problem)
        x = problem.x.detach().requires_grad_()
        inputs = {t.untyped_storage()._cdata for t in (x, *layer.parameters())}
        with _Allocations() as allocations:
            out = layer.forward(x)
            held = allocations.live_bytes(inputs)
        grads = torch.autograd.grad(out, [x, *layer.parameters()], problem.grad_output)
        shapes = {key: tuple(g.shape) for key, g in layer.canonical_gradients(grads[1:]).items()}
        E, n, d = size.E, size.n, size.d
        assert shapes == {
            "grad_gate": (E, n, d),
            "grad_up": (E, n, d),
            "grad_down": (E, d, n),
            "grad_router": (E, d),
        }
        return held


def algorithm_held_bytes(shape: str, itemsize: int = 2) -> int:
    """Output, H, and S, expert index, gather index and reverse index of every routed row; offsets of the experts."""
    s = MoEShape.parse(shape)
    return itemsize * s.T * s.d + 2 * itemsize * s.T * s.K * s.n + 16 * s.T * s.K + 4 * (s.E + 1)


@every_plugin
def test_traces_under_fake_tensors(name: str) -> None:
    if not cpu_plugins()[name].fake_tensors:
        pytest.skip("does not claim to")
    assert held_bytes(name, "256,64,32,8,2") > 0


@pytest.mark.parametrize("shape", [PAPER, "24576,1536,512,64,4", "24576,1536,1024,32,2", "32768,4096,256,256,16"])
def test_held_memory_of_the_algorithm_at_full_scale(shape: str) -> None:
    assert held_bytes("sonicmoe_torch", shape) == algorithm_held_bytes(shape)


@pytest.mark.parametrize("shape", ["100,100,36,6,2", "77,64,32,8,3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_held_memory_of_the_algorithm_elsewhere(shape: str, dtype: str) -> None:
    assert held_bytes("sonicmoe_torch", shape, dtype) == algorithm_held_bytes(shape, DTYPES[dtype].itemsize)


def test_other_conventions_hold_at_most_the_probabilities() -> None:
    s = MoEShape.parse(PAPER)
    assert held_bytes("sonicmoe_torch", PAPER, convention="softmax_topk") <= algorithm_held_bytes(PAPER) + 4 * s.T * s.E
    renormalised = held_bytes("sonicmoe_torch", PAPER, convention="softmax_topk_renormalised")
    assert renormalised == algorithm_held_bytes(PAPER)


def test_held_memory_does_not_grow_with_granularity() -> None:
    """At constant nK: finer experts cost the algorithm nothing, and a layer that keeps gathered X and Y a lot."""
    fine, middle, coarse = PAPER, "24576,1536,512,64,4", "24576,1536,1024,32,2"
    ours = [held_bytes("sonicmoe_torch", shape) for shape in (fine, middle, coarse)]
    assert max(ours) <= 1.02 * min(ours)
    usual = [held_bytes("torch_grouped_mm", shape) for shape in (fine, middle, coarse)]
    assert usual[0] > 1.5 * usual[1] > 1.5 * usual[2]
    s = MoEShape.parse(fine)
    assert usual[0] >= ours[0] + 2 * 2 * s.T * s.K * s.d


def test_fake_and_real_layers_hold_the_same() -> None:
    shape = "64,96,64,8,2"
    for name in ("sonicmoe_torch", "torch_grouped_mm", "torch_loop"):
        problem, layer = built(name, shape, "float32", "one_group")
        x = problem.x.detach().requires_grad_()
        inputs = {t.untyped_storage()._cdata for t in (x, *layer.parameters())}
        with _Allocations() as allocations:
            out = layer.forward(x)
            held = allocations.live_bytes(inputs)
        del out
        assert held == pytest.approx(held_bytes(name, shape, "float32"), rel=0.02), name


# What runs on a GPU only, as far as a CPU can tell.


def test_grouped_mm_path_with_garbage_for_empty_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's path of the algorithm, where `grouped_mm` leaves NaN in the weight gradients of empty experts."""
    from implementations import _torch_ops, sonicmoe_torch

    calls = []

    def grouped_mm_with_garbage(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out = torch.nn.functional.grouped_mm(a, b, offs=offs)
        calls.append(out.dim())
        if out.dim() == 3:
            out[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = float("nan")
        return out

    def no_counts(*_: object) -> list[int]:
        raise AssertionError("a host synchronisation")

    problem, layer = built("sonicmoe_torch", "48,64,32,8,2", "bfloat16", "empty_experts")
    indices = chosen(layer, problem.x, problem)
    monkeypatch.setattr(sonicmoe_torch, "_on_device", lambda *_: True)
    monkeypatch.setattr(_torch_ops, "grouped_mm", grouped_mm_with_garbage)
    monkeypatch.setattr(_torch_ops, "host_counts", no_counts)
    got = run_layer(layer, problem.x, problem.grad_output)
    assert calls == [2, 2, 2, 3, 2, 3]
    assert_close(got, dense_reference(problem, indices), "bfloat16")
    empty = expert_counts(indices, 8) == 0
    for key in ("grad_gate", "grad_up", "grad_down"):
        assert not got[key][empty].any(), key


def test_compiled_glue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The glue is captured whole with dynamic shapes, for another K too, and computes the same."""
    from implementations import _torch_ops
    from implementations.sonicmoe_torch import SonicMoEFunction

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiler(f, backend="aot_eager", **options))
    glue = _torch_ops.Glue.compiled()
    for shape in ("48,64,32,8,2", "20,96,48,6,3"):
        problem, layer = built("sonicmoe_torch", shape)
        eager = run_layer(layer, problem.x, problem.grad_output)
        layer.glue = glue
        compiled = run_layer(layer, problem.x, problem.grad_output)
        assert SonicMoEFunction.__name__ in type(layer.forward(problem.x.requires_grad_()).grad_fn).__name__
        for key, value in eager.items():
            torch.testing.assert_close(compiled[key], value, rtol=1e-5, atol=1e-6)
        problem, layer = built("torch_grouped_mm", shape)
        eager = run_layer(layer, problem.x, problem.grad_output)
        layer.glue = glue
        compiled = run_layer(layer, problem.x, problem.grad_output)
        for key, value in eager.items():
            torch.testing.assert_close(compiled[key], value, rtol=1e-5, atol=1e-6)


def test_build_falls_back_to_eager_glue_with_a_note() -> None:
    from implementations import _torch_ops

    problem, _ = built("sonicmoe_torch", "20,64,32,4,2")

    class OnGpu:
        """A stand-in for a problem on a GPU."""

        def __init__(self) -> None:
            self.x, self.grad_output = _CudaInName(problem.x), problem.grad_output

    class _CudaInName:
        def __init__(self, x: Tensor) -> None:
            self.x, self.device, self.shape = x, torch.device("cuda"), x.shape

        def detach(self) -> Tensor:
            return self.x.detach()

    class Failing(Layer):
        def __init__(self, glue: object) -> None:
            self.glue = glue

        def parameters(self) -> list[Tensor]:
            return []

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no compiler here\nsecond line")

        def canonical_gradients(self, gradients: object) -> dict[str, Tensor]:
            return {}

    layer = _torch_ops.build_with_glue(OnGpu(), Failing)
    assert layer.glue == _torch_ops.Glue()
    assert list(layer.notes) == ["glue runs eagerly, since torch.compile raised RuntimeError: no compiler here"]
