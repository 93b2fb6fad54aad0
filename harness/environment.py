"""Where a row was measured: machine, software, commit; and the GPU's clock, power and throttling while it ran."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from harness.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
#: Names the commit where the checkout has no `.git`; a suffix ``-dirty`` marks uncommitted changes.
COMMIT_VARIABLE = "MOEBENCH_COMMIT"

#: Names the GPUs that CUDA shows to a process.
VISIBLE = "CUDA_VISIBLE_DEVICES"

#: Bits of NVML's clock event ("throttle") reasons, in words.
THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "application_clocks",
    0x004: "power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake",
    0x100: "display_clocks",
}
#: Samples under one of these are dropped. The power cap is not among them: it is the card's operating point.
SLOWDOWNS = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"})


def environment(measured_on: str, packages: Iterable[str] = (), initialise_cuda: bool = True) -> dict[str, Any]:
    """The ``environment`` of a row, JSON types only; what cannot be found out is None.

    Keys: ``measured_on``, ``gpu`` (name), ``driver``, ``cuda`` (torch's CUDA version), ``compute_capability``,
    ``sm_count``, ``l2_bytes``, ``gpu_memory_bytes``, ``torch``, ``triton``, ``python``, ``platform``, ``host`` (a short
    hash), ``cpu``, ``cpu_threads``, ``packages`` (distribution -> version or None), ``commit``, ``dirty``; with
    ``cuda`` also ``gpu_index`` (NVML's, as nvidia-smi counts) and ``gpu_uuid``. The caller adds what it saw while
    sampling: ``sm_clock_mhz`` and ``power_w``.

    Args:
        measured_on: ``cuda``, ``cpu`` or ``fake``. CUDA is not touched with the last two.
        packages: distributions whose versions belong in the row.
        initialise_cuda: with False, a process that must stay off CUDA asks NVML for the GPU's name and memory only.

    Raises:
        ValueError: another ``measured_on``.
    """
    if measured_on not in ("cuda", "cpu", "fake"):
        raise ValueError(f"measured_on {measured_on!r}: choose from cuda, cpu, fake")
    commit, dirty = _git_state()
    found: dict[str, Any] = {
        "measured_on": measured_on,
        "gpu": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "compute_capability": None,
        "sm_count": None,
        "l2_bytes": None,
        "gpu_memory_bytes": None,
        "torch": str(torch.__version__),
        "triton": package_version("triton"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "cpu": _cpu_model(),
        "cpu_threads": torch.get_num_threads(),
        "packages": {name: package_version(name) for name in packages},
        "commit": commit,
        "dirty": dirty,
    }
    if measured_on == "cuda":
        found.update({"gpu_index": None, "gpu_uuid": None})
        found.update(_torch_gpu() if initialise_cuda else _nvml_gpu())
        found["driver"] = _driver_version()
    return found


@functools.cache
def package_version(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def _torch_gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # CUDA and NVML may count GPUs in another order; the UUID says which one CUDA took.
    uuid = getattr(properties, "uuid", None)
    monitor = GpuMonitor(None if uuid is None else str(uuid))
    return {
        "gpu_index": monitor.index,
        "gpu_uuid": monitor.uuid,
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "gpu_memory_bytes": properties.total_memory,
    }


def _nvml_gpu() -> dict[str, Any]:
    monitor = GpuMonitor()
    if not monitor.available:
        return {}
    return {
        "gpu": monitor.name,
        "gpu_memory_bytes": monitor.memory_bytes,
        "gpu_index": monitor.index,
        "gpu_uuid": monitor.uuid,
    }


def gpu_name() -> str | None:
    """The first visible GPU's name from NVML, without initialising CUDA; None where NVML or a GPU is missing."""
    return GpuMonitor().name


@functools.cache
def _driver_version() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no NVML: the kernel module's own word, where there is one
        with contextlib.suppress(OSError):
            match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
            if match:
                return match.group(1)
        return None


@functools.cache
def _cpu_model() -> str | None:
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if match:
            return match.group(1).strip()
    return platform.processor() or platform.machine() or None


@functools.cache
def _git_state() -> tuple[str | None, bool | None]:
    """The commit, and whether files beside the results differ from it (a sweep's own rows make nothing dirty)."""
    named = os.environ.get(COMMIT_VARIABLE, "").strip()
    if named:
        if not re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", named):
            raise UserError(f"{COMMIT_VARIABLE}={named!r}: must be a commit's hash, with -dirty behind it if so")
        return named.removesuffix("-dirty"), named.endswith("-dirty")

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Installed below somebody else's checkout (a virtual environment in one, say), the commit would be theirs.
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != ROOT:
        return None, None
    status = git("status", "--porcelain", "--", ".", ":(exclude)results")
    return git("rev-parse", "HEAD"), None if status is None else bool(status)


def visible_devices() -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names, indices and UUIDs, as CUDA reads it: up to the first entry that names nothing.
    None where it is not set, and so hides nothing."""
    given = os.environ.get(VISIBLE)
    if given is None:
        return None
    parts = [part.strip() for part in given.split(",")]
    return list(itertools.takewhile(lambda part: part.isdigit() or part.startswith(("GPU-", "MIG-")), parts))


def _text(answer: bytes | str) -> str:
    """NVML's older bindings answer in bytes."""
    return answer.decode() if isinstance(answer, bytes) else str(answer)


class GpuMonitor:
    """Clock, power, temperature and throttle reasons of one GPU through NVML; initialises no CUDA.

    Without NVML or a GPU it still works: ``available`` is False, ``reason`` says why, and samples hold None.

    Attributes:
        index: NVML's, which is nvidia-smi's.
    """

    def __init__(self, uuid: str | None = None) -> None:
        """
        Args:
            uuid: the GPU's UUID, with or without its ``GPU-`` prefix. Default: the first GPU of
                CUDA_VISIBLE_DEVICES, else the first one.
        """
        self.available = False
        self.reason: str | None = None
        self.name: str | None = None
        self.memory_bytes: int | None = None
        self.index: int | None = None
        self.uuid: str | None = None
        self._handle: Any = None
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            self.reason = "the package nvidia-ml-py is missing; clock and power are not recorded"
            return
        try:
            pynvml.nvmlInit()
            self._handle = self._open(pynvml, uuid)
            self.name = _text(pynvml.nvmlDeviceGetName(self._handle))
        except Exception as error:  # every NVML failure means the same here: nothing to see
            self.reason = f"NVML cannot reach the GPU: {error}"
            self._handle = None
            return
        self._nvml = pynvml
        self.available = True
        memory = self._ask("nvmlDeviceGetMemoryInfo")
        self.memory_bytes = int(memory.total) if memory is not None else None
        self.index = self._ask("nvmlDeviceGetIndex")
        found = self._ask("nvmlDeviceGetUUID")
        self.uuid = None if found is None else _text(found)

    @staticmethod
    def _open(nvml: Any, uuid: str | None) -> Any:
        if uuid is None:
            named = visible_devices()
            if named is not None and not named:
                raise RuntimeError("CUDA_VISIBLE_DEVICES hides every GPU")
            visible = named[0] if named else "0"
            if visible.isdigit():
                return nvml.nvmlDeviceGetHandleByIndex(int(visible))
            uuid = visible
        full = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        try:
            return nvml.nvmlDeviceGetHandleByUUID(full)
        except TypeError:  # older bindings want bytes
            return nvml.nvmlDeviceGetHandleByUUID(full.encode())

    def _ask(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except Exception:  # a GPU need not support every question
            return None

    def sample(self) -> dict[str, Any]:
        """``sm_clock_mhz``, ``power_w``, ``temperature_c`` (None where unknown) and ``throttle_reasons``, the names of
        `THROTTLE_REASONS` that hold now (empty where unknown). Takes well under a millisecond."""
        if not self.available:
            return {"sm_clock_mhz": None, "power_w": None, "temperature_c": None, "throttle_reasons": []}
        power = self._ask("nvmlDeviceGetPowerUsage")
        mask = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:
            mask = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return {
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", getattr(self._nvml, "NVML_CLOCK_SM", 1)),
            "power_w": None if power is None else power / 1000.0,
            "temperature_c": self._ask("nvmlDeviceGetTemperature", getattr(self._nvml, "NVML_TEMPERATURE_GPU", 0)),
            "throttle_reasons": throttle_names(mask),
        }


def throttle_names(mask: int | None) -> list[str]:
    """NVML's bit mask in words; a bit without a name appears as a hexadecimal number."""
    if not mask:
        return []
    names = [name for bit, name in THROTTLE_REASONS.items() if mask & bit]
    unknown = mask & ~sum(THROTTLE_REASONS)
    return [*names, hex(unknown)] if unknown else names


def is_slowdown(sample: dict[str, Any]) -> bool:
    """Whether a sample of `GpuMonitor` saw a thermal or hardware slowdown (the power cap is none)."""
    return not SLOWDOWNS.isdisjoint(sample.get("throttle_reasons") or ())
