"""Code of one's own in a deployment: a Flower app, modules beside fl-bn's app, and modules that are installed at a site."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_bn.run.errors import ConfigError
from fl_bn_site import submit as submit_module
from fl_bn_site.own_config import own_config
from fl_bn_site.project import OF_RUN
from tests.deployment.federation import Federation, ended
from tests.deployment.inner import FolderError, Package, ServerFolder, SiteFolder, build, lines_in, submit

NOW = datetime(2026, 11, 26, 21, 30)
NETS = """
from torch import nn


def build(classes, channels, image_size):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, classes)
    )
"""
LOADER = """
import numpy as np


def load():
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (80, 20, 20, 3), dtype=np.uint8), np.arange(80) % 10
    return images[:60], labels[:60], images[60:], labels[60:]
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    folder = tmp_path / "own"
    (folder / "parts").mkdir(parents=True)
    (folder / "mynets.py").write_text(NETS)
    (folder / "parts/more.py").write_text("x = 1\n")
    (folder / "scan.npz").write_bytes(b"a site's data")
    (folder / ".venv").mkdir()
    (folder / ".venv/hidden.py").write_text("")
    return folder


def names(package: bytes) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(package)).namelist())


# What is sent


def test_a_flower_app_of_one_s_own_is_packed_as_it_is_with_the_keys_of_its_run(server: ServerFolder, own_app: Path) -> None:
    before = (own_app / "pyproject.toml").read_text()
    package = Package(build(server, own_app))
    assert "myapp/client_app.py" in names(package.content)
    assert not any(name.startswith("fl_bn/") for name in names(package.content))
    assert package.defaults == {
        **OF_RUN,
        "num-server-rounds": 10, "local-epochs": 2, "batch-size": 32, "lr": 0.01,
    }  # fmt: skip
    assert (own_app / "pyproject.toml").read_text() == before, "the user's own file is as it was"


def test_modules_are_packed_beside_fl_bn_s_app(server: ServerFolder, modules: Path) -> None:
    assert names(build(server, modules)) - names(build(server)) == {"mynets.py", "parts/more.py"}, "modules, and no data"


def test_what_is_no_code_is_refused(server: ServerFolder, own_app: Path, modules: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (modules / "server_app.py").write_text("")  # as a module of fl-bn's own project is called
    for folder, word in ((tmp_path / "none", "none"), (tmp_path / "empty", "empty"), (modules, "server_app")):
        with pytest.raises(FolderError, match=word):
            build(server, folder)
    file = own_app / "pyproject.toml"
    for text in (file.read_text().replace("myapp.client_app:app", "nowhere.client_app:app"), '[project]\nname = "no-app"\n'):
        file.write_text(text)
        with pytest.raises(FolderError):
            build(server, own_app)


def test_keys_are_those_of_the_app() -> None:
    package = SimpleNamespace(defaults={"name": "", "num-server-rounds": 10, "lr": 0.1}, project="myapp")
    assert own_config(package, "lr=1 num-server-rounds=3", NOW) == (
        {"lr": 1, "num-server-rounds": 3, "name": "20261126-213000-myapp"},
        True,
    )
    assert own_config(package, "name='mine'", NOW) == ({"num-server-rounds": 10, "name": "mine"}, False), "the rounds that are planned"
    for wrong, key in {"num-rounds=3": "num-rounds", "method='hbn'": "method", "num-server-rounds='3'": "int", "lr=true": "lr"}.items():
        with pytest.raises(ConfigError, match=key):
            own_config(package, wrong, NOW)


def test_an_own_app_is_submitted_with_its_keys_alone(
    server: ServerFolder, superlink: Any, own_app: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_module, "build", build)
    assert submit(server, "num-server-rounds=3", say=lambda line: None, own=own_app)
    sent = superlink.known[0].config
    assert sent.keys() == {"num-server-rounds", *OF_RUN}
    assert sent["output"] == str(server.results)
    assert (sent["num-server-rounds"], sent["client-names"], sent["client-nodes"]) == (3, "a,b", "197,198")


# On real processes


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("own"), ("a", "b")) as running:
        for site in ("a", "b"):
            loaders = running.kit / "sites" / site / "loaders"
            loaders.mkdir()
            (loaders / "hospital.py").write_text(LOADER)
            running.edit(f"sites/{site}", {"code": ["loaders"], "dataset": "hospital:load"})
        running.start_all()
        yield running


