"""Deployed runs, on real processes: their models are those of one process, and a site's audit log says what the server says.

The server's side is its disclosure.csv, and what Flower's SuperLink counts.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_bn_site.audit_report import Report, chosen, report_of
from tests.deployment.federation import SMALL, Federation, check_bits
from tests.deployment.inner import OTHER, ServerFolder, SiteFolder, check, status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RUNS: dict[str, dict[str, Any]] = {
    "fedbn": {"method": "fedbn", "unseen-client": True},
    "hbn": {"method": "hbn"},
    "fedtan": {"method": "fedtan"},
    "hbn-secure": {"method": "hbn", "secure-aggregation": True},
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("audit")) as running:
        running.start_all()
        yield running


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


@pytest.mark.parametrize("name", RUNS)
def test_the_log_of_every_site_says_what_the_server_says(name: str, federation: Federation, tmp_path: Path) -> None:
    """Section by section; and in all what Flower's SuperLink has counted, whose requests have some bytes more."""
    config = {**SMALL, **RUNS[name], "evaluate-every": 1, "name": name}
    check_bits(federation, config, federation.run(config), tmp_path)
    sent = 0
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
        assert check(log_of(federation, site)).faults == ()
        sent += sum(entry["message-bytes"] for entry in entries if entry["message"] != "exchange")
    (run,) = (run for run in status(ServerFolder.read(federation.kit / "server")).runs if run.name == name)
    assert sent < run.received < 1.03 * sent
