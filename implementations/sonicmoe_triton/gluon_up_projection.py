"""`up_projection` for Hopper, warp-specialised: the same results as the plain twin beside this file.

Two partitions walk through one ring of stages (gluon_gathered.py):

- Producer (4 warps, few registers): gathered rows of x by cp.async and boxes of W1 by TMA; then it hands out as many
  stages as the tile has slices, with nothing in them. Meanwhile the ring's other stages fill with the next tile.
- Consumer: multiplies, then puts H and A of one slice after the other into those stages, from where they leave by TMA
  while the next slice, and then the next tile, is computed.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.activations import is_gated
from implementations.sonicmoe_triton.gluon_gathered import (
    PRODUCER_WARPS,
    Options,
    boxes,
    boxes_of_halves,
    boxes_of_rows,
    check_dtype,
    column_slices,
    contract,
    copy_rows,
    gathered_rows,
    halves_of_group,
    make_barriers,
    make_options,
    release_before,
    rows_of_group,
    stagger,
    store_slice,
    value_and_slope,
    wait_empty,
    wait_full,
)
from implementations.sonicmoe_triton.metadata import Routing


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    ring,
    row_tiles,
    x,
    w1,
    gather,
    D: gl.constexpr,
    N: gl.constexpr,
    HALVES: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    SLICE: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    a_ring, b_ring, full, empty = ring
    tile_expert, tile_row, expert_offsets, num_tiles = row_tiles
    UNITS: gl.constexpr = BN // HALVES
    COLUMN_TILES: gl.constexpr = (N + UNITS - 1) // UNITS
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * COLUMN_TILES, PROGRAMS):
        row_tile = tile // COLUMN_TILES
        column = tile % COLUMN_TILES * UNITS
        expert = gl.load(tile_expert + row_tile)
        first = gl.load(tile_row + row_tile)
        size = gl.load(expert_offsets + expert + 1) - first
        rows = gathered_rows(x, gather, first, size, D, BM, BK)
        for k in range(0, D, BK):
            stage = wait_empty(empty, step, STAGES)
            barrier = full.index(stage)
            mbarrier.expect(barrier, w1.block_type.nbytes)
            tma.async_copy_global_to_shared(w1, [expert * HALVES, column, k], barrier, b_ring.index(stage))
            copy_rows(a_ring.index(stage), rows, k, barrier, D, BK)
            step += 1
        for _ in range(UNITS // SLICE):
            barrier = full.index(wait_empty(empty, step, STAGES))
            mbarrier.arrive(barrier, count=1)
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            step += 1


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    ring,
    row_tiles,
    results,
    D: gl.constexpr,
    N: gl.constexpr,
    HALVES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    SLICE: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    RAGGED: gl.constexpr,
    STAGGER: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    a_ring, b_ring, full, empty = ring
    tile_expert, tile_row, expert_offsets, num_tiles = row_tiles
    bias1, h_boxes, a_boxes, h, a = results
    UNITS: gl.constexpr = BN // HALVES
    ROWS: gl.constexpr = BM // GROUPS
    COLUMN_TILES: gl.constexpr = (N + UNITS - 1) // UNITS
    SLICES: gl.constexpr = UNITS // SLICE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICE, 16])
    slice_columns = gl.arange(0, SLICE, gl.SliceLayout(0, layout))
    stagger(STAGGER)
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * COLUMN_TILES, PROGRAMS):
        row_tile = tile // COLUMN_TILES
        expert = gl.load(tile_expert + row_tile)
        first = gl.load(tile_row + row_tile) + GROUP * ROWS
        size = gl.load(expert_offsets + expert + 1) - first

        acc, step = contract(a_ring, b_ring, full, empty, step, D, True, ROWS, BN, BK, STAGES, GROUP)

        # The gate's slices come first, then as many of the up half.
        parts = column_slices(acc, ROWS, BN, SLICE)
        for i in gl.static_range(SLICES):
            column = tile % COLUMN_TILES * UNITS + i * SLICE
            gate = gl.convert_layout(parts[i], layout, assert_trivial=True)
            up = gl.convert_layout(parts[i + (HALVES - 1) * SLICES], layout, assert_trivial=True)
            if HAS_BIAS:
                columns = column + slice_columns
                bias = bias1 + expert.to(gl.int64) * (HALVES * N) + columns
                gate += gl.load(bias, mask=columns < N, other=0.0).to(gl.float32)[None, :]
                if HALVES == 2:
                    up += gl.load(bias + N, mask=columns < N, other=0.0).to(gl.float32)[None, :]
            activated, _ = value_and_slope(gate, ACTIVATION)
            if HALVES == 2:
                activated = activated * up
            stage = wait_full(full, step, STAGES)
            store_slice(
                gate, up, activated, rows_of_group(a_ring.index(stage), ROWS, GROUP),
                halves_of_group(b_ring.index(stage), HALVES, ROWS, SLICE, GROUPS, GROUP),
                h_boxes, a_boxes, h, a, first, size, column, N, HALVES, ROWS, SLICE, RAGGED,
            )  # fmt: skip
            # The stage before: a finished step of the contraction, or a slice whose two boxes this waits for.
            tma.store_wait(2)
            release_before(empty, step, STAGES)
            step += 1
    # Shared memory must outlive the stores that read it.
    tma.store_wait(0)


@gluon.jit
def up_projection_kernel(  # type: ignore[no-untyped-def]
    x,  # (T, D)
    w1,  # descriptor of (HALVES E, N, D), box (HALVES, BN / HALVES, BK)
    bias1,  # (E, HALVES N), not read without HAS_BIAS
    h_boxes,  # descriptor of h by `boxes_of_halves`, of a by `boxes_of_rows`; RAGGED or not
    a_boxes,
    h,  # (R, HALVES N)
    a,  # (R, N)
    gather,  # (R,)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    D: gl.constexpr,
    N: gl.constexpr,
    HALVES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    SLICE: gl.constexpr,
    STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
    GROUPS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr,
    STAGGER: gl.constexpr,
):
    dtype: gl.constexpr = x.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    a_ring = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], a_layout)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES, HALVES, BN // HALVES, BK], w1.layout)
    full, empty = make_barriers(STAGES, GROUPS)
    ring = (a_ring, b_ring, full, empty)
    row_tiles = (tile_expert, tile_row, expert_offsets, num_tiles)
    results = (bias1, h_boxes, a_boxes, h, a)
    # fmt: off
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    ring, row_tiles, results, D, N, HALVES, ACTIVATION, HAS_BIAS, BM, BN, BK, SLICE, STAGES, PROGRAMS,
                    RAGGED, STAGGER, GROUPS, 0,
                )),
                (_produce, (
                    ring, row_tiles, x, w1, gather, D, N, HALVES, BM, BN, BK, SLICE, STAGES, PROGRAMS,
                )),
            ],
            [PRODUCER_WARPS],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    ring, row_tiles, results, D, N, HALVES, ACTIVATION, HAS_BIAS, BM, BN, BK, SLICE, STAGES, PROGRAMS,
                    RAGGED, STAGGER, GROUPS, 0,
                )),
                (_consume, (
                    ring, row_tiles, results, D, N, HALVES, ACTIVATION, HAS_BIAS, BM, BN, BK, SLICE, STAGES, PROGRAMS,
                    RAGGED, STAGGER, GROUPS, 1,
                )),
                (_produce, (
                    ring, row_tiles, x, w1, gather, D, N, HALVES, BM, BN, BK, SLICE, STAGES, PROGRAMS,
                )),
            ],
            [gl.num_warps(), PRODUCER_WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on


def choose(n: int, halves: int = 2) -> Options:
    """The options for experts of width n: the widest tile that the halves fill, as many stages as fit."""
    units = min(256 // halves, max(64, triton.next_power_of_2(n)))
    return make_options(halves * units, halves=halves)


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
    halves = 2 if is_gated(activation) else 1
    experts, hidden, d = w1.shape
    n = hidden // halves
    check_dtype(x.dtype)
    tiles.check_width("d", d, x.dtype)
    tiles.check_width("n", n, x.dtype)
    tiles.check_shape("x", x, (x.shape[0], d), x.dtype, x.device)
    tiles.check_shape("w1", w1, (experts, halves * n, d), x.dtype, x.device)
    if bias1 is not None:
        tiles.check_shape("bias1", bias1, (experts, halves * n), bias1.dtype, x.device)
    rows = routing.rows
    h = torch.empty(rows, halves * n, dtype=x.dtype, device=x.device)
    a = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows == 0:
        return h, a
    options = options or choose(n, halves)
    tile = options.tile
    tiles.check_block_m(tile, routing.block_m)
    units = tile.block_n // halves
    grid, programs = tiles.programs(tile, routing.max_tiles * triton.cdiv(n, units), x.device)
    with torch.cuda.device_of(x):
        up_projection_kernel[(grid,)](
            tiles.dense(x),
            boxes(tiles.dense(w1), [halves * experts, n, d], [n * d, d, 1], [halves, units, tile.block_k]),
            x if bias1 is None else bias1.contiguous(),
            boxes_of_halves(h, halves, options, options.ragged),
            boxes_of_rows(a, options, options.ragged),
            h,
            a,
            routing.gather,
            *routing.row_tiles,
            D=d,
            N=n,
            HALVES=halves,
            ACTIVATION=activation,
            HAS_BIAS=bias1 is not None,
            BM=tile.block_m,
            BN=tile.block_n,
            BK=tile.block_k,
            SLICE=options.slice,
            STAGES=tile.stages,
            PROGRAMS=programs,
            GROUPS=options.groups,
            CONSUMER_REGISTERS=options.consumer_registers,
            PRODUCER_REGISTERS=options.producer_registers,
            RAGGED=options.ragged,
            STAGGER=options.stagger,
            num_warps=tile.warps // options.groups,
            maxnreg=options.registers,
        )
    return h, a
