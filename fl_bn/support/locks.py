"""Lock files, so that only one process at a time uses them. A lock ends at the latest when its process ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


class Unsupported(RuntimeError):
    """Signal that this operating system lacks something that the command needs."""


def hold(file: IO[str], *, shared: bool = False) -> None:
    """Lock ``file`` until it is closed, or this process ends. The call does not wait for a lock.

    Args:
        file: an open file.
        shared: whether other processes may hold a ``shared`` lock at the same time.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: the file's file system has no locks.
        Unsupported: the operating system has no locks of this kind.
    """
    if fcntl is None:
        raise Unsupported("this command needs the file locks of Linux or macOS (fcntl), which Windows lacks: use it in WSL")
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def take(path: Path, lockless: Callable[[], None] = lambda: None) -> IO[str]:
    """Lock the file at ``path``, which is created if missing, until ``release`` or the end of this process.

    Args:
        path: the file.
        lockless: called if the file system has no locks. Other processes can then use the file, too.

    Returns:
        The open file, for ``release``.

    Raises:
        BlockingIOError: another process has locked it.
        Unsupported: the operating system has no locks of this kind.
    """
    while True:
        lock = path.open("w")
        try:
            hold(lock)
        except (BlockingIOError, Unsupported):
            lock.close()
            raise
        except OSError:
            lockless()
            return lock
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                return lock
        lock.close()  # another process removed the file between our opening and our locking: a lock on it keeps no process out


def release(lock: IO[str], path: Path) -> None:
    """Release ``lock``, which ``take`` returned for the file at ``path``, and remove that file."""
    path.unlink(missing_ok=True)
    lock.close()
