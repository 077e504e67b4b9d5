"""Tell the program that runs a client what leaves it beside its replies: the vectors of a layer-wise exchange.

A site's program listens, and writes an audit log. Where nobody listens, as in a simulation, nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, int, int], None]
"""Takes the section, the bytes, and the number of samples behind them (0: unknown). What it raises keeps them from leaving."""

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Call ``listener`` before anything leaves, in place of the one before, until this process ends."""
    _listeners[:] = [listener]


def leaving(section: str, nbytes: int, samples: int) -> None:
    """Tell the listener what is about to leave this process.

    Args:
        section: What it is, as in the disclosure report: ``exchange``.
        nbytes: Its bytes.
        samples: The number of samples behind it; 0: unknown.

    Raises:
        Exception: The listener could not note it, so it must not leave.
    """
    for listener in _listeners:
        listener(section, nbytes, samples)
