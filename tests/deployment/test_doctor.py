"""``fl-bn doctor``: broken set-ups and sound ones, its checks one by one, its lines, its JSON and its exit code."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

from fl_bn.app.checks import run as experiment
from fl_bn.federation.settings import LocalTraining
from fl_bn.support.flower_config import flower_config
from fl_bn_site import checks
from fl_bn_site.doctor import diagnose
from tests.deployment import tls_servers
from tests.deployment.inner import Finding, ServerFolder, app, machine
from tests.listed import listed

MACHINES = {"gpu", "state-dir", "state", "results", "proxy", "packages"}  # may warn on this machine


@dataclass(frozen=True)
class Setup:
    """A kit whose server accepts TLS connections; ``stack`` closes what was opened."""

    kit: Path
    stack: ExitStack

    @property
    def site(self) -> Path:
        return self.kit / "sites/A"

    def write_line(self, name: str, value: object) -> None:
        tls_servers.write_line(self.site / "site.toml", name, value)


def port_taken(setup: Setup) -> None:
    taken = setup.stack.enter_context(tls_servers.listen())
    setup.write_line("clientappio", f"127.0.0.1:{tls_servers.port_of(taken)}")


def other_version(setup: Setup) -> None:
    """Put the metadata of another version of Flower before the installed ones, as if somebody had upgraded Flower."""
    folder = setup.kit / "packages/flwr-1.31.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 1.31.0\n")
    setup.stack.enter_context(mock.patch.object(sys, "path", [str(folder.parent), *sys.path]))


BROKEN: dict[str, tuple[Callable[[Setup], object], str]] = {  # what is broken: how, and the check that finds it
    "expired certificate": (lambda setup: tls_servers.reissue(setup.kit, ["localhost"], begins=-400, ends=-2), "superlink TLS"),
    "wrong host name": (lambda setup: tls_servers.reissue(setup.kit, ["fl.example.org", "192.0.2.7"]), "superlink TLS"),
    "missing data": (lambda setup: setup.write_line("data-path", "elsewhere/site.npz"), "data"),
    "port taken": (port_taken, "clientappio"),
    "version mismatch": (other_version, "flower"),
    "batch of one": (lambda setup: write_data(setup.site / "site.npz", train=1), "batches"),
    "audit log": (lambda setup: setup.write_line("audit", "/proc/audit"), "audit"),  # where no folder can be made
}


@contextmanager
def made(folder: Path, breaking: Callable[[Setup], object] = lambda setup: None) -> Iterator[Setup]:
    """Make a kit and a site's data in ``folder``, let ``breaking`` break them, and start a server that accepts TLS connections."""
    with ExitStack() as stack:
        listening = stack.enter_context(tls_servers.listen())
        setup = Setup(tls_servers.make_kit(folder / "kit", tls_servers.port_of(listening)), stack)
        write_data(setup.site / "site.npz", train=24)
        setup.write_line("dataset", "npz")
        setup.write_line("data-path", "site.npz")
        breaking(setup)
        stack.enter_context(tls_servers.serving(listening, setup.kit / "server"))
        yield setup


def write_data(file: Path, train: int) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", train), ("test", 4)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, 20, 20, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 4
    np.savez(file, **arrays)  # type: ignore[arg-type]


def failed(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.text for finding in findings if finding.status == "fail"}


def test_a_sound_site_is_found_sound_and_the_run_s_config_is_held_against_its_data(tmp_path: Path) -> None:
    with made(tmp_path) as setup:
        findings = list(diagnose(setup.site))
        assert [finding for finding in findings if finding.status != "ok" and finding.check not in MACHINES] == []
        assert failed(findings) == {}
        checks = {finding.check for finding in findings}
        assert checks >= {check for _, check in BROKEN.values()} - {"audit"}, "all that the broken ones are told by are made"
        assert not list(setup.site.rglob(".fl-bn-doctor*"))
        assert not (setup.site / "state").exists()
        form = "dataset='sites' classes=4 channels=3 image-size=20"
        assert failed(list(diagnose(setup.site, form))) == {}
        for wrong, check in ((form.replace("channels=3", "channels=1"), "data"), ("batchsize=3", "run config")):
            assert check in failed(list(diagnose(setup.site, wrong)))
        setup.write_line("dataset", "")
        assert "data" in failed(list(diagnose(setup.site, form)))


@pytest.mark.parametrize("name", list(BROKEN))
def test_what_is_broken_is_the_one_thing_that_fails(name: str, tmp_path: Path) -> None:
    breaking, check = BROKEN[name]
    with made(tmp_path, breaking) as setup:
        assert list(failed(list(diagnose(setup.site)))) == [check]


@listed(
    ("breaking", "overrides", "check"),
    [
        (lambda kit: None, "", ""),  # sound
        (lambda kit: tls_servers.reissue(kit, ["localhost", "127.0.0.1"], begins=-9, ends=-2), "", "kit"),
        (lambda kit: tls_servers.reissue(kit, ["127.0.0.1"]), "", "kit"),
        (lambda kit: tls_servers.write_line(kit / "server/server.toml", "state", "ca.crt"), "", "state"),
        (lambda kit: (kit / "server/sites/B.pub").write_bytes((kit / "server/sites/A.pub").read_bytes()), "", "kit"),
        (lambda kit: None, "clients=3", "clients"),
        (lambda kit: None, "method='fbnn'", "run config"),
        (lambda kit: None, "model='no-such-net'", "model"),
        (lambda kit: None, "dataset='npz' data-path='gone.npz'", "data"),
        (lambda kit: None, "device='cuda:77'", "gpu"),
        (lambda kit: (kit / "server/server.toml").write_text("superlink = 3"), "", "folder"),
    ],
)
def test_what_is_wrong_on_the_server(breaking: Callable[[Path], None], overrides: str, check: str, tmp_path: Path) -> None:
    kit = tls_servers.make_kit(tmp_path / "kit")
    breaking(kit)
    found = list(diagnose(kit / "server", overrides))
    assert check in failed(found) if check else not [one for one in found if one.status != "ok" and one.check not in MACHINES]


