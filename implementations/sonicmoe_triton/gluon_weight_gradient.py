"""The weight gradients for Hopper in Gluon: one persistent warp-specialised kernel for both, beside weight_gradient.py.

With the rows r of expert e and their tokens t = gather[r]:

    dW1[e] = sum_r dH[r]^T x[t]             (2n, d)
    dW2[e] = sum_r dO[t]^T A'[r]            (d, n)       A' = s A: the score is in it already

Both are a product of a *gathered* operand (rows by index, cp.async of 16 bytes) and a *dense* one (rows of an expert,
TMA). Either may be the row side of the tensor cores' tile; dW1 with the gathered side as rows is computed transposed
and turned on its way to memory.

A producer of four warps fills a ring of STAGES steps of BK rows (gluon_common.py) and runs ahead into the next tile.
Two consumers with half of the tile's rows each multiply with one wgmma in flight and store through shared memory;
either may run ahead of the other, one storing while the other multiplies. `full` counts every producer thread's
cp.async and one arrival for the TMA box; `empty` counts the consumers.

An expert's last step is shorter than BK: rows past its end belong to the next expert and may hold NaN, so both sides
bring zeros instead, cp.async by its mask and TMA by a ragged descriptor, which ends where the expert does. Every tile
of every expert is stored (exact zeros without rows), one program adds up a whole tile: no atomics, the result is
deterministic.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.gluon_common import (
    CONSUMER_WARPS,
    ENTRY_REGISTERS,
    FAR,
    GROUPS,
    check_dtype,
    column_slices,
    descriptor,
    publish_barriers,
    ragged,
    release_before,
    wait_empty,
    wait_full,
)
from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import check_down_weight_gradient, check_up_weight_gradient

#: Warps of the producer.
PRODUCER_WARPS = gl.constexpr(4)


@dataclass(frozen=True)
class Options:
    """How a weight gradient is cut up.

    Attributes:
        gathered, dense: the tile's extent along the gathered and along the dense operand's width.
        block_k: rows of one step of the contraction.
        stages: steps in flight at once.
        gathered_rows: the gathered operand is the row side of the tensor cores' tile (else the column side). A
            warpgroup reads 64 rows and all columns for an instruction, so the wide side belongs on the columns.
        slice_columns, buffers: columns of the tile that a consumer stores at once; how many such slices may be on their
            way to memory.
        producer_registers: for a thread of the producer; the consumers share what is left.
    """

    gathered: int = 128
    dense: int = 256
    block_k: int = 64
    stages: int = 4
    gathered_rows: bool = True
    slice_columns: int = 128
    buffers: int = 1
    producer_registers: int = 56

    def __post_init__(self) -> None:
        rows, columns = self.sides
        if rows % (64 * GROUPS.value) or columns > 256:
            raise ValueError(f"{GROUPS.value} consumers cannot share {rows} rows (in parts of 64) of {columns} columns")

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the tile."""
        return (self.gathered, self.dense) if self.gathered_rows else (self.dense, self.gathered)


class Plan(NamedTuple):
    """Everything that the kernel is compiled for, besides its operands' types. (A tuple, not a dataclass: Triton writes
    constants out as JSON for whoever listens to its compilations.)

    Attributes:
        experts: number of experts.
        gathered_width, dense_width: widths of the operands.
        rows, columns: of a tile.
        gathered_rows, block_k, stages, buffers, producer_registers: see `Options`.
        transposed: the tile's rows are the gradient's columns.
        slice: columns of the tile that a consumer stores at once.
        consumer_registers: of a consumer's thread.
        stride: programs of a launch: program i works through the tiles i, i + stride, …
    """

    experts: int
    gathered_width: int
    dense_width: int
    rows: int
    columns: int
    gathered_rows: bool
    transposed: bool
    block_k: int
    stages: int
    slice: int
    buffers: int
    consumer_registers: int
    producer_registers: int
    stride: int

    @property
    def row_tiles(self) -> int:
        return cdiv(self.gathered_width if self.gathered_rows else self.dense_width, self.rows)

    @property
    def column_tiles(self) -> int:
        return cdiv(self.dense_width if self.gathered_rows else self.gathered_width, self.columns)

    @property
    def gathered_ends_within_tile(self) -> bool:
        """The last tile reaches past the gathered operand's width, be it by whole parts of the tile."""
        return self.gathered_width % (self.rows if self.gathered_rows else self.columns) != 0

    @property
    def dense_tiles(self) -> int:
        """Tiles along the dense operand's width, those that follow one another."""
        return self.column_tiles if self.gathered_rows else self.row_tiles

    @property
    def expert_tiles(self) -> int:
        return self.row_tiles * self.column_tiles

    @property
    def tiles(self) -> int:
        return self.experts * self.expert_tiles


