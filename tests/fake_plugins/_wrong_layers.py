"""Layers that are wrong in one way each, at every call or from some call on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.interface import Layer, Problem

from ._base import RightLayer

#: A layer for a problem.
Make = Callable[[Problem], Layer]
#: The harness's calls of a point on the CPU: two of the check, the second of which is judged; one that measures memory,
#: one to warm up; all others are timed, but for the last.
JUDGED, WARM = 2, 4


class _Backwards(torch.autograd.Function):
    """The identity, with a backward of one's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.own = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.own(grad), None


class Spoiled(RightLayer):
    """A right layer with a part replaced, in the calls (counted from 1) that ``when`` names."""

    def __init__(
        self,
        problem: Problem,
        when: Callable[[int], bool] = lambda call: True,
        *,
        x: Callable[[Tensor], Tensor] = lambda x: x,
        output: Callable[[Tensor], Any] = lambda output: output,
        grad_output: Callable[[Tensor], Tensor] = lambda grad: grad,
        gradients: Callable[[dict[str, Tensor]], Any] = lambda gradients: gradients,
    ) -> None:
        super().__init__(problem)
        self.calls = 0
        self.when = when
        self.parts = x, output, grad_output, gradients

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.when(self.calls):
            return super().forward(x)
        change_x, change_output, change_grad, _ = self.parts
        out = super().forward(change_x(x))
        return change_output(_Backwards.apply(out, change_grad))

    def canonical_gradients(self, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        right = super().canonical_gradients(gradients)
        return self.parts[3](right) if self.when(self.calls) else right


def spoiled(when: Callable[[int], bool] = lambda call: True, **parts: Callable[..., Any]) -> Make:
    return lambda problem: Spoiled(problem, when, **parts)


def gradient(name: str, change: Callable[[Tensor], Any], when: Callable[[int], bool] = lambda call: True) -> Make:
    """One gradient is wrong, and nothing else."""
    if name == "grad_x":
        return spoiled(when, x=lambda x: _Backwards.apply(x, change) if x.requires_grad else x)
    return spoiled(when, gradients=lambda right: {**right, name: change(right[name])})


def with_nan(tensor: Tensor) -> Tensor:
    """One NaN in its first part."""
    mask = torch.zeros_like(tensor)
    mask.view(-1)[0] = float("nan")
    return tensor + mask


def writes(target: Callable[[Problem], Tensor], where: str) -> Make:
    """Writes into a tensor of the problem, as it is built or in each call."""

    def make(problem: Problem) -> Layer:
        def spoil(value: Any) -> Any:
            target(problem).data.view(-1)[0] += 1
            return value

        if where == "build":
            spoil(None)
            return RightLayer(problem)
        return Spoiled(problem, output=spoil)

    return make


def one_part_changed(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[0] = 0
    return changed


kept: list[Tensor] = []


def leaks(output: Tensor) -> Tensor:
    kept.append(output.detach().clone())
    return output


def later(call: int) -> bool:
    """In every timed call, and none before."""
    return call > WARM


WRONG: dict[str, Make] = {
    "wrong_output": spoiled(output=lambda out: out * 1.1),
    **{f"wrong_{name}": gradient(name, lambda grad: grad * 1.1) for name in
       ("grad_x", "grad_gate", "grad_up", "grad_down", "grad_router")},
    "nan_output": spoiled(output=with_nan),
    "nan_gradient": gradient("grad_up", with_nan),
    "nan_grad_x": gradient("grad_x", with_nan),
    "nan_second_call": spoiled(lambda call: call == JUDGED, output=with_nan),
    "wrong_second_call": spoiled(lambda call: call >= JUDGED, output=lambda out: out * 1.1),
    "wrong_while_timed": spoiled(later, output=lambda out: out * 1.01),
    "wrong_gradient_while_timed": gradient("grad_down", lambda grad: grad * 1.01, later),
    "wrong_expert_while_timed": gradient("grad_gate", one_part_changed, later),
    "nan_while_timed": gradient("grad_up", with_nan, later),
    "shape_while_timed": gradient("grad_up", lambda grad: grad[:1], later),
    "random": spoiled(output=lambda out: out * (1 + 0.1 * torch.randn_like(out))),
    "random_while_timed": spoiled(later, output=lambda out: out * (1 + 0.1 * torch.randn_like(out))),
    "random_within_rounding": spoiled(output=lambda out: out * (1 + 1e-5 * torch.randn_like(out))),
    "returns_none": spoiled(output=lambda out: None),
    "returns_tuple": spoiled(output=lambda out: (out, None)),
    "returns_other_shape": spoiled(output=lambda out: out[:, :-1]),
    "returns_other_rank": spoiled(output=lambda out: out[None]),
    "returns_other_dtype": spoiled(output=lambda out: out.double()),
    "returns_other_device": spoiled(output=lambda out: out.to("meta")),
    "returns_no_graph": spoiled(output=lambda out: out.detach()),
    "returns_its_input": lambda problem: _Returns(problem),
    "gradient_none": gradient("grad_gate", lambda grad: None),
    "gradient_other_shape": gradient("grad_down", lambda grad: grad.transpose(1, 2)),
    "gradient_other_device": gradient("grad_router", lambda grad: grad.to("meta")),
    "gradient_missing": spoiled(gradients=lambda right: {"grad_gate": right["grad_gate"]}),
    "gradients_none": spoiled(gradients=lambda right: None),
    "backward_other_shape": spoiled(grad_output=lambda grad: grad[:1, :1].expand(3, 3)),
    "writes_x": spoiled(x=lambda x: x.data.mul_(1.01) if x.requires_grad else x),
    "writes_weights": writes(lambda problem: problem.up, "call"),
    "writes_router": writes(lambda problem: problem.router, "call"),
    "writes_grad_output": spoiled(grad_output=lambda grad: grad.data.mul_(2)),
    "writes_x_building": writes(lambda problem: problem.x, "build"),
    "writes_weights_building": writes(lambda problem: problem.down, "build"),
    "leaks": spoiled(output=leaks),
}  # fmt: skip


class _Returns(RightLayer):
    """A view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape)
