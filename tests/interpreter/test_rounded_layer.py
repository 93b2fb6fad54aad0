"""The layer with token rounding inside, on the interpreter: the harness's gate, and the module."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expert_reference import plain_rounded_layer
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.interface import ROUTER_CONVENTIONS, LayerSpec, Point, Problem, RoutingSpec
from harness.operations import get_operation
from harness.problem import make_problem
from harness.shapes import MoEShape
from harness.token_rounding import ROUNDINGS, round_counts
from implementations.sonicmoe_triton import SonicMoETriton, function
from implementations.sonicmoe_triton.activations import is_gated
from implementations.sonicmoe_triton.layer import SonicMoE, load_balancing_loss
from implementations.sonicmoe_triton.rounding import RoundedRouting, pairs_bound, round_routing

SMALL = "40,16,8,6,2"
TILE = 8


def problem_of(shape: str, method: str, distribution: str = "uniform", convention: str = "topk_softmax") -> Problem:
    layer, routing = LayerSpec(router_convention=convention), RoutingSpec(method, distribution, m_tile=TILE)
    point = Point("moe_layer", "sonicmoe_triton", MoEShape.parse(shape), "float32", layer, routing, "", "cpu")
    return make_problem(point, "cpu")


def check(problem: Problem) -> tuple[int, int]:
    result = get_operation("moe_layer").check(SonicMoETriton().build(problem), problem)
    assert result.reason is None, result.reason
    return result.moved


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def random(*size: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(sum(size) + len(size)))


def tensors() -> list[Tensor]:
    return leaves_of(random(40, 16), random(6, 16, 16, scale=0.3), random(6, 16, 8), random(6, 16))


@pytest.mark.parametrize("method", ROUNDINGS)
def test_the_gate_passes_every_rounding(method: str) -> None:
    dropped, added = check(problem_of(SMALL, method))
    assert (dropped > 0) == (method != "up") and (added > 0) == (method != "down")


@pytest.mark.parametrize(
    ("convention", "distribution"), list(zip(ROUTER_CONVENTIONS, ("skewed", "empty_experts", "skewed"), strict=True))
)
def test_the_gate_passes_conventions_and_distributions(convention: str, distribution: str) -> None:
    check(problem_of(SMALL, "nearest", distribution, convention))


@pytest.mark.parametrize("shape", ["5,16,8,4,2", "0,16,8,4,2", "1,16,8,4,2", "40,16,8,1,1", "24,16,8,3,3"])
def test_the_gate_passes_the_edges(shape: str) -> None:
    check(problem_of(shape, "nearest"))
    check(problem_of(shape, "up"))


def test_the_gate_sees_another_rounding() -> None:
    problem = problem_of(SMALL, "up")
    layer = SonicMoETriton().build(problem)
    other = replace(problem.point, routing=replace(problem.point.routing, method="down"))
    result = get_operation("moe_layer").check(layer, replace(problem, point=other))
    assert result.reason is not None and "keep another number of tokens than down gives" in result.reason


@pytest.fixture
def routings(monkeypatch: pytest.MonkeyPatch) -> list[RoundedRouting]:
    """Those that the layer makes, one after the other."""
    made: list[RoundedRouting] = []

    def make(*args: object) -> RoundedRouting:
        made.append(round_routing(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(function, "round_routing", make)
    return made


def kept_of(routing: RoundedRouting) -> Tensor:
    """(P,), the experts of the pairs that there are."""
    return routing.experts[: int(routing.token_offsets[-1])]


@pytest.mark.parametrize(
    ("activation", "convention", "method"),
    [
        ("swiglu", "topk_softmax", "nearest"),
        ("relu2", "softmax_topk", "up"),
        ("gelu", "softmax_topk_renormalised", "down"),
        ("geglu", "topk_softmax", "balanced"),
    ],
)
def test_biases_and_activations_against_autograd(
    activation: str, convention: str, method: str, routings: list[RoundedRouting]
) -> None:
    T, d, n, E, k = 40, 16, 8, 6, 2
    hidden = 2 * n if is_gated(activation) else n
    tensors = [
        random(T, d), random(E, hidden, d, scale=0.3), random(E, d, n), random(E, d), random(E, hidden), random(E, d)
    ]  # fmt: skip
    leaves, plain = leaves_of(*tensors), leaves_of(*tensors)
    x, w1, w2, router, bias1, bias2 = leaves
    out, _ = function.rounded_moe_layer(x, w1, w2, router, k, TILE, method, convention, activation, bias1, bias2)
    indices = function.choose_experts(tensors[0], tensors[3], k, convention)[1]
    want = plain_rounded_layer(plain, indices, kept_of(routings[0]), routings[0].token_offsets, convention, activation)
    grad = random(T, d, scale=2.0)
    found, expected = torch.autograd.grad(out, leaves, grad), torch.autograd.grad(want, plain, grad)
    for a, b in zip((out, *found), (want, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_stochastic_draws_anew_by_the_default_generator(routings: list[RoundedRouting]) -> None:
    torch.manual_seed(0)
    leaves, numbers = tensors(), set()
    for _ in range(6):
        _, said = function.rounded_moe_layer(*leaves, 2, TILE, "stochastic")
        found = torch.bincount(kept_of(routings[-1]), minlength=6)
        down, up = (round_counts(said.counts, 40, TILE, method) for method in ("down", "up"))
        assert ((found == down) | (found == up)).all()
        numbers.add(tuple(found.tolist()))
    assert len(numbers) > 1


@pytest.mark.parametrize("given", [False, True], ids=["default generator", "draws"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_rounds_the_same_again(reentrant: bool, given: bool, routings: list[RoundedRouting]) -> None:
    leaves, draws = tensors(), torch.arange(6) if given else None
    torch.manual_seed(0)

    def run(*of: Tensor) -> Tensor:
        return function.rounded_moe_layer(*of, 2, TILE, "stochastic", draws=draws)[0]

    out = checkpoint(run, *leaves, use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    out.square().sum().backward()
    first, second = routings
    assert torch.equal(first.experts, second.experts)
    torch.manual_seed(0)
    want = torch.autograd.grad(run(*(plain := tensors())).square().sum(), plain)
    assert all(leaf.grad is not None and torch.equal(leaf.grad, g) for leaf, g in zip(leaves, want, strict=True))


def test_tokens_without_an_expert_are_zero() -> None:
    x, w1, w2, router = tensors()
    x = x[:12].detach().requires_grad_()
    out, said = function.rounded_moe_layer(x, w1, w2, router, 1, 8, "down")
    grad_x, grad_w1, grad_router = torch.autograd.grad(out, [x, w1, router], random(12, 16))
    assert said.counts.sum() == 12
    alone = (out == 0).all(1)
    assert alone.any() and not grad_x[alone].any()
    kept = said.counts // 8 * 8
    assert int((~alone).sum()) == int(kept.sum())
    assert not grad_w1[kept == 0].any()
    assert grad_router.isfinite().all()


class _Watched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_operators_find_what_the_eager_layer_finds() -> None:
    grad = random(40, 16)

    def run() -> list[Tensor]:
        leaves = tensors()
        out, said = function.rounded_moe_layer(*leaves, 2, 8)
        loss = (out * grad).sum() + load_balancing_loss(said)
        return [out.detach(), said.counts, *torch.autograd.grad(loss, leaves)]

    eager = run()
    with _Watched() as watched:
        found = run()
    for name in ("round_routing", "round_routing_backward", "routed_experts", "routed_experts_backward"):
        assert f"sonicmoe_triton.{name}.default" in watched.seen
    assert all(torch.equal(a, b) for a, b in zip(eager, found, strict=True))


@pytest.mark.parametrize("method", ROUNDINGS)
def test_the_layer_traces_on_meta_tensors(method: str) -> None:
    layer = SonicMoE(16, 8, 6, 2, bias=True, rounding=method, m_tile=8, device="meta")
    x = torch.empty(5, 8, 16, device="meta", requires_grad=True)
    out, said = layer.forward_with_router(x)
    assert out.is_meta and out.shape == x.shape and said.logits.shape == (40, 6)
    leaves = [x, *layer.parameters()]
    for leaf, found in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert found.is_meta and found.shape == leaf.shape


@pytest.mark.parametrize("method", ROUNDINGS)
@pytest.mark.parametrize("convention", ["topk_softmax", "softmax_topk"])
def test_fake_tensors_have_the_sizes(method: str, convention: str) -> None:
    with FakeTensorMode():
        x = torch.empty(300, 16, dtype=torch.bfloat16, requires_grad=True)
        w1, w2, router = (
            torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in ((6, 16, 16), (6, 16, 8), (6, 16))
        )
        out, said = function.rounded_moe_layer(x, w1, w2, router, 2, 128, method, convention)
        assert out.shape == x.shape and said.logits.shape == (300, 6) and said.counts.shape == (6,)
        for leaf, found in zip((x, router), torch.autograd.grad(out.sum(), [x, router]), strict=True):
            assert found.shape == leaf.shape and found.dtype == leaf.dtype
    assert pairs_bound(300, 6, 2, 128, "nearest") == 600 + 6 * 64


def test_the_module_rounds_while_training_only() -> None:
    torch.manual_seed(0)
    layer = SonicMoE(16, 8, 6, 2, rounding="up", m_tile=8)
    plain = SonicMoE(16, 8, 6, 2)
    plain.load_state_dict(layer.state_dict())
    x = random(2, 20, 16)
    assert "rounding=up, m_tile=8" in repr(layer)
    rounded, said = layer.forward_with_router(x)
    assert torch.equal(layer(x), rounded) and rounded.shape == x.shape
    top_k, expected = plain.forward_with_router(x)
    assert not torch.equal(rounded, top_k)
    assert torch.equal(said.counts, expected.counts) and torch.equal(said.logits, expected.logits)
    load_balancing_loss(said).backward()
    assert layer.router.grad is not None and layer.router.grad.any()
    layer.eval()
    assert torch.equal(layer(x), top_k)


def test_bad_roundings_are_named() -> None:
    with pytest.raises(ValueError, match="unknown rounding 'neares'; choose from nearest"):
        SonicMoE(16, 8, 6, 2, rounding="neares")
    with pytest.raises(ValueError, match="m_tile = 0"):
        SonicMoE(16, 8, 6, 2, rounding="up", m_tile=0)
    with pytest.raises(ValueError, match="m_tile = 0"):
        SonicMoE(16, 8, 6, 2, m_tile=0)
    with pytest.raises(ValueError, match="unknown rounding 'neares'; choose from nearest"):
        function.rounded_moe_layer(*tensors(), 2, 8, "neares")
    with pytest.raises(ValueError, match="unknown added_weight 'x'; choose from renormalised"):
        function.rounded_moe_layer(*tensors(), 2, 8, added_weight="x")
    with pytest.raises(ValueError, match="K = 7"):
        function.rounded_moe_layer(*tensors(), 7)


@pytest.mark.parametrize("m_tile", [8.5, 8.0, True, "nearest", None])
def test_a_tile_is_a_number_of_rows(m_tile: object) -> None:
    match = f"m_tile = {m_tile!r}: must be an integer"
    for rounding in (None, "up"):
        with pytest.raises(ValueError, match=match):
            SonicMoE(16, 8, 6, 2, rounding=rounding, m_tile=m_tile)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=match):
        function.rounded_moe_layer(*tensors(), 2, m_tile)  # type: ignore[arg-type]


def test_a_tile_beyond_all_integers_changes_nothing() -> None:
    leaves = tensors()
    for method in ROUNDINGS:
        out, _ = function.rounded_moe_layer(*leaves, 2, 2**70, method)
        torch.testing.assert_close(out, function.moe_layer(*leaves, 2))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"draws": torch.zeros(6, dtype=torch.int64)}, "draws: for the rounding 'stochastic' only, not 'up'"),
        ({"generator": torch.Generator()}, "generator: for the rounding 'stochastic' only, not 'up'"),
        ({"generator": 3, "rounding": "stochastic"}, "generator must be a torch.Generator, not int"),
        ({"draws": 3, "rounding": "stochastic"}, r"draws must be \(6,\) integers on cpu, not int"),
    ],
)
def test_bad_draws_are_named(arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        function.rounded_moe_layer(*tensors(), 2, **({"m_tile": 8, "rounding": "up"} | arguments))  # type: ignore[arg-type]


def test_too_many_rows_are_refused_before_anything_is_computed() -> None:
    """Top-K's rows would do; what rounding may add to them would not."""
    x = torch.empty(2**28, 16, dtype=torch.float16, device="meta")
    weights = [torch.empty(s, dtype=torch.float16, device="meta") for s in ((6, 16, 16), (6, 16, 8), (6, 16))]
    with _Watched() as watched, pytest.raises(ValueError) as raised:
        function.rounded_moe_layer(x, *weights, 2, 2**28, "up")
    assert str(raised.value) == (
        f"T = {2**28} tokens and E = 6 experts may have {2**28 * 6} pairs by the rounding 'up' to m_tile = {2**28}: "
        f"must be below {2**30}"
    )
    assert not watched.seen


