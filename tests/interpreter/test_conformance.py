"""Our kernels on the interpreter meet the conformance suite's cases, scaled down."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.conformance import CASES, Case
from harness.conformance.measure import meet
from harness.measure import Context
from harness.shapes import MoEShape
from implementations.sonicmoe_triton import SonicMoETriton

#: What says nothing of kernels on an interpreter, and why.
LEFT_OUT = {
    "two-shapes": "nothing is compiled",
    "float32": "the interpreter's usual dtype",
}
MET = [case for case in CASES if not case.cuda_only and case.name not in LEFT_OUT]


def small(case: Case) -> Case:
    """The case with widths of a few blocks, few tokens and few experts, ragged where it was; counts in proportion; in
    float16 where it was in the other 2-byte dtype, which an interpreter gets wrong."""
    shape = MoEShape.parse(case.shape)

    def width(size: int, most: int) -> int:
        return size if size <= most else most + (size % 8 or 8 if size % 64 else 0)

    experts = shape.E if shape.K > 4 or case.counts or shape.E in (10, 12) else min(shape.E, 4)
    counts = tuple(-(-count // max(shape.T // 32, 1)) for count in case.counts)
    tokens = sum(counts) // shape.K if counts else min(shape.T, 4 if shape.K > 8 else 12)
    d, n = width(shape.d, 32), width(shape.n, 16)
    scaled = f"{tokens},{d},{n},{experts},{shape.K}"
    dtype = "float16" if case.dtype == "bfloat16" else case.dtype
    return replace(case, shape=scaled, cpu_shape=scaled, counts=counts, dtype=dtype)


# An infinity less itself, in a lane's maximum: a GPU says nothing, numpy warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("case", MET, ids=lambda case: case.name)
def test_the_kernels_meet(case: Case) -> None:
    case = small(case)
    point = case.point(SonicMoETriton.name, ("float32",), "cpu")
    assert SonicMoETriton().restriction(point) is None
    verdict, _, _ = meet(case, point, SonicMoETriton(), Context(lambda phase: None))
    assert verdict.status == "ok", verdict.reason
