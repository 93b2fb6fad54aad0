"""The grouped GEMMs of `contiguous_gemm` written for Hopper: warps with roles of their own, in Gluon.

    Y[r] = A[r] W2[e]^T (+ bias2[e])       (R, d)    down-projection, contraction over n
    dX~[r] = dH[r] W1[e]                    (R, d)    input gradient, contraction over 2n

One warp loads, two groups of four warps multiply and store (roles and ring: gluon_common.py):

    producer   for each step of the contraction: wait until its stage of the ring is empty, fetch A's and B's boxes into
               it by TMA. It runs ahead into the next tiles while those before are still being multiplied and stored.
    consumer   for each step: wait until its stage is full, multiply by wgmma with one product in flight, hand the stage
               of the product before back. After a tile: round it, slice by slice, into a staging buffer that TMA
               stores from.

The two consumers take whole tiles in turn ("ping-pong"): one multiplies while the other stores. Nothing depends on who
is faster: every element is summed by one thread, in the order of the contraction.

Operands come by TMA, whose boxes are filled with zeros where they overhang: each expert's weights are their own slab of
a 3-D descriptor, so an overhanging box never reaches the next expert. Rows past an expert's end are computed from
whatever lies there and are not stored: Y's descriptor is ragged.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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
    locate_tile,
    publish_barriers,
    ragged,
    wait_empty,
    wait_full,
)
from implementations.sonicmoe_triton.launching import Launcher, cdiv, next_power_of_2
from implementations.sonicmoe_triton.metadata import Routing
from implementations.sonicmoe_triton.operands import RouterTerm, check_down_projection, check_input_gradient

#: Warps of the producer: one thread's work.
PRODUCER_WARPS = gl.constexpr(1)
#: Registers of a consumer's thread and of the producer's, from `ENTRY_REGISTERS` (nine warps count as twelve).
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@dataclass(frozen=True)
class Options:
    """How one launch is cut up.

    Attributes:
        block_n: columns of an output tile. Its rows are the routing's block_m.
        block_k: length of one step of the contraction.
        stages: of the ring: steps that may be loaded and not yet multiplied.
        slices: pieces of columns that a tile leaves in.
        buffers: staging buffers of a consumer, each one slice.
        by_expert: the order of tiles: for each expert each tile of columns, and for that all the expert's rows. Without
            it: for each tile of rows all tiles of columns.
    """

    block_n: int = 128
    block_k: int = 64
    stages: int = 6
    slices: int = 2
    buffers: int = 1
    by_expert: bool = False

    def __post_init__(self) -> None:
        # A stage is handed back when the product of the next one has been started.
        if self.stages < 2:
            raise ValueError(f"{self}: the ring must have two stages")
        if self.slices & (self.slices - 1) or self.slices % self.buffers:
            raise ValueError(f"{self}: slices are a power of two and go round the buffers a whole number of times")


class Plan(NamedTuple):
    """Everything that a kernel is compiled for, besides its operands' types. (A tuple, not a dataclass: Triton writes
    constants out as JSON for whoever listens to its compilations.)

    Attributes:
        columns, k: columns of the output; length of the contraction.
        b_transposed: B is (E, columns, k) and not (E, k, columns).
        addend: what is added to row r of expert e: "", "bias" (vectors[e]) or "router" (row_weights[r] * vectors[e]).
        block_m: rows of a tile.
        stride: programs of a launch: program i works through the tiles i, i + stride, …
        block_n, block_k, stages, slices, buffers, by_expert: see `Options`.
    """

    columns: int
    k: int
    b_transposed: bool
    addend: str
    block_m: int
    stride: int
    block_n: int
    block_k: int
    stages: int
    slices: int
    buffers: int
    by_expert: bool

    @property
    def column_tiles(self) -> int:
        return -(-self.columns // self.block_n)

    @property
    def steps(self) -> int:
        """Steps of the contraction for one tile."""
        return -(-self.k // self.block_k)


def make_plan(
    columns: int, k: int, b_transposed: bool, addend: str, block_m: int, stride: int, options: Options
) -> Plan:
    """Raises ValueError where the options do not fit block_m, a thread's registers or shared memory."""
    o = options
    if block_m % 64 or block_m * o.block_n > 128 * 128 or o.block_n > 256:
        raise ValueError(f"{CONSUMER_WARPS} warps cannot hold {block_m} rows of {o.block_n} columns")
    ring = o.stages * (block_m + o.block_n) * o.block_k
    staging = GROUPS.value * o.buffers * block_m * o.block_n // o.slices
    used = 2 * (ring + staging) + 16 * (o.stages + 1)
    if used > tiles.SHARED_MEMORY:
        raise ValueError(f"{o}: {used} bytes do not fit into shared memory")
    return Plan(columns, k, b_transposed, addend, block_m, stride, *astuple(o))


