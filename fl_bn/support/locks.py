"""Files that one process holds against others, as long as it lives."""

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
    """This operating system lacks what the command needs."""


def hold(file: IO[str], *, shared: bool = False) -> None:
    """Hold ``file`` until it is closed, or this process ends; with others that hold it ``shared``, too.

    Raises:
        BlockingIOError: another process holds it.
        OSError: its file system has no locks.
        Unsupported: the operating system has none of this kind.
    """
    if fcntl is None:
        raise Unsupported("this command needs Linux or macOS, whose file locks it uses (fcntl): on Windows, use it in WSL")
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def take(path: Path, lockless: Callable[[], None] = lambda: None) -> IO[str]:
    """Hold the file at ``path``, made where there is none, until ``release``, or until this process ends.

    ``lockless`` is called where the file system has no locks: the file is then held against nobody.

    Raises:
        BlockingIOError: another process holds it.
        Unsupported: as ``hold``.
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
        lock.close()  # whoever held it removed it between our opening and our locking: that file holds nobody back any more


def release(lock: IO[str], path: Path) -> None:
    """Give up the file at ``path`` that ``take`` returned, and remove it."""
    path.unlink(missing_ok=True)
    lock.close()
