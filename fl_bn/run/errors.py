"""What is wrong with a run config. Apart, so that it can be said before torch is loaded."""

from __future__ import annotations


class ConfigError(ValueError):
    """A key of the run config is unknown, of the wrong type, or out of range."""
