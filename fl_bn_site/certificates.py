"""Make, write and compare the X.509 certificates and key pairs of a kit. Only their owner can read private keys."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}\.?)+")
AUTHORITY_DAYS = 3650  # outlives the server's certificate, so that renewing that one reaches no site


@dataclass(frozen=True)
class Identity:
    """Hold a certificate and its private key.

    Attributes:
        certificate: The X.509 certificate.
        key: The private key that belongs to it.
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def write(self, certificate: Path, key: Path) -> None:
        """Write both as PEM files. Raises FileExistsError where the key's file exists."""
        certificate.write_bytes(self.certificate.public_bytes(Encoding.PEM))
        write_private(key, self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def make_authority(name: str, days: int) -> Identity:
    """Make a certificate authority that signs itself.

    Args:
        name: Its common name.
        days: For how long a server's certificate will be valid. The authority is valid for as long, and for ten
            years at least.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    subject = _name(name)
    certificate = (
        _unsigned(subject, subject, key.public_key(), max(days, AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA384())
    )
    return Identity(certificate, key)


def make_server(authority: Identity, hosts: Iterable[str], days: int) -> Identity:
    """Make a server certificate that ``authority`` signs, and its key.

    Args:
        authority: Who signs.
        hosts: Names and addresses of the server.
        days: How long the certificate is valid.

    Raises:
        ValueError: A host is neither a name nor an address.
    """
    names = [alternative_name(host) for host in dict.fromkeys(hosts)]
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    certificate = (
        _unsigned(_name("fl-bn server"), issuer.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, hashes.SHA384())
    )
    return Identity(certificate, key)


def write_site_key(private: Path, public: Path, site: str) -> None:
    """Write a new key pair of a site, in the form that Flower's SuperNode authentication reads: ECDSA P-384, OpenSSH.

    Args:
        private: The file of the private key, which must not exist.
        public: The file of the public key.
        site: The site's name, which becomes the comment of the public key.

    Raises:
        FileExistsError: There is a private key already.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    public.write_bytes(line + b" " + site.encode() + b"\n")


def write_private(path: Path, content: bytes) -> None:
    """Write ``content`` to a new file, which has mode 0600 from its first byte on.

    Raises FileExistsError: no key is overwritten.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def alternative_name(host: str) -> x509.GeneralName:
    """Return ``host`` in the form in which a certificate names it.

    Raises ValueError where it is neither a name nor an address.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST.fullmatch(host):
            raise ValueError(f"a host must be a name or an address, without a port, but got {host!r}") from None
        return x509.DNSName(host)


def names_in(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Return the names and addresses that ``certificate`` is for; none where it has no such list."""
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def is_for(certificate: x509.Certificate, host: str) -> bool:
    """Return whether gRPC would accept ``certificate`` from ``host``; ``*.example.org`` stands for one label."""
    name = alternative_name(host)
    patterns = {name.value.lower() for name in names_in(certificate) if isinstance(name, x509.DNSName)}
    if isinstance(name, x509.DNSName):
        return not patterns.isdisjoint({host.lower(), "*." + host.lower().partition(".")[2]})
    return name in names_in(certificate)


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate (PEM). Raises OSError or ValueError where it cannot be read."""
    return x509.load_pem_x509_certificate(path.read_bytes())


def public_half(private: Path) -> bytes:
    """Return the public key that belongs to a private key.

    Args:
        private: The file of the private key, PEM or OpenSSH.

    Returns:
        The public key as DER.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds no elliptic curve key.
    """
    content = private.read_bytes()
    load = load_ssh_private_key if b"OPENSSH" in content else load_pem_private_key
    return _der(load(content, None).public_key())


def read_public(path: Path) -> bytes:
    """Read a public key (OpenSSH) and return it as DER. Raises OSError or ValueError where it cannot be read."""
    try:
        return _der(load_ssh_public_key(path.read_bytes()))
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from error


def public_in(content: bytes) -> bytes:
    """Return the public key in ``content`` (PEM) as DER. Raises ValueError where there is none."""
    return _der(load_pem_public_key(content))


def key_in(certificate: x509.Certificate) -> bytes:
    """Return the public key of ``certificate`` as DER."""
    return _der(certificate.public_key())


def _der(key: object) -> bytes:
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError(f"expected an elliptic curve key (ECDSA), but got {type(key).__name__}")
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _unsigned(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # for clocks that are a little behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
