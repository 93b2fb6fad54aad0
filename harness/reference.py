"""The fp32 reference of the whole MoE layer with all gradients, streamed over experts.

It takes the implementation's own expert indices: with bf16 logits a few per cent of the tokens legitimately choose
another expert than fp32 logits would, which would drown every other error. Streaming keeps only one expert's weights
and gradients in fp32, so that the largest shapes fit beside the implementation under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.interface import Problem
from harness.routing import router_scores


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 matrix products without TF32, whatever a plugin has made its process's defaults."""
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    with ExitStack() as settings:
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                settings.enter_context(torch.autocast(device, enabled=False))
        # Entering a device costs every operation a little.
        if torch.get_default_device().type != "cpu":
            settings.enter_context(torch.device("cpu"))
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(dtype)


#: The least share of its typical size, and of the un-centred terms' size, that the router gradient's error is measured
#: against (see `cancellation_floor`).
TYPICAL_SHARE, UNCENTRED_SHARE = 0.5, 0.01


@dataclass
class ErrorSums:
    """Running sums for the relative L2 error ||value - reference|| / max(||reference||, floor) of one tensor, without
    host synchronisation until `relative` is asked."""

    floor: Tensor | None = None
    difference: list[Tensor] = field(default_factory=list)
    reference: list[Tensor] = field(default_factory=list)

    def add(self, value: Tensor, reference: Tensor, by_row: bool = False) -> None:
        """Take in a part of the tensor; with ``by_row`` each row of it is a part of its own."""
        dim = 1 if by_row else None
        self.difference.append(torch.linalg.vector_norm(value.float() - reference, dim=dim).reshape(-1))
        self.reference.append(torch.linalg.vector_norm(reference, dim=dim).reshape(-1))

    def relative(self) -> float:
        """NaN or infinity in any part gives NaN or infinity; a zero reference gives 0 for an exact zero, else inf."""
        if not self.difference:
            return 0.0
        difference = float(torch.cat(self.difference).double().square().sum().sqrt())
        reference = self.size()
        if reference == 0.0:
            return 0.0 if difference == 0.0 else float("inf")
        return difference / reference

    def size(self) -> float:
        """What the relative error is relative to."""
        if not self.reference:
            return 0.0
        reference = float(torch.cat(self.reference).double().square().sum().sqrt())
        return reference if self.floor is None else max(reference, float(self.floor))

    def worst_part(self, least: float) -> float:
        """The largest relative error of one part: a token of the output, an expert of a weight's gradient. One wrong
        token among thousands hardly moves the error of the whole.

        Args:
            least: a part's error is measured against at least this share of the parts' root mean square.
        """
        if not self.difference or not sum(part.numel() for part in self.difference):
            return 0.0
        difference, reference = torch.cat(self.difference).double(), torch.cat(self.reference).double()
        typical = reference.square().mean().sqrt()
        errors = difference / torch.maximum(reference, least * typical).clamp_min(torch.finfo(torch.float64).tiny)
        return float(errors.max())


#: What a part's error is measured against at least, as a share of the parts' root mean square (`ErrorSums.worst_part`).
LEAST_TOKEN, LEAST_EXPERT = 1.0, 1e-3


def least_part(name: str) -> float:
    """The one of these that holds for a layer's tensor."""
    return LEAST_TOKEN if name in ("output", "grad_x") else LEAST_EXPERT


@dataclass
class Comparison:
    """Relative L2 error by tensor; the same of the worst token or expert where a tensor has such parts; the norm that
    each error is relative to; and the number of experts without tokens whose weight gradients are not exactly zero."""

    errors: dict[str, float]
    nonzero_empty_experts: int
    worst: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)


def _compare(sums: dict[str, ErrorSums], nonzero_empty_experts: int) -> Comparison:
    worst = {
        name: sums[name].worst_part(least_part(name)) for name in sums if name not in ("grad_router", "grad_scores")
    }
    errors, sizes = {name: s.relative() for name, s in sums.items()}, {name: s.size() for name, s in sums.items()}
    return Comparison(errors, nonzero_empty_experts, worst, sizes)


