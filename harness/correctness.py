"""The correctness gate: a point is checked, gradients included, before it is timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from harness.fingerprint import Fingerprint, sketch
from harness.interface import Layer, Problem
from harness.reference import Comparison, full_precision, least_part
from harness.routing import expert_counts

#: Largest relative L2 error of (the output, a gradient) by dtype.
TOLERANCES: dict[str, tuple[float, float]] = {
    "bfloat16": (1e-2, 2e-2),
    "float16": (2e-3, 4e-3),
    "float32": (1e-4, 1e-4),
}
#: How many times its tensor's tolerance one token's or one expert's error may be.
WORST_PART = 10.0


class WrongResult(Exception):
    """What a layer returned is not what its interface asks for, so that nothing more can be done with it. The message
    is a sentence."""


@dataclass
class Correctness:
    """The gate's verdict: ``reason`` is None where the layer passed, else one sentence. ``counts``: (E,) rows of each
    expert; ``moved``: pairs of top-K that the layer's rounding has dropped, and others that it has added;
    ``fingerprint``: of the call that has passed."""

    errors: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    routing_differs: float | None = None
    counts: Tensor | None = None
    moved: tuple[int, int] = (0, 0)
    fingerprint: Fingerprint | None = None

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

    def by_name(self) -> dict[str, Tensor]:
        """All of them as the gate calls them."""
        return {"output": self.output, "grad_x": self.grad_x, **self.gradients}


class Snapshot:
    """What a problem's tensors were, to tell whether a layer changed them: copies of the input, of the incoming
    gradient and of a routing or routed rows given, and sums over the bits of the weights and of a kernel's operands,
    which a layer may share.

    Args:
        copies: with False there are sums of all of them, which take no memory while a layer is built.
    """

    def __init__(self, problem: Problem, copies: bool = True) -> None:
        copied = self._copied(problem)
        self._copies = {name: tensor.clone() for name, tensor in copied.items()} if copies else {}
        self._sums = self._bit_sums(self._shared(problem) | ({} if copies else copied))

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
    def _shared(problem: Problem) -> dict[str, Tensor]:
        """By what a message calls them."""
        tensors = {f"the problem's {name} weights": getattr(problem, name) for name in ("gate", "up", "down", "router")}
        return tensors | {f"the problem's operand {name}": operand for name, operand in problem.operands.items()}

    @staticmethod
    def _bit_sums(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
        every = self._shared(problem) | now
        sums = self._bit_sums({name: every[name] for name in self._sums})
        changed += [name for name in sums if bool(sums[name] != self._sums[name])]
        return f"the layer changed {', '.join(changed)}" if changed else None


def check_output(output: Any, x: Tensor) -> None:
    """Raises `WrongResult` where a layer's output for ``x`` is not a tensor like it, or has no backward."""
    if not isinstance(output, Tensor):
        raise WrongResult(f"forward returned {type(output).__name__}, expected a tensor {tuple(x.shape)}")
    for what, found, expected in (
        ("has shape", tuple(output.shape), tuple(x.shape)),
        ("is", output.dtype, x.dtype),
        ("is on", output.device, x.device),
    ):
        if found != expected:
            raise WrongResult(f"output {what} {found}, expected {expected}")
    if not output.requires_grad:
        raise WrongResult("output requires no gradient, so that there is no backward")


def forward_backward(layer: Layer, x: Tensor, grad_output: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Output and the gradients of x and every parameter (None where autograd finds no path).

    Raises:
        WrongResult: see `check_output`.
    """
    x = x.detach().requires_grad_()
    output = layer.forward(x)
    check_output(output, x)
    return output.detach(), torch.autograd.grad(output, [x, *layer.parameters()], grad_output, allow_unused=True)


def canonical(layer: Layer, x: Tensor, output: Tensor, raw: Sequence[Tensor | None]) -> Evaluated:
    """What `forward_backward` returned for ``x``, in canonical layout. A missing gradient counts as zero (and so is
    refused by the gate)."""
    leaves = [x, *layer.parameters()]
    gradients = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(raw, leaves, strict=True)]
    by_name = layer.canonical_gradients(gradients[1:])
    if not isinstance(by_name, dict):
        raise WrongResult(f"canonical_gradients returned {type(by_name).__name__}, expected tensors by name")
    return Evaluated(output, gradients[0], by_name)


def evaluate(layer: Layer, problem: Problem) -> Evaluated:
    """Run the layer once."""
    return canonical(layer, problem.x, *forward_backward(layer, problem.x, problem.grad_output))


def fingerprint(evaluated: Evaluated, comparison: Comparison, dtype: str) -> Fingerprint:
    """Of a layer's call that the gate accepts, what later calls are compared with."""
    output, gradient = TOLERANCES[dtype]
    results = evaluated.by_name()
    return Fingerprint(
        {name: sketch(results[name]) for name in comparison.sizes},
        comparison.sizes,
        {name: output if name == "output" else gradient for name in comparison.sizes},
        {name: (least_part(name), WORST_PART) for name in comparison.worst},
    )


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
    found = evaluated.by_name()
    for name, size in expected.items():
        if name not in found:
            return f"{name} is missing"
        if not isinstance(found[name], Tensor):
            return f"{name} is {type(found[name]).__name__}, expected a tensor {size}"
        if tuple(found[name].shape) != size:
            return f"{name} has shape {tuple(found[name].shape)}, expected {size}"
        if found[name].device != evaluated.output.device:
            return f"{name} is on {found[name].device}, expected {evaluated.output.device}"
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
    if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.device != problem.x.device:
        what = f"{indices.dtype} on {indices.device}" if isinstance(indices, Tensor) else type(indices).__name__
        return f"expert indices are {what}, expected integers on {problem.x.device}", 1.0
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
