"""The six Gluon kernels on a Hopper GPU, at small uneven sizes: against plain torch expert by expert and their twins.

Everything around the operands is NaN (rows beside, experts beside, the weights of experts without rows), and so is the
memory that a kernel's results are written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from harness.shapes import MoEShape

from . import common
from .common import MEDIUM, assert_equal, relative

pytest.importorskip("triton")

from expert_reference import ACTIVATE

from implementations.sonicmoe_triton import (
    contiguous_gemm,
    gluon_contiguous,
    gluon_gathered,
    gluon_hidden_gradient,
    gluon_up_projection,
    gluon_weight_gradient,
    hidden_gradient,
    tune,
    up_projection,
    weight_gradient,
)
from implementations.sonicmoe_triton.activations import ACTIVATIONS, is_gated
from implementations.sonicmoe_triton.metadata import Routing, make_routing
from implementations.sonicmoe_triton.operands import RouterTerm
from implementations.sonicmoe_triton.tiles import (
    DOWN_PROJECTION,
    DOWN_WEIGHT_GRADIENT,
    HIDDEN_GRADIENT,
    INPUT_GRADIENT,
    UP_PROJECTION,
    UP_WEIGHT_GRADIENT,
)
from implementations.sonicmoe_triton.tune import DEFAULT, Candidate
from implementations.sonicmoe_triton.tuned import PLAIN

pytestmark = [
    pytest.mark.usefixtures("exact_float32"),
    pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="the Gluon kernels are for Hopper"),
]

KERNELS = tuple(tune.CANDIDATES)
#: Without an epilogue, and with sums in the same order as the twin's, whatever the tiles: equal bit for bit.
EXACT = (DOWN_PROJECTION, INPUT_GRADIENT, UP_WEIGHT_GRADIENT, DOWN_WEIGHT_GRADIENT)
#: Relative L2 error of a whole result, and of its worst row against a row's mean.
LIMITS = {torch.bfloat16: (5e-3, 3e-2), torch.float16: (1e-3, 5e-3)}


def one_token(generator: torch.Generator) -> tuple[Tensor, int]:
    return torch.tensor([[3, 1]]), 5


def one_expert(generator: torch.Generator) -> tuple[Tensor, int]:
    return torch.full((700, 1), 2), 5


def ragged_ends(generator: torch.Generator) -> tuple[Tensor, int]:
    """Experts that end just before, at and just behind the end of a tile and of a step."""
    counts = torch.tensor([0, 1, 63, 64, 65, 127, 128, 129, 0, 300])
    experts = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return experts[torch.randperm(len(experts), generator=generator), None], len(counts)


def half_empty(generator: torch.Generator) -> tuple[Tensor, int]:
    wanted = torch.rand(300, 8, generator=generator)
    wanted[:, 1::2] = -1
    return wanted.topk(3, dim=1).indices, 8


def skewed(generator: torch.Generator) -> tuple[Tensor, int]:
    wanted = torch.rand(900, 6, generator=generator) * torch.linspace(0.3, 1, 6)
    return wanted.topk(2, dim=1).indices, 6


@dataclass(frozen=True)
class Case:
    """`route` draws (experts (T, K), E)."""

    d: int
    n: int
    route: Callable[[torch.Generator], tuple[Tensor, int]]
    dtype: torch.dtype = torch.bfloat16
    activation: str = "swiglu"
    bias: bool = False


RAGGED = Case(776, 72, ragged_ends, torch.float16, "geglu", bias=True)
CASES = {
    "half of the experts empty": Case(776, 72, half_empty),
    "ragged ends": RAGGED,
    "narrow": Case(64, 32, skewed, torch.float16),
    "overhanging": Case(328, 712, skewed, activation="reglu", bias=True),
    "one expert": Case(256, 256, one_expert, torch.float16),
    "one token": Case(776, 72, one_token),
}
#: Gated, so that every candidate makes a kernel; as few different ones to compile as these cases allow.
CANDIDATE_CASES = (
    replace(RAGGED, dtype=torch.bfloat16),
    replace(RAGGED, dtype=torch.bfloat16, route=half_empty),
    RAGGED,
)
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def spoil(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan)


class Operands:
    """Every kernel's operands, independent of one another."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        experts, E = case.route(generator)
        T, d, n, rows = experts.shape[0], case.d, case.n, experts.numel()
        hidden = 2 * n if is_gated(case.activation) else n

        def between_nans(*size: int, scale: float = 1.0, beside: int = 1) -> Tensor:
            whole = torch.full((size[0] + 2 * beside, *size[1:]), torch.nan, dtype=case.dtype, device=common.DEVICE)
            inner = whole[beside : beside + size[0]]
            inner.copy_(scale * torch.randn(size, generator=generator))
            return inner

        self.case = case
        self.routing: Routing = make_routing(experts.to(common.DEVICE), E)
        self.offsets: list[int] = self.routing.expert_offsets.tolist()
        self.x, self.grad_out = (between_nans(T, d, beside=130) for _ in range(2))
        self.h, self.grad_h = (between_nans(rows, hidden, beside=130) for _ in range(2))
        self.a, self.scaled_a = (between_nans(rows, n, beside=130) for _ in range(2))
        self.w1, self.bias1 = between_nans(E, hidden, d, scale=d**-0.5), between_nans(E, hidden)
        self.w2, self.bias2 = between_nans(E, d, n, scale=n**-0.5), between_nans(E, d)
        self.row_scores = torch.rand(rows, generator=generator).to(common.DEVICE)
        self.row_gradients = torch.randn(rows, generator=generator).to(common.DEVICE)
        self.router = between_nans(E, d)
        for e in range(E):
            if self.offsets[e] == self.offsets[e + 1]:
                spoil(self.of_expert(e))

    def of_expert(self, e: int) -> list[Tensor]:
        """All that an expert has of its own: rows and weights."""
        own = slice(self.offsets[e], self.offsets[e + 1])
        rows = (self.h, self.grad_h, self.a, self.scaled_a, self.row_scores, self.row_gradients)
        return [t[own] for t in rows] + [t[e] for t in (self.w1, self.bias1, self.w2, self.bias2, self.router)]

    def experts(self) -> Iterator[tuple[int, slice, Tensor]]:
        """(expert, its rows, their tokens) of every expert with rows."""
        for e, (begin, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            if end > begin:
                yield e, slice(begin, end), self.routing.gather[begin:end].long()


def launch(kernel: str, o: Operands, candidate: Candidate = DEFAULT) -> list[Tensor]:
    """The Gluon kernel's results by its own choice of options or by others (a gated activation's), or its twin's."""
    activation, r = o.case.activation, o.routing
    # What a bias is to the other kernels, the router's term is to dX.
    bias1, bias2, term = (o.bias1, o.bias2, RouterTerm(o.row_gradients, o.router)) if o.case.bias else (None,) * 3
    up, contiguous, hidden, weights = (
        (up_projection, contiguous_gemm, hidden_gradient, weight_gradient)
        if candidate == PLAIN
        else (gluon_up_projection, gluon_contiguous, gluon_hidden_gradient, gluon_weight_gradient)
    )

    def chosen(make: Callable[..., object]) -> object:
        return None if candidate is DEFAULT or candidate == PLAIN else make(**candidate)

    gathered, by_rows, by_weights = gluon_gathered.make_options, gluon_contiguous.Options, gluon_weight_gradient.Options
    found = {
        UP_PROJECTION: lambda: up.up_projection(o.x, o.w1, r, activation, bias1, chosen(gathered)),
        DOWN_PROJECTION: lambda: contiguous.down_projection(o.a, o.w2, r, bias2, chosen(by_rows)),
        HIDDEN_GRADIENT: lambda: hidden.hidden_gradient(
            o.grad_out, o.w2, o.h, o.row_scores, r, activation, chosen(gathered)
        ),
        INPUT_GRADIENT: lambda: contiguous.input_gradient(o.grad_h, o.w1, r, term, chosen(by_rows)),
        UP_WEIGHT_GRADIENT: lambda: weights.up_weight_gradient(o.grad_h, o.x, r, chosen(by_weights)),
        DOWN_WEIGHT_GRADIENT: lambda: weights.down_weight_gradient(o.grad_out, o.scaled_a, r, chosen(by_weights)),
    }[kernel]()
    results = [found] if isinstance(found, Tensor) else list(found)
    if kernel == HIDDEN_GRADIENT:
        results[2] = results[2].sum(0)
    return results


def activate(h: Tensor, activation: str) -> Tensor:
    gate, up = h.chunk(2, dim=1) if is_gated(activation) else (h, torch.ones_like(h))
    return ACTIVATE[activation](gate) * up


def of_one_expert(kernel: str, o: Operands, e: int, own: slice, tokens: Tensor) -> list[Tensor]:
    """What plain torch finds in float32: an expert's rows of the results, or its weight's gradient."""
    activation, bias = o.case.activation, o.case.bias
    if kernel == UP_PROJECTION:
        h = o.x[tokens].float() @ o.w1[e].float().T + (o.bias1[e].float() if bias else 0.0)
        return [h, activate(h, activation)]
    if kernel == DOWN_PROJECTION:
        return [o.a[own].float() @ o.w2[e].float().T + (o.bias2[e].float() if bias else 0.0)]
    if kernel == HIDDEN_GRADIENT:
        h, scores = o.h[own].float().requires_grad_(), o.row_scores[own].clone().requires_grad_()
        scaled_a = activate(h, activation) * scores[:, None]
        grads = torch.autograd.grad(scaled_a, (h, scores), o.grad_out[tokens].float() @ o.w2[e].float())
        return [grads[0], scaled_a.detach(), grads[1]]
    if kernel == INPUT_GRADIENT:
        of_router = o.row_gradients[own, None] * o.router[e].float() if bias else 0.0
        return [o.grad_h[own].float() @ o.w1[e].float() + of_router]
    if kernel == UP_WEIGHT_GRADIENT:
        return [o.grad_h[own].float().T @ o.x[tokens].float()]
    return [o.grad_out[tokens].float().T @ o.scaled_a[own].float()]


def reference(kernel: str, o: Operands, like: Sequence[Tensor]) -> list[Tensor]:
    results = [torch.zeros_like(t, dtype=torch.float32) for t in like]
    for e, own, tokens in o.experts():
        for result, part in zip(results, of_one_expert(kernel, o, e, own, tokens), strict=True):
            result[e if "weight" in kernel else own] = part
    return results


def check(kernel: str, o: Operands, candidate: Candidate = DEFAULT, twin: bool = True) -> None:
    first = launch(kernel, o, candidate)
    got = [t.clone() for t in first]
    # The next results lie where these do now.
    spoil(first)
    del first
    assert_equal(launch(kernel, o, candidate), got)
    expected = reference(kernel, o, got)
    plain = launch(kernel, o, PLAIN) if twin else expected
    if twin and kernel in EXACT:
        assert_equal(got, plain)
    whole_limit, row_limit = LIMITS[o.case.dtype]
    for index, (value, want, other) in enumerate(zip(got, expected, plain, strict=True)):
        error, difference = relative([(value, want)]), relative([(value, other.float())])
        rows = want.reshape(-1, want.shape[-1] if want.dim() > 1 else 1)
        worst = (value.float().reshape(rows.shape) - rows).norm(dim=1).max() / rows.norm(dim=1).square().mean().sqrt()
        facts = f"result {index}: {error:.1e}, its worst row {float(worst):.1e}, from the twin {difference:.1e}"
        assert error < whole_limit and float(worst) < row_limit and difference < whole_limit, facts
        if "weight" in kernel:
            empty = [e for e in range(o.routing.num_experts) if o.offsets[e] == o.offsets[e + 1]]
            assert not value[empty].any()


@pytest.mark.parametrize("case", CASES)
@each_kernel
def test_agrees_with_torch_and_its_twin(kernel: str, case: str) -> None:
    check(kernel, Operands(CASES[case]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    o = Operands(replace(RAGGED, dtype=torch.bfloat16, activation=activation))
    for kernel in (UP_PROJECTION, HIDDEN_GRADIENT):
        check(kernel, o, twin=False)


@each_kernel
def test_nans_stay_with_their_expert_and_token(kernel: str) -> None:
    o = Operands(RAGGED)
    clean = launch(kernel, o)
    victim = 5
    spoil(o.of_expert(victim))
    o.x[0], o.grad_out[0] = torch.nan, torch.nan
    dirty = launch(kernel, o)
    untouched = 0
    for e, own, tokens in o.experts():
        takes_token = kernel not in (DOWN_PROJECTION, INPUT_GRADIENT)
        spoilt = (tokens == 0) if takes_token else torch.zeros_like(tokens, dtype=torch.bool)
        if e == victim or ("weight" in kernel and spoilt.any()):
            continue
        untouched += 1
        where = e if "weight" in kernel else torch.arange(own.start, own.stop, device=tokens.device)[~spoilt]
        assert_equal([t[where] for t in dirty], [t[where] for t in clean])
    assert untouched >= 6


@pytest.mark.parametrize(
    ("kernel", "candidate"),
    [
        pytest.param(kernel, candidate, id=",".join([kernel, *(f"{k}={v}" for k, v in candidate.items())]))
        for kernel in KERNELS
        for candidate in tune.CANDIDATES[kernel]
        if candidate is not DEFAULT and candidate != PLAIN
    ],
)
def test_every_candidate(kernel: str, candidate: Candidate) -> None:
    for case in CANDIDATE_CASES:
        check(kernel, Operands(case), candidate)


@each_kernel
def test_the_tuning_can_run_every_candidate(kernel: str) -> None:
    shape = MoEShape.parse(MEDIUM)
    run = tune.Layer(shape, shape.T).launches()[kernel]
    want = run(PLAIN)
    for candidate in tune.CANDIDATES[kernel]:
        for value, expected in zip(run(candidate), want, strict=True):
            error = relative([(value, expected.float())])
            assert error < LIMITS[torch.bfloat16][0], f"{candidate}: {error:.1e}"
