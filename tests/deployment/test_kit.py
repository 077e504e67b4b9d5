"""The kit: certificates that TLS accepts, keys that Flower reads and nobody else, and a check that finds what is broken."""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path
from subprocess import check_call
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn_site.folders import host_port, read_folder, render
from tests.deployment.conftest import PLAN
from tests.deployment.inner import FolderError, KitError, KitPlan, ServerFolder, SiteFolder, app, create, verify
from tests.deployment.tls_servers import accepts, write_line
from tests.listed import listed
from tests.refusals import naming
from tests.test_durable import room_for

PRIVATE = ("authority/ca.key", "server/server.key", "sites/A/site.key", "sites/B/site.key", "submitters/submitter/submitter.key")
LOCKED = ("openssl", "genpkey", "-algorithm", "ed25519", "-aes256", "-pass", "pass:two words", "-out")  # a key with a passphrase


def failures(folder: Path) -> list[str]:
    return [str(check) for check in verify(folder) if check.status == "fail"]


def test_a_kit_is_complete_and_verifies_and_its_keys_are_their_owner_s_alone(kit: Path) -> None:
    site = SiteFolder.read(kit / "sites/B")
    assert (site.site, site.superlink, site.exchange_addresses) == ("B", "fl.example.org:21092", "x.example.org")
    for name in ("README.md", "server/GUIDE.md", "server/start.sh", "server/run.sh", "sites/A/GUIDE.md", "sites/A/start.sh"):
        assert (kit / name).stat().st_size > 100
        assert not name.endswith(".sh") or (kit / name).stat().st_mode & 0o100
    assert [failures(folder) for folder in (kit, kit / "server", kit / "sites/A")] == [[], [], []]
    assert all(((kit / name).stat().st_mode & 0o777, (kit / name).parent.stat().st_mode & 0o777) == (0o600, 0o700) for name in PRIVATE)
    assert len({(kit / name).read_bytes() for name in PRIVATE}) == len(PRIVATE)
    others = [path for path in kit.rglob("*") if path.is_file() and path.relative_to(kit).as_posix() not in PRIVATE]
    assert not any(b"PRIVATE" in path.read_bytes() for path in others)


def test_tls_accepts_the_server_by_each_of_its_names_and_no_other_nor_another_authority(kit: Path, tmp_path: Path) -> None:
    create(PLAN, tmp_path / "other")
    for host in ("fl.example.org", "x.example.org", "localhost", "127.0.0.1", "::1", "10.1.2.3", "alias"):
        assert accepts(kit / "sites/A", kit / "server", host)
    assert not accepts(tmp_path / "other/sites/A", kit / "server")
    assert not accepts(kit / "sites/A", kit / "server", "evil.example.org")


def of_another_kit(*names: str) -> Any:
    def change(kit: Path) -> None:
        create(PLAN, kit.parent / "other")
        for name in names:
            shutil.copy(kit.parent / "other" / name, kit / name)

    return change


@listed(
    ("change", "where", "expected"),
    [
        (of_another_kit("server/server.crt", "server/server.key"), "server", ["server.crt is signed by"]),
        (of_another_kit("sites/A/site.key"), "sites/A", ["site.key belongs to"]),
        (of_another_kit("sites/A/site.key", "sites/A/site.pub"), ".", ["A.pub is "]),
        (of_another_kit("sites/B/ca.crt"), ".", ["sites/B/ca.crt is "]),
        (of_another_kit("authority/ca.key"), ".", ["ca.key belongs to"]),
        (lambda kit: write_line(kit / "server/server.toml", "superlink", "moved.org"), "server", ["is for superlink = moved.org"]),
        (lambda kit: write_line(kit / "server/server.toml", "exchange-host", "10.9.9.9"), "server", ["is for exchange-host = 10.9.9.9"]),
        (lambda kit: (kit / "server/server.toml").write_text("flet = 3"), "server", ["server.toml is complete"]),
        (lambda kit: (kit / "authority/ca.key").chmod(0o644), ".", ["ca.key is readable by its owner only"]),
        (lambda kit: (kit / "server/sites/B.pub").unlink(), "server", ["B.pub is a public key"]),
        (lambda kit: (kit / "server/server.crt").unlink(), "server", ["server.crt is a certificate", "server.key belongs to"]),
        (lambda kit: (kit / "sites/A/submitters/submitter.pub").unlink(), ".", ["policy.toml is complete"]),
        (lambda kit: check_call([*LOCKED, kit / "sites/A/site.key"]), "sites/A", ["site.key belongs to"]),
    ],
)
def test_what_is_broken_is_found_and_nothing_else(tmp_path: Path, change: Any, where: str, expected: list[str]) -> None:
    create(PLAN, tmp_path / "kit")
    change(tmp_path / "kit")
    found = failures(tmp_path / "kit" / where)
    assert len(found) == len(expected), found
    assert all(name in said for said, name in zip(found, expected, strict=True))


