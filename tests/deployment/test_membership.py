"""Sites that come and go, and keys and certificates made anew: what changes in a kit, and that nothing else does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from typer.testing import CliRunner

from fl_bn_site import certificates, control
from fl_bn_site.certificates import names_in, public_half, read_certificate, read_public, write_site_key
from fl_bn_site.control import ControlError, register_sites
from fl_bn_site.folders import one_at_a_time
from fl_bn_site.membership import add_site, check_expiry, owner, remove_site, renew_server, renew_site, replace_authority
from tests.deployment.conftest import PLAN
from tests.deployment.inner import FolderError, KitError, ServerFolder, SiteFolder, app, create
from tests.deployment.test_kit import failures
from tests.deployment.tls_servers import accepts, reissue
from tests.refusals import naming
from tests.test_durable import room_for


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_site_that_comes_changes_nothing_at_the_others(kit: Path, server: ServerFolder) -> None:
    others = {name: contents(kit / "sites" / name) for name in ("A", "B")}
    before = (kit / "server/server.toml").read_text().splitlines()
    changed = add_site(server, "east", None, kit / "sites/east")
    assert changed.sites == ("A", "B", "east")
    assert failures(kit) == []
    assert {name: contents(kit / "sites" / name) for name in ("A", "B")} == others
    after = (kit / "server/server.toml").read_text().splitlines()
    assert [old.split("=")[0] for old, new in zip(before, after, strict=True) if old != new] == ["sites "]
    site = SiteFolder.read(kit / "sites/east")
    assert (site.site, site.superlink) == ("east", SiteFolder.read(kit / "sites/A").superlink)
    assert (kit / "sites/east/site.key").stat().st_mode & 0o777 == 0o600
    write_site_key(kit / "own.key", kit / "own.pub", "west")  # a site may make its key itself
    changed = add_site(changed, "west", kit / "own.pub", kit / "sites/west")
    assert read_public(changed.public_key("west")) == public_half(kit / "own.key")
    assert not (kit / "sites/west").exists()


CHANGES: list[Callable[[ServerFolder, Path], object]] = [
    lambda server, kit: add_site(server, "a", None, kit / "sites/east"),
    lambda server, kit: add_site(server, "../x", None, kit / "sites/east"),
    lambda server, kit: add_site(server, "east", kit / "sites/A/site.pub", kit / "sites/east"),
    lambda server, kit: add_site(server, "east", kit / "sites/A/site.key", kit / "sites/east"),
    lambda server, kit: add_site(server, "east", None, kit / "sites/B"),
    lambda server, kit: remove_site(server, "C"),
    lambda server, kit: renew_site(server, "A", kit / "sites/B/site.pub", kit / "sites/A"),
    lambda server, kit: renew_site(server, "A", kit / "sites/A/site.pub", kit / "sites/A"),  # nothing would be renewed
    lambda server, kit: renew_site(server, "C", None, kit / "sites/A"),
    lambda server, kit: renew_server(server, other(kit), 400),
    lambda server, kit: renew_server(server, kit / "nowhere", 400),
    lambda server, kit: renew_server(server, kit.parent / "mixed", 400),
    lambda server, kit: renew_site(server, "B", None, kit / "sites/A"),
]


def test_what_cannot_be_changed_leaves_all_as_it_was(kit: Path, server: ServerFolder) -> None:
    before = contents(kit)
    for change in CHANGES:
        with pytest.raises(KitError):
            change(server, kit)
        assert contents(kit) == before
    signs: Any = kit / "authority"
    for change, *given in ((renew_server, signs, 400), (replace_authority, signs, 400), (renew_site, "B", None, kit / "sites/B")):
        with room_for(500), pytest.raises(OSError, match="too large"):
            change(server, *given)
        assert contents(kit) == before


def other(kit: Path) -> Path:
    """Make another kit; return the folder of its authority. The folder ``mixed`` has its key with the certificate of ``kit``."""
    create(PLAN, kit.parent / "other")
    shutil.copytree(kit.parent / "other/authority", kit.parent / "mixed")
    shutil.copy(kit / "authority/ca.crt", kit.parent / "mixed")
    return kit.parent / "other/authority"


def test_the_key_of_a_site_that_goes_or_is_renewed_is_kept_as_a_former_one(kit: Path, server: ServerFolder) -> None:
    key, old, site = read_public(server.public_key("A")), read_public(server.public_key("B")), contents(kit / "sites/A")
    (kit / "sites/B/site.key").rename(kit / "sites/B/b.pem")
    (kit / "sites/B/site.toml").write_text((kit / "sites/B/site.toml").read_text().replace('"site.key"', '"b.pem"'))
    renew_site(server, "B", None, kit / "sites/B")
    assert read_public(server.public_key("B")) == public_half(kit / "sites/B/b.pem") != old
    assert failures(kit) == []
    assert contents(kit / "sites/A") == site
    changed = remove_site(server, "A")
    assert (changed.sites, server.public_key("A").exists()) == (("B",), False)
    assert [owner(changed, of) for of in (key, old, read_public(server.public_key("B")), b"")] == ["A", "B", "B", ""]
    assert failures(kit) == []
    with pytest.raises(KitError):
        remove_site(changed, "B")
    for name in ("A", "west"):
        with naming("make another key pair", KitError):
            add_site(changed, name, kit / "sites/A/site.pub", kit / "sites/new")


class SuperLink:
    """What Flower's does of keys: it takes none again that it has had. It may be interrupted (``breaks``) when it has taken one."""

    def __init__(self) -> None:
        self.taken, self.here, self.breaks = list[bytes](), set[int](), True
        self.nodes = lambda: dict.fromkeys(self.here)
        self.ask = lambda *words: self.here.remove(int(words[-1]))

    def register(self, public_key: Path) -> int:
        if read_public(public_key) in self.taken:
            raise ControlError("Public key already in use")
        self.taken.append(read_public(public_key))
        self.here.add(len(self.taken))
        if self.breaks:
            raise KeyboardInterrupt
        return len(self.taken)


