"""`hidden_gradient` for Hopper, warp-specialised: the same results as the plain twin beside this file.

Three partitions walk through one ring of stages (gluon_common.py, gluon_gathered.py):

- Producer (4 warps, few registers): gathered rows of dO by cp.async and boxes of W2 by TMA, then the slices of the
  tile's H. It runs a whole ring ahead, so that H and the next tile's first steps arrive while the consumers are busy.
- Two consumers (4 warps each), one for each half of a tile's rows: multiply, then work through the slices. dH
  overwrites the H that it was made from, A' stands beside it, and both leave by TMA while the next slice is computed.
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
    GROUPS,
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
    widen,
)
from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import check_hidden_gradient


@gluon.jit
def _produce(ring, row_tiles, num_tiles, operands, P: gl.constexpr):  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty = ring
    grad_out, w2, h, gather = operands
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * P.column_tiles, P.stride):
        expert, first, size, column_tile = locate(tile, row_tiles, 0, P)
        column = column_tile * P.columns
        rows = gathered_rows(grad_out, gather, first, size, P)
        for k in range(0, P.d, P.block_k):
            stage = step % P.stages
            wait_empty(empty, step)
            barrier = full.index(stage)
            mbarrier.expect(barrier, w2.block_type.nbytes)
            tma.async_copy_global_to_shared(w2, [expert, k, column], barrier, b_ring.index(stage))
            copy_rows(a_ring.index(stage), rows, k, barrier, P)
            step += 1
        for slice_column in range(column, column + P.columns, P.slice):
            stage = step % P.stages
            wait_empty(empty, step)
            barrier = full.index(stage)
            mbarrier.expect(barrier, GROUPS * h.block_type.nbytes)
            # A tail tile's boxes read rows of the next expert: harmless, and nothing of them is stored.
            for group in gl.static_range(GROUPS):
                halves = halves_of_group(b_ring.index(stage), group, P)
                tma.async_copy_global_to_shared(h, [0, first + group * ROWS, slice_column], barrier, halves)
            # No rows to copy in this step, but `full` counts every thread.
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            step += 1


@gluon.jit
def _activation_backward(gate, up, grad, HALVES: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """(grad_gate, grad_up, activated) for `grad`, the gradient of A; grad_up is not used without an up half."""
    value, slope = value_and_slope(gate, ACTIVATION)
    if HALVES == 2:
        return grad * up * slope, grad * value, value * up
    else:
        return grad * slope, grad, value


@gluon.jit
def _consume(ring, row_tiles, num_tiles, results, GROUP: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty = ring
    row_scores, grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, partial_scores, R = results
    HALVES: gl.constexpr = P.halves
    ACTIVATION: gl.constexpr = P.activation
    SLICE: gl.constexpr = P.slice
    SLICES: gl.constexpr = P.slices
    dtype: gl.constexpr = grad_h.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICE, 16])
    h_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SLICE], dtype)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    slice_columns = gl.arange(0, SLICE, gl.SliceLayout(0, layout))
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * P.column_tiles, P.stride):
        _, first, size, column_tile = locate(tile, row_tiles, GROUP * ROWS, P)
        inside = rows < size
        score = gl.load(row_scores + first + rows, mask=inside, other=0.0)

        acc, step = contract(ring, step, False, GROUP, P)

        ds = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, layout))
        grads = column_slices(acc, SLICE)
        for i in gl.static_range(SLICES):
            column = column_tile * P.columns + i * SLICE
            grad = gl.convert_layout(grads[i], layout, assert_trivial=True)
            stage = step % P.stages
            wait_full(full, step)
            box = halves_of_group(b_ring.index(stage), GROUP, P)
            halves = box._reinterpret(dtype, [HALVES, ROWS, SLICE], h_layout)
            gate = widen(halves.index(0).load(layout))
            up = widen(halves.index(HALVES - 1).load(layout))
            grad_gate, grad_up, activated = _activation_backward(gate, up, grad * score[:, None], HALVES, ACTIVATION)
            product = grad * activated
            if P.n % P.columns:
                # An infinite dO times an overhanging column's zeros is NaN, which this row's sum must not see.
                product = gl.where((column + slice_columns < P.n)[None, :], product, 0.0)
            ds += gl.sum(product, 1)
            store_slice(
                grad_gate, grad_up, activated * score[:, None], rows_of_group(a_ring.index(stage), GROUP), box,
                grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, first, size, column, P,
            )  # fmt: skip
            # The stage before: a finished step of the contraction, or a slice whose two boxes this waits for.
            tma.store_wait(2)
            release_before(empty, step, step > 0)
            step += 1
        gl.store(partial_scores + column_tile.to(gl.int64) * R + first + rows, ds, mask=inside)
    tma.store_wait(0)


def _name(_: Any) -> str:
    """Of a compiled kernel: profilers tell it from its twin by it."""
    return "gluon_hidden_gradient_kernel"


@gluon.jit(repr=_name, do_not_specialize=["R"])
def hidden_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_out,  # (T, D)
    w2,  # descriptor of (E, D, N), box (1, BK, BN)
    h,  # descriptor of (R, HALVES N) by `boxes_of_halves`
    row_scores,  # (R,)
    grad_h_boxes,  # descriptor of grad_h by `boxes_of_halves`, of scaled_a by `boxes_of_rows`; ragged or not
    scaled_a_boxes,
    grad_h,  # (R, HALVES N)
    scaled_a,  # (R, N)
    partial_scores,  # (column tiles, R)
    gather,  # (R,)
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    R,
    P: gl.constexpr,
):
    ring = make_ring(w2, P)
    row_tiles = (tile_expert, tile_row, expert_offsets)
    operands = (grad_out, w2, h, gather)
    results = (row_scores, grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, partial_scores, R)
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
    """The options for experts of width n: the widest tile that n fills, as many stages as fit; see `by_expert`."""
    block_n = min(256, max(64, next_power_of_2(n)))
    return make_options(block_n, ragged=True, halves=halves, by_expert=ordered_by_expert)


def hidden_gradient(
    grad_out: Tensor,
    w2: Tensor,
    h: Tensor,
    row_scores: Tensor,
    routing: Routing,
    activation: str,
    options: Options | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_h like h, scaled_a (R, n), partial_scores (C, R) float32, whose sum over the C column tiles is dS).

    Args:
        grad_out: (T, d), the gradient of the layer's output, float16 or bfloat16.
        w2: (E, d, n). h: (R, 2n), halves gate | up ((R, n) for an ungated activation). Both of grad_out's dtype.
        row_scores: (R,) float32, the score of each row.

    Raises:
        ValueError: unknown activation; d or n is no multiple of 16 bytes; a tensor's shape, dtype or device does not
            fit the others; float32; the routing was not made for tiles of 128 rows.
    """
    check_dtype(grad_out.dtype)
    halves, experts, d, n = check_hidden_gradient(grad_out, w2, h, row_scores, routing, activation)
    rows, dtype, device = routing.rows, grad_out.dtype, grad_out.device
    grad_h = torch.empty(rows, halves * n, dtype=dtype, device=device)
    scaled_a = torch.empty(rows, n, dtype=dtype, device=device)
    if rows == 0:
        return grad_h, scaled_a, torch.empty(1, 0, dtype=torch.float32, device=device)
    options = options or choose(n, halves, by_expert(n, d, rows // experts))
    tile = options.tile
    tiles.check_block_m(tile, routing.block_m)
    column_tiles = cdiv(n, tile.block_n)
    partial_scores = torch.empty(column_tiles, rows, dtype=torch.float32, device=device)
    grid, stride = tiles.programs(routing.max_tiles * column_tiles, device)
    _launcher(make_plan(d, n, activation, halves, tile.block_n, stride, options))(
        (grid,),
        (
            tiles.dense(grad_out),
            descriptor(tiles.dense(w2), (experts, d, n), (d * n, n, 1), (1, tile.block_k, tile.block_n)),
            boxes_of_halves(tiles.dense(h), halves, options),
            row_scores.contiguous(),
            boxes_of_halves(grad_h, halves, options, options.ragged),
            boxes_of_rows(scaled_a, options, options.ragged),
            grad_h,
            scaled_a,
            partial_scores,
            routing.gather,
            *routing.row_tiles,
            rows,
        ),
    )
    return grad_h, scaled_a, partial_scores


@functools.cache
def _launcher(plan: Plan) -> Launcher:
    return Launcher(hidden_gradient_kernel, {"P": plan}, num_warps=CONSUMER_WARPS, maxnreg=ENTRY_REGISTERS)