def test_keys_are_never_shown_nor_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kit = tmp_path / "kit"
    make = ["kit", "create", "--superlink", "127.0.0.1", "--sites", "A,B", "--output", str(kit)]
    runner = CliRunner()
    failed = runner.invoke(app, [*make, "--submitters", str(tmp_path / "missing.pub")])
    assert (failed.exit_code, list(kit.iterdir())) == (2, []), "it can be typed again"
    with room_for(700), naming("too large", OSError):
        create(PLAN, kit)
    shown = runner.invoke(app, make).output
    before = [(kit / name).read_bytes() for name in PRIVATE]
    again = runner.invoke(app, make)
    assert (again.exit_code, [(kit / name).read_bytes() for name in PRIVATE]) == (2, before)
    shown += runner.invoke(app, ["kit", "verify", str(kit)]).output + again.output + "".join(capfd.readouterr())
    lines = [line for content in before for line in content.decode().splitlines() if not line.startswith("-----")]
    assert len(lines) > 8
    assert not any(line in shown for line in lines)


def test_plans_that_cannot_be() -> None:
    sites: Any = [{"sites": names} for names in ([], ["A", "a"], ["../A"])]
    for changed in ({"superlink": "fl.example.org:9092"}, {"also": ["a/b"]}, {"days": 0}, {"days": 10**8}, *sites):
        with pytest.raises(KitError):
            KitPlan(**{"superlink": "fl.example.org", "sites": ["A", "B"]} | changed)  # type: ignore[arg-type]


# server.toml and site.toml

SERVER = render(ServerFolder, superlink="fl.example.org", exchange_host="x.example.org", sites=["A", "B"])
SITE = render(SiteFolder, site="B", superlink="fl.example.org:9092")


def folder(path: Path, kind: type[ServerFolder] | type[SiteFolder], text: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / kind.file).write_text(text)
    return path


def test_what_is_rendered_is_read_and_paths_start_at_the_folder_wherever_the_command_is_typed(tmp_path: Path) -> None:
    server = ServerFolder.read(folder(tmp_path / "server", ServerFolder, SERVER))
    assert (server.superlink, server.exchange_host, server.exchange_port) == ("fl.example.org", "x.example.org", 9095)
    assert (server.sites, server.fleet, server.control) == (("A", "B"), "0.0.0.0:9092", "127.0.0.1:9093")
    assert (server.state, server.results, server.app) == (tmp_path / "server/state", tmp_path / "server/results", None)
    site = SiteFolder.read(folder(tmp_path / "b", SiteFolder, SITE))
    assert (site.site, site.superlink, site.device, site.clientappio) == ("B", "fl.example.org:9092", "auto", "127.0.0.1:9094")
    assert (site.private_key, site.audit_log) == (tmp_path / "b/site.key", tmp_path / "b/node/audit")
    assert (read_folder(server.path), read_folder(site.path)) == (server, site)
    with pytest.raises(FolderError):
        read_folder(tmp_path)
    assert host_port("[::1]:9092") == ("::1", 9092)
    moved = SERVER.replace('"state"', '"../elsewhere"').replace('"results"', '"/srv/results"').replace('app = ""', 'app = "~/project"')
    folder(tmp_path / "server", ServerFolder, moved)
    with chdir(tmp_path):
        server = ServerFolder.read("server")
    assert server.state.resolve() == tmp_path / "elsewhere"
    assert (server.results, server.app) == (Path("/srv/results"), Path.home() / "project")
    data = folder(tmp_path, SiteFolder, SITE)  # its paths are absolute, unless a function reads them
    for dataset, given, read in (("npz", "one.npz, b/2.npz", f"{tmp_path}/one.npz,{tmp_path}/b/2.npz"), ("mine:load", "a b", "a b")):
        write_line(data / "site.toml", "dataset", dataset)
        write_line(data / "site.toml", "data-path", given)
        assert SiteFolder.read(data).data_path == read


@listed(
    ("kind", "old", "new", "said"),
    [
        (ServerFolder, "fleet =", "flet =", "'flet'"),
        (ServerFolder, "superlink = ", "# ", "superlink"),
        (ServerFolder, "= 9095", '= "9095"', "exchange-port"),
        (ServerFolder, "exchange-ports = 4", "exchange-ports = 65000", "exchange-ports"),
        (ServerFolder, "exchange-ports = 4", 'metrics = "127.0.0.1:9096"', "metrics"),
        (ServerFolder, '["A", "B"]', '["A", 1]', "sites"),
        (ServerFolder, '["A", "B"]', '["../A"]', "sites"),
        (ServerFolder, "127.0.0.1:9093", "127.0.0.1", "control"),
        (ServerFolder, 'superlink = "fl', "superlink = fl", "cannot be read"),
        (SiteFolder, 'site = "B"', 'site = "B"\npartition-id = 1', "partition-id"),
        (SiteFolder, '"auto"', '"gpu"', "device"),
        (SiteFolder, '"state"', "'a \"state\"'", "state-dir"),
        (SiteFolder, "code = []", 'code = ["a:b"]', "code"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, kind: type[ServerFolder], old: str, new: str, said: str) -> None:
    text = SERVER if kind is ServerFolder else SITE
    assert old in text
    with naming(said, FolderError) as error:
        kind.read(folder(tmp_path, kind, text.replace(old, new)))
    assert str(tmp_path / kind.file) in str(error.value)
