"""A stolen server key, on real processes: a run is on, the authority is made anew, sites and server connect again by themselves."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.deployment.federation import SMALL, Federation, wait_until
from tests.deployment.test_membership import accepts
from tools.deployment.outcomes import Case, Outcome, compare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.nightly
def test_a_run_goes_on_with_another_authority_and_the_thief_is_refused(tmp_path: Path) -> None:
    with Federation(tmp_path / "federation", ("east", "west")) as federation:
        federation.start_all()
        site, thief = federation.kit / "sites/east", tmp_path / "thief"
        shutil.copytree(federation.kit / "server", thief, ignore=shutil.ignore_patterns("state", "logs", "results"))
        assert accepts(site, thief, "127.0.0.1")

        case = Case(federation, tmp_path, "stolen", 0, random.Random(0))
        values = {"clients": 2, "method": "fedbn", "rounds": 16, "evaluate-every": 16, "checkpoint-every": 1, "retry-timeout": 300.0}
        config = {**SMALL, **case.data, **values, "name": "stolen"}
        run = federation.submit(config)
        rounds = federation.result("stolen") / "rounds.csv"
        wait_until("round 2", lambda: rounds.exists() and len(rounds.read_text().splitlines()) >= 3, 300)
        seen = federation.log("sites/west", "supernode").count("SuperNode ID")
        said = federation.membership("renew", "--stolen")
        assert "the fingerprint of the new ca.crt is" in said
        assert "the sites' folders of this kit have the new ca.crt already: east, west" in said
        wait_until("west is back", lambda: federation.log("sites/west", "supernode").count("SuperNode ID") > seen, 300)
        assert not accepts(site, thief, "127.0.0.1")
        assert accepts(site, federation.kit / "server", "127.0.0.1")

        out, _ = run.communicate(timeout=900)
        assert run.returncode == 0, out
        outcome = Outcome("stolen", 0, "fedbn", "")
        compare(case, config, outcome)
        assert outcome.ok, outcome

        seen = federation.log("sites/west", "supernode").count("SuperNode ID")
        said = federation.membership("renew", "--site", "west")
        assert "shut out" in said
        wait_until("west is back", lambda: federation.log("sites/west", "supernode").count("SuperNode ID") > seen, 300)
        assert "2/2 clients" in federation.run({**config, "name": "after", "rounds": 1, "evaluate-every": 1})
