"""What a strategy reads of the run that ``fl-bn submit`` submitted, and what it tells ``fl-bn status``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_bn.exchange.settings import Certificates
from fl_bn.flower import InProcessGrid, OwnAppStrategy, RunFailed
from fl_bn.flower.deployment import Progress, called_in, exchange_in, submitted
from fl_bn.flower.layerwise.exchanges import Exchanges
from fl_bn.methods import METHODS
from tests.exchange.certificates import make_certificates
from tests.flower.inside import PROGRESS, ExchangeSettings
from tests.hostile.own_app import CLIENTS, net, own_app
from tests.listed import listed

KIT: dict[str, Any] = {
    "name": "mine", "client-nodes": "11,12", "client-names": "east,west",
}  # fmt: skip
LINES = 'exchange-host = "fl.example.org"\nexchange-port = 9097\nexchange-ports = 4\n'


def grid(config: dict[str, Any], app: str = "you/myapp") -> Any:
    return SimpleNamespace(run=SimpleNamespace(override_config=config, fab_id=app))


class Kit(InProcessGrid):
    """A grid of a run that ``fl-bn submit`` submitted."""

    run = property(lambda self: self.of.run)

    def __init__(self, of: Any, method: str = "fbn") -> None:
        super().__init__(own_app(method), CLIENTS, {})
        self.of = of


def test_what_fl_bn_submit_did_not_submit_tells_nothing() -> None:
    for one in (object(), SimpleNamespace(run=None), grid({}), grid({"name": "x"}), InProcessGrid(own_app(), CLIENTS, {})):
        assert submitted(one) == {}
        assert called_in(one).names == ()
    assert exchange_in(ExchangeSettings()) == ExchangeSettings()


def test_sites_are_called_by_name() -> None:
    called = called_in(grid(KIT))
    assert (called.node(12), called.client(0), called.client_of(11)) == ("site west", "site east", 0)
    assert called_in(grid({**KIT, "client-names": "east"})).names == (), "not one for each node"
    assert called_in(grid({**KIT, "client-nodes": "x"})).nodes == ()


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
    assert exchange_in(ExchangeSettings(join_deadline=5.0)).join_deadline == 5.0
    (server / "server.toml").write_text(LINES + "exchange-timeout = 90.0\n")
    assert exchange_in(ExchangeSettings()).deadline == 90.0
    for own in (ExchangeSettings(host="other.example.org", certificates=files), ExchangeSettings(carrier="replay")):
        assert exchange_in(own) is own


@listed("given", [{"host": "h.example.org", "insecure": True}, {"port": 8000}, {"bind": "127.0.0.1"}])
def test_an_exchange_without_encryption_is_refused_in_a_deployment(given: Any, server: Path) -> None:
    """As is a round that needs one."""
    for ask, error in ((exchange_in, ValueError), (in_a_round, RunFailed)):
        with pytest.raises(error) as told:
            ask(ExchangeSettings(**given))
        assert all(name in str(told.value) for name in given)


def in_a_round(settings: ExchangeSettings) -> None:
    Exchanges(settings, net(), {}).round(grid(KIT), [], [], 1.0)


def test_a_file_that_the_server_s_folder_lacks_is_named(server: Path) -> None:
    for name in ("server.key", "server.toml"):
        (server / name).unlink()
        with pytest.raises(ValueError, match=name):
            exchange_in(ExchangeSettings())


# Progress


def test_an_own_app_tells_its_rounds(tmp_path: Path) -> None:
    config = {"name": "mine", "client-nodes": "1,2,3,4,5", "client-names": "a,b,c,d,e", "output": str(tmp_path)}
    strategy = OwnAppStrategy(net(), METHODS["fbn"]())
    strategy.start(Kit(grid(config)), num_rounds=2)
    begun, *rows = [json.loads(line) for line in (tmp_path / "mine" / PROGRESS).read_text().splitlines()]
    assert begun == {"round": 0, "rounds": 2}
    assert [(row["round"], row["rounds"], row["cohort"], row["accepted"]) for row in rows] == [(1, 2, 5, 5), (2, 2, 5, 5)]
    assert 0 <= rows[1]["accuracy"] <= 1
    assert rows[1]["seconds"] >= 0


def test_fl_bn_s_own_app_has_files_of_its_own(tmp_path: Path) -> None:
    given = {**KIT, "output": str(tmp_path)}
    for one in (grid(given, "fl-bn/fl-bn"), grid({**given, "clients": 2, "checkpoint-every": 5}), grid({**given, "output": ""}), object()):
        Progress.of(one).begin(3)
        assert list(tmp_path.iterdir()) == []
    Progress.of(grid({**given, "name": "../../etc"})).begin(3)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jsonl")] == [f"etc/{PROGRESS}"]


def test_a_full_disk_costs_the_lines_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine").write_text("a file in its place")
    progress = Progress.of(grid({**KIT, "output": str(tmp_path)}))
    progress.begin(3)
    progress.begin(3)
    assert caplog.text.count("fl-bn status does not show the rounds of this run any more") <= 1
