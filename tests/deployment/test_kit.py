"""The kit: certificates that TLS accepts, keys that Flower reads and nobody else, and a check that finds what is broken."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn_site.folders import host_port, read_folder, render
from tests.deployment.inner import FolderError, KitError, KitPlan, ServerFolder, SiteFolder, app, create, node_config, verify
from tests.listed import listed

PLAN = KitPlan(
    "fl.example.org", ["A", "B"], exchange_host="x.example.org", also=["10.1.2.3", "alias"], fleet_port=21092, exchange_port=21095
)
PRIVATE = ("authority/ca.key", "server/server.key", "sites/A/site.key", "sites/B/site.key", "submitters/submitter/submitter.key")


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    create(PLAN, tmp_path / "kit")
    return tmp_path / "kit"


def failures(folder: Path) -> list[str]:
    return [str(check) for check in verify(folder) if check.status == "fail"]


def test_a_kit_is_complete_and_verifies(kit: Path) -> None:
    server, site = ServerFolder.read(kit / "server"), SiteFolder.read(kit / "sites/B")
    assert (server.superlink, server.exchange_host, server.exchange_port) == ("fl.example.org", "x.example.org", 21095)
    assert (server.sites, site.site, site.superlink) == (("A", "B"), "B", "fl.example.org:21092")
    assert node_config(site)["exchange-addresses"] == site.exchange_addresses == "x.example.org"
    for name in ("README.md", "server/GUIDE.md", "server/start.sh", "server/run.sh", "sites/A/GUIDE.md", "sites/A/start.sh"):
        assert (kit / name).stat().st_size > 100
        assert not name.endswith(".sh") or (kit / name).stat().st_mode & 0o100
    assert [failures(folder) for folder in (kit, kit / "server", kit / "sites/A")] == [[], [], []]


def test_keys_are_their_owner_s_alone(kit: Path) -> None:
    assert all(((kit / name).stat().st_mode & 0o777, (kit / name).parent.stat().st_mode & 0o777) == (0o600, 0o700) for name in PRIVATE)
    assert len({(kit / name).read_bytes() for name in PRIVATE}) == len(PRIVATE)
    others = [path for path in kit.rglob("*") if path.is_file() and path.relative_to(kit).as_posix() not in PRIVATE]
    assert not any(b"PRIVATE" in path.read_bytes() for path in others)


def handshake(server: Path, authority: Path, host: str) -> None:
    """TLS in memory, by Python's own library: raises ssl.SSLError where a client would refuse."""
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(server / "server.crt", server / "server.key")
    trusting = ssl.create_default_context(cafile=str(authority))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [trusting.wrap_bio(down, up, server_hostname=host), listening.wrap_bio(up, down, server_side=True)]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)


def test_tls_accepts_the_server_by_each_of_its_names_and_no_other_nor_another_authority(kit: Path, tmp_path: Path) -> None:
    for host in ("fl.example.org", "x.example.org", "localhost", "127.0.0.1", "::1", "10.1.2.3", "alias"):
        handshake(kit / "server", kit / "sites/A/ca.crt", host)
    create(PLAN, tmp_path / "other")
    for authority, host in ((kit, "evil.example.org"), (tmp_path / "other", "fl.example.org")):
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(kit / "server", authority / "sites/A/ca.crt", host)


def of_another_kit(*names: str) -> Any:
    def change(kit: Path) -> None:
        create(PLAN, kit.parent / "other")
        for name in names:
            shutil.copy(kit.parent / "other" / name, kit / name)

    return change


def edited(name: str, old: str, new: str) -> Any:
    def change(kit: Path) -> None:
        text = (kit / name).read_text()
        assert old in text
        (kit / name).write_text(text.replace(old, new))

    return change


def without(name: str) -> Any:
    return lambda kit: (kit / name).unlink()


def readable(name: str) -> Any:
    return lambda kit: (kit / name).chmod(0o644)


