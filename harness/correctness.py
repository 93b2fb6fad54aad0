"""The correctness gate: a point is checked, gradients included, before it is timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from harness.interface import Layer, Problem
from harness.reference import Comparison, full_precision
from harness.routing import expert_counts

#: Largest relative L2 error of (the output, a gradient) by dtype.
TOLERANCES: dict[str, tuple[float, float]] = {
    "bfloat16": (1e-2, 2e-2),
    "float16": (2e-3, 4e-3),
    "float32": (1e-4, 1e-4),
}
#: How many times its tensor's tolerance one token's or one expert's error may be.
WORST_PART = 10.0


@dataclass
class Correctness:
    """The gate's verdict: ``reason`` is None where the layer passed, else one sentence. ``counts``: (E,) rows of each
    expert; ``moved``: pairs of top-K that the layer's rounding has dropped, and others that it has added."""

    errors: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    routing_differs: float | None = None
    counts: Tensor | None = None
    moved: tuple[int, int] = (0, 0)

    def as_dict(self, dtype: str) -> dict[str, Any]:
        """For the row: errors by tensor, tolerances, and the share of tokens whose set of experts differs from the
        fp32 reference's own choice. A non-finite error is written as null."""
        output, gradient = TOLERANCES[dtype]
        return {
            "relative_l2": _finite(self.errors),
            "worst_token_or_expert": _finite(self.worst),
            "tolerance": {"output": output, "gradients": gradient},
            "tokens_routed_differently": self.routing_differs,
        }


def _finite(errors: dict[str, float]) -> dict[str, float | None]:
    return {name: (error if math.isfinite(error) else None) for name, error in errors.items()}


@dataclass
class Evaluated:
    """One forward and backward: output, gradient of x, gradients of the parameters in canonical layout."""

    output: Tensor
    grad_x: Tensor
    gradients: dict[str, Tensor]


class Snapshot:
    """What a problem's tensors were, to tell whether a layer changed them: copies of the input, of the incoming
    gradient and of a routing or routed rows given, and sums over the bits of the weights and of a kernel's operands,
    which a layer may share."""

    def __init__(self, problem: Problem) -> None:
        self._copies = {name: tensor.clone() for name, tensor in self._copied(problem).items()}
        self._sums = self._bit_sums(problem)

    @staticmethod
    def _copied(problem: Problem) -> dict[str, Tensor]:
        """By what a message calls them."""
        found = {"its input": problem.x, "the incoming gradient": problem.grad_output}
        if problem.routing is not None:
            for name in ("scores", "experts", "token_offsets"):
                found[f"the routing's {name}"] = getattr(problem.routing, name).detach()
        if problem.rows is not None:
            found |= {f"the rows' {part.name}": getattr(problem.rows, part.name) for part in fields(problem.rows)}
        return found

    @staticmethod
    def _bit_sums(problem: Problem) -> dict[str, Tensor]:
        tensors = {f"{name} weights": getattr(problem, name) for name in ("gate", "up", "down", "router")}
        tensors |= {f"operand {name}": operand for name, operand in problem.operands.items()}
        return {
            name: t.view(torch.int16 if t.dtype.itemsize == 2 else torch.int32).sum(dtype=torch.int64)
            for name, t in tensors.items()
        }

    def change(self, problem: Problem) -> str | None:
        """A sentence that names what has changed since; None where nothing has."""
        now = self._copied(problem)
        changed = [
            name
            for name, copy in self._copies.items()
            # Bits, since NaN is unequal to itself.
            if not torch.equal(copy.view(torch.uint8), now[name].view(torch.uint8))
        ]
        sums = self._bit_sums(problem)
        changed += [f"the problem's {name}" for name in sums if bool(sums[name] != self._sums[name])]
        return f"the layer changed {', '.join(changed)}" if changed else None


