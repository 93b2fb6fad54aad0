"""The size of an MoE layer: ``MoEShape(T, d, n, E, K)``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from harness.errors import UserError

#: Largest size: kernels and routings count rows in 32 bits.
MOST = 2**31 - 1


@dataclass(frozen=True, order=True)
class MoEShape:
    """One MoE layer with SwiGLU experts.

    Attributes:
        T: tokens of one micro-batch.
        d: embedding width.
        n: intermediate width of one expert.
        E: experts.
        K: experts activated per token.
    """

    T: int
    d: int
    n: int
    E: int
    K: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"shape {field.name}={repr(value)[:80]}: must be a whole number")
            least = 0 if field.name == "T" else 1
            if value > MOST:
                # Without the number: Python refuses to write one of thousands of digits.
                raise UserError(f"shape {field.name}: must be at most {MOST}")
            if value < least:
                raise UserError(f"shape {field.name}={value}: must be at least {least}")
        if self.K > self.E:
            raise UserError(f"shape {self}: K={self.K} experts per token exceed E={self.E} experts")

    def __str__(self) -> str:
        return f"{self.T},{self.d},{self.n},{self.E},{self.K}"

    @classmethod
    def parse(cls, text: str) -> MoEShape:
        """Read ``T,d,n,E,K``, e.g. ``24576,1536,256,128,8``; raises `UserError` on anything else."""
        parts = text.split(",")
        try:
            values = [int(part) for part in parts]
        except ValueError:
            values = []
        if len(values) != 5:
            raise UserError(f"shape {text!r}: expected five whole numbers T,d,n,E,K, e.g. 24576,1536,256,128,8")
        return cls(*values)

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @property
    def granularity(self) -> float:
        """d / n: how fine the experts are."""
        return self.d / self.n

    @property
    def activation_ratio(self) -> float:
        """K / E: the share of experts that one token activates (smaller = sparser)."""
        return self.K / self.E

    @property
    def routed_rows(self) -> int:
        """T · K: rows of the grouped GEMMs under top-K routing."""
        return self.T * self.K
