"""`_ablation_kernels.gathered_gemm` for Hopper: the layer's warp-specialised up-projection and dH without epilogues.

Ring, producer's loads and contraction are those of `sonicmoe_triton.gluon_gathered`; the consumers store their tile as
it is, slice by slice through the ring's stages. What is left out is the activation and A, in dH also H's way in.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.gluon_common import (
    CONSUMER_WARPS,
    ENTRY_REGISTERS,
    FAR,
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
    contract,
    copy_rows,
    gathered_rows,
    halves_of_group,
    locate,
    make_options,
    make_plan,
    make_ring,
)
from implementations.sonicmoe_triton.launching import Launcher, cdiv
from implementations.sonicmoe_triton.metadata import Routing


@gluon.jit
def _produce(ring, row_tiles, num_tiles, operands, TRANSPOSED: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty = ring
    x, w, gather = operands
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * P.column_tiles, P.stride):
        expert, first, size, column_tile = locate(tile, row_tiles, 0, P)
        column = column_tile * P.columns
        rows = gathered_rows(x, gather, first, size, P)
        for k in range(0, P.d, P.block_k):
            stage = step % P.stages
            wait_empty(empty, step)
            barrier = full.index(stage)
            mbarrier.expect(barrier, w.block_type.nbytes)
            corner = [expert * P.halves, column, k] if TRANSPOSED else [expert, k, column]
            tma.async_copy_global_to_shared(w, corner, barrier, b_ring.index(stage))
            copy_rows(a_ring.index(stage), rows, k, barrier, P)
            step += 1
        # Stages for the slices of the result, with nothing in them.
        for _ in range(P.slices):
            wait_empty(empty, step)
            barrier = full.index(step % P.stages)
            mbarrier.arrive(barrier, count=1)
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            step += 1


@gluon.jit
def _store_halves(left, right, b_halves, boxes, out, first, size, column, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """`gluon_gathered.store_slice` for the matrix of halves alone: left and right (ROWS, SLICE) are columns of the
    halves of out (R, HALVES N); `right` is not stored without a second half."""
    N: gl.constexpr = P.n
    HALVES: gl.constexpr = P.halves
    SLICE: gl.constexpr = P.slice
    dtype: gl.constexpr = out.dtype.element_ty
    left = left.to(dtype)
    right = right.to(dtype)
    if P.ragged or size >= ROWS:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SLICE], dtype)
        halves = b_halves._reinterpret(dtype, [HALVES, ROWS, SLICE], layout)
        halves.index(0).store(left)
        if HALVES == 2:
            halves.index(1).store(right)
        fence_async_shared()
        box = b_halves._reinterpret(dtype, boxes.block_type.shape, boxes.layout)
        if P.ragged:
            tma.async_copy_shared_to_global(boxes, [FAR, first + size, 0, FAR - size, column], box)
        else:
            tma.async_copy_shared_to_global(boxes, [0, first, column], box)
    else:
        # What was read here by ordinary loads may be overwritten by TMA next.
        fence_async_shared()
        row = gl.arange(0, ROWS, gl.SliceLayout(1, left.type.layout))
        columns = column + gl.arange(0, SLICE, gl.SliceLayout(0, left.type.layout))
        mask = (row < size)[:, None] & (columns < N)[None, :]
        tile = out + first.to(gl.int64) * (HALVES * N)
        offsets = row[:, None] * (HALVES * N) + columns[None, :]
        gl.store(tile + offsets, left, mask=mask)
        if HALVES == 2:
            gl.store(tile + N + offsets, right, mask=mask)


@gluon.jit
def _consume(  # type: ignore[no-untyped-def]
    ring, row_tiles, num_tiles, results, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, P: gl.constexpr
):
    b_ring, full, empty = ring[1], ring[2], ring[3]
    boxes, out = results
    HALVES: gl.constexpr = P.halves
    SLICE: gl.constexpr = P.slice
    SLICES: gl.constexpr = P.slices
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICE, 16])
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * P.column_tiles, P.stride):
        _, first, size, column_tile = locate(tile, row_tiles, GROUP * ROWS, P)
        acc, step = contract(ring, step, TRANSPOSED, GROUP, P)

        # The first half's slices come first, then as many of the second.
        parts = column_slices(acc, SLICE)
        for i in gl.static_range(SLICES):
            column = column_tile * P.columns + i * SLICE
            left = gl.convert_layout(parts[i], layout, assert_trivial=True)
            right = gl.convert_layout(parts[i + (HALVES - 1) * SLICES], layout, assert_trivial=True)
            stage = step % P.stages
            wait_full(full, step)
            halves = halves_of_group(b_ring.index(stage), GROUP, P)
            _store_halves(left, right, halves, boxes, out, first, size, column, P)
            # The stage before: a finished step of the contraction, or a slice whose box this waits for.
            tma.store_wait(1)
            release_before(empty, step, step > 0)
            step += 1
    tma.store_wait(0)


def _name(specialization: Any) -> str:
    """Of a compiled kernel: profilers tell the two GEMMs apart by it."""
    gemm = "up_projection" if specialization.constants["TRANSPOSED"] else "hidden_gradient"
    return f"gluon_ablation_{gemm}_kernel"


@gluon.jit(repr=_name)
def gathered_gemm_kernel(  # type: ignore[no-untyped-def]
    x,  # (T, D)
    w,  # descriptor of (HALVES E, N, D), box (HALVES, BN / HALVES, BK), if TRANSPOSED, else of (E, D, N), (1, BK, BN)
    boxes,  # descriptor of out by `boxes_of_halves`; ragged or not
    out,  # (R, HALVES N)
    gather,  # (R,)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    TRANSPOSED: gl.constexpr,
    P: gl.constexpr,
):
    ring = make_ring(w, P)
    row_tiles = (tile_expert, tile_row, expert_offsets)
    operands = (x, w, gather)
    results = (boxes, out)
    gl.warp_specialize(
        [
            (_consume, (ring, row_tiles, num_tiles, results, TRANSPOSED, 0, P)),
            (_consume, (ring, row_tiles, num_tiles, results, TRANSPOSED, 1, P)),
            (_produce, (ring, row_tiles, num_tiles, operands, TRANSPOSED, P)),
        ],
        [gl.num_warps(), PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@functools.cache
def like(options: Options, halves: int) -> Options:
    """The options of the fused kernel with the slices that this one's result has."""
    tile = options.tile
    return make_options(tile.block_n, options.ragged, halves, tile.block_k, tile.stages, options.by_expert)


