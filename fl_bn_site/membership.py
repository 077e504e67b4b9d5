"""Change a kit that is in use: add and remove sites, renew keys and certificates.

A change affects only the site or server that it names, and no other site needs new files. There is one exception: after
``replace_authority``, every site needs the new ``ca.crt``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fl_bn.support.durable import write
from fl_bn_site.certificates import Identity, make_authority, make_server, make_site_key, names_in, read_certificate, read_public
from fl_bn_site.days import SOON
from fl_bn_site.folders import FolderError, ServerFolder, SiteFolder, host_port, one_line, site_name
from fl_bn_site.kit import KitError, joined, write_site
from fl_bn_site.policy import SUBMITTERS, submitters_in

FORMER = "former"  # the folder for replaced files, beside the new ones


def add_site(server: ServerFolder, name: str, public_key: Path | None, output: Path) -> ServerFolder:
    """Let another site take part: enter its key in ``sites/`` and its name in server.toml.

    Args:
        server: The server's folder.
        name: The name of the new site.
        public_key: The public key file of a key pair that the site made itself; None: make a key pair and the
            whole folder of the site, in ``output``.
        output: The folder of the site, which must be empty or absent. It is not used with ``public_key``.

    Returns:
        The server's folder after the change.

    Raises:
        KitError: The name is taken or not allowed, the key belongs to another site or cannot be read, or ``output`` holds
            files. Or somebody must correct server.toml by hand first. Nothing was changed.
    """
    try:
        site_name(name)
    except ValueError as error:
        raise KitError(f"a site's name {error}") from error
    if name.casefold() in {site.casefold() for site in server.sites}:
        raise KitError(
            f"{server.path / server.file} names a site {name} already: choose another name, or give that site a new key: `fl-bn kit renew`"
        )
    text = _text_with_sites(server, [*server.sites, name])
    if public_key is None:
        if output.exists() and any(output.iterdir()):
            raise KitError(f"{output} holds files already, and keys are never overwritten: give another --output, or move it away first")
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
        port = host_port(server.fleet)[1]
        exchange, submitters = joined(server.exchange_host, server.exchange_port), submitters_in(server.path / SUBMITTERS)
        write_site(output, name, joined(server.superlink, port), exchange, server.authority.read_bytes(), submitters)
        line = (output / "site.pub").read_bytes()
    else:
        line = _read_key(server, name, public_key)
    write(server.public_key(name), line, 0o666)
    return _write(server, text)


def remove_site(server: ServerFolder, name: str) -> ServerFolder:
    """Take a site out of server.toml, and move its key from ``sites/`` to ``sites/former/``.

    Args:
        server: The server's folder.
        name: The name of the site.

    Returns:
        The server's folder after the change.

    Raises:
        KitError: There is no such site, it is the last site, or somebody must correct server.toml by hand first. Nothing
            was changed.
    """
    if name not in server.sites:
        raise KitError(f"{server.path / server.file} has no site {name}, but only {', '.join(server.sites)}")
    if len(server.sites) == 1:
        raise KitError(f"{name} is the last site, and a server needs one: to end the deployment, stop `fl-bn start` instead")
    changed = _write(server, _text_with_sites(server, [site for site in server.sites if site != name]))
    if (key := server.public_key(name)).exists():
        _keep(key)
        key.unlink()
    return changed


def renew_server(server: ServerFolder, authority: Path, days: int) -> Path:
    """Make a new certificate and key of the server, for the names of the old certificate.

    Args:
        server: The server's folder.
        authority: The folder ``authority`` of the kit, with the certificate and key that sign the new certificate.
        days: The days for which the new certificate is valid.

    Returns:
        The folder to which the old certificate and key were moved.

    Raises:
        KitError: The old certificate cannot be read. Or the authority is not the one that the sites trust, cannot be read, or has expired.
    """
    certificate, key = authority / "ca.crt", authority / "ca.key"
    try:
        vouches, old = read_certificate(certificate), read_certificate(server.certificate)
        private = load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise KitError(f"the certificate cannot be renewed: {error}. Give the folder `authority` of this kit (--authority)") from error
    trusted = certificate.read_bytes() == server.authority.read_bytes()
    if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != vouches.public_key() or not trusted:
        raise KitError(
            f"expected {certificate} to equal {server.authority}, which the sites trust, and {key} to be the private key of this "
            "certificate: give the folder `authority` of this kit (--authority)"
        )
    if vouches.not_valid_after_utc < datetime.now(UTC):
        ended = f"{vouches.not_valid_after_utc:%Y-%m-%d}"
        raise KitError(f"{certificate} expired on {ended}: make a new kit, since every site needs a new ca.crt")
    renewed = make_server(Identity(vouches, private), [str(name.value) for name in names_in(old)], days)
    _swap(dict(zip((server.certificate, server.key), renewed.in_pem(), strict=True)))
    return server.path / FORMER


def replace_authority(server: ServerFolder, authority: Path, days: int) -> list[Path]:
    """Make a new authority, and a new key of the server with a certificate that the new authority signs.

    A site that has the new ``ca.crt`` accepts neither the former server key nor a certificate of the former authority.
    The sites' folders in the kit get the new ``ca.crt``.

    Args:
        server: The server's folder.
        authority: The folder ``authority`` of the kit. It may lack the former authority.
        days: The days for which the server's certificate is valid.

    Returns:
        The new ``ca.crt`` files, one for each site whose folder is in the kit. Every site needs the new file.

    Raises:
        KitError: The server's certificate, from which the server's names are taken, cannot be read.
    """
    try:
        names = [str(name.value) for name in names_in(read_certificate(server.certificate))]
    except (OSError, ValueError) as error:
        problem = f"the names of the server cannot be read from its certificate {server.certificate}: {error}"
        raise KitError(f"{problem}. Put that file back from a copy") from error
    made = make_authority("fl-bn federation", days)
    authority.mkdir(mode=0o700, exist_ok=True)
    sites = [folder for name in server.sites if ((folder := authority.parent / "sites" / name) / SiteFolder.file).exists()]
    trusted = [SiteFolder.read(folder).root_certificates for folder in sites]
    certificate, private = made.in_pem()
    new = dict.fromkeys((authority / "ca.crt", server.authority, *trusted), certificate) | {authority / "ca.key": private}
    _swap(new | dict(zip((server.certificate, server.key), make_server(made, names, days).in_pem(), strict=True)))
    return trusted


def renew_site(server: ServerFolder, name: str, public_key: Path | None, folder: Path) -> Path | None:
    """Replace the key of a site.

    Args:
        server: The server's folder.
        name: The name of the site.
        public_key: The public key file of a key pair that the site made itself; None: make a new key pair in
            ``folder``.
        folder: The folder of the site. It is not used with ``public_key``.

    Returns:
        The file of the new private key, which the site needs; None: the site has it already.

    Raises:
        KitError: There is no such site, ``folder`` is not a site's folder, or the key cannot be read or belongs
            to another site.
    """
    if name not in server.sites:
        raise KitError(f"{server.path / server.file} has no site {name}, but only {', '.join(server.sites)}")
    if public_key is not None:
        _swap({server.public_key(name): _read_key(server, name, public_key)})
        return None
    if not (folder / SiteFolder.file).exists() or (site := SiteFolder.read(folder)).site != name:
        raise KitError(
            f"expected the folder of {name}, with its name in {SiteFolder.file}, but got {folder}: give the site's folder (--output), or "
            "the public key that the site sent (--public-key)"
        )
    private, line = make_site_key(name)
    _swap({site.private_key: private, folder / "site.pub": line, server.public_key(name): line})
    return site.private_key


def days_left(folder: ServerFolder | SiteFolder) -> tuple[Path, int]:
    """Find the certificate in ``folder`` that expires first.

    Returns:
        The path of the certificate, and the whole days until it expires; negative: it has expired.

    Raises:
        OSError: A certificate cannot be read.
        ValueError: A file holds no certificate.
    """
    paths = [folder.authority, folder.certificate] if isinstance(folder, ServerFolder) else [folder.root_certificates]
    ends = {path: read_certificate(path).not_valid_after_utc for path in paths}
    first = min(paths, key=ends.__getitem__)
    return first, (ends[first] - datetime.now(UTC)).days


def check_expiry(folder: ServerFolder | SiteFolder) -> str:
    """Return a warning if a certificate in ``folder`` expires within ``SOON`` days; else an empty text.

    Raises:
        FolderError: A certificate has expired, so no site could connect.
        OSError: A certificate cannot be read.
        ValueError: A file holds no certificate.
    """
    path, days = days_left(folder)
    renewal = "`fl-bn kit renew`, or ask the server's operator for a new kit"
    if days < 0:
        raise FolderError(f"{path} expired {-days} days ago, so no site could connect: {renewal}")
    return f"{path} expires in {days} days: {renewal}" if days < SOON else ""


def owner(server: ServerFolder, key: bytes) -> str:
    """Find the site to which a public key belongs, or belonged earlier.

    Args:
        server: The server's folder, which keeps former keys in ``sites/former``.
        key: The public key in DER.

    Returns:
        The name of the site; empty: no site has or had this key, as far as the files can be read.
    """
    for path in (*map(server.public_key, server.sites), *(server.path / "sites" / FORMER).glob("*.pub.*")):
        with suppress(OSError, ValueError):
            if read_public(path) == key:
                return path.name.rpartition(".pub")[0]
    return ""


def _read_key(server: ServerFolder, name: str, public_key: Path) -> bytes:
    """Read and check the public key file that is to become the key of the site ``name``. Return the content of the file.

    Raises:
        KitError: The file holds no public key, or a key that a site has or had.
    """
    try:
        content, key = public_key.read_bytes(), read_public(public_key)
    except (OSError, ValueError) as error:
        raise KitError(f"{public_key} is not the public key of a site (site.pub): {error}") from error
    if of := owner(server, key):
        raise KitError(
            f"{public_key} is a key that {of} has or had, but every site needs a key of its own, and Flower accepts no former one: "
            f"make another key pair for {name}"
        )
    return content


def _text_with_sites(server: ServerFolder, sites: Sequence[str]) -> str:
    """Return the text of server.toml with another list of ``sites``. All other lines and comments stay.

    Raises:
        KitError: The line ``sites = [...]`` cannot be found or replaced.
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
    """Write ``text`` to server.toml, and read the folder again."""
    path = server.path / server.file
    write(path, text.encode(), path.stat().st_mode & 0o777)
    return ServerFolder.read(server.path)


def _swap(files: Mapping[Path, bytes]) -> None:
    """Replace files by new ones: all, or on a full disk none. Copies of the old ones are in the folders ``former`` beside them.

    Args:
        files: The new content of each file. Private keys can be read by their owner only.
    """
    made: list[Path] = []
    try:
        for path, content in files.items():
            made.append(path.with_name(f".new-{path.name}"))
            write(made[-1], content, 0o600 if b"PRIVATE KEY" in content else 0o666)
        for path in filter(Path.exists, files):
            made.append(_keep(path))
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise
    for new, path in zip(made, files, strict=False):
        new.replace(path)


def _keep(path: Path) -> Path:
    """Copy a file to the folder ``former`` beside it, so that a new file can take its place.

    Returns:
        The path of the copy, which ends in the present time.
    """
    folder = path.parent / FORMER
    folder.mkdir(mode=0o700, exist_ok=True)
    target = folder / f"{path.name}.{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
    write(target, path.read_bytes(), path.stat().st_mode & 0o777)
    return target
