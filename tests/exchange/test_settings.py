"""What the exchange's settings refuse, where the service listens, and what counts as this machine alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fl_bn.support.loopback import is_loopback
from tests.exchange.certificates import make_certificates
from tests.exchange.cohorts import Certificates, ExchangeSettings
from tests.listed import listed
from tests.refusals import naming

LOOPBACK = ["127.0.0.1", "127.0.0.53", "127.255.255.254", "::1", "localhost"]
BEYOND = ["192.0.2.1", "0.0.0.0", "::", "2001:db8::1", "server.example", "localhost.example", "notlocalhost", "127.1"]


@listed("host", LOOPBACK)
def test_plaintext_is_fine_on_this_machine(host: str) -> None:
    assert is_loopback(host)
    assert ExchangeSettings(host=host).listen_on == "127.0.0.1"
    assert ExchangeSettings(host=host, bind=host).listen_on == host


@listed("field", ["host", "bind"])
@listed("host", BEYOND)
def test_beyond_this_machine_plaintext_is_refused_unless_it_is_asked_for(host: str, field: str, certificates: Certificates) -> None:
    """Even where the service listens on loopback: something must forward from there to here, and that may be in plaintext."""
    assert not is_loopback(host)
    for beside in ({field: host}, {"bind": "127.0.0.1", field: host}):
        with naming("certificates="):
            ExchangeSettings(**beside)
    assert ExchangeSettings(**{field: host}, insecure=True).insecure
    with naming("certificates="):  # changed settings are checked again
        replace(ExchangeSettings(**{field: host}, certificates=certificates), certificates=None)


def test_the_service_listens_where_clients_come_from(certificates: Certificates) -> None:
    assert ExchangeSettings().listen_on == "127.0.0.1"
    assert ExchangeSettings(host="server.example", certificates=certificates).listen_on == "0.0.0.0"
    assert ExchangeSettings(host="server.example", bind="192.0.2.1", certificates=certificates).listen_on == "192.0.2.1"


@listed("missing", ["certificate", "key", "authority"])
def test_a_certificate_file_that_is_missing_is_named(missing: str, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    path = getattr(certificates, missing)
    path.unlink()
    with naming(f"{missing} "):
        certificates.check()
