"""The Triton layer compiled for a real GPU: awkward sizes, compilers, graphs, memory, and each kernel at full scale."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.correctness import TOLERANCES
from harness.interface import DISTRIBUTIONS, DTYPES, ROUTER_CONVENTIONS, Layer, Problem
from harness.operations import get_operation
from harness.reference import full_precision
from harness.routing import expert_counts, router_scores
from harness.shapes import MoEShape
from harness.timing import GraphCalls, L2Eviction

from . import common
from .common import assert_close, assert_equal, gradients, leaves_of, problem_of, random, relative, run

pytest.importorskip("triton")

from implementations.sonicmoe_triton import SonicMoETriton, function
from implementations.sonicmoe_triton.activations import ACTIVATIONS, is_gated
from implementations.sonicmoe_triton.aggregation import aggregate
from implementations.sonicmoe_triton.biases import expert_sum, row_products
from implementations.sonicmoe_triton.contiguous_gemm import down_projection, input_gradient
from implementations.sonicmoe_triton.hidden_gradient import hidden_gradient
from implementations.sonicmoe_triton.layer import SonicMoE, load_balancing_loss
from implementations.sonicmoe_triton.metadata import Routing, make_routing, to_row_order
from implementations.sonicmoe_triton.router import router_backward, top_k
from implementations.sonicmoe_triton.up_projection import up_projection
from implementations.sonicmoe_triton.weight_gradient import down_weight_gradient, up_weight_gradient

NAME = SonicMoETriton.name
MEDIUM = "2048,512,256,16,4"
HEADLINE = "24576,1536,256,128,8"

both_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def check(problem: Problem) -> None:
    """The harness's gate, all gradients included."""
    reason = SonicMoETriton().unsupported_reason(problem.point) if common.DEVICE == "cuda" else None
    assert reason is None, reason
    result = get_operation("moe_layer").check(SonicMoETriton().build(problem), problem)
    assert result.reason is None, result.reason


def built(shape: str, *args: str, **kwargs: Any) -> tuple[Layer, Problem]:
    problem = problem_of(NAME, shape, *args, **kwargs)
    return SonicMoETriton().build(problem), problem


# Against the harness's fp32 reference.

SIZES = {
    "E=10": "700,256,128,10,3",
    "E=12": "700,256,128,12,4",
    "E=1024": "2048,128,64,1024,4",
    "K=22": "512,256,128,32,22",
    "K=64": "300,128,64,128,64",
    "K=1": "1000,256,128,8,1",
    "K=E": "300,256,128,6,6",
    "E=1": "300,256,128,1,1",
    "T=1": "1,256,128,8,2",
    "T=0": "0,256,128,8,2",
    "T=5": "5,4096,128,8,2",
    "T=127": "127,256,128,2,1",
    "T=4097": "4097,768,256,64,4",
    "d=776, n=72": "500,776,72,8,2",
    "2880": "512,2880,2880,8,4",
    "d=8, n=8": "100,8,8,4,2",
    "n=192": "512,512,192,8,2",
    "fine-grained": "2048,1536,128,48,24",
    "coarse": "4096,512,1024,16,2",
}


@both_dtypes
@pytest.mark.parametrize("shape", list(SIZES.values()), ids=list(SIZES))
def test_sizes(shape: str, dtype: str) -> None:
    check(problem_of(NAME, shape, dtype))


@both_dtypes
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [MEDIUM, "1607,2048,768,6,2", "4097,776,72,12,3"])
def test_distributions(shape: str, distribution: str, dtype: str) -> None:
    check(problem_of(NAME, shape, dtype, distribution))


@both_dtypes
@pytest.mark.parametrize("distribution", ["uniform", "skewed"])
@pytest.mark.parametrize("shape", ["1000,256,128,10,3", "300,256,128,6,6", "300,256,128,8,1", "1,256,128,8,2"])
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_conventions(convention: str, shape: str, distribution: str, dtype: str) -> None:
    check(problem_of(NAME, shape, dtype, distribution, convention))


def test_more_than_two_to_the_31_elements() -> None:
    """Y and its gradient have 640000 x 4096 elements."""
    check(problem_of(NAME, "40000,4096,64,64,16"))


@both_dtypes
def test_experts_without_tokens_get_exactly_zero(dtype: str) -> None:
    for distribution in ("one_group", "empty_experts"):
        layer, problem = built(MEDIUM, dtype, distribution)
        indices = layer.expert_indices(problem.x)
        assert indices is not None
        empty = expert_counts(indices, problem.shape.E) == 0
        assert empty.any()
        _, _, grad_w1, grad_w2, _ = run(layer, problem)
        for gradient in (grad_w1, grad_w2):
            assert not gradient[empty].any() and gradient[~empty].any()


@both_dtypes
def test_exact_ties_go_to_the_lower_experts(dtype: str) -> None:
    layer, problem = built(MEDIUM, dtype)
    problem.x[::2] = 0
    indices = layer.expert_indices(problem.x)
    assert indices is not None
    k = problem.shape.K
    assert torch.equal(indices[::2].long(), torch.arange(k, device=indices.device).expand(indices[::2].shape))
    check(problem)


# Against autograd in fp32: what the harness's reference does not know.

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    **{"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu, "silu": F.silu, "gelu": F.gelu},
    "relu2": lambda x: F.relu(x).square(),
}


def plain_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    scores: Tensor,
    experts: Tensor,
    tokens: Tensor,
    activation: str = "swiglu",
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
) -> Tensor:
    """The experts one by one: scores, experts, tokens (P,)."""
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        own = (experts == e).nonzero().squeeze(1)
        h = x[tokens[own]] @ w1[e].T
        h = h if bias1 is None else h + bias1[e]
        gate, up = h.chunk(2, dim=1) if is_gated(activation) else (h, torch.ones_like(h))
        y = (ACTIVATE[activation](gate) * up) @ w2[e].T
        y = y if bias2 is None else y + bias2[e]
        out = out.index_add(0, tokens[own], scores[own, None] * y)
    return out


def plain_layer(indices: Tensor, convention: str, activation: str, *tensors: Tensor | None) -> Tensor:
    """With the experts given: which of two near-equal logits is larger is a matter of rounding."""
    x, w1, w2, router, bias1, bias2 = tensors
    assert x is not None and w1 is not None and w2 is not None and router is not None
    scores = router_scores(x @ router.T, indices, convention).reshape(-1)
    tokens = torch.arange(x.shape[0], device=x.device).repeat_interleave(indices.shape[1])
    return plain_experts(x, w1, w2, scores, indices.reshape(-1), tokens, activation, bias1, bias2)


def compare_with_autograd(
    dtype: str, activation: str, bias: bool, convention: str, T: int = 600, d: int = 264, n: int = 136, E: int = 6
) -> None:
    of, k = DTYPES[dtype], 3
    hidden = 2 * n if is_gated(activation) else n
    tensors = [
        random(T, d, dtype=of),
        random(E, hidden, d, dtype=of, scale=d**-0.5),
        random(E, d, n, dtype=of, scale=n**-0.5),
        random(E, d, dtype=of, scale=d**-0.5),
    ]
    if bias:
        tensors += [random(E, hidden, dtype=of, scale=0.5), random(E, d, dtype=of, scale=0.5)]
    grad = random(T, d, dtype=of, scale=2.0)
    leaves = leaves_of(*tensors)
    x, w1, w2, router, bias1, bias2 = [*leaves, None, None][:6]
    assert x is not None and w1 is not None and w2 is not None and router is not None
    out = function.moe_layer(x, w1, w2, router, k, convention, activation, bias1, bias2)
    indices = function.choose_experts(tensors[0], tensors[3], k, convention)[1].long()
    with full_precision():
        plain = leaves_of(*(t.float() for t in tensors))
        want = plain_layer(indices, convention, activation, *plain, *[None] * (6 - len(plain)))
        expected = gradients(want, plain, grad.float())
    assert_close(gradients(out, leaves, grad), expected, TOLERANCES[dtype])


@both_dtypes
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str, bias: bool, dtype: str) -> None:
    compare_with_autograd(dtype, activation, bias, "topk_softmax")


@both_dtypes
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_biases_with_every_convention(convention: str, dtype: str) -> None:
    compare_with_autograd(dtype, "swiglu", True, convention)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_float32(activation: str) -> None:
    compare_with_autograd("float32", activation, True, "topk_softmax", T=200, d=68, n=36, E=4)


@both_dtypes
def test_routing_of_the_caller(dtype: str) -> None:
    """Tokens with no pair, with one and with all experts; an expert without rows; biases and gradients of scores."""
    of, T, d, n, E = DTYPES[dtype], 400, 264, 136, 7
    counts = torch.arange(T) % E  # 0 to 6 of the first six experts: the last one gets none
    experts = torch.cat([torch.randperm(E - 1, generator=torch.Generator().manual_seed(t))[:c] for t, c in
                         enumerate(counts.tolist())]).to(common.DEVICE)  # fmt: skip
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(common.DEVICE)
    tokens = torch.arange(T).repeat_interleave(counts).to(common.DEVICE)
    tensors = (
        random(T, d, dtype=of),
        random(E, 2 * n, d, dtype=of, scale=d**-0.5),
        random(E, d, n, dtype=of, scale=n**-0.5),
        random(experts.numel(), dtype=torch.float32).abs(),
        random(E, 2 * n, dtype=of, scale=0.5),
        random(E, d, dtype=of, scale=0.5),
    )
    grad = random(T, d, dtype=of, scale=2.0)
    leaves = leaves_of(*tensors)
    x, w1, w2, scores, bias1, bias2 = leaves
    out = function.routed_experts(x, w1, w2, scores, experts, offsets, bias1=bias1, bias2=bias2)
    got = gradients(out, leaves, grad)
    with full_precision():
        plain = leaves_of(*(t.float() for t in tensors))
        x, w1, w2, scores, bias1, bias2 = plain
        want = plain_experts(x, w1, w2, scores, experts, tokens, "swiglu", bias1, bias2)
        expected = gradients(want, plain, grad.float())
    assert_close(got, expected, TOLERANCES[dtype])
    none = (counts == 0).to(common.DEVICE)
    assert not got[0][none].any() and not got[1][none].any()
    assert not any(got[i][E - 1].any() for i in (2, 3, 5, 6))


# Bit for bit.


@both_dtypes
@pytest.mark.parametrize("distribution", ["uniform", "skewed"])
@pytest.mark.parametrize("shape", ["4097,768,256,64,8", "1000,776,72,10,3"])
def test_identical_calls_agree(shape: str, distribution: str, dtype: str) -> None:
    layer, problem = built(shape, dtype, distribution)
    first = run(layer, problem)
    for _ in range(2):
        assert_equal(run(layer, problem), first)


