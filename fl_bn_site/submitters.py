"""Make, find and use the key with which a submitter signs runs. The key belongs to a person, and never to the server."""

from __future__ import annotations

import base64
import binascii
import getpass
import hashlib
import io
import json
import os
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_private_key,
)

from fl_bn.support.durable import write
from fl_bn.support.flower_config import OF_OUR_APP, Scalar
from fl_bn_site.certificates import write_private
from fl_bn_site.folders import FolderError, ServerFolder, SiteFolder, site_name
from fl_bn_site.policy import SUBMITTERS
from fl_bn_site.signing import KEY, OF_SERVER, Submitter, public_line, read_submitter, sign

VARIABLE = "FL_BN_SUBMITTER_KEY"  # the environment variable that names the file of the key
PRIVATE, PUBLIC = "submitter.key", "submitter.pub"
FORM = "fl-bn signed run 1"  # the value of ``form`` in a file that --sign-only writes


def write_submitter_key(folder: Path, name: str) -> Submitter:
    """Make the key pair of a submitter: ``submitter.key``, of mode 0600, and ``submitter.pub``.

    Args:
        folder: The folder for both files.
        name: The submitter's name.

    Raises:
        FileExistsError: The folder has a submitter.key already.
        ValueError: The name is not allowed.
    """
    site_name(name)
    private = Ed25519PrivateKey.generate()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(folder / PRIVATE, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    submitter = Submitter(name, private.public_key().public_bytes_raw())
    write(folder / PUBLIC, public_line(submitter).encode(), 0o666)
    return submitter


def read_key(file: Path) -> Ed25519PrivateKey:
    """Read the private key of a submitter, in PEM or OpenSSH's format. Where it is encrypted, ask for the passphrase.

    Raises:
        FolderError: The file cannot be read, or holds no ed25519 key.
    """
    try:
        content = file.read_bytes()
        load = load_ssh_private_key if b"OPENSSH" in content else load_pem_private_key
        try:
            key = load(content, None)
        except TypeError:  # it is encrypted
            key = load(content, getpass.getpass(f"passphrase of {file}: ").encode())
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("expected an ed25519 key, as `fl-bn kit submitter` or `ssh-keygen -t ed25519` makes it")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm, EOFError) as error:
        raise FolderError(f"the submitter's key {file}: {getattr(error, 'strerror', None) or error}") from error
    return key


def key_file(server: ServerFolder, given: Path | None = None) -> Path | None:
    """Return the file of the key with which ``fl-bn submit`` signs; None: no key is found.

    It is ``given``. Without ``given``, it is the file that the environment variable ``FL_BN_SUBMITTER_KEY`` names. Without
    this variable, it is the only key in ``submitters/`` beside the server's folder, as in a new kit.

    Raises:
        FolderError: There are several keys beside the server's folder.
    """
    if given or (named := os.environ.get(VARIABLE)):
        return Path(given or named or "").expanduser()
    found = sorted((server.path.parent / SUBMITTERS).glob(f"*/{PRIVATE}"))
    if len(found) > 1:
        raise FolderError(f"there are {len(found)} keys of submitters in {server.path.parent / SUBMITTERS}: name one by --key FILE")
    return found[0] if found else None


