"""The curves of a run: one JSON object a line, for a step its loss and what belongs to it, or a validation's loss."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import store
from harness.documents import put
from harness.errors import UserError

#: Not ``.jsonl``, as files of rows are called, among which a run's folder may lie.
FILE, CONFIG_FILE = "log.ndjson", "config.json"


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's folder, in order; what a killed process left of a line is passed over.

    Every line has ``step``, counted from 1. A step's also ``loss`` (nats a token, mean over all processes),
    ``balance`` (the load-balancing loss), ``gradient_norm``, ``learning_rate``, ``tokens`` (so far) and ``seconds``
    (absent where the GPU was shared); a validation's ``validation_loss``.
    """
    lines = []
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            lines.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            continue
    return lines


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run's folder. Raises `UserError` where there is none."""
    try:
        config = dict(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
        config["routing"], config["m_tile"], config["seed"]
        return config
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{folder}: holds no run of moebench train ({CONFIG_FILE} is missing or broken)") from error


class Log:
    """Appends to a run's curves, by whole lines.

    Raises:
        WriteError: the folder cannot be written; what was there stays.
    """

    def __init__(self, folder: Path, done: int, config: Mapping[str, Any]) -> None:
        """
        Args:
            done: steps that stay; lines of later ones, which will be computed again, go.
            config: of the run, for `read_config`.
        """
        self._path = folder / FILE
        kept = [line for line in read(folder) if line.get("step", 0) <= done] if done else []
        with store.write_refusals(self._path, "--folder"):
            put(folder / CONFIG_FILE, json.dumps(config, indent=1))
            put(self._path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file = open(self._path, "ab", buffering=0)

    def write(self, **values: Any) -> None:
        line = json.dumps(values).encode() + b"\n"
        with store.write_refusals(self._path, "--folder"):
            descriptor = self._file.fileno()
            store.write_whole(descriptor, os.fstat(descriptor).st_size, line)

    def close(self) -> None:
        self._file.close()