def submitted(federation: Federation, app: Path, config: str, code: int = 0) -> str:
    return ended(federation.submit(config, "--app", str(app)), code)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_an_exchange_of_an_own_app_has_the_kit_s_address_and_tls(federation: Federation, own_app: Path) -> None:
    """FedTAN's clients exchange vectors with the server layer by layer."""
    server, client = own_app / "myapp/server_app.py", own_app / "myapp/client_app.py"
    server.write_text(server.read_text().replace("import FBN", "import FedTAN").replace("FBN(Net())", "FedTAN(Net())"))
    client.write_text(client.read_text().replace("fbn", "fedtan"))
    out = submitted(federation, own_app, "num-server-rounds=1 local-epochs=1 name='fedtan'")
    assert f"exchange: listening on 127.0.0.1:{federation.exchange} (TLS)" in out
    assert "2/2 clients" in out
    assert "goes on with replay" not in out
    run = next(run for run in json.loads(federation.command("status", "--json"))["runs"] if run["name"] == "fedtan")
    assert (run["round"], run["rounds"], run["accepted"], run["note"]) == (1, 1, 2, "")
    assert run["loss"] is not None
    assert 0 <= run["value"] <= 1
    sent = [line.values for line in lines_in(SiteFolder.read(federation.kit / "sites/a").audit_log)]
    assert any(line and line["message"] == "exchange" and line["name"] == "fedtan" for line in sent), "vectors went over the exchange"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_site_s_refusal_of_an_own_app_ends_the_run_and_is_logged_there(federation: Federation, own_app: Path) -> None:
    site = SiteFolder.read(federation.kit / "sites/b")
    before = site.policy.read_text()
    site.policy.write_text('allow-code = "installed"\n')
    try:
        out = submitted(federation, own_app, "num-server-rounds=1 name='refused'", code=1)
    finally:
        site.policy.write_text(before)
    assert "site b is refused: its policy refuses the run: this site's policy has allow-code = installed" in out
    (line,) = json.loads(federation.command("audit", "--run", "refused", "--json", part="sites/b"))["refused"]
    assert (line["message"], line["decision"]) == ("query.hello", "refused")
    assert "allow-code = installed" in line["reason"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_network_of_one_s_own_trains_on_what_a_site_s_loader_reads_also_where_only_installed_code_runs(
    federation: Federation, modules: Path
) -> None:
    """There the site's own copy of the module is called. The copy that is sent leaves a file."""
    trace = modules.parent / "called"
    (modules / "mynets.py").write_text(f"{NETS}\nimport os, pathlib\npathlib.Path({str(trace)!r} + str(os.getpid())).touch()\n")
    config = "model='mynets:build' method='fbn' rounds=1 local-steps=1 pictures=false dataset='sites' classes=10 channels=3 image-size=20"
    assert "2/2 clients" in submitted(federation, modules, config)
    sent = set(modules.parent.glob("called*"))
    assert len(sent) > 2, "the server's process, and both sites'"
    for site in "ab":
        folder = federation.kit / "sites" / site
        federation.stop(f"sites/{site}")
        (folder / "loaders/mynets.py").write_text(NETS)
        federation.edit(f"sites/{site}", {"allow-modules": "mynets"})
        (folder / "policy.toml").write_text('allow-code = "installed"\n')
    federation.start_again("sites/a", "sites/b")
    assert "2/2 clients" in submitted(federation, modules, config)
    assert len(set(modules.parent.glob("called*")) - sent) == 1, "the server's own process, and no site's"
