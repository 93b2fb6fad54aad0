"""It fails while being imported."""

raise RuntimeError("this file was never finished")
