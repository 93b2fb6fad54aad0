"""MoE-kernel benchmark harness: shapes, problems, correctness, timing, memory, records, sweeps."""

__version__ = "0.1.0"
