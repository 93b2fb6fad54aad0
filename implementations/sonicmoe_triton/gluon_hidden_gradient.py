"""`hidden_gradient` for Hopper, warp-specialised: the same results as the plain twin beside this file.

Three partitions walk through one ring of stages (gluon_common.py, gluon_gathered.py):

- Producer (4 warps, few registers): gathered rows of dO by cp.async and boxes of W2 by TMA, then the slices of the
  tile's H. It runs a whole ring ahead, so that H and the next tile's first steps arrive while the consumers are busy.
- Two consumers (4 warps each), one for each half of a tile's rows: multiply, then work through the slices. dH
  overwrites the H that it was made from, A' stands beside it, and both leave by TMA while the next slice is computed.

With `Options.ping_pong` the consumers take whole tiles in turn instead (gluon_gathered_ping_pong.py), and fetch their
slices of H themselves: the first while they wait for their turn.
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
from implementations.sonicmoe_triton.activations import is_gated
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
from implementations.sonicmoe_triton.gluon_gathered_ping_pong import (
    contract_in_turn,
    make_barriers,
    make_staging,
    produce_in_turn,
    row_halves,
)
from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2
from implementations.sonicmoe_triton.metadata import Routing


@gluon.jit
def _produce(ring, row_tiles, num_tiles, operands, P: gl.constexpr):  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty = ring
    grad_out, w2, h, gather = operands
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * P.column_tiles, P.stride):
        expert, first, size = locate(tile, row_tiles, 0, P)
        column = tile % P.column_tiles * P.columns
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
def _results_of_slice(parts, i: gl.constexpr, box, score, column, slice_columns, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """(grad_gate, grad_up, activated, summands of dS) of a tile's slice number i, whose H lies in the box."""
    HALVES: gl.constexpr = P.halves
    ACTIVATION: gl.constexpr = P.activation
    SLICE: gl.constexpr = P.slice
    layout: gl.constexpr = slice_columns.type.layout.parent
    h_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SLICE], box.dtype)
    grad = gl.convert_layout(parts[i], layout, assert_trivial=True)
    halves = box._reinterpret(box.dtype, [HALVES, ROWS, SLICE], h_layout)
    gate = widen(halves.index(0).load(layout))
    up = widen(halves.index(HALVES - 1).load(layout))
    grad_gate, grad_up, activated = _activation_backward(gate, up, grad * score[:, None], HALVES, ACTIVATION)
    product = grad * activated
    if P.n % P.columns:
        # An infinite dO times an overhanging column's zeros is NaN, which this row's sum must not see.
        product = gl.where((column + slice_columns < P.n)[None, :], product, 0.0)
    return grad_gate, grad_up, activated, product


@gluon.jit
def _consume(ring, row_tiles, num_tiles, results, GROUP: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    a_ring, b_ring, full, empty = ring
    row_scores, grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, partial_scores, R = results
    SLICE: gl.constexpr = P.slice
    SLICES: gl.constexpr = P.slices
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICE, 16])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    slice_columns = gl.arange(0, SLICE, gl.SliceLayout(0, layout))
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * P.column_tiles, P.stride):
        column_tile = tile % P.column_tiles
        _, first, size = locate(tile, row_tiles, GROUP * ROWS, P)
        inside = rows < size
        score = gl.load(row_scores + first + rows, mask=inside, other=0.0)

        acc, step = contract(ring, step, False, GROUP, P)

        ds = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, layout))
        grads = column_slices(acc, SLICE)
        for i in gl.static_range(SLICES):
            column = column_tile * P.columns + i * SLICE
            stage = step % P.stages
            wait_full(full, step)
            box = halves_of_group(b_ring.index(stage), GROUP, P)
            grad_gate, grad_up, activated, product = _results_of_slice(grads, i, box, score, column, slice_columns, P)
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


