"""The gate refuses planted wrong layers, and accepts right ones down to a single token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import RightLayer, problem_of
from torch import Tensor

from harness.correctness import TOLERANCES, Correctness, check_routing, check_shapes, evaluate
from harness.interface import DISTRIBUTIONS, DTYPES, ROUTER_CONVENTIONS
from harness.operations import MoELayer
from harness.routing import choose_experts

SHAPE = "64,64,32,8,2"


class GateAndUpSwapped(RightLayer):
    def expert(self, e: int, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return super().expert(e, x, up, gate, down)


class NoScores(RightLayer):
    def scores(self, logits: Tensor, indices: Tensor) -> Tensor:
        return super().scores(logits, indices) * 0 + 1 / self.k


class ScoresOfTheOtherSlot(RightLayer):
    def scores(self, logits: Tensor, indices: Tensor) -> Tensor:
        return super().scores(logits, indices).flip(-1)


class OtherActivation(RightLayer):
    def expert(self, e: int, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, gate)) * F.linear(x, up), down)


class GradientsOfTheFirstCall(RightLayer):
    """Hands out what an earlier backward left in its buffers: right as long as nothing changes."""

    first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        layer = self

        class Stale(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, weight: Tensor) -> Tensor:
                return weight.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                if layer.first is None:
                    layer.first = grad.clone()
                return layer.first

        down, self.down = self.down, Stale.apply(self.down)
        try:
            return super().forward(x)
        finally:
            self.down = down


class AccumulatedGradients(RightLayer):
    """Adds to the last call's weight gradients, as .grad does."""

    total: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        layer = self

        class Accumulates(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, weight: Tensor) -> Tensor:
                return weight.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                layer.total = layer.total + grad
                return layer.total

        gate, self.gate = self.gate, Accumulates.apply(self.gate)
        try:
            return super().forward(x)
        finally:
            self.gate = gate


class OutputOfTheFirstCall(RightLayer):
    first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.first is None:
            self.first = out.detach()
        return self.first + (out - out.detach())


class ExpertSkipped(RightLayer):
    def expert(self, e: int, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return super().expert(e, x, gate, up, down) * float(e != 3)


class NoRouterGradient(RightLayer):
    def scores(self, logits: Tensor, indices: Tensor) -> Tensor:
        return super().scores(logits.detach(), indices)


class _SoftmaxUncentred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        scores = torch.softmax(logits, -1)
        ctx.save_for_backward(scores)
        return scores

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * grad


class NoCentring(RightLayer):
    def scores(self, logits: Tensor, indices: Tensor) -> Tensor:
        return _SoftmaxUncentred.apply(torch.gather(logits, 1, indices))


class ScaledRouterGradient(RightLayer):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        return {**right, "grad_router": right["grad_router"] * 1.1}


class NegatedRouterGradient(RightLayer):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        return {**right, "grad_router": -right["grad_router"]}


class ScaledWeightGradients(RightLayer):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: g * 1.05 for name, g in super().canonical_gradients(gradients).items()}


class GradientsOfTheNextExpert(RightLayer):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: g.roll(1, 0) for name, g in super().canonical_gradients(gradients).items()}


