"""Traces: files of the routing that a real model's tokens had.

Forms are told apart by the end of the name. ``.json``, ``.csv`` and ``.txt`` hold E whole numbers, the rows of each
expert; ``.npy`` holds (T, K) whole numbers, the experts of each token. A row names a trace ``trace:NAME@HASH``, by the
file's name and the content's hash: a changed file is another measurement.
"""

from __future__ import annotations

import functools
import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.documents import WHOLE, content, parse_json
from harness.errors import UserError, describe
from harness.interface import DISTRIBUTIONS, RoutingSpec
from harness.registry import choices
from harness.routing import assign
from harness.shapes import MoEShape

PREFIX = "trace:"
#: A trace's distribution in a row.
FORM = re.compile(rf"{PREFIX}.+@[0-9a-f]{{16}}", re.DOTALL)
#: Largest file: that of a million tokens' experts is a tenth of it.
MOST_BYTES = 2**30


@dataclass(frozen=True)
class Trace:
    """What a file holds: the rows of each expert, or the experts of each token.

    Attributes:
        distribution: what rows call it, ``trace:NAME@HASH``.
        counts: (E,), not all zero; None where the file holds ``indices``.
        indices: (T, K), int64, distinct for each token; None where the file holds ``counts``.
    """

    path: Path
    distribution: str
    counts: tuple[int, ...] | None = None
    indices: Tensor | None = None

    def counts_at(self, shape: MoEShape) -> list[int]:
        """Rows of each expert at T·K rows: the file's own where it has as many, else in their proportion (`scaled`).

        Raises:
            UserError: they are of another number of experts, or one would have more rows than there are tokens.
        """
        assert self.counts is not None
        if len(self.counts) != shape.E:
            raise UserError(f"{self.path}: holds {len(self.counts)} counts, but the shape {shape} has E={shape.E}")
        found = scaled(self.counts, shape.routed_rows)
        if max(found) > shape.T:
            raise UserError(
                f"{self.path}: expert {found.index(max(found))} would have {max(found)} rows at the shape {shape}, "
                f"more than its T={shape.T} tokens"
            )
        return found

    def check(self, shape: MoEShape) -> None:
        """Raises `UserError` where it does not fit the shape."""
        if self.indices is None:
            self.counts_at(shape)
            return
        if self.indices.shape != (shape.T, shape.K):
            own = "({}, {})".format(*self.indices.shape)
            raise UserError(
                f"{self.path}: holds experts of (T, K) = {own}, but the shape {shape} has ({shape.T}, {shape.K})"
            )
        if self.indices.numel() and int(self.indices.max()) >= shape.E:
            raise UserError(
                f"{self.path}: names expert {int(self.indices.max())}, but the shape {shape} has E={shape.E}"
            )

    def experts(self, shape: MoEShape) -> Tensor:
        """(T, K) experts of each token, int64 on the CPU: the file's own; of counts, tokens drawn at random, always the
        same. Raises `UserError` where it does not fit."""
        self.check(shape)
        return assign(self.counts_at(shape), shape.T, shape.K) if self.indices is None else self.indices


def scaled(counts: Sequence[int], rows: int) -> list[int]:
    """The counts in proportion, with the sum ``rows``, by largest remainder: each count's share is rounded down, and
    what is left goes, one each, to the largest remainders (of equal ones, to the lower expert). Zero stays zero."""
    total = sum(counts)
    found = [count * rows // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda e: (-(counts[e] * rows % total), e))
    for e in by_remainder[: rows - sum(found)]:
        found[e] += 1
    return found


def parse(text: str, folder: Path = Path()) -> RoutingSpec:
    """A distribution as a user writes it, one of `DISTRIBUTIONS` or ``trace:FILE``; all else is the default.

    Args:
        folder: that a file's path starts from.

    Raises:
        UserError: neither of them, or the file cannot be read as a trace.
    """
    if text in DISTRIBUTIONS:
        return RoutingSpec(distribution=text)
    if not text.startswith(PREFIX):
        raise UserError(f"unknown distribution {text!r}; {choices(text, [*DISTRIBUTIONS, f'{PREFIX}FILE'])}")
    path = folder / text.removeprefix(PREFIX)
    # A worker may stand elsewhere.
    return RoutingSpec(distribution=read(path).distribution, trace_file=str(path.absolute()))


def read(path: Path) -> Trace:
    """A trace's file.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    name = path.name
    if not name or not name.isprintable():
        raise UserError(f"{path}: rows could not name this file; give it another name")
    data = content(path, MOST_BYTES)
    distribution = f"{PREFIX}{name}@{hashlib.sha256(data).hexdigest()[:16]}"
    form = path.suffix.lower()
    if form == ".npy":
        return Trace(path, distribution, indices=_indices(path, data))
    if form == ".json":
        found = parse_json(path, data)
    elif form in (".csv", ".txt"):
        found = _numbers(path, data)
    else:
        raise UserError(f"{path}: a trace's name ends in .json, .csv, .txt or .npy")
    return Trace(path, distribution, counts=_counts(path, found))


def check(routing: RoutingSpec, shape: MoEShape) -> None:
    """Raises `UserError` where a routing by a trace does not fit the shape."""
    if routing.trace_file:
        _known(routing.trace_file, routing.distribution).check(shape)


def chosen_experts(routing: RoutingSpec, shape: MoEShape) -> Tensor:
    """(T, K) experts of each token by a routing's trace, int64 on the CPU.

    Raises:
        UserError: the trace does not fit the shape, cannot be read any more, or has changed since it was named.
    """
    return _known(routing.trace_file, routing.distribution).experts(shape)


@functools.lru_cache(maxsize=4)
def _known(file: str, distribution: str) -> Trace:
    trace = read(Path(file))
    if trace.distribution != distribution:
        raise UserError(f"{file}: has changed: it is {trace.distribution} now, not {distribution}")
    return trace


def _numbers(path: Path, data: bytes) -> list[int]:
    words = [word for word in re.split(rb"[\s,;]+", data.removeprefix(b"\xef\xbb\xbf")) if word]
    for word in words:
        # As many digits as 64 bits can have.
        if not re.fullmatch(rb"[0-9]{1,19}", word):
            shown = word[:40].decode(errors="backslashreplace")
            raise UserError(f"{path}: must hold whole numbers, one for each expert, not {shown!r}")
    return [int(word) for word in words]


def _counts(path: Path, found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or not found:
        raise UserError(f"{path}: must hold a list of whole numbers, one for each expert")
    for number, count in enumerate(found):
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= WHOLE:
            raise UserError(f"{path}: expert {number}: must be a whole number of at least 0, not {str(count)[:40]!r}")
    if not any(found):
        raise UserError(f"{path}: no expert has a row")
    return tuple(found)


def _indices(path: Path, data: bytes) -> Tensor:
    try:
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a header may hold anything, and NumPy evaluates it
        raise UserError(f"{path}: not valid NumPy: {describe(error)}") from error
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise UserError(f"{path}: must hold (T, K) whole numbers, not {array.shape} {array.dtype}")
    if array.size and not (array.min() >= 0 and array.max() < 2**31):
        raise UserError(f"{path}: experts must be numbers from 0 to E - 1, not {array.min()} to {array.max()}")
    indices = torch.from_numpy(array.astype(np.int64))
    ordered = indices.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1).nonzero()
    if len(twice):
        raise UserError(f"{path}: token {int(twice[0])} has an expert twice")
    return indices
