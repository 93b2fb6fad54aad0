"""`hidden_gradient` for Hopper, warp-specialised: the same results as the plain twin beside this file.

Two partitions walk through one ring of stages (gluon_gathered.py):

- Producer (4 warps, few registers): gathered rows of dO by cp.async and boxes of W2 by TMA, then the slices of the
  tile's H. It runs a whole ring ahead, so that H and the next tile's first steps arrive while the consumer is busy.
- Consumer: multiplies, then works through the slices. dH overwrites the H that it was made from, A' stands beside it,
  and both leave by TMA while the next slice is computed.
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
    widen,
)
from implementations.sonicmoe_triton.metadata import Routing


@gluon.jit
def _produce(  # type: ignore[no-untyped-def]
    ring,
    row_tiles,
    grad_out,
    w2,
    h,
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
    GROUPS: gl.constexpr,
):
    a_ring, b_ring, full, empty = ring
    tile_expert, tile_row, expert_offsets, num_tiles = row_tiles
    COLUMN_TILES: gl.constexpr = (N + BN - 1) // BN
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * COLUMN_TILES, PROGRAMS):
        row_tile = tile // COLUMN_TILES
        column = tile % COLUMN_TILES * BN
        expert = gl.load(tile_expert + row_tile)
        first = gl.load(tile_row + row_tile)
        size = gl.load(expert_offsets + expert + 1) - first
        rows = gathered_rows(grad_out, gather, first, size, D, BM, BK)
        for k in range(0, D, BK):
            stage = wait_empty(empty, step, STAGES)
            barrier = full.index(stage)
            mbarrier.expect(barrier, w2.block_type.nbytes)
            tma.async_copy_global_to_shared(w2, [expert, k, column], barrier, b_ring.index(stage))
            copy_rows(a_ring.index(stage), rows, k, barrier, D, BK)
            step += 1
        for slice_column in range(column, column + BN, SLICE):
            stage = wait_empty(empty, step, STAGES)
            barrier = full.index(stage)
            mbarrier.expect(barrier, GROUPS * h.block_type.nbytes)
            # A tail tile's boxes read rows of the next expert: harmless, and nothing of them is stored.
            for group in gl.static_range(GROUPS):
                halves = halves_of_group(b_ring.index(stage), HALVES, BM // GROUPS, SLICE, GROUPS, group)
                row = first + group * (BM // GROUPS)
                tma.async_copy_global_to_shared(h, [0, row, slice_column], barrier, halves)
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
def _consume(  # type: ignore[no-untyped-def]
    ring,
    row_tiles,
    results,
    D: gl.constexpr,
    N: gl.constexpr,
    HALVES: gl.constexpr,
    ACTIVATION: gl.constexpr,
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
    row_scores, grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, partial_scores, R = results
    ROWS: gl.constexpr = BM // GROUPS
    COLUMN_TILES: gl.constexpr = (N + BN - 1) // BN
    dtype: gl.constexpr = grad_h.dtype.element_ty
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICE, 16])
    h_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SLICE], dtype)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    slice_columns = gl.arange(0, SLICE, gl.SliceLayout(0, layout))
    stagger(STAGGER)
    step = 0
    for tile in range(gl.program_id(0), gl.load(num_tiles) * COLUMN_TILES, PROGRAMS):
        row_tile = tile // COLUMN_TILES
        column_tile = tile % COLUMN_TILES
        expert = gl.load(tile_expert + row_tile)
        first = gl.load(tile_row + row_tile) + GROUP * ROWS
        size = gl.load(expert_offsets + expert + 1) - first
        inside = rows < size
        score = gl.load(row_scores + first + rows, mask=inside, other=0.0)

        acc, step = contract(a_ring, b_ring, full, empty, step, D, False, ROWS, BN, BK, STAGES, GROUP)

        ds = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, layout))
        grads = column_slices(acc, ROWS, BN, SLICE)
        for i in gl.static_range(BN // SLICE):
            column = column_tile * BN + i * SLICE
            grad = gl.convert_layout(grads[i], layout, assert_trivial=True)
            stage = wait_full(full, step, STAGES)
            box = halves_of_group(b_ring.index(stage), HALVES, ROWS, SLICE, GROUPS, GROUP)
            halves = box._reinterpret(dtype, [HALVES, ROWS, SLICE], h_layout)
            gate = widen(halves.index(0).load(layout))
            up = widen(halves.index(HALVES - 1).load(layout))
            grad_gate, grad_up, activated = _activation_backward(gate, up, grad * score[:, None], HALVES, ACTIVATION)
            product = grad * activated
            if N % BN:
                # An infinite dO times an overhanging column's zeros is NaN, which this row's sum must not see.
                product = gl.where((column + slice_columns < N)[None, :], product, 0.0)
            ds += gl.sum(product, 1)
            store_slice(
                grad_gate, grad_up, activated * score[:, None], rows_of_group(a_ring.index(stage), ROWS, GROUP), box,
                grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, first, size, column, N, HALVES, ROWS, SLICE, RAGGED,
            )  # fmt: skip
            # The stage before: a finished step of the contraction, or a slice whose two boxes this waits for.
            tma.store_wait(2)
            release_before(empty, step, STAGES)
            step += 1
        gl.store(partial_scores + column_tile.to(gl.int64) * R + first + rows, ds, mask=inside)
    # Shared memory must outlive the stores that read it.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["R"])
def hidden_gradient_kernel(  # type: ignore[no-untyped-def]
    grad_out,  # (T, D)
    w2,  # descriptor of (E, D, N), box (1, BK, BN)
    h,  # descriptor of (HALVES, R, N), box (HALVES, BM, SLICE)
    row_scores,  # (R,)
    grad_h_boxes,  # descriptor of grad_h by `boxes_of_halves`, of scaled_a by `boxes_of_rows`; RAGGED or not
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
    D: gl.constexpr,
    N: gl.constexpr,
    HALVES: gl.constexpr,
    ACTIVATION: gl.constexpr,
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
    dtype: gl.constexpr = grad_out.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], dtype)
    a_ring = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], a_layout)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, BK, BN], w2.layout)
    full, empty = make_barriers(STAGES, GROUPS)
    ring = (a_ring, b_ring, full, empty)
    row_tiles = (tile_expert, tile_row, expert_offsets, num_tiles)
    results = (row_scores, grad_h_boxes, scaled_a_boxes, grad_h, scaled_a, partial_scores, R)
    # fmt: off
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    ring, row_tiles, results, D, N, HALVES, ACTIVATION, BM, BN, BK, SLICE, STAGES, PROGRAMS,
                    RAGGED, STAGGER, GROUPS, 0,
                )),
                (_produce, (
                    ring, row_tiles, grad_out, w2, h, gather, D, N, HALVES, BM, BN, BK, SLICE, STAGES, PROGRAMS, GROUPS,
                )),
            ],
            [PRODUCER_WARPS],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    ring, row_tiles, results, D, N, HALVES, ACTIVATION, BM, BN, BK, SLICE, STAGES, PROGRAMS,
                    RAGGED, STAGGER, GROUPS, 0,
                )),
                (_consume, (
                    ring, row_tiles, results, D, N, HALVES, ACTIVATION, BM, BN, BK, SLICE, STAGES, PROGRAMS,
                    RAGGED, STAGGER, GROUPS, 1,
                )),
                (_produce, (
                    ring, row_tiles, grad_out, w2, h, gather, D, N, HALVES, BM, BN, BK, SLICE, STAGES, PROGRAMS, GROUPS,
                )),
            ],
            [gl.num_warps(), PRODUCER_WARPS],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    # fmt: on


def choose(n: int, halves: int = 2) -> Options:
    """The options for experts of width n: the widest tile that n fills, as many stages as fit."""
    return make_options(min(256, max(64, triton.next_power_of_2(n))), halves=halves)


def hidden_gradient(
    grad_out: Tensor,
    w2: Tensor,
    h: Tensor,
    row_scores: Tensor,
    routing: Routing,
    activation: str,
    options: Options | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_h like h, scaled_a (R, n), grad_row_scores (R,) float32).

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
        return grad_h, scaled_a, torch.empty(0, dtype=torch.float32, device=device)
    options = options or choose(n, halves)
    tile = options.tile
    tiles.check_block_m(tile, routing.block_m)
    column_tiles = triton.cdiv(n, tile.block_n)
    partial_scores = torch.empty(column_tiles, rows, dtype=torch.float32, device=device)
    grid, programs = tiles.programs(tile, routing.max_tiles * column_tiles, device)
    with torch.cuda.device_of(grad_out):
        hidden_gradient_kernel[(grid,)](
            tiles.dense(grad_out),
            boxes(tiles.dense(w2), [experts, d, n], [d * n, n, 1], [1, tile.block_k, tile.block_n]),
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
            D=d,
            N=n,
            HALVES=halves,
            ACTIVATION=activation,
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
    return grad_h, scaled_a, partial_scores[0] if column_tiles == 1 else partial_scores.sum(0)
