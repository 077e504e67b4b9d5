"""Call a listener before a client sends data outside its replies: the vectors of a layer-wise exchange.

The program at a site registers a listener that writes an audit log. Without a listener, as in a simulation, nothing
happens.
"""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[str, int, int], None]
"""Takes a section, a number of bytes, and the number of samples behind them (0: unknown). If it raises, the data do not leave."""

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Register ``listener``, which ``leaving`` then calls. It replaces an earlier listener.

    Args:
        listener: Has the arguments of ``leaving``. If it raises an error, the data are not sent.
    """
    _listeners[:] = [listener]


def leaving(section: str, nbytes: int, samples: int) -> None:
    """Call the listener, directly before this process sends data.

    Args:
        section: The name of the data in the disclosure report: ``exchange``.
        nbytes: The number of bytes.
        samples: The number of samples from which the data were computed; 0: unknown.

    Raises:
        Exception: The listener raised it, for example because it could not write its log. The data must not be sent.
    """
    for listener in _listeners:
        listener(section, nbytes, samples)