@dataclass(frozen=True)
class Package:
    """Hold the package of a run (Flower's FAB, a zip archive of the app), and the key that signs it.

    Attributes:
        content: The bytes of the package, as sites will receive them.
        key: The submitter's private key; None: the run is not signed here.
    """

    content: bytes
    key: Ed25519PrivateKey | None = None

    @property
    def code(self) -> str:
        """Return the SHA-256 of the package, in hexadecimal digits."""
        return hashlib.sha256(self.content).hexdigest()

    @cached_property
    def _pyproject(self) -> dict[str, Any]:
        """Return the content of the packed pyproject.toml; empty: the file cannot be read."""
        try:
            with zipfile.ZipFile(io.BytesIO(self.content)) as archive:
                return tomllib.loads(archive.read("pyproject.toml").decode())
        except (zipfile.BadZipFile, KeyError, ValueError):
            return {}

    @property
    def defaults(self) -> dict[str, Scalar] | None:
        """Return the run-config keys that the package knows, with their defaults; None: its pyproject.toml cannot be read."""
        if not self._pyproject:
            return None
        return flattened(self._pyproject.get("tool", {}).get("flwr", {}).get("app", {}).get("config", {}))

    @property
    def own(self) -> bool:
        """Return whether the package is a user's own Flower app, which lacks run-config keys of fl-bn's app."""
        return self.defaults is not None and not self.defaults.keys() >= set(OF_OUR_APP)

    @property
    def project(self) -> str:
        """Return the name of the packed project; ``app`` where its pyproject.toml has no name."""
        return str(self._pyproject.get("project", {}).get("name", "app"))

    def known(self, config: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return the part of ``config`` whose keys the package knows. Flower refuses a run with any other key."""
        return {name: value for name, value in config.items() if self.defaults is None or name in self.defaults}

    def signed(self, config: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Return those run-config keys that a signature covers. If the package has a ``key``, add the signature.

        Args:
            config: The whole run config.
        """
        kept = {name: value for name, value in self.known(config).items() if name not in OF_SERVER}
        if self.key is None:
            return kept
        return kept | {KEY: sign(self.key, self.code, (self.defaults or {}) | kept)}


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """Flatten nested tables as Flower does in a run config: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    flat: dict[str, Scalar] = {}
    for name, value in config.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def write_signed(file: Path, config: Mapping[str, Scalar], package: Package) -> None:
    """Write a signed run to ``file``. On the server's machine, ``fl-bn submit --signed`` submits this file."""
    content = {"form": FORM, "config": dict(config), "package": base64.b64encode(package.content).decode()}
    write(file, json.dumps(content).encode())


def read_signed(file: Path) -> tuple[dict[str, Scalar], Package]:
    """Read a file that ``write_signed`` wrote.

    Returns:
        The keys of the run config, the signature included, and the package (without a key).

    Raises:
        FolderError: The file cannot be read, or ``write_signed`` did not write it.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("form") != FORM or not content.keys() >= {"config", "package"}:
            raise ValueError(f"expected a signed run of form = {FORM!r}, as `fl-bn submit --sign-only` writes it")
        return dict(content["config"]), Package(base64.b64decode(content["package"], validate=True))
    except (OSError, ValueError, TypeError, binascii.Error) as error:
        raise FolderError(f"{file}: {getattr(error, 'strerror', None) or error}") from error


# Submitters whom a site trusts


def public_key(name: str, file: Path) -> Submitter:
    """Read the public key file of a submitter.

    Raises:
        FolderError: The file cannot be read, holds no ed25519 key, or the name is not allowed.
    """
    try:
        return read_submitter(site_name(name), file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FolderError(f"{file} is not the public key of a submitter: {getattr(error, 'strerror', None) or error}") from error


def hand_out(submitters: Sequence[Submitter], folder: Path) -> None:
    """Write the public keys of ``submitters`` into the folder ``submitters`` of ``folder``."""
    place = folder / SUBMITTERS
    place.mkdir(exist_ok=True, mode=0o700)
    for submitter in submitters:
        write(place / f"{submitter.name}.pub", public_line(submitter).encode(), 0o666)


def trust(site: SiteFolder, submitter: Submitter) -> None:
    """Let runs of ``submitter`` take place at a site: write the public key into its folder ``submitters``.

    Args:
        site: The site's folder.
        submitter: The submitter.

    Raises:
        FolderError: The site trusts another key of this name.
    """
    path = site.policy.parent / SUBMITTERS / f"{submitter.name}.pub"
    if path.exists() and public_key(submitter.name, path) != submitter:
        raise FolderError(
            f"{path} holds another key of {submitter.name} than the one given: to trust the new key in its place, move this file away first"
        )
    hand_out([submitter], site.policy.parent)