def forward_backward(layer: Layer, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Output and the gradients of x and every parameter (None where autograd finds no path)."""
    x = x.detach().requires_grad_()
    output = layer.forward(x)
    return output.detach(), torch.autograd.grad(output, [x, *layer.parameters()], grad_output, allow_unused=True)


def evaluate(layer: Layer, problem: Problem) -> Evaluated:
    """Run the layer once. A missing gradient counts as zero (and so is refused by the gate)."""
    output, raw = forward_backward(layer, problem.x, problem.grad_output)
    leaves = [problem.x, *layer.parameters()]
    gradients = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(raw, leaves, strict=True)]
    return Evaluated(output, gradients[0], layer.canonical_gradients(gradients[1:]))


def judge(comparison: Comparison, dtype: str) -> str | None:
    """None where every error is within its tolerance; otherwise one sentence that names what is wrong."""
    output_tolerance, gradient_tolerance = TOLERANCES[dtype]
    wrong = []
    for name, error in comparison.errors.items():
        tolerance = output_tolerance if name == "output" else gradient_tolerance
        if not error <= tolerance:  # NaN fails too
            wrong.append(f"{name} {error:.3g} > {tolerance:g}")
    if wrong:
        return f"relative L2 error above tolerance for {dtype}: {', '.join(wrong)}"
    for name, error in comparison.worst.items():
        tolerance = WORST_PART * (output_tolerance if name == "output" else gradient_tolerance)
        if not error <= tolerance:
            part = "token" if name in ("output", "grad_x") else "expert"
            wrong.append(f"{name} {error:.3g} > {tolerance:g} for one {part}")
    if wrong:
        return f"relative L2 error above tolerance for {dtype}: {', '.join(wrong)}"
    if comparison.nonzero_empty_experts:
        return f"{comparison.nonzero_empty_experts} experts without tokens have weight gradients that are not zero"
    return None


def check_shapes(evaluated: Evaluated, expected: dict[str, tuple[int, ...]]) -> str | None:
    """A sentence where a tensor is missing or has another shape than canonical."""
    found = {"output": evaluated.output, "grad_x": evaluated.grad_x, **evaluated.gradients}
    for name, size in expected.items():
        if name not in found:
            return f"{name} is missing"
        if tuple(found[name].shape) != size:
            return f"{name} has shape {tuple(found[name].shape)}, expected {size}"
    return None


def check_tokens_alone(token_offsets: Tensor, evaluated: Evaluated) -> str | None:
    """A sentence where a token without experts has an output or a gradient that is not zero.

    Args:
        token_offsets: (T + 1,), the first pair of each token, then P.
    """
    alone = token_offsets.diff() == 0
    if bool((evaluated.output[alone] != 0).any()) or bool((evaluated.grad_x[alone] != 0).any()):
        return "tokens without an expert have outputs or gradients that are not zero"
    return None


def check_routing(problem: Problem, indices: Tensor) -> tuple[str | None, float]:
    """Are the chosen experts (T, K) legitimate? Also the share of tokens routed otherwise than fp32 logits would.

    Each token's experts must be distinct, in range, and each chosen fp32 logit at least the K-th largest minus
    2^-7 times the token's largest magnitude: what rounding logits to bf16 can move.
    """
    shape = problem.shape
    if tuple(indices.shape) != (shape.T, shape.K):
        return f"expert indices have shape {tuple(indices.shape)}, expected {(shape.T, shape.K)}", 1.0
    if shape.T == 0:
        return None, 0.0
    indices = indices.long()
    if bool(((indices < 0) | (indices >= shape.E)).any()):
        return "an expert index is out of range", 1.0
    ordered = indices.sort(1).values
    if shape.K > 1 and bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return "a token chose one expert twice", 1.0
    with full_precision():
        logits = problem.x.float() @ problem.router.float().T
    top = torch.topk(logits, shape.K, dim=1)
    floor = top.values[:, -1:] - 2.0**-7 * logits.abs().amax(1, keepdim=True)
    finite = logits.isfinite().all(1, keepdim=True)
    bad = ((torch.gather(logits, 1, indices) < floor) & finite).any(1)
    differs = float((top.indices.sort(1).values != ordered).any(1).double().mean())
    if bool(bad.any()):
        return f"{int(bad.sum())} tokens chose an expert that is not among their top {shape.K}", differs
    return None, differs


def layer_counts(problem: Problem, indices: Tensor) -> Tensor:
    """(E,) rows of each expert on the CPU."""
    return expert_counts(indices, problem.shape.E).cpu()
