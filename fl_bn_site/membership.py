"""Change a kit after its first day: add and remove sites, renew keys and certificates.

No change touches a site other than the one that it names.
"""

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
    """Let another site take part: its key goes to ``sites/``, its name to server.toml.

    Args:
        server: The server's folder.
        name: The site's name.
        public_key: The public key of a pair that the site made itself; None: make a whole folder for the site
            in ``output``.
        output: The site's folder, which must be empty or absent. It is not used where ``public_key`` is given.

    Returns:
        The server's folder after the change.

    Raises:
        KitError: The name is taken or not allowed, the key belongs to another site or cannot be read,
            ``output`` holds files, or server.toml has to be corrected by hand first. Nothing has changed then.
    """
    try:
        site_name(name)
    except ValueError as error:
        raise KitError(str(error)) from error
    if name.casefold() in {site.casefold() for site in server.sites}:
        raise KitError(f"{server.path / server.file} names a site {name} already: choose another name, or `fl-bn kit renew` its key")
    text = _text_with_sites(server, [*server.sites, name])
    if public_key is None:
        if output.exists() and any(output.iterdir()):
            raise KitError(f"{output} holds files already, and keys are never overwritten: give another --output, or move it away first")
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
        port = host_port(server.fleet)[1]
        exchange = joined(server.exchange_host, server.exchange_port)
        write_site(output, name, joined(server.superlink, port), exchange, server.authority.read_bytes())
        public_key = output / "site.pub"
    server.public_key(name).write_bytes(_read_key(server, name, public_key))
    return _write(server, text)


def remove_site(server: ServerFolder, name: str) -> ServerFolder:
    """Take a site out of server.toml, and its key out of ``sites/``.

    Args:
        server: The server's folder.
        name: The site's name.

    Returns:
        The server's folder after the change.

    Raises:
        KitError: There is no such site, it is the last one, or server.toml has to be corrected by hand first.
            Nothing has changed then.
    """
    if name not in server.sites:
        raise KitError(f"{server.path / server.file} names no site {name}; it names {', '.join(server.sites)}")
    if len(server.sites) == 1:
        raise KitError(f"{name} is the last site: a server without sites has nothing to do; stop it instead")
    changed = _write(server, _text_with_sites(server, [site for site in server.sites if site != name]))
    _retire_key(server, name)
    return changed


def renew_server(server: ServerFolder, authority: Path, days: int) -> Path:
    """Make the server's certificate and key anew, for the same names.

    Args:
        server: The server's folder.
        authority: The folder with the authority's certificate and key, which signs the new certificate.
        days: How long the new certificate is valid.

    Returns:
        The folder with the former certificate and key.

    Raises:
        KitError: ``authority`` is not the one that the sites trust, cannot be read, or has expired.
    """
    certificate, key = authority / "ca.crt", authority / "ca.key"
    try:
        vouches, old = read_certificate(certificate), read_certificate(server.certificate)
        private = load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise KitError(f"the certificate cannot be renewed: {error}. Give the authority's folder of the kit (--authority)") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey) or certificate.read_bytes() != server.authority.read_bytes():
        raise KitError(f"{certificate} is not {server.authority}, which the sites trust: give the authority of this kit")
    if vouches.not_valid_after_utc < datetime.now(UTC):
        ended = f"{vouches.not_valid_after_utc:%Y-%m-%d}"
        raise KitError(f"{certificate} expired on {ended}: make a new kit, since every site needs another ca.crt")
    renewed = make_server(Identity(vouches, private), [str(name.value) for name in names_in(old)], days)
    former = [_retire(path) for path in (server.certificate, server.key)]
    renewed.write(server.certificate, server.key)
    return former[0].parent


