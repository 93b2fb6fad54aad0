"""Errors that a user can act on."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The command line prints its message as one line and exits with code 2."""
