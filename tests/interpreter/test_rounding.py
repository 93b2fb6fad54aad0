"""Token rounding on the device against `harness.token_rounding`: the selection exactly, the weights, their gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS
from harness.token_rounding import ADDED_WEIGHTS, MOST_M_TILE, ROUNDINGS, GeneralRouting, round_counts, route_by
from implementations.sonicmoe_triton import rounding_kernels
from implementations.sonicmoe_triton.rounding import RoundedRouting, pairs_bound, round_routing


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs of every kernel and several turns of every loop from few tokens."""
    monkeypatch.setattr(rounding_kernels, "ELEMENTS", 512)
    monkeypatch.setattr(rounding_kernels, "MARKED_ELEMENTS", 1024)
    monkeypatch.setattr(rounding_kernels, "TRANSPOSED_TOKENS", 32)
    monkeypatch.setattr(rounding_kernels, "TRANSPOSED_EXPERTS", 4)
    monkeypatch.setattr(rounding_kernels, "STREAMED_TOKENS", 32)
    monkeypatch.setattr(rounding_kernels, "TIED_TOKENS", 16)
    monkeypatch.setattr(rounding_kernels, "CLEARED", 4)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tied(tokens: int, experts: int, values: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of a few values: tokens tie with each other, and experts within a token."""
    return torch.randint(values, (tokens, experts), generator=random(seed)).to(dtype) / 2


def skewed(tokens: int, experts: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The first experts are everybody's, the last one nobody's."""
    logits = torch.randn(tokens, experts, generator=random(seed)) - 0.5 * torch.arange(experts)
    logits[:, -1] = -40.0
    return logits.to(dtype)


def check(got: RoundedRouting, want: GeneralRouting, bound: int) -> None:
    pairs = want.experts.numel()
    assert [t.dtype for t in got] == [torch.float32, torch.int32, torch.int32, torch.int32]
    assert torch.equal(got.token_offsets, want.token_offsets)
    assert torch.equal(got.experts[:pairs], want.experts)
    torch.testing.assert_close(got.scores[:pairs], want.scores, rtol=1e-6, atol=0.0, equal_nan=True)
    assert got.scores.shape == got.experts.shape == (bound,) and pairs <= bound
    assert (got.experts[pairs:] == -1).all() and (got.scores[pairs:] == 0.0).all()


def compare(
    logits: Tensor,
    k: int,
    m_tile: int,
    method: str,
    convention: str = "topk_softmax",
    added_weight: str = "renormalised",
    seed: int = 5,
) -> tuple[RoundedRouting, GeneralRouting]:
    arguments = (logits, k, m_tile, method, convention, added_weight)
    got = round_routing(*arguments, random(seed) if method == "stochastic" else None)
    want = route_by(logits, k, method, m_tile, convention, added_weight, generator=random(seed))
    check(got, want, pairs_bound(*logits.shape, k, m_tile, method))
    return got, want


@pytest.mark.parametrize("method", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ties(small_blocks: None, method: str, dtype: torch.dtype) -> None:
    logits = tied(70, 7, 3, 1, dtype)
    _, want = compare(logits, 2, 8, method)
    assert want.dropped + want.added > 0


@pytest.mark.parametrize("method", ROUNDINGS)
def test_more_keys_than_stay_in_registers(small_blocks: None, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding_kernels, "RESIDENT_TOKENS", 64)
    compare(tied(70, 3, 3, 2) if method in ("up", "down") else skewed(70, 3, 2), 1, 8, method)


@pytest.mark.parametrize("method", ROUNDINGS)
def test_skew_and_an_expert_that_nobody_chose(small_blocks: None, method: str) -> None:
    logits = skewed(45, 6, 3)
    counts = round_counts(route_counts(logits, 2), 45, 16, "up")
    assert counts[0] % 16 != 0  # exempt: 48 would be more than all tokens
    assert counts[-1] == 0
    compare(logits, 2, 16, method)


def route_counts(logits: Tensor, k: int) -> Tensor:
    return torch.bincount(route_by(logits, k, "top_k").experts, minlength=logits.shape[1])


@pytest.mark.parametrize("method", ROUNDINGS)
def test_small_and_extreme_sizes(method: str) -> None:
    for tokens, experts, k, m_tile in ((5, 3, 2, 128), (9, 1, 1, 4), (1, 2, 1, 1), (4, 4, 4, 3), (8, 3, 1, 8)):
        compare(tied(tokens, experts, 4, tokens), k, m_tile, method)


@pytest.mark.parametrize("method", ROUNDINGS)
def test_a_tile_of_one_and_a_tile_beyond_all_tokens_change_nothing(method: str) -> None:
    logits = tied(20, 5, 4, 4)
    want = route_by(logits, 2, "top_k")
    for m_tile in (1, 21, MOST_M_TILE):
        assert pairs_bound(20, 5, 2, m_tile, method) == 40
        got, _ = compare(logits, 2, m_tile, method)
        check(got, want, 40)


@pytest.mark.parametrize("method", ROUNDINGS)
def test_a_tile_beyond_all_integers_changes_nothing(method: str) -> None:
    """The kernels' own limits: the reference takes no such tile."""
    logits = tied(20, 5, 4, 4)
    for m_tile in (2**40, 2**63 - 1, 2**70):
        check(round_routing(logits, 2, m_tile, method), route_by(logits, 2, "top_k"), 40)


@pytest.mark.parametrize("method", ROUNDINGS)
def test_no_tokens(method: str) -> None:
    logits = torch.zeros(0, 5, requires_grad=True)
    routing = round_routing(logits, 2, 8, method)
    assert routing.scores.shape == routing.experts.shape == (0,) and routing.token_offsets.tolist() == [0]
    assert torch.autograd.grad(routing.scores.sum(), logits)[0].shape == (0, 5)


def test_many_experts() -> None:
    """More than a transposed tile holds, and top-K by the router's other kernel. Few change, for the test's sake."""
    logits = tied(9, 70, 2, 13) - torch.arange(70) // 4
    _, want = compare(logits, 18, 3, "nearest")
    assert want.dropped + want.added > 0


def test_random_sizes(small_blocks: None) -> None:
    generator = random(7)

    def upto(n: int) -> int:
        return 1 + int(torch.randint(n, (), generator=generator))

    for seed in range(8):
        experts = upto(7)
        logits = tied(upto(50), experts, 1 + upto(5), seed, (torch.float16, torch.float32)[seed % 2])
        compare(logits, upto(experts), upto(12), ROUNDINGS[seed % 5], seed=seed)


def test_the_order_of_a_tokens_logits_may_break_ties() -> None:
    """In exact arithmetic all tokens would tie at each expert's boundary."""
    row = torch.randn(9, generator=random(8))
    logits = torch.stack([row[torch.randperm(9, generator=random(seed))] for seed in range(50)])
    compare(logits, 4, 8, "nearest")


def test_numbers_near_the_edges(small_blocks: None) -> None:
    nan, inf = math.nan, math.inf
    logits = tied(24, 5, 3, 9)
    logits[0, 3], logits[1, 0], logits[2, 4], logits[3, 1] = nan, inf, -inf, -nan
    logits[4], logits[5], logits[6], logits[7] = nan, inf, -inf, torch.tensor([nan, inf, 0.0, inf, -inf])
    logits[8] = torch.tensor([0.0, -0.0, -0.0, 0.0, -0.0])
    logits[9] = torch.tensor([0.0, -100.0, -101.0, -200.0, -300.0])  # subnormal p, and p = 0
    for method in ("up", "down"):
        for dtype in (torch.float32, torch.float16):
            compare(logits.to(dtype), 2, 4, method)


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize("added_weight", ADDED_WEIGHTS)
@pytest.mark.parametrize("method", ["up", "down"])
def test_weights_and_their_gradient(small_blocks: None, convention: str, added_weight: str, method: str) -> None:
    logits = skewed(37, 6, 10).requires_grad_()
    got, want = compare(logits, 2, 8, method, convention, added_weight)
    grad = torch.randn(got.scores.shape, generator=random(1))
    (found,) = torch.autograd.grad(got.scores, logits, grad)
    (expected,) = torch.autograd.grad(want.scores, logits, grad[: want.scores.numel()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not got.experts.requires_grad and not got.token_offsets.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_gradient_has_the_logits_dtype(dtype: torch.dtype) -> None:
    logits = torch.randn(19, 6, generator=random(2)).to(dtype).T.contiguous().T.requires_grad_()
    got, want = compare(logits, 2, 4, "up")
    (found,) = torch.autograd.grad(got.scores.sum() + got.scores.square().sum(), logits)
    (expected,) = torch.autograd.grad(want.scores.sum() + want.scores.square().sum(), logits)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_stochastic_numbers() -> None:
    logits = tied(60, 4, 4, 11)
    draws = torch.randint(16, (4,), generator=random(3))
    by_numbers = round_routing(logits, 2, 16, "stochastic", draws=draws.int())
    by_generator = round_routing(logits, 2, 16, "stochastic", generator=random(3))
    for a, b in zip(by_numbers, by_generator, strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(3)
    assert torch.equal(round_routing(logits, 2, 16, "stochastic").token_offsets, by_numbers.token_offsets)
    # Every number below 16 is below no remainder of 0: nobody who needs no rounding is rounded.
    for number, method in ((0, "up"), (16, "down")):
        extreme = round_routing(logits, 2, 16, "stochastic", draws=torch.full((4,), number))
        assert torch.equal(extreme.token_offsets, route_by(logits, 2, method, 16).token_offsets)


def test_numbers_out_of_range_round_up_nobody_who_needs_no_rounding() -> None:
    """Each expert has a whole tile already: one tile more for each would be more pairs than the tensors hold."""
    logits = torch.zeros(24, 3)
    logits[:8, 0] = logits[8:16, 1] = logits[16:, 2] = 5.0
    want = route_by(logits, 1, "top_k")
    for number in (-1, -(2**62), 8, 2**62):
        got = round_routing(logits, 1, 8, "stochastic", draws=torch.full((3,), number))
        check(got, want, pairs_bound(24, 3, 1, 8, "stochastic"))
    # The same of experts that are rounded.
    logits = tied(60, 4, 4, 11)
    for number, method in ((-3, "up"), (2**40, "down")):
        got = round_routing(logits, 2, 16, "stochastic", draws=torch.full((4,), number))
        assert torch.equal(got.token_offsets, route_by(logits, 2, method, 16).token_offsets)


def test_pairs_beyond_the_tensors_are_not_written(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the bound too small, the rest of the memory would stay as it was."""
    logits = tied(40, 5, 4, 4)
    whole = round_routing(logits, 2, 8, "up")
    room, bound = len(whole.experts), 50
    memory = {torch.float32: torch.full((room,), -7.0), torch.int32: torch.full((room,), -7, dtype=torch.int32)}
    own_empty = torch.empty

    def empty(*size: object, dtype: torch.dtype = torch.float32, **kwargs: object) -> Tensor:
        return memory[dtype][:bound] if size == (bound,) else own_empty(*size, dtype=dtype, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(rounding_kernels, "pairs_bound", lambda *_: bound)
    monkeypatch.setattr(torch, "empty", empty)
    got, _ = rounding_kernels.forward(logits, rounding_kernels.Kind(5, 2, True, False), 8, "up", None)
    assert int(got.token_offsets[-1]) > bound
    for name, found in (("scores", memory[torch.float32]), ("experts", memory[torch.int32])):
        assert torch.equal(found[:bound], getattr(whole, name)[:bound])
        assert (found[bound:] == -7).all()


def test_runs_repeat() -> None:
    logits = tied(50, 6, 3, 12)
    runs = []
    for _ in range(2):
        leaf = logits.clone().requires_grad_()
        routing = round_routing(leaf, 2, 8, "up")
        (grad,) = torch.autograd.grad(routing.scores.square().sum(), leaf)
        runs.append([*routing, grad])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_of_tied_remainders_the_lower_experts_are_rounded_up() -> None:
    """Remainders 2, 2, 2, 2 and 3, whose sum is nearest to 3 tiles."""
    chosen = torch.arange(5).repeat_interleave(torch.tensor([6, 2, 6, 2, 3]))
    logits = torch.nn.functional.one_hot(chosen, 5).float()
    got, _ = compare(logits, 1, 4, "balanced")
    counts = torch.bincount(got.experts[: int(got.token_offsets[-1])], minlength=5)
    assert counts.tolist() == [8, 4, 4, 0, 4]


def test_the_bound_of_the_number_of_pairs_can_be_reached() -> None:
    """Every expert chosen by one token more than a multiple of the tile."""
    logits = torch.full((12, 3), 0.0)
    logits[0, 0] = logits[1, 1] = 1.0
    logits[2:, 2] = 1.0
    counts = route_counts(logits, 1)
    assert counts.tolist() == [1, 1, 10]
    got, _ = compare(logits, 1, 3, "up")
    assert int(got.token_offsets[-1]) == 3 + 3 + 12 == pairs_bound(12, 3, 1, 3, "up")


def all_counts(tokens: int, experts: int, k: int) -> Iterator[Tensor]:
    for counts in itertools.product(range(tokens + 1), repeat=experts):
        if sum(counts) == tokens * k:
            yield torch.tensor(counts)


@pytest.mark.parametrize("method", [m for m in ROUNDINGS if m != "stochastic"])
def test_no_counts_give_more_pairs_than_the_bound(method: str) -> None:
    """``stochastic`` has the bound of ``up``, which is the most that its numbers can make of it."""
    reached = 0
    for tokens, experts in ((1, 1), (4, 1), (3, 4), (6, 3), (7, 3), (9, 2), (13, 2)):
        for k in range(1, experts + 1):
            every = list(all_counts(tokens, experts, k))
            for m_tile in range(1, tokens + 2):
                most = max(int(round_counts(counts, tokens, m_tile, method).sum()) for counts in every)
                bound = pairs_bound(tokens, experts, k, m_tile, method)
                assert most <= bound, (tokens, experts, k, m_tile)
                if method == "up":
                    assert bound == pairs_bound(tokens, experts, k, m_tile, "stochastic")
                reached += most == bound
    assert reached > 40


@pytest.mark.parametrize("method", ROUNDINGS)
def test_no_random_counts_give_more_pairs_than_the_bound(method: str) -> None:
    """More experts than can all be rounded up, and fewer; odd and even tiles."""
    generator = random(21)
    for _ in range(400):
        tokens, experts, m_tile = (int(torch.randint(1, n, (), generator=generator)) for n in (80, 60, 24))
        spread = torch.rand(experts, generator=generator) ** 4
        k = int(torch.randint(1, min(experts, 6) + 1, (), generator=generator))
        # K different experts of each token, some of them more often than others.
        ranks = torch.rand(tokens, experts, generator=generator) * spread
        counts = torch.bincount(ranks.topk(k, 1).indices.flatten(), minlength=experts)
        rounded = round_counts(counts, tokens, m_tile, method, generator)
        assert int(rounded.sum()) <= pairs_bound(tokens, experts, k, m_tile, method)


def test_the_bound_knows_how_many_experts_can_be_rounded_up() -> None:
    for counts, tokens, m_tile, method, bound in (
        ([2, 2, 2, 2, 0, 0, 0, 0], 8, 3, "nearest", 12),  # a remainder of 2 at least: four of eight experts
        ([3, 3, 3, 0, 0, 0], 9, 5, "nearest", 15),
        ([1] * 12 + [0] * 88, 12, 3, "up", 36),  # a pair at least
        ([1] * 12 + [0] * 88, 12, 3, "stochastic", 36),
    ):
        assert pairs_bound(tokens, len(counts), 1, m_tile, method) == bound
        if method != "stochastic":
            assert int(round_counts(torch.tensor(counts), tokens, m_tile, method).sum()) == bound
    assert pairs_bound(128, 64, 1, 128, "nearest") == 128 + 2 * 64
    assert pairs_bound(16384, 256, 8, 128, "nearest") == 16384 * 8 + 256 * 64


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"rounding": "top_k"}, "unknown rounding 'top_k'; choose from nearest"),
        ({"rounding": None}, "unknown rounding None; choose from nearest"),
        ({"convention": "sigmoid"}, "unknown router convention 'sigmoid'; choose from topk_softmax"),
        ({"added_weight": "zero"}, "unknown added_weight 'zero'; choose from renormalised"),
        ({"k": 0}, "K = 0: must be between 1 and 4"),
        ({"k": 5}, "K = 5: must be between 1 and 4"),
        ({"k": 2.0}, "K = 2.0: must be an integer"),
        ({"m_tile": 0}, "m_tile = 0: must be at least 1"),
        ({"m_tile": -8}, "m_tile = -8: must be at least 1"),
        ({"m_tile": 8.5}, "m_tile = 8.5: must be an integer"),
        ({"m_tile": 8.0}, "m_tile = 8.0: must be an integer"),
        ({"m_tile": True}, "m_tile = True: must be an integer"),
        ({"m_tile": "nearest"}, "m_tile = 'nearest': must be an integer"),
        ({"m_tile": None}, "m_tile = None: must be an integer"),
        ({"logits": torch.zeros(4)}, "logits"),
        ({"logits": torch.zeros(3, 4, dtype=torch.int64)}, "logits"),
        ({"logits": torch.zeros(3, 0)}, "E = 0"),
        ({"logits": torch.zeros(3, 1025)}, "E = 1025"),
        ({"logits": torch.zeros(3, 100), "k": 65}, "K = 65"),
        (
            {"logits": torch.zeros(1, 4).expand(2**30, 4)},
            "T = 1073741824 tokens and E = 4 experts may have 2147483648 pairs by the rounding 'down' to m_tile = 2: "
            "must be below 2147483648",
        ),
        ({"draws": torch.zeros(4, dtype=torch.int64)}, "draws: for the rounding 'stochastic' only, not 'down'"),
        ({"generator": torch.Generator()}, "generator: for the rounding 'stochastic' only, not 'down'"),
        ({"generator": 3, "rounding": "stochastic"}, "generator must be a torch.Generator, not int"),
        ({"draws": [0, 0, 0, 0], "rounding": "stochastic"}, r"draws must be \(4,\) integers on cpu, not list"),
        ({"draws": torch.zeros(4, dtype=torch.bool), "rounding": "stochastic"}, "not .* torch.bool on cpu"),
        ({"draws": torch.zeros(4, dtype=torch.int64, device="meta"), "rounding": "stochastic"}, "on meta"),
        ({"draws": torch.zeros(3, dtype=torch.int64), "rounding": "stochastic"}, "draws"),
        ({"draws": torch.zeros(4), "rounding": "stochastic"}, "draws"),
        (
            {
                "draws": torch.zeros(4, dtype=torch.int64),
                "rounding": "stochastic",
                "generator": torch.Generator(),
            },
            "draws",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: dict[str, object], name: str) -> None:
    good: dict[str, object] = {"logits": torch.zeros(3, 4), "k": 2, "m_tile": 2, "rounding": "down"}
    with pytest.raises(ValueError, match=name):
        round_routing(**(good | arguments))  # type: ignore[arg-type]


def test_a_bound_needs_a_known_rounding() -> None:
    with pytest.raises(ValueError, match="unknown rounding 'x'; choose from nearest"):
        pairs_bound(3, 4, 2, 2, "x")
