"""server.toml and site.toml: what is written is read back, paths become absolute, and each wrong line is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fl_bn_site.folders import FolderError, ServerFolder, SiteFolder, host_port, read_folder, render
from tests.listed import listed

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
        tmp_path / "b" / name for name in ("site.key", "state", "state/audit")
    )
    assert (read_folder(server.path), read_folder(site.path)) == (server, site)


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
        (ServerFolder, "parallel = 1", "parallel = 0", "parallel"),
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


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    for read in (read_folder, SiteFolder.read):
        with pytest.raises(FolderError, match="site.toml"):
            read(tmp_path)


def test_addresses() -> None:
    for address, parts in {"h:1": ("h", 1), "10.0.0.1:65535": ("10.0.0.1", 65535), "[::1]:9092": ("::1", 9092)}.items():
        assert host_port(address) == parts


@listed("address", ["h", "h:", ":1", "h:0", "h:65536", "::1:9092", "h:1:2", "h :1", "https://h:1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        host_port(address)