def cancellation_floor(
    norms: Tensor, scores: Tensor, own: Tensor, grad_scores: Tensor, products: Tensor, concentration: Tensor
) -> Tensor:
    """The least norm that the router gradient's error is measured against, a scalar.

    dlogits = J·dS subtracts the scores' gradients from their mean, and dS = <dO, Y> is itself a sum over d. With many
    tokens the result has the size that sums of such terms have; for a few tokens it may cancel by chance, and the
    rounding of Y does not cancel with it: no bf16 layer has two correct digits there. So the norm of the gradient is
    taken to be at least half of its *typical* size, which is its root mean square over random signs of the products
    dO·Y (over many tokens the two agree within a few per cent, and the floor does nothing). A second, small term holds
    where J itself vanishes (K = 1, or one score near 1): a hundredth of the terms before centring, a few roundings.

    Args:
        norms: (P,), the norm of each pair's x.
        scores: (P,) weights of the pairs.
        own: (P,), the pair's own share of what its weight was divided by: as ``scores``, but for a pair that a rounding
            has added nothing.
        grad_scores: (P,), dS.
        products: (P,), the sum of squares of the products that add up to dS.
        concentration: (P,), the sum of the squared shares of all that the weight was divided by.
    """
    squared_x = norms.square()
    squared = scores.square()
    typical = (squared * products * (1 - 2 * own + concentration).clamp_min(0) * squared_x).sum().sqrt()
    uncentred = (squared * grad_scores.square() * squared_x).sum().sqrt()
    return torch.maximum(TYPICAL_SHARE * typical, UNCENTRED_SHARE * uncentred)


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate)·up, and the gradients of gate and up for the activation's gradient ``grad``."""
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return silu * up, grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu


@dataclass
class _Streamed:
    """What a pass over all experts gives in fp32: output and gradient of x (T, d), without a router's term; of each
    pair dS and the squares of its summands (P,); the errors of the weights' gradients."""

    output: Tensor
    grad_x: Tensor
    grad_scores: Tensor
    products: Tensor
    sums: dict[str, ErrorSums]
    nonzero_empty_experts: int


def _stream(
    problem: Problem, x: Tensor, tokens: Tensor, experts: Tensor, scores: Tensor, gradients: dict[str, Tensor]
) -> _Streamed:
    """One expert after the other: its rows, its part of every result, its weights' gradients compared and dropped.

    Args:
        x: (T, d), fp32.
        tokens, experts, scores: (P,) of each pair, int64 and fp32.
    """
    device = x.device
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=problem.shape.E).tolist()
    output, grad_x = torch.zeros(2, *x.shape, device=device)
    grad_scores, products = torch.zeros(2, experts.numel(), device=device)
    sums = {name: ErrorSums() for name in ("grad_gate", "grad_up", "grad_down")}
    empty_maxima: list[Tensor] = []
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            for name in sums:
                empty_maxima.append(gradients[name][expert].abs().amax().float())
            continue
        pairs = order[start : start + count]
        start += count
        rows = tokens[pairs]
        gate, up, down = (w[expert].float() for w in (problem.gate, problem.up, problem.down))
        rows_x, grad_rows = x[rows], problem.grad_output[rows].float()
        h_gate, h_up = rows_x @ gate.T, rows_x @ up.T
        weight = scores[pairs, None]
        activation = torch.nn.functional.silu(h_gate) * h_up
        y = activation @ down.T
        output.index_add_(0, rows, weight * y)
        terms = grad_rows * y
        grad_scores[pairs] = terms.sum(1)
        products[pairs] = terms.square_().sum(1)
        grad_y = weight * grad_rows
        _, grad_h_gate, grad_h_up = swiglu_backward(h_gate, h_up, grad_y @ down)
        sums["grad_down"].add(gradients["grad_down"][expert], grad_y.T @ activation)
        sums["grad_gate"].add(gradients["grad_gate"][expert], grad_h_gate.T @ rows_x)
        sums["grad_up"].add(gradients["grad_up"][expert], grad_h_up.T @ rows_x)
        grad_x.index_add_(0, rows, grad_h_gate @ gate + grad_h_up @ up)
    nonzero = 0
    if empty_maxima:
        # NaN != 0 counts too.
        nonzero = int((torch.stack(empty_maxima).view(-1, 3) != 0).any(1).sum())
    return _Streamed(output, grad_x, grad_scores, products, sums, nonzero)


def compare_routed(problem: Problem, output: Tensor, grad_x: Tensor, gradients: dict[str, Tensor]) -> Comparison:
    """Compare an implementation of ``routed_experts`` with the fp32 reference.

    Args:
        gradients: ``grad_gate``, ``grad_up`` (E, n, d), ``grad_down`` (E, d, n), ``grad_scores`` (P,).
    """
    routing = problem.routing
    assert routing is not None
    with torch.no_grad(), full_precision():
        pairs = routing.token_offsets.long().diff()
        tokens = torch.repeat_interleave(torch.arange(problem.shape.T, device=problem.x.device), pairs)
        scores = routing.scores.detach().float()
        streamed = _stream(problem, problem.x.float(), tokens, routing.experts.long(), scores, gradients)
        sums = streamed.sums
        for name, value, reference in (
            ("output", output, streamed.output),
            ("grad_x", grad_x, streamed.grad_x),
            ("grad_scores", gradients["grad_scores"], streamed.grad_scores),
        ):
            sums[name] = ErrorSums()
            sums[name].add(value, reference, by_row=name != "grad_scores")
    return _compare(sums, streamed.nonzero_empty_experts)


