"""What the warp-specialised Hopper kernels over gathered rows share: the ring that a producer and two consumers walk.

Each of its stages holds one step of the contraction, A (BM, BK) beside B; after a tile's last step a few stages serve
its epilogue, which brings or stages one slice of SLICE columns there: for each consumer (HALVES, ROWS, SLICE) of a
matrix of HALVES N columns in B's place, and (ROWS, SLICE) of one of N columns in A's.

Half of a tile's rows belong to each of two consumers, which keep pace only as far as the ring makes them, and so find
the tensor cores free while the other is in its epilogue.

The producer hands out the stages in the order of the steps (gluon_common.py), a consumer takes them in the same order
and frees a stage once it has begun with the next. `full` counts an arrival of each producer thread (its 16-byte copies
of gathered rows) and one of the thread that announces the TMA's bytes; `empty` counts one of each consumer. No wait is
ever two phases ahead: a consumer waits for step i after it has freed step i - 2, the producer for the stage that it
filled last but STAGES.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

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

from implementations.sonicmoe_triton import gluon_contiguous, tiles
from implementations.sonicmoe_triton.activations import _value_and_slope
from implementations.sonicmoe_triton.gluon_common import (
    CONSUMER_WARPS,
    FAR,
    GROUPS,
    descriptor,
    locate_tile,
    publish_barriers,
    ragged,
    release_before,
    wait_full,
)
from implementations.sonicmoe_triton.tiles import Tile

#: Rows of a tile. With 64 a step's operands would be read for too little work.
BLOCK_M = gl.constexpr(128)
#: Rows of each consumer.
ROWS = gl.constexpr(64)
#: Warps of the producer: enough threads to keep the 16-byte copies of a whole step in flight.
PRODUCER_WARPS = gl.constexpr(4)
#: Registers of a consumer's thread and of the producer's, from `ENTRY_REGISTERS`.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)


@dataclass(frozen=True)
class Options:
    """How one launch is cut up.

    Attributes:
        tile: its warps are the consumers'; flatten has no meaning here.
        slice: columns of the epilogue's slices.
        ragged: store an expert's last rows through descriptors that end where the expert does, as all others; else from
            registers.
        by_expert: the order of tiles: for each expert each tile of columns, and for that all the expert's rows. Without
            it: for each tile of rows all tiles of columns.
    """

    tile: Tile
    slice: int
    ragged: bool
    by_expert: bool


#: How much fewer an expert's rows must be than its columns, so that they are better taken again than its weights. By
#: measurement (NOTES.md): with a quarter as many the up-projection gains, with half as many no longer.
FEW_ROWS = 4


def by_expert(columns: int, k: int, rows: int) -> bool:
    """Whether experts with so many rows each, on average, are better taken column by column; ``k``: what is contracted.
    Of the contiguous GEMMs `gluon_contiguous.by_expert` says it."""
    return gluon_contiguous.by_expert(columns, k, FEW_ROWS * rows)


@functools.cache
def make_options(
    block_n: int,
    ragged: bool,
    halves: int = 2,
    block_k: int = 64,
    stages: int | None = None,
    by_expert: bool = False,
) -> Options:
    """Options with the widest slices and, unless told, as many stages as fit.

    Raises:
        ValueError: a step is wider than a row of the swizzle (64), or there are fewer than two stages."""
    if stages is None:
        # 1 KiB: barriers, what the compiler keeps there itself, and the driver's own share.
        stages = (tiles.SHARED_MEMORY - 1024) // ((BLOCK_M.value + block_n) * block_k * 2)
    if block_k > 64 or stages < 2:
        raise ValueError(f"steps of {block_k}, at most 64; {stages} stages, at least 2")
    widest = min(block_k, block_k * block_n // (halves * BLOCK_M.value))
    tile = Tile(BLOCK_M.value, block_n, block_k, GROUPS.value * CONSUMER_WARPS, stages)
    return Options(tile, widest, ragged, by_expert)


class Plan(NamedTuple):
    """Everything that a kernel is compiled for, besides its operands' types. (A tuple, not a dataclass: Triton writes
    constants out as JSON for whoever listens to its compilations.)

    Attributes:
        d, n: widths of an embedding and of an expert's hidden units.
        activation: see `activations`.
        halves: of `wide`, the result of HALVES N columns: 2 (gate | up), or 1 for an ungated activation.
        columns: of `narrow`, the result of N columns, that one tile covers.
        stride: programs of a launch: program i works through the tiles i, i + stride, …
        block_n, block_k, stages, slice, ragged, by_expert: see `Options` and its tile.
        has_bias: whether a bias (E, HALVES N) is added.
    """

    d: int
    n: int
    activation: str
    halves: int
    columns: int
    stride: int
    block_n: int
    block_k: int
    stages: int
    slice: int
    ragged: bool
    by_expert: bool
    has_bias: bool

    @property
    def column_tiles(self) -> int:
        return -(-self.n // self.columns)

    @property
    def slices(self) -> int:
        """Slices of one tile."""
        return self.columns // self.slice


def make_plan(
    d: int,
    n: int,
    activation: str,
    halves: int,
    columns: int,
    stride: int,
    options: Options,
    has_bias: bool = False,
) -> Plan:
    """The plan of a launch with these options."""
    tile = options.tile
    blocks = tile.block_n, tile.block_k, tile.stages
    order = options.slice, options.ragged, options.by_expert
    return Plan(d, n, activation, halves, columns, stride, *blocks, *order, has_bias)


@gluon.jit
def make_ring(b, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """(stages of A, stages of B, full, empty), B's stages being boxes of the descriptor `b`."""
    STAGES: gl.constexpr = P.stages
    BK: gl.constexpr = P.block_k
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BK], b.dtype)
    a_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_M, BK], a_layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=32 * PRODUCER_WARPS + 1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    publish_barriers()
    return a_ring, b_ring, full, empty


