"""The weight gradients for Hopper in Gluon: one persistent warp-specialised kernel for both, beside weight_gradient.py.

With the rows r of expert e and their tokens t = gather[r]:

    dW1[e] = sum_r dH[r]^T x[t]             (2n, d)
    dW2[e] = sum_r dO[t]^T A'[r]            (d, n)       A' = s A: the score is in it already

Both are a product of a *gathered* operand (rows by index, cp.async of 16 bytes) and a *dense* one (rows of an expert,
TMA). Either may be the row side of the tensor cores' tile; dW1 with the gathered side as rows is computed transposed
and turned on its way to memory.

A warpgroup of producers fills a ring of STAGES steps of BK rows and runs ahead into the next tile. Two consumers, a
warpgroup with half of the tile's rows each, multiply with one wgmma in flight and store through shared memory; either
may run ahead of the other, one storing while the other multiplies. Barriers of a slot: `full` counts every producer
thread's cp.async and one arrival for the TMA box; `empty` counts the consumers.

An expert's last step is shorter than BK: rows past its end belong to the next expert and may hold NaN, so both sides
bring zeros instead, cp.async by its mask and TMA by a descriptor that ends where the expert does (`_ragged`). Every
tile of every expert is stored (exact zeros without rows), one program adds up a whole tile: no atomics, the result is
deterministic.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from implementations.sonicmoe_triton import tiles
from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2
from implementations.sonicmoe_triton.metadata import Routing

#: Rows that a ragged descriptor seems to have (`_ragged`).
RAGGED = gl.constexpr(1 << 30)
#: Threads of the producer partition.
PRODUCERS = gl.constexpr(128)
#: Consumers, each with a part of the tile's rows; a partition's warps.
PARTS = gl.constexpr(2)
WARPS = gl.constexpr(4)
#: Registers of a thread at the start: as many as three partitions can have.
ENTRY_REGISTERS = 168


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
        producer_registers: for a thread of the producers; the consumers share what is left.
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
        if rows % (64 * PARTS.value) or columns > 256:
            raise ValueError(f"{PARTS.value} consumers cannot share {rows} rows (in parts of 64) of {columns} columns")

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the tile."""
        return (self.gathered, self.dense) if self.gathered_rows else (self.dense, self.gathered)


@gluon.jit
def _rows_of(tile, expert_offsets, E: gl.constexpr, TILES: gl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, its first row, one past its last) of a tile; an expert's tiles are neighbours. No rows past the last."""
    inside = tile < E * TILES
    expert = tile // TILES
    first = gl.load(expert_offsets + expert, mask=inside, other=0)
    end = gl.load(expert_offsets + expert + 1, mask=inside, other=0)
    return expert, first, end


@gluon.jit
def _copy_rows(source, row, inside, column, WIDTH: gl.constexpr, layout: gl.constexpr, target):  # type: ignore[no-untyped-def]
    """target (BK, columns) := source[row, column:]; zeros where a row is not inside and past the width."""
    COLUMNS: gl.constexpr = target.shape[1]
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    pointers = (source + row.to(gl.int64) * WIDTH)[:, None] + columns[None, :]
    mask = inside[:, None]
    if WIDTH % COLUMNS != 0:
        mask = mask & (columns < WIDTH)[None, :]
    async_copy.async_copy_global_to_shared(target, pointers, mask)


