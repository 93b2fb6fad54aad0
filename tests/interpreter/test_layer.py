"""The whole layer on the interpreter: against the harness's fp32 reference, and against plain autograd where the
harness has none (biases, other activations, general routing)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from expert_reference import plain_experts
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.interface import DISTRIBUTIONS, LayerSpec, Point, Problem, RoutingSpec
from harness.operations import get_operation
from harness.problem import make_problem
from harness.registry import load_registry
from harness.regress import trial
from harness.routing import expert_counts, router_scores
from harness.shapes import MoEShape
from implementations.sonicmoe_triton import SonicMoETriton, algorithm, checks, function, operators
from implementations.sonicmoe_triton.activations import ACTIVATIONS, GATED
from implementations.sonicmoe_triton.layer import SonicMoE, load_balancing_loss

SMALL = "20,32,16,4,2"


def problem_of(
    shape: str, dtype: str = "float32", distribution: str = "uniform", convention: str = "topk_softmax"
) -> Problem:
    layer, routing = LayerSpec(router_convention=convention), RoutingSpec(distribution=distribution)
    point = Point("moe_layer", "sonicmoe_triton", MoEShape.parse(shape), dtype, layer, routing, "", "cpu")
    return make_problem(point, "cpu")


def check(problem: Problem) -> None:
    result = get_operation("moe_layer").check(SonicMoETriton().build(problem), problem)
    assert result.reason is None, result.reason


def gradients(out: Tensor, leaves: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def random(*size: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(sum(size) + len(size)))


# Against the harness's reference, with all gradients.


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_distributions(distribution: str) -> None:
    check(problem_of("24,32,16,6,2", "float16", distribution))


@pytest.mark.parametrize("convention", ["softmax_topk", "softmax_topk_renormalised"])
def test_router_conventions(convention: str) -> None:
    check(problem_of("20,32,16,5,3", "float32", "uniform", convention))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("20,32,16,4,1", id="K=1"),
        pytest.param("12,32,16,3,3", id="K=E"),
        pytest.param("9,16,8,1,1", id="E=1"),
        pytest.param("1,32,16,4,2", id="T=1"),
        pytest.param("0,32,16,4,2", id="T=0"),
        pytest.param("10,40,24,3,2", id="uneven widths"),
    ],
)
def test_sizes(shape: str) -> None:
    check(problem_of(shape))


@pytest.mark.parametrize("distribution", ["uniform", "one_group"])
@pytest.mark.parametrize("method", ["nearest", "up", "down", "expert_choice"])
def test_the_plugins_experts_with_the_routing_given(method: str, distribution: str) -> None:
    """Tokens with more, with fewer and without experts, through the gate that a GPU's rows pass."""
    routing = RoutingSpec(method, distribution, m_tile=8)
    shape = MoEShape.parse("20,32,16,5,2")
    point = Point("routed_experts", "sonicmoe_triton", shape, "float16", routing=routing, device="cpu")
    operation = get_operation("routed_experts")
    problem = operation.make_problem(point, "cpu")
    result = operation.check(SonicMoETriton().build(problem), problem)
    assert result.reason is None, result.reason


def test_several_tiles_for_one_expert() -> None:
    check(problem_of("132,16,8,2,1", "float32", "one_group"))


def test_experts_without_tokens_get_exactly_zero() -> None:
    problem = problem_of("16,16,8,6,2", "float16", "one_group")
    layer = SonicMoETriton().build(problem)
    empty = expert_counts(layer.expert_indices(problem.x), 6) == 0
    assert empty.sum() == 4
    x = problem.x.detach().requires_grad_()
    grads = torch.autograd.grad(layer.forward(x), [x, *layer.parameters()], problem.grad_output)
    for name, value in layer.canonical_gradients(grads[1:]).items():
        if name != "grad_router":
            assert not value[empty].any(), name
            assert value[~empty].any(), name


