"""Programmatic dependent launch: a kernel's programs come up while the kernel before it is still at its last tiles.

A launch with the option ``launch_pdl`` need not wait for its predecessor to end. Its kernel then must, by itself, before
it touches global memory: `await_operands` does so, and lets the successor come up in turn. Every program of a kernel
waits, so that "the predecessor is over" holds for all before it too. A kernel that waits may be launched either way; a
launch with ``launch_pdl`` of one that does not wait would read what is not there yet.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def await_operands():  # type: ignore[no-untyped-def]
    """To be called before the first access to global memory. Nothing before Hopper and in the interpreter."""
    if _COMPILED:
        if cuda_capability_geq(9):
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
