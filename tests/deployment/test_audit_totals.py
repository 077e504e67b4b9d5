"""Deployed runs, on real processes: their models are those of one process, and a site's audit log says what server and wire say.

The server's side is its disclosure.csv. A proxy between each site and the server counts the bytes on the wire.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fl_bn_site.audit_report import Report, chosen, report_of
from tests.deployment.federation import SMALL, Federation, check_bits, free_ports
from tests.deployment.fleet_proxy import FleetProxy
from tests.deployment.inner import OTHER, SiteFolder, check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RUNS: dict[str, dict[str, Any]] = {
    "fedbn": {"method": "fedbn", "unseen-client": True},
    "hbn": {"method": "hbn"},
    "fedtan": {"method": "fedtan"},
    "hbn-secure": {"method": "hbn", "secure-aggregation": True},
}


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Federation, dict[str, FleetProxy]]]:
    """A federation whose sites reach the server through a proxy each."""
    with ExitStack() as stack:
        federation = stack.enter_context(Federation(tmp_path_factory.mktemp("audit")))
        proxies = {}
        for site, port in zip(federation.sites, free_ports(30)[-len(federation.sites) :], strict=True):  # not those of the federation
            federation.edit(f"sites/{site}", {"superlink": f"127.0.0.1:{port}"})
            proxies[site] = stack.enter_context(FleetProxy(federation.kit / "server", federation.fleet, port))
        federation.start_all()
        yield federation, proxies


def log_of(federation: Federation, site: str) -> Path:
    return SiteFolder.read(federation.kit / "sites" / site).audit_log


def by_section(report: Report) -> dict[str, list[int]]:
    """Section -> answers, bytes, fewest samples (0: unknown)."""
    found: dict[str, list[int]] = {}
    for (_, _, _, section), total in report.totals.items():
        one = found.setdefault(section, [0, 0, 0])
        one[0], one[1] = one[0] + total.answers, one[1] + total.nbytes
        one[2] = min(filter(None, (one[2], total.smallest)), default=0)
    return found


def disclosed(file: Path, site: str) -> dict[str, list[int]]:
    """The same of the server's report. An exchange counts by its vectors, of which each is a line of the site's log."""
    found: dict[str, list[int]] = {}
    for row in csv.DictReader(file.read_text().splitlines()):
        if row["site"] == site:
            one = found.setdefault(row["section"], [0, 0, 0])
            one[0] += int(row["messages"]) * (int(row["tensors"]) if row["section"] == "exchange" else 1)
            one[1] += int(row["bytes"])
            one[2] = min(filter(None, (one[2], int(row["smallest-samples"] or 0))), default=0)
    return found


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, wired: tuple[Federation, dict[str, FleetProxy]]) -> tuple[dict[str, Any], str]:
    """A run of ``RUNS`` and its output."""
    config = {**SMALL, **RUNS[request.param], "evaluate-every": 1, "name": request.param}
    return config, wired[0].run(config)


def test_it_ends_with_the_bits_of_one_in_process(
    run: tuple[dict[str, Any], str], wired: tuple[Federation, dict[str, FleetProxy]], tmp_path: Path
) -> None:
    check_bits(wired[0], *run, tmp_path)


def test_the_log_of_every_site_says_what_the_server_and_the_wire_say(
    run: tuple[dict[str, Any], str], wired: tuple[Federation, dict[str, FleetProxy]]
) -> None:
    federation, proxies = wired
    name = run[0]["name"]
    objects = {identity: size for proxy in proxies.values() for identity, size in proxy.objects.items()}
    for site in federation.sites:
        entries = list(chosen(log_of(federation, site), name))
        counted = by_section(report_of(entries))
        assert counted.pop(OTHER)[0] > 0
        assert counted.pop("nothing", [0, 0, 0])[1] == 0
        server = disclosed(federation.result(name) / "disclosure.csv", site)
        if name == "hbn":  # an exchange that only measures: its vectors do not say of how many samples they are
            assert (counted["exchange"][2], server["exchange"][2] > 8) == (0, True)
            server["exchange"][2] = 0
        assert counted == server, site
        assert (("exchange" in counted), ("masked" in counted)) == (name in ("fedtan", "hbn"), name == "hbn-secure")

        answers = [entry for entry in entries if entry["message"] != "exchange"]
        wire = {entry["id"]: sum(objects[identity] for identity in proxies[site].trees[entry["id"]]) for entry in answers}
        assert {entry["id"]: entry["message-bytes"] for entry in answers} == wire, "each answer, to the byte"
        assert sum(entry["bytes"] for entry in answers) < sum(wire.values())
        assert check(log_of(federation, site)).faults == ()