def test_a_key_that_the_superlink_refuses_locks_out_its_site_alone_and_an_interrupted_registration_none(
    kit: Path, server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    flower = SuperLink()
    monkeypatch.setattr(control, "control_of", lambda *given: nullcontext(flower))
    with pytest.raises(KeyboardInterrupt):
        list(register_sites(server))
    flower.breaks = False
    assert list(register_sites(server)) == [("A", "registered"), ("B", "registered")]
    assert (control.nodes_of(server, ("A", "B")), flower.here) == ([1, 2], {1, 2})
    write_site_key(kit / "own.key", kit / "own.pub", "A")
    flower.taken.append(read_public(kit / "own.pub"))  # and it was shut out, by hand
    renew_site(server, "A", kit / "own.pub", kit)
    server = add_site(server, "east", None, kit / "sites/east")
    for _ in range(2):
        shown = CliRunner().invoke(app, ["register", str(server.path)])
        assert (shown.exit_code, "--site A --public-key" in " ".join(shown.output.split())) == (1, True), shown.output
        assert (control.nodes_of(server, server.sites, all_needed=False), flower.here) == ([0, 2, 4], {2, 4})
    with naming("the key of A", ControlError):
        control.nodes_of(server, server.sites)


@pytest.mark.slow
def test_two_changes_at_once_are_made_one_after_the_other(kit: Path, server: ServerFolder) -> None:
    words = [sys.executable, "-m", "fl_bn.cli.main", "kit", "add-site", str(server.path), "west"]
    with one_at_a_time(server.path):
        other = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(6)
        add_site(server, "east", None, kit / "sites/east")
    assert other.wait(60) == 0
    assert ServerFolder.read(server.path).sites == ("A", "B", "east", "west")


def test_a_stolen_server_key_is_worth_nothing_once_the_authority_is_new(kit: Path, server: ServerFolder, tmp_path: Path) -> None:
    thief, signed = tmp_path / "thief", tmp_path / "signed with the stolen authority"
    shutil.copytree(server.path, thief)
    signed.mkdir()
    private: Any = load_pem_private_key((kit / "authority/ca.key").read_bytes(), None)
    old = certificates.Identity(read_certificate(kit / "authority/ca.crt"), private)
    certificates.make_server(old, ["localhost"], 400).write(signed / "server.crt", signed / "server.key")
    names, site = names_in(read_certificate(server.certificate)), kit / "sites/A"
    assert accepts(site, thief)
    assert accepts(site, signed)
    sites, certificate = contents(kit / "sites"), read_certificate(server.certificate)
    former = renew_server(server, kit / "authority", 90)
    assert read_certificate(server.certificate).serial_number != certificate.serial_number
    assert contents(kit / "sites") == sites, "sites need no new files"
    assert all(path.stat().st_mode & 0o077 == 0 for path in [former, *former.glob("*.key.*")])
    assert accepts(site, thief), "control: a renewed certificate alone does not end the former one"

    (kit / "sites/B/site.toml").unlink()  # its folder was handed over, and is no longer here
    theirs = (kit / "sites/B/ca.crt").read_bytes()
    assert replace_authority(server, kit / "authority", 90) == [kit / "sites/A/ca.crt"]
    assert not accepts(site, thief)
    assert not accepts(site, signed)
    assert accepts(site, server.path)
    assert (kit / "sites/B/ca.crt").read_bytes() == theirs
    assert names_in(read_certificate(server.certificate)) == names
    assert (kit / "authority/ca.key").stat().st_mode & 0o077 == 0
    assert [line for line in failures(kit) if "sites/B" not in line] == []


def test_start_refuses_an_expired_certificate_and_says_what_renews_it(kit: Path, server: ServerFolder) -> None:
    reissue(kit, ["localhost"], begins=-100, ends=-10)
    with naming("fl-bn kit renew", FolderError):
        check_expiry(server)
    assert check_expiry(SiteFolder.read(kit / "sites/A")) == ""  # the authority outlives it
    started = CliRunner().invoke(app, ["start", str(server.path)])
    assert (started.exit_code, "expired" in started.output) == (2, True)
    renew_server(server, kit / "authority", 20)
    assert "expires in 19 days" in check_expiry(server)
    renew_server(server, kit / "authority", 200)
    assert check_expiry(server) == ""
