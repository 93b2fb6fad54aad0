"""The curves of a run: one JSON object a line, for a step its loss and what belongs to it, or a validation's loss."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """Appends to a run's curves.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: Path, done: int, config: Mapping[str, Any]) -> None:
        """
        Args:
            done: steps that stay; lines of later ones, which will be computed again, go.
            config: of the run, for `read_config`.
        """
        path = folder / FILE
        kept = [line for line in read(folder) if line.get("step", 0) <= done] if done else []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1), encoding="utf-8")
            fresh = path.with_suffix(".new")
            fresh.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(fresh, path)
            self._file = open(path, "a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error

    def write(self, **values: Any) -> None:
        self._file.write(json.dumps(values) + "\n")

    def close(self) -> None:
        self._file.close()