def renew_site(server: ServerFolder, name: str, public_key: Path | None, folder: Path) -> None:
    """Give a site another key.

    Args:
        server: The server's folder.
        name: The site's name.
        public_key: The public key of a pair that the site made itself; None: make a new pair in ``folder``.
        folder: The site's folder.

    Raises:
        KitError: There is no such site or folder, or the key cannot be used.
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
    key = _read_key(server, name, public_key)
    _retire_key(server, name)
    server.public_key(name).write_bytes(key)


def days_left(folder: ServerFolder | SiteFolder) -> tuple[Path, int]:
    """Find the certificate in ``folder`` that ends first.

    Returns:
        Its path, and the days that it is still valid; negative: it has ended.

    Raises:
        OSError: A certificate cannot be read.
        ValueError: A file holds no certificate.
    """
    paths = [folder.authority, folder.certificate] if isinstance(folder, ServerFolder) else [folder.root_certificates]
    ends = {path: read_certificate(path).not_valid_after_utc for path in paths}
    first = min(paths, key=ends.__getitem__)
    return first, (ends[first] - datetime.now(UTC)).days


def ago(days: int) -> str:
    """Return how long ago a certificate ended, as ``3 days ago``.

    ``days`` are those that it is still valid: a negative number.
    """
    whole = -days - 1
    return "less than a day ago" if whole == 0 else f"{whole} day{'s' if whole > 1 else ''} ago"


def check_expiry(folder: ServerFolder | SiteFolder) -> str:
    """Return a warning if a certificate in ``folder`` ends soon; empty: none does.

    Raises:
        FolderError: A certificate has ended, so that nothing would connect.
        OSError: A certificate cannot be read.
        ValueError: A file holds no certificate.
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
    """Return the site that had the public ``key`` (DER) before; empty: this folder knows of none."""
    for path in (server.path / "sites" / FORMER).glob("*.pub.*"):
        with suppress(OSError, ValueError):
            if read_public(path) == key:
                return path.name.rpartition(".pub.")[0]
    return ""


def _read_key(server: ServerFolder, name: str, public_key: Path) -> bytes:
    """Read the public key that becomes the site's.

    Raises KitError where it is no public key, or belongs to another site.
    """
    try:
        content, key = public_key.read_bytes(), read_public(public_key)
    except (OSError, ValueError) as error:
        raise KitError(f"{public_key} is no public key of a site: {error}") from error
    for other in server.sites:
        if other != name and server.public_key(other).exists() and read_public(server.public_key(other)) == key:
            raise KitError(f"{public_key} is the key of {other}: every site has a key of its own")
    return content


def _text_with_sites(server: ServerFolder, sites: Sequence[str]) -> str:
    """Return the text of server.toml with other ``sites``. All other lines and comments stay.

    Raises:
        KitError: The line of the sites cannot be replaced.
    """
    path = server.path / server.file
    old = path.read_text(encoding="utf-8")
    text, count = re.subn(r"(?ms)^sites\s*=\s*\[.*?\]", lambda _: f"sites = {one_line(sites)}", old)
    if count != 1:
        raise KitError(f"{path}: expected one line `sites = [...]`, but found {count} of them: correct it by hand")
    with suppress(tomllib.TOMLDecodeError):
        if tomllib.loads(text) == tomllib.loads(old) | {"sites": list(sites)}:
            return text
    raise KitError(f"{path}: the list of sites contains a ], perhaps in a comment: correct it by hand, to one line `sites = [...]`")


def _write(server: ServerFolder, text: str) -> ServerFolder:
    """Write ``text`` to server.toml. Return the folder as it is then."""
    path = server.path / server.file
    write(path, text.encode(), path.stat().st_mode & 0o777)
    return ServerFolder.read(server.path)


def _retire_key(server: ServerFolder, name: str) -> None:
    """Move the site's public key, if there is one, to the former ones."""
    if server.public_key(name).exists():
        _retire(server.public_key(name))


def _retire(path: Path) -> Path:
    """Move a file that is replaced to ``former/`` beside it, under its name and the time. Nothing is deleted."""
    folder = path.parent / FORMER
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    shutil.move(path, target)
    return target