@gluon.jit
def _place(tile, row_tiles, P: gl.constexpr):  # type: ignore[no-untyped-def]
    # (expert, first row, end of the expert's rows, first column) of an output tile.
    expert, first, end, column_tile = locate_tile(tile, row_tiles, P.column_tiles, P.block_m, P.by_expert)
    return expert, first, end, column_tile * P.block_n


@gluon.jit
def _produce(a, b, ring, row_tiles, used, P: gl.constexpr):  # type: ignore[no-untyped-def]
    # `used`: the tiles of rows. A box that overhangs still counts with all its bytes.
    a_ring, b_ring, full, empty = ring
    BK: gl.constexpr = P.block_k
    stop = used * P.column_tiles
    place = _place(gl.minimum(gl.program_id(0), stop - 1), row_tiles, P)
    step = 0
    for tile in range(gl.program_id(0), stop, P.stride):
        expert, first, _, column = place
        # Where the next tile lies is asked for a tile early: its first load then waits for nothing but its stage.
        place = _place(gl.minimum(tile + P.stride, stop - 1), row_tiles, P)
        for k in range(P.steps):
            stage = step % P.stages
            barrier = full.index(stage)
            wait_empty(empty, step)
            mbarrier.expect(barrier, a.block_type.nbytes + b.block_type.nbytes)
            tma.async_copy_global_to_shared(a, [first, k * BK], barrier, a_ring.index(stage))
            corner = [expert, column, k * BK] if P.b_transposed else [expert, k * BK, column]
            tma.async_copy_global_to_shared(b, corner, barrier, b_ring.index(stage))
            step += 1


@gluon.jit
def _multiply(ring, step, acc, use_acc, P: gl.constexpr):  # type: ignore[no-untyped-def]
    # acc + A B of a step; not yet done on return.
    a_ring, b_ring, full, _ = ring
    stage = step % P.stages
    wait_full(full, step)
    b = b_ring.index(stage)
    b = b.reshape([b.shape[1], b.shape[2]])
    if P.b_transposed:
        b = b.permute([1, 0])
    return warpgroup_mma(a_ring.index(stage), b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _store_tile(y, vectors, weights, staging, acc, expert, first, end, column, GROUP: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    # acc (ROWS, BN) + the addend -> rows first, first + 1, … of y before `end`. Its last stores are still under way.
    SLICES: gl.constexpr = P.slices
    BUFFERS: gl.constexpr = P.buffers
    ROWS: gl.constexpr = P.block_m
    WIDTH: gl.constexpr = P.block_n // SLICES
    pieces = column_slices(acc, WIDTH)
    for i in gl.static_range(SLICES):
        piece = pieces[i]
        if P.addend != "":
            columns = column + i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, piece.type.layout))
            values = gl.load(vectors + expert.to(gl.int64) * P.columns + columns, mask=columns < P.columns, other=0.0)
            values = values.to(gl.float32)[None, :]
            if P.addend == "router":
                own = gl.convert_layout(weights, gl.SliceLayout(1, piece.type.layout), assert_trivial=True)
                piece += own[:, None] * values
            else:
                piece += values
        buffer = staging.index(GROUP * BUFFERS + i % BUFFERS)
        # The buffer is free once all stores but the last BUFFERS - 1 have read theirs.
        tma.store_wait(BUFFERS - 1)
        buffer.reshape([ROWS, WIDTH]).store(piece.to(y.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [FAR, end, FAR - end + first, column + i * WIDTH], buffer)


@gluon.jit
def _consume(y, addends, ring, staging, turns, row_tiles, used, GROUP: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    # Every second of the program's tiles.
    _, _, _, empty = ring
    vectors, row_weights = addends
    STAGES: gl.constexpr = P.stages
    STEPS: gl.constexpr = P.steps
    BM: gl.constexpr = P.block_m
    BN: gl.constexpr = P.block_n
    STRIDE: gl.constexpr = GROUPS * P.stride
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    zeros = gl.zeros([BM, BN], gl.float32, LAYOUT)
    rows = gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
    start = gl.program_id(0) + GROUP * P.stride
    stop = used * P.column_tiles
    place = _place(gl.minimum(start, stop - 1), row_tiles, P)
    for tile in range(start, stop, STRIDE):
        turn = (tile - start) // STRIDE
        expert, first, end, column = place
        step = (turn * GROUPS + GROUP) * STEPS
        if P.addend == "router":
            weights = gl.load(row_weights + first + rows, mask=first + rows < end, other=0.0)
        else:
            weights = first
        # The first group finds its first turn free: the phase before a barrier's first counts as over.
        mbarrier.wait(turns.index(GROUP), (turn & 1) ^ (1 - GROUP))
        acc = _multiply(ring, step, zeros, False, P)
        if STEPS == 1:
            mbarrier.arrive(turns.index(1 - GROUP))
        # Loads of which one waits for the other: behind the first product.
        place = _place(gl.minimum(tile + STRIDE, stop - 1), row_tiles, P)
        acc = warpgroup_mma_wait(1, deps=[acc])
        for k in range(1, STEPS):
            acc = _multiply(ring, step + k, acc, True, P)
            # Every product of this tile has been started: the tensor cores may take the other group's next.
            mbarrier.arrive(turns.index(1 - GROUP), pred=k == STEPS - 1)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((step + k - 1) % STAGES))
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STEPS - 1) % STAGES))
        _store_tile(y, vectors, weights, staging, acc, expert, first, end, column, GROUP, P)
    tma.store_wait(0)


