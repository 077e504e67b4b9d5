"""Unpack the packages of runs (Flower's FAB archives) at a site.

The folder of a package is named by the SHA-256 of the bytes that the gate has verified. No text of the server becomes a
part of a path. Code on disk is not trusted: each message compares the folder with its package, file by file.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOST_BYTES = 64 << 20  # the largest size of an unpacked package; Flower sends at most 10 MiB, packed
KEPT = 4  # packages that stay unpacked
BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)  # errors of ``zipfile``


class PackageError(Exception):
    """Signal that the package of a run cannot be unpacked."""


def files_of(package: bytes) -> dict[str, bytes]:
    """Return the files of a package: path with ``/`` -> content. Entries for folders are left out.

    Raises:
        PackageError: The package is damaged or too large, or the path of a file leaves the folder of the package.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.is_dir()]
            if sum(entry.file_size for entry in entries) > MOST_BYTES:
                raise PackageError(f"the unpacked package of the run has more than {MOST_BYTES >> 20} MiB")
            if any(entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for entry in entries):
                raise PackageError("the package of the run is compressed in another way than Flower's")
            # ``archive.read`` would unpack more than the size that an entry claims to have.
            found = {_inside(entry.filename): archive.open(entry).read(entry.file_size + 1) for entry in entries}
    except BROKEN as error:
        raise PackageError(f"the package of the run cannot be read ({error}): pack and submit it anew") from error
    if len(found) < len(entries):
        raise PackageError("the package of the run has two files of one name: pack and submit it anew")
    return found


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise PackageError(f"the package of the run has a file outside its folder, {name[:80]!r}: pack and submit it anew")
    return str(path)


def unpack(folder: Path, package: bytes, policy: str) -> Path:
    """Return a folder with the files of ``package`` and nothing else, all read-only.

    A folder from an earlier message is used again if every file in it is the same. Packages that came under another
    policy are removed, so those of a submitter who is no longer trusted stay until the next message that is let in.

    Args:
        folder: The folder of the site's unpacked packages. The gate alone may write there, where the site has two users.
        package: The package, which the caller has verified.
        policy: A text that changes with the site's policy.

    Raises:
        PackageError: The package cannot be unpacked.
        OSError: The folder cannot be written.
    """
    files = files_of(package)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = folder / hashlib.sha256(package).hexdigest()
    _forget(folder, place.name, policy)
    if not _holds(place, files):
        _remove(place)
        fresh = folder / f".{secrets.token_hex(8)}"
        _write(fresh, files)
        fresh.rename(place)
    os.utime(place)
    return place


def _forget(folder: Path, wanted: str, policy: str) -> None:
    """Remove the packages of another policy, and all but the newest ones."""
    note = folder / "policy"
    others = [path for path in folder.iterdir() if path.name not in (wanted, note.name)]
    others.sort(key=lambda path: path.lstat().st_mtime)
    if not note.exists() or note.read_text(encoding="utf-8") != policy:
        note.write_text(policy, encoding="utf-8")
        kept = 0
    else:
        kept = KEPT - 1
    for path in others[: max(0, len(others) - kept)]:
        _remove(path)


def _holds(place: Path, files: dict[str, bytes]) -> bool:
    """Return whether a folder has the given files with the given content, and nothing else: no link, no further file."""
    if place.is_symlink() or not place.is_dir():
        return False
    found = {path.relative_to(place).as_posix(): path for path in _entries(place)}
    return found.keys() == files.keys() and all(
        stat.S_ISREG(path.lstat().st_mode) and path.read_bytes() == files[name] for name, path in found.items()
    )


def _entries(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder and below it, but no folders. Links are not followed."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path))
        else:
            yield Path(entry.path)


def _write(place: Path, files: dict[str, bytes]) -> None:
    place.mkdir()
    folders = {place}
    try:
        for name, content in files.items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            folders.update(parent for parent in path.parents if parent.is_relative_to(place))
            path.write_bytes(content)
            path.chmod(0o444)
        for folder in folders:
            folder.chmod(0o555)
    except OSError:
        _remove(place)
        raise


def _remove(place: Path) -> None:
    """Remove a folder, also a read-only one, or a link or a file in its place."""
    if place.is_symlink() or place.is_file():
        place.unlink()
        return
    for folder, _, _ in os.walk(place):
        os.chmod(folder, 0o700)
    shutil.rmtree(place, ignore_errors=True)
