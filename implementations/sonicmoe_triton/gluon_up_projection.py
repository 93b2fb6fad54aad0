"""`up_projection` for Hopper, warp-specialised: the same results as the plain twin beside this file.

Three partitions walk through one ring of stages (gluon_common.py, gluon_gathered.py):

- Producer (4 warps, few registers): gathered rows of x by cp.async and boxes of W1 by TMA; then it hands out as many
  stages as the tile has slices, with nothing in them. Meanwhile the ring's other stages fill with the next tile.
- Two consumers (4 warps each), one for each half of a tile's rows: multiply, then put H and A of one slice after the
  other into those stages, from where they leave by TMA while the next slice, and then the next tile, is computed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.gluon_common import (
    CONSUMER_WARPS,
    ENTRY_REGISTERS,
    check_dtype,
    column_slices,
    descriptor,
    release_before,
    wait_empty,
    wait_full,
)
from implementations.sonicmoe_triton.gluon_gathered import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    ROWS,
    Options,
    Plan,
    boxes_of_halves,
    boxes_of_rows,
    by_expert,
    contract,
    copy_rows,
    gathered_rows,
    halves_of_group,
    locate,
    make_options,
    make_plan,
    make_ring,
    rows_of_group,
    store_slice,
    value_and_slope,
)
from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import check_up_projection


@gluon.jit
def _produce(ring, row_tiles, num_tiles, operands, P: gl.constexpr):  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty = ring
    x, w1, gather = operands
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * P.column_tiles, P.stride):
        expert, first, size, column_tile = locate(tile, row_tiles, 0, P)
        column = column_tile * P.columns
        rows = gathered_rows(x, gather, first, size, P)
        for k in range(0, P.d, P.block_k):
            stage = step % P.stages
            wait_empty(empty, step)
            barrier = full.index(stage)
            mbarrier.expect(barrier, w1.block_type.nbytes)
            tma.async_copy_global_to_shared(w1, [expert * P.halves, column, k], barrier, b_ring.index(stage))
            copy_rows(a_ring.index(stage), rows, k, barrier, P)
            step += 1
        for _ in range(P.slices):
            wait_empty(empty, step)
            barrier = full.index(step % P.stages)
            mbarrier.arrive(barrier, count=1)
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            step += 1


@gluon.jit
def _consume(ring, row_tiles, num_tiles, results, GROUP: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty = ring
    bias1, h_boxes, a_boxes, h, a = results
    N: gl.constexpr = P.n
    HALVES: gl.constexpr = P.halves
    ACTIVATION: gl.constexpr = P.activation
    SLICE: gl.constexpr = P.slice
    SLICES: gl.constexpr = P.slices
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICE, 16])
    slice_columns = gl.arange(0, SLICE, gl.SliceLayout(0, layout))
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * P.column_tiles, P.stride):
        expert, first, size, column_tile = locate(tile, row_tiles, GROUP * ROWS, P)
        acc, step = contract(ring, step, True, GROUP, P)

        # The gate's slices come first, then as many of the up half.
        parts = column_slices(acc, SLICE)
        for i in gl.static_range(SLICES):
            column = column_tile * P.columns + i * SLICE
            gate = gl.convert_layout(parts[i], layout, assert_trivial=True)
            up = gl.convert_layout(parts[i + (HALVES - 1) * SLICES], layout, assert_trivial=True)
            if P.has_bias:
                columns = column + slice_columns
                bias = bias1 + expert.to(gl.int64) * (HALVES * N) + columns
                gate += gl.load(bias, mask=columns < N, other=0.0).to(gl.float32)[None, :]
                if HALVES == 2:
                    up += gl.load(bias + N, mask=columns < N, other=0.0).to(gl.float32)[None, :]
            activated, _ = value_and_slope(gate, ACTIVATION)
            if HALVES == 2:
                activated = activated * up
            stage = step % P.stages
            wait_full(full, step)
            store_slice(
                gate, up, activated, rows_of_group(a_ring.index(stage), GROUP),
                halves_of_group(b_ring.index(stage), GROUP, P), h_boxes, a_boxes, h, a, first, size, column, P,
            )  # fmt: skip
            # The stage before: a finished step of the contraction, or a slice whose two boxes this waits for.
            tma.store_wait(2)
            release_before(empty, step, step > 0)
            step += 1
    tma.store_wait(0)


def _name(_: Any) -> str:
    """Of a compiled kernel: profilers tell it from its twin by it."""
    return "gluon_up_projection_kernel"


@gluon.jit(repr=_name)
def up_projection_kernel(  # type: ignore[no-untyped-def]
    x,  # (T, D)
    w1,  # descriptor of (HALVES E, N, D), box (HALVES, BN / HALVES, BK)
    bias1,  # (E, HALVES N), not read without a bias
    h_boxes,  # descriptor of h by `boxes_of_halves`, of a by `boxes_of_rows`; ragged or not
    a_boxes,
    h,  # (R, HALVES N)
    a,  # (R, N)
    gather,  # (R,)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    P: gl.constexpr,
):
    ring = make_ring(w1, P)
    row_tiles = (tile_expert, tile_row, expert_offsets)
    operands = (x, w1, gather)
    results = (bias1, h_boxes, a_boxes, h, a)
    gl.warp_specialize(
        [
            (_consume, (ring, row_tiles, num_tiles, results, 0, P)),
            (_consume, (ring, row_tiles, num_tiles, results, 1, P)),
            (_produce, (ring, row_tiles, num_tiles, operands, P)),
        ],
        [gl.num_warps(), PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@functools.cache
def choose(n: int, halves: int = 2, ordered_by_expert: bool = False) -> Options:
    """The options for experts of width n: the widest tile that the halves fill, as many stages as fit.

    Ragged descriptors, through which whole tiles would leave too, cost more here than storing tails from registers, but
    for experts with so few rows that a good part of their tiles are tails; see `by_expert`."""
    units = min(256 // halves, max(64, next_power_of_2(n)))
    return make_options(halves * units, ragged=ordered_by_expert, halves=halves, by_expert=ordered_by_expert)


def up_projection(
    x: Tensor,
    w1: Tensor,
    routing: Routing,
    activation: str,
    bias1: Tensor | None = None,
    options: Options | None = None,
) -> tuple[Tensor, Tensor]:
    """(h (R, 2n), a (R, n)) of x (T, d), w1 (E, 2n, d) with gate rows before up rows, and bias1 (E, 2n) or None.

    x is float16 or bfloat16. With an ungated activation: h (R, n), w1 (E, n, d), bias1 (E, n). Both outputs have x's
    dtype; products accumulate in float32 and `a` is made from the unrounded `h`.

    Raises:
        ValueError: unknown activation; d or n is no multiple of 16 bytes; a tensor's shape, dtype or device does not
            fit the others; float32; the routing was not made for tiles of 128 rows.
    """
    check_dtype(x.dtype)
    halves, experts, d, n = check_up_projection(x, w1, activation, bias1)
    rows = routing.rows
    h = torch.empty(rows, halves * n, dtype=x.dtype, device=x.device)
    a = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows == 0:
        return h, a
    options = options or choose(n, halves, by_expert(halves * n, d, rows // experts))
    tile = options.tile
    tiles.check_block_m(tile, routing.block_m)
    columns = tile.block_n // halves
    grid, stride = tiles.programs(routing.max_tiles * cdiv(n, columns), x.device)
    _launcher(make_plan(d, n, activation, halves, columns, stride, options, bias1 is not None))(
        (grid,),
        (
            tiles.dense(x),
            descriptor(tiles.dense(w1), (halves * experts, n, d), (n * d, d, 1), (halves, columns, tile.block_k)),
            x if bias1 is None else bias1.contiguous(),
            boxes_of_halves(h, halves, options, options.ragged),
            boxes_of_rows(a, options, options.ragged),
            h,
            a,
            routing.gather,
            *routing.row_tiles,
        ),
    )
    return h, a


@functools.cache
def _launcher(plan: Plan) -> Launcher:
    return Launcher(up_projection_kernel, {"P": plan}, num_warps=CONSUMER_WARPS, maxnreg=ENTRY_REGISTERS)
