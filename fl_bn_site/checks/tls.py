"""Check the SuperLink's certificate from a site, and the clocks of both."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fl_bn.support.finding import Finding
from fl_bn_site.certificates import is_for, names_in, read_certificate
from fl_bn_site.checks.network import TIMEOUT

EXPIRED, NOT_YET_VALID = 10, 9  # OpenSSL's X509_V_ERR_...
WRONG_NAME, WRONG_ADDRESS = 62, 64
SOON = timedelta(days=30)

# Flower 1.25 refuses a call whose time stamp is 5 s or more after the server's clock, or 305 s or more before it. It looks at the stamp
# before it looks at who asks, so a key made up on the spot will do, and the call is refused in any case: nothing changes on the server.
AHEAD, BEHIND = 5.0, 305.0  # seconds
METHOD = "/flwr.proto.Fleet/ActivateNode"
WRONG_TIME, WRONG_NODE = "Invalid timestamp", "Invalid node ID"
HEADERS = ("flwr-public-key-bin", "flwr-timestamp", "flwr-signature-bin")
CLOSE = 0.2  # seconds: how far the measured skew may be off, and a round trip
UNEASY = (2.5, 150.0)  # seconds ahead and behind: half of what Flower stands


class FarApart(LookupError):
    """Report that the server accepts none of the time stamps that were tried.

    So the clocks of the two machines are too far apart for a measurement of the difference.
    """


Clock = Callable[[], datetime]


def now() -> datetime:
    """Return the time of this clock."""
    return datetime.now(UTC)


def handshake(host: str, port: int, authority: Path, clock: Clock = now) -> Finding:
    """Make a TLS handshake that trusts one authority alone, and check the server's certificate.

    Args:
        host: The server's name or address, for which the certificate must be.
        port: The SuperLink's port for SuperNodes.
        authority: The file with the authority's certificate.
        clock: Returns the time.
    """
    check, place = "superlink TLS", f"{host}:{port}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # not create_default_context: that trusts this machine's authorities, too
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        return Finding("fail", check, f"{authority} cannot be read: {error}", "put back the ca.crt of the kit")
    try:
        version, certificate = _shake(host, port, context)
    except ssl.SSLCertVerificationError as error:
        return _explain_refusal(check, host, port, error, authority)
    except (ssl.SSLError, ConnectionError) as error:
        what = f"{place} listens, but not with TLS: {error.strerror or error}"
        return Finding("fail", check, what, "see that the address is the SuperLink's fleet port, and that it was started by `fl-bn start`")
    text = (
        f"{version}, {place} has a certificate for {host} that {authority.name} vouches for, until {_day(certificate.not_valid_after_utc)}"
    )
    if certificate.not_valid_after_utc - clock() < SOON:
        return Finding("warn", check, text, "have the server's certificate renewed before that day; no site can connect after it")
    return Finding("ok", check, text)


def _shake(host: str, port: int, context: ssl.SSLContext) -> tuple[str, x509.Certificate]:
    context.set_alpn_protocols(["h2"])  # gRPC's
    with socket.create_connection((host, port), TIMEOUT) as raw, context.wrap_socket(raw, server_hostname=host) as tls:
        return tls.version() or "TLS", x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")


def _explain_refusal(check: str, host: str, port: int, error: ssl.SSLCertVerificationError, authority: Path) -> Finding:
    """Say why the certificate is refused.

    The certificate itself says it, after a second handshake that does not verify it.
    """
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    _, certificate = _shake(host, port, anyone)
    place = f"the certificate of {host}:{port}"
    if error.verify_code not in (EXPIRED, NOT_YET_VALID, WRONG_NAME, WRONG_ADDRESS):
        return Finding(
            "fail",
            check,
            f"{place} is not vouched for by {authority}: {error.verify_message}",
            "this site and the server have folders of different kits, or something in between answers for the server: compare both ca.crt",
        )
    faults = [_out_of_date(certificate)]
    if not any(faults) and error.verify_code in (EXPIRED, NOT_YET_VALID):  # then it is the authority's
        place, faults = str(authority), [_out_of_date(read_certificate(authority))]
    remedies = (
        ["if this clock is right, have it renewed: a new server.crt and server.key on the server; else set the clock"]
        if any(faults)
        else []
    )
    if not is_for(certificate, host):
        faults.append(f"is not for {host}, but for {', '.join(str(name.value) for name in names_in(certificate)) or 'nobody'}")
        remedies.append(f"write one of these names at `superlink` in site.toml, or have a certificate made with --also {host}")
    return Finding(
        "fail", check, f"{place} {' and '.join(filter(None, faults)) or error.verify_message}", "; ".join(remedies) or "compare both ca.crt"
    )


def _out_of_date(certificate: x509.Certificate) -> str:
    """Say what is wrong with the dates of ``certificate``; empty: nothing."""
    begins, ends, here = certificate.not_valid_before_utc, certificate.not_valid_after_utc, now()
    fault = f"is not valid before {_day(begins)}" if here < begins else f"expired on {_day(ends)}" if here > ends else ""
    return fault and f"{fault} (here it is {here:%Y-%m-%d %H:%M} UTC)"


def clock(authority: Path, skew: Callable[[], float] | None, here: Clock = now) -> Finding:
    """Compare this clock with the day on which the authority was made, and with the server's clock.

    Args:
        authority: The file with the authority's certificate.
        skew: Asks the server how far this clock is behind; None: the server cannot be reached.
        here: Returns the time.
    """
    check, begins = "clock", read_certificate(authority).not_valid_before_utc
    if here() < begins:
        return Finding(
            "fail",
            check,
            f"it is {here():%Y-%m-%d %H:%M} UTC here, before {authority.name} was made ({begins:%Y-%m-%d %H:%M})",
            "set this clock",
        )
    weak = f"it is {here():%Y-%m-%d %H:%M:%S} UTC here, after {authority.name} was made ({_day(begins)}); closer was not compared"
    if skew is None:
        return Finding("ok", check, f"{weak}, since the server was not reached")
    mend = "set this clock or the server's by a time service (chrony, systemd-timesyncd)"
    try:
        behind = skew()
    except FarApart:
        return Finding("fail", check, f"{weak}, since the server refused all time stamps that were tried, up to half a day from that", mend)
    except LookupError as error:
        return Finding("ok", check, f"{weak}, since the server did not say its time: {error}")
    side = "behind" if behind > 0 else "ahead of"
    text = f"this clock is {abs(behind):.1f} s {side} the server's (Flower stands 5 s ahead and 305 s behind; measured to {2 * CLOSE:g} s)"
    if not -AHEAD < behind < BEHIND:
        return Finding("fail", check, text, mend)
    if not -UNEASY[0] < behind < UNEASY[1]:
        return Finding("warn", check, text, f"{mend}, before Flower refuses this site")
    return Finding("ok", check, text)


def server_skew(host: str, port: int, authority: Path) -> float:
    """Measure by which seconds this clock is behind the server's: by the time stamps that the server accepts.

    Raises:
        LookupError: The server does not tell.
        FarApart: The server refuses every time stamp: each within an hour of now, and those of other time
            zones.
    """
    import grpc

    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    credentials = grpc.ssl_channel_credentials(authority.read_bytes())
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.secure_channel(target, credentials, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)

        def accepted(ahead: float) -> bool:
            """Return whether the server accepts a stamp ``ahead`` seconds after this clock."""
            stamp = (now() + timedelta(seconds=ahead)).isoformat()
            signature = key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
            try:
                call(b"", timeout=TIMEOUT, metadata=list(zip(HEADERS, (public, stamp, signature), strict=True)))
            except grpc.RpcError as error:
                if error.details() in (WRONG_TIME, WRONG_NODE):
                    return bool(error.details() == WRONG_NODE)
                raise LookupError(f"{error.code().name}: {error.details()}") from error
            raise LookupError("it accepted a call of nobody")

        return latest_accepted(accepted) - AHEAD


def latest_accepted(accepted: Callable[[float], bool]) -> float:
    """Search for the latest time stamp that the server accepts, to ``CLOSE`` seconds.

    Args:
        accepted: Tells whether the server accepts a stamp so many seconds after this clock. It accepts an
            interval of ``AHEAD + BEHIND`` seconds.

    Raises:
        FarApart: No time stamp is accepted.
    """
    minutes = [sign * 300.0 * k for k in range(13) for sign in (1, -1)]
    hours = [sign * 3600.0 * k for k in range(2, 13) for sign in (1, -1)]  # wrong time zones
    low = next((ahead for ahead in [*minutes, *hours] if accepted(ahead)), None)
    if low is None:
        raise FarApart(WRONG_TIME)
    high = low + AHEAD + BEHIND
    while high - low > CLOSE:
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d}"
