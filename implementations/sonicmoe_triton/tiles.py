"""Which tile each grouped GEMM uses, over how many programs, and what all six demand of their tensors.

Each kernel has one, narrowed to the widths at hand. NOTES.md says what they rest on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implementations.sonicmoe_triton import launching
from implementations.sonicmoe_triton.launching import next_power_of_2

UP_PROJECTION = "up_projection"
DOWN_PROJECTION = "down_projection"
INPUT_GRADIENT = "input_gradient"
HIDDEN_GRADIENT = "hidden_gradient"
UP_WEIGHT_GRADIENT = "up_weight_gradient"
DOWN_WEIGHT_GRADIENT = "down_weight_gradient"
#: No GEMM and without a tile here; `tuned` has entries for it too.
AGGREGATION = "aggregation"

#: Shared memory that one program may use on Hopper, bytes.
SHARED_MEMORY = 227 * 1024


@dataclass(frozen=True)
class Tile:
    """How one launch is cut up.

    Attributes:
        block_m, block_n: rows and columns of the output that a program computes at a time. For the up-projection of a
            gated activation block_n counts gate and up columns together.
        block_k: length of one step of the contraction.
        warps, stages: warps of a program; steps of the contraction in flight at once.
        flatten: fuse the loop over tiles with the loop over steps, so that a tile's first loads overlap the stores of
            the tile before it. The weight gradients, whose contraction is as long as an expert's rows, ignore it.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    flatten: bool = False


_WIDE = Tile(128, 256, 64, warps=8, stages=4)
_WIDE_FLATTENED = Tile(128, 256, 64, warps=8, stages=3, flatten=True)

#: Choices for 2-byte dtypes.
_DEFAULT = {
    UP_PROJECTION: _WIDE,
    DOWN_PROJECTION: _WIDE_FLATTENED,
    INPUT_GRADIENT: _WIDE_FLATTENED,
    # One wide tile gathers the rows of dO once; flattened, its epilogue and the next tile's loads lose to each other.
    HIDDEN_GRADIENT: _WIDE,
    # Deep pipelines of narrow steps hide the row index that each gathered load waits for. Of the two sides the narrow
    # one is gathered: its loads take an instruction for every 16 bytes, TMA's one for a whole box.
    UP_WEIGHT_GRADIENT: Tile(256, 128, 32, warps=8, stages=7),
    DOWN_WEIGHT_GRADIENT: Tile(128, 256, 32, warps=8, stages=7),
}


def choose(kernel: str, d: int, n: int, element_size: int, block_m: int = 128, halves: int = 1) -> Tile:
    """The tile for a kernel of this module's names.

    Args:
        d, n: widths of an embedding and of an expert's hidden units (for the kernels that see only H and not its
            halves, INPUT_GRADIENT and UP_WEIGHT_GRADIENT: H's width).
        element_size: bytes of one element: 2, or 4 for float32 (which has no fast path here: exact, on plain cores).
        block_m: the M tile that the routing was made for; the weight gradients do not depend on it.
        halves: 2 for the up-projection of a gated activation, whose tile holds gate and up columns, else 1.

    Raises:
        KeyError: unknown kernel.
    """
    tile = _DEFAULT[kernel]
    rows, columns, steps = {
        UP_PROJECTION: (None, halves * n, d),
        DOWN_PROJECTION: (None, d, n),
        INPUT_GRADIENT: (None, d, n),
        HIDDEN_GRADIENT: (None, n, d),
        UP_WEIGHT_GRADIENT: (n, d, None),
        DOWN_WEIGHT_GRADIENT: (d, n, None),
    }[kernel]
    block_m = tile.block_m if rows is not None else block_m
    block_n, block_k, stages, warps = tile.block_n, tile.block_k, tile.stages, tile.warps
    if element_size == 4:
        block_m, block_n, block_k, stages = min(block_m, 128), min(block_n, 64), 16, 2
    if rows is not None:
        block_m = min(block_m, _power_of_two(rows, 64))
    block_n = min(block_n, _power_of_two(columns, 32))
    if steps is not None:
        block_k = min(block_k, _power_of_two(steps, 16))
    if block_m < 128 and block_n <= 128:
        warps = 4
    return Tile(block_m, block_n, block_k, warps, stages, tile.flatten and element_size == 2)


def _power_of_two(width: int, least: int) -> int:
    return max(least, next_power_of_2(width))


def programs(tiles: int, device: torch.device) -> tuple[int, int]:
    """(grid, stride) of a persistent launch over at most ``tiles`` tiles, one program for each multiprocessor.

    Program i works through the tiles i, i + stride, …. The stride depends on the device alone, so that it can be a
    compile-time constant without a new compilation for every number of rows."""
    stride = multiprocessors(device)
    return min(stride, tiles), stride


def launch(kernel: Any, tile: Tile, tiles: int, args: Sequence[Any], like: Tensor, **constants: Any) -> None:
    """Launch one of the six plain kernels, persistent, over at most ``tiles`` tiles.

    Args:
        args: all that are no constexprs.
        like: a tensor of the operands' dtype and device.
        constants: the constexprs, but for those that all six kernels have."""
    grid, stride = programs(tiles, like.device)
    constants |= {
        "PRECISION": precision(like.dtype),
        "BM": tile.block_m,
        "BN": tile.block_n,
        "BK": tile.block_k,
        "PROGRAMS": stride,
    }
    launching.launch(kernel, (grid,), args, constants, {"num_warps": tile.warps, "num_stages": tile.stages})


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU: how many programs of one to a multiprocessor run at once."""
    # In the interpreter: few enough that a program meets several tiles.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def check_block_m(tile: Tile, block_m: int) -> None:
    """Raises ValueError where a tile's rows are not those that the routing was made for."""
    if tile.block_m != block_m:
        raise ValueError(f"the tile has block_m = {tile.block_m}, the routing was made for {block_m}")


def check_width(name: str, width: int, dtype: torch.dtype) -> None:
    """Raises ValueError where a row of `width` elements is not a positive multiple of 16 bytes, as TMA wants."""
    if width < 1 or width * dtype.itemsize % 16:
        multiple = 16 // dtype.itemsize
        raise ValueError(f"{name} = {width}: must be a multiple of {multiple} in {dtype} (rows of 16 bytes)")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError where a tensor is not of this shape, dtype and device."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, expected {shape} {dtype} on {device}"
        )


def dense(tensor: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes: the tensor itself wherever it is both already."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def precision(dtype: torch.dtype) -> str:
    """``input_precision`` of `tl.dot`: float32 products are exact (tensor cores would round inputs to TF32)."""
    return "ieee" if dtype == torch.float32 else "tf32"
