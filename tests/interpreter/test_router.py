"""Top-K, scores and their gradient against plain torch and its autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.interface import ROUTER_CONVENTIONS
from harness.routing import router_scores
from implementations.sonicmoe_triton.router import router_backward, top_k

SHAPES = [(1, 1, 1), (5, 8, 2), (7, 10, 3), (3, 12, 12), (6, 100, 22), (2, 1024, 16), (2, 64, 64), (70, 16, 1)]


def logits_of(tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens))).to(dtype)


def best(logits: Tensor, k: int) -> Tensor:
    """Ties to the lower index: the order of a stable descending sort."""
    return torch.sort(logits.float(), dim=1, descending=True, stable=True).indices[:, :k]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
def test_top_k(tokens: int, experts: int, k: int, dtype: torch.dtype) -> None:
    logits = logits_of(tokens, experts, dtype)
    for convention in ROUTER_CONVENTIONS:
        scores, chosen = top_k(logits, k, convention)
        assert scores.dtype == torch.float32 and chosen.dtype == torch.int32
        assert torch.equal(chosen.long(), best(logits, k))
        torch.testing.assert_close(scores, router_scores(logits.float(), chosen.long(), convention))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ties_go_to_the_lower_expert(dtype: torch.dtype) -> None:
    logits = torch.tensor(
        [
            [1.0, 2.0, 2.0, 1.0, 2.0, 0.5],
            [0.0, -0.0, 0.0, -0.0, -1.0, -1.0],
            [-0.0, 0.0, -1.0, -1.0, -2.0, -2.0],
            [-3.0] * 6,
            [float("-inf"), float("-inf"), 1.0, float("-inf"), 6e-8, -6e-8],
        ],
        dtype=dtype,
    )
    _, chosen = top_k(logits, 5, "topk_softmax")
    assert torch.equal(chosen.long(), best(logits, 5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_no_logits_at_all_hang_or_leave_the_range(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[nan] * 5, [-inf] * 5, [inf] * 5, [nan, 1, 2, 3, 4], [-nan, inf, -inf, 0, 0]], dtype=dtype)
    for convention in ROUTER_CONVENTIONS:
        scores, chosen = top_k(logits, 3, convention)
        assert [sorted(set(row)) for row in chosen.tolist()] == [sorted(row) for row in chosen.tolist()]
        assert chosen.min() >= 0 and chosen.max() < 5
        assert chosen[3].tolist() == [4, 3, 2] and chosen[4].tolist() == [1, 3, 4]
        assert scores[:2].isnan().all() and scores[3:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("experts", "k"), [(8, 8), (9, 9), (40, 40)])
def test_a_nan_of_any_sign_and_payload_is_chosen_last(experts: int, k: int, dtype: torch.dtype) -> None:
    wide = dtype == torch.float32
    infinity, sign, integer = (0x7F800000, -(2**31), torch.int32) if wide else (0x7C00, -(2**15), torch.int16)
    logits = logits_of(4, experts, dtype)
    logits[:, 5] = float("-inf")
    bits = logits.view(integer)
    bits[0, 2], bits[1, 2], bits[2, 2] = infinity + 1, sign + infinity + 1, -1 - sign
    scores, chosen = top_k(logits, k)
    for t in range(4):
        assert chosen[t].sort().values.tolist() == list(range(k))
        assert scores[t].isnan().all() == (t < 3) and (t == 3 or chosen[t, -1] == 2)
        assert chosen[t, -2 if t < 3 else -1] == 5
    scores, _ = top_k(logits, 1)
    assert scores[:3].isnan().all() and not scores[3].isnan().any()


@pytest.mark.parametrize(("experts", "k"), [(16, 2), (64, 8), (128, 4), (256, 16), (512, 3)])
def test_random_ties(experts: int, k: int) -> None:
    logits = torch.randint(-3, 3, (9, experts), generator=torch.Generator().manual_seed(k)).half()
    scores, chosen = top_k(logits, k)
    assert torch.equal(chosen.long(), best(logits, k))
    torch.testing.assert_close(scores, router_scores(logits.float(), chosen.long(), "topk_softmax"))


def test_minus_infinity_gets_nothing() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0]])
    for convention in ROUTER_CONVENTIONS:
        scores, chosen = top_k(logits, 3, convention)
        assert chosen.tolist() == [[1, 3, 0]] and scores.tolist() == [[0.5, 0.5, 0.0]]


def test_other_inputs() -> None:
    logits = logits_of(6, 10)
    scores, chosen = top_k(logits, 4)
    for same in (logits.T.contiguous().T, logits.double()):
        again = top_k(same, 4)
        assert torch.equal(again[0], scores) and torch.equal(again[1], chosen)
    empty = top_k(logits[:0], 4)
    assert empty[0].shape == empty[1].shape == (0, 4)
    assert router_backward(*empty, empty[0], "topk_softmax", None, 10, torch.float16).shape == (0, 10)
    with pytest.raises(ValueError, match="convention"):
        top_k(logits, 4, "softmax")
    with pytest.raises(ValueError, match="K = 11"):
        top_k(logits, 11)
    with pytest.raises(ValueError, match="K = 65"):
        top_k(torch.zeros(1, 100), 65)
    with pytest.raises(ValueError, match="E = 1025"):
        top_k(torch.zeros(1, 1025), 4)
    with pytest.raises(ValueError, match="logits"):
        router_backward(scores, chosen, scores, "softmax_topk", None, 10, torch.float32)


@pytest.mark.parametrize("convention", ROUTER_CONVENTIONS)
@pytest.mark.parametrize(("tokens", "experts", "k"), SHAPES)
def test_backward(tokens: int, experts: int, k: int, convention: str) -> None:
    logits = logits_of(tokens, experts).requires_grad_()
    scores, chosen = top_k(logits.detach(), k, convention)
    grad_scores = torch.randn(tokens, k, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(router_scores(logits, chosen.long(), convention), logits, grad_scores)[0]
    kept = logits.detach() if convention == "softmax_topk" else None
    grad = router_backward(scores, chosen, grad_scores, convention, kept, experts, torch.float32)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)

    reverse = torch.randperm(tokens * k).int()
    row_of_pair = torch.argsort(reverse)
    by_row = router_backward(
        scores.reshape(-1)[row_of_pair],
        chosen,
        grad_scores.reshape(-1)[row_of_pair],
        convention,
        kept,
        experts,
        torch.float16,
        reverse=reverse,
    )
    assert torch.equal(by_row, grad.half())

    rows = scores.reshape(-1)[row_of_pair], chosen, grad_scores.reshape(-1)[row_of_pair], convention, kept, experts
    of_chosen = torch.full((tokens * k,), torch.nan)
    if convention == "softmax_topk":
        with pytest.raises(ValueError, match="row_gradients need"):
            router_backward(*rows, torch.float32, reverse, of_chosen)
        return
    again = router_backward(*rows, torch.float32, reverse, of_chosen)
    assert torch.equal(again, grad)
    assert torch.equal(of_chosen[reverse.long()].reshape(tokens, k), grad.gather(1, chosen.long()))
    with pytest.raises(ValueError, match="row_gradients"):
        router_backward(*rows, torch.float32, reverse, of_chosen[1:])
    with pytest.raises(ValueError, match="row_gradients need"):
        router_backward(scores, chosen, grad_scores, convention, kept, experts, torch.float32, None, of_chosen)


def test_backward_adds_partial_gradients_in_order() -> None:
    logits = logits_of(7, 12)
    scores, chosen = top_k(logits, 3)
    parts = torch.randn(4, 21, generator=torch.Generator().manual_seed(1))
    reverse = torch.randperm(21).int()
    rows = (scores.reshape(-1), chosen)
    whole = parts[0] + parts[1] + parts[2] + parts[3]
    convention = "topk_softmax"
    expected = router_backward(*rows, whole, convention, None, 12, torch.float32, reverse)
    assert torch.equal(router_backward(*rows, parts, convention, None, 12, torch.float32, reverse), expected)
    one = router_backward(*rows, whole[None], convention, None, 12, torch.float32, reverse)
    assert torch.equal(one, expected)
    with pytest.raises(ValueError, match="gradients"):
        router_backward(*rows, parts, convention, None, 12, torch.float32)
    with pytest.raises(ValueError, match="gradients"):
        router_backward(*rows, parts[:, :20], convention, None, 12, torch.float32, reverse)
