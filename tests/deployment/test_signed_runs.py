"""Which runs each policy lets in, on real processes: signed, unsigned, changed by the server, sent twice, and with modules of one's own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_disk

from fl_bn_site.control import control_of
from fl_bn_site.project import build, project_of, stage
from fl_bn_site.submitters import Package, key_file, read_key
from tests.deployment.federation import Federation, wait_until
from tests.deployment.inner import COMPLETED, Scalar, ServerFolder, SiteFolder, lines_in, run_config, with_sites

POLICIES = ("installed", "signed", "any")  # a site of each, which has the name of its policy
RUN = (
    "model='{}' method='fedavg' rounds=1 local-steps=1 pictures=false evaluate-every=1 min-sites=1 name='{}' "
    "dataset='sites' classes=10 channels=3 image-size=20"
)
REFUSES = {  # what is submitted: what each site that refuses it says
    "signed": {},
    "unsigned": {"signed": "the run is not signed"},
    "changed": {"signed": "is for another package or run config", "installed": r"the file fl_bn/__init__\.py of the run differs"},
    "sent again": {"signed": r"signature was used for run \d+ already"},
    "own": {},
}
# what a package does that is told from another: it leaves a file where it is imported
MARKS = '\n\nimport os, pathlib\npathlib.Path(os.environ["FLWR_HOME"], "..", {!r}).resolve().touch()\n'
NETS = """
from torch import nn


def build(classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))
"""
LOADER = """
import numpy as np


def load(path):
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (80, 20, 20, 3), dtype=np.uint8), np.arange(80) % 10
    return images[:60], labels[:60], images[60:], labels[60:]
"""


def changed(server: ServerFolder) -> bytes:
    """The package with other bytes in one file."""
    with stage(project_of(server)) as app:
        with (app / "fl_bn/__init__.py").open("a") as file:
            file.write(MARKS.format("imported"))
        package: bytes = build_fab_from_disk(app)
    return package


def files(site: Path) -> set[Path]:
    """All files in the folder of a site but its audit log and the packages, packed, that Flower's SuperNode stores."""
    return {path for path in site.rglob("*") if path.is_file() and not {"flower", "audit"} & {*path.relative_to(site).parts[1:2]}}


def carry_out(server: ServerFolder, config: Mapping[str, Scalar], package: bytes) -> str:
    """The summary of a run of any bytes with any run config, past `fl-bn submit`, by whoever holds the server. It must complete."""
    with control_of(server) as control:
        run = control.start_run(package, with_sites(server, config))
        status = wait_until("the run's end", lambda: (s := control.status(run)).startswith("finished") and s, 400, 1.0)
        assert status == COMPLETED, "\n".join(control.log(run))
    return (server.results / str(config["name"]) / "summary.md").read_text()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_policy_lets_in_what_it_says_and_nothing_of_the_rest_is_kept(tmp_path: Path) -> None:
    """Each site's own loader reads its data. Where only installed code runs, the site's own copy of a network is called."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/mynets.py").write_text(NETS + MARKS.format("called"))
    lines: dict[str, dict[str, Any]] = {site: {"code": ["loaders"], "dataset": "hospital:load"} for site in POLICIES}
    lines["installed"]["allow-modules"] = "mynets"
    with Federation(tmp_path / "signed", POLICIES, lines) as federation:
        for site in POLICIES:
            (federation.kit / "sites" / site / "loaders").mkdir()
            (federation.kit / "sites" / site / "loaders/hospital.py").write_text(LOADER)
            policy = federation.kit / "sites" / site / "policy.toml"
            policy.write_text(policy.read_text().replace('\nallow-code = "signed"', f'\nallow-code = "{site}"'))
        (federation.kit / "sites/installed/loaders/mynets.py").write_text(NETS)
        federation.start_all()
        check_policies(federation, tmp_path)


def check_policies(federation: Federation, tmp_path: Path) -> None:
    server, sites = ServerFolder.read(federation.kit / "server"), {site: federation.kit / "sites" / site for site in POLICIES}
    key = key_file(server)
    assert key is not None
    content, hostile, own = build(server), changed(server), build(server, tmp_path / "own")

    def config(name: str, content: bytes, signs: Any, model: str = "mlp") -> dict[str, Scalar]:
        return Package(content, signs).signed(run_config(server, RUN.format(model, name)))

    genuine = config("genuine", content, read_key(key))
    runs = {
        "signed": (genuine, content),
        "unsigned": (config("unsigned", content, None), content),
        "changed": (config("changed", content, read_key(key)), hostile),
        "sent again": (genuine, content),
        "own": (config("own", own, read_key(key), "mynets:build"), own),
    }
    for what, (values, package) in runs.items():
        if what == "sent again":  # not even after a restart of the site
            shutil.move(federation.result("genuine"), tmp_path / "genuine")
            federation.stop("sites/signed")
            federation.start_again("sites/signed")
        before = {site: files(folder) for site, folder in sites.items()}
        summary = carry_out(server, values, package)
        refused = {site: said[0] for site in POLICIES if (said := re.search(rf"(?m)^.*\b{site}\b.*this site's policy has .*$", summary))}
        assert refused.keys() == REFUSES[what].keys(), what
        for site, words in REFUSES[what].items():
            assert re.search(words, refused[site]), (what, site, refused[site])
            assert files(sites[site]) == before[site], f"{what}: {site} kept something"
    left = {name: [site for site, folder in sites.items() if (folder / "state" / name).exists()] for name in ("imported", "called")}
    assert left == {"imported": ["any"], "called": ["signed", "any"]}
    logged = [entry for line in lines_in(SiteFolder.read(sites["signed"]).audit_log) if (entry := line.values)]
    by_decision = {decision: [entry["name"] for entry in logged if entry["decision"] == decision] for decision in ("sent", "refused")}
    assert set(by_decision["sent"]) == {"genuine", "own"}
    assert list(dict.fromkeys(by_decision["refused"])) == ["unsigned", "changed", "genuine"], "a line for each run that the gate refused"
