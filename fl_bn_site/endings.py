"""Put into words why a process or a message failed: for the site's log, and for the server that waits for the answer."""

from __future__ import annotations

import signal
import traceback
from pathlib import Path

OWN = ("fl_bn", "fl_bn_site")  # packages whose error messages are sentences for users
VMSTAT = Path("/proc/vmstat")  # counts the processes that the system killed because memory ran out


def ending(code: int, for_memory: bool) -> str:
    """Return in words how a process ended; empty: it ended with exit code 0.

    Args:
        code: The exit code of the process; where a signal ended it, minus the number of the signal.
        for_memory: Whether the system killed any process for lack of memory while this one ran.

    >>> ending(0, False), ending(3, False), ending(-11, False), ending(-9, True)
    ('', 'ended with exit code 3', 'was killed by SIGSEGV', 'was killed by SIGKILL: out of memory')
    """
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + (": out of memory" if for_memory and -code == signal.SIGKILL else "")


def in_words(error: Exception) -> str:
    """Return an error as text for the site's log.

    An error that fl-bn itself raised, without another error as its cause, becomes one line. Other errors keep their
    traceback.
    """
    own = type(error).__module__.split(".")[0] in OWN
    return f"{type(error).__name__}: {error}" if own and error.__cause__ is None else "".join(traceback.format_exception(error))


def out_of_memory_kills() -> int:
    """Return how many processes the system has killed for lack of memory since it was booted; 0 where it does not tell."""
    try:
        lines = VMSTAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
