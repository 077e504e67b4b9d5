"""Files that one process holds against others, as long as it lives."""

from __future__ import annotations

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
