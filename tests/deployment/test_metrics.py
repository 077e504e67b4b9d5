"""What Prometheus is told of a server, in its own text format, and the health file."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from fl_bn_site import metrics as module
from fl_bn_site.metrics import make_server, metrics
from fl_bn_site.status import RunStatus, SiteStatus, Status
from tests.deployment.inner import ControlError, KitPlan, ServerFolder, create

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
    assert (found["fl_bn_up"], found["fl_bn_sites"], found["fl_bn_sites_online"], found["fl_bn_runs_waiting"]) == (1, 2, 1, 1)
    assert (found['fl_bn_site_online{site="east"}'], found['fl_bn_site_online{site="west"}']) == (1, 0)
    assert found["fl_bn_certificate_days_left"] == 800
    assert (found['fl_bn_run_round{run="now"}'], found['fl_bn_run_rounds{run="now"}']) == (4, 10)  # of the newest of that name
    assert found['fl_bn_run_rounds{run="a \\"quoted\\" \\\\ name"}'] == 3


def test_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(KitPlan("127.0.0.1", ["a"]), tmp_path / "kit")
    monkeypatch.setattr(module, "status", lambda server, address: STATUS)
    monkeypatch.setattr(module, "FRESH", 0.0)
    monkeypatch.setattr(module, "host_port", lambda where: ("127.0.0.1", 0))  # any free port
    web, _ = make_server(ServerFolder.read(tmp_path / "kit/server"), "9096")
    threading.Thread(target=web.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{web.server_address[1]}"

    def away(server: ServerFolder, address: str) -> Status:
        raise ControlError("the SuperLink does not answer")

    try:
        with urlopen(f"{url}/metrics") as answer:
            assert parsed(answer.read().decode())["fl_bn_sites_online"] == 1
        with urlopen(f"{url}/health") as answer:
            assert json.loads(answer.read())["ok"]
        monkeypatch.setattr(module, "status", away)
        with urlopen(f"{url}/metrics") as answer:
            assert parsed(answer.read().decode()) == {"fl_bn_up": 0}
        with pytest.raises(HTTPError) as told:
            urlopen(f"{url}/health")
        assert told.value.code == 503
        told.value.close()
    finally:
        web.shutdown()
        web.server_close()
