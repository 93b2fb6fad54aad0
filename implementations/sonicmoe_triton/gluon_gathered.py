"""What the warp-specialised Hopper kernels over gathered rows share: a ring of stages that two partitions walk through.

A stage holds one step of the contraction, A (BM, BK) beside B; after a tile's last step a few stages serve its
epilogue, which brings or stages one slice of SLICE columns there: a matrix of HALVES N columns, (HALVES, BM, SLICE), in
B's place, and one of N columns, (BM, SLICE), in A's.

The tile's rows belong to one consumer, or half of them to each of two (GROUPS), which keep pace only as far as the
ring makes them, and so find the tensor cores free while the other is in its epilogue.

The producer hands out the stages in the order of a common count of steps, the consumer takes them in the same order and
frees a stage once it has begun with the next. Step i uses stage i % STAGES for the (i // STAGES)-th time; a barrier's
wait returns once the phase of that parity is over, and the phase before the first counts as over. `full` counts an
arrival of each producer thread (its 16-byte copies of gathered rows) and one of the thread that announces the TMA's
bytes; `empty` counts one of each consumer. No wait is ever two phases ahead, where parities would look alike: the
consumer waits for step i after it has freed step i - 2, the producer for the stage that it filled last but STAGES.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from implementations.sonicmoe_triton.activations import _value_and_slope
from implementations.sonicmoe_triton.tiles import Tile

#: Rows of a tile. With 64 a step's operands would be read for too little work.
BLOCK_M = 128

#: Warps of the producer: enough threads to keep the 16-byte copies of a whole step in flight.
PRODUCER_WARPS = gl.constexpr(4)

#: Ragged descriptors, as in triton.tools.ragged_tma: two leading dimensions of strides 2^34 - s and s, where s is a
#: row's, and FAR rows. The box at (FAR, end, FAR - size) starts `size` rows before `end`, since FAR (2^34 - s) elements
#: of 2 bytes are -FAR s modulo 2^64 bytes, and its rows from `end` on are out of bounds.
FAR = gl.constexpr(2**30)
_EXTENT = 0x7FFF0000

#: Gluon's names of the dtypes that these kernels know.
ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@gluon.jit
def make_barriers(STAGES: gl.constexpr, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """(full, empty), STAGES barriers each."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=32 * PRODUCER_WARPS + 1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return full, empty


