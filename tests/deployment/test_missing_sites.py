"""Sites that are missing, on real processes: offline, of another version, with NaN in the data, and with a policy that refuses the run."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.deployment.federation import ROOT, Federation
from tests.deployment.test_walk import RUN, write_table

MISSING = {  # site -> what the log says of it
    "d": "site d is offline",
    "e": "site e is refused: it has fl-bn 0.0.9",
    "f": "site f is refused: ConfigError: this client's own data, data.csv, line 2",
    "g": "site g is refused: its policy refuses the run: this site's policy has allow-methods = fedbn",
}
SECONDS = 15.0  # from the start of a run that needs a missing site to its end


def failed(process: subprocess.Popen[str]) -> str:
    """Return the output of a submitted run, which must fail in time: its seconds count from its start, or else from now."""
    lines, begin = list[str](), time.monotonic()
    with process:
        for line in process.stdout or ():
            begin = time.monotonic() if " is submitted to " in line else begin
            lines.append(line)
    seconds = time.monotonic() - begin
    print(f"{seconds:.1f} s: {lines[-1]}")
    assert (process.returncode, seconds < SECONDS) == (1, True), (seconds, lines)
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(1200)
def test_a_run_goes_on_without_sites_that_are_missing_or_ends_at_once_with_their_names(tmp_path: Path) -> None:
    old = tmp_path / "old/fl_bn-0.0.9.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: fl-bn\nVersion: 0.0.9\n")
    data = {"dataset": "csv", "data-path": "data.csv"}
    with Federation(tmp_path, "abcdefg", dict.fromkeys("abcdefg", data)) as federation:
        for site in "abcdefg":
            write_table(federation, site, spoilt=site == "f")
        federation.environment["sites/e"]["PYTHONPATH"] = f"{old.parent}:{ROOT}"
        (federation.kit / "sites/g/policy.toml").write_text('allow-methods = ["fedbn"]\n')
        federation.start_all("abcefg")

        out = federation.run({**RUN, "name": "three", "rounds": 2, "min-sites": 3})
        assert out.count("3/3 clients") == 2, out
        assert [line for line in MISSING.values() if line not in out] == [], out
        summary = (federation.result("three") / "summary.md").read_text()
        assert all(f"took no part: site {site}: " in summary for site in "efg"), summary

        assert "has no site 'z'" in federation.command("submit", "--sites", "a,z", code=2)
        assert "has no site ''" in federation.command("submit", "--sites", ",", code=2)
        out = failed(federation.submit({**RUN, "name": "all", "rounds": 2}))
        assert "offline: d. Start them, or set min-sites, or --sites a,b,c,e,f,g, to go on without them" in out
        out = failed(federation.submit({**RUN, "name": "four", "rounds": 2}, "--sites", "a,e,f,g"))
        assert all(MISSING[site] in out for site in "efg"), out
        assert "set min-sites to their number" in out
