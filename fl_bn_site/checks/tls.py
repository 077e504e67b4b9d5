"""Check, from a site, the certificate of the SuperLink, and how far the clocks of site and server are apart."""

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
from fl_bn_site.days import SOON as SOON_DAYS

EXPIRED, NOT_YET_VALID = 10, 9  # values of OpenSSL's constants X509_V_ERR_...
WRONG_NAME, WRONG_ADDRESS = 62, 64
SOON = timedelta(days=SOON_DAYS)

# Flower 1.25 refuses a call whose time stamp is 5 s or more after the server's clock, or 305 s or more before it. It checks the time stamp
# before the key, so an unknown key shows whether the stamp is accepted. The call is refused in both cases, and changes nothing there.
AHEAD, BEHIND = 5.0, 305.0  # seconds
METHOD = "/flwr.proto.Fleet/ActivateNode"
WRONG_TIME, WRONG_NODE = "Invalid timestamp", "Invalid node ID"
HEADERS = ("flwr-public-key-bin", "flwr-timestamp", "flwr-signature-bin")
CLOSE = 0.2  # seconds: the accuracy of the measured difference, apart from the time of a round trip
UNEASY = (2.5, 150.0)  # seconds ahead and behind from which there is a warning: about half of what Flower accepts


class FarApart(LookupError):
    """Signal that the clocks of site and server are too far apart to measure: the server accepts no time stamp that was tried."""


Clock = Callable[[], datetime]


def now() -> datetime:
    """Return the time of this machine's clock, in UTC."""
    return datetime.now(UTC)


def handshake(host: str, port: int, authority: Path, clock: Clock = now) -> Finding:
    """Check the server's certificate by a TLS handshake that trusts one authority only.

    Args:
        host: The name or address of the server. The certificate must be valid for it.
        port: The port of the SuperLink for SuperNodes.
        authority: The certificate file of the kit's authority (``ca.crt``).
        clock: Returns the current time.
    """
    check, place = "superlink TLS", f"{host}:{port}"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # create_default_context would also trust the authorities of this machine
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        return Finding("fail", check, f"{authority} cannot be read: {error}", "put back the ca.crt of the kit")
    try:
        version, certificate = _shake(host, port, context)
    except ssl.SSLCertVerificationError as error:
        return _explain_refusal(check, host, port, error, authority)
    except (ssl.SSLError, ConnectionError) as error:
        what = f"{place} accepts connections, but does not speak TLS: {error.strerror or error}"
        return Finding(
            "fail",
            check,
            what,
            "check at `superlink` in site.toml that this is the server's fleet port, and on the server that `fl-bn start` runs",
        )
    text = f"{version}, {place} has a certificate for {host}, signed by {authority.name}, until {_day(certificate.not_valid_after_utc)}"
    if certificate.not_valid_after_utc - clock() < SOON:
        return Finding("warn", check, text, "ask the server's operator to renew it before that day; no site can connect afterwards")
    return Finding("ok", check, text)


def _shake(host: str, port: int, context: ssl.SSLContext) -> tuple[str, x509.Certificate]:
    context.set_alpn_protocols(["h2"])  # the protocol of gRPC
    with socket.create_connection((host, port), TIMEOUT) as raw, context.wrap_socket(raw, server_hostname=host) as tls:
        return tls.version() or "TLS", x509.load_der_x509_certificate(tls.getpeercert(binary_form=True) or b"")


def _explain_refusal(check: str, host: str, port: int, error: ssl.SSLCertVerificationError, authority: Path) -> Finding:
    """Return a finding that says why the certificate of the server was refused.

    A second handshake, which verifies nothing, fetches the certificate itself.

    Args:
        check: The name of the check.
        host: The name or address of the server.
        port: The port of the SuperLink for SuperNodes.
        error: The error of the first handshake.
        authority: The certificate file of the kit's authority.
    """
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    _, certificate = _shake(host, port, anyone)
    place = f"the certificate of {host}:{port}"
    if error.verify_code not in (EXPIRED, NOT_YET_VALID, WRONG_NAME, WRONG_ADDRESS):
        return Finding(
            "fail",
            check,
            f"{place} is not signed by {authority}: {error.verify_message}",
            "this site and the server have folders of different kits, or another machine answers for the server: compare their ca.crt",
        )
    faults = [_out_of_date(certificate)]
    if not any(faults) and error.verify_code in (EXPIRED, NOT_YET_VALID):  # then the authority's certificate is out of date
        place, faults = str(authority), [_out_of_date(read_certificate(authority))]
    remedies = (
        ["if this clock is right, renew the certificate on the server (`fl-bn kit renew`); else set this clock"] if any(faults) else []
    )
    if not is_for(certificate, host):
        faults.append(f"is not for {host}, but for {', '.join(str(name.value) for name in names_in(certificate)) or 'nobody'}")
        remedies.append(f"write one of these names at `superlink` in site.toml, or make a kit with --also {host}")
    return Finding(
        "fail",
        check,
        f"{place} {' and '.join(filter(None, faults)) or error.verify_message}",
        "; ".join(remedies) or "compare the ca.crt of this site and of the server",
    )