def test_ports_in_use_by_the_folders_own_programs_are_no_failure(tmp_path: Path) -> None:
    with tls_servers.listen() as fleet:
        kit = tls_servers.make_kit(tmp_path / "kit")
        tls_servers.write_line(kit / "server" / "server.toml", "fleet", f"127.0.0.1:{tls_servers.port_of(fleet)}")
        assert list(failed(list(diagnose(kit / "server")))) == ["fleet"]
        with open(kit / "server" / ".running", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert failed(list(diagnose(kit / "server"))) == {}


def test_lines_json_and_exit_code(tmp_path: Path) -> None:
    good = CliRunner().invoke(app, ["doctor", "--run-config", "method='hbn'"])
    assert good.exit_code == 0, good.output
    assert all(line[:6] in ("ok    ", "warn  ") and ": " in line for line in good.stdout.splitlines()[:-1])
    bad = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    assert bad.exit_code == 1
    found = json.loads(bad.stdout)
    assert (found[-1]["status"], found[-1]["check"]) == ("fail", "folder")
    assert {tuple(entry) for entry in found} == {("status", "check", "text", "do")}


def test_a_folder_to_be_made_is_tried_at_its_parent_and_what_cannot_be_written_fails(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    assert machine.storage("state", tmp_path / "state" / "deep").status == "ok"
    assert machine.storage("state", file).status == "fail"
    assert [*tmp_path.rglob("*")] == [file]


@listed(
    ("variables", "advice"),
    [
        ({}, ""),
        ({"https_proxy": "http://me:secret@proxy:3128"}, "export no_proxy=fl.example.org"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "a.org, .example.org"}, ""),
        ({"http_proxy": "http://p:3128", "no_grpc_proxy": "ample.org", "no_proxy": "*"}, "no_grpc_proxy=ample.org,fl.example.org"),
    ],
)
def test_proxies_of_grpc(variables: dict[str, str], advice: str) -> None:
    with mock.patch.dict(os.environ, variables, clear=True):
        found = checks.proxy("fl.example.org")
        assert (found.status, "secret" in str(found), found.do.endswith(advice)) == ("warn" if advice else "ok", False, True)
        assert checks.proxy("127.0.0.1").status == "ok", "fl-bn excepts this machine itself"


def test_who_reaches_the_server(tmp_path: Path) -> None:
    kit = tls_servers.make_kit(tmp_path / "kit", host="fl.example.org")
    for name, value, status in (
        ("fleet", "0.0.0.0:9092", "ok"),
        ("fleet", "127.0.0.1:9092", "fail"),
        ("superlink", "localhost", "ok"),
        ("control", "0.0.0.0:9093", "warn"),
    ):
        tls_servers.write_line(kit / "server" / "server.toml", name, value)
        assert checks.exposure(ServerFolder.read(kit / "server")).status == status, (name, value)


def test_the_smallest_batch() -> None:
    cases = [(3, {"steps": 5}, "warn"), (17, {"epochs": 1}, "ok"), (18, {"epochs": 1}, "warn"), (18, {"steps": 1}, "ok")]
    for samples, rounds, status in cases:
        assert experiment.smallest_batch(samples, LocalTraining(16, **rounds)).status == status, (samples, rounds)


def test_labels_and_images_that_look_like_mistakes_are_warned_about(tmp_path: Path) -> None:
    """One label 17 among 0..9 makes 18 classes, unless the run says how many there are; floats that became integers are black images."""
    rng, good = np.random.default_rng(0), np.arange(40) % 10
    x, floats = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8), rng.random((40, 8, 8))
    stray = np.where(np.arange(40) == 3, 17, good)
    shape = {"dataset": "sites", "classes": 10, "channels": 1, "image-size": 8}
    cases = [
        (x, good, {}, "ok"),
        (x, stray, {}, "warn"),
        (x, good + 1, {}, "warn"),
        (x, good % 3 + 2, shape, "ok"),  # a site that lacks classes of the run's
        (x, stray, shape, "fail"),
        (floats, good, {}, "fail"),
        (floats.astype("uint8"), good, {}, "warn"),
    ]
    for number, (images, labels, of_run, status) in enumerate(cases):
        path = tmp_path / f"{number}.npz"
        np.savez(path, x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
        node = {"dataset": "npz", "data-path": str(path), "partition-id": 0, "num-partitions": 2}
        found = experiment.site_experiment(flower_config({"clients": 2, "model": "mlp", **of_run}), node)  # type: ignore[dict-item]
        assert next(finding for finding in found if finding.check == "data").status == status, number


def test_a_stranger_with_a_certificate_of_the_right_name_and_what_is_no_tls(tmp_path: Path) -> None:
    kit, other = (tls_servers.make_kit(tmp_path / name) for name in ("kit", "other"))

    def shaken(authority: Path, server: Path | None) -> str:
        with tls_servers.listen() as listening, tls_servers.serving(listening, server) as port:
            return checks.handshake("localhost", port, authority).status

    assert shaken(kit / "sites/A/ca.crt", other / "server") == "fail"
    assert shaken(other / "sites/A/ca.crt", other / "server") == "ok"  # control
    assert shaken(kit / "sites/A/ca.crt", None) == "fail"
    for authority in (kit / "gone.crt", kit / "README.md"):
        assert shaken(authority, kit / "server") == "fail"
