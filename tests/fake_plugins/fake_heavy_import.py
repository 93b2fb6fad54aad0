"""It imports a package at module level, which belongs into `build`."""

import numpy  # noqa: F401
