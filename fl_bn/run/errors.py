"""Define the error of a wrong run config, in a module that needs no torch."""

from __future__ import annotations


class ConfigError(ValueError):
    """Signal that a key of the run config is unknown, of a wrong type, out of range, or does not fit another key."""
