"""A kit after its first day: sites that come and go, keys and certificates made anew. Nothing here touches another site."""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fl_bn.support.durable import write
from fl_bn_site.certificates import Identity, make_server, names_in, read_certificate, read_public, write_site_key
from fl_bn_site.folders import FolderError, ServerFolder, SiteFolder, host_port, one_line, site_name
from fl_bn_site.kit import KitError, joined, write_site

SOON = 30  # days before a certificate ends that are worth a word
FORMER = "former"  # folder beside what was replaced


def add_site(server: ServerFolder, name: str, public_key: Path | None, output: Path) -> ServerFolder:
    """Let the site ``name`` take part: its key in ``sites/``, its name in server.toml. Returns the server's folder as it is then.

    ``public_key``: of a key pair that the site made itself; None: ``output`` becomes its whole folder, which has to be empty.

    Raises:
        KitError: the name is taken or no name, the key is another site's or cannot be read, ``output`` holds files, or server.toml is to be
            corrected by hand first. Nothing has changed then.
    """
    try:
        site_name(name)
    except ValueError as error:
        raise KitError(str(error)) from error
    if name.casefold() in {site.casefold() for site in server.sites}:
        raise KitError(f"{server.path / server.file} names a site {name} already: choose another name, or `fl-bn kit renew` its key")
    text = _renamed(server, [*server.sites, name])
    if public_key is None:
        if output.exists() and any(output.iterdir()):
            raise KitError(f"{output} holds files already, and keys are never overwritten: give another --output, or move it away first")
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
        port = host_port(server.fleet)[1]
        exchange = joined(server.exchange_host, server.exchange_port)
        write_site(output, name, joined(server.superlink, port), exchange, server.authority.read_bytes())
        public_key = output / "site.pub"
    server.public_key(name).write_bytes(_checked(server, name, public_key))
    return _written(server, text)


def remove_site(server: ServerFolder, name: str) -> ServerFolder:
    """Take the site ``name`` out of server.toml and its key out of ``sites/``. Returns the server's folder as it is then.

    Raises:
        KitError: there is no such site, it is the last one, or server.toml is to be corrected by hand first. Nothing has changed then.
    """
    if name not in server.sites:
        raise KitError(f"{server.path / server.file} names no site {name}; it names {', '.join(server.sites)}")
    if len(server.sites) == 1:
        raise KitError(f"{name} is the last site: a server without sites has nothing to do; stop it instead")
    changed = _written(server, _renamed(server, [site for site in server.sites if site != name]))
    _retire_key(server, name)
    return changed


def renew_server(server: ServerFolder, authority: Path, days: int) -> Path:
    """Make the server's certificate and key anew, for the same names, signed by the key in ``authority``; where the former ones are.

    Raises:
        KitError: ``authority`` is not the one that the sites trust, or has expired.
    """
    certificate, key = authority / "ca.crt", authority / "ca.key"
    try:
        vouches, old = read_certificate(certificate), read_certificate(server.certificate)
        private = load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise KitError(f"the certificate cannot be renewed: {error}. It takes the authority's folder of the kit (--authority)") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or certificate.read_bytes() != server.authority.read_bytes():
        raise KitError(f"{certificate} is not {server.authority}, which the sites trust: give the authority of this kit")
    if vouches.not_valid_after_utc < datetime.now(UTC):
        ended = f"{vouches.not_valid_after_utc:%Y-%m-%d}"
        raise KitError(f"{certificate} expired on {ended}: make a new kit, since every site needs another ca.crt")
    made = make_server(Identity(vouches, private), [str(name.value) for name in names_in(old)], days)
    former = [_retire(path) for path in (server.certificate, server.key)]
    made.write(server.certificate, server.key)
    return former[0].parent


def renew_site(server: ServerFolder, name: str, public_key: Path | None, folder: Path) -> None:
    """Give the site ``name`` another key: ``public_key`` of a pair that it made itself, or else a new pair in its ``folder``.

    Raises:
        KitError: there is no such site or folder, or the key cannot be used.
    """
    if name not in server.sites:
        raise KitError(f"{server.path / server.file} names no site {name}; it names {', '.join(server.sites)}")
    if public_key is None:
        if not (folder / SiteFolder.file).exists():
            raise KitError(f"{folder} has no {SiteFolder.file}: give the site's folder (--output), or the public key that it sent")
        public_key = folder / "site.pub"
        for half in ("site.key", "site.pub"):
            if (folder / half).exists():
                _retire(folder / half)
        write_site_key(folder / "site.key", public_key, name)
    key = _checked(server, name, public_key)
    _retire_key(server, name)
    server.public_key(name).write_bytes(key)


