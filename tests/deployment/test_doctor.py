"""``fl-bn doctor`` as a whole: broken set-ups and sound ones, the server's side, its lines, its JSON and its exit code."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fl_bn_site.doctor import diagnose
from tests.deployment import tls_servers
from tests.deployment.inner import Finding, app
from tests.listed import listed

MACHINES = {"gpu", "state-dir", "state", "results", "proxy", "packages"}  # may warn on this machine


@dataclass(frozen=True)
class Setup:
    """A kit whose server accepts TLS connections, and a folder of packages before the installed ones; ``stack`` closes what was opened."""

    kit: Path
    stack: ExitStack
    pythonpath: Path

    @property
    def site(self) -> Path:
        return self.kit / "sites/A"

    def write_line(self, name: str, value: object) -> None:
        tls_servers.write_line(self.site / "site.toml", name, value)


def expired(setup: Setup) -> None:
    tls_servers.reissue(setup.kit, ["localhost"], begins=-400, ends=-2)


def wrong_name(setup: Setup) -> None:
    tls_servers.reissue(setup.kit, ["fl.example.org", "192.0.2.7"])


def no_data(setup: Setup) -> None:
    setup.write_line("data-path", "elsewhere/site.npz")


def port_taken(setup: Setup) -> None:
    taken = setup.stack.enter_context(tls_servers.listen())
    setup.write_line("clientappio", f"127.0.0.1:{tls_servers.port_of(taken)}")


def other_version(setup: Setup) -> None:
    """Add the metadata of another version of Flower to ``pythonpath``, as if somebody had upgraded Flower."""
    folder = setup.pythonpath / "flwr-1.31.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 1.31.0\n")


def no_audit(setup: Setup) -> None:
    """Put a file in the place of the log's folder: no answer would leave such a site."""
    (setup.site.parent / "log").write_text("a file")
    setup.write_line("audit", setup.site.parent / "log")


def one_sample(setup: Setup) -> None:
    write_data(setup.site / "site.npz", train=1)


BROKEN: dict[str, tuple[Callable[[Setup], None], str]] = {  # what is broken: how, and the check that finds it
    "expired certificate": (expired, "superlink TLS"),
    "wrong host name": (wrong_name, "superlink TLS"),
    "missing data": (no_data, "data"),
    "port taken": (port_taken, "clientappio"),
    "version mismatch": (other_version, "flower"),
    "batch of one": (one_sample, "batches"),
    "audit log": (no_audit, "audit"),
}


@contextmanager
def made(folder: Path, breaking: Callable[[Setup], None] = lambda setup: None) -> Iterator[Setup]:
    """Make a working deployment in ``folder``, let ``breaking`` break it, and start its server.

    The deployment has a kit, a site with data, and a server that accepts TLS connections.
    """
    with ExitStack() as stack:
        listening = stack.enter_context(tls_servers.listen())
        kit = tls_servers.make_kit(folder / "kit", tls_servers.port_of(listening))
        setup = Setup(kit, stack, folder / "packages")
        write_data(setup.site / "site.npz", train=24)
        setup.write_line("dataset", "npz")
        setup.write_line("data-path", "site.npz")
        breaking(setup)
        stack.enter_context(tls_servers.serving(listening, kit / "server"))
        yield setup


def write_data(file: Path, train: int) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", train), ("test", 4)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, 20, 20, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 4
    np.savez(file, **arrays)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nobody_is_asked_for_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names other than this machine's have no address, and no name server hears of them."""
    real: Callable[..., Any] = socket.getaddrinfo

    def answer(host: str, *rest: Any, **options: Any) -> Any:
        if host not in ("localhost", "127.0.0.1", "0.0.0.0"):
            raise socket.gaierror(-2, "Name or service not known")
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def failed(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.text for finding in findings if finding.status == "fail"}


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    with made(tmp_path) as sound:
        yield sound


def test_a_sound_site_is_found_sound(setup: Setup) -> None:
    findings = list(diagnose(setup.site))
    assert [finding for finding in findings if finding.status != "ok" and finding.check not in MACHINES] == []
    assert failed(findings) == {}
    checks = {finding.check for finding in findings}
    assert checks >= {check for _, check in BROKEN.values()} - {"audit"}, "all that the broken ones are told by are made"
    assert not list(setup.site.rglob(".fl-bn-doctor*"))
    assert not (setup.site / "state").exists()


@pytest.mark.parametrize("name", list(BROKEN))
def test_what_is_broken_is_the_one_thing_that_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaking, check = BROKEN[name]
    with made(tmp_path, breaking) as setup:
        if setup.pythonpath.exists():
            monkeypatch.syspath_prepend(setup.pythonpath)
        assert list(failed(list(diagnose(setup.site)))) == [check]