def test_autocast_changes_nothing() -> None:
    leaves = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, said = function.rounded_moe_layer(*leaves, 2, 8)
    want, _ = function.rounded_moe_layer(*leaves, 2, 8)
    assert said.logits.dtype == torch.float32 and torch.equal(found, want)


def test_autocast_around_the_backward_changes_no_gradient() -> None:
    def gradients(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out, said = function.rounded_moe_layer(*leaves, 2, 8)
        loss = (out * random(40, 16)).sum() + load_balancing_loss(said)
        return torch.autograd.grad(loss, leaves)

    want = gradients(tensors())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(tensors())
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_logits_have_the_gradient_of_a_product() -> None:
    """Bit for bit, and only where it is wanted."""
    x, _, _, router = tensors()
    grad = random(40, 6)
    found = torch.autograd.grad(function._logits(x, router), [x, router], grad)
    want = torch.autograd.grad(torch.mm(x, router.t()), [x, router], grad)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    alone = torch.autograd.grad(function._logits(x.detach(), router), router, grad)
    assert torch.equal(alone[0], want[1])


@pytest.mark.parametrize("convention", ["topk_softmax", "softmax_topk"])
def test_the_operator_keeps_its_promises(convention: str) -> None:
    logits = random(40, 6).requires_grad_()
    divided = convention == "topk_softmax"
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if divided:  # otherwise the sums are a tensor without values, which differ from call to call
        tests.append("test_aot_dispatch_static")
    operator = torch.ops.sonicmoe_triton.round_routing.default
    torch.library.opcheck(operator, (logits, None, 6, 2, divided, False, 8, "nearest"), test_utils=tests)


@pytest.mark.parametrize("method", ["stochastic"])
def test_compiles_whole_with_any_number_of_tokens(method: str) -> None:
    layer = SonicMoE(16, 8, 3, 2, rounding=method, m_tile=8)

    def loss(x: Tensor) -> Tensor:
        out, router = layer.forward_with_router(x)
        return out.square().sum() + load_balancing_loss(router)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (33, 50):
        x = random(tokens, 16).requires_grad_()
        leaves = [x, *layer.parameters()]
        found = []
        for way in (loss, compiled):
            torch.manual_seed(0)
            value = way(x)
            found.append([value.detach(), *torch.autograd.grad(value, leaves)])
        for eager, traced in zip(*found, strict=True):
            torch.testing.assert_close(eager, traced, rtol=1e-5, atol=1e-6)


def test_functional_derivatives_are_refused() -> None:
    x, *others = (t.detach() for t in tensors())
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: function.rounded_moe_layer(x, *others, 2, 8)[0].sum())(x)
