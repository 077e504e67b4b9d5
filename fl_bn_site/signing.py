"""Sign runs, and check their signatures: ed25519, over the hash of a run's package (FAB archive) and over its run config.

The signature covers the whole run config, with the defaults of the package, as an app sees it.

The run-config key ``run-signature`` holds the submitter's public key, the time, a nonce that no other run has, and a
signature. The signature covers the time, the nonce, the hash and the run config. Submitter and site both build the signed
bytes (``statement``). The site builds them from the package and the run config that it has received. It hashes the package,
but never opens it.

Apart from ``audit``, this module imports only the standard library, and ``cryptography`` where keys are read, and
signatures made or checked.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import secrets
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fl_bn_site.audit import sync

KEY = "run-signature"  # the run-config key that holds the signature
# keys that a signature does not cover, since the server fills them in when the run starts
OF_SERVER = ("output", "clients", "client-nodes", "client-names")
DAY = 86400
LASTS = 30 * DAY  # seconds for which a signature is valid
AHEAD = DAY  # seconds by which the submitter's clock may be ahead of a site's
KIND = "ssh-ed25519"
FORM = re.compile(r"2\.([0-9a-f]{64})\.([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{128})")  # version, key, time, nonce, signature


class NotSigned(Exception):
    """Signal that a run has no valid signature of a trusted submitter.

    The message is the end of a sentence that begins "this site's policy has allow-code = signed, but".
    """


@dataclass(frozen=True)
class Submitter:
    """Hold the name and the public key of somebody who signs runs.

    Attributes:
        name: The name.
        key: The 32 bytes of the public key.
    """

    name: str
    key: bytes

    def __str__(self) -> str:
        """Return the name, and the fingerprint of the key as ``ssh-keygen -l`` shows it."""
        return f"{self.name} ({fingerprint(self.key)})"


@dataclass(frozen=True)
class Signature:
    """Hold a signature that was checked and is valid.

    Attributes:
        submitter: The submitter who signed.
        at: When the run was signed, in seconds since 1970.
        nonce: A random number that no other signature has, in hexadecimal digits.
    """

    submitter: Submitter
    at: int
    nonce: str


def read_submitter(name: str, line: str) -> Submitter:
    """Read a public key in OpenSSH's format, ``ssh-ed25519 AAAA...``.

    Args:
        name: The name of the key's owner.
        line: The key, as one line of text.

    Raises:
        ValueError: ``line`` is not an ed25519 public key.
    """
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        if line.split()[:1] != [KIND]:  # keys of other kinds, and of hardware, which sign otherwise
            raise ValueError
        key: Any = load_ssh_public_key(line.strip().encode())
    except ValueError as error:
        raise ValueError(f"expected a public key as '{KIND} AAAA... {name}', but got {line.strip()[:60]!r}") from error
    return Submitter(name, key.public_bytes_raw())


def public_line(submitter: Submitter) -> str:
    """Return the public key in OpenSSH's format, with the name as its comment."""
    return f"{KIND} {base64.b64encode(_blob(submitter.key)).decode()} {submitter.name}\n"