def plan_of(d: int, n: int, transposed: bool, stride: int, options: Options) -> Plan:
    """The plan for a result of ``n`` columns, of which a transposed W's two halves have half each; ``options`` as
    `like` gives them."""
    halves = 2 if transposed else 1
    # No activation is looked at.
    return make_plan(d, n // halves, "", halves, options.tile.block_n // halves, stride, options)


def gathered_gemm(x: Tensor, w: Tensor, routing: Routing, transposed: bool, options: Options) -> Tensor:
    """As the twin in `_ablation_kernels`; a transposed w's rows come in two halves, which share a tile.

    Raises:
        ValueError: float32, or the routing was not made for tiles of 128 rows.
    """
    check_dtype(x.dtype)
    experts = w.shape[0]
    n, d = w.shape[1:] if transposed else (w.shape[2], w.shape[1])
    out = x.new_empty(routing.rows, n)
    if routing.rows == 0:
        return out
    halves = 2 if transposed else 1
    options = like(options, halves)
    tile = options.tile
    tiles.check_block_m(tile, routing.block_m)
    each, columns = n // halves, tile.block_n // halves
    grid, stride = tiles.programs(routing.max_tiles * cdiv(each, columns), x.device)
    w = tiles.dense(w)
    if transposed:
        boxes = descriptor(w, (halves * experts, each, d), (each * d, d, 1), (halves, columns, tile.block_k))
    else:
        boxes = descriptor(w, (experts, d, n), (d * n, n, 1), (1, tile.block_k, tile.block_n))
    _launcher(transposed, plan_of(d, n, transposed, stride, options))(
        (grid,),
        (
            tiles.dense(x),
            boxes,
            boxes_of_halves(out, halves, options, options.ragged),
            out,
            routing.gather,
            *routing.row_tiles,
        ),
    )
    return out


@functools.cache
def _launcher(transposed: bool, plan: Plan) -> Launcher:
    constants = {"TRANSPOSED": transposed, "P": plan}
    return Launcher(gathered_gemm_kernel, constants, num_warps=CONSUMER_WARPS, maxnreg=ENTRY_REGISTERS)
