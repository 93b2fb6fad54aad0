"""The other way to share out the work over gathered rows: two consumers take whole tiles in turn ("ping-pong").

One multiplies while the other is in its epilogue, as in gluon_contiguous.py. Each thread holds twice the rows that it
does in gluon_gathered.py, so a tile has half the columns. The ring holds steps of the contraction alone, tile after
tile, whoever takes them. Epilogues work through *pieces*, slices of ROWS rows, in staging buffers of their own: stages
of the ring could only be had in its order, behind steps of the other consumer's tile.

A stage of the ring belongs to one consumer at a time, which alone frees it. A wait tells one filling of a stage from
the next, not from the one after: a consumer that sits out whole tiles knows by its turn that their fillings are over.
Its turn comes when the other has started its tile's last product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from implementations.sonicmoe_triton.gluon_common import GROUPS, wait_empty, wait_full
from implementations.sonicmoe_triton.gluon_gathered import (
    BLOCK_M,
    ROWS,
    copy_rows,
    locate,
    rows_of_tokens,
    tokens_of_rows,
)


@gluon.jit
def make_barriers(COUNT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Barriers of one arrival each. To be called before `make_ring`, which publishes all barriers."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def make_staging(dtype: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """(buffers (HALVES, ROWS, SLICE), buffers (ROWS, SLICE)) of the first consumer, then as many of the second."""
    COUNT: gl.constexpr = GROUPS * P.buffers
    HALVES: gl.constexpr = P.halves
    SLICE: gl.constexpr = P.slice
    wide_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALVES, ROWS, SLICE], dtype)
    narrow_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, SLICE], dtype)
    wide = gl.allocate_shared_memory(dtype, [COUNT, HALVES, ROWS, SLICE], wide_layout)
    narrow = gl.allocate_shared_memory(dtype, [COUNT, ROWS, SLICE], narrow_layout)
    return wide, narrow


@gluon.jit
def produce_in_turn(ring, row_tiles, num_tiles, operands, TRANSPOSED: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """All steps of all the program's tiles: gathered rows of x and boxes of w, a descriptor of (HALVES E, N, D) if
    TRANSPOSED, else of (E, D, N)."""
    a_ring, b_ring, full, empty = ring
    x, w, gather = operands
    stop = gl.load(num_tiles) * P.column_tiles
    expert, first, size = locate(gl.minimum(gl.program_id(0), stop - 1), row_tiles, 0, P)
    tokens = tokens_of_rows(x, gather, first, size, P)
    step = 0
    for tile in range(gl.program_id(0), stop, P.stride):
        column = tile % P.column_tiles * P.columns
        slab = expert * P.halves if TRANSPOSED else expert
        rows = rows_of_tokens(x, tokens, P)
        # Which rows the next tile has is asked for a tile early: its first copies then wait for nothing but a stage.
        expert, first, size = locate(gl.minimum(tile + P.stride, stop - 1), row_tiles, 0, P)
        tokens = tokens_of_rows(x, gather, first, size, P)
        for k in range(0, P.d, P.block_k):
            stage = step % P.stages
            wait_empty(empty, step)
            barrier = full.index(stage)
            mbarrier.expect(barrier, w.block_type.nbytes)
            corner = [slab, column, k] if TRANSPOSED else [slab, k, column]
            tma.async_copy_global_to_shared(w, corner, barrier, b_ring.index(stage))
            copy_rows(a_ring.index(stage), rows, k, barrier, P)
            step += 1


@gluon.jit
def _multiply(ring, step, acc, use_acc, TRANSPOSED: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    # acc + A B of a step; not yet done on return.
    a_ring, b_ring, full, _ = ring
    BN: gl.constexpr = P.block_n
    BK: gl.constexpr = P.block_k
    stage = step % P.stages
    wait_full(full, step)
    # The gathered rows were written by ordinary copies.
    fence_async_shared()
    b = b_ring.index(stage)
    b = b.reshape([BN, BK]).permute((1, 0)) if TRANSPOSED else b.reshape([BK, BN])
    return warpgroup_mma(a_ring.index(stage), b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def contract_in_turn(ring, turns, turn, TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, P: gl.constexpr):  # type: ignore[no-untyped-def]
    """The (BM, BN) float32 sum over D of a consumer's tile number `turn`, once that is its turn; `turns` has a barrier
    for each consumer."""
    _, _, _, empty = ring
    STAGES: gl.constexpr = P.stages
    STEPS: gl.constexpr = P.steps
    BN: gl.constexpr = P.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 16])
    zeros = gl.zeros((BLOCK_M, BN), gl.float32, layout)
    step = (turn * GROUPS + GROUP) * STEPS
    # The first consumer finds its first turn free: the phase before a barrier's first counts as over.
    mbarrier.wait(turns.index(GROUP), (turn & 1) ^ (1 - GROUP))
    acc = _multiply(ring, step, zeros, False, TRANSPOSED, P)
    if STEPS == 1:
        mbarrier.arrive(turns.index(1 - GROUP), count=1)
    acc = warpgroup_mma_wait(1, deps=(acc,))
    for k in range(1, STEPS):
        acc = _multiply(ring, step + k, acc, True, TRANSPOSED, P)
        # Every product of this tile has been started: the tensor cores may take the other consumer's next.
        mbarrier.arrive(turns.index(1 - GROUP), count=1, pred=k == STEPS - 1)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + k - 1) % STAGES), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STEPS - 1) % STAGES), count=1)
    return acc


@gluon.jit
def row_halves(acc):  # type: ignore[no-untyped-def]
    """An accumulator's upper and lower ROWS rows, without moving any."""
    return acc.reshape((GROUPS, ROWS, acc.shape[1])).permute((1, 2, 0)).split()