def fingerprint(key: bytes) -> str:
    """Return the fingerprint of a public key, as ``ssh-keygen -l`` shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(_blob(key)).digest()).decode().rstrip("=")


def statement(code: str, config: Mapping[str, Any], at: int, nonce: str) -> bytes:
    """Return the bytes that are signed.

    Args:
        code: The SHA-256 of the package, in hexadecimal digits.
        config: The run config, with the defaults of the package. The keys ``OF_SERVER`` and the signature are left out.
        at: The time of the signature, in seconds since 1970.
        nonce: A random number that no other signature has, in hexadecimal digits.
    """
    signed = {name: value for name, value in config.items() if name not in (KEY, *OF_SERVER)}
    values = {"at": at, "code": code, "config": signed, "nonce": nonce}
    return b"fl-bn run 2\n" + json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def sign(private: Any, code: str, config: Mapping[str, Any], now: float | None = None) -> str:
    """Sign a run.

    Args:
        private: The ed25519 private key of the submitter.
        code: The SHA-256 of the package, in hexadecimal digits.
        config: The run config, with the values in the form in which sites receive them.
        now: The time, in seconds since 1970; None: now.

    Returns:
        The value of the run-config key ``run-signature``.
    """
    at, nonce = int(time.time() if now is None else now), secrets.token_hex(16)
    signature = private.sign(statement(code, config, at, nonce)).hex()
    return f"2.{private.public_key().public_bytes_raw().hex()}.{at}.{nonce}.{signature}"


def signer_of(config: Mapping[str, Any], submitters: Iterable[Submitter]) -> str:
    """Return the name of the submitter whose key a run names, without a check of the signature; empty: none of ``submitters``."""
    found = FORM.fullmatch(str(config.get(KEY, "")))
    return next((submitter.name for submitter in submitters if found and submitter.key.hex() == found[1]), "")


def check(code: str, config: Mapping[str, Any], trusted: Iterable[Submitter], now: float | None = None) -> Signature:
    """Check whether a trusted submitter has signed a run.

    ``admit`` checks whether the same signature came with another run before.

    Args:
        code: The SHA-256 of the package, in hexadecimal digits, as the caller has computed it.
        config: The run config as it was received.
        trusted: The submitters whose signatures the site accepts.
        now: The time, in seconds since 1970; None: now.

    Raises:
        NotSigned: The run has no signature. Or the signature is by an unknown key, covers another package or run config,
            is too old, or has a time in the future.
    """
    text, names = config.get(KEY, ""), {submitter.key: submitter for submitter in trusted}
    if text == "":
        raise NotSigned("the run is not signed")
    if not isinstance(text, str) or not (found := FORM.fullmatch(text)):
        raise NotSigned(f"the run's {KEY} is no signature that this version of fl-bn can read: submit the run with this site's version")
    key, at, nonce, signature = bytes.fromhex(found[1]), int(found[2]), found[3], bytes.fromhex(found[4])
    if (submitter := names.get(key)) is None:
        known = ", ".join(map(str, names.values())) or "nobody"
        raise NotSigned(f"the run is signed by the key {fingerprint(key)}, and this site trusts {known}")
    if not _is_of(key, signature, statement(code, config, at, nonce)):
        raise NotSigned(
            f"the signature of {submitter.name} is for another package or run config: one of the two was changed after the signing"
        )
    now = time.time() if now is None else now
    made = f"{submitter.name} signed the run on {datetime.fromtimestamp(min(at, 1 << 37), UTC):%Y-%m-%d}"
    if now > at + LASTS:
        raise NotSigned(f"{made}, and a signature lasts {LASTS // DAY} days: submit the run again")
    if at > now + AHEAD:
        raise NotSigned(f"{made}, which is ahead of this site's clock: set the clock that is wrong")
    return Signature(submitter, at, nonce)


def admit(folder: Path, run: int, signature: Signature, code: str) -> bool:
    """Admit a run, unless its signature came with another run before. Return whether the run is new here.

    Each signed run has a small file, named after the nonce of its signature. The file is on the disk before the run goes on.

    Args:
        folder: The folder of the files, which is made when the first run comes.
        run: Flower's id of the run.
        signature: The checked signature of the run.
        code: The SHA-256 of the package.

    Raises:
        NotSigned: The signature came with another run before.
        OSError: The file cannot be written. The run must not go on then.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{signature.nonce}.json"
    who = signature.submitter
    note = {"run": run, "submitter": who.name, "key": fingerprint(who.key), "code": code, "at": signature.at}
    if new := not path.exists():
        made = folder / f".{signature.nonce}.{secrets.token_hex(4)}"
        with made.open("w", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(made, path)  # fails where the file exists, in contrast to a rename
        except FileExistsError:
            pass
        finally:
            made.unlink()
        sync(folder)
    try:
        before = json.loads(path.read_text(encoding="utf-8"))["run"]
    except (ValueError, KeyError, TypeError):
        before = f"(unknown, since the file {path} is damaged)"
    if before != run:
        raise NotSigned(
            f"the run's signature was used for run {before} already, and a signature is for one run: sign and submit this run again"
        )
    return new


def _is_of(key: bytes, signature: bytes, signed: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def _blob(key: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(part)) + part for part in (KIND.encode(), key))
