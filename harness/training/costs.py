"""What a model holds and what a step of it computes."""

from __future__ import annotations

from harness.gpus import rates_of
from harness.training.config import Config


def parameters(config: Config) -> int:
    """All parameters: experts, router, attention, norms, embedding and head."""
    d = config.d
    block = config.E * (3 * config.n + 1) * d + 4 * d * d + 2 * d
    return config.layers * block + 2 * config.vocabulary * d + d


def active_parameters(config: Config) -> int:
    """Those that multiply one token: K of E experts; neither embedding, which is looked up, nor norms."""
    d = config.d
    return config.layers * (3 * config.K * config.n * d + config.E * d + 4 * d * d) + config.vocabulary * d


def model_flops(config: Config) -> int:
    """FLOPs that the definition of one token's forward and backward needs.

    6N + 12·L·d·S for N active parameters, L layers and sequences of S (Chowdhery et al. 2022, PaLM, arXiv 2204.02311,
    appendix B), of which the second term is halved: attention is causal, and the half above the diagonal is not
    computed. Recomputation, optimiser, routing's own work, a second multiplication by the router and padding do not
    count.
    """
    return 6 * active_parameters(config) + 6 * config.layers * config.d * config.sequence


def utilisation(config: Config, tokens_per_s: float, gpus: int, gpu: str | None) -> float | None:
    """Model FLOPs utilisation: model FLOPs a second over the datasheet's dense peak of all GPUs (`harness.gpus`). None
    where no peak is recorded for the GPU, or without one."""
    rates = rates_of(gpu) if gpu else None
    if rates is None or config.dtype not in rates.tflops:
        return None
    return tokens_per_s * model_flops(config) / (gpus * rates.tflops[config.dtype] * 1e12)
