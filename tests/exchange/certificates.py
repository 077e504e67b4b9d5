"""Make certificates for the tests of TLS: an authority, and a server certificate for this machine that it has signed."""

from __future__ import annotations

from pathlib import Path

from fl_bn_site.certificates import make_authority, make_server
from tests.exchange.cohorts import Certificates


def make_certificates(folder: Path, authority: str = "the federation's authority") -> Certificates:
    """Write a new authority, and a certificate and key of a server at localhost and 127.0.0.1, to PEM files in ``folder``.

    Two calls with different folders make two authorities. A client that trusts one of them refuses the server of the other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server, key, root = (folder / name for name in ("server.pem", "server.key", "authority.pem"))
    vouching = make_authority(authority, days=1)
    vouching.write(root, folder / "authority.key")
    make_server(vouching, ("localhost", "127.0.0.1"), days=1).write(server, key)
    return Certificates(server, key, root)