def test_strided_tensors_and_repetition_agree_bit_for_bit() -> None:
    """Strides change nothing; nor does a second backward of the same forward, or another call."""
    problem = problem_of(SMALL)
    layer = SonicMoETriton().build(problem)
    wide = torch.zeros(20, 64)
    wide[:, ::2] = problem.x
    x, strided = problem.x.detach().requires_grad_(), wide[:, ::2].requires_grad_()
    out, again = layer.forward(x), layer.forward(strided)
    first = torch.autograd.grad(out, [x, *layer.parameters()], problem.grad_output, retain_graph=True)
    second = torch.autograd.grad(out, [x, *layer.parameters()], problem.grad_output)
    tall = problem.grad_output.T.contiguous().T
    third = torch.autograd.grad(again, [strided, *layer.parameters()], tall)
    assert torch.equal(out, again)
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    # A sum's gradient has strides zero.
    ones = torch.ones(()).expand(20, 32)
    expanded = torch.autograd.grad(layer.forward(x), layer.parameters(), ones)
    dense = torch.autograd.grad(layer.forward(x), layer.parameters(), ones.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def test_nan_stays_with_its_token_and_its_experts() -> None:
    problem = problem_of("12,16,8,6,2", "float32", "one_group")
    layer = SonicMoETriton().build(problem)
    x = problem.x.clone()
    x[5, 3] = float("nan")
    touched = torch.zeros(6, dtype=torch.bool)
    touched[layer.expert_indices(x)[5].long()] = True
    x.requires_grad_()
    out = layer.forward(x)
    others = torch.arange(12) != 5
    assert out[5].isnan().all() and out[others].isfinite().all()
    grads = torch.autograd.grad(out, [x, *layer.parameters()], problem.grad_output)
    assert grads[0][others].isfinite().all()
    assert grads[1][~touched].isfinite().all() and grads[2][~touched].isfinite().all()


# Against plain autograd.


def plain_layer(x: Tensor, w1: Tensor, w2: Tensor, router: Tensor, k: int, *rest: Any) -> Tensor:
    logits = x @ router.T
    indices = torch.topk(logits, k).indices
    scores = router_scores(logits, indices, "topk_softmax")
    tokens = torch.arange(x.shape[0]).repeat_interleave(k)
    return plain_experts(x, w1, w2, scores.reshape(-1), indices.reshape(-1), tokens, *rest)


def assert_all_close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape
        assert (a - b).norm() <= 1e-5 * b.norm(), i


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str) -> None:
    halves = 2 if activation in GATED else 1
    d, n, experts, k = 16, 8, 3, 2
    tensors = (random(10, d), random(experts, halves * n, d, scale=0.3), random(experts, d, n), random(experts, d))
    biases = (random(experts, halves * n), random(experts, d))
    grad = random(10, d) + 0.5
    got = leaves_of(*tensors, *biases)
    out = function.moe_layer(*got[:4], k, activation=activation, bias1=got[4], bias2=got[5])
    want = leaves_of(*tensors, *biases)
    assert_all_close(gradients(out, got, grad), gradients(plain_layer(*want[:4], k, activation, *want[4:]), want, grad))


def test_routing_of_the_caller() -> None:
    """General routing: tokens with no pair, with one and with all experts; biases, and gradients of the scores."""
    counts = torch.tensor([2, 0, 4, 1, 0, 3])
    experts = torch.tensor([1, 3, 0, 1, 2, 3, 3, 0, 1, 3])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    tensors = (
        random(6, 16),
        random(5, 16, 16, scale=0.3),
        random(5, 16, 8),
        random(10).abs(),
        random(5, 16),
        random(5, 16),
    )
    grad = random(6, 16) + 0.5
    got, want = leaves_of(*tensors), leaves_of(*tensors)
    x, w1, w2, scores, bias1, bias2 = got
    out = function.routed_experts(x, w1, w2, scores, experts, offsets, bias1=bias1, bias2=bias2)
    tokens = torch.arange(6).repeat_interleave(counts)
    plain = plain_experts(*want[:4], experts, tokens, "swiglu", *want[4:])
    found = gradients(out, got, grad)
    assert_all_close(found, gradients(plain, want, grad))
    assert not found[0][[1, 4]].any() and not found[1][[1, 4]].any()
    # Expert 4 has no row.
    assert not any(found[i][4].any() for i in (2, 3, 5, 6))


def test_numbers_that_name_no_expert_add_nothing() -> None:
    x, w1, w2 = leaves_of(random(9, 16), random(3, 16, 16, scale=0.3), random(3, 16, 8))
    scores = random(9, 2).abs().requires_grad_()
    experts = torch.stack([torch.arange(9) % 3, (torch.arange(9) + 1) % 3], 1)
    experts[1, 0], experts[4], experts[7, 1] = -1, torch.tensor([2**31 - 1, 3]), -(2**31)
    named = (experts >= 0) & (experts < 3)
    leaves, grad = [x, w1, w2, scores], random(9, 16)
    got = gradients(function.routed_experts(x, w1, w2, scores, experts), leaves, grad)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), named.sum(1).cumsum(0)])
    want = gradients(function.routed_experts(x, w1, w2, scores[named], experts[named], offsets), leaves, grad)
    assert not got[0][4].any() and not got[4][~named].any()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_pairs_without_an_expert_and_behind_the_last_token(bias: bool) -> None:
    """As rounding on the device leaves them: as many places as there may be pairs, -1 where there is none."""
    counts = torch.tensor([2, 0, 3, 1, 4])
    experts = torch.tensor([0, 2, -1, 1, 2, -1, 0, 1, 2, 3, -1, -1, -1, 7])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    named = (experts >= 0) & (experts < 4)
    tensors = [random(5, 16), random(4, 16, 16, scale=0.3), random(4, 16, 8), random(14).abs()]
    biases = [random(4, 16), random(4, 16)] if bias else []
    got, want = (leaves_of(*tensors, *biases) for _ in range(2))
    grad = random(5, 16)
    out = function.routed_experts(*got[:4], experts, offsets, "swiglu", *got[4:])
    found = gradients(out, got, grad)
    own = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor([2, 0, 2, 0, 4]).cumsum(0)])
    fewer = function.routed_experts(*want[:3], want[3][named], experts[named], own, "swiglu", *want[4:])
    for a, b in zip(found, gradients(fewer, want, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not found[0][[1, 3]].any() and not found[4][~named].any()


def test_routing_of_the_caller_with_k_pairs_a_token() -> None:
    experts = torch.tensor([[0, 2], [1, 0], [2, 1]])
    tensors = (random(3, 16), random(3, 16, 16), random(3, 16, 8), random(3, 2))
    grad = random(3, 16)
    got, want, flat = (leaves_of(*tensors) for _ in range(3))
    found = gradients(function.routed_experts(*got, experts), got, grad)
    tokens = torch.arange(3).repeat_interleave(2)
    plain = plain_experts(*want[:3], want[3].reshape(-1), experts.reshape(-1), tokens)
    assert_all_close(found, gradients(plain, want, grad))
    out = function.routed_experts(*flat[:3], flat[3].reshape(-1), experts.reshape(-1))
    assert all(torch.equal(a, b) for a, b in zip(gradients(out, flat, grad), found, strict=True))


@pytest.mark.parametrize("tokens", [0, 4])
def test_routing_without_any_pair(tokens: int) -> None:
    x, w1, w2 = leaves_of(random(tokens, 16), random(3, 16, 16), random(3, 16, 8))
    out = function.routed_experts(x, w1, w2, torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert out.shape == (tokens, 16)
    assert not any(g.any() for g in gradients(out, [x, w1, w2], torch.ones(tokens, 16)))


# What autograd, compilers and memory see.


def small_leaves() -> list[Tensor]:
    return leaves_of(random(6, 16), random(3, 16, 16, scale=0.3), random(3, 16, 8), random(3, 16))


def test_only_what_is_wanted_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w1, w2, router = small_leaves()
    grad = random(6, 16)
    everything = torch.autograd.grad(function.moe_layer(x, w1, w2, router, 2), [x, w1, w2, router], grad)

    def unwanted(*_: object, **__: object) -> Tensor:
        raise AssertionError("a gradient that nobody asked for")

    for name in ("up_weight_gradient", "down_weight_gradient"):
        monkeypatch.setattr(algorithm, name, unwanted)
    frozen = function.moe_layer(x, w1.detach(), w2.detach(), router, 2)
    got = torch.autograd.grad(frozen, [x, router], grad)
    assert torch.equal(got[0], everything[0]) and torch.equal(got[1], everything[3])
    with torch.no_grad():
        assert not function.moe_layer(x, w1, w2, router, 2).requires_grad
    monkeypatch.undo()
    for name in ("input_gradient", "router_backward"):
        monkeypatch.setattr(algorithm, name, unwanted)
    out = function.moe_layer(x.detach(), w1, w2, router.detach(), 2)
    got = torch.autograd.grad(out, [w1, w2], grad)
    assert torch.equal(got[0], everything[1]) and torch.equal(got[1], everything[2])


@pytest.mark.parametrize("routed", [False, True])
def test_h_is_freed_once_dh_is_there(routed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w1, w2, router = leaves_of(random(20, 32), random(4, 32, 32), random(4, 32, 16), random(4, 32))
    kept: list[weakref.ref[Any]] = []
    alive: list[bool] = []
    hidden_gradient, input_gradient = algorithm.hidden_gradient, algorithm.input_gradient

    def watch_h(grad_out: Tensor, w2: Tensor, h: Tensor, *rest: Any) -> Any:
        kept.append(weakref.ref(h.untyped_storage()))
        return hidden_gradient(grad_out, w2, h, *rest)

    def look(*arguments: Any) -> Tensor:
        alive.append(kept[-1]() is not None)
        return input_gradient(*arguments)

    monkeypatch.setattr(algorithm, "hidden_gradient", watch_h)
    monkeypatch.setattr(algorithm, "input_gradient", look)
    scores, experts = function.choose_experts(x, router, 2)

    def out() -> Tensor:
        if routed:
            return function.routed_experts(x, w1, w2, scores, experts)
        return function.moe_layer(x, w1, w2, router, 2)

    leaves = [x, w1, w2]
    result, grad = out(), random(20, 32)
    first = torch.autograd.grad(result, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(result, leaves, grad)
    assert alive == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result, leaves, grad)


def test_autocast_changes_nothing() -> None:
    x, w1, w2, router = small_leaves()
    leaves, grad = [x, w1, w2, router], random(6, 16)
    want = gradients(function.moe_layer(x, w1, w2, router, 2), leaves, grad)
    scores, experts = function.choose_experts(x, router, 2)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(function.moe_layer(x, w1, w2, router, 2), leaves, grad)
        chosen = function.choose_experts(x, router, 2)
        out = function.moe_layer(x, w1, w2, router, 2)
    outside = torch.autograd.grad(out, leaves, grad)
    for found in (got, [out.detach(), *outside]):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert torch.equal(chosen[0], scores) and torch.equal(chosen[1], experts)


def test_functional_derivatives_are_refused_and_vmap_works() -> None:
    x, w1, w2, router = (t.detach() for t in small_leaves())

    def layer(x: Tensor) -> Tensor:
        return function.moe_layer(x, w1, w2, router, 2)

    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.jvp(layer, (x,), (x,))
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    both = torch.stack([x, 2 * x])
    assert torch.equal(torch.vmap(layer)(both), torch.stack([layer(x), layer(2 * x)]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_offloading(reentrant: bool) -> None:
    x, w1, w2, router = small_leaves()
    leaves, grad = [x, w1, w2, router], random(6, 16)
    want = gradients(function.moe_layer(x, w1, w2, router, 2), leaves, grad)
    out = checkpoint(function.moe_layer, x, w1, w2, router, 2, use_reentrant=reentrant)
    out.backward(grad)
    for leaf, expected in zip(leaves, want[1:], strict=True):
        assert leaf.grad is not None and torch.equal(leaf.grad, expected)
    with torch.autograd.graph.save_on_cpu():
        out = function.moe_layer(x, w1, w2, router, 2)
    assert all(torch.equal(a, b) for a, b in zip(gradients(out, leaves, grad), want, strict=True))


def test_a_second_derivative_is_refused() -> None:
    x, w1, w2, router = small_leaves()
    (grad_x,) = torch.autograd.grad(function.moe_layer(x, w1, w2, router, 2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grad_x.sum().backward()


def test_operators_keep_their_promises() -> None:
    """Schema, no aliasing, fake twins that tell the same shapes; tracing of the one that is compiled nowhere else."""
    x, w1, w2, router = small_leaves()
    bias1, bias2 = leaves_of(random(3, 16), random(3, 16))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    op = torch.ops.sonicmoe_triton
    torch.library.opcheck(
        op.moe_layer.default,
        (x, w1, w2, router, bias1, bias2, 2, "topk_softmax", "swiglu", True),
        test_utils=tests,
    )
    torch.library.opcheck(
        op.moe_layer.default,
        (x, w1, w2, router, None, None, 2, "topk_softmax", "swiglu", False),
        test_utils="test_faketensor",
    )
    experts = torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32)
    offsets = torch.tensor([0, 2, 2, 3, 5, 6, 6], dtype=torch.int32)
    torch.library.opcheck(
        op.routed_experts.default,
        (x, w1, w2, random(6).requires_grad_(), experts, offsets, None, None, 3, "swiglu"),
        test_utils=(*tests, "test_aot_dispatch_static"),
    )


@pytest.mark.parametrize("convention", ["topk_softmax", "softmax_topk"])
def test_compiles_whole(convention: str) -> None:
    layer = SonicMoE(16, 8, 3, 2, router_convention=convention)
    x = random(2, 3, 16).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaves = [x, *layer.parameters()]
    grad = random(2, 3, 16)
    eager = gradients(layer(x), leaves, grad)
    assert all(torch.equal(a, b) for a, b in zip(eager, gradients(compiled(x), leaves, grad), strict=True))


def test_compiles_with_a_loss_of_the_router_and_any_number_of_tokens() -> None:
    layer = SonicMoE(16, 8, 3, 2)

    def loss(x: Tensor) -> Tensor:
        out, router = layer.forward_with_router(x)
        return out.square().sum() + load_balancing_loss(router)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 7):
        x = random(tokens, 16)
        eager = torch.autograd.grad(loss(x), list(layer.parameters()))
        assert_all_close(torch.autograd.grad(compiled(x), list(layer.parameters())), eager)


@pytest.mark.parametrize("convention", ["topk_softmax", "softmax_topk"])
def test_function_and_operator_agree(convention: str) -> None:
    """Bit for bit: what a dispatch mode sees is the operator, what nobody watches the plain function."""
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    leaves = [*small_leaves(), *leaves_of(random(3, 16), random(3, 16))]
    x, w1, w2, router, bias1, bias2 = leaves
    scores, experts = random(6, 2).abs().requires_grad_(), torch.tensor([[0, 1], [2, 0]] * 3)

    def both() -> list[Tensor]:
        out, told = function.moe_layer_with_router(x, w1, w2, router, 2, convention, "swiglu", bias1, bias2)
        found = torch.autograd.grad([out, load_balancing_loss(told)], leaves, [random(6, 16), None])
        again = function.moe_layer(x, w1, w2, router, 2, convention, "swiglu", bias1, bias2)
        found += torch.autograd.grad(again, leaves, random(6, 16))
        routed = function.routed_experts(x, w1, w2, scores, experts, None, "swiglu", bias1, bias2)
        found += torch.autograd.grad(routed, [x, w1, w2, scores, bias1, bias2], random(6, 16))
        return [out, again, routed, told.logits, told.counts, *found]

    eager = both()
    with Watch():
        watched = both()
    assert all(torch.equal(a, b) for a, b in zip(eager, watched, strict=True))
    for name in ("moe_layer", "moe_layer_backward", "routed_experts", "routed_experts_backward"):
        assert f"sonicmoe_triton.{name}.default" in seen
    # The forward unwatched, the backward watched.
    out = function.moe_layer(x, w1, w2, router, 2, convention, "swiglu", bias1, bias2)
    seen.clear()
    with Watch():
        found = torch.autograd.grad(out, leaves, random(6, 16))
    assert "sonicmoe_triton.moe_layer_backward.default" in seen
    first = 5 + len(leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, eager[first : first + len(leaves)], strict=True))


def test_biases_that_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w1, w2, router = small_leaves()
    bias1, bias2 = random(3, 16), random(3, 16)
    out = function.moe_layer(x, w1, w2, router, 2, bias1=bias1, bias2=bias2)
    monkeypatch.setattr(algorithm, "expert_sum", None)
    assert all(g is not None for g in torch.autograd.grad(out, [x, w1, w2, router], random(6, 16)))


def test_a_loss_of_the_logits_alone() -> None:
    x, w1, w2, router = small_leaves()
    _, told = function.moe_layer_with_router(x, w1, w2, router, 2)
    grad = random(6, 3)
    found = torch.autograd.grad(told.logits, [x, router, w1], grad)
    torch.testing.assert_close(found[0], grad @ router)
    torch.testing.assert_close(found[1], grad.T @ x)
    assert not found[2].any()


def test_nothing_outlives_its_output() -> None:
    """Reference counts alone free what a forward held, and a backward what it made."""
    x, w1, w2, router = small_leaves()
    held: list[weakref.ref[Tensor]] = []

    def note(tensor: Tensor) -> Tensor:
        held.append(weakref.ref(tensor))
        return tensor

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out, told = function.moe_layer_with_router(x, w1, w2, router, 2)
        torch.autograd.grad([out, told.logits], [x, w1], [random(6, 16), random(6, 3)])
        del out, told
        alive = [ref() for ref in held if ref() is not None]
        inputs = x, w1, w2, router
        assert all(any(tensor is known for known in inputs) for tensor in alive)
    finally:
        gc.enable()


class _NoHost(TorchDispatchMode):
    """Refuses what reads values on the host."""

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "bincount"), name
        return func(*args, **(kwargs or {}))


def test_no_host_synchronisation() -> None:
    """The operators' bodies, where a mode can see what they call."""
    x, w1, w2, router = (t.detach() for t in small_leaves())
    bias1, bias2 = random(3, 16), random(3, 16)
    arguments = 2, "softmax_topk", "swiglu"
    with _NoHost(), torch.no_grad():
        out, logits, *held = operators.moe_layer_operator._init_fn(x, w1, w2, router, bias1, bias2, *arguments, True)
        operators.moe_layer_backward_operator._init_fn(
            out, logits, x, w1, w2, router, bias1, bias2, logits, *held, *arguments, [True] * 6
        )
        experts, offsets = torch.tensor([0, 1, 2, 0], dtype=torch.int32), torch.tensor([0, 2, 2, 3, 3, 3, 4]).int()
        operators.routed_experts_operator._init_fn(x, w1, w2, random(4), experts, offsets, None, None, 3, "swiglu")


def held_bytes(convention: str, with_router: bool, T: int, d: int, n: int, E: int, K: int, dtype: torch.dtype) -> int:
    """Bytes of the output and of all that autograd keeps and that was no input."""
    x, w1, w2, router = (torch.randn(s).to(dtype).requires_grad_() for s in ((T, d), (E, 2 * n, d), (E, d, n), (E, d)))
    inputs = {t.untyped_storage()._cdata for t in (x, w1, w2, router)}
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in inputs:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        if with_router:
            out, _ = function.moe_layer_with_router(x, w1, w2, router, K, convention)
        else:
            out = function.moe_layer(x, w1, w2, router, K, convention)
        note(out)
    gc.collect()
    assert out.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("fake", [False, True], ids=["real", "fake"])
def test_held_memory_is_the_algorithms(fake: bool) -> None:
    T, d, n, E, K = (24576, 1536, 256, 128, 8) if fake else (20, 32, 16, 4, 2)
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.enable_grad():
        held = {name: held_bytes(name, False, T, d, n, E, K, torch.float16) for name in checks.CONVENTIONS}
        # Logits that the caller got and dropped are gone.
        assert held_bytes("topk_softmax", True, T, d, n, E, K, torch.float16) == held["topk_softmax"]
        narrow = [held_bytes("topk_softmax", False, T, size, n - 5, E, K, torch.float16) for size in (d - 3, d)]
    tiles = T * K // 128 + E
    least = 2 * T * d + 4 * T * K * n + 16 * T * K
    assert held["topk_softmax"] == held["softmax_topk_renormalised"] == least + 4 * (E + 1) + 8 * tiles + 4
    assert held["softmax_topk"] == held["topk_softmax"] + 2 * T * E
    # Widths that the kernels do not take: H of the next n that they do, and copies of x and of all weights; where d
    # fits, of the experts' alone.
    copies = 2 * (T * d + 3 * E * n * d + E * d)
    assert narrow == [held["topk_softmax"] - 2 * T * 3 + copies, held["topk_softmax"] + 6 * E * n * d]


# The module.


def test_leading_sizes_and_layouts() -> None:
    layer = SonicMoE(16, 8, 3, 2)
    gate, up, down = random(3, 8, 16), random(3, 8, 16) + 0.1, random(3, 16, 8)
    layer.load_gate_up_down(gate, up, down)
    x = random(2, 3, 16)
    out = layer(x)
    assert out.shape == (2, 3, 16)
    plain = plain_layer(x.view(6, 16), torch.cat([gate, up], 1), down, layer.router.detach(), 2)
    assert_all_close([out.detach().view(6, 16)], [plain])
    interleaved = torch.stack([gate, up], 2).reshape(3, 16, 16)
    for joint, layout in ((interleaved, "interleaved"), (torch.cat([gate, up], 1), "concatenated")):
        other = SonicMoE(16, 8, 3, 2)
        other.load_gate_up_down(joint, None, down, layout)
        assert torch.equal(other.w1, layer.w1) and torch.equal(other.w2, layer.w2)
    assert layer(x[0, 0]).shape == (16,)
    ungated = SonicMoE(16, 8, 3, 2, activation="relu2")
    ungated.load_gate_up_down(gate, None, down)
    assert torch.equal(ungated.w1, gate)


def test_router_output_and_its_losses() -> None:
    layer = SonicMoE(16, 8, 4, 2, bias=True)
    x = random(6, 16)
    out, router = layer.forward_with_router(x)
    assert torch.equal(out, layer(x))
    assert torch.equal(router.logits, x @ layer.router.T)
    assert router.counts.dtype == torch.int32 and router.counts.sum() == 12
    loss = load_balancing_loss(router)
    (got,) = torch.autograd.grad(loss, layer.router, retain_graph=True)
    logits = x @ layer.router.T
    share = expert_counts(torch.topk(logits, 2).indices, 4) / 12
    plain = 4 * (share * torch.softmax(logits, -1).mean(0)).sum()
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(got, torch.autograd.grad(plain, layer.router)[0])
    # Both losses together: gradients add up.
    (both,) = torch.autograd.grad(out.sum() + loss, layer.router)
    (alone,) = torch.autograd.grad(layer(x).sum(), layer.router)
    torch.testing.assert_close(both, alone + got)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"d": 0}, "d = 0: must be at least 1"),
        ({"n": -4}, "n = -4: must be at least 1"),
        ({"n": 8.0}, "n = 8.0: must be an integer"),
        ({"k": 4}, "K = 4: must be between 1 and 3"),
        ({"k": 0}, "K = 0"),
        ({"dtype": torch.float64}, "torch.float64: must be one of"),
        ({"experts": 1025}, "E = 1025: at most 1024"),
        ({"activation": "tanh"}, "unknown activation 'tanh'"),
        ({"router_convention": "none"}, "unknown router convention 'none'"),
    ],
)
def test_sizes_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SonicMoE(**{"d": 16, "n": 8, "experts": 3, "k": 2, **arguments})


def test_tensors_that_are_refused() -> None:
    layer = SonicMoE(16, 8, 3, 2)
    with pytest.raises(ValueError, match=r"d: x has shape \(5, 20\), expected \(…, 16\)"):
        layer(random(5, 20))
    with pytest.raises(ValueError, match=r"router is torch\.float32 on cpu, x is torch\.float16"):
        layer(random(5, 16).half())
    gate, down = random(3, 8, 16), random(3, 16, 8)
    with pytest.raises(ValueError, match="unknown layout 'mixed'"):
        layer.load_gate_up_down(gate, gate, down, "mixed")
    with pytest.raises(ValueError, match=r"up has shape \(3, 8, 8\), expected \(3, 8, 16\)"):
        layer.load_gate_up_down(gate, gate[..., :8], down)
    with pytest.raises(ValueError, match=r"gate has shape \(3, 8, 16\), expected \(3, 16, 16\)"):
        layer.load_gate_up_down(gate, None, down)
    x, w1, w2, router = (t.detach() for t in small_leaves())
    with pytest.raises(ValueError, match="d: router has 8 columns, x has 16"):
        function.moe_layer(x, w1, w2, router[:, :8], 2)
    with pytest.raises(ValueError, match="E: router has 2 experts, w1 has 3"):
        function.moe_layer(x, w1, w2, router[:2], 2)
    with pytest.raises(ValueError, match="n: w1 has 16 rows, expected 8 for swiglu, as w2 takes n = 4"):
        function.moe_layer(x, w1, w2[..., :4], router, 2)
    with pytest.raises(ValueError, match="d = 16 and n = 0: must be at least 1"):
        function.moe_layer(x, w1[:, :0], w2[..., :0], router, 2)
    with pytest.raises(ValueError, match="bias1 has shape"):
        function.moe_layer(x, w1, w2, router, 2, bias1=random(3, 8))
    experts = torch.zeros(7, dtype=torch.int32)
    with pytest.raises(ValueError, match="P = 7 pairs are no multiple of T = 6"):
        function.routed_experts(x, w1, w2, random(7), experts)
    with pytest.raises(ValueError, match=r"token_offsets has shape \(3,\), expected \(T\+1,\) = \(7,\)"):
        function.routed_experts(x, w1, w2, random(7), experts, torch.zeros(3))
    with pytest.raises(ValueError, match="scores are on meta, x is on cpu"):
        function.routed_experts(x, w1, w2, random(6, 2).to("meta"), experts[:6, None].expand(6, 2))
    with pytest.raises(ValueError, match=r"torch\.float64: must be one of"):
        function.moe_layer(x.double(), w1.double(), w2.double(), router.double(), 2)


def test_more_pairs_than_32_bits_number_are_refused() -> None:
    x = torch.empty(2**29, 8, dtype=torch.float16, device="meta")
    w1, w2, router = (
        torch.empty(*size, dtype=torch.float16, device="meta") for size in ((2, 16, 8), (2, 8, 8), (2, 8))
    )
    with pytest.raises(ValueError, match=r"T \* K = 1073741824: must be below 1073741824"):
        function.moe_layer(x, w1, w2, router, 2)


def test_a_slowdown_that_is_planted_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trial.PERMILLE, "500")
    found = load_registry(extra_folders=[trial.PLANTED])
    problem = problem_of(SMALL)
    results = []
    for name in (trial.SLOWED, "sonicmoe_triton"):
        layer, x = found.get(name).build(problem), problem.x.detach().requires_grad_()
        results.append(gradients(layer.forward(x), [x, *layer.parameters()], problem.grad_output))
    assert all(torch.equal(slowed, ours) for slowed, ours in zip(*results, strict=True))
