"""Ablations: SwiGLU out of the up-projection's epilogue, and the whole epilogue out of dH's. Both GEMMs still gather
while loading; they are the fused kernels up to the epilogue, with the same tiles and not tuned anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from implementations._ablation import Ablation

_GRADIENT = "dA' is written in the operands' dtype by a GEMM that gathers dO while loading"


class AblationActivation(Ablation):
    """SwiGLU in a kernel of its own; dS, A' and dSwiGLU in a kernel each."""

    name = "ablation_activation"
    label = "ours, activation apart"
    differences: ClassVar[Mapping[str, str]] = {
        "grouped_gemm_gather_m": (
            "H is written by a GEMM that gathers X while loading; a second kernel reads it back and writes A, from "
            "rounded H where the fused kernel takes it unrounded"
        ),
        "hidden_gradient": f"{_GRADIENT}; dS, A' and dSwiGLU are a kernel each",
    }
    operations = tuple(differences)


class AblationEpilogue(Ablation):
    """dS, A' and dSwiGLU in one kernel, apart from the GEMM."""

    name = "ablation_epilogue"
    label = "ours, epilogue in one kernel"
    differences: ClassVar[Mapping[str, str]] = {
        "hidden_gradient": f"{_GRADIENT}; dS, A' and dSwiGLU are one kernel, which reads dA' and H once",
    }
    operations = tuple(differences)
