"""Sites are called by their names wherever the server speaks of them, and sides of different versions refuse each other by both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fl_bn.federation.local import Samples
from fl_bn.federation.rounds import Rounds
from fl_bn.flower import RunFailed
from fl_bn.flower.wire import versions
from fl_bn.flower.wire.messaging import send_and_receive
from fl_bn.methods import METHODS
from fl_bn.run.history import History
from fl_bn.support.client_names import ClientNames
from tests.flower.test_messaging import Clock
from tests.flower.test_population import ComingAndGoing
from tests.in_process import WatchedGrid, client_app, identical, run

Clients = Callable[..., list[Samples]]
FBN = METHODS["fbn"]()
NAMED: dict[str, Any] = {"nodes": (1, 2, 3), "names": ("north", "south", "east")}


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


def refusing(clients: list[Samples]) -> WatchedGrid:
    """Client 1 fails in round 2."""

    def disturb(client: int, what: str) -> None:
        if client == 1 and what == "train 2":
            raise OSError("the disk is gone")

    return WatchedGrid(client_app(FBN, clients, disturb=disturb), 3)


def test_log_and_records_speak_of_sites(clients: list[Samples], log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    ran = run(FBN, clients, 2, grid=refusing(clients), policy=NAMED)
    assert "round 2: site south's reply is not used: " in log.text
    said = [line for line in log.messages if "raised:" not in line]  # by the engine that plays the client, too
    assert not [line for line in said if "client 1" in line or "node 2" in line]
    called = ClientNames(NAMED["names"], NAMED["nodes"])
    for folder, who in ((tmp_path / "named", called), (tmp_path / "numbered", ClientNames())):
        folder.mkdir()
        history = History(folder, called=who)
        history.begin()
        for record in ran.records:
            history.add(record)
    lines = (tmp_path / "named/clients.csv").read_text().splitlines()
    assert lines[0].startswith("round,client,site,samples")
    assert [line.split(",")[1:3] for line in lines[1:4]] == [["0", "north"], ["1", "south"], ["2", "east"]]
    rows = [json.loads(line) for line in (tmp_path / "named/rounds.jsonl").read_text().splitlines()]
    assert [client["site"] for client in rows[0]["clients"]] == ["north", "south", "east"]
    plain = (tmp_path / "numbered/clients.csv").read_text()
    assert "site" not in plain  # a simulation's files are as they were
    assert [line.replace(",north", "").replace(",south", "").replace(",east", "") for line in lines[1:]] == plain.splitlines()[1:]
    log.clear()
    run(FBN, clients, 2, grid=refusing(clients), policy={"nodes": NAMED["nodes"]})
    assert "round 2: client 1's reply is not used: " in log.text  # control


def test_who_is_missing_goes_and_comes_back_by_name(
    clients: list[Samples], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    grid = ComingAndGoing(clients, monkeypatch)
    grid.gone = {2, 3}
    with pytest.raises(RunFailed, match=r"missing: sites south, east\)"):
        run(FBN, clients, 1, grid=grid, policy={**NAMED, "wait": 1.0})
    grid = ComingAndGoing(clients, monkeypatch)
    run(FBN, clients, 3, grid=grid, policy={**NAMED, "min_cohort": 3, "wait": 60.0, "rate": grid.leave(2, {1, 2}, {30.0: set()})})
    assert "offline: sites north, south" in log.text
    assert "site south is back" in log.text
    swapped = {**NAMED, "nodes": (2, 1, 3)}
    with pytest.raises(RunFailed, match=r"site south cannot take part: it calls itself site north, but its key belongs to site south"):
        run(FBN, clients, 2, policy=swapped)


def test_a_lost_node_has_its_site_s_name(log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("fl_bn.flower.wire.messaging.time", clock)

    class Grid:
        """Node 7 died of its message, and does not come back."""

        def push_messages(self, messages: Any) -> list[str]:
            self.message = next(iter(messages))
            return [self.message.metadata.message_id or "m"]

        def pull_messages(self, identities: Any) -> list[Message]:
            reply = Message(Error(5, "it died"), reply_to=self.message)
            reply.metadata._reply_to_message_id = next(iter(identities))
            return [reply]

        def get_node_ids(self) -> list[int]:
            return []

    called = ClientNames(("north", "south"), (4, 7))
    for who, said in ((called, "train: site south is lost (code 5: it died); it has 9 s"), (ClientNames(), "train: node 7 is lost")):
        send_and_receive(Grid(), [Message(RecordDict(), 7, "train", ttl=60.0)], 60.0, 9.0, who)  # type: ignore[arg-type]
        assert said in log.text


@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "b"), ("a", "b", "c", "d")])
def test_all_clients_have_names_or_none(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="names must name a site for each of 3 clients, no site twice"):
        Rounds(3, names=names)


def test_the_server_refuses_a_site_of_another_version(
    clients: list[Samples], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    here = versions.here()
    assert versions.client_differs(here) == ""
    for theirs, told in (("0.0.9", f"it has fl-bn 0.0.9, and the server {here}"), ("", "an earlier fl-bn, which names no version")):
        monkeypatch.setattr("fl_bn.flower.app.client_app.here", lambda said=theirs: said)
        with pytest.raises(RunFailed, match=f"site north cannot take part: it has .*and the server {here}: install"):
            run(FBN, clients, 1, policy=NAMED)
        assert told in log.text
    monkeypatch.undo()
    assert len(run(FBN, clients, 1, policy=NAMED).records) == 1  # control


def test_a_site_refuses_a_server_of_another_version(clients: list[Samples], monkeypatch: pytest.MonkeyPatch) -> None:
    other = RecordDict({"fl-bn/config": ConfigRecord({"version": "9.9.9"})})
    monkeypatch.setattr("fl_bn.flower.population.greeting", lambda: other)
    with pytest.raises(RunFailed, match=f"cannot take part: .*this site has fl-bn {versions.here()}, and the server 9.9.9"):
        run(FBN, clients, 1, policy=NAMED)


def test_a_site_that_has_introduced_itself_is_held_to_its_version_in_every_round(
    clients: list[Samples], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """As one is that comes back in the midst of a round with another version, and is asked again."""
    monkeypatch.setattr("fl_bn.flower.strategy.here", lambda: "9.9.9")
    with pytest.raises(RunFailed, match="too few usable replies|enough usable replies"):
        run(FBN, clients, 1, policy=NAMED)
    for site in NAMED["names"]:
        said = rf"round 1: site {site}'s reply is not used: .*this site has fl-bn {versions.here()}, and the server 9\.9\.9"
        assert re.search(said, log.text), log.text


def test_names_alone_change_no_number(clients: list[Samples]) -> None:
    named, plain = (run(FBN, clients, 2, policy=policy) for policy in (NAMED, {}))
    assert identical(named.trajectory[2], plain.trajectory[2])
    assert replace(Rounds(3, **NAMED), names=()).called.client(1) == "client 1"
