"""Sites are called by their names wherever the server speaks of them, and sides of different versions refuse each other by both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_bn.flower import Rounds, RunFailed
from fl_bn.flower.wire.messages import here
from fl_bn.methods import METHODS
from fl_bn.run.history import History
from tests.flower.test_population import ComingAndGoing
from tests.in_process import Samples, WatchedGrid, client_app, identical, run
from tests.listed import listed

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
    for folder, called in (("named", Rounds(3, **NAMED).called), ("numbered", Rounds(3).called)):
        (tmp_path / folder).mkdir()
        history = History(tmp_path / folder, called=called)
        history.begin()
        for record in ran.records:
            history.add(record)
    lines = (tmp_path / "named/clients.csv").read_text().splitlines()
    assert [line.split(",")[1:3] for line in lines[:4]] == [["client", "site"], ["0", "north"], ["1", "south"], ["2", "east"]]
    rows = [json.loads(line) for line in (tmp_path / "named/rounds.jsonl").read_text().splitlines()]
    assert [client["site"] for client in rows[0]["clients"]] == ["north", "south", "east"]
    plain = (tmp_path / "numbered/clients.csv").read_text().splitlines()  # a simulation's files are without
    assert [re.sub(",(site|north|south|east)", "", line) for line in lines] == plain
    log.clear()
    run(FBN, clients, 2, grid=refusing(clients), policy={"nodes": NAMED["nodes"]})
    assert "round 2: client 1's reply is not used: " in log.text  # control


def test_who_is_missing_goes_and_comes_back_by_name(
    clients: list[Samples], monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    grid = ComingAndGoing(clients, monkeypatch)
    grid.gone = {2, 3}
    with pytest.raises(RunFailed, match="sites south, east"):
        run(FBN, clients, 1, grid=grid, policy={**NAMED, "wait": 1.0})
    grid = ComingAndGoing(clients, monkeypatch)
    run(FBN, clients, 3, grid=grid, policy={**NAMED, "min_cohort": 3, "wait": 60.0, "rate": grid.leave(2, {1, 2}, {30.0: set()})})
    assert "offline: sites north, south" in log.text
    assert "site south is back" in log.text
    swapped = {**NAMED, "nodes": (2, 1, 3)}
    with pytest.raises(RunFailed, match="site south .* site north"):
        run(FBN, clients, 2, policy=swapped)


@listed(
    ("where", "what", "word"),
    [
        ("fl_bn.flower.handlers.here", lambda: "0.0.9", "site north .* fl-bn 0.0.9"),
        ("fl_bn.flower.handlers.here", lambda: "", "site north .* an earlier"),
    ],
)
def test_a_client_of_another_version_is_refused_by_both(
    where: str, what: Any, word: str, clients: list[Samples], log: pytest.LogCaptureFixture
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, what)
        with pytest.raises(RunFailed) as error:
            run(FBN, clients, 1, policy=NAMED)
    assert re.search(word, f"{error.value} {log.text}")
    assert here() in str(error.value)
    assert len(run(FBN, clients, 1, policy=NAMED).records) == 1  # control


def test_names_alone_change_no_number(clients: list[Samples]) -> None:
    named, plain = (run(FBN, clients, 2, policy=policy) for policy in (NAMED, {}))
    assert identical(named.trajectory[2], plain.trajectory[2])
    assert replace(Rounds(3, **NAMED), names=()).called.client(1) == "client 1"
