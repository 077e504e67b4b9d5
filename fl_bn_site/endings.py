"""Say why a process or a message failed: to a SuperNode that waits for its answer, and in the site's log.

``app_host.py`` and ``supernode.py`` run this file by its path, since the package around it would import torch.
"""

from __future__ import annotations

import signal
import traceback
from pathlib import Path

ENDED = "fl-bn-ended-bin"  # gRPC metadata of a heartbeat: why a process ended; the heartbeat's token is empty where all have ended
RESTARTED = "the program that runs its ClientApps was started again in the midst of the message"
OWN = ("fl_bn", "policy_of_this_site")  # packages whose errors are sentences
VMSTAT = Path("/proc/vmstat")  # has the number of processes that the system killed for want of memory


def ending(code: int, for_memory: bool) -> str:
    """Say how a process ended; empty: as it should.

    Args:
        code: Its exit code; minus the number of the signal that ended it.
        for_memory: Whether the system killed a process for want of memory meanwhile.

    >>> ending(0, False), ending(3, False), ending(-11, False), ending(-9, True)
    ('', 'ended with exit code 3', 'was killed by SIGSEGV', 'was killed by SIGKILL: out of memory')
    """
    if code >= 0:
        return f"ended with exit code {code}" if code else ""
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + (": out of memory" if for_memory and -code == signal.SIGKILL else "")


def in_words(error: Exception) -> str:
    """Return an error for the site's log: a sentence of fl-bn's own alone, any other error with its traceback."""
    own = type(error).__module__.split(".")[0] in OWN
    return f"{type(error).__name__}: {error}" if own and error.__cause__ is None else "".join(traceback.format_exception(error))


def out_of_memory_kills() -> int:
    """Return how many processes the system has killed for want of memory since it started; 0 where it does not say."""
    try:
        lines = VMSTAT.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
