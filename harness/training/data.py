"""Tokens to train on: the text that ships with Python, or a data set of the Hugging Face Hub.

A step consists of micro-batches, numbered over all processes; process r of W takes those with number % W = r. Which
tokens a micro-batch holds depends on seed and step alone, so that a run that was stopped, however often, goes on with
exactly what it would have seen.
"""

from __future__ import annotations

import functools
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.errors import UserError
from harness.training.config import Config

#: Of the standard library: every eleventh file, by name, is for validation.
VALIDATION_STRIDE = 11
#: Folders of the standard library that are not part of it, that a distribution may leave out, or (encodings) that hold
#: the same tables over and over, of which validation would repeat what was trained on.
_NOT_TEXT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings"})


class Corpus(Protocol):
    """Batches are (sequences, sequence + 1), int64 on the CPU: inputs are all but the last column, targets all but the
    first."""

    def batches(self, step: int) -> Iterator[Tensor]:
        """This process' micro-batches of a step, counted from 0; steps are asked for in order."""

    def validation(self) -> Iterator[tuple[Tensor, float]]:
        """This process' micro-batches of the validation set, always the same, each with its weight: equally many on
        each process, so where they do not divide evenly, some weigh nothing."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same data: JSON types only."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""


def open_corpus(config: Config, rank: int, world: int) -> Corpus:
    """The configuration's corpus.

    Raises:
        UserError: it is missing, needs a package that is, or its tokens do not fit the model's vocabulary.
    """
    if config.micro_batches % world:
        raise UserError(
            f"a step of {config.micro_batches} micro-batches cannot be divided among {world} processes: make --batch a "
            f"multiple of {config.micro_batch * world} sequences"
        )
    if config.corpus == "python":
        return PythonText(config, rank, world)
    return HubStream(config, rank, world)


@functools.cache
def python_text() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library's sources, (training, validation), uint8; no network, no package.

    The same for one release of Python. Whole files go to one side or the other.

    Raises:
        UserError: this Python came without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path
        for path in root.rglob("*.py")
        if _NOT_TEXT.isdisjoint(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    sides: tuple[list[bytes], list[bytes]] = [], []
    for i, path in enumerate(files):
        sides[i % VALIDATION_STRIDE == 0].append(path.read_bytes())
    training, validation = (torch.frombuffer(bytearray(b"\n".join(side) or b"\n"), dtype=torch.uint8) for side in sides)
    if len(training) < 1_000_000:
        raise UserError(f"{root}: this Python came without its library's sources; name another corpus with --corpus")
    return training, validation


class PythonText:
    """`python_text`, cut into windows; each pass over it takes them in another order, without repetition."""

    def __init__(self, config: Config, rank: int, world: int) -> None:
        if config.vocabulary < 256:
            raise UserError(f"vocabulary = {config.vocabulary}: the corpus python needs 256, one for each byte")
        self.config, self.rank, self.world = config, rank, world
        self.training, self.held_out = python_text()
        self.windows = (len(self.training) - 1) // config.sequence
        if self.windows < 1 or (len(self.held_out) - 1) // config.sequence < 1:
            raise UserError(f"sequence = {config.sequence}: longer than the corpus python")

    def batches(self, step: int) -> Iterator[Tensor]:
        size = self.config.micro_batch
        for number in range(self.rank, self.config.micro_batches, self.world):
            first = step * self.config.batch + number * size
            yield torch.stack([self._window(self.training, self._place(first + i)) for i in range(size)])

    def validation(self) -> Iterator[tuple[Tensor, float]]:
        size = self.config.micro_batch
        windows = (len(self.held_out) - 1) // self.config.sequence
        batches = max(min(self.config.validation_sequences, windows) // size, 1)
        for first in range(0, batches, self.world):
            number = first + self.rank
            # Spread over all of the text: neighbours are of one file.
            places = [(number * size + i) * windows // (batches * size) % windows for i in range(size)]
            yield torch.stack([self._window(self.held_out, place) for place in places]), float(number < batches)

    def state(self) -> dict[str, Any]:
        return {"checksum": zlib.crc32(self.training.numpy().tobytes())}

    def restore(self, state: dict[str, Any]) -> None:
        """The step says where the run stands; the text must be the one that it began with."""
        if state != self.state():
            raise UserError("the corpus python is another one than the run began with: continue with the same Python")

    def _place(self, number: int) -> int:
        """The window of the run's sequence of this number."""
        return int(_order(self.config.seed, number // self.windows, self.windows)[number % self.windows])

    def _window(self, text: Tensor, place: int) -> Tensor:
        start = place * self.config.sequence
        return text[start : start + self.config.sequence + 1].long()


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, windows: int) -> Tensor:
    return torch.randperm(windows, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


class HubStream:
    """A data set of the Hugging Face Hub as a stream, ``NAME`` or ``NAME:SUBSET``, its field ``text`` in tokens of
    GPT-2 with an end of text between documents. Needs ``pip install -e '.[training]'`` and a network.

    One document in fifty, by a checksum of its text, is for validation; the others are dealt out to the processes. A
    stream goes on after a stop with as many processes as before.
    """

    HELD_OUT = 50

    def __init__(self, config: Config, rank: int, world: int) -> None:
        try:
            import datasets
            import tokenizers
        except ImportError as error:
            raise UserError(
                f"corpus {config.corpus}: needs the package {error.name}: pip install -e '.[training]', or train on "
                "--corpus python"
            ) from error
        from datasets.distributed import split_dataset_by_node

        self.config, self.rank, self.world = config, rank, world
        name, _, subset = config.corpus.partition(":")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_pretrained("gpt2")
            stream = datasets.load_dataset(name, subset or None, split="train", streaming=True)
        except Exception as error:  # no such data set, no network, no access: whatever the hub's client raises
            said = " ".join(str(error).split())[:200]
            raise UserError(f"corpus {config.corpus}: cannot be opened ({type(error).__name__}: {said})") from error
        if self.tokenizer.get_vocab_size() > config.vocabulary:
            needed = self.tokenizer.get_vocab_size()
            raise UserError(f"vocabulary = {config.vocabulary}: the corpus {config.corpus} needs {needed}")
        self.end = self.tokenizer.token_to_id("<|endoftext|>")
        self.every = stream
        self.stream = split_dataset_by_node(stream, rank=rank, world_size=world)
        self.left: list[int] = []
        self.documents = iter(self.stream)
        self.held_out: list[list[list[int]]] = []

    def batches(self, step: int) -> Iterator[Tensor]:
        size = self.config.micro_batch
        for _ in range(self.rank, self.config.micro_batches, self.world):
            yield torch.tensor([self._next() for _ in range(size)])

    def validation(self) -> Iterator[tuple[Tensor, float]]:
        """Read once, from the beginning of the stream; kept for the next time."""
        if not self.held_out:
            self.held_out = self._hold_out()
        batches = self.held_out
        for first in range(0, len(batches), self.world):
            number = first + self.rank
            yield torch.tensor(batches[number % len(batches)]), float(number < len(batches))

    def _hold_out(self) -> list[list[list[int]]]:
        """Micro-batches of sequences of tokens."""
        size, length = self.config.micro_batch, self.config.sequence
        wanted = max(self.config.validation_sequences // size, 1) * size
        tokens: list[int] = []
        for document in self.every:
            if self._is_held_out(document["text"]):
                tokens += self._encode(document["text"])
            if len(tokens) > wanted * length:
                break
        sequences = [tokens[i : i + length + 1] for i in range(0, len(tokens) - length, length)][:wanted]
        batches = [sequences[i : i + size] for i in range(0, len(sequences) - size + 1, size)]
        if not batches:
            raise UserError(f"corpus {self.config.corpus}: too short for a validation batch of {size} sequences")
        return batches

    def state(self) -> dict[str, Any]:
        return {"stream": self.stream.state_dict(), "left": self.left, "world": self.world}

    def restore(self, state: dict[str, Any]) -> None:
        if state["world"] != self.world:
            raise UserError(
                f"the stream was dealt out to {state['world']} processes: continue with as many, not {self.world}"
            )
        self.stream.load_state_dict(state["stream"])
        self.left = list(state["left"])
        self.documents = iter(self.stream)

    def _next(self) -> list[int]:
        """sequence + 1 tokens; the last is the next sequence's first."""
        length = self.config.sequence
        while len(self.left) <= length:
            document = next(self.documents, None)
            if document is None:
                raise UserError(f"corpus {self.config.corpus}: ended; train fewer --steps")
            if not self._is_held_out(document["text"]):
                self.left += self._encode(document["text"])
        found, self.left = self.left[: length + 1], self.left[length:]
        return found

    def _encode(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text).ids, self.end]

    def _is_held_out(self, text: str) -> bool:
        return zlib.crc32(text.encode()) % self.HELD_OUT == 0
