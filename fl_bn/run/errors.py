"""Define the error of a wrong run config, in a module that needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Signal that a key of the run config is unknown, of a wrong type, out of range, or does not fit another key."""


@contextmanager
def as_config_error() -> Iterator[None]:
    """Turn errors of data, model and partition into ConfigError, since run-config keys cause them. FileNotFoundError is kept."""
    try:
        yield
    except (ConfigError, FileNotFoundError):
        raise
    except (ValueError, TypeError, ImportError, OSError, MemoryError) as error:
        raise ConfigError(str(error) or type(error).__name__) from error