def _name(specialization: Any) -> str:
    """Of a compiled kernel: profilers tell the two GEMMs apart by it."""
    gemm = "down_projection" if specialization.constants["P"].b_transposed else "input_gradient"
    return f"gluon_{gemm}_kernel"


@gluon.jit(repr=_name)
def contiguous_kernel(  # type: ignore[no-untyped-def]
    a,  # descriptor of (R, k), box (block_m, block_k)
    b,  # descriptor of (E, columns, k), box (1, block_n, block_k), or of (E, k, columns), box (1, block_k, block_n)
    y,  # ragged descriptor of (R, columns), box (block_m, block_n // slices)
    vectors,  # (E, columns) and (R,) float32, read as the plan's addend says
    row_weights,
    tile_expert,
    tile_row,
    expert_offsets,
    num_tiles,
    P: gl.constexpr,
):
    STAGES: gl.constexpr = P.stages
    BUFFERS: gl.constexpr = GROUPS * P.buffers
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)  # noqa: RUF005
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    staging = gl.allocate_shared_memory(y.dtype, [BUFFERS] + y.block_type.shape, y.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # A wait tells one filling of a stage from the next, not from the one after: a group that sits out whole tiles must
    # know by its turn that their fillings are over.
    turns = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    for group in gl.static_range(GROUPS):
        mbarrier.init(turns.index(group), count=1)
    publish_barriers()

    ring = (a_ring, b_ring, full, empty)
    row_tiles = (tile_expert, tile_row, expert_offsets)
    used = gl.load(num_tiles)
    gl.warp_specialize(
        [
            (_consume, (y, (vectors, row_weights), ring, staging, turns, row_tiles, used, 0, P)),
            (_consume, (y, (vectors, row_weights), ring, staging, turns, row_tiles, used, 1, P)),
            (_produce, (a, b, ring, row_tiles, used, P)),
        ],
        [gl.num_warps(), PRODUCER_WARPS],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


#: Bytes of an expert's weights from which on its tiles are not taken row by row: together with what else is read, they
#: no longer stay in the part of L2 (60 MB, in two halves) that a multiprocessor is near to.
LARGE_EXPERT = 10 << 20


def by_expert(columns: int, k: int, rows: int) -> bool:
    """Whether experts with so many rows each, on average, are better taken column by column.

    Row by row it is the weights that are read again and again, column by column an expert's rows: while these are the
    fewer, and only where the weights do not stay in L2 anyway."""
    return 2 * columns * k >= LARGE_EXPERT and rows <= columns


@functools.cache
def choose(columns: int, k: int, ordered_by_expert: bool = False) -> Options:
    """The options for an output of so many columns and a contraction of length k; see `by_expert`."""
    default = Options()
    block_n = min(default.block_n, max(64, next_power_of_2(columns)))
    block_k = min(default.block_k, max(16, next_power_of_2(k)))
    slices = block_n // 64
    return replace(default, block_n=block_n, block_k=block_k, slices=slices, by_expert=ordered_by_expert)


def _run(
    a: Tensor,
    b: Tensor,
    b_transposed: bool,
    bias: Tensor | None,
    router_term: RouterTerm | None,
    y: Tensor,
    routing: Routing,
    options: Options | None,
) -> None:
    """y (R, columns) from a (R, k) and b (E, columns, k), if b_transposed, or (E, k, columns)."""
    columns, k = y.shape[1], a.shape[1]
    block_m = routing.block_m
    options = options or choose(columns, k, by_expert(columns, k, routing.rows // b.shape[0]))
    tile_count = routing.max_tiles * cdiv(columns, options.block_n)
    grid, stride = tiles.programs(tile_count, a.device)
    a, b = tiles.dense(a), tiles.dense(b)
    addend, vectors, row_weights = "", y, y
    if bias is not None:
        addend, vectors = "bias", tiles.dense(bias)
    elif router_term is not None:
        addend, (row_weights, vectors) = "router", map(tiles.dense, router_term)
    b_box = (1, options.block_n, options.block_k) if b_transposed else (1, options.block_k, options.block_n)
    _launcher(columns, k, b_transposed, addend, block_m, stride, options)(
        (grid,),
        (
            descriptor(a, a.shape, (k, 1), (block_m, options.block_k)),
            descriptor(b, b.shape, (columns * k, b.shape[2], 1), b_box),
            ragged(y, y.shape, (columns, 1), (block_m, options.block_n // options.slices)),
            vectors,
            row_weights,
            *routing.row_tiles,
        ),
    )


@functools.cache
def _launcher(*plan: Any) -> Launcher:
    return Launcher(contiguous_kernel, {"P": make_plan(*plan)}, num_warps=CONSUMER_WARPS, maxnreg=ENTRY_REGISTERS)


def down_projection(
    a: Tensor, w2: Tensor, routing: Routing, bias2: Tensor | None = None, options: Options | None = None
) -> Tensor:
    """y (R, d) of a (R, n), w2 (E, d, n) and bias2 (E, d) or None, in a's dtype.

    Raises:
        ValueError: a is neither bfloat16 nor float16; d or n is no multiple of 16 bytes; a tensor's shape, dtype or
            device does not fit the others; the options do not fit the routing's block_m or shared memory.
    """
    check_dtype(a.dtype)
    d, _ = check_down_projection(a, w2, routing, bias2)
    rows = routing.rows
    y = torch.empty(rows, d, dtype=a.dtype, device=a.device)
    if rows:
        _run(a, w2, True, bias2, None, y, routing, options)
    return y


def input_gradient(
    grad_h: Tensor, w1: Tensor, routing: Routing, router_term: RouterTerm | None = None, options: Options | None = None
) -> Tensor:
    """The gradient of each routed row (R, d) of grad_h (R, 2n) and w1 (E, 2n, d), in grad_h's dtype.

    With an ungated activation: grad_h (R, n), w1 (E, n, d). ``router_term``: added before the result is rounded.

    Raises:
        ValueError: grad_h is neither bfloat16 nor float16; d or H's width is no multiple of 16 bytes; a tensor's shape,
            dtype or device does not fit the others; the options do not fit the routing's block_m or shared memory.
    """
    check_dtype(grad_h.dtype)
    d, _ = check_input_gradient(grad_h, w1, routing, router_term)
    rows = routing.rows
    grad_rows = torch.empty(rows, d, dtype=grad_h.dtype, device=grad_h.device)
    if rows:
        _run(grad_h, w1, False, None, router_term, grad_rows, routing, options)
    return grad_rows
