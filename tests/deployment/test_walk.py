"""A day of a consortium, as its people type it, on real processes with TLS and node authentication, and with seconds for each step.

python -m tests.deployment.test_walk       # prints the table of deploy/drills.md, of the Flower that is installed
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.deployment.federation import Federation, ended, rounds_of, wait_until

COLUMNS = 'target = "ill"\nclasses = ["no", "yes"]\n[numeric]\nx = {}\ny = {}\nz = {}\n'
RUN: dict[str, Any] = {
    "method": "fbn", "model": "table-mlp", "dataset": "sites", "classes": 2, "channels": 3, "image-size": 1,
    "columns-digest": "f5686289b00fc689", "local-steps": 2, "evaluate-every": 1, "checkpoint-every": 1, "pictures": False,
    "retry-timeout": 120.0,
}  # fmt: skip


def write_table(federation: Federation, site: str, spoilt: bool = False) -> None:
    """Write a site's CSV file. Its features are shifted, further for each site; ``spoilt``: there is NaN in it."""
    shift, rng = 2.0 * (ord(site) - ord("a")), np.random.default_rng(ord(site))
    rows = rng.normal(shift, 1.0, (80, 3))
    folder = federation.kit / "sites" / site
    lines = [",".join([*(f"{x:.4f}" for x in row), "yes" if row.sum() > 3 * shift else "no"]) for row in rows]
    lines[:1] = ["nan,0,0,no"] if spoilt else lines[:1]
    (folder / "data.csv").write_text("\n".join(["x,y,z,ill", *lines]) + "\n")
    (folder / "columns.toml").write_text(COLUMNS)


class Walk:
    """Carry out the steps in a federation, and count the seconds of each."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[what] = time.monotonic() - begin
        print(f"{self.seconds[what]:.1f} s: {what}", flush=True)

    def __call__(self, folder: Path) -> None:
        with self.step("create, for three sites"):
            federation = Federation(folder, lines=dict.fromkeys("abc", {"dataset": "csv", "data-path": "data.csv"}))
        with federation:
            for site in "abc":
                write_table(federation, site)
            self.first_run(federation)
            self.early_end(federation)
            self.members(federation)
            self.renewals(federation)
            self.audits(federation)

    def first_run(self, federation: Federation) -> None:
        with self.step("doctor, at the server and at a site"):
            federation.command("doctor")
            said = federation.command("doctor", part="sites/a")
        assert "64 training and 16 test samples" in said
        assert RUN["columns-digest"] in said
        with self.step("start the server and the sites"):
            federation.start_all()
        with self.step("submit: FBN, two rounds"):
            out = federation.run({**RUN, "name": "first", "rounds": 2})
        assert out.count("3/3 clients") == 2, out
        with self.step("status"):
            told = json.loads(federation.command("status", "--json"))
        assert [(site["name"], site["state"]) for site in told["sites"]] == [(site, "online") for site in "abc"]
        (run,) = told["runs"]
        assert (run["name"], run["submitter"], run["status"]) == ("first", "submitter", "finished:completed")
        assert (run["round"], run["rounds"], run["accepted"], run["left"]) == (2, 2, 3, None)

    def early_end(self, federation: Federation) -> None:
        """Two runs are on; one is ended and gone on with."""
        runs = {name: federation.submit({**RUN, "name": name, "rounds": 4}) for name in ("ended", "other")}
        wait_until("round 1", lambda: rounds_of(federation, "ended") >= 1, 300)
        with self.step("abort, until `fl-bn submit` ends"):
            said = federation.command("abort", "ended")
            out = ended(runs["ended"], 1)
        assert "resume it from its checkpoint after round" in said
        assert said.split(": ", 1)[1].strip() in out, "both tell what to type"
        with self.step("resume, until the end"):
            assert "going on after round" in federation.command("resume", "ended")
        assert rounds_of(federation, "ended") == rounds_of(federation, "other") == 4
        assert ended(runs["other"]).count("3/3 clients") == 4

    def members(self, federation: Federation) -> None:
        """A site comes while a run is on, is in the next one, and goes in its midst."""
        pids = {site: federation.find("supernode", site) for site in "abc"}
        process = federation.submit({**RUN, "name": "three", "rounds": 3})
        wait_until("round 1", lambda: rounds_of(federation, "three") >= 1, 300)
        with self.step("add-site, and start it"):
            federation.add_site("d", dataset="csv", **{"data-path": "data.csv"})
            write_table(federation, "d")
            federation.start_again("sites/d")
        assert ended(process).count("3/3 clients") == 3
        process = federation.submit({**RUN, "name": "four", "rounds": 5})
        wait_until("round 2", lambda: rounds_of(federation, "four") >= 2, 300)
        with self.step("remove-site, during a run"):
            said = federation.command("kit remove-site", "d")
        assert "d: shut out: no site of server.toml has this key" in said
        out = ended(process)
        assert "4/4 clients" in out
        assert "3/3 clients" in out
        federation.stop("sites/d")
        assert {site: federation.find("supernode", site) for site in pids} == pids, "none of the others started again"

    def renewals(self, federation: Federation) -> None:
        with self.step("renew a site's key, and start it again"):
            federation.stop("sites/c")
            federation.command("kit renew", "--site", "c")
            federation.start_again("sites/c")
        with self.step("renew the certificate, and start the server again"):
            federation.command("kit renew")
            federation.stop("server")
            federation.start("server")
            wait_until("all sites are online", lambda: federation.online() == list("abc"), 300)
        assert federation.run({**RUN, "name": "renewed", "rounds": 1}).count("3/3 clients") == 1
        with self.step("renew a stolen authority, and start all again"):
            for site in "abc":
                federation.stop(f"sites/{site}")
            federation.command("kit renew", "--stolen")
            federation.stop("server")
            federation.start_all()
        assert federation.run({**RUN, "name": "anew", "rounds": 1}).count("3/3 clients") == 1

    def audits(self, federation: Federation) -> None:
        with self.step("audit, and verify"):
            told = json.loads(federation.command("audit", "--run", "first", "--json", part="sites/a"))
            federation.command("kit verify", part="sites/a")
        assert {total["message"] for total in told["totals"]} >= {"train", "evaluate"}
        assert told["refused"] == []

    def table(self) -> str:
        lines = [f"| step | seconds, Flower {version('flwr')} |", "|---|---:|"]
        return "\n".join([*lines, *(f"| {what} | {seconds:.1f} |" for what, seconds in self.seconds.items())])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_day_of_a_consortium(tmp_path: Path) -> None:
    walk = Walk()
    walk(tmp_path)
    print(walk.table())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (walk := Walk())(Path(folder))
    print(walk.table())
