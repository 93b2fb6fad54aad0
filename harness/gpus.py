"""Peak rates of the GPUs that floors are computed for, from the vendors' datasheets (dense, SXM parts)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuRates:
    """Peak dense rates: ``tflops`` of the tensor cores by dtype, ``bytes_per_s`` of device memory, L2 bytes."""

    tflops: dict[str, float]
    bytes_per_s: float


_HOPPER_TFLOPS = {"bfloat16": 989.4, "float16": 989.4, "float32": 66.9}
GPUS: dict[str, GpuRates] = {
    "H200": GpuRates(_HOPPER_TFLOPS, 4.8e12),
    "H100": GpuRates(_HOPPER_TFLOPS, 3.35e12),
}


def rates_of(gpu_name: str) -> GpuRates | None:
    """Rates of a GPU by a part of its name ("NVIDIA H200" contains "H200"); None where no datasheet is recorded."""
    return next((rates for key, rates in GPUS.items() if key in gpu_name), None)
