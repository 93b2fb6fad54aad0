"""Up-projection: one grouped GEMM that gathers its rows while loading and applies the activation before storing.

For row r of expert e, with token t = gather[r]:

    H[r] = x[t] W1[e]^T (+ bias1[e])        (R, 2n), halves gate | up
    A[r] = f(H[r, :n]) * H[r, n:]           (R, n)

No gathered copy of x exists. W1 is concatenated (gate rows, then up rows): a tile that holds both columns of the same
units comes from one 3-D box (2, columns, k) over W1 seen as (2E, n, d). Ungated activations have no up half: H and W1
have n instead of 2n, and A = f(H).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.activations import activate
from implementations.sonicmoe_triton.launching import cdiv
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import check_up_projection
from implementations.sonicmoe_triton.rows import gathered, load_step, locate
from implementations.sonicmoe_triton.tiles import Tile


@triton.jit
def up_projection_kernel(  # type: ignore[no-untyped-def]
    x,  # (T, D)
    w1,  # descriptor of (HALVES E, N, D), box (HALVES, BN / HALVES, BK)
    bias1,  # (E, HALVES N), not read without HAS_BIAS
    h,  # (R, HALVES N)
    a,  # (R, N)
    gather,  # (R,)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    D: tl.constexpr,
    N: tl.constexpr,
    HALVES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    UNITS: tl.constexpr = BN // HALVES
    COLUMN_TILES: tl.constexpr = (N + UNITS - 1) // UNITS
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles) * COLUMN_TILES, PROGRAMS, flatten=FLATTEN):
        row_tile = tile // COLUMN_TILES
        column = tile % COLUMN_TILES * UNITS
        expert, first, inside = locate(tile_expert, tile_row, expert_offsets, row_tile, BM)
        x_rows = gathered(x, gather, first, inside, D, BM, BK)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D, BK):
            w_step = w1.load([expert * HALVES, column, k]).reshape(BN, BK)
            acc = tl.dot(load_step(x_rows, k, D, BK), w_step.T, acc, input_precision=PRECISION)

        rows = tl.arange(0, BM)
        columns = column + tl.arange(0, UNITS)
        bias = bias1 + expert.to(tl.int64) * (HALVES * N) + columns
        # A 64-bit base for the tile and 32-bit offsets within it: 64-bit pointers for a whole tile spill.
        h_tile = h + first.to(tl.int64) * (HALVES * N)
        h_offsets = rows[:, None] * (HALVES * N) + columns[None, :]
        mask = inside[:, None]
        if N % UNITS:
            mask = mask & (columns < N)[None, :]
        if HALVES == 2:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BM, 2, UNITS)), (0, 2, 1)))
            if HAS_BIAS:
                up += tl.load(bias + N, mask=columns < N, other=0.0).to(tl.float32)[None, :]
            tl.store(h_tile + N + h_offsets, up.to(h.dtype.element_ty), mask=mask)
        else:
            gate = acc
            up = acc
        if HAS_BIAS:
            gate += tl.load(bias, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        tl.store(h_tile + h_offsets, gate.to(h.dtype.element_ty), mask=mask)
        activated = activate(gate, up, ACTIVATION)
        a_tile = a + first.to(tl.int64) * N
        tl.store(a_tile + rows[:, None] * N + columns[None, :], activated.to(a.dtype.element_ty), mask=mask)


def up_projection(
    x: Tensor, w1: Tensor, routing: Routing, activation: str, bias1: Tensor | None = None, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """(h (R, 2n), a (R, n)) of x (T, d), w1 (E, 2n, d) with gate rows before up rows, and bias1 (E, 2n) or None.

    With an ungated activation: h (R, n), w1 (E, n, d), bias1 (E, n). Both outputs have x's dtype; products accumulate
    in float32 and `a` is made from the unrounded `h`.

    Raises:
        ValueError: unknown activation; d or n is no multiple of 16 bytes; a tensor's shape, dtype or device does not
            fit the others; the tile's block_m is not the routing's.
    """
    halves, experts, d, n = check_up_projection(x, w1, activation, bias1)
    rows = routing.rows
    h = torch.empty(rows, halves * n, dtype=x.dtype, device=x.device)
    a = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows == 0:
        return h, a
    tile = tile or tiles.choose(tiles.UP_PROJECTION, d, n, x.element_size(), routing.block_m, halves)
    tiles.check_block_m(tile, routing.block_m)
    units = tile.block_n // halves
    w1_boxes = TensorDescriptor.from_tensor(tiles.dense(w1).view(halves * experts, n, d), [halves, units, tile.block_k])
    bias = x if bias1 is None else bias1.contiguous()
    tiles.launch(
        up_projection_kernel,
        tile,
        routing.max_tiles * cdiv(n, units),
        (x.contiguous(), w1_boxes, bias, h, a, routing.gather, *routing.row_tiles),
        x,
        D=d,
        N=n,
        HALVES=halves,
        ACTIVATION=activation,
        HAS_BIAS=bias1 is not None,
        FLATTEN=tile.flatten,
    )
    return h, a