@gluon.jit
def _rows_of(tile, expert_offsets, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, its first row, one past its last) of a tile; an expert's tiles are neighbours. No rows past the last."""
    inside = tile < P.tiles
    expert = tile // P.expert_tiles
    first = gl.load(expert_offsets + expert, mask=inside, other=0)
    end = gl.load(expert_offsets + expert + 1, mask=inside, other=0)
    return expert, first, end


@gluon.jit
def _copy_rows(source, row, inside, column, P: gl.constexpr, layout: gl.constexpr, target):  # type: ignore[no-untyped-def]
    """target (BK, columns) := source[row, column:]; zeros where a row is not inside and past the width."""
    WIDTH: gl.constexpr = P.gathered_width
    COLUMNS: gl.constexpr = target.shape[1]
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    pointers = (source + row.to(gl.int64) * WIDTH)[:, None] + columns[None, :]
    mask = inside[:, None]
    if P.gathered_ends_within_tile:
        mask = mask & (columns < WIDTH)[None, :]
    async_copy.async_copy_global_to_shared(target, pointers, mask)


@gluon.jit
def _produce(ring, operands, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """Fills the ring with the steps of all tiles of this program."""
    gathered_ring, dense_ring, full, empty = ring
    gathered, dense, gather, expert_offsets = operands
    BK: gl.constexpr = P.block_k
    # The row side of a stage lies there in one part for each consumer.
    GATHERED_PARTS: gl.constexpr = gathered_ring.shape[0] // P.stages
    DENSE_PARTS: gl.constexpr = dense_ring.shape[0] // P.stages
    GATHERED: gl.constexpr = gathered_ring.shape[2]
    DENSE: gl.constexpr = dense_ring.shape[2]
    # 16 bytes for a thread, up to 256 neighbouring ones of a row for a warp.
    ACROSS: gl.constexpr = min(GATHERED // 8, 16)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [PRODUCER_WARPS, 1], [1, 0])
    rows = gl.arange(0, BK, gl.SliceLayout(1, by_row))

    # Row bounds are asked for a tile, tokens a step before they are needed.
    _, first, end = _rows_of(gl.program_id(0), expert_offsets, P)
    step = 0
    for tile in range(gl.program_id(0), P.tiles, P.stride):
        _, next_first, next_end = _rows_of(tile + P.stride, expert_offsets, P)
        gathered_column = tile % P.expert_tiles // P.dense_tiles * (GATHERED * GATHERED_PARTS)
        dense_column = tile % P.dense_tiles * (DENSE * DENSE_PARTS)
        token = gl.load(gather + first + rows, mask=first + rows < end, other=0)
        for row in range(first, end, BK):
            stage = step % P.stages
            next_token = gl.load(gather + row + BK + rows, mask=row + BK + rows < end, other=0)
            wait_empty(empty, step)
            barrier = full.index(stage)
            # Bytes of the whole box: zeros past the expert's end and past the width count too.
            mbarrier.expect(barrier, DENSE_PARTS * dense.block_type.nbytes)
            for part in gl.static_range(DENSE_PARTS):
                tma.async_copy_global_to_shared(
                    dense,
                    [FAR, end, FAR - end + row, dense_column + part * DENSE],
                    barrier,
                    dense_ring.index(stage * DENSE_PARTS + part),
                )
            for part in gl.static_range(GATHERED_PARTS):
                _copy_rows(
                    gathered, token, row + rows < end, gathered_column + part * GATHERED, P,
                    by_row, gathered_ring.index(stage * GATHERED_PARTS + part),
                )  # fmt: skip
            async_copy.mbarrier_arrive(barrier, increment_count=False)
            token = next_token
            step += 1
        first, end = next_first, next_end


@gluon.jit
def _consume(ring, staging, out, expert_offsets, GROUP: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up and stores one group's rows of every tile of this program."""
    row_ring, column_ring, full, empty = ring
    BUFFERS: gl.constexpr = P.buffers
    SLICE: gl.constexpr = P.slice
    ROWS: gl.constexpr = P.rows // GROUPS
    COLUMNS: gl.constexpr = P.columns
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])

    expert, first, end = _rows_of(gl.program_id(0), expert_offsets, P)
    step = 0
    for tile in range(gl.program_id(0), P.tiles, P.stride):
        next_expert, next_first, next_end = _rows_of(tile + P.stride, expert_offsets, P)
        acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        for row in range(first, end, P.block_k):
            stage = step % P.stages
            wait_full(full, step)
            # The gathered rows were written by ordinary copies.
            fence_async_shared()
            left = row_ring.index(stage * GROUPS + GROUP).permute((1, 0))
            acc = warpgroup_mma(left, column_ring.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # The product before this one has read its operands.
            release_before(empty, step, row > first)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        release_before(empty, step, first < end)

        gathered_tile = tile % P.expert_tiles // P.dense_tiles
        dense_tile = tile % P.dense_tiles
        row_tile = gathered_tile if P.gathered_rows else dense_tile
        column_tile = dense_tile if P.gathered_rows else gathered_tile
        out_row = (row_tile * GROUPS + GROUP) * ROWS
        out_column = column_tile * COLUMNS
        # A tile uses every buffer equally often, so the oldest store on its way is always the buffer's own.
        gl.static_assert(COLUMNS // SLICE % BUFFERS == 0)
        slices = column_slices(acc.to(out.dtype), SLICE)
        for i in gl.static_range(COLUMNS // SLICE):
            buffer = staging.index(GROUP * BUFFERS + i % BUFFERS)
            tma.store_wait(BUFFERS - 1)  # until the store that last used this buffer has read it
            if P.transposed:
                buffer.store(slices[i].permute((1, 0)).reshape((1, SLICE, ROWS)))
            else:
                buffer.store(slices[i].reshape((1, ROWS, SLICE)))
            fence_async_shared()
            if P.transposed:
                tma.async_copy_shared_to_global(out, [expert, out_column + i * SLICE, out_row], buffer)
            else:
                tma.async_copy_shared_to_global(out, [expert, out_row, out_column + i * SLICE], buffer)
        expert, first, end = next_expert, next_first, next_end
    tma.store_wait(0)


def _name(specialization: Any) -> str:
    """Of a compiled kernel: profilers tell the two gradients apart by it."""
    plan = specialization.constants["P"]
    return f"gluon_{'up' if plan.gathered_rows == plan.transposed else 'down'}_weight_gradient_kernel"


@gluon.jit(repr=_name)
def weight_gradient_kernel(  # type: ignore[no-untyped-def]
    gathered,  # (T, gathered_width)
    dense,  # ragged descriptor of (R, dense_width), box (block_k, the tile's extent, or a group's share of it)
    out,  # descriptor of (E, gathered_width, dense_width) or (E, dense_width, gathered_width), box (1, …) of a slice
    gather,  # (R,)
    expert_offsets,  # (E + 1,)
    P: gl.constexpr,
):
    STAGES: gl.constexpr = P.stages
    BK: gl.constexpr = P.block_k
    ROWS: gl.constexpr = P.rows // GROUPS
    COLUMNS: gl.constexpr = P.columns
    BUFFERS: gl.constexpr = GROUPS * P.buffers
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, ROWS], out.dtype)
    column_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, COLUMNS], out.dtype)
    row_ring = gl.allocate_shared_memory(out.dtype, [STAGES * GROUPS, BK, ROWS], row_layout)
    column_ring = gl.allocate_shared_memory(out.dtype, [STAGES, BK, COLUMNS], column_layout)
    staging = gl.allocate_shared_memory(out.dtype, [BUFFERS] + out.block_type.shape, out.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=32 * PRODUCER_WARPS + 1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    publish_barriers()

    ring = (row_ring, column_ring, full, empty)
    gathered_ring, dense_ring = (row_ring, column_ring) if P.gathered_rows else (column_ring, row_ring)
    operands = (gathered, dense, gather, expert_offsets)
    gl.warp_specialize(
        [
            (_consume, (ring, staging, out, expert_offsets, 0, P)),
            (_consume, (ring, staging, out, expert_offsets, 1, P)),
            (_produce, ((gathered_ring, dense_ring, full, empty), operands, P)),
        ],
        [gl.num_warps(), PRODUCER_WARPS],
        [P.consumer_registers, P.producer_registers],
    )


@functools.cache
def narrowed(options: Options, gathered_width: int, dense_width: int) -> Options:
    """The options with the tile's columns no more than the operand needs, 64 at least."""
    side, width = ("dense", dense_width) if options.gathered_rows else ("gathered", gathered_width)
    columns = min(getattr(options, side), max(64, next_power_of_2(width)))
    slice_columns = min(options.slice_columns, columns)
    buffers = min(options.buffers, columns // slice_columns)
    return replace(options, **{side: columns}, slice_columns=slice_columns, buffers=buffers)


@functools.cache
def box_shapes(options: Options, up: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The boxes in which the dense operand (block_k, …) is loaded and the gradient (1, …, …) is stored."""
    rows, columns = options.sides
    rows //= GROUPS.value
    loaded = (options.block_k, columns if options.gathered_rows else rows)
    # dW1 (2n, d) has the gathered side as its columns, dW2 (d, n) as its rows.
    transposed = options.gathered_rows == up
    stored = (1, options.slice_columns, rows) if transposed else (1, rows, options.slice_columns)
    return loaded, stored


def make_plan(options: Options, up: bool, experts: int, gathered_width: int, dense_width: int, stride: int) -> Plan:
    """The plan of dW1 (`up`) or dW2; `options` as `narrowed` gives them."""
    o = options
    rows, columns = o.sides
    # The producer's surplus goes to the consumers.
    left = (GROUPS.value + 1) * ENTRY_REGISTERS - o.producer_registers
    consumer_registers = left // GROUPS.value // 8 * 8
    return Plan(
        experts, gathered_width, dense_width, rows, columns, o.gathered_rows, o.gathered_rows == up, o.block_k,
        o.stages, o.slice_columns, o.buffers, consumer_registers, o.producer_registers, stride,
    )  # fmt: skip


def _launch(gathered: Tensor, dense: Tensor, out: Tensor, routing: Routing, options: Options, up: bool) -> Tensor:
    gathered, dense = tiles.dense(gathered), tiles.dense(dense)
    options = narrowed(options, gathered.shape[1], dense.shape[1])
    loaded, stored = box_shapes(options, up)
    count = cdiv(gathered.shape[1], options.gathered) * cdiv(dense.shape[1], options.dense)
    grid, stride = tiles.programs(routing.num_experts * count, out.device)
    _launcher(options, up, routing.num_experts, gathered.shape[1], dense.shape[1], stride)(
        (grid,),
        (
            gathered,
            ragged(dense, dense.shape, (dense.shape[1], 1), loaded),
            descriptor(out, out.shape, out.stride(), stored),
            routing.gather,
            routing.expert_offsets,
        ),
    )
    return out


@functools.cache
def _launcher(*plan: Any) -> Launcher:
    return Launcher(weight_gradient_kernel, {"P": make_plan(*plan)}, num_warps=CONSUMER_WARPS)


def up_weight_gradient(grad_h: Tensor, x: Tensor, routing: Routing, options: Options | None = None) -> Tensor:
    """grad_w1 (E, 2n, d) of grad_h (R, 2n) and x (T, d), in their dtype ((E, n, d) of (R, n) for ungated activations).

    Raises:
        ValueError: the dtype has no 16 bits; d or H's width is no multiple of 16 bytes; a tensor's shape, dtype or
            device does not fit the others.
    """
    rows, experts = routing.rows, routing.num_experts
    check_dtype(x.dtype)
    hidden, d = check_up_weight_gradient(grad_h, x, routing)
    if rows == 0:
        return torch.zeros(experts, hidden, d, dtype=x.dtype, device=x.device)
    grad_w1 = torch.empty(experts, hidden, d, dtype=x.dtype, device=x.device)
    return _launch(x, grad_h, grad_w1, routing, options or Options(), up=True)


def down_weight_gradient(
    grad_out: Tensor, scaled_a: Tensor, routing: Routing, options: Options | None = None
) -> Tensor:
    """grad_w2 (E, d, n) of grad_out (T, d) and scaled_a (R, n), in their dtype.

    Raises:
        ValueError: the dtype has no 16 bits; d or n is no multiple of 16 bytes; a tensor's shape, dtype or device does
            not fit the others.
    """
    rows, experts = routing.rows, routing.num_experts
    check_dtype(grad_out.dtype)
    d, n = check_down_weight_gradient(grad_out, scaled_a, routing)
    dtype, device = grad_out.dtype, grad_out.device
    if rows == 0:
        return torch.zeros(experts, d, n, dtype=dtype, device=device)
    grad_w2 = torch.empty(experts, d, n, dtype=dtype, device=device)
    return _launch(grad_out, scaled_a, grad_w2, routing, options or Options(), up=False)
