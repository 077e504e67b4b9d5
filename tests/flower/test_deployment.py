"""What a strategy reads of the run that ``fl-bn submit`` submitted, and what it tells ``fl-bn status``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_bn.exchange.settings import Certificates
from fl_bn.flower import FBN, InProcessGrid, RunFailed
from fl_bn.flower.deployment import Progress, called_in, exchange_in
from fl_bn.flower.layerwise.exchanges import Exchanges
from tests.exchange.certificates import make_certificates
from tests.flower.inside import PROGRESS, ExchangeSettings
from tests.flower.own_apps import net, own_app
from tests.listed import listed
from tests.refusals import naming

KIT: dict[str, Any] = {"name": "mine", "client-nodes": "11,12", "client-names": "east,west"}
LINES = 'exchange-host = "fl.example.org"\nexchange-port = 9097\nexchange-ports = 4\n'


class Kit(InProcessGrid):
    """A grid of a run that ``fl-bn submit`` submitted."""

    run = property(lambda self: SimpleNamespace(override_config=self.told, fab_id=self.fab))

    def __init__(self, app: str = "you/myapp", **config: Any) -> None:
        super().__init__(own_app("fbn"), 2, {})
        self.told, self.fab = {**KIT, **config}, app


def test_sites_are_called_by_name_where_each_node_has_one() -> None:
    called = called_in(Kit())
    assert (called.node(12), called.client(0), called.client_of(11)) == ("site west", "site east", 0)
    for wrong in (Kit(**{"client-names": "east"}), Kit(**{"client-nodes": "x"}), InProcessGrid(own_app(), 2, {}), object()):
        assert called_in(wrong).names == ()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's folder, which its processes find by an environment variable."""
    made = make_certificates(tmp_path)
    for name, file in (("server.crt", made.certificate), ("server.key", made.key), ("ca.crt", made.authority)):
        (tmp_path / name).write_bytes(file.read_bytes())
    (tmp_path / "server.toml").write_text(LINES)
    monkeypatch.setenv("FL_BN_SERVER", str(tmp_path))
    return tmp_path


def test_the_exchange_has_the_kit_s_address_and_certificates_unless_the_app_says_otherwise(server: Path) -> None:
    files = Certificates(server / "server.crt", server / "server.key", server / "ca.crt")
    found = exchange_in(ExchangeSettings(deadline=7.0, policy="shrink"))
    assert (found.host, found.port, found.ports, found.certificates, found.listen_on) == ("fl.example.org", 9097, 4, files, "0.0.0.0")
    assert (found.deadline, found.policy, found.join_deadline) == (7.0, "shrink", 120.0)
    (server / "server.toml").write_text(LINES + "exchange-timeout = 90.0\n")
    assert exchange_in(ExchangeSettings()).deadline == 90.0
    for own in (ExchangeSettings(host="other.example.org", certificates=files), ExchangeSettings(carrier="replay")):
        assert exchange_in(own) is own
    for name in ("server.key", "server.toml"):
        (server / name).unlink()
        with naming(name):
            exchange_in(ExchangeSettings())


@listed("given", [{"host": "h.example.org", "insecure": True}, {"port": 8000}])
def test_a_round_with_an_exchange_without_encryption_is_refused_in_a_deployment(given: Any, server: Path) -> None:
    with naming(next(iter(given)), RunFailed):
        Exchanges(ExchangeSettings(**given), net(), {}).round(Kit(), [], [], 1.0)


def test_an_own_app_tells_its_rounds(tmp_path: Path) -> None:
    FBN(net()).start(Kit(output=str(tmp_path), **{"client-nodes": "1,2"}), num_rounds=2)
    begun, *rows = [json.loads(line) for line in (tmp_path / "mine" / PROGRESS).read_text().splitlines()]
    assert begun == {"round": 0, "rounds": 2}
    assert [(row["round"], row["rounds"], row["cohort"], row["accepted"]) for row in rows] == [(1, 2, 2, 2), (2, 2, 2, 2)]
    assert rows[1]["seconds"] >= 0


def test_fl_bn_s_own_app_has_files_of_its_own_and_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    output = str(tmp_path)
    for one in (Kit("fl-bn/fl-bn", output=output), Kit(output=output, clients=2, **{"checkpoint-every": 5}), Kit(), object()):
        Progress.of(one).begin(3)
        assert list(tmp_path.iterdir()) == []
    Progress.of(Kit(name="../../etc", output=output)).begin(3)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl")] == [f"etc/{PROGRESS}"]