def test_biases_agree_with_themselves() -> None:
    layer = SonicMoE(512, 256, 16, 4, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    x, grad = random(2048, 512).requires_grad_(), random(2048, 512)
    leaves = [x, *layer.parameters()]
    first = gradients(layer(x), leaves, grad)
    for _ in range(2):
        assert_equal(gradients(layer(x), leaves, grad), first)


def test_strides_change_nothing() -> None:
    layer, problem = built(MEDIUM)
    want = run(layer, problem)
    wide = torch.zeros(problem.shape.T, 2 * problem.shape.d, dtype=problem.x.dtype, device=problem.x.device)
    wide[:, ::2] = problem.x
    strided = Problem(
        problem.point, wide[:, ::2], problem.gate, problem.up, problem.down, problem.router,
        problem.grad_output.T.contiguous().T,
    )  # fmt: skip
    assert not strided.x.is_contiguous() and not strided.grad_output.is_contiguous()
    assert_equal(run(layer, strided), want)
    strided.x = problem.x.T.contiguous().T
    assert_equal(run(layer, strided), want)
    # A sum's gradient has strides zero.
    strided.grad_output = torch.ones((), dtype=problem.x.dtype, device=problem.x.device).expand(problem.x.shape)
    problem.grad_output = strided.grad_output.contiguous()
    assert_equal(run(layer, strided), run(layer, problem))


def test_strides_of_the_experts_weights_change_nothing() -> None:
    x, router = random(2048, 512), random(16, 512, scale=0.05)
    w1, w2 = random(16, 512, 512, scale=0.05), random(16, 512, 256, scale=0.05)
    grad = random(2048, 512)
    found = []
    for first, second in ((w1, w2), (w1.mT.contiguous().mT, w2.mT.contiguous().mT)):
        leaves = [x.requires_grad_(), first.requires_grad_(), second.requires_grad_(), router.requires_grad_()]
        found.append(gradients(function.moe_layer(x, first, second, router, 4), leaves, grad))
    assert_equal(found[0], found[1])


def test_tensors_off_their_alignment() -> None:
    """Rows that begin two bytes past a multiple of 16."""
    problem = problem_of(NAME, MEDIUM)

    def moved(tensor: Tensor) -> Tensor:
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        view = buffer[1:].view(tensor.shape)
        return view.copy_(tensor)

    for name in ("x", "down", "router", "grad_output"):
        setattr(problem, name, moved(getattr(problem, name)))
    assert common.DEVICE != "cuda" or problem.x.data_ptr() % 16 == 2
    check(problem)


def test_two_widths_in_one_process() -> None:
    """What is compiled or cached for one width must not serve another."""
    pairs = [built(shape) for shape in (MEDIUM, "1000,768,128,8,2", "1000,520,248,10,3")]
    first = [run(layer, problem) for layer, problem in pairs]
    for _ in range(2):
        for (layer, problem), want in zip(pairs, first, strict=True):
            assert_equal(run(layer, problem), want)
    for _, problem in pairs:
        check(problem)


# What lies in memory.


def dirty_memory(gigabytes: int = 4) -> None:
    """Leave every kind of cached block full of NaN (-1 as an integer): small ones, middle ones, one large."""
    if common.DEVICE != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    small = [torch.full((2**size,), 255, dtype=torch.uint8, device="cuda") for size in range(9, 21) for _ in range(40)]
    middle = [torch.full((2**23,), 255, dtype=torch.uint8, device="cuda") for _ in range(40)]
    large = [torch.full((2**29,), 255, dtype=torch.uint8, device="cuda") for _ in range(2 * gigabytes)]
    assert small[0].view(torch.bfloat16).isnan().all() and large[0][:64].view(torch.float32).isnan().all()
    torch.cuda.synchronize()
    del small, middle, large


@both_dtypes
@pytest.mark.parametrize("distribution", ["empty_experts", "one_group", "uniform"])
def test_nothing_unwritten_is_read(distribution: str, dtype: str) -> None:
    layer, problem = built("2050,520,248,16,4", dtype, distribution)
    want = run(layer, problem)
    for _ in range(2):
        dirty_memory()
        got = run(layer, problem)
        assert all(bool(tensor.isfinite().all()) for tensor in got)
        assert_equal(got, want)
    check(problem)


def test_biases_read_nothing_unwritten() -> None:
    layer = SonicMoE(520, 248, 16, 4, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    x, grad = random(300, 520).requires_grad_(), random(300, 520)
    leaves = [x, *layer.parameters()]
    want = gradients(layer(x), leaves, grad)
    dirty_memory()
    assert_equal(gradients(layer(x), leaves, grad), want)


@both_dtypes
def test_nan_stays_with_its_token_and_its_experts(dtype: str) -> None:
    layer, problem = built("300,256,128,12,2", dtype, "one_group")
    x = problem.x.clone()
    x[5, 3] = float("nan")
    indices = layer.expert_indices(x)
    assert indices is not None
    touched = torch.zeros(12, dtype=torch.bool, device=x.device)
    touched[indices[5].long()] = True
    others = torch.arange(300, device=x.device) != 5
    problem.x = x
    output, grad_x, grad_w1, grad_w2, _ = run(layer, problem)
    assert output[5].isnan().all() and output[others].isfinite().all()
    assert grad_x[others].isfinite().all()
    assert grad_w1[~touched].isfinite().all() and grad_w2[~touched].isfinite().all()


def test_steps_of_an_optimiser() -> None:
    torch.manual_seed(0)
    layer = SonicMoE(256, 128, 8, 2, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    x, target = random(1000, 256), random(1000, 256, scale=0.5)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = F.mse_loss(layer(x).float(), target.float())
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    assert all(bool(p.isfinite().all()) for p in layer.parameters())
    assert losses[-1] < losses[0], losses


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_held_memory_is_the_algorithms(convention: str) -> None:
    """Output, H, and 16 bytes of each routed row; softmax_topk keeps its logits too."""
    layer, problem = built(HEADLINE, convention=convention)
    T, d, n, E, K = (getattr(problem.shape, name) for name in "TdnEK")
    x = problem.x.detach().requires_grad_()
    run(layer, problem)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = layer.forward(x)
    torch.cuda.synchronize()
    gc.collect()
    held = torch.cuda.memory_allocated() - before
    expected = 2 * T * d + 4 * T * K * n + 16 * T * K + 4 * (E + 1) + 8 * (T * K // 128 + E) + 4
    if convention == "softmax_topk":
        expected += 2 * T * E
    assert output.requires_grad
    assert held == pytest.approx(expected, rel=0.01)
    torch.autograd.grad(output, [x, *layer.parameters()], problem.grad_output)
    del output
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 0.01 * expected


# Compilers, graphs and the host.


@both_dtypes
@pytest.mark.parametrize(("convention", "bias"), [("topk_softmax", False), ("softmax_topk", True)])
def test_compiles_whole(bias: bool, convention: str, dtype: str) -> None:
    torch.compiler.reset()
    of = DTYPES[dtype]
    layer = SonicMoE(256, 128, 8, 2, router_convention=convention, bias=bias, dtype=of, device=common.DEVICE)
    compiled = torch.compile(layer, fullgraph=True)
    x, grad = random(4, 96, 256, dtype=of).requires_grad_(), random(4, 96, 256, dtype=of)
    leaves = [x, *layer.parameters()]
    want = gradients(layer(x), leaves, grad)
    for _ in range(2):
        assert_equal(gradients(compiled(x), leaves, grad), want)


def test_compiles_with_a_loss_of_the_router_and_any_number_of_tokens() -> None:
    torch.compiler.reset()
    layer = SonicMoE(256, 128, 8, 2, dtype=torch.bfloat16, device=common.DEVICE)
    parameters = list(layer.parameters())

    def loss(x: Tensor) -> Tensor:
        out, router = layer.forward_with_router(x)
        return out.float().square().mean() + load_balancing_loss(router)

    compiled = torch.compile(loss, fullgraph=True, dynamic=True)
    for tokens in (300, 517, 64):
        x = random(tokens, 256)
        want, got = loss(x), compiled(x)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
        assert_close(torch.autograd.grad(got, parameters), torch.autograd.grad(want, parameters), (1e-2, 1e-2))


@both_dtypes
@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("distribution", ["uniform", "empty_experts"])
def test_a_graph_replays_on_new_inputs(distribution: str, convention: str, dtype: str) -> None:
    """Other inputs route otherwise: the captured launches must serve any routing."""
    arguments = (MEDIUM, dtype, distribution, convention)
    problems = [problem_of(NAME, *arguments, input_set=index) for index in range(3)]
    # Every token to the same experts: another distribution than at the capture.
    problems[2].x = problems[2].x[:1].expand_as(problems[2].x).contiguous()
    layer = SonicMoETriton().build(problems[0])
    want = [run(layer, problem) for problem in problems]
    calls = GraphCalls(layer, problems, L2Eviction())
    for index in (0, 1, 2, 1, 0):
        calls(index)
        output, found = calls.outputs()
        assert_equal([output, *(g for g in found if g is not None)], want[index])


def test_one_graph_of_both_passes_with_biases() -> None:
    layer = SonicMoE(512, 256, 16, 4, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    x, grad = random(1000, 512).requires_grad_(), random(1000, 512)
    leaves = [x, *layer.parameters()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gradients(layer(x), leaves, grad)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = gradients(layer(x), leaves, grad)
    for seed in (1, 2):
        with torch.no_grad():
            x.copy_(torch.roll(random(1000, 512) + seed, seed, 0))
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(captured, gradients(layer(x), leaves, grad))


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_the_watch_for_synchronisations_works() -> None:
    one = torch.ones((), device=common.DEVICE)
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        one.item()


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_the_layer_waits_for_no_device(convention: str) -> None:
    layer, problem = built(MEDIUM, convention=convention)
    x = problem.x.detach().requires_grad_()
    leaves = [x, *layer.parameters()]
    for _ in range(2):
        torch.autograd.grad(layer.forward(x), leaves, problem.grad_output)
    with no_synchronisation():
        torch.autograd.grad(layer.forward(x), leaves, problem.grad_output)


def test_neither_do_biases_the_routers_output_or_the_callers_routing() -> None:
    layer = SonicMoE(512, 256, 16, 4, bias=True, dtype=torch.bfloat16, device=common.DEVICE)
    x, grad = random(1000, 512).requires_grad_(), random(1000, 512)
    parameters = list(layer.parameters())
    scores, experts = random(1000, 4, dtype=torch.float32).abs().requires_grad_(), layer_experts(layer, x)
    offsets = torch.arange(0, 4001, 4, device=x.device)

    def both() -> None:
        out, router = layer.forward_with_router(x)
        torch.autograd.grad([out, load_balancing_loss(router)], [x, *parameters], [grad, None])
        for pairs in (None, offsets):
            flat = (scores, experts) if pairs is None else (scores.reshape(-1), experts.reshape(-1))
            routed = function.routed_experts(x, layer.w1, layer.w2, *flat, pairs, "swiglu", layer.bias1, layer.bias2)
            torch.autograd.grad(routed, [x, scores, layer.w1, layer.w2], grad)

    both()
    both()
    with no_synchronisation():
        both()


def layer_experts(layer: SonicMoE, x: Tensor) -> Tensor:
    return function.choose_experts(x, layer.router, layer.k, layer.router_convention)[1]


# Each kernel at the scale it is for, against plain torch expert by expert.


@dataclass
class Big:
    """Operands of every kernel at one layer's size; bf16, real values (H and dH come from the kernels' formulas)."""

    shape: MoEShape
    x: Tensor
    grad_out: Tensor
    w1: Tensor
    w2: Tensor
    bias1: Tensor
    bias2: Tensor
    logits: Tensor
    scores: Tensor  # (T, K)
    experts: Tensor  # (T, K)
    routing: Routing
    row_scores: Tensor
    h: Tensor
    a: Tensor
    offsets: list[int]

    def rows(self) -> Iterator[tuple[int, slice, Tensor]]:
        """(expert, its rows, their tokens) of every expert with rows."""
        for e in range(self.shape.E):
            own = slice(self.offsets[e], self.offsets[e + 1])
            if own.stop > own.start:
                yield e, own, self.routing.gather[own].long()


BIG = {"7B": HEADLINE, "120B": "32768,4096,1024,128,8"}
LIMIT = 1e-2


@pytest.fixture(scope="module", params=list(BIG))
def big(request: pytest.FixtureRequest) -> Iterator[Big]:
    shape = MoEShape.parse(BIG[request.param])
    T, d, n, E, K = (getattr(shape, name) for name in "TdnEK")
    x, router = random(T, d), random(E, d, scale=d**-0.5)
    logits = x @ router.T
    experts = torch.topk(logits.float(), K).indices.int()
    scores = router_scores(logits.float(), experts.long(), "topk_softmax")
    routing = make_routing(experts, E)
    h = random(T * K, 2 * n)
    gate, up = h.chunk(2, dim=1)
    yield Big(
        shape=shape,
        x=x,
        grad_out=random(T, d) * 0.5,
        w1=random(E, 2 * n, d, scale=d**-0.5),
        w2=random(E, d, n, scale=n**-0.5),
        bias1=random(E, 2 * n, scale=0.5),
        bias2=random(E, d, scale=0.5),
        logits=logits,
        scores=scores,
        experts=experts,
        routing=routing,
        row_scores=to_row_order(scores, routing),
        h=h,
        a=F.silu(gate) * up,
        offsets=routing.expert_offsets.tolist(),
    )


@pytest.fixture(autouse=True)
def _full_precision() -> Iterator[None]:
    with full_precision(), torch.enable_grad():
        yield


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


def test_top_k(big: Big) -> None:
    best = torch.sort(big.logits.float(), dim=1, descending=True, stable=True).indices[:, : big.shape.K]
    for convention in ROUTER_CONVENTIONS:
        scores, chosen = top_k(big.logits, big.shape.K, convention)
        assert torch.equal(chosen.long(), best)
        torch.testing.assert_close(scores, router_scores(big.logits.float(), best, convention))


def test_routing_metadata(big: Big) -> None:
    routing, pairs, E = big.routing, big.experts.reshape(-1).long(), big.shape.E
    order = torch.argsort(pairs, stable=True)
    counts = torch.bincount(pairs, minlength=E)
    offsets = F.pad(counts.cumsum(0), (1, 0))
    assert torch.equal(routing.gather.long(), order // big.shape.K)
    assert torch.equal(routing.reverse.long()[order], torch.arange(pairs.numel(), device=pairs.device))
    assert torch.equal(routing.expert_offsets.long(), offsets)
    tiles = (counts + routing.block_m - 1) // routing.block_m
    used = int(tiles.sum())
    owner = torch.repeat_interleave(torch.arange(E, device=pairs.device), tiles)
    within = torch.arange(used, device=pairs.device) - (tiles.cumsum(0) - tiles)[owner]
    assert routing.num_tiles.tolist() == [used]
    assert torch.equal(routing.tile_expert[:used].long(), owner)
    assert torch.equal(routing.tile_row[:used].long(), offsets[owner] + routing.block_m * within)
    assert (routing.tile_row[used:] == pairs.numel()).all()
    assert torch.equal(big.row_scores, big.scores.reshape(-1)[order])


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_up_projection(big: Big, bias: bool) -> None:
    h, a = up_projection(big.x, big.w1, big.routing, "swiglu", big.bias1 if bias else None)

    def want(e: int, tokens: Tensor) -> Tensor:
        rows = big.x[tokens].float() @ big.w1[e].float().T
        return rows + big.bias1[e].float() if bias else rows

    assert relative((h[own], want(e, tokens)) for e, own, tokens in big.rows()) < LIMIT
    assert relative((a[own], swiglu(want(e, tokens))) for e, own, tokens in big.rows()) < LIMIT


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_down_projection(big: Big, bias: bool) -> None:
    y = down_projection(big.a, big.w2, big.routing, big.bias2 if bias else None)
    parts = (
        (y[own], big.a[own].float() @ big.w2[e].float().T + (big.bias2[e].float() if bias else 0.0))
        for e, own, _ in big.rows()
    )
    assert relative(parts) < LIMIT


def test_hidden_gradient(big: Big) -> None:
    grad_h, scaled_a, grad_scores = hidden_gradient(big.grad_out, big.w2, big.h, big.row_scores, big.routing, "swiglu")
    for e, own, tokens in big.rows():
        h = big.h[own].float().requires_grad_()
        scores = big.row_scores[own].clone().requires_grad_()
        scaled = swiglu(h) * scores[:, None]
        want_h, want_scores = torch.autograd.grad(scaled, (h, scores), big.grad_out[tokens].float() @ big.w2[e].float())
        for name, value, expected in (
            ("grad_h", grad_h[own], want_h),
            ("scaled_a", scaled_a[own], scaled.detach()),
            ("grad_scores", grad_scores[own], want_scores),
        ):
            error = relative([(value, expected)])
            assert error < LIMIT, (name, e, error)


def test_weight_gradients(big: Big) -> None:
    grad_w1 = up_weight_gradient(big.h, big.x, big.routing)
    parts = ((grad_w1[e], big.h[own].float().T @ big.x[tokens].float()) for e, own, tokens in big.rows())
    assert relative(parts) < LIMIT
    del grad_w1
    grad_w2 = down_weight_gradient(big.grad_out, big.a, big.routing)
    parts = ((grad_w2[e], big.grad_out[tokens].float().T @ big.a[own].float()) for e, own, tokens in big.rows())
    assert relative(parts) < LIMIT


def test_input_gradient(big: Big) -> None:
    grad_rows = input_gradient(big.h, big.w1, big.routing)
    assert relative((grad_rows[own], big.h[own].float() @ big.w1[e].float()) for e, own, _ in big.rows()) < LIMIT


def test_aggregation(big: Big) -> None:
    rows = random(big.routing.rows, big.shape.d)
    want, weighted = (torch.zeros(big.x.shape, device=rows.device) for _ in range(2))
    for _, own, tokens in big.rows():
        want.index_add_(0, tokens, rows[own].float())
        weighted.index_add_(0, tokens, rows[own].float() * big.row_scores[own, None])
    assert relative([(aggregate(rows, big.routing, base=big.x), want + big.x.float())]) < LIMIT
    assert relative([(aggregate(rows, big.routing, weights=big.row_scores), weighted)]) < LIMIT


def test_biases_gradients(big: Big) -> None:
    sums = expert_sum(big.h, big.routing)
    assert relative((sums[e], big.h[own].float().sum(0)) for e, own, _ in big.rows()) < LIMIT
    gathered = expert_sum(big.grad_out, big.routing, weights=big.row_scores, gathered=True)
    parts = ((gathered[e], big.row_scores[own] @ big.grad_out[tokens].float()) for e, own, tokens in big.rows())
    assert relative(parts) < LIMIT
    products = row_products(big.grad_out, big.bias2, big.routing)
    parts = ((products[own], big.grad_out[tokens].float() @ big.bias2[e].float()) for e, own, tokens in big.rows())
    assert relative(parts) < LIMIT


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
def test_router_backward(big: Big, convention: str) -> None:
    scores, chosen = top_k(big.logits, big.shape.K, convention)
    grad = random(*scores.shape, dtype=torch.float32)
    logits = big.logits.float().requires_grad_()
    (want,) = torch.autograd.grad(router_scores(logits, chosen.long(), convention), logits, grad)
    arguments: tuple[str, Tensor | None, int, torch.dtype] = (
        convention, big.logits if convention == "softmax_topk" else None, big.shape.E, torch.bfloat16,
    )  # fmt: skip
    got = router_backward(scores, chosen, grad, *arguments)
    assert relative([(got, want)]) < LIMIT
    routing = make_routing(chosen, big.shape.E)
    row_scores, row_grad = to_row_order(scores, routing), to_row_order(grad, routing)
    assert torch.equal(router_backward(row_scores, chosen, row_grad, *arguments, reverse=routing.reverse), got)


@pytest.mark.parametrize("shape", list(BIG.values()), ids=list(BIG))
def test_the_whole_layer_at_full_scale(shape: str) -> None:
    check(problem_of(NAME, shape))
