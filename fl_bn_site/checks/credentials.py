"""Check the certificates and keys in a folder of the kit (``fl-bn kit create`` makes one folder per machine)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from fl_bn.checks.guard import reason
from fl_bn.support.finding import Finding
from fl_bn_site.certificates import read_certificate, read_public
from fl_bn_site.checks.tls import SOON, Clock, now
from fl_bn_site.folders import ServerFolder
from fl_bn_site.membership import ago
from fl_bn_site.verify import verify

RENEW = "renew it on this machine (`fl-bn kit renew`)"


def kit_files(folder: Path) -> Iterator[Finding]:
    """Yield a finding for each check of ``fl-bn kit verify`` on ``folder``.

    The checks cover dates, names and signatures of certificates, pairs of keys, file modes, TOML files and audit logs.
    """
    for check in verify(folder):
        yield Finding("ok", "kit", check.subject) if check.ok else Finding("fail", "kit", f"not true: {check.subject}", check.remedy)


def expiry(certificates: Iterable[Path], clock: Clock = now, mend: str = RENEW) -> Finding:
    """Check how long the certificates are still valid.

    Args:
        certificates: Certificate files, at least one.
        clock: Returns the current time.
        mend: The advice in the finding: what to do about a certificate that expires, and on which machine.

    Returns:
        A finding about the certificate that expires first: a failure where it has expired, a warning where it
        will expire within ``SOON`` (30 days). A failure, too, where a certificate cannot be read.
    """
    ends: dict[Path, float] = {}
    for path in certificates:
        try:
            ends[path] = (read_certificate(path).not_valid_after_utc - clock()).total_seconds() / 86400
        except (OSError, ValueError) as error:
            return Finding("fail", "expiry", f"{path}: {reason(error)}", "put back the certificate of the kit")
    first = min(ends, key=ends.__getitem__)
    text = f"{first} is the first to expire, in {ends[first]:.0f} days"
    if ends[first] <= 0:
        return Finding("fail", "expiry", f"{first} expired {ago(math.floor(ends[first]))}", f"{mend}: no site can connect before that")
    if ends[first] < SOON.days:
        return Finding("warn", "expiry", text, f"{mend} before that day: no site can connect afterwards")
    return Finding("ok", "expiry", text)


def site_keys(server: ServerFolder) -> Finding:
    """Check that the server's folder has a public key for every site, and that all these keys are different."""
    owners: dict[bytes, str] = {}
    for site in server.sites:
        path = server.public_key(site)
        try:
            other = owners.setdefault(read_public(path), site)
        except (OSError, ValueError) as error:
            return Finding("fail", "site keys", f"{path}: {reason(error)}", f"ask {site} for its site.pub, and put it there")
        if other != site:
            return Finding(
                "fail",
                "site keys",
                f"{other} and {site} have the same public key, so Flower treats them as one site",
                "ask one of them for the site.pub of its own folder, and put it in sites/",
            )
    return Finding("ok", "site keys", f"{len(owners)} public keys, all different: {', '.join(server.sites)}")
