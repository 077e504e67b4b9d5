"""Check the certificates, keys, file modes, TOML files and audit logs of a kit, or of one of its folders: ``fl-bn kit verify``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature

from fl_bn_site.audit_check import check, is_log
from fl_bn_site.certificates import is_for, key_in, names_in, public_half, read_certificate, read_public
from fl_bn_site.days import SOON
from fl_bn_site.folders import FolderError, ServerFolder, SiteFolder, host_port
from fl_bn_site.policy import SUBMITTERS, Policy, PolicyError
from fl_bn_site.submitters import PRIVATE

WILDCARDS = ("0.0.0.0", "::")  # these stand for all addresses of a machine
NEW_KIT = "ask the person who made the kit for the right file"


@dataclass(frozen=True)
class Check:
    """Hold the result of one check.

    Attributes:
        ok: Whether ``subject`` is true.
        subject: A statement about the kit, such as ``server.crt is signed by ca.crt``.
        remedy: Why the statement is not true, and what to do then.
    """

    ok: bool
    subject: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"ok    {self.subject}" if self.ok else f"fail  {self.subject}: {self.remedy}"


def verify(folder: Path, noted: str = "") -> list[Check]:
    """Make all checks of a whole kit, of the server's folder, of a site's folder, or of the folder of an audit log.

    Args:
        folder: The folder. Its files show which kind of folder it is.
        noted: A hash that ``fl-bn audit`` printed earlier: a line of the site's audit log must have it; empty: look for none.

    Returns:
        The results. A fault is a failed check: this function raises nothing.
    """
    if (folder / ServerFolder.file).exists():
        return list(_server(folder))
    if (folder / SiteFolder.file).exists():
        return list(_site(folder, noted))
    if is_log(folder):
        return list(_audit(folder, noted))
    if (folder / "authority").is_dir() or (folder / "server").is_dir():
        return list(_kit(folder))
    return [
        Check(
            False, f"{folder} is a folder of a kit", "expected one with server.toml or site.toml, or a kit with authority, server and sites"
        )
    ]


def _kit(folder: Path) -> Iterator[Check]:
    authority, key = folder / "authority" / "ca.crt", folder / "authority" / "ca.key"
    yield from _private(key)
    yield _same(f"{key} belongs to {authority}", lambda: public_half(key), lambda: key_in(read_certificate(authority)), NEW_KIT)
    yield from _server(folder / "server")
    parts = [folder / "server"]
    try:
        server = ServerFolder.read(folder / "server")
    except FolderError:
        return  # _server has yielded a failed check
    for name in server.sites:
        own = folder / "sites" / name
        parts.append(own)
        yield from _site(own)
        yield _same(
            f"{server.public_key(name)} is equal to {own / 'site.pub'}",
            server.public_key(name).read_bytes,
            (own / "site.pub").read_bytes,
            NEW_KIT,
        )
        try:
            site = SiteFolder.read(own)
        except FolderError:
            continue
        port = host_port(server.fleet)[1]
        yield _equal(
            f"{own / site.file}: site",
            site.site,
            name,
        )
        yield _equal(f"{own / site.file}: superlink", host_port(site.superlink), (server.superlink, port))
    for own in sorted((folder / SUBMITTERS).glob(f"*/{PRIVATE}")):
        yield from _private(own)
    for part in parts:
        yield _same(f"{part / 'ca.crt'} is equal to {authority}", (part / "ca.crt").read_bytes, authority.read_bytes, NEW_KIT)


def _server(folder: Path) -> Iterator[Check]:
    try:
        server = ServerFolder.read(folder)
    except FolderError as error:
        yield Check(False, f"{folder / ServerFolder.file} is complete", str(error))
        return
    yield Check(True, f"{folder / server.file} is complete")
    yield from _dates(server.authority)
    yield from _dates(server.certificate)
    yield from _signed(server)
    yield from _private(server.key)
    yield _same(
        f"{server.key} belongs to {server.certificate}",
        lambda: public_half(server.key),
        lambda: key_in(read_certificate(server.certificate)),
        "the certificate and the key do not belong together: put back those of this kit",
    )
    for name in server.sites:
        yield _readable(server.public_key(name))


def _site(folder: Path, noted: str = "") -> Iterator[Check]:
    try:
        site = SiteFolder.read(folder)
    except FolderError as error:
        yield Check(False, f"{folder / SiteFolder.file} is complete", str(error))
        return
    yield Check(True, f"{folder / site.file} is complete")
    yield from _dates(site.root_certificates)
    yield from _private(site.private_key)
    yield _policy(site)
    yield _same(
        f"{site.private_key} belongs to {site.public_key}",
        lambda: public_half(site.private_key),
        lambda: read_public(site.public_key),
        "the two keys do not belong together: put back the site.key of this site.pub, by which the server knows this site",
    )
    logs = site.audit_logs()
    holder = next((log for log in logs if noted and _has(log, noted)), logs[0] if logs else None)
    for log in logs:
        yield from _audit(log, noted if log == holder else "")


def _audit(folder: Path, noted: str) -> Iterator[Check]:
    try:
        found = check(folder, noted)
    except OSError as error:
        yield Check(False, f"the audit log in {folder} can be read", f"{_reason(error)}; ask its owner to run this command")
        return
    if not found.faults:
        last = f"; the last has the hash {found.head}" if found.lines else ""
        gone = f" (lines 1 to {found.forgotten} were removed by `fl-bn audit --forget`)" if found.forgotten else ""
        yield Check(True, f"the audit log in {folder} is whole, {found.lines} lines{gone}{last}")
    for fault in found.faults:
        yield Check(False, f"the audit log in {folder} is whole", fault)
    if noted:
        remedy = "the hash is of another log, or somebody has computed this log anew or removed the line since the hash was noted"
        yield Check(bool(found.noted), f"the audit log in {folder} has a line with the hash {noted}", remedy)


def _has(log: Path, noted: str) -> bool:
    try:
        return bool(check(log, noted).noted)
    except OSError:  # the check of this log reports the error
        return False


def _policy(site: SiteFolder) -> Check:
    """Check whether the site's policy, and the public keys that it names, can be read."""
    subject = f"{site.policy} is complete"
    try:
        Policy.read(site.policy)
    except PolicyError as error:
        return Check(False, subject, f"{error}. This site refuses every run until that is corrected")
    return Check(True, subject)


