"""Make, write and compare the X.509 certificates and key pairs of a kit.

Files with private keys can be read by their owner only.
"""

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
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fl_bn.support.durable import write

HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}\.?)+")
AUTHORITY_DAYS = 3650  # longer than the server's certificate, so that sites keep their ca.crt when the server's is renewed


@dataclass(frozen=True)
class Identity:
    """Hold a certificate and its private key.

    Attributes:
        certificate: The X.509 certificate.
        key: The private key that belongs to it.
    """

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def in_pem(self) -> tuple[bytes, bytes]:
        """Return the certificate and its private key, each in PEM."""
        private = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return self.certificate.public_bytes(Encoding.PEM), private

    def write(self, certificate: Path, key: Path) -> None:
        """Write the certificate and the key as PEM files.

        Args:
            certificate: The file of the certificate.
            key: The file of the private key, which must not exist. It has mode 0600.

        Raises:
            FileExistsError: The file of the key exists.
        """
        content, private = self.in_pem()
        write(certificate, content, 0o666)
        write_private(key, private)


def make_authority(name: str, days: int) -> Identity:
    """Make a certificate authority, with a certificate that it signs itself.

    Args:
        name: The common name of the authority.
        days: The days for which the server's certificate will be valid. The authority is valid for the same
            time, but for ten years at least.
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
    """Make a key pair for the server, and a certificate for it that ``authority`` signs.

    Args:
        authority: The certificate authority of the kit.
        hosts: Host names and IP addresses of the server, without ports.
        days: The days for which the certificate is valid.

    Raises:
        ValueError: A host is neither a name nor an IP address.
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


def make_site_key(site: str) -> tuple[bytes, bytes]:
    """Make the key pair of a site: ECDSA on P-384, in OpenSSH's format, as Flower's SuperNode reads it.

    Args:
        site: The site's name, which becomes the comment of the public key.

    Returns:
        The contents of the private and of the public key file.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    line = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), line + b" " + site.encode() + b"\n"


def write_site_key(private: Path, public: Path, site: str) -> None:
    """Make and write the key pair of a site, as ``make_site_key`` does. ``private``, ``public``: the files.

    Raises:
        FileExistsError: The file of the private key exists.
    """
    secret, line = make_site_key(site)
    write_private(private, secret)
    write(public, line, 0o666)


def write_private(path: Path, content: bytes) -> None:
    """Write ``content`` to a new file of mode 0600.

    Raises:
        FileExistsError: The file exists. No key is ever overwritten.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def alternative_name(host: str) -> x509.GeneralName:
    """Return the entry for ``host`` in a certificate's list of names (subjectAltName).

    Args:
        host: A host name or an IP address, without a port.

    Raises:
        ValueError: ``host`` is neither a host name nor an IP address.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not HOST.fullmatch(host):
            raise ValueError(f"a host must be a host name or an IP address, without a port, but got {host!r}") from None
        return x509.DNSName(host)


def names_in(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Return the host names and IP addresses for which ``certificate`` is valid; an empty list if it has none."""
    try:
        return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def is_for(certificate: x509.Certificate, host: str) -> bool:
    """Return whether ``certificate`` is for the server ``host``, by the rules of gRPC for names. Dates and signer are not checked.

    A name ``*.example.org`` in the certificate stands for hosts with one more label, such as ``a.example.org``.
    """
    name = alternative_name(host)
    patterns = {name.value.lower() for name in names_in(certificate) if isinstance(name, x509.DNSName)}
    if isinstance(name, x509.DNSName):
        return not patterns.isdisjoint({host.lower(), "*." + host.lower().partition(".")[2]})
    return name in names_in(certificate)


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate from a PEM file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file holds no certificate.
    """
    return x509.load_pem_x509_certificate(path.read_bytes())


def fingerprint(path: Path) -> str:
    """Return the SHA-256 fingerprint of the certificate in ``path``, as ``openssl x509 -fingerprint -sha256`` shows it."""
    return read_certificate(path).fingerprint(hashes.SHA256()).hex(":").upper()


def public_half(private: Path) -> bytes:
    """Return the public key that belongs to a private key, in DER.

    Args:
        private: The file of the private key, in PEM or OpenSSH's format.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file holds no elliptic curve key.
    """
    content = private.read_bytes()
    load = load_ssh_private_key if b"OPENSSH" in content else load_pem_private_key
    return _der(load(content, None).public_key())


def read_public(path: Path) -> bytes:
    """Read a public key from a file in OpenSSH's format.

    Returns:
        The key in DER.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file holds no elliptic curve key.
    """
    try:
        return _der(load_ssh_public_key(path.read_bytes()))
    except (UnsupportedAlgorithm, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def key_in(certificate: x509.Certificate) -> bytes:
    """Return the public key in ``certificate``, in DER."""
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
        .not_valid_before(now - timedelta(hours=1))  # so that a site whose clock is a little behind accepts it
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
