"""Configs as Flower's command lines take them; without torch, since whoever starts a process should not wait for it."""

from __future__ import annotations

from collections.abc import Mapping

Scalar = str | int | float | bool
SERVER = "FL_BN_SERVER"  # in the environment of a deployed ServerApp: the server's folder


def flower_config(values: Mapping[str, Scalar]) -> str:
    """``key=value`` pairs as Flower's --node-config and --run-config read them. Raises ValueError for a text that they cannot carry."""
    return " ".join(f"{name}={_scalar(name, value)}" for name, value in values.items())


def _scalar(name: str, value: Scalar) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return repr(value)
    single = '"' in value or "\\" in value
    if not value.isprintable() or (single and "'" in value):
        raise ValueError(f"{name}: Flower's configs cannot carry line breaks, nor both kinds of quotes, but got {value!r}")
    return f"'{value}'" if single else f'"{value}"'