def test_the_runs_config_is_held_against_the_sites_data(setup: Setup) -> None:
    form = "dataset='sites' classes=4 channels=3 image-size=20"
    assert failed(list(diagnose(setup.site, form))) == {}
    for wrong, check in (
        (form.replace("channels=3", "channels=1"), "data"),
        (form.replace("classes=4", "classes=3"), "data"),
        ("batchsize=3", "run config"),
        ("batch-size", "run config"),
    ):
        assert check in failed(list(diagnose(setup.site, wrong)))
    setup.write_line("dataset", "")
    assert "data" in failed(list(diagnose(setup.site, form)))


def test_a_sound_server(tmp_path: Path) -> None:
    kit = tls_servers.make_kit(tmp_path / "kit", tls_servers.free_port())
    findings = list(diagnose(kit / "server"))
    assert [finding for finding in findings if finding.status != "ok" and finding.check not in MACHINES] == []
    assert {"fleet", "control", "serverappio", "exchange-port", "kit", "model"} <= {finding.check for finding in findings}


@listed(
    ("breaking", "overrides", "check"),
    [
        (lambda kit: tls_servers.reissue(kit, ["localhost", "127.0.0.1"], begins=-9, ends=-2), "", "kit"),
        (lambda kit: tls_servers.reissue(kit, ["127.0.0.1"]), "", "kit"),
        (lambda kit: tls_servers.write_line(kit / "server/server.toml", "state", "ca.crt"), "", "state"),
        (lambda kit: tls_servers.write_line(kit / "server/server.toml", "superlink", "no-such-host.invalid"), "", "superlink name"),
        (lambda kit: (kit / "server/sites/B.pub").write_bytes((kit / "server/sites/A.pub").read_bytes()), "", "kit"),
        (lambda kit: (kit / "server/sites/B.pub").write_text("ssh-ed25519 nonsense"), "", "kit"),
        (lambda kit: None, "clients=3", "clients"),
        (lambda kit: None, "method='fbnn'", "run config"),
        (lambda kit: None, "model='no-such-net'", "model"),
        (lambda kit: None, "dataset='npz' data-path='gone.npz'", "data"),
        (lambda kit: None, "device='cuda:77'", "gpu"),
        (lambda kit: (kit / "server/server.toml").write_text("superlink = 3"), "", "folder"),
    ],
    ids=[str(number) for number in range(12)],
)  # fmt: skip
def test_what_is_wrong_on_the_server(breaking: Callable[[Path], None], overrides: str, check: str, tmp_path: Path) -> None:
    kit = tls_servers.make_kit(tmp_path / "kit", tls_servers.free_port())
    breaking(kit)
    assert check in failed(list(diagnose(kit / "server", overrides)))


def test_ports_in_use_by_the_folders_own_programs_are_no_failure(tmp_path: Path) -> None:
    import fcntl

    with tls_servers.listen() as fleet:
        kit = tls_servers.make_kit(tmp_path / "kit", tls_servers.port_of(fleet))
        tls_servers.write_line(kit / "server" / "server.toml", "fleet", f"127.0.0.1:{tls_servers.port_of(fleet)}")
        assert list(failed(list(diagnose(kit / "server")))) == ["fleet"]
        with open(kit / "server" / ".running", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            running = {finding.check: finding for finding in diagnose(kit / "server")}
    assert running["fleet"].status == "ok"
    assert "in use while `fl-bn start`" in running["fleet"].text


def test_lines_json_and_exit_code(tmp_path: Path) -> None:
    good = CliRunner().invoke(app, ["doctor", "--run-config", "method='hbn'"])
    assert good.exit_code == 0, good.output
    assert all(line[:6] in ("ok    ", "warn  ") and ": " in line for line in good.stdout.splitlines()[:-1])
    bad = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    assert bad.exit_code == 1
    found = json.loads(bad.stdout)
    assert (found[-1]["status"], found[-1]["check"]) == ("fail", "folder")
    assert {tuple(entry) for entry in found} == {("status", "check", "text", "do")}


def test_a_check_that_faints_is_a_failed_check_and_the_others_go_on(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def faint(*_: object) -> Finding:
        raise ZeroDivisionError("by nothing\nat all")

    for check in ("fl_bn.checks.machine.packages", "fl_bn_site.doctor.verify", "fl_bn.checks.run.site_data"):
        monkeypatch.setattr(check, faint)
    findings = list(diagnose(setup.site))
    assert list(failed(findings)) == ["packages", "kit", "data"]
    assert findings[-1].check == "model on data"
