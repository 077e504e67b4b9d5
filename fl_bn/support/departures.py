"""Call a listener before a client sends data outside its replies: the vectors of an exchange.

The program at a site registers one that writes an audit log.
"""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, int, int], None]
"""Takes a section, a number of bytes and of samples (0: unknown). If it raises, the data stay."""

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Register the one ``listener`` that ``leaving`` calls. If it raises an error, the data are not sent."""
    _listeners[:] = [listener]


def leaving(section: str, nbytes: int, samples: int) -> None:
    """Call the listener, directly before this process sends ``nbytes`` from ``samples`` (0: unknown).

    If it raises an error, for example because it could not write its log, the data
    must not be sent.
    """
    for listener in _listeners:
        listener(section, nbytes, samples)
