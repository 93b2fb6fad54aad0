"""Small sketches of a call's results, by which a later call is compared with the one that was checked.

The fp32 reference needs the canonical weights, which are dropped before memory is measured and anything is timed. What
is kept in their place is, of every tensor, a few projections onto random signs. The squared difference of two tensors'
projections is on average the squared norm of the tensors' difference (Johnson and Lindenstrauss).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.reference import full_precision

#: Projections of each part (token, expert, row) of a tensor.
PROJECTIONS = 16
#: Elements of a tensor that are taken to fp32 at once.
SLICE = 2**26
_TINY = torch.finfo(torch.float64).tiny


def _signs(rows: int, columns: int, device: torch.device) -> Tensor:
    """(rows, columns) of +1 and -1, fp32, always the same ones for one size."""
    generator = torch.Generator().manual_seed(rows * 1_000_003 + columns)
    return (torch.randint(0, 2, (rows, columns), generator=generator) * 2.0 - 1.0).to(device, torch.float32)


def sketch(tensor: Tensor) -> Tensor:
    """(parts, PROJECTIONS), fp32 on the CPU, of a tensor (parts, …)."""
    with torch.no_grad(), full_precision():
        parts, device = tensor.detach(), tensor.device
        if parts.dim() != 3:
            parts = parts.reshape(len(parts), 1, -1) if parts.numel() else parts.new_zeros(len(parts), 1, 1)
        _, rows, columns = parts.shape
        right = _signs(columns, PROJECTIONS, device)
        left = _signs(PROJECTIONS, rows, device) if rows > 1 else None
        found = []
        for some in parts.split(max(1, SLICE // max(rows * columns, 1))):
            if left is None:
                found.append(some[:, 0].float() @ right)
            else:
                found.append(((left @ some.float()) * right.T).sum(-1))
        return torch.cat(found).cpu() if found else torch.zeros(0, PROJECTIONS)


@dataclass
class Fingerprint:
    """The sketches of one call's results that the gate has accepted, with what it measured their errors against.

    Attributes:
        sizes: of each tensor, the norm that a relative error of it is relative to.
        tolerances: of each tensor, the gate's.
        parts: of the tensors whose single parts (tokens, experts) are looked at, the least share of the parts' root
            mean square that a part's error is measured against; and how many times the tolerance it may be.
    """

    sketches: dict[str, Tensor]
    sizes: dict[str, float]
    tolerances: dict[str, float]
    parts: dict[str, tuple[float, float]]

    def difference(self, results: Mapping[str, Tensor]) -> str | None:
        """In words, by how much results of a later call on the same data differ, where that is more than two calls may
        of which the gate accepts each: twice its tolerance. None where it is not."""
        wrong = []
        for name, before in self.sketches.items():
            if name not in results:
                return f"{name} is missing"
            after = sketch(results[name])
            if after.shape != before.shape:
                return f"{name} has {len(after)} parts in place of {len(before)}"
            allowed, size = 2 * self.tolerances[name], self.sizes[name]
            squared = (after - before).double().square().mean(1)
            whole = float(squared.sum().sqrt())
            if not whole <= allowed * size:  # NaN differs too
                wrong.append(f"{name} {whole / size if size else float('inf'):.3g} > {allowed:g}")
            elif name in self.parts and len(before):
                least, times = self.parts[name]
                own = before.double().square().mean(1)
                errors = (squared / torch.maximum(own, least**2 * own.mean()).clamp_min(_TINY)).sqrt()
                if not float(errors.max()) <= times * allowed:
                    wrong.append(f"{name} {float(errors.max()):.3g} > {times * allowed:g} for one part")
        return ", ".join(wrong) or None