@gluon.jit
def locate(tile, row_tiles, FROM: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """(a tile's expert, its row FROM, rows of the expert from there on: perhaps none; its tile of columns)."""
    expert, first, end, column_tile = locate_tile(tile, row_tiles, P.column_tiles, BLOCK_M, P.by_expert)
    first += FROM
    return expert, first, end - first, column_tile


@gluon.jit
def gathered_rows(x, gather, first, size, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """(BM, BK) pointers to the first columns of x[gather[first + i]], x (T, D), 16 bytes to a thread.

    Rows from `size` on point at token 0; they are computed and not stored."""
    BK: gl.constexpr = P.block_k
    VECTOR: gl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    ACROSS: gl.constexpr = BK // VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // ACROSS, ACROSS], [PRODUCER_WARPS, 1], [1, 0])
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
    token = gl.load(gather + first + row, mask=row < size, other=0)
    column = gl.arange(0, BK, gl.SliceLayout(0, layout))
    return x + (token.to(gl.int64) * P.d)[:, None] + column[None, :]


@gluon.jit
def copy_rows(a_stage, rows, k, barrier, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """Columns k to k + BK of `gathered_rows` to shared memory, zeros past their width; `barrier` hears when they are
    there."""
    BK: gl.constexpr = P.block_k
    if P.d % BK == 0:
        async_copy.async_copy_global_to_shared(a_stage, rows + k)
    else:
        column = gl.arange(0, BK, gl.SliceLayout(0, rows.type.layout))
        async_copy.async_copy_global_to_shared(a_stage, rows + k, mask=(k + column < P.d)[None, :])
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def rows_of_group(a_stage, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """(ROWS, BK): a group's rows of a stage's A. Its rows are no wider than the swizzle, so they lie one by one."""
    return a_stage._reinterpret(a_stage.dtype, [GROUPS, ROWS, a_stage.shape[1]], a_stage.layout).index(GROUP)


@gluon.jit
def halves_of_group(b_stage, GROUP: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """(HALVES, ROWS, SLICE): where a group's slice lies in a stage's B, as one box of TMA's."""
    HALVES: gl.constexpr = P.halves
    SLICE: gl.constexpr = P.slice
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALVES, ROWS, SLICE], b_stage.dtype)
    return b_stage._reinterpret(b_stage.dtype, [GROUPS, HALVES, ROWS, SLICE], layout).index(GROUP)


@gluon.jit
def contract(ring, step, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """((ROWS, BN) float32 sum over D of a group's rows, the next step), B's stages being (…, BK, BN), or (…, BN, BK)
    if TRANSPOSED."""
    a_ring, b_ring, full, empty = ring
    BN: gl.constexpr = P.block_n
    BK: gl.constexpr = P.block_k
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    acc = gl.zeros((ROWS, BN), gl.float32, layout)
    for k in range(0, P.d, BK):
        stage = step % P.stages
        wait_full(full, step)
        # The gathered rows were written by ordinary copies.
        fence_async_shared()
        if TRANSPOSED:
            b = b_ring.index(stage).reshape([BN, BK]).permute((1, 0))
        else:
            b = b_ring.index(stage).reshape([BK, BN])
        acc = warpgroup_mma(rows_of_group(a_ring.index(stage), GROUP), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if k == 0:
            # The stage before this one is the last slice of the tile before, and may still be on its way out.
            tma.store_wait(0)
        release_before(empty, step, step > 0)
        step += 1
    return warpgroup_mma_wait(0, deps=(acc,)), step


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
    """1 / (1 + exp(-x)) within a few units in the last place, by fewer instructions than tl.sigmoid takes: the
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
    P: gl.constexpr,
):
    """Store one slice of a tile's results: two boxes through the stage, left under way. A box that would reach into the
    rows of the next expert is cut by the descriptor if it is ragged, else the tile is stored from registers."""
    N: gl.constexpr = P.n
    HALVES: gl.constexpr = P.halves
    SLICE: gl.constexpr = P.slice
    dtype: gl.constexpr = narrow.dtype.element_ty
    gate = gate.to(dtype)
    up = up.to(dtype)
    value = value.to(dtype)
    if P.ragged or size >= ROWS:
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
        if P.ragged:
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


def boxes_of_halves(tensor: Tensor, halves: int, options: Options, cut: bool = False) -> TensorDescriptor:
    """Of a matrix (R, HALVES N) as (HALVES, R, N), so that a box ends where a half ends; ragged if `cut`."""
    rows, width = tensor.shape
    n = width // halves
    make = ragged if cut else descriptor
    return make(tensor, (halves, rows, n), (n, width, 1), (halves, ROWS.value, options.slice))


def boxes_of_rows(tensor: Tensor, options: Options, cut: bool = False) -> TensorDescriptor:
    """Of a matrix (R, N); ragged if `cut`."""
    make = ragged if cut else descriptor
    return make(tensor, tensor.shape, (tensor.shape[1], 1), (ROWS.value, options.slice))