class OneNaN(RightLayer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        mask = torch.zeros_like(out)
        mask[0, 0] = float("nan")
        return out + mask


class OneNaNInAGradient(RightLayer):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        right["grad_down"] = right["grad_down"].clone()
        right["grad_down"][-1, -1, -1] = float("nan")
        return right


class InfiniteOutput(RightLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float("inf")


class WrongExperts(RightLayer):
    """Takes the K+1-th expert instead of the K-th, and says nothing."""

    def choose(self, logits: Tensor) -> Tensor:
        top = torch.topk(logits, self.k + 1, dim=-1).indices
        return torch.cat([top[:, : self.k - 1], top[:, self.k :]], 1)


class WrongExpertsSaysSo(WrongExperts):
    def expert_indices(self, x: Tensor) -> Tensor:
        return self.choose(self.logits(x))


class ExpertTwice(RightLayer):
    def choose(self, logits: Tensor) -> Tensor:
        return super().choose(logits)[:, :1].expand(-1, self.k)

    def expert_indices(self, x: Tensor) -> Tensor:
        return self.choose(self.logits(x))


class IndexOutOfRange(RightLayer):
    def expert_indices(self, x: Tensor) -> Tensor:
        return self.choose(self.logits(x)) + 1


class IndicesOfAnotherShape(RightLayer):
    def expert_indices(self, x: Tensor) -> Tensor:
        return self.choose(self.logits(x))[:, :1]


class GradientsOfEmptyExperts(RightLayer):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        empty = right["grad_up"].abs().amax((1, 2)) == 0
        right["grad_up"] = right["grad_up"].clone()
        right["grad_up"][empty, 0, 0] = 1e-30
        return right


class InputChanged(RightLayer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x.clone())
        x.data[0, 0] += 1e-2
        return out


class IncomingGradientChanged(RightLayer):
    def forward(self, x: Tensor) -> Tensor:
        class Scales(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, value: Tensor) -> Tensor:
                return value.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                kept = grad.clone()
                grad.data.mul_(2)
                return kept

        return Scales.apply(super().forward(x))


class WeightsChanged(RightLayer):
    """Rescales the weights that it shares with the problem: consistent with themselves, but not what was asked."""

    def forward(self, x: Tensor) -> Tensor:
        self.gate.data.mul_(1.01)
        return super().forward(x)


class TransposedDownGradient(RightLayer):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        return {**right, "grad_down": right["grad_down"].transpose(1, 2)}


class MissingGradient(RightLayer):
    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        del right["grad_up"]
        return right


class RolledOutput(RightLayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).roll(1, 0)


class TokenDropped(RightLayer):
    def forward(self, x: Tensor) -> Tensor:
        keep = torch.ones_like(x[:, :1])
        keep[-1] = 0
        return super().forward(x) * keep


class NoRouterTermInInputGradient(RightLayer):
    def logits(self, x: Tensor) -> Tensor:
        return super().logits(x.detach())


#: A wrong layer, and a part of the sentence that refuses it.
WRONG: list[tuple[type[RightLayer], str]] = [
    (GateAndUpSwapped, "output"),
    (NoScores, "output"),
    (ScoresOfTheOtherSlot, "output"),
    (OtherActivation, "output"),
    (GradientsOfTheFirstCall, "grad_down"),
    (AccumulatedGradients, "grad_gate"),
    (OutputOfTheFirstCall, "output"),
    (ExpertSkipped, "output"),
    (NoRouterGradient, "grad_router"),
    (NoCentring, "grad_router"),
    (ScaledRouterGradient, "grad_router"),
    (NegatedRouterGradient, "grad_router"),
    (ScaledWeightGradients, "grad_gate"),
    (GradientsOfTheNextExpert, "grad_gate"),
    (OneNaN, "output nan"),
    (OneNaNInAGradient, "grad_down nan"),
    (InfiniteOutput, "output"),
    (WrongExperts, "output"),
    (WrongExpertsSaysSo, "not among their top 2"),
    (ExpertTwice, "one expert twice"),
    (IndexOutOfRange, "out of range"),
    (IndicesOfAnotherShape, "expert indices have shape"),
    (InputChanged, "changed its input"),
    (IncomingGradientChanged, "changed the incoming gradient"),
    (WeightsChanged, "changed the problem's gate weights"),
    (TransposedDownGradient, "grad_down has shape (8, 32, 64), expected (8, 64, 32)"),
    (MissingGradient, "grad_up is missing"),
    (RolledOutput, "output"),
    (TokenDropped, "output"),
    (NoRouterTermInInputGradient, "grad_x"),
]


def judged(layer: type[RightLayer], shape: str = SHAPE, *args: str, **kwargs: Any) -> Correctness:
    problem = problem_of(shape, *args, **kwargs)
    return MoELayer().check(layer(problem), problem)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("layer", "part"), WRONG, ids=[layer.__name__ for layer, _ in WRONG])
def test_planted_wrong_layers_are_refused(layer: type[RightLayer], part: str, dtype: str) -> None:
    reason = judged(layer, SHAPE, dtype).reason
    assert reason is not None and part in reason, reason


@pytest.mark.parametrize("distribution", ["empty_experts", "one_group"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_least_gradient_of_an_empty_expert_is_refused(dtype: str, distribution: str) -> None:
    reason = judged(GradientsOfEmptyExperts, SHAPE, dtype, distribution).reason
    assert reason is not None and "without tokens have weight gradients that are not zero" in reason


def test_an_output_of_another_shape_is_refused() -> None:
    problem = problem_of(SHAPE)
    evaluated = evaluate(RightLayer(problem), problem)
    evaluated.output = evaluated.output[None]
    reason = check_shapes(evaluated, {"output": (64, 64)})
    assert reason == "output has shape (1, 64, 64), expected (64, 64)"


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_right_layers_pass(distribution: str, dtype: str) -> None:
    for convention in ROUTER_CONVENTIONS:
        found = judged(RightLayer, SHAPE, dtype, distribution, convention)
        assert found.reason is None, (convention, found.reason)
        assert found.routing_differs is not None and found.routing_differs <= (0.0 if dtype == "float32" else 0.1)
        assert set(found.as_dict(dtype)["relative_l2"]) == {"output", "grad_x", *(f"grad_{w}" for w in WEIGHTS)}


WEIGHTS = ("gate", "up", "down", "router")


@pytest.mark.parametrize("shape", ["0,64,32,8,2", "1,64,32,8,2", "16,64,32,4,4", "16,64,32,1,1", "33,37,19,5,1"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_right_layers_pass_at_the_edges(shape: str, dtype: str) -> None:
    for convention in ROUTER_CONVENTIONS:
        found = judged(RightLayer, shape, dtype, convention=convention)
        assert found.reason is None, (convention, found.reason)


def test_tied_logits_pass() -> None:
    problem = problem_of(SHAPE, "bfloat16")
    problem.x[::2] = 0
    assert MoELayer().check(RightLayer(problem), problem).reason is None


def test_another_choice_within_bf16_rounding_is_legitimate() -> None:
    problem = problem_of("8,64,32,4,1")
    problem.router[1] = problem.router[0] * (1 + 2.0**-9)
    logits = problem.x @ problem.router.T
    second = logits.argsort(1, descending=True)[:, 1:2]
    near = (logits.amax(1, keepdim=True) - logits.gather(1, second)) < 2.0**-8 * logits.abs().amax(1, keepdim=True)
    assert near.any() and not near.all()
    best = choose_experts(problem.x, problem.router, 1)
    reason, differs = check_routing(problem, torch.where(near, second, best))
    assert reason is None and differs == pytest.approx(near.float().mean().item())
    reason, _ = check_routing(problem, second)
    assert reason is not None and f"{int((~near).sum())} tokens" in reason


# The router's gradient of a few tokens: scores' gradients may cancel there, the rounding of Y does not.

FEW = ["1,64,32,8,2", "1,256,32,16,8", "2,64,32,8,2", "3,64,32,8,1"]


@pytest.mark.parametrize("shape", FEW)
def test_few_tokens_of_a_right_bf16_layer_pass_whatever_the_draw(shape: str) -> None:
    for convention in ROUTER_CONVENTIONS:
        for seed in range(12):
            found = judged(RightLayer, shape, "bfloat16", convention=convention, seed=seed)
            assert found.reason is None, (convention, seed, found.reason)


@pytest.mark.parametrize("layer", [NoRouterGradient, NoCentring, ScaledRouterGradient, NegatedRouterGradient])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_router_errors_of_few_tokens_are_refused(layer: type[RightLayer], dtype: str) -> None:
    refused = total = 0
    for shape in ("1,64,32,8,2", "1,256,32,16,8", "2,64,32,8,2"):
        for seed in range(8):
            reason = judged(layer, shape, dtype, seed=seed).reason
            refused += reason is not None and "grad_router" in reason
            total += 1
    # A tenth of a gradient that cancels by chance is within a bf16 layer's honest error; everything else is not.
    assert refused >= (total - 4 if layer is ScaledRouterGradient and dtype == "bfloat16" else total)


def test_a_single_expert_per_token_has_no_router_gradient() -> None:
    """K = 1 with a softmax over the chosen: dlogits is exactly zero, and centring is all there is to get wrong."""
    for convention in ("topk_softmax", "softmax_topk_renormalised"):
        for dtype in DTYPES:
            assert judged(RightLayer, "33,64,32,8,1", dtype, convention=convention).reason is None
    reason = judged(NoCentring, "33,64,32,8,1").reason
    assert reason is not None and "grad_router" in reason


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", ["64,64,32,8,2", "256,128,64,16,4", "256,64,32,32,8"])
def test_ordinary_shapes_keep_the_plain_criterion(
    shape: str, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The floor for cancelling gradients does nothing there: the errors are those without it."""
    from harness import reference

    problem = problem_of(shape, "bfloat16", distribution)
    layer = RightLayer(problem)
    with_floor = MoELayer().check(layer, problem).errors
    monkeypatch.setattr(reference, "cancellation_floor", lambda *_: torch.zeros(()))
    assert MoELayer().check(layer, problem).errors == with_floor


def test_a_nan_is_written_as_null() -> None:
    found = judged(OneNaN)
    assert found.as_dict("float32")["relative_l2"]["output"] is None
    assert found.as_dict("float32")["tolerance"] == dict(
        zip(("output", "gradients"), TOLERANCES["float32"], strict=True)
    )


class OneTokenLost(RightLayer):
    """One token among thousands gets nothing, forward and backward: the error of the whole hardly shows it."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.ones_like(x[:, :1])
        kept[len(x) // 3] = 0
        return super().forward(x) * kept


class OneInputGradientLost(RightLayer):
    def forward(self, x: Tensor) -> Tensor:
        layer_input = x * 1
        if layer_input.requires_grad:
            layer_input.register_hook(lambda grad: grad * (torch.arange(len(grad)) != 7)[:, None])
        return super().forward(layer_input)


class OneSmallExpertWrong(RightLayer):
    """Under a skew the last expert sees few rows: its gradient is a small part of the whole."""

    def expert(self, e: int, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        if e == 7:
            down = down.detach() + (down - down.detach()) * 0.5
        return super().expert(e, x, gate, up, down)


@pytest.mark.parametrize(
    ("layer", "name", "distribution"),
    [
        (OneTokenLost, "for one token", "uniform"),
        (OneInputGradientLost, "grad_x", "uniform"),
        (OneSmallExpertWrong, "grad_down", "skewed"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_wrong_token_or_expert_among_many(
    layer: type[RightLayer], name: str, distribution: str, dtype: str
) -> None:
    problem = problem_of("8192,16,16,8,2", dtype=dtype, distribution=distribution)
    right = MoELayer().check(RightLayer(problem), problem)
    assert right.reason is None and max(right.worst.values()) < 10 * TOLERANCES[dtype][0]
    found = MoELayer().check(layer(problem), problem)
    assert found.reason is not None
    # In fp32 the whole tensor's tolerance is narrow enough to tell.
    assert dtype == "float32" or name in found.reason
