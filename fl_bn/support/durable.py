"""Files that are whole or absent: written beside, synced, renamed; with a checksum, so that a damaged one is found and set aside.

A file is safetensors (open it with any reader), whose metadata say what it is (``about``) and hold a SHA-256 of the whole file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # takes seconds to import, which files without tensors need not

SUFFIX = ".safetensors"
UNFINISHED, STALE = ".unfinished-", 3600.0  # prefix of a file being written; seconds after which its writer must be dead
CHECKSUM, BLANK = "sha256", "0" * 64


class Damaged(ValueError):
    """A file is cut short, altered, or not of the kind it should be."""


def write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Put ``data`` at ``path`` durably: after a crash at any moment the file holds all of it, or what it held before.

    ``mode``: of the file, less the process's umask; by default its owner alone reads it.

    Raises:
        OSError: the disk is full, say. What was there stays; nothing is left beside it.
    """
    _make(path.parent)
    for left in path.parent.glob(f"{UNFINISHED}*"):
        with suppress(FileNotFoundError):  # its writer lives, and was faster
            if time.time() - left.stat().st_mtime > STALE:
                left.unlink()
    beside = path.parent / f"{UNFINISHED}{secrets.token_hex(8)}"
    try:
        with open(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append(path: Path, line: bytes) -> None:
    """Add ``line`` to the file at ``path``, durably: no later crash takes it away. What a crash cut short gets a line of its own.

    Raises:
        OSError: the disk is full, say. A part of the line may be there.
    """
    _make(path.parent)
    fresh = not path.exists()
    with path.open("ab+") as file:
        if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            line = b"\n" + line
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if fresh:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable, as far as the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _make(folder: Path) -> None:
    """Make ``folder`` and those above it, durably."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """``tensors`` and what they are, at ``path``, durably. Raises OSError as ``write`` does."""
    from safetensors.torch import save

    place = secrets.token_hex(len(BLANK) // 2)  # nothing else in the file looks like it
    data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, {**about, CHECKSUM: place})
    head, rest = data.split(place.encode(), 1)
    write(path, head + hashlib.sha256(head + BLANK.encode() + rest).hexdigest().encode() + rest)


def in_order(data: bytes) -> bytes:
    """The safetensors file ``data`` with its metadata sorted: safetensors writes them in an order that is another each time."""
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    if "__metadata__" in header:
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(-(-len(text) // 8) * 8)  # as safetensors pads
    return len(padded).to_bytes(8, "little") + padded + data[size:]


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """``(tensors, about)`` of a file of ``save_tensors``.

    Raises:
        Damaged: it is not whole.
        OSError: it cannot be read.
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
        raise Damaged(f"{path}: its checksum is not that of its {len(data)} bytes: it was cut short or altered")
    try:
        return load(data), about
    except SafetensorError as error:
        raise Damaged(f"{path}: {error}") from error


def set_aside(path: Path) -> Path:
    """Rename a file that is no use so that it is not read again, but not lost; its new name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.set-aside-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside
