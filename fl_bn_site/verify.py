"""Check the certificates, keys, file modes, TOML files and audit logs of a kit, or of one of its folders: ``fl-bn kit verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature

from fl_bn.support.finding import Finding, reason
from fl_bn_site.audit_check import check, is_log
from fl_bn_site.certificates import is_for, key_in, names_in, public_half, read_certificate, read_public
from fl_bn_site.days import SOON
from fl_bn_site.folders import FolderError, ServerFolder, SiteFolder, host_port
from fl_bn_site.policy import SUBMITTERS, Policy, PolicyError
from fl_bn_site.submitters import PRIVATE

NEW_KIT = "ask the person who made the kit for the right file"
RENEW = "set the clock if it is wrong, else renew the certificate on the server (`fl-bn kit renew`)"


def verify(folder: Path, noted: str = "") -> Iterator[Finding]:
    """Check a whole kit, the server's folder, a site's folder, or the folder of an audit log.

    Args:
        folder: The folder. Its files show which kind of folder it is.
        noted: A hash that ``fl-bn audit`` printed earlier: a line of the site's audit log must have it; empty: look for none.

    Yields:
        The findings. A fault is a finding, too: this function raises nothing.
    """
    if noted and not ((folder / SiteFolder.file).exists() or is_log(folder)):
        yield _true(False, f"{folder} has an audit log", "give the folder of a site, or of its log")
    if (folder / ServerFolder.file).exists():
        yield from _server(folder)
    elif (folder / SiteFolder.file).exists():
        yield from _site(folder, noted)
    elif is_log(folder):
        yield from _audit(folder, noted)
    elif (folder / "authority").is_dir() or (folder / "server").is_dir():
        yield from _kit(folder)
    else:
        remedy = "give a folder with server.toml or site.toml, or a kit with authority, server and sites"
        yield _true(False, f"{folder} is a folder of a kit", remedy)


def _kit(folder: Path) -> Iterator[Finding]:
    authority, key = folder / "authority" / "ca.crt", folder / "authority" / "ca.key"
    yield _private(key)
    yield _same(f"{key} belongs to {authority}", lambda: public_half(key), lambda: key_in(read_certificate(authority)))
    yield from _server(folder / "server")
    try:
        server = ServerFolder.read(folder / "server")
    except FolderError:
        return  # _server has yielded a failure
    for name in server.sites:
        own, known = folder / "sites" / name, server.public_key(name)
        yield from _site(own)
        yield _same(f"{known} is equal to {own / 'site.pub'}", known.read_bytes, (own / "site.pub").read_bytes)
    for own in sorted((folder / SUBMITTERS).glob(f"*/{PRIVATE}")):
        yield _private(own)
    for part in ("server", *(f"sites/{name}" for name in server.sites)):
        copy = folder / part / "ca.crt"
        yield _same(f"{copy} is equal to {authority}", copy.read_bytes, authority.read_bytes)


def _server(folder: Path) -> Iterator[Finding]:
    try:
        server = ServerFolder.read(folder)
    except FolderError as error:
        yield _true(False, f"{folder / ServerFolder.file} is complete", str(error))
        return
    yield _true(True, f"{folder / server.file} is complete")
    yield _dates(server.authority)
    yield _dates(server.certificate)
    yield from _signed(server)
    yield _private(server.key)
    certificate = server.certificate
    yield _same(f"{server.key} belongs to {certificate}", lambda: public_half(server.key), lambda: key_in(read_certificate(certificate)))
    keys = []
    for name in server.sites:
        path = server.public_key(name)
        try:
            keys.append(read_public(path))
        except (OSError, ValueError) as error:
            yield _true(False, f"{path} is a public key", f"{reason(error)}; {NEW_KIT}")
    yield _true(len(set(keys)) == len(keys), "all sites have different keys", "two files in sites/ are equal: ask for the right site.pub")


def _site(folder: Path, noted: str = "") -> Iterator[Finding]:
    try:
        site = SiteFolder.read(folder)
    except FolderError as error:
        yield _true(False, f"{folder / SiteFolder.file} is complete", str(error))
        return
    yield _true(True, f"{folder / site.file} is complete")
    yield _dates(site.root_certificates)
    yield _private(site.private_key)
    try:
        Policy.read(site.policy)
        yield _true(True, f"{site.policy} is complete")
    except PolicyError as error:
        yield _true(False, f"{site.policy} is complete", f"{error}. This site refuses every run until that is corrected")
    public = folder / "site.pub"
    yield _same(f"{site.private_key} belongs to {public}", lambda: public_half(site.private_key), lambda: read_public(public))
    yield from _audit(site.audit_log, noted)


def _audit(folder: Path, noted: str) -> Iterator[Finding]:
    try:
        found = check(folder, noted)
    except OSError as error:
        yield _true(False, f"the audit log in {folder} can be read", f"{reason(error)}; ask its owner to run this command")
        return
    last = f", {found.lines} lines; the last has the hash {found.head}" if found.lines else ", and empty"
    gone = f" (lines 1 to {found.forgotten} were removed by `fl-bn audit --forget`)" if found.forgotten else ""
    yield _true(not found.faults, f"the audit log in {folder} is whole{last}{gone}", "; ".join(found.faults))
    if noted:
        remedy = "the hash is of another log, or somebody has computed this log anew or removed the line since the hash was noted"
        yield _true(bool(found.noted), f"the audit log in {folder} has a line with the hash {noted}", remedy)


def _dates(path: Path) -> Finding:
    try:
        certificate = read_certificate(path)
    except (OSError, ValueError) as error:
        return _true(False, f"{path} is a certificate", f"{reason(error)}; {NEW_KIT}")
    start, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    subject = f"{path} is valid from {start:%Y-%m-%d} to {end:%Y-%m-%d}"
    if start <= now <= end and (end - now).days < SOON:
        return Finding("warn", "kit", f"{subject}: {(end - now).days} days are left", RENEW)
    return _true(start <= now <= end, subject, f"this clock shows {now:%Y-%m-%d %H:%M} UTC; {RENEW}")


def _signed(server: ServerFolder) -> Iterator[Finding]:
    try:
        authority, certificate = read_certificate(server.authority), read_certificate(server.certificate)
    except (OSError, ValueError):
        return  # _dates has yielded a failure
    try:
        certificate.verify_directly_issued_by(authority)
        signed = True
    except (InvalidSignature, ValueError, TypeError):
        signed = False
    remedy = f"another authority has signed it, so sites would refuse this server; {NEW_KIT}"
    yield _true(signed, f"{server.certificate} is signed by {server.authority}", remedy)
    named = ", ".join(str(name.value) for name in names_in(certificate)) or "nobody"
    for line, host in (("superlink", server.superlink), ("exchange-host", server.exchange_host), ("control", host_port(server.control)[0])):
        if host in ("0.0.0.0", "::"):  # these stand for all addresses of a machine
            continue
        try:
            fits = is_for(certificate, host)
        except ValueError:
            fits = False
        remedy = f"it is for {named}; make a kit with --superlink {host} or --also {host}, or correct {line} in {server.path / server.file}"
        yield _true(fits, f"{server.certificate} is for {line} = {host}", remedy)


def _private(path: Path) -> Finding:
    subject = f"{path} is readable by its owner only"
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        return _true(False, subject, f"{reason(error)}; {NEW_KIT}")
    remedy = f"its mode is {mode:04o}: run chmod 600 {path}; if another person may have read it, renew it (fl-bn kit renew)"
    return _true(not mode & 0o077, subject, remedy)


def _same(subject: str, one: Callable[[], object], other: Callable[[], object]) -> Finding:
    """Check whether two functions return equal values. One that raises cannot read its file: that fails, too."""
    try:
        return _true(one() == other(), subject, f"the two do not belong together; {NEW_KIT}")
    except (OSError, ValueError, TypeError) as error:  # TypeError: a key with a passphrase
        return _true(False, subject, f"{reason(error)}; {NEW_KIT}")


def _true(holds: bool, subject: str, remedy: str = "") -> Finding:
    """Return the finding on a statement about the kit, such as ``server.crt is signed by ca.crt``."""
    return Finding("ok", "kit", subject) if holds else Finding("fail", "kit", f"not true: {subject}", remedy)
