"""The figure `training_curves` of runs that one names: python -m plots.runs RUN_FOLDER... --output FOLDER"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.errors import UserError, refusals
from plots import training_curves


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figure and say where it is."""
    parser = argparse.ArgumentParser(description="Loss curves of runs that differ in routing and seed.")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    with refusals("runs"):
        try:
            for path in training_curves.draw(given.runs, given.output):
                print(f"wrote {path}")
        except OSError as error:
            raise UserError(f"--output {given.output}: cannot be written: {error.strerror or error}") from error


if __name__ == "__main__":
    main()