def _out_of_date(certificate: x509.Certificate) -> str:
    """Return what is wrong with the dates of ``certificate``; empty: it is valid today."""
    begins, ends, here = certificate.not_valid_before_utc, certificate.not_valid_after_utc, now()
    fault = f"is not valid before {_day(begins)}" if here < begins else f"expired on {_day(ends)}" if here > ends else ""
    return fault and f"{fault} (this clock shows {here:%Y-%m-%d %H:%M} UTC)"


def clock(authority: Path, skew: Callable[[], float] | None, here: Clock = now) -> Finding:
    """Check that this clock is later than the start of the authority's validity, and close to the server's clock.

    Args:
        authority: The certificate file of the kit's authority.
        skew: Returns the seconds by which this clock is behind the server's, as ``server_skew`` measures them;
            None: the server cannot be reached.
        here: Returns the time of this clock.
    """
    check, begins = "clock", read_certificate(authority).not_valid_before_utc
    if here() < begins:
        return Finding(
            "fail",
            check,
            f"this clock shows {here():%Y-%m-%d %H:%M} UTC, which is before {authority.name} was made ({begins:%Y-%m-%d %H:%M})",
            "set this clock",
        )
    weak = f"this clock shows {here():%Y-%m-%d %H:%M:%S} UTC, after {authority.name} was made ({_day(begins)}); the server's is unknown"
    if skew is None:
        return Finding("ok", check, f"{weak}, since the server cannot be reached")
    mend = "set the clock that is wrong, of this machine or of the server, by a time service (chrony, systemd-timesyncd)"
    try:
        behind = skew()
    except FarApart:
        return Finding("fail", check, f"{weak}, since the server refused all time stamps that were tried (up to 12 hours away)", mend)
    except LookupError as error:
        return Finding("ok", check, f"{weak}, since the server did not answer as expected: {error}")
    side = "behind" if behind > 0 else "ahead of"
    text = f"this clock is {abs(behind):.1f} s {side} the server's (Flower accepts 5 s ahead and 305 s behind; measured to {2 * CLOSE:g} s)"
    if not -AHEAD < behind < BEHIND:
        return Finding("fail", check, text, mend)
    if not -UNEASY[0] < behind < UNEASY[1]:
        return Finding("warn", check, text, f"{mend}, before Flower refuses this site")
    return Finding("ok", check, text)


def server_skew(host: str, port: int, authority: Path) -> float:
    """Measure by how many seconds this clock is behind the server's.

    The server does not tell its time. But it refuses a call whose time stamp is ``AHEAD`` (5) seconds or more after its
    clock, or ``BEHIND`` (305) seconds or more before it. So the latest time stamp that it accepts shows its time.

    Args:
        host: The name or address of the server.
        port: The port of the SuperLink for SuperNodes.
        authority: The certificate file of the kit's authority.

    Returns:
        The seconds; negative: this clock is ahead.

    Raises:
        LookupError: The server does not answer as Flower's SuperLink does.
        FarApart: The server refuses all time stamps that are tried (``latest_accepted`` lists them). The difference of the
            clocks is then more than an hour. It is also not close to 2, 3, ..., 12 hours.
    """
    import grpc

    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    credentials = grpc.ssl_channel_credentials(authority.read_bytes())
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    with grpc.secure_channel(target, credentials, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)

        def accepted(ahead: float) -> bool:
            """Return whether the server accepts a call with a time stamp ``ahead`` seconds later than this clock."""
            stamp = (now() + timedelta(seconds=ahead)).isoformat()
            signature = key.sign(stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
            try:
                call(b"", timeout=TIMEOUT, metadata=list(zip(HEADERS, (public, stamp, signature), strict=True)))
            except grpc.RpcError as error:
                if error.details() in (WRONG_TIME, WRONG_NODE):
                    return bool(error.details() == WRONG_NODE)
                raise LookupError(f"{error.code().name} (status of gRPC): {error.details()}") from error
            raise LookupError("the server accepted a call by an unknown key")

        return latest_accepted(accepted) - AHEAD


def latest_accepted(accepted: Callable[[float], bool]) -> float:
    """Search for the latest time stamp that the server accepts, to an accuracy of ``CLOSE`` seconds.

    First, the function looks for any accepted time stamp. It tries every 5 minutes up to an hour before and after this
    clock. Then it tries differences of 2, 3, ..., 12 hours, since a clock may be set to another time zone. From the first
    accepted time stamp, it searches for the latest one by bisection.

    Args:
        accepted: Takes a number of seconds, and returns whether the server accepts a time stamp that is so many seconds
            later than this clock. The accepted numbers form an interval of ``AHEAD + BEHIND`` seconds.

    Returns:
        The seconds by which that time stamp is later than this clock; negative: it is earlier.

    Raises:
        FarApart: The server accepts none of the time stamps that are tried.
    """
    minutes = [sign * 300.0 * k for k in range(13) for sign in (1, -1)]
    hours = [sign * 3600.0 * k for k in range(2, 13) for sign in (1, -1)]  # a clock of another time zone
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