def days_left(folder: ServerFolder | SiteFolder) -> tuple[Path, int]:
    """The certificate in ``folder`` that ends first, and in how many days; negative: it has ended. Raises OSError, ValueError."""
    paths = [folder.authority, folder.certificate] if isinstance(folder, ServerFolder) else [folder.root_certificates]
    ends = {path: read_certificate(path).not_valid_after_utc for path in paths}
    first = min(paths, key=ends.__getitem__)
    return first, (ends[first] - datetime.now(UTC)).days


def ago(days: int) -> str:
    """Of ``days`` left, negative: ``3 days ago``, in whole days."""
    whole = -days - 1
    return "less than a day ago" if whole == 0 else f"{whole} day{'s' if whole > 1 else ''} ago"


def check_expiry(folder: ServerFolder | SiteFolder) -> str:
    """A warning if a certificate in ``folder`` ends soon, empty if not.

    Raises:
        FolderError: one has ended, so that nothing would connect.
        OSError, ValueError: one cannot be read.
    """
    path, days = days_left(folder)
    renewal = (
        "`fl-bn kit renew` makes another server certificate"
        if isinstance(folder, ServerFolder)
        else "ask the server's operator for a new kit"
    )
    if days < 0:
        raise FolderError(f"{path} expired {ago(days)}, and nothing would connect: {renewal}")
    return f"{path} expires in {days} days: {renewal}" if days < SOON else ""


def former_owner(server: ServerFolder, key: bytes) -> str:
    """The site that had the public ``key`` (DER) before; empty: none that this folder knows of."""
    for path in (server.path / "sites" / FORMER).glob("*.pub.*"):
        with suppress(OSError, ValueError):
            if read_public(path) == key:
                return path.name.rpartition(".pub.")[0]
    return ""


def _checked(server: ServerFolder, name: str, public_key: Path) -> bytes:
    """The content of ``public_key``, which becomes the site's. Raises KitError where it is no such key, or another site has it."""
    try:
        content, key = public_key.read_bytes(), read_public(public_key)
    except (OSError, ValueError) as error:
        raise KitError(f"{public_key} is no public key of a site: {error}") from error
    for other in server.sites:
        if other != name and server.public_key(other).exists() and read_public(server.public_key(other)) == key:
            raise KitError(f"{public_key} is the key of {other}: every site has a key of its own")
    return content


def _renamed(server: ServerFolder, sites: Sequence[str]) -> str:
    """server.toml with other ``sites``, all else as it is, its comments too. Raises KitError where that cannot be done."""
    path = server.path / server.file
    old = path.read_text(encoding="utf-8")
    text, count = re.subn(r"(?ms)^sites\s*=\s*\[.*?\]", lambda _: f"sites = {one_line(sites)}", old)
    if count != 1:
        raise KitError(f"{path}: expected one line `sites = [...]`, but found {count}: correct it by hand")
    with suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(text) == tomllib.loads(old) | {"sites": list(sites)}:
            return text
    raise KitError(f"{path}: the list of sites has a ] within, perhaps in a comment: correct it by hand to one line `sites = [...]`")


def _written(server: ServerFolder, text: str) -> ServerFolder:
    """The server's folder with ``text`` as its server.toml."""
    path = server.path / server.file
    write(path, text.encode(), path.stat().st_mode & 0o777)
    return ServerFolder.read(server.path)


def _retire_key(server: ServerFolder, name: str) -> None:
    """Move the site's public key to the former ones, where there is one."""
    if server.public_key(name).exists():
        _retire(server.public_key(name))


def _retire(path: Path) -> Path:
    """Move a file that is replaced to ``former/`` beside it, under its name and the time: nothing is deleted."""
    folder = path.parent / FORMER
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    shutil.move(path, target)
    return target
