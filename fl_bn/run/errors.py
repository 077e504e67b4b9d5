"""Define the error of a wrong run config, in a module that needs no torch."""

from __future__ import annotations


class ConfigError(ValueError):
    """Report a key of the run config that is unknown, of the wrong type, or out of range."""