@gluon.jit
def wait_full(full, step, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The consumer's wait for what the step brings; returns its stage."""
    stage = step % STAGES
    mbarrier.wait(full.index(stage), (step // STAGES) & 1)
    return stage


@gluon.jit
def wait_empty(empty, step, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The producer's wait until the step's stage may be overwritten; returns the stage."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    return stage


@gluon.jit
def release_before(empty, step, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Free the stage of the step before this one."""
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)


@gluon.jit
def gathered_rows(x, gather, first, size, WIDTH: gl.constexpr, BM: gl.constexpr, BK: gl.constexpr):  # type: ignore[no-untyped-def]
    """(BM, BK) pointers to the first columns of x[gather[first + i]], x (T, WIDTH), 16 bytes to a thread.

    Rows from `size` on point at token 0; they are computed and not stored."""
    VECTOR: gl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    ACROSS: gl.constexpr = BK // VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [PRODUCER_WARPS, 1], [1, 0])
    row = gl.arange(0, BM, gl.SliceLayout(1, layout))
    token = gl.load(gather + first + row, mask=row < size, other=0)
    column = gl.arange(0, BK, gl.SliceLayout(0, layout))
    return x + (token.to(gl.int64) * WIDTH)[:, None] + column[None, :]


@gluon.jit
def copy_rows(a_stage, rows, k, barrier, WIDTH: gl.constexpr, BK: gl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k to k + BK of `gathered_rows` to shared memory, zeros past their width; `barrier` hears when they are
    there."""
    if WIDTH % BK == 0:
        async_copy.async_copy_global_to_shared(a_stage, rows + k)
    else:
        column = gl.arange(0, BK, gl.SliceLayout(0, rows.type.layout))
        async_copy.async_copy_global_to_shared(a_stage, rows + k, mask=(k + column < WIDTH)[None, :])
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def rows_of_group(a_stage, ROWS: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, BK): a group's rows of a stage's A. Its rows are no wider than the swizzle, so they lie one by one."""
    GROUPS: gl.constexpr = a_stage.shape[0] // ROWS
    return a_stage._reinterpret(a_stage.dtype, [GROUPS, ROWS, a_stage.shape[1]], a_stage.layout).index(GROUP)


@gluon.jit
def halves_of_group(  # type: ignore[no-untyped-def]
    b_stage, HALVES: gl.constexpr, ROWS: gl.constexpr, SLICE: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr
):
    """(HALVES, ROWS, SLICE): where a group's slice lies in a stage's B, as one box of TMA's."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALVES, ROWS, SLICE], b_stage.dtype)
    return b_stage._reinterpret(b_stage.dtype, [GROUPS, HALVES, ROWS, SLICE], layout).index(GROUP)


@gluon.jit
def contract(  # type: ignore[no-untyped-def]
    a_ring,
    b_ring,
    full,
    empty,
    step,
    WIDTH: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ROWS: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """((ROWS, BN) float32 sum over WIDTH of a group's rows, the next step), B's stages being (…, BK, BN), or
    (…, BN, BK) if TRANSPOSED."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    acc = gl.zeros((ROWS, BN), gl.float32, layout)
    for k in range(0, WIDTH, BK):
        stage = wait_full(full, step, STAGES)
        # The gathered rows were written by ordinary copies; the tensor cores read through the asynchronous proxy.
        fence_async_shared()
        if TRANSPOSED:
            b = b_ring.index(stage).reshape([BN, BK]).permute((1, 0))
        else:
            b = b_ring.index(stage).reshape([BK, BN])
        acc = warpgroup_mma(rows_of_group(a_ring.index(stage), ROWS, GROUP), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if k == 0:
            # The stage before this one is the last slice of the tile before, and may still be on its way out.
            tma.store_wait(0)
        release_before(empty, step, STAGES)
        step += 1
    return warpgroup_mma_wait(0, deps=(acc,)), step


@gluon.jit
def column_slices(acc, ROWS: gl.constexpr, COLUMNS: gl.constexpr, SLICE: gl.constexpr):  # type: ignore[no-untyped-def]
    """The accumulator (ROWS, COLUMNS) as a tuple of COLUMNS / SLICE neighbouring slices, without moving anything."""
    if COLUMNS == SLICE:
        return (acc,)
    else:
        left, right = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        return column_slices(left, ROWS, COLUMNS // 2, SLICE) + column_slices(right, ROWS, COLUMNS // 2, SLICE)


@gluon.jit
def stagger(NANOSECONDS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start the second half of the programs later.

    Two programs that share a multiprocessor and start together stay in step: both multiply, then both leave the tensor
    cores idle. The grid's second half are the second programs of their multiprocessors."""
    if NANOSECONDS > 0 and gl.program_id(0) >= gl.num_programs(0) // 2:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        delay = gl.full([32 * gl.num_warps()], NANOSECONDS, gl.int32, layout)
        gl.inline_asm_elementwise(
            "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [delay], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def widen(x):  # type: ignore[no-untyped-def]
    """x as float32. A pair of bfloat16 in a register takes two instructions, where the compiler finds three."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
                .reg .b32 bits;
                shl.b32 bits, $2, 16;
                mov.b32 $0, bits;
                and.b32 bits, $2, 0xFFFF0000;
                mov.b32 $1, bits;
            }""",
            "=f,=f,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)) within a few units in the last place, by a third of the instructions that tl.sigmoid takes: the
    tensor cores stand still for every one of them. Values below 2^-126 come out as zero."""
    return gl.inline_asm_elementwise(
        """{
            .reg .f32 power;
            mul.f32 power, $1, 0fBFB8AA3B;  // -log2(e)
            ex2.approx.ftz.f32 power, power;
            add.f32 power, power, 0f3F800000;
            rcp.approx.ftz.f32 $0, power;
        }""",
        "=f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def value_and_slope(gate, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """f(gate) and f'(gate), where the activation is f(gate) * up, or f(gate) for an ungated one."""
    if (ACTIVATION == "swiglu") or (ACTIVATION == "silu"):
        sigmoid = _sigmoid(gate)
        value = gate * sigmoid
        return value, sigmoid + value * (1.0 - sigmoid)
    else:
        return _value_and_slope(gate, ACTIVATION)


@gluon.jit
def store_slice(  # type: ignore[no-untyped-def]
    gate,  # (ROWS, SLICE): columns of the halves of `wide`; `up` is not stored without a second half
    up,
    value,  # (ROWS, SLICE): columns of `narrow`
    a_rows,  # where they pass through shared memory: `rows_of_group`, `halves_of_group`
    b_halves,
    wide_boxes,  # descriptor of `wide` by `boxes_of_halves`, of `narrow` by `boxes_of_rows`
    narrow_boxes,
    wide,  # (R, HALVES N)
    narrow,  # (R, N)
    first,
    size,
    column,
    N: gl.constexpr,
    HALVES: gl.constexpr,
    ROWS: gl.constexpr,
    SLICE: gl.constexpr,
    RAGGED: gl.constexpr,
):
    """Store one slice of a tile's results: two boxes through the stage, left under way. A box that would reach into the
    rows of the next expert is cut by the descriptor if it is RAGGED, else the tile is stored from registers."""
    dtype: gl.constexpr = narrow.dtype.element_ty
    gate = gate.to(dtype)
    up = up.to(dtype)
    value = value.to(dtype)
    if RAGGED or size >= ROWS:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SLICE], dtype)
        # The same bytes as TMA's one box and as one matrix for each half.
        halves = b_halves._reinterpret(dtype, [HALVES, ROWS, SLICE], layout)
        halves.index(0).store(gate)
        if HALVES == 2:
            halves.index(1).store(up)
        a_rows._reinterpret(dtype, [ROWS, SLICE], layout).store(value)
        fence_async_shared()
        wide_box = b_halves._reinterpret(dtype, wide_boxes.block_type.shape, wide_boxes.layout)
        narrow_box = a_rows._reinterpret(dtype, narrow_boxes.block_type.shape, narrow_boxes.layout)
        if RAGGED:
            end = first + size
            tma.async_copy_shared_to_global(wide_boxes, [FAR, end, 0, FAR - size, column], wide_box)
            tma.async_copy_shared_to_global(narrow_boxes, [FAR, end, FAR - size, column], narrow_box)
        else:
            tma.async_copy_shared_to_global(wide_boxes, [0, first, column], wide_box)
            tma.async_copy_shared_to_global(narrow_boxes, [first, column], narrow_box)
    else:
        # What was read here by ordinary loads may be overwritten by TMA next.
        fence_async_shared()
        # A 64-bit base for the tile and 32-bit offsets within it: 64-bit pointers for a whole tile spill.
        row = gl.arange(0, ROWS, gl.SliceLayout(1, value.type.layout))
        columns = column + gl.arange(0, SLICE, gl.SliceLayout(0, value.type.layout))
        mask = (row < size)[:, None] & (columns < N)[None, :]
        wide_tile = wide + first.to(gl.int64) * (HALVES * N)
        offsets = row[:, None] * (HALVES * N) + columns[None, :]
        gl.store(wide_tile + offsets, gate, mask=mask)
        if HALVES == 2:
            gl.store(wide_tile + N + offsets, up, mask=mask)
        gl.store(narrow + first.to(gl.int64) * N + row[:, None] * N + columns[None, :], value, mask=mask)


@dataclass(frozen=True)
class Options:
    """How one launch is cut up.

    Attributes:
        tile: its warps are the consumers'; flatten has no meaning here.
        slice: columns of the epilogue's slices.
        groups: consumers, each with its share of the tile's rows and warps.
        producer_registers: registers of a producer thread; the consumer gets what these leave.
        registers: of a thread on average.
        ragged: store an expert's last rows through descriptors that end where the expert does, as all others.
        stagger: nanoseconds by which the second program of a multiprocessor starts later.
    """

    tile: Tile
    slice: int
    groups: int
    producer_registers: int
    registers: int
    ragged: bool = False
    stagger: int = 0

    @property
    def rows(self) -> int:
        """Rows of one group."""
        return self.tile.block_m // self.groups

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer's thread."""
        left = (
            self.registers * (self.tile.warps + PRODUCER_WARPS.value) - self.producer_registers * PRODUCER_WARPS.value
        )
        return left // self.tile.warps // 8 * 8


def make_options(
    block_n: int,
    block_k: int = 64,
    halves: int = 2,
    warps: int = 8,
    stages: int | None = None,
    programs: int = 1,
    slice: int | None = None,
    groups: int = 1,
    ragged: bool = False,
    stagger: int = 0,
) -> Options:
    """Options with the widest slices and as many stages as fit for `programs` programs on a multiprocessor.

    Raises:
        ValueError: a step is wider than a row of the swizzle (64), a slice does not fit into a stage, there are fewer
            than two stages, or these warps are not one or two groups of whole warpgroups."""
    if stages is None:
        # 1 KiB: barriers, what the compiler keeps there itself, and the driver's own share.
        stages = (tiles.SHARED_MEMORY // programs - 1024) // ((BLOCK_M + block_n) * block_k * 2)
    widest = min(block_k, block_k * block_n // (halves * BLOCK_M))
    slice = slice or widest
    if block_k > 64 or groups not in (1, 2) or warps not in (4 * groups, 8):
        raise ValueError(f"steps of {block_k}, at most 64; {warps} warps in {groups} groups")
    if slice > widest or stages < 2:
        raise ValueError(f"a slice of {slice} columns, at most {widest} fit; {stages} stages, at least 2")
    all_warps = warps + PRODUCER_WARPS.value
    # No more than a consumer of 240 registers can use, so that the producer's warps give registers up and only then.
    most = (240 * warps + 24 * PRODUCER_WARPS.value) // all_warps
    registers = min(65536 // (32 * all_warps * programs), most) // 8 * 8
    tile = Tile(BLOCK_M, block_n, block_k, warps, stages, programs=programs)
    return Options(tile, slice, groups, 40 if programs == 1 else 32, registers, ragged, stagger)


def boxes(tensor: Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    """A descriptor that moves `box` of a tensor seen as `shape` and `strides`."""
    layout = gl.NVMMASharedLayout.get_default_for(box, ELEMENTS[tensor.dtype])
    return TensorDescriptor(tensor, shape, strides, box, layout)


def boxes_of_halves(tensor: Tensor, halves: int, options: Options, ragged: bool = False) -> TensorDescriptor:
    """Of a matrix (R, HALVES N) as (HALVES, R, N), so that a box ends where a half ends."""
    rows, width = tensor.shape
    n = width // halves
    box = [halves, options.rows, options.slice]
    if ragged:
        far = [_EXTENT, _EXTENT, halves, FAR.value, n]
        return boxes(tensor, far, [2**34 - width, width, n, width, 1], [1, 1, *box])
    return boxes(tensor, [halves, rows, n], [n, width, 1], box)


def boxes_of_rows(tensor: Tensor, options: Options, ragged: bool = False) -> TensorDescriptor:
    """Of a matrix (R, N)."""
    rows, n = tensor.shape
    box = [options.rows, options.slice]
    if ragged:
        return boxes(tensor, [_EXTENT, _EXTENT, FAR.value, n], [2**34 - n, n, n, 1], [1, 1, *box])
    return boxes(tensor, [rows, n], [n, 1], box)


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError for a dtype that these kernels do not know."""
    if dtype not in ELEMENTS:
        raise ValueError(f"{dtype}: warp-specialised kernels take {', '.join(map(str, ELEMENTS))}")
