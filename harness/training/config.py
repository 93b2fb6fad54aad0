"""What is trained and how: a TOML file in `configurations/`, or one's own, with what the command line changes in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from harness.documents import load_toml
from harness.errors import UserError
from harness.interface import DTYPES
from harness.registry import choices
from harness.shapes import MOST, MoEShape
from harness.sweep import MOST_SEED
from harness.token_rounding import METHODS, MOST_M_TILE

#: Largest factor, learning rate or clipping norm: what is made of them must still be float32.
MOST_FACTOR = 1e9
CONFIGURATIONS = Path(__file__).resolve().parent / "configurations"


@dataclass(frozen=True)
class Config:
    """One training run. Tables of the TOML file are for the eye: the names below are unique across them. Every number
    is finite.

    Attributes:
        name: the file's, without suffix.
        layers, d, heads: transformer blocks, embedding width, attention heads.
        n, E, K: width of one expert, experts, experts for each token.
        vocabulary: rows of the embedding; the corpus may use fewer.
        sequence: tokens of one sequence.
        rotary_base: of the rotary position embedding.
        implementation: which plugin computes the MoE layers.
        routing: how tokens find experts while training; validation always goes by top-K.
        m_tile: to which a token rounding rounds.
        dtype: of the computation; parameters and the optimiser's state are float32.
        batch: sequences of one step, over all processes.
        micro_batch: sequences of one forward. Routing and the load-balancing loss see one micro-batch at a time.
        steps, warmup: of the whole run; of the learning rate's linear rise.
        learning_rate, final_share: the highest, and the share of it, 0 to 1, that the cosine ends at.
        beta1, beta2, weight_decay: AdamW's; only matrices decay.
        clip: largest norm of the gradient.
        balance: factor of the load-balancing loss, of the mean over the layers.
        recompute: keep only each block's input for the backward (activation checkpointing).
        shard: processes that hold one copy of weights, gradients and optimiser's state between them; 0: all of them.
        corpus: ``python`` (bytes of the standard library), or a data set of the Hugging Face Hub.
        seed: of the weights and of the order of the data.
        validate_every, validation_sequences: steps between validations (0: only at the end), and their size.
        checkpoint_every, keep: steps between checkpoints (0: none), and how many stay.
    """

    name: str
    layers: int
    d: int
    heads: int
    n: int
    E: int
    K: int
    vocabulary: int
    sequence: int
    batch: int
    micro_batch: int
    steps: int
    warmup: int
    learning_rate: float
    rotary_base: float = 10_000.0
    implementation: str = "sonicmoe_triton"
    routing: str = "top_k"
    m_tile: int = 128
    dtype: str = "bfloat16"
    final_share: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 0.01
    recompute: bool = False
    shard: int = 0
    corpus: str = "python"
    seed: int = 0
    validate_every: int = 0
    validation_sequences: int = 64
    checkpoint_every: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, field.name, float(value))
            elif type(value).__name__ != kind:
                raise UserError(f"{self.name}: {field.name} = {value!r} must be of type {kind}")
            elif kind == "float" and not math.isfinite(value):
                raise UserError(f"{self.name}: {field.name} = {value} must be a finite number")
        for name in ("layers", "heads", "vocabulary", "sequence", "batch", "micro_batch", "steps", "keep"):
            self._within(name, 1, MOST)
        self._within("validation_sequences", 1, MOST)
        for name in ("warmup", "shard", "validate_every", "checkpoint_every"):
            self._within(name, 0, MOST)
        self._within("m_tile", 1, MOST_M_TILE)
        self._within("seed", 0, MOST_SEED)
        self._within("final_share", 0, 1)
        for name in ("balance", "weight_decay", "learning_rate", "clip", "rotary_base"):
            self._within(name, 0, MOST_FACTOR)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{self.name}: {name} = {getattr(self, name)} must be at least 0 and less than 1")
        for name in ("learning_rate", "clip", "rotary_base"):
            if not getattr(self, name) > 0:
                raise UserError(f"{self.name}: {name} = {getattr(self, name)} must be greater than 0")
        try:
            self.shape  # noqa: B018 - refuses sizes that no layer has
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from error
        if self.d % self.heads or self.d // self.heads % 2:
            raise UserError(f"{self.name}: d = {self.d} must divide into heads = {self.heads} of even width")
        if self.batch % self.micro_batch:
            raise UserError(f"{self.name}: batch = {self.batch} must be a multiple of micro_batch = {self.micro_batch}")
        if self.routing not in METHODS:
            raise UserError(f"{self.name}: routing = {self.routing!r}: {choices(self.routing, METHODS)}")
        if self.dtype not in DTYPES:
            raise UserError(f"{self.name}: dtype = {self.dtype!r}: {choices(self.dtype, DTYPES)}")

    def _within(self, name: str, least: int, most: float) -> None:
        value = getattr(self, name)
        if value < least:
            raise UserError(f"{self.name}: {name} = {value} must be at least {least}")
        if value > most:
            raise UserError(f"{self.name}: {name} = {value} must be at most {most:.10g}")

    @property
    def shape(self) -> MoEShape:
        """The MoE layer's, T being the tokens of a micro-batch."""
        return MoEShape(self.micro_batch * self.sequence, self.d, self.n, self.E, self.K)

    @property
    def micro_batches(self) -> int:
        """Of one step, over all processes."""
        return self.batch // self.micro_batch

    @property
    def step_tokens(self) -> int:
        return self.batch * self.sequence

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


