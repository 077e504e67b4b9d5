"""``fl-bn submit`` and the queue: whoever submits is told what the run waits for, and may leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_bn.run.config import ConfigError, RunConfig
from fl_bn_site.folders import FolderError, ServerFolder
from fl_bn_site.membership import add_site, remove_site
from fl_bn_site.queue import NameTaken, Queue
from fl_bn_site.queue_store import WAITING, QueueError, QueueStore
from fl_bn_site.registered import Submitted
from fl_bn_site.runs import abort, list_runs
from fl_bn_site.submit import run_config, submit
from tests.deployment.superlink import THEN

OF_EXCHANGE = [
    f"exchange-{key}" for key in ("host", "port", "join-timeout", "certificate", "key", "authority")
]  # what a server's folder says of it


def test_submit_waits_its_turn_and_says_for_whom(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]
    monkeypatch.setattr("fl_bn_site.submit.time.sleep", lambda seconds: superlink.end(1))
    said: list[str] = []
    assert submit(server, "name='mine' rounds=1", say=said.append)
    assert [line for line in said if "other" in line] == said[:1]
    assert "for sites a, b" in said[1]
    with pytest.raises(NameTaken):
        submit(server, "name='mine' rounds=1", say=said.append)


def test_a_submit_that_is_interrupted_leaves_its_run_in_the_queue(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fl_bn_site.submit.time.sleep", interrupted)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        submit(server, "name='mine' rounds=1", say=said.append)
    assert said[-1] == f"  fl-bn abort {server.path} mine"
    assert [(run.name, run.state) for run in list_runs(server)] == [("mine", WAITING), ("other", "running")]
    abort(server, "mine")
    assert [(run.name, run.state) for run in list_runs(server)] == [("mine", "dropped"), ("other", "running")]


@pytest.mark.parametrize(("owner", "where"), [(Queue, "dispatch"), (QueueStore, "find"), (Queue, "waiting")])
def test_a_submit_that_cannot_look_for_a_while_waits_on(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch, owner: type, where: str
) -> None:
    look, errors = getattr(owner, where), [QueueError("held by another fl-bn"), FolderError("server.toml: cut short"), OSError("no disk")]

    def fails(queue: Any, *args: Any) -> Any:
        if errors:
            raise errors.pop()
        return look(queue, *args)

    monkeypatch.setattr(owner, where, fails)
    assert submit(server, "name='mine' rounds=1", say=lambda line: None)
    assert errors == []


def test_a_waiting_submit_notices_sites_that_come_and_go(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]

    def changed(seconds: float) -> None:
        if superlink.going() == ["other"]:
            add_site(remove_site(server, "a"), "c", None, tmp_path / "c")
        superlink.end(1)

    monkeypatch.setattr("fl_bn_site.submit.time.sleep", changed)
    assert submit(server, "name='mine' rounds=1", say=lambda line: None)
    assert superlink.known[1].config["client-names"] == "b,c"


def test_a_run_without_an_exchange_is_given_no_address_for_one(server: ServerFolder) -> None:
    """Else it would be refused for keys that nobody typed. Control: a run that has an exchange gets all that the folder says."""
    defaults = {key: spec.default for key, spec in RunConfig.keys().items() if key.startswith("exchange")}
    plain = run_config(server, "method='fedavg'")
    assert {key: value for key, value in plain.items() if key.startswith("exchange")} == {key: defaults[key] for key in OF_EXCHANGE}
    RunConfig.from_mapping(plain)
    exchanging = run_config(server, "method='fedtan'")
    assert exchanging["exchange-certificate"] == str(server.certificate)
    assert exchanging["exchange-port"] == server.exchange_port != 0
    with pytest.raises(ConfigError, match="exchange-host"):
        run_config(server, "method='fedavg' exchange-host='elsewhere'")
