"""Small routed problems that the tests of the grouped GEMMs share, with their plain fp32 reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from implementations.sonicmoe_triton.activations import is_gated
from implementations.sonicmoe_triton.metadata import Routing, make_routing
from implementations.sonicmoe_triton.tiles import Tile

BLOCK_M = 16
#: Rows of each expert: exactly a tile, none, more than a tile, one, none at the end.
COUNTS = (16, 0, 19, 1, 0)
#: d and n that no tile side of SMALL_TILE divides, and some that all divide.
WIDTHS = {"even": (32, 16), "uneven": (40, 24)}
SMALL_TILE = Tile(BLOCK_M, 32, 16, warps=4, stages=2)
TOLERANCE = {torch.float16: 2e-3, torch.float32: 2e-6}

ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "reglu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}


def routing_of(counts: tuple[int, ...] = COUNTS, block_m: int = BLOCK_M) -> Routing:
    """A token for each pair of every second expert's rows, others shared: general routing with these rows an expert."""
    pairs = sorted((row, expert) for expert, count in enumerate(counts) for row in range(count))
    tokens = max(counts)
    starts = [sum(token < t for token, _ in pairs) for t in range(tokens + 1)]
    experts = torch.tensor([expert for _, expert in pairs], dtype=torch.int32)
    return make_routing(experts, len(counts), block_m, torch.tensor(starts, dtype=torch.int32))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def experts_of(routing: Routing) -> Iterator[tuple[int, slice]]:
    """(expert, its rows)."""
    offsets = routing.expert_offsets.tolist()
    for expert in range(routing.num_experts):
        yield expert, slice(offsets[expert], offsets[expert + 1])


def per_expert(rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """rows[r] weights[e]^T in float32, for weights (E, out, in)."""
    out = torch.empty(rows.shape[0], weights.shape[1])
    for expert, own in experts_of(routing):
        out[own] = rows[own].float() @ weights[expert].float().T
    return out


def activation(h: Tensor, name: str) -> Tensor:
    if not is_gated(name):
        return ACTIVATION[name](h)
    gate, up = h.chunk(2, dim=-1)
    return ACTIVATION[name](gate) * up


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Relative L2 error: an absolute tolerance would pass anything small."""
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < TOLERANCE[dtype], f"relative L2 error {error:.2e}"
