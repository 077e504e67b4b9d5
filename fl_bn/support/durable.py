"""Write files that a crash does not damage, and lock files for one process at a time.

New content is written to another file, which then replaces the old one. A lock ends
with its process.

The metadata of a safetensors file describe its content (``about``). They also
contain a SHA-256 of the whole file, by which a damaged file is recognised.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch import Tensor  # torch takes seconds to import, and is not needed for files without tensors

SUFFIX = ".safetensors"
UNFINISHED, STALE = ".unfinished-", 3600.0  # prefix of a file being written; after these seconds its writer must be dead
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # a disk, or what a user may write
CHECKSUM, BLANK = "sha256", "0" * 64


class Damaged(ValueError):
    """Signal that a file is cut short, altered, or of another kind."""


def write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write ``data`` to ``path`` durably: after a crash the file holds all of it, or its former content.

    ``mode`` are the permissions, reduced by the umask. If the file cannot be
    written (``OSError``), the former content stays, and no other file is left.
    """
    _make(path.parent)
    for unfinished in path.parent.glob(f"{UNFINISHED}*"):
        with suppress(FileNotFoundError):  # another process has finished this file meanwhile
            if time.time() - unfinished.stat().st_mtime > STALE:
                unfinished.unlink()
    beside = path.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
    try:
        with open(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # a full disk names none
        raise
    sync_folder(path.parent)


def append(path: Path, lines: bytes, sync: bool = True) -> None:
    """Add whole ``lines`` to a file; with ``sync`` durably, so that no later crash removes any.

    Half a line, which an earlier crash left at the end, stays as a line of its own.
    If not all can be written (``OSError``), the file is as before.
    """
    _make(path.parent)
    fresh = not path.exists()
    with path.open("ab+", buffering=0) as file:
        if (length := file.tell()) and lines and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            lines = b"\n" + lines
        if (written := file.write(lines)) < len(lines):
            file.truncate(length)
            raise OSError(errno.ENOSPC, f"only {written} of {len(lines)} bytes fit", str(path))
        if sync:
            os.fsync(file.fileno())
    if fresh and sync:
        sync_folder(path.parent)


def as_csv(rows: Iterable[Iterable[object]], end: str = "\r\n") -> str:
    """Return rows as the content of a CSV file, whose lines end with ``end``."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows(rows)
    return text.getvalue()


def sync_folder(folder: Path) -> None:
    """Sync ``folder``, if its file system can, so that new and renamed files survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    """Make ``folder`` and the folders above it, so that they survive a crash."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def save_network(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write a network to a safetensors file with the metadata ``about``, with the usual permissions.

    If that fails (``OSError``), the former content stays, as for ``write``.
    """
    write(path, in_order(_saved(tensors, about)), mode=0o666)


def _saved(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None) -> bytes:
    """Return the content of a safetensors file, with tensors in row-major order."""
    from safetensors.torch import save

    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, dict(about) if about else None)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write tensors durably, with the metadata ``about``, as ``write`` does."""
    place = secrets.token_hex(len(BLANK) // 2)  # a random text that occurs nowhere else in the file
    data = _saved(tensors, {**about, CHECKSUM: place})
    head, rest = data.split(place.encode(), 1)
    write(path, head + hashlib.sha256(head + BLANK.encode() + rest).hexdigest().encode() + rest)


def in_order(data: bytes) -> bytes:
    """Return a safetensors file with sorted metadata, which otherwise are in any order."""
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    if "__metadata__" in header:
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(-(-len(text) // 8) * 8)  # as safetensors pads
    return len(padded).to_bytes(8, "little") + padded + data[size:]


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata ``about`` that ``save_tensors`` has written.

    Raises:
        Damaged: The file was cut short or altered, or is another one.
        OSError: The file cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = path.read_bytes()
    try:
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        digest = about.pop(CHECKSUM)
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise KeyError(CHECKSUM)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: expected a safetensors file with a checksum of its own, but its header cannot be read") from error
    if hashlib.sha256(data.replace(digest.encode(), BLANK.encode(), 1)).hexdigest() != digest:
        raise Damaged(f"{path}: its checksum does not match its {len(data)} bytes: it was cut short or altered")
    try:
        return load(data), about
    except SafetensorError as error:
        raise Damaged(f"{path}: {error}") from error


def set_aside(path: Path) -> Path:
    """Rename a damaged file, so that no program reads it. Return the path, ``*.set-aside-1`` or so."""
    number = 1
    while (aside := path.with_name(f"{path.name}.set-aside-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


class Unsupported(RuntimeError):
    """Signal that this operating system lacks something that the command needs."""


def hold(file: IO[str], *, shared: bool = False) -> None:
    """Lock ``file`` until it is closed, or this process ends, without waiting for a lock.

    Other processes may hold a ``shared`` lock at the same time.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: the file's file system has no locks.
        Unsupported: the operating system has no locks of this kind.
    """
    if fcntl is None:
        raise Unsupported("this command needs the file locks of Linux or macOS (fcntl), which Windows lacks: use it in WSL")
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def take(path: Path, lockless: Callable[[], None] = lambda: None) -> IO[str]:
    """Lock the file at ``path``, made if missing, until ``release`` or the end of this process.

    ``lockless`` is called if the file system has no locks. Other processes can then
    use the file, too.

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
        lock.close()  # another process removed the file before our locking: a lock on it keeps no process out


def release(lock: IO[str], path: Path) -> None:
    """Release the ``lock`` that ``take`` returned for ``path``, and remove that file."""
    path.unlink(missing_ok=True)
    lock.close()
