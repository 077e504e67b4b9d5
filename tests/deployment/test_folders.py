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
    assert (server.superlink, server.exchange_host, server.exchange_port, server.sites) == (
        "fl.example.org",
        "x.example.org",
        9095,
        ("A", "B"),
    )
    assert (server.fleet, server.control, server.serverappio) == ("0.0.0.0:9092", "127.0.0.1:9093", "127.0.0.1:9091")
    assert (server.state, server.results, server.app) == (tmp_path / "server/state", tmp_path / "server/results", None)
    assert server.public_key("A") == tmp_path / "server/sites/A.pub"
    site = SiteFolder.read(folder(tmp_path / "b", SiteFolder, SITE))
    assert (site.site, site.superlink) == ("B", "fl.example.org:9092")
    assert (site.dataset, site.data_path, site.device, site.clientappio) == ("", "", "auto", "127.0.0.1:9094")
    assert (site.root_certificates, site.private_key, site.state_dir) == tuple(
        tmp_path / "b" / name for name in ("ca.crt", "site.key", "state")
    )
    assert read_folder(server.path) == server
    assert read_folder(site.path) == site


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


@pytest.mark.parametrize(
    ("dataset", "given", "read"),
    [
        ("npz", "one.npz, sub/two.npz", "{0}/one.npz,{0}/sub/two.npz"),
        ("folder", "/srv/images", "/srv/images"),
        ("mine:load", "what I like", "what I like"),
    ],
)
def test_data_paths_are_absolute_unless_a_function_reads_them(tmp_path: Path, dataset: str, given: str, read: str) -> None:
    text = SITE.replace('dataset = ""', f'dataset = "{dataset}"').replace('data-path = ""', f'data-path = "{given}"')
    assert SiteFolder.read(folder(tmp_path, SiteFolder, text)).data_path == read.format(tmp_path)


@listed(
    ("kind", "old", "new", "said"),
    [
        (ServerFolder, "fleet =", "flet =", "unknown line 'flet': did you mean 'fleet'?"),
        (ServerFolder, "superlink = ", "# ", "the line superlink is missing"),
        (ServerFolder, "= 9095", '= "9095"', "exchange-port must be a whole number, but got '9095'"),
        (ServerFolder, "= 9095", "= true", "exchange-port must be a whole number, but got True"),
        (ServerFolder, "= 9095", "= 0", "exchange-port must be 1..65535, but got 0"),
        (ServerFolder, '["A", "B"]', '"A,B"', "sites must be a list of texts in quotes"),
        (ServerFolder, '["A", "B"]', '["A", 1]', "sites must be a list of texts in quotes"),
        (ServerFolder, '["A", "B"]', '["A", "a"]', "the names must differ even in lower case"),
        (ServerFolder, '["A", "B"]', '["../A"]', "sites must begin with a letter or digit, and have only letters, digits, '.'"),
        (ServerFolder, '["A", "B"]', "[]", "at least one name"),
        (ServerFolder, "127.0.0.1:9093", "127.0.0.1", "control must be HOST:PORT"),
        (ServerFolder, '"state"', '""', "state must not be empty"),
        (ServerFolder, 'superlink = "fl', "superlink = fl", "cannot be read"),
        (SiteFolder, "example.org:9092", "example.org", "superlink must be HOST:PORT"),
        (SiteFolder, 'site = "B"', 'site = "B"\npartition-id = 1', "delete the line partition-id: the server tells a site its place"),
        (SiteFolder, '"auto"', '"gpu"', "device must be auto, cpu, cuda"),
        (SiteFolder, '"state"', "'a \"state\"'", "state-dir must not contain"),
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
    with pytest.raises(FolderError, match=r"expected server\.toml .* or site\.toml"):
        read_folder(tmp_path)
    with pytest.raises(FolderError, match=r"has no site\.toml"):
        SiteFolder.read(tmp_path)


@pytest.mark.parametrize(("address", "parts"), [("h:1", ("h", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535)), ("[::1]:9092", ("::1", 9092))])
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert host_port(address) == parts


@listed("address", ["h", "h:", ":1", "h:0", "h:65536", "::1:9092", "h:1:2", "h :1", "https://h:1"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        host_port(address)
