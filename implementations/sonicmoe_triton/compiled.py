"""What the layer's kernels compile to for Hopper (sm_90), read without a GPU, and the committed table of it:

    python -m implementations.sonicmoe_triton.compiled             # compare; exit code 1 where something changed
    python -m implementations.sonicmoe_triton.compiled --update    # after a change that was meant

A slower kernel often shows before anybody has timed it: registers that spill, a copy by TMA that became one by threads,
a tensor-core instruction that is gone. The layer runs, forward and backward, on tensors without data and under a driver
that compiles whatever a launch would, for widths and routings at which it is measured, and launches nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import triton
import typer
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from harness.shapes import MoEShape

TABLE = Path(__file__).parent / "compiled.json"
#: What an H200 has of them; kernels are compiled for it.
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Facts:
    """What a compiled kernel says of itself.

    Attributes:
        registers, stack: of a thread; bytes of stack are registers that spilled.
        shared: bytes of a program.
        wgmma: instructions that multiply on the tensor cores.
        tma_loads, tma_stores: copies of boxes between global and shared memory.
        cp_async: asynchronous copies by threads, of gathered rows.
    """

    registers: int
    stack: int
    shared: int
    wgmma: int
    tma_loads: int
    tma_stores: int
    cp_async: int


#: case -> kernel -> its facts.
Found = dict[str, dict[str, Facts]]


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread, as the tool inside Triton reads them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run([str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump does not tell registers and stack: {text}")
    return int(found[1]), int(found[2])


def facts_of(compiled: CompiledKernel) -> Facts:
    registers, stack = resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Facts(
        registers=registers,
        stack=stack,
        shared=compiled.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        tma_loads=len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)),
        tma_stores=len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global", ptx)),
        cp_async=len(re.findall(r"cp\.async\.c[ag]\.", ptx)),
    )


class _Driver:
    """Compiles for Hopper and launches nothing."""

    def __init__(self) -> None:
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *arguments: None

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1  # what `Tensor.get_device` says of a tensor without data

    def get_current_stream(self, device: int) -> int:
        return 0

    def load_binary(self, *_: object) -> tuple[int, ...]:
        return 0, 0, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        from implementations.sonicmoe_triton.tiles import SHARED_MEMORY

        return {"max_shared_mem": SHARED_MEMORY}


@contextmanager
def _compiling(seen: list[CompiledKernel]) -> Iterator[None]:
    """As on a Hopper GPU, but that nothing is launched; each kernel that a launch asks Triton for is added to
    ``seen``."""
    from implementations.sonicmoe_triton import function, kernels, launching, rounding, tiles

    ask = JITFunction.run

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        compiled = ask(self, *arguments, **options)
        seen.append(compiled)
        return compiled

    places: list[tuple[Any, str, Any]] = [
        (triton.runtime.driver, "_active", _Driver()),
        (JITFunction, "run", noted),
        (launching, "bind_context", lambda device: None),
        (kernels, "on_hopper", lambda tensor: tensor.dtype in (torch.bfloat16, torch.float16)),
        (tiles, "multiprocessors", lambda device: MULTIPROCESSORS),
        # Tensors without data would else go the way of a trace.
        (function, "is_plain", lambda *tensors: True),
        (rounding, "is_plain", lambda *tensors: True),
    ]
    patches = [mock.patch.object(*place) for place in places]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _layer(shape: str, run: Callable[..., Tensor], dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    """A forward and a backward of ``run``(x, w1, w2, router, k)."""

    def both_passes() -> None:
        size = MoEShape.parse(shape)
        sizes = (size.T, size.d), (size.E, 2 * size.n, size.d), (size.E, size.d, size.n), (size.E, size.d)
        leaves = [torch.empty(its, dtype=dtype, device="meta", requires_grad=True) for its in sizes]
        out = run(*leaves, size.K)
        torch.autograd.grad(out, leaves, torch.empty_like(out))

    return both_passes


def _top_k(x: Tensor, w1: Tensor, w2: Tensor, router: Tensor, k: int) -> Tensor:
    from implementations.sonicmoe_triton.function import moe_layer

    return moe_layer(x, w1, w2, router, k)


def _softmax_over_all(x: Tensor, w1: Tensor, w2: Tensor, router: Tensor, k: int) -> Tensor:
    from implementations.sonicmoe_triton.function import moe_layer

    return moe_layer(x, w1, w2, router, k, "softmax_topk")


def _rounded(x: Tensor, w1: Tensor, w2: Tensor, router: Tensor, k: int) -> Tensor:
    from implementations.sonicmoe_triton.function import rounded_moe_layer

    return rounded_moe_layer(x, w1, w2, router, k)[0]


CASES: dict[str, Callable[[], None]] = {
    "7B, n = 256": _layer("24576,1536,256,128,8", _top_k),
    "120B, n = 1024": _layer("32768,4096,1024,128,8", _top_k),
    "7B, softmax over all experts": _layer("24576,1536,256,128,8", _softmax_over_all),
    "token rounding, E = 512": _layer("16384,4096,1024,512,8", _rounded),
    "7B, float32": _layer("24576,1536,256,128,8", _top_k, torch.float32),
}


def measure() -> Found:
    """Every kernel of every case; one that several cases share stands in the first. Kernels of one name are numbered in
    the order of their first launch."""
    known: set[str] = set()
    found: Found = {}
    for case, both_passes in CASES.items():
        seen: list[CompiledKernel] = []
        with _compiling(seen):
            both_passes()
        facts: dict[str, Facts] = {}
        for compiled in seen:
            if compiled.hash in known:
                continue
            known.add(compiled.hash)
            name, number = compiled.metadata.name, 2
            while name in facts:
                name, number = f"{compiled.metadata.name} #{number}", number + 1
            facts[name] = facts_of(compiled)
        found[case] = facts
    return found


def differences(old: Mapping[str, Mapping[str, Mapping[str, int]]], new: Found) -> list[str]:
    """One line for each kernel that changed, came or went, with what changed of it."""
    lines = []
    for case in dict.fromkeys([*old, *new]):
        before, after = old.get(case, {}), new.get(case, {})
        for name in dict.fromkeys([*before, *after]):
            where = f"{case}: {name}"
            if name not in after:
                lines.append(f"{where}: gone")
            elif name not in before:
                lines.append(f"{where}: new, {_text(asdict(after[name]))}")
            else:
                then, now = before[name], asdict(after[name])
                changed = [f"{key} {then.get(key)} -> {now[key]}" for key in now if then.get(key) != now[key]]
                if changed:
                    lines.append(f"{where}: {', '.join(changed)}")
    return lines


def _text(facts: Mapping[str, int]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items() if value)


def main(
    update: Annotated[bool, typer.Option("--update", help="Write the table anew.")] = False,
    table: Annotated[Path, typer.Option(help="The table.")] = TABLE,
) -> None:
    """Compare what the kernels compile to with the committed table."""
    new = measure()
    if update:
        facts = {case: {name: asdict(its) for name, its in kernels.items()} for case, kernels in new.items()}
        table.write_text(json.dumps({"triton": triton.__version__, "kernels": facts}, indent=1) + "\n")
        print(f"{sum(map(len, new.values()))} kernels -> {table}")
        return
    old = json.loads(table.read_text())
    if old["triton"] != triton.__version__:
        typer.echo(
            f"the table is of Triton {old['triton']}, this is {triton.__version__}: nothing to compare", err=True
        )
        raise typer.Exit(2)
    lines = differences(old["kernels"], new)
    for line in lines:
        print(line)
    if lines:
        print("If that was meant: python -m implementations.sonicmoe_triton.compiled --update")
        raise typer.Exit(1)
    print(f"{sum(map(len, new.values()))} kernels as in {table}")


if __name__ == "__main__":
    typer.run(main)
