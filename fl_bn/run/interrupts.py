"""Let Ctrl-C wait until a short piece of work is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held() -> Iterator[None]:
    """Let SIGINT (Ctrl-C) wait until the end of the ``with`` block, so that files are written completely.

    Use it for short work only, since the user cannot interrupt the work. In other threads than the main thread it does
    nothing, since only the main thread receives signals.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:  # None: the handler was not set from Python
        yield
        return
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)