@gluon.jit
def _producer(tensors, GATHERED_WIDTH: gl.constexpr, TILING: gl.constexpr):  # type: ignore[no-untyped-def]
    """Fills the ring with the steps of all tiles of this program."""
    gathered, dense, gather, expert_offsets, gathered_ring, dense_ring, full, empty = tensors
    E: gl.constexpr = TILING[0]
    GATHERED_ROWS: gl.constexpr = TILING[3]
    DENSE_TILES: gl.constexpr = TILING[2 if GATHERED_ROWS else 1]
    TILES: gl.constexpr = TILING[1] * TILING[2]
    PROGRAMS: gl.constexpr = TILING[5]
    STAGES: gl.constexpr = full.shape[0]
    GATHERED_PARTS: gl.constexpr = gathered_ring.shape[0] // STAGES
    DENSE_PARTS: gl.constexpr = dense_ring.shape[0] // STAGES
    BK: gl.constexpr = gathered_ring.shape[1]
    GATHERED: gl.constexpr = gathered_ring.shape[2]
    DENSE: gl.constexpr = dense_ring.shape[-1]
    # 16 bytes for a thread, up to 256 neighbouring ones of a row for a warp.
    ACROSS: gl.constexpr = min(GATHERED // 8, 16)
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    rows = gl.arange(0, BK, gl.SliceLayout(1, by_row))

    # Row bounds are asked for a tile, tokens a step before they are needed.
    _, first, end = _rows_of(gl.program_id(0), expert_offsets, E, TILES)
    count = 0  # steps of all tiles so far
    for tile in range(gl.program_id(0), E * TILES, PROGRAMS):
        _, next_first, next_end = _rows_of(tile + PROGRAMS, expert_offsets, E, TILES)
        gathered_column = tile % TILES // DENSE_TILES * (GATHERED * GATHERED_PARTS)
        dense_column = tile % DENSE_TILES * (DENSE * DENSE_PARTS)
        token = gl.load(gather + first + rows, mask=first + rows < end, other=0)
        for row in range(first, end, BK):
            slot = count % STAGES
            next_token = gl.load(gather + row + BK + rows, mask=row + BK + rows < end, other=0)
            mbarrier.wait(empty.index(slot), (count // STAGES & 1) ^ 1)
            # Bytes of the whole box: zeros past the expert's end and past the width count too.
            mbarrier.expect(full.index(slot), BK * DENSE * DENSE_PARTS * 2)
            for part in gl.static_range(DENSE_PARTS):
                tma.async_copy_global_to_shared(
                    dense,
                    [RAGGED, end, RAGGED - end + row, dense_column + part * DENSE],
                    full.index(slot),
                    dense_ring.index(slot * DENSE_PARTS + part),
                )
            for part in gl.static_range(GATHERED_PARTS):
                _copy_rows(
                    gathered, token, row + rows < end, gathered_column + part * GATHERED, GATHERED_WIDTH,
                    by_row, gathered_ring.index(slot * GATHERED_PARTS + part),
                )  # fmt: skip
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            token = next_token
            count += 1
        first, end = next_first, next_end


@gluon.jit
def _halves(x):  # type: ignore[no-untyped-def]
    """The left and the right half of x's columns."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return x.reshape((ROWS, 2, COLUMNS // 2)).permute((0, 2, 1)).split()


@gluon.jit
def _slices(x, SLICE: gl.constexpr):  # type: ignore[no-untyped-def]
    """x cut into slices of SLICE columns, a tuple from left to right."""
    if x.shape[1] == SLICE:
        return (x,)
    else:
        left, right = _halves(x)
        return _slices(left, SLICE) + _slices(right, SLICE)


@gluon.jit
def _consumer(tensors, PART: gl.constexpr, TILING: gl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up and stores one part of the rows of every tile of this program."""
    out, expert_offsets, row_ring, column_ring, staging, full, empty = tensors
    E: gl.constexpr = TILING[0]
    ROW_TILES: gl.constexpr = TILING[1]
    COLUMN_TILES: gl.constexpr = TILING[2]
    GATHERED_ROWS: gl.constexpr = TILING[3]
    TRANSPOSED: gl.constexpr = TILING[4]
    PROGRAMS: gl.constexpr = TILING[5]
    STAGES: gl.constexpr = full.shape[0]
    BUFFERS: gl.constexpr = staging.shape[0] // PARTS
    SLICE: gl.constexpr = staging.shape[2 if TRANSPOSED else 3]
    BK: gl.constexpr = row_ring.shape[1]
    ROWS: gl.constexpr = row_ring.shape[2]
    COLUMNS: gl.constexpr = column_ring.shape[2]
    TILES: gl.constexpr = ROW_TILES * COLUMN_TILES
    DENSE_TILES: gl.constexpr = COLUMN_TILES if GATHERED_ROWS else ROW_TILES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])

    expert, first, end = _rows_of(gl.program_id(0), expert_offsets, E, TILES)
    count = 0
    for tile in range(gl.program_id(0), E * TILES, PROGRAMS):
        next_expert, next_first, next_end = _rows_of(tile + PROGRAMS, expert_offsets, E, TILES)
        acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        for row in range(first, end, BK):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), count // STAGES & 1)
            # What cp.async wrote becomes visible to wgmma, which reads through the asynchronous proxy.
            fence_async_shared()
            left = row_ring.index(slot * PARTS + PART).permute((1, 0))
            acc = warpgroup_mma(left, column_ring.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # The product before this one has read its operands.
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=row > first)
            count += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=first < end)

        gathered_tile = tile % TILES // DENSE_TILES
        dense_tile = tile % DENSE_TILES
        row_tile = gathered_tile if GATHERED_ROWS else dense_tile
        column_tile = dense_tile if GATHERED_ROWS else gathered_tile
        out_row = (row_tile * PARTS + PART) * ROWS
        out_column = column_tile * COLUMNS
        # A tile uses every buffer equally often, so the oldest store on its way is always the buffer's own.
        gl.static_assert(COLUMNS // SLICE % BUFFERS == 0)
        slices = _slices(acc.to(out.dtype), SLICE)
        for i in gl.static_range(COLUMNS // SLICE):
            buffer = staging.index(PART * BUFFERS + i % BUFFERS)
            tma.store_wait(BUFFERS - 1)  # until the store that last used this buffer has read it
            if TRANSPOSED:
                buffer.store(slices[i].permute((1, 0)).reshape((1, SLICE, ROWS)))
            else:
                buffer.store(slices[i].reshape((1, ROWS, SLICE)))
            fence_async_shared()
            if TRANSPOSED:
                tma.async_copy_shared_to_global(out, [expert, out_column + i * SLICE, out_row], buffer)
            else:
                tma.async_copy_shared_to_global(out, [expert, out_row, out_column + i * SLICE], buffer)
        expert, first, end = next_expert, next_first, next_end
    tma.store_wait(0)


def _name(specialization: Any) -> str:
    """Of a compiled kernel: profilers tell the two gradients apart by it."""
    of = specialization.constants
    return f"gluon_{'up' if of['GATHERED_ROWS'] == of['TRANSPOSED'] else 'down'}_weight_gradient_kernel"


@gluon.jit(repr=_name)
def weight_gradient_kernel(  # type: ignore[no-untyped-def]
    gathered,  # (T, GATHERED_WIDTH)
    dense,  # ragged descriptor of (R, DENSE_WIDTH), box (BK, a part of the tile's extent)
    out,  # descriptor of (E, GATHERED_WIDTH, DENSE_WIDTH) or (E, DENSE_WIDTH, GATHERED_WIDTH), box (1, ...) of a slice
    gather,  # (R,)
    expert_offsets,  # (E + 1,)
    E: gl.constexpr,
    GATHERED_WIDTH: gl.constexpr,
    DENSE_WIDTH: gl.constexpr,
    ROWS: gl.constexpr,  # of a tile
    COLUMNS: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    GATHERED_ROWS: gl.constexpr,  # the tile's rows are the gathered operand's columns, not the dense one's
    TRANSPOSED: gl.constexpr,  # the tile's rows are out's columns
    SLICE: gl.constexpr,
    BUFFERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    ELEMENT: gl.constexpr = out.dtype
    PART_ROWS: gl.constexpr = ROWS // PARTS
    ROW_WIDTH: gl.constexpr = GATHERED_WIDTH if GATHERED_ROWS else DENSE_WIDTH
    COLUMN_WIDTH: gl.constexpr = DENSE_WIDTH if GATHERED_ROWS else GATHERED_WIDTH
    ROW_TILES: gl.constexpr = (ROW_WIDTH + ROWS - 1) // ROWS
    COLUMN_TILES: gl.constexpr = (COLUMN_WIDTH + COLUMNS - 1) // COLUMNS
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, PART_ROWS], ELEMENT)
    column_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, COLUMNS], ELEMENT)
    row_ring = gl.allocate_shared_memory(ELEMENT, [STAGES * PARTS, BK, PART_ROWS], row_layout)
    column_ring = gl.allocate_shared_memory(ELEMENT, [STAGES, BK, COLUMNS], column_layout)
    staging = gl.allocate_shared_memory(ELEMENT, [PARTS * BUFFERS] + out.block_type.shape, out.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=PRODUCERS + 1)
        mbarrier.init(empty.index(slot), count=PARTS)
    fence_async_shared()  # TMA completes on barriers that ordinary stores initialised

    gathered_ring, dense_ring = (row_ring, column_ring) if GATHERED_ROWS else (column_ring, row_ring)
    # Partitions take constants only as arguments of their own or as one constant.
    tiling: gl.constexpr = (E, ROW_TILES, COLUMN_TILES, GATHERED_ROWS, TRANSPOSED, PROGRAMS)
    consumer = (out, expert_offsets, row_ring, column_ring, staging, full, empty)
    producer = (gathered, dense, gather, expert_offsets, gathered_ring, dense_ring, full, empty)
    gl.warp_specialize(
        [
            (_consumer, (consumer, 0, tiling)),
            (_consumer, (consumer, 1, tiling)),
            (_producer, (producer, GATHERED_WIDTH, tiling)),
        ],
        [WARPS, WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
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
def boxes(options: Options, up: bool) -> tuple[list[int], list[int]]:
    """The boxes in which the dense operand (block_k, …) is loaded and the gradient (1, …, …) is stored."""
    rows, columns = options.sides
    rows //= PARTS.value
    loaded = [1, 1, options.block_k, columns if options.gathered_rows else rows]
    # dW1 (2n, d) has the gathered side as its columns, dW2 (d, n) as its rows.
    transposed = options.gathered_rows == up
    stored = [1, options.slice_columns, rows] if transposed else [1, rows, options.slice_columns]
    return loaded, stored


def constants(options: Options, up: bool, experts: int, gathered_width: int, dense_width: int) -> dict[str, int]:
    """The kernel's compile-time arguments but for PROGRAMS; `options` as `narrowed` gives them."""
    rows, columns = options.sides
    # The producers' surplus goes to the consumers.
    left = (PARTS.value + 1) * ENTRY_REGISTERS - options.producer_registers
    return {
        "E": experts,
        "GATHERED_WIDTH": gathered_width,
        "DENSE_WIDTH": dense_width,
        "ROWS": rows,
        "COLUMNS": columns,
        "BK": options.block_k,
        "STAGES": options.stages,
        "GATHERED_ROWS": options.gathered_rows,
        "TRANSPOSED": options.gathered_rows == up,
        "SLICE": options.slice_columns,
        "BUFFERS": options.buffers,
        "CONSUMER_REGISTERS": left // PARTS.value // 8 * 8,
        "PRODUCER_REGISTERS": options.producer_registers,
    }


@functools.cache
def _layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)


def _descriptor(tensor: Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, shape, strides, box, _layout(tuple(box), tensor.dtype))


def _ragged(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    """A descriptor of the rows of (R, width) whose end the kernel chooses: rows from there on read as zeros.

    It pretends to RAGGED rows and is asked for row RAGGED - end + row, which is out of bounds from `end` on. Two more
    dimensions take the offset back: `end` rows forwards by the second, RAGGED rows backwards by the first, whose stride
    of 2^34 - row makes RAGGED of them -RAGGED rows modulo the 2^64 of an address. (Triton's tools.ragged_tma has the
    idea.)"""
    row = tensor.shape[1]
    many = 0x7FFF0000
    return _descriptor(tensor, [many, many, RAGGED.value, row], [2**34 - row, row, row, 1], box)


def _launch(gathered: Tensor, dense: Tensor, out: Tensor, routing: Routing, options: Options, up: bool) -> Tensor:
    gathered, dense = tiles.dense(gathered), tiles.dense(dense)
    options = narrowed(options, gathered.shape[1], dense.shape[1])
    loaded, stored = boxes(options, up)
    count = cdiv(gathered.shape[1], options.gathered) * cdiv(dense.shape[1], options.dense)
    stride = tiles.multiprocessors(out.device)
    _launcher(options, up, routing.num_experts, gathered.shape[1], dense.shape[1], stride)(
        (min(stride, routing.num_experts * count),),
        (
            gathered,
            _ragged(dense, loaded),
            _descriptor(out, list(out.shape), list(out.stride()), stored),
            routing.gather,
            routing.expert_offsets,
        ),
    )
    return out


@functools.cache
def _launcher(options: Options, up: bool, experts: int, gathered_width: int, dense_width: int, stride: int) -> Launcher:
    fixed = constants(options, up, experts, gathered_width, dense_width)
    return Launcher(weight_gradient_kernel, fixed | {"PROGRAMS": stride}, num_warps=WARPS.value)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"the kernel for Hopper multiplies bfloat16 and float16, not {dtype}")


def up_weight_gradient(grad_h: Tensor, x: Tensor, routing: Routing, options: Options | None = None) -> Tensor:
    """grad_w1 (E, 2n, d) of grad_h (R, 2n) and x (T, d), in their dtype ((E, n, d) of (R, n) for ungated activations).

    Raises:
        ValueError: the dtype has no 16 bits; d or H's width is no multiple of 16 bytes; a tensor's shape, dtype or
            device does not fit the others.
    """
    rows, experts = routing.rows, routing.num_experts
    hidden, d = grad_h.shape[-1], x.shape[-1]
    _check_dtype(x.dtype)
    tiles.check_width("d", d, x.dtype)
    tiles.check_width("H's width", hidden, x.dtype)
    tiles.check_shape("x", x, (x.shape[0], d), x.dtype, x.device)
    tiles.check_shape("grad_h", grad_h, (rows, hidden), x.dtype, x.device)
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
    d, n = grad_out.shape[-1], scaled_a.shape[-1]
    dtype, device = grad_out.dtype, grad_out.device
    _check_dtype(dtype)
    tiles.check_width("d", d, dtype)
    tiles.check_width("n", n, dtype)
    tiles.check_shape("grad_out", grad_out, (grad_out.shape[0], d), dtype, device)
    tiles.check_shape("scaled_a", scaled_a, (rows, n), dtype, device)
    if rows == 0:
        return torch.zeros(experts, d, n, dtype=dtype, device=device)
    grad_w2 = torch.empty(experts, d, n, dtype=dtype, device=device)
    return _launch(grad_out, scaled_a, grad_w2, routing, options or Options(), up=False)
