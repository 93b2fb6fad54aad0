"""What a plugin may change for its whole process and so for the points behind it."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class ProcessState:
    """Settings of a process that change what is computed or how fast, and that no layer has to touch. Not among them:
    environment variables and the precision of matrix products, which packages set as they are imported, and seeds,
    since the harness draws from generators of its own."""

    default_dtype: str
    default_device: str
    gradients: str
    autocast: str
    deterministic_algorithms: str
    anomaly_detection: str
    threads: str
    working_directory: str

    @classmethod
    def now(cls) -> ProcessState:
        try:
            folder = os.getcwd()
        except OSError:
            folder = "a folder that is gone"
        return cls(
            str(torch.get_default_dtype()).removeprefix("torch."),
            str(torch.get_default_device()),
            "on" if torch.is_grad_enabled() else "off",
            ", ".join(device for device in ("cuda", "cpu") if torch.is_autocast_enabled(device)) or "off",
            "on" if torch.are_deterministic_algorithms_enabled() else "off",
            "on" if torch.is_anomaly_enabled() else "off",
            str(torch.get_num_threads()),
            folder,
        )

    def changes(self, before: ProcessState) -> str:
        """A sentence that names what differs; empty where nothing does."""
        changed = [
            f"{field.name.replace('_', ' ')} ({getattr(before, field.name)} -> {getattr(self, field.name)})"
            for field in fields(self)
            if getattr(self, field.name) != getattr(before, field.name)
        ]
        return f"the plugin changed for its whole process: {', '.join(changed)}" if changed else ""