def _dates(path: Path) -> Iterator[Check]:
    try:
        certificate = read_certificate(path)
    except (OSError, ValueError) as error:
        yield Check(False, f"{path} is a certificate", f"{_reason(error)}; {NEW_KIT}")
        return
    start, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    subject = f"{path} is valid from {start:%Y-%m-%d} to {end:%Y-%m-%d}"
    if start <= now <= end:
        days = (end - now).days
        yield Check(True, subject + (f": renew it soon, {days} days are left" if days < SOON else ""))
    else:
        yield Check(False, subject, f"this clock shows {now:%Y-%m-%d %H:%M} UTC; set the clock if it is wrong, else renew the certificate")


def _signed(server: ServerFolder) -> Iterator[Check]:
    try:
        authority, certificate = read_certificate(server.authority), read_certificate(server.certificate)
    except (OSError, ValueError):
        return  # _dates has yielded a failed check
    subject = f"{server.certificate} is signed by {server.authority}"
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        yield Check(False, subject, f"another authority has signed it, so sites would refuse this server; {NEW_KIT}")
    else:
        yield Check(True, subject)
    named = ", ".join(str(name.value) for name in names_in(certificate)) or "nobody"
    for line, host in (("superlink", server.superlink), ("exchange-host", server.exchange_host), ("control", host_port(server.control)[0])):
        if host in WILDCARDS:
            continue
        try:
            fits = is_for(certificate, host)
        except ValueError:
            fits = False
        remedy = f"it is for {named}; make a kit with --superlink {host} or --also {host}, or correct {line} in {server.path / server.file}"
        yield Check(fits, f"{server.certificate} is for {line} = {host}", remedy)


def _private(path: Path) -> Iterator[Check]:
    subject = f"{path} is readable by its owner only"
    try:
        mode = path.stat().st_mode & 0o777
    except OSError as error:
        yield Check(False, subject, f"{_reason(error)}; {NEW_KIT}")
        return
    yield Check(
        mode & 0o077 == 0, subject, f"its mode is {mode:04o}: run chmod 600 {path}; if another person may have read it, make a new kit"
    )


def _readable(path: Path) -> Check:
    return _same(f"{path} is a public key", lambda: bool(read_public(path)), lambda: True, NEW_KIT)


def _same(subject: str, one: Callable[[], object], other: Callable[[], object], remedy: str) -> Check:
    """Check whether two functions return equal values.

    The check also fails where one of the functions raises OSError or ValueError, since it cannot read its file.

    Args:
        subject: The statement that is true where the values are equal.
        one: The first function.
        other: The second function.
        remedy: What to do where the values differ.
    """
    try:
        return Check(one() == other(), subject, remedy)
    except (OSError, ValueError) as error:
        return Check(False, subject, f"{_reason(error)}; {remedy}")


def _equal(subject: str, got: object, expected: object) -> Check:
    return Check(got == expected, f"{subject} as in server.toml", f"expected {expected}, but got {got}")


def _reason(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error) or type(error).__name__
