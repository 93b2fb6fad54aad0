"""The curves of a run: one JSON object a line, for a step its loss and what belongs to it, or a validation's loss."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import store
from harness.documents import beyond, load_json, put
from harness.errors import UserError
from harness.training.config import Config

#: Not ``.jsonl``, as files of rows are called, among which a run's folder may lie.
FILE, CONFIG_FILE = "log.ndjson", "config.json"
#: Numbers of a line other than its whole ones; and the largest that a float32, as which all are computed, could have.
_NUMBERS = ("loss", "balance", "gradient_norm", "learning_rate", "seconds", "validation_loss")
_LARGEST = 3.5e38


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's folder, in order; none where there is no log. What a killed process left of the last line is
    passed over.

    Every line has ``step``, counted from 1. A step's also ``loss`` (nats a token, mean over all processes),
    ``balance`` (the load-balancing loss), ``gradient_norm``, ``learning_rate``, ``tokens`` (so far) and ``seconds``
    (absent where the GPU was shared); a validation's ``validation_loss``.

    Raises:
        UserError: the log cannot be read, or a line is damaged: without it the curve would be another one.
    """
    path = folder / FILE
    try:
        if not path.exists():
            return []
        # Of a pipe or a device there may be no end.
        if not path.is_file():
            raise UserError(f"{path}: cannot be read: not a file")
        content = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    lines = []
    for number, text in enumerate(content, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text.decode())
            fault = _fault(line)
        except (ValueError, RecursionError) as error:
            line, fault = None, f"not a JSON object ({error})"
        if not fault:
            lines.append(line)
        elif number < len(content):
            raise UserError(f"{path}:{number}: damaged: {fault}; mend the line, or take it out")
    return lines


def _fault(line: Any) -> str:
    """Why a value is no line of a run's curves; empty where it is one."""
    if not isinstance(line, dict):
        return "not a JSON object"
    wrong = beyond(line, strict=True)
    if wrong:
        return wrong
    if "validation_loss" not in line and not {"loss", "tokens"} <= set(line):
        return "neither a step's loss and tokens nor a validation_loss"
    for name in ("step", "tokens"):
        value = line.get(name, None if name == "step" else 1)
        if type(value) is not int or value < 1:
            return f"{name} must be a whole number of at least 1"
    for name in _NUMBERS:
        value = line.get(name, 0.0)
        if type(value) not in (int, float) or abs(value) > _LARGEST:
            return f"{name} must be a number, at most {_LARGEST:g}"
    return ""


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a run's folder. Raises `UserError` where there is none."""
    try:
        return Config(**load_json(folder / CONFIG_FILE)).as_dict()
    except (UserError, OSError, TypeError) as error:
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
        kept = [line for line in read(folder) if line["step"] <= done] if done else []
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
