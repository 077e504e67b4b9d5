"""Notify a listener of data that leave a client outside its replies: the vectors of a layer-wise exchange.

The program of a site registers a listener, which writes an audit log. Without a listener, as in a simulation, nothing
happens.
"""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, int, int], None]
"""Takes a section, a number of bytes, and the number of samples behind them (0: unknown). If it raises, the data do not leave."""

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Register ``listener``, which is then called before data leave this process. It replaces an earlier listener.

    Args:
        listener: Takes the section of the data in the disclosure report, their number of bytes, and the number of samples
            behind them (0: unknown). If it raises, the data do not leave.
    """
    _listeners[:] = [listener]


def leaving(section: str, nbytes: int, samples: int) -> None:
    """Tell the listener which data are about to leave this process.

    Args:
        section: The section of the data in the disclosure report: ``exchange``.
        nbytes: The number of bytes.
        samples: The number of samples behind the data; 0: unknown.

    Raises:
        Exception: The listener failed, for example to write its log, so the data must not leave.
    """
    for listener in _listeners:
        listener(section, nbytes, samples)