#: May differ between a checkpoint and the run that continues it: none of them moves the loss curve; ``shard`` changes
#: the order of sums alone, as the number of processes does.
FREE = frozenset({"name", "recompute", "shard", "validate_every", "validation_sequences", "checkpoint_every", "keep"})


def sharded_over(shard: int, world: int) -> int:
    """How many of ``world`` processes hold one copy of weights, gradients and optimiser's state between them.

    Args:
        shard: a configuration's; 0: all.

    Raises:
        UserError: it does not divide them.
    """
    if shard and world % shard:
        raise UserError(f"shard = {shard}: must divide the number of processes, {world}; 0: sharded over all of them")
    return shard or world


def configuration_names() -> list[str]:
    return sorted(path.stem for path in CONFIGURATIONS.glob("*.toml"))


def load_config(given: str, changes: Mapping[str, Any] | None = None) -> Config:
    """Read a configuration by name, or from a TOML file, and apply ``changes`` (field -> value; None: leave).

    Raises:
        UserError: no such file, not TOML, a field that is unknown, missing, or out of range.
    """
    path = CONFIGURATIONS / f"{given}.toml" if given in configuration_names() else Path(given)
    if path.suffix != ".toml" or not path.is_file():
        raise UserError(f"configuration {given!r}: {choices(given, configuration_names())}, or name a TOML file")
    content = load_toml(path)
    known = {field.name for field in fields(Config)} - {"name"}
    values: dict[str, Any] = {}
    for title, table in content.items():
        for name, value in table.items() if isinstance(table, dict) else [(title, table)]:
            if name not in known:
                raise UserError(f"{path}: unknown field {name!r}: {choices(name, sorted(known))}")
            if name in values:
                raise UserError(f"{path}: {name} is given twice")
            values[name] = value
    missing = [
        field.name for field in fields(Config) if field.default is MISSING and field.name not in ("name", *values)
    ]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}")
    return replace(
        Config(name=path.stem, **values),
        **{name: value for name, value in (changes or {}).items() if value is not None},
    )


def difference(saved: Mapping[str, Any], config: Config) -> str | None:
    """The first field that makes a checkpoint another run's, in words; None where there is none."""
    for name, value in config.as_dict().items():
        if name not in FREE and saved.get(name) != value:
            return f"{name} = {saved.get(name)!r} there, {value!r} here"
    return None