@gluon.jit
def _fetch_piece(h, wide, arrived, GROUP: gl.constexpr, piece: gl.constexpr, first, column, P: gl.constexpr):  # type: ignore[no-untyped-def]
    # H for one of a tile's pieces, into its free buffer. A tail tile's boxes read rows of the next expert: harmless, as
    # above.
    BUFFERS: gl.constexpr = P.buffers
    SLICES: gl.constexpr = P.slices
    buffer = GROUP * BUFFERS + piece % BUFFERS
    barrier = arrived.index(buffer)
    mbarrier.expect(barrier, h.block_type.nbytes)
    corner = [0, first + piece // SLICES * ROWS, column + piece % SLICES * P.slice]
    tma.async_copy_global_to_shared(h, corner, barrier, wide.index(buffer))


@gluon.jit
def _scores(row_scores, first, size, rows):  # type: ignore[no-untyped-def]
    return gl.load(row_scores + first + rows, mask=rows < size, other=0.0)


@gluon.jit
def _consume_in_turn(  # type: ignore[no-untyped-def]
    h, ring, turns, arrived, staging, row_tiles, num_tiles, results, GROUP: gl.constexpr, P: gl.constexpr
):
    # Every second of the program's tiles.
    wide, narrow = staging
    row_scores, grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, partial_scores, R = results
    SLICE: gl.constexpr = P.slice
    SLICES: gl.constexpr = P.slices
    BUFFERS: gl.constexpr = P.buffers
    PIECES: gl.constexpr = P.pieces
    LAG: gl.constexpr = P.lag
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICE, 16])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    slice_columns = gl.arange(0, SLICE, gl.SliceLayout(0, layout))
    STRIDE: gl.constexpr = GROUPS * P.stride
    start = gl.program_id(0) + GROUP * P.stride
    for tile in range(start, gl.load(num_tiles) * P.column_tiles, STRIDE):
        turn = (tile - start) // STRIDE
        column_tile = tile % P.column_tiles
        tile_column = column_tile * P.columns
        _, first, size = locate(tile, row_tiles, 0, P)
        tma.store_wait(0)
        for piece in gl.static_range(BUFFERS):
            _fetch_piece(h, wide, arrived, GROUP, piece, first, tile_column, P)
        scores = (
            _scores(row_scores, first, size, rows),
            _scores(row_scores, first + ROWS, size - ROWS, rows),
        )

        halves = row_halves(contract_in_turn(ring, turns, turn, False, GROUP, P))

        for half in gl.static_range(2):
            score = scores[half]
            half_first = first + half * ROWS
            half_size = size - half * ROWS
            ds = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, layout))
            grads = column_slices(halves[half], SLICE)
            for i in gl.static_range(SLICES):
                column = tile_column + i * SLICE
                piece = half * SLICES + i
                buffer = GROUP * BUFFERS + piece % BUFFERS
                mbarrier.wait(arrived.index(buffer), (turn * (PIECES // BUFFERS) + piece // BUFFERS) & 1)
                box = wide.index(buffer)
                grad_gate, grad_up, activated, product = _results_of_slice(
                    grads, i, box, score, column, slice_columns, P
                )
                ds += gl.sum(product, 1)
                store_slice(
                    grad_gate, grad_up, activated * score[:, None], narrow.index(buffer), box,
                    grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, half_first, half_size, column, P,
                )  # fmt: skip
                if piece >= LAG and piece - LAG + BUFFERS < PIECES:
                    # The boxes of every piece have been read, or of all but this one.
                    tma.store_wait(2 * LAG)
                    _fetch_piece(h, wide, arrived, GROUP, piece - LAG + BUFFERS, first, tile_column, P)
            partial = partial_scores + column_tile.to(gl.int64) * R + half_first
            gl.store(partial + rows, ds, mask=rows < half_size)
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
    row_tiles = (tile_expert, tile_row, expert_offsets)
    results = (row_scores, grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, partial_scores, R)
    if P.ping_pong:
        staging = make_staging(w2.dtype, P)
        turns = make_barriers(GROUPS)
        arrived = make_barriers(GROUPS * P.buffers)
        ring = make_ring(w2, P)
        gl.warp_specialize(
            [
                (_consume_in_turn, (h, ring, turns, arrived, staging, row_tiles, num_tiles, results, 0, P)),
                (_consume_in_turn, (h, ring, turns, arrived, staging, row_tiles, num_tiles, results, 1, P)),
                (produce_in_turn, (ring, row_tiles, num_tiles, (grad_out, w2, gather), False, P)),
            ],
            [gl.num_warps(), PRODUCER_WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        ring = make_ring(w2, P)
        operands = (grad_out, w2, h, gather)
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
def choose(n: int, halves: int = 2) -> Options:
    """The options for experts of width n: the widest tile that n fills, as many stages as fit."""
    return make_options(min(256, max(64, next_power_of_2(n))), ragged=True, halves=halves)


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
    halves = 2 if is_gated(activation) else 1
    experts, d, n = w2.shape
    rows = routing.rows
    dtype, device = grad_out.dtype, grad_out.device
    check_dtype(dtype)
    tiles.check_width("d", d, dtype)
    tiles.check_width("n", n, dtype)
    tiles.check_shape("grad_out", grad_out, (grad_out.shape[0], d), dtype, device)
    tiles.check_shape("w2", w2, (experts, d, n), dtype, device)
    tiles.check_shape("h", h, (rows, halves * n), dtype, device)
    tiles.check_shape("row_scores", row_scores, (rows,), torch.float32, device)
    grad_h = torch.empty(rows, halves * n, dtype=dtype, device=device)
    scaled_a = torch.empty(rows, n, dtype=dtype, device=device)
    if rows == 0:
        return grad_h, scaled_a, torch.empty(1, 0, dtype=torch.float32, device=device)
    options = options or choose(n, halves)
    tile = options.tile
    tiles.check_block_m(tile, routing.block_m)
    column_tiles = cdiv(n, tile.block_n)
    partial_scores = torch.empty(column_tiles, rows, dtype=torch.float32, device=device)
    grid, stride = tiles.programs(tile, routing.max_tiles * column_tiles, device)
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
