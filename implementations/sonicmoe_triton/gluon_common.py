"""What all kernels for Hopper in Gluon have in common: roles, the ring between them, TMA's rules and its descriptors.

A *producer* (a few warps with few registers) loads, two *consumers* (`GROUPS`, four warps each) multiply and store. A
ring of stages in shared memory lies between them, each of which holds one step of a contraction. Both count steps from
the program's start: step i uses stage i % STAGES for the (i // STAGES)-th time. Each stage has two barriers: `full`,
for which consumers wait, and `empty`, for which the producer does. A wait returns once the phase of its parity is over,
and the phase before a barrier's first counts as over. Parities tell a phase from the next, not from the one after: a
kernel sees to it that nobody waits two phases ahead.

Three rules, wherever shared memory is used by TMA and by ordinary instructions:

- TMA and the tensor cores see what ordinary instructions wrote (staged results, rows copied by cp.async, barriers just
  initialised) only behind `fence_async_shared`.
- `tma.store_wait` holds up only the thread that issued the stores. All others must wait for that thread before they
  overwrite what was stored or hand it back: the compiler puts a barrier of the partition's threads behind every
  store_wait (the tests look for it), so no kernel has one of its own.
- Shared memory must outlive the stores that read it: a consumer's last act is `tma.store_wait(0)`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

#: Gluon's names of the dtypes that these kernels multiply.
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
#: Consumers, and the warps of each.
GROUPS = gl.constexpr(2)
CONSUMER_WARPS = 4
#: Registers of a thread at the start: as many as three times four warps can have.
ENTRY_REGISTERS = 168
#: Rows that a ragged descriptor claims (`ragged`).
FAR = gl.constexpr(2**30)
#: Of its two dimensions that only shift boxes.
_EXTENT = 0x7FFF0000


@gluon.jit
def publish_barriers():  # type: ignore[no-untyped-def]
    """Once all barriers are initialised: TMA completes on them, and they were written by ordinary stores."""
    fence_async_shared()


@gluon.jit
def locate_tile(tile, row_tiles, COLUMN_TILES: gl.constexpr, BM: gl.constexpr, BY_EXPERT: gl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, first row, end of the expert's rows, tile of columns) of an output tile.

    Row by row: for each tile of rows all tiles of columns. BY_EXPERT: for each expert each tile of columns, and for
    that all the expert's rows."""
    tile_expert, tile_row, expert_offsets = row_tiles
    row_tile = tile // COLUMN_TILES
    column_tile = tile % COLUMN_TILES
    expert = gl.load(tile_expert + row_tile)
    first = gl.load(tile_row + row_tile)
    end = gl.load(expert_offsets + expert + 1)
    if BY_EXPERT:
        # The expert's output tiles are the same in either order: their own indices only mean something else.
        begin = gl.load(expert_offsets + expert)
        own_row_tiles = (end - begin + BM - 1) // BM
        own = (first - begin) // BM * COLUMN_TILES + column_tile
        column_tile = own // own_row_tiles
        first = begin + own % own_row_tiles * BM
    return expert, first, end, column_tile


@gluon.jit
def wait_full(full, step):  # type: ignore[no-untyped-def]
    """A consumer's wait for what the step brings."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)


@gluon.jit
def wait_empty(empty, step):  # type: ignore[no-untyped-def]
    """The producer's wait until the step's stage may be overwritten."""
    STAGES: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)


@gluon.jit
def release_before(empty, step, pred):  # type: ignore[no-untyped-def]
    """Where `pred` holds, a consumer frees the stage of the step before this one."""
    STAGES: gl.constexpr = empty.shape[0]
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=pred)


@gluon.jit
def column_slices(x, WIDTH: gl.constexpr):  # type: ignore[no-untyped-def]
    """An accumulator's columns as a tuple of neighbouring slices of WIDTH, from left to right, without moving any."""
    if x.shape[1] == WIDTH:
        return (x,)
    else:
        left, right = x.reshape((x.shape[0], 2, x.shape[1] // 2)).permute((0, 2, 1)).split()
        return column_slices(left, WIDTH) + column_slices(right, WIDTH)


@functools.cache
def _box(box: tuple[int, ...], dtype: torch.dtype) -> tuple[list[int], gl.NVMMASharedLayout]:
    sides = list(box)
    return sides, gl.NVMMASharedLayout.get_default_for(sides, ELEMENTS[dtype])


def descriptor(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], box: tuple[int, ...]) -> TensorDescriptor:
    """TMA's view of a tensor, seen as `shape` and `strides`, in boxes."""
    return TensorDescriptor(tensor, shape, strides, *_box(box, tensor.dtype))


def ragged(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], box: tuple[int, ...]) -> TensorDescriptor:
    """Like `descriptor`, but boxes end at any row that the kernel names: at the end of an expert's rows. Rows from
    there on are loaded as zeros and not stored. `shape` and `strides` are those of (…, rows, columns).

    TMA cuts boxes off at the ends of a tensor only. So the rows claim to end, for every expert, at the same index
    M = FAR, and two dimensions before all others shift that to where the expert's rows end. The box at `first`, …,
    `column` of an expert whose rows end at `end` has the coordinates (M, end, …, M - end + first, column): with rows of
    s elements and the strides 2^34 - s and s in front, its first element is

        M (2^34 - s) + end s + (M - end + first) s + column = first s + column + M 2^34,

    whose last summand vanishes in 64-bit byte addresses. `triton.tools.ragged_tma` does the same.
    """
    row = strides[-2]
    far = (_EXTENT, _EXTENT, *shape[:-2], FAR.value, shape[-1])
    return descriptor(tensor, far, (2**34 - row, row, *strides), (1, 1, *box))


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError for a dtype that these kernels do not multiply."""
    if dtype not in ELEMENTS:
        raise ValueError(f"{dtype}: the kernels for Hopper take {' and '.join(map(str, ELEMENTS))}")
