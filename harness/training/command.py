"""`moebench train`: from what was asked on the command line to a run."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.errors import UserError
from harness.session import results_folder
from harness.token_rounding import routing_name
from harness.training.config import Config, load_config
from harness.training.processes import environment_rank

#: ``--against``: what one process does without the others.
ALONE = "alone"
#: So long a process keeps quiet about what the first one may have found as well, and said.
PATIENCE_S = 3.0
#: A month; and more rounds than anybody waits for.
MOST_TIMEOUT_S, MOST_ROUNDS = 30 * 86_400.0, 10_000


def train(
    out: Console,
    configuration: str,
    changes: Mapping[str, Any],
    device: str,
    run_folder: Path | None,
    output: Path | None,
    resume: bool,
    timeout_s: float,
    against: str = "",
    rounds: int = 6,
    losses_only: bool = False,
) -> None:
    """See ``moebench train --help``.

    Raises:
        UserError: what stands in the way, and what to change.
    """
    try:
        import torch

        if device not in ("", "cuda", "cpu"):
            raise UserError(f"--device {device}: choose from cuda, cpu")
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: torch sees no GPU here; train on --device cpu")
        if not 0 < timeout_s <= MOST_TIMEOUT_S:
            raise UserError(f"--timeout {timeout_s:g}: must be greater than 0 and at most {MOST_TIMEOUT_S:g}")
        config = load_config(configuration, changes)
        folder = results_folder(output)

        from harness.training import loop, pairs

        if against:
            if losses_only:
                raise UserError("--losses-only: --against compares times; leave one of the two out")
            if not 1 <= rounds <= MOST_ROUNDS:
                raise UserError(f"--rounds {rounds}: must be at least 1 and at most {MOST_ROUNDS}")
            name, _, routing = against.partition(":")
            other = None
            if against != ALONE:
                other = replace(config, implementation=name, routing=routing or config.routing)
            pairs.compare(out, config, other, device=device, rows_folder=folder, rounds=rounds, timeout_s=timeout_s)
            return
        place = run_folder or folder / "training" / run_name(config)
        loop.train(
            out,
            config,
            device=device,
            run_folder=place,
            rows_folder=folder,
            resume=resume,
            losses_only=losses_only,
            timeout_s=timeout_s,
        )
    except UserError:
        if environment_rank() > 0:
            # If the first process ended as well, torchrun ends this one meanwhile, and the reason stands there once.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(PATIENCE_S)
        raise


def run_name(config: Config) -> str:
    """Folder of a run's curves and checkpoints: ``7B-20-layers-sonicmoe_triton-top_k-seed-0``."""
    routing = routing_name(config.routing, config.m_tile)
    return f"{config.name}-{config.layers}-layers-{config.implementation}-{routing}-seed-{config.seed}"
