"""cryptography below 45, which Flower 1.25 wants: the advisories for it are about what no part of a deployment does."""

from __future__ import annotations

import ast
from pathlib import Path

import flwr
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import ConfigRecord, RecordDict

from fl_bn.flower.secagg.workflow import is_key
from fl_bn.flower.wire import messages
from fl_bn.support.wire import WireError

ROOT = Path(__file__).parents[2]
PLACES = (ROOT / "fl_bn", ROOT / "fl_bn_site", ROOT / "server_app", ROOT / "client_app", Path(flwr.__file__).parent)
AVOIDED = ("cryptography.x509.verification", "pkcs7", "pkcs12", "CMS")
pytestmark = pytest.mark.pinned("deployments are, and later versions want a newer cryptography")


def uses(source: str) -> set[str]:
    """Which of ``AVOIDED`` are imported, or named as an attribute."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if "cryptography" in (node.module or "") else set()
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if "cryptography" in alias.name}
        elif isinstance(node, ast.Attribute):
            names.add(f".{node.attr}")
    return {avoided for avoided in AVOIDED for name in names if avoided in name}


def test_no_part_verifies_chains_or_reads_pkcs7_by_it() -> None:
    files = [file for place in PLACES for file in place.rglob("*.py") if "_pb2" not in file.name]
    assert len(files) > 500
    assert {str(file): found for file in files if "cryptography" in (text := file.read_text()) and (found := uses(text))} == {}
    assert uses("from cryptography.x509 import verification") == {"cryptography.x509.verification"}  # control
    assert uses("from cryptography.hazmat.primitives.serialization import pkcs7") == {"pkcs7"}


def public(curve: ec.EllipticCurve) -> bytes:
    return ec.generate_private_key(curve).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def test_a_key_on_a_binary_curve_is_refused() -> None:
    """In a secure sum by fl-bn, and at registration by Flower's SuperLink."""
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, uses_nist_ec_curve

    binary, usual = public(ec.SECT409R1()), public(ec.SECP384R1())
    assert not is_key(binary)
    assert not uses_nist_ec_curve(bytes_to_public_key(binary))
    assert is_key(usual)  # control
    with pytest.raises(WireError):
        messages.KEYS.of(RecordDict({messages.RECORD_KEY_CONFIGS: ConfigRecord({"pk1": b"x" * (messages.KEY + 1), "pk2": usual})}))
    assert uses_nist_ec_curve(bytes_to_public_key(usual))