def kept_scores(logits: Tensor, indices: Tensor, tokens: Tensor, experts: Tensor, convention: str) -> Tensor:
    """(P,) weights of the pairs that a rounding keeps: p over the token's sum of p over its top-K, or p.

    Args:
        logits: (T, E), fp32.
        indices: (T, K), int64, top-K.
        tokens, experts: (P,), int64.
        convention: see `harness.interface.LayerSpec`.
    """
    p = torch.softmax(logits, dim=-1)
    weights = p[tokens, experts]
    return weights if convention == "softmax_topk" else weights / torch.gather(p, 1, indices).sum(1)[tokens]


def compare_layer(
    problem: Problem,
    indices: Tensor,
    output: Tensor,
    grad_x: Tensor,
    gradients: dict[str, Tensor],
    kept: tuple[Tensor, Tensor] | None = None,
) -> Comparison:
    """Compare an implementation's output (T, d) and gradients with the fp32 reference.

    Args:
        indices: (T, K) experts that the implementation chose.
        gradients: ``grad_gate``, ``grad_up`` (E, n, d), ``grad_down`` (E, d, n), ``grad_router`` (E, d).
        kept: (P,) tokens and experts of the pairs that its rounding made of them; None: they are what it computes.
    """
    shape, convention = problem.shape, problem.point.layer.router_convention
    indices = indices.long()
    with torch.no_grad(), full_precision():
        x, router = problem.x.float(), problem.router.float()
        with torch.enable_grad():
            logits = (x @ router.T).requires_grad_()
            shares = router_scores(logits, indices, convention)
            if kept is None:
                tokens = torch.arange(shape.T, device=x.device).repeat_interleave(shape.K)
                experts, scores = indices.reshape(-1), shares.reshape(-1)
            else:
                tokens, experts = (part.long() for part in kept)
                scores = kept_scores(logits, indices, tokens, experts, convention)
        streamed = _stream(problem, x, tokens, experts, scores.detach(), gradients)
        sums = streamed.sums
        (grad_logits,) = torch.autograd.grad(scores, logits, streamed.grad_scores)
        streamed.grad_x += grad_logits @ router
        scores, shares, own = scores.detach(), shares.detach(), scores.detach()
        if convention == "softmax_topk":
            shares = torch.softmax(logits.detach(), dim=-1)
        elif kept is not None:
            of_top_k = torch.zeros_like(logits).scatter_(1, indices, 1.0)
            own = own * of_top_k[tokens, experts]
        norms = torch.linalg.vector_norm(x, dim=1)[tokens]
        concentration = shares.square().sum(1)[tokens]
        floor = cancellation_floor(norms, scores, own, streamed.grad_scores, streamed.products, concentration)
        for name, value, reference in (
            ("output", output, streamed.output),
            ("grad_x", grad_x, streamed.grad_x),
            ("grad_router", gradients["grad_router"], grad_logits.T @ x),
        ):
            sums[name] = ErrorSums(floor if name == "grad_router" else None)
            sums[name].add(value, reference, by_row=name != "grad_router")
    return _compare(sums, streamed.nonzero_empty_experts)


def compare_dense(
    problem: Problem, summed: bool, output: Tensor, grad_x: Tensor, gradients: dict[str, Tensor]
) -> Comparison:
    """The same for the dense bound: rows r = 0 … T·K-1 belong to expert r // (T·K/E).

    Args:
        summed: False where input and output are the rows themselves (T·K, d). True where they are (T, d): row k·T + t
            holds token t, and an output is the sum of its token's K rows.
    """
    shape = problem.shape
    per_expert = shape.routed_rows // shape.E
    sums = {name: ErrorSums() for name in ("output", "grad_x", "grad_gate", "grad_up", "grad_down")}
    with torch.no_grad(), full_precision():
        expected, expected_grad_x = torch.zeros(2, *problem.x.shape, device=problem.x.device)
        for expert in range(shape.E):
            rows = torch.arange(expert * per_expert, (expert + 1) * per_expert, device=problem.x.device)
            if summed:
                rows %= shape.T
            rows_x, grad_y = problem.x[rows].float(), problem.grad_output[rows].float()
            gate, up, down = (w[expert].float() for w in (problem.gate, problem.up, problem.down))
            h_gate, h_up = rows_x @ gate.T, rows_x @ up.T
            activation, grad_h_gate, grad_h_up = swiglu_backward(h_gate, h_up, grad_y @ down)
            expected.index_add_(0, rows, activation @ down.T)
            expected_grad_x.index_add_(0, rows, grad_h_gate @ gate + grad_h_up @ up)
            sums["grad_down"].add(gradients["grad_down"][expert], grad_y.T @ activation)
            sums["grad_gate"].add(gradients["grad_gate"][expert], grad_h_gate.T @ rows_x)
            sums["grad_up"].add(gradients["grad_up"][expert], grad_h_up.T @ rows_x)
        sums["output"].add(output, expected, by_row=True)
        sums["grad_x"].add(grad_x, expected_grad_x, by_row=True)
    return _compare(sums, 0)