@listed(
    ("change", "where", "expected"),
    [
        (of_another_kit("server/server.crt", "server/server.key"), "server", ["server.crt is signed by"]),
        (of_another_kit("server/server.key"), "server", ["server.key belongs to"]),
        (of_another_kit("sites/A/site.key"), "sites/A", ["site.key belongs to"]),
        (of_another_kit("sites/A/site.key", "sites/A/site.pub"), ".", ["A.pub is "]),
        (of_another_kit("sites/B/ca.crt"), ".", ["sites/B/ca.crt is "]),
        (of_another_kit("authority/ca.key"), ".", ["ca.key belongs to"]),
        (edited("server/server.toml", '"fl.example.org"', '"moved.example.org"'), "server", ["is for superlink = moved.example.org"]),
        (edited("server/server.toml", '"x.example.org"', '"10.9.9.9"'), "server", ["is for exchange-host = 10.9.9.9"]),
        (edited("server/server.toml", "fleet =", "flet ="), "server", ["server.toml is complete"]),
        (readable("server/server.key"), "server", ["server.key is readable by its owner only"]),
        (readable("authority/ca.key"), ".", ["ca.key is readable by its owner only"]),
        (readable("submitters/submitter/submitter.key"), ".", ["submitter.key is readable by its owner only"]),
        (without("server/sites/B.pub"), "server", ["B.pub is a public key"]),
        (without("server/server.crt"), "server", ["server.crt is a certificate", "server.key belongs to"]),
        (without("sites/A/ca.crt"), "sites/A", ["ca.crt is a certificate"]),
        (without("sites/A/submitters/submitter.pub"), ".", ["policy.toml is complete"]),
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
    shown = runner.invoke(app, make).output
    before = [(kit / name).read_bytes() for name in PRIVATE]
    again = runner.invoke(app, make)
    assert again.exit_code == 2
    assert [(kit / name).read_bytes() for name in PRIVATE] == before
    for arguments in (["kit", "verify", str(kit)], ["start", str(kit / "server"), "--print"], ["start", str(kit / "sites/A"), "--print"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 0
        shown += result.output
    shown += again.output + "".join(capfd.readouterr())
    lines = [line for content in before for line in content.decode().splitlines() if not line.startswith("-----")]
    assert len(lines) > 8
    assert not any(line in shown for line in lines)


@listed(
    "changed",
    [
        {"superlink": "fl.example.org:9092"}, {"superlink": "no such name"}, {"also": ["10.0.0.1", "a/b"]}, {"sites": []},
        {"sites": ["A", "a"]}, {"sites": ["../A"]}, {"submitters": []}, {"submitters": ["bob", "bob"]}, {"submitters": ["../bob"]},
        {"days": 0}, {"fleet_port": 70000},
    ],
)  # fmt: skip
def test_plans_that_cannot_be(changed: dict[str, Any]) -> None:
    with pytest.raises(KitError):
        KitPlan(**{"superlink": "fl.example.org", "sites": ["A", "B"]} | changed)


# server.toml and site.toml

SERVER = render(ServerFolder, superlink="fl.example.org", exchange_host="x.example.org", sites=["A", "B"])
SITE = render(SiteFolder, site="B", superlink="fl.example.org:9092")


def folder(path: Path, kind: type[ServerFolder] | type[SiteFolder], text: str) -> Path:
    path.mkdir(exist_ok=True)
    (path / kind.file).write_text(text)
    return path


def test_what_is_rendered_is_read(tmp_path: Path) -> None:
    server = ServerFolder.read(folder(tmp_path / "server", ServerFolder, SERVER))
    assert (server.superlink, server.exchange_host, server.exchange_port) == ("fl.example.org", "x.example.org", 9095)
    assert server.sites == ("A", "B")
    assert (server.fleet, server.control, server.serverappio) == ("0.0.0.0:9092", "127.0.0.1:9093", "127.0.0.1:9091")
    assert (server.state, server.results, server.app) == (tmp_path / "server/state", tmp_path / "server/results", None)
    site = SiteFolder.read(folder(tmp_path / "b", SiteFolder, SITE))
    assert (site.site, site.superlink, site.device, site.clientappio) == ("B", "fl.example.org:9092", "auto", "127.0.0.1:9094")
    assert (site.private_key, site.state_dir, site.audit_log) == tuple(
        tmp_path / "b" / name for name in ("site.key", "state", "node/audit")
    )
    assert (read_folder(server.path), read_folder(site.path)) == (server, site)
    for read in (read_folder, SiteFolder.read):
        with pytest.raises(FolderError):
            read(tmp_path)


def test_paths_start_at_the_folder_wherever_the_command_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        SERVER.replace('"state"', '"../elsewhere"')
        .replace('"results"', f'"{os.sep}srv{os.sep}results"')
        .replace('app = ""', 'app = "~/project"')
    )
    folder(tmp_path / "server", ServerFolder, text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    server = ServerFolder.read("server")
    assert server.state.resolve() == tmp_path / "elsewhere"
    assert server.results == Path("/srv/results")
    assert server.app == tmp_path / "project"


@listed(
    ("dataset", "given", "read"),
    [("npz", "one.npz, sub/two.npz", "{0}/one.npz,{0}/sub/two.npz"), ("folder", "/srv/images", "/srv/images"), ("mine:load", "a b", "a b")],
)
def test_data_paths_are_absolute_unless_a_function_reads_them(tmp_path: Path, dataset: str, given: str, read: str) -> None:
    text = SITE.replace('dataset = ""', f'dataset = "{dataset}"').replace('data-path = ""', f'data-path = "{given}"')
    assert SiteFolder.read(folder(tmp_path, SiteFolder, text)).data_path == read.format(tmp_path)


@listed(
    ("kind", "old", "new", "said"),
    [
        (ServerFolder, "fleet =", "flet =", "'flet'"),
        (ServerFolder, "superlink = ", "# ", "superlink"),
        (ServerFolder, "= 9095", '= "9095"', "exchange-port"),
        (ServerFolder, "= 9095", "= true", "exchange-port"),
        (ServerFolder, "= 9095", "= 0", "exchange-port"),
        (ServerFolder, "exchange-ports = 4", "exchange-ports = 65000", "exchange-ports"),
        (ServerFolder, "exchange-ports = 4", 'metrics = "127.0.0.1:9096"', "metrics"),
        (ServerFolder, '["A", "B"]', '"A,B"', "sites"),
        (ServerFolder, '["A", "B"]', '["A", 1]', "sites"),
        (ServerFolder, '["A", "B"]', '["A", "a"]', "lower case"),
        (ServerFolder, '["A", "B"]', '["../A"]', "sites"),
        (ServerFolder, '["A", "B"]', "[]", "sites"),
        (ServerFolder, "127.0.0.1:9093", "127.0.0.1", "control"),
        (ServerFolder, '"state"', '""', "state"),
        (ServerFolder, 'superlink = "fl', "superlink = fl", "cannot be read"),
        (SiteFolder, "example.org:9092", "example.org", "superlink"),
        (SiteFolder, 'site = "B"', 'site = "B"\npartition-id = 1', "partition-id"),
        (SiteFolder, '"auto"', '"gpu"', "device"),
        (SiteFolder, '"state"', "'a \"state\"'", "state-dir"),
        (SiteFolder, "code = []", 'code = ["a:b"]', "code"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, kind: type[ServerFolder], old: str, new: str, said: str) -> None:
    text = SERVER if kind is ServerFolder else SITE
    assert old in text
    with pytest.raises(FolderError) as error:
        kind.read(folder(tmp_path, kind, text.replace(old, new)))
    assert said in str(error.value)
    assert str(tmp_path / kind.file) in str(error.value)


@listed(
    ("address", "parts"),
    [
        ("h:1", ("h", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:9092", ("::1", 9092)),
        *((wrong, None) for wrong in ("h", "h:", ":1", "h:0", "h:65536", "::1:9092", "h:1:2", "h :1", "https://h:1")),
    ],
)  # fmt: skip
def test_addresses(address: str, parts: tuple[str, int] | None) -> None:
    if parts is None:
        with pytest.raises(ValueError):  # noqa: PT011
            host_port(address)
    else:
        assert host_port(address) == parts
