"""What Prometheus is told of a server, in its own text format, and the health file."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import CONTENT_TYPE_LATEST

from fl_bn_site import metrics as module
from fl_bn_site.control import ControlError
from fl_bn_site.folders import ServerFolder
from fl_bn_site.kit import KitPlan, create
from fl_bn_site.metrics import Watcher, health, make_server, metrics
from fl_bn_site.status import RunStatus, SiteStatus, Status

SITES = [SiteStatus("east", 7, "online", "2026-11-22T12:00:00+00:00"), SiteStatus("west", None, "not registered", "")]
RUNS = [
    RunStatus(0, "later", "waiting", 0, 9),
    RunStatus(5, "now", "running", 4, 10, 1, 2, 0.25, "r2", 0.5, 2.0, 12.0, {"west": "late"}, 1000, 2000),
    RunStatus(4, "now", "finished:failed", 2, 10, 2, 2, 1.5, "r2", 0.1),
    RunStatus(3, 'a "quoted" \\ name', "finished:completed", 3, 3),
]
STATUS = Status("2026-11-22T12:00:01+00:00", "127.0.0.1:9093", 800, SITES, RUNS)

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')


def parsed(text: str) -> dict[str, float]:
    """Every sample by name and labels, after the rules of the format: HELP and TYPE once, before the samples of one metric together."""
    found: dict[str, float] = {}
    declared: list[str] = []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            declared.append(line.split()[2])
        elif line.startswith("# TYPE "):
            assert line.split()[2] == declared[-1]
            assert line.split()[3] in ("gauge", "counter")
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample, line
            assert sample[1] == declared[-1]
            key = f"{sample[1]}{{{sample[2]}}}" if sample[2] else sample[1]
            assert key not in found, f"{key} twice"
            found[key] = float(sample[3])
    assert len(set(declared)) == len(declared)
    return found


def test_what_prometheus_is_told() -> None:
    found = parsed(metrics(STATUS))
    assert found["fl_bn_up"] == 1
    assert (found["fl_bn_sites"], found["fl_bn_sites_online"], found["fl_bn_runs_waiting"]) == (2, 1, 1)
    assert (found['fl_bn_site_online{site="east"}'], found['fl_bn_site_online{site="west"}']) == (1, 0)
    assert found['fl_bn_site_last_seen_seconds{site="east"}'] == 1795348800
    assert 'fl_bn_site_last_seen_seconds{site="west"}' not in found  # never seen is no time
    assert found["fl_bn_certificate_days_left"] == 800
    assert (found['fl_bn_run_round{run="now"}'], found['fl_bn_run_rounds{run="now"}']) == (4, 10)  # of the newest of that name
    assert found['fl_bn_run_loss{run="now"}'] == 0.25
    assert found['fl_bn_run_metric{metric="r2",run="now"}'] == 0.5
    assert found['fl_bn_run_state{run="later",state="waiting"}'] == 1
    assert (found['fl_bn_run_received_bytes_total{run="now"}'], found['fl_bn_run_sent_bytes_total{run="now"}']) == (1000, 2000)
    assert found['fl_bn_run_rounds{run="a \\"quoted\\" \\\\ name"}'] == 3
    assert parsed(metrics(None)) == {"fl_bn_up": 0}
    with pytest.raises(AssertionError):  # control
        parsed(metrics(STATUS).replace('run="now"', 'run="no\\w"'))


def test_health_says_what_is_wrong() -> None:
    assert health(STATUS)["ok"]
    assert health(STATUS)["sites"][0]["name"] == "east"
    assert health(replace(STATUS, expires=-3))["problem"] == "a certificate expired 2 days ago"
    assert health(replace(STATUS, expires=-1))["problem"] == "a certificate expired less than a day ago"
    assert not health(None, "away")["ok"]


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    create(KitPlan("127.0.0.1", ["a"]), tmp_path / "kit")
    return ServerFolder.read(tmp_path / "kit/server")


@pytest.fixture
def url(server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(module, "status", lambda server, address: STATUS)
    monkeypatch.setattr(module, "FRESH", 0.0)
    monkeypatch.setattr(module, "host_port", lambda where: ("127.0.0.1", 0))  # any free port
    web, _ = make_server(server, "9096")
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{web.server_address[1]}"
    web.shutdown()
    web.server_close()


def test_over_http(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with urlopen(f"{url}/metrics") as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE_LATEST
        assert parsed(answer.read().decode())["fl_bn_sites_online"] == 1
    with urlopen(f"{url}/health") as answer:
        assert json.loads(answer.read())["ok"]

    def away(server: ServerFolder, address: str) -> Status:
        raise ControlError("the SuperLink does not answer")

    monkeypatch.setattr(module, "status", away)
    with urlopen(f"{url}/metrics") as answer:
        assert parsed(answer.read().decode()) == {"fl_bn_up": 0}
    with pytest.raises(HTTPError) as told:
        urlopen(f"{url}/health")
    assert told.value.code == 503
    assert json.loads(told.value.read())["problem"] == "the SuperLink does not answer"
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"{url}/")


def test_it_listens_on_this_machine_alone_unless_told_otherwise(server: ServerFolder) -> None:
    web, _ = make_server(server, "28391")
    web.server_close()
    assert web.server_address == ("127.0.0.1", 28391)
    with pytest.raises(ValueError, match=r"must be \[HOST:\]PORT, .* but got .0."):
        make_server(server, "0")


def test_the_health_file_is_whole(server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "status", lambda server, address: STATUS)
    Watcher(server).write()
    file = server.state / "health.json"
    assert json.loads(file.read_text())["ok"]
    assert file.stat().st_mode & 0o777 == 0o644
