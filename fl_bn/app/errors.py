"""Define the error of a wrong run config, in a module that needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Signal that a key of the run config is unknown, wrong, or does not fit another key."""


@contextmanager
def as_config_error() -> Iterator[None]:
    """Turn errors of data, model and partition, but FileNotFoundError, into ConfigError."""
    try:
        yield
    except (ConfigError, FileNotFoundError):
        raise
    except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:
        raise ConfigError(str(error) or type(error).__name__) from error
