"""Whoever submits runs has a key: how it is made, found and used, and how a site comes to trust it."""

from __future__ import annotations

import getpass
import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_bn_site import submit as submit_module
from fl_bn_site.signing import check
from fl_bn_site.submit import UNSIGNED, sign_only, submit_signed
from fl_bn_site.submitters import VARIABLE
from tests.deployment.inner import (
    FolderError,
    KitPlan,
    NotSigned,
    Package,
    Policy,
    RunConfig,
    ServerFolder,
    SiteFolder,
    add_site,
    app,
    create,
    key_file,
    read_key,
    resume,
    submit,
    write_submitter_key,
)

CODE = Package(b"a package").code  # what conftest's project is packed as


def keys_of(server: ServerFolder) -> tuple[Any, ...]:
    """Whom the site ``a`` trusts."""
    return Policy.read(server.path.parent / "sites/a/policy.toml").trusted_submitters


def own_key(server: ServerFolder) -> Path:
    return server.path.parent / "submitters/submitter/submitter.key"


# fl-bn submit


def test_without_a_key_a_run_is_submitted_and_it_is_said_that_sites_may_refuse_it(server: ServerFolder, superlink: Any) -> None:
    """Control: the kit's own key signs what is submitted beside it."""
    said: list[str] = []
    assert submit(server, "name='mine' rounds=1", say=said.append)
    assert (UNSIGNED in said, check(CODE, superlink.known[0].config, keys_of(server)).submitter.name) == (False, "submitter")
    own_key(server).unlink()
    assert submit(server, "name='other' rounds=1", say=said.append)
    assert UNSIGNED in said
    with pytest.raises(NotSigned):
        check(CODE, superlink.known[1].config, keys_of(server))


def test_a_file_that_was_signed_elsewhere_is_submitted_as_it_is(server: ServerFolder, superlink: Any, tmp_path: Path) -> None:
    assert sign_only(server, "name='mine' rounds=1", tmp_path / "run") == "mine"
    own_key(server).unlink()
    assert submit_signed(server, tmp_path / "run", say=lambda line: None)
    assert check(CODE, superlink.known[0].config, keys_of(server))
    content = json.loads((tmp_path / "run").read_text())
    content["config"] |= {"rounds": 2, "name": "other"}
    (tmp_path / "run").write_text(json.dumps(content))
    assert submit_signed(server, tmp_path / "run", say=lambda line: None)
    with pytest.raises(NotSigned):  # negative control
        check(CODE, superlink.known[1].config, keys_of(server))
    form = '"form": "fl-bn signed run 1"'
    for text in ("", "{}", "[]", f"{{{form}}}", f'{{{form}, "config": {{}}}}'):
        (tmp_path / "run").write_text(text)
        with pytest.raises(FolderError):
            submit_signed(server, tmp_path / "run")
    with pytest.raises(FolderError):
        sign_only(server, "rounds=1", tmp_path / "another")
    assert CliRunner().invoke(app, ["submit", str(server.path), "--signed", "run", "--run-config", "rounds=1"]).exit_code == 2


def test_a_resumed_run_is_signed_anew(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert submit(server, "name='mine' rounds=1", say=lambda line: None)
    before = superlink.known[0].config
    monkeypatch.setattr(submit_module, "config_to_resume", lambda folder, deployed: RunConfig.from_mapping({**before, "resume": "mine"}))
    assert resume(server, "mine", say=lambda line: None)
    signatures = [check(CODE, run.config, keys_of(server)) for run in superlink.known]
    assert signatures[0].nonce != signatures[1].nonce


# Which key


def test_the_key_is_the_one_that_is_named(server: ServerFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert key_file(server) == own_key(server)
    write_submitter_key(server.path.parent / "submitters/bob", "bob")
    with pytest.raises(FolderError):
        key_file(server)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "alice.key"))
    assert key_file(server) == tmp_path / "alice.key"
    assert key_file(server, tmp_path / "k") == tmp_path / "k"
    with pytest.raises(FolderError):  # of another kind
        read_key(server.key)


def test_a_key_may_need_a_passphrase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_submitter_key(tmp_path, "alice")
    encrypt = ["openssl", "pkey", "-aes256", "-passout", "pass:two words", "-in", str(tmp_path / "submitter.key")]
    (tmp_path / "alice.key").write_bytes(subprocess.run(encrypt, check=True, timeout=60, capture_output=True).stdout)
    typed = ["another", "two words"]
    monkeypatch.setattr(getpass, "getpass", lambda prompt: typed.pop(0))
    with pytest.raises(FolderError):
        read_key(tmp_path / "alice.key")
    assert read_key(tmp_path / "alice.key").public_key().public_bytes_raw() == made.key
    assert stat.S_IMODE((tmp_path / "submitter.key").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_submitter_key(tmp_path, "alice")


# Whom sites trust


def test_a_kit_hands_out_public_keys_alone(tmp_path: Path) -> None:
    alice = write_submitter_key(tmp_path / "alice", "alice")
    (tmp_path / "alice/submitter.pub").rename(tmp_path / "alice.pub")
    create(KitPlan("127.0.0.1", ["a", "b"], submitters=[str(tmp_path / "alice.pub"), "bob"]), tmp_path / "kit")
    assert [path.parent.name for path in (tmp_path / "kit").rglob("submitter.key")] == ["bob"]
    for site in ("a", "b"):
        read = Policy.read(tmp_path / "kit/sites" / site / "policy.toml")
        assert (read.allow_code, read.trusted_submitters[0]) == ("signed", alice)
        assert [one.name for one in read.trusted_submitters] == ["alice", "bob"]
    added = add_site(ServerFolder.read(tmp_path / "kit/server"), "c", None, tmp_path / "kit/sites/c")
    assert Policy.read(tmp_path / "kit/sites/c/policy.toml") == Policy.read(tmp_path / "kit/sites/a/policy.toml")
    assert added.sites == ("a", "b", "c")


def test_a_site_trusts_another_submitter_by_a_command(server: ServerFolder, tmp_path: Path) -> None:
    site = SiteFolder.read(server.path.parent / "sites/a")
    made = CliRunner().invoke(app, ["kit", "submitter", "alice", "--output", str(tmp_path)])
    assert made.exit_code == 0, made.output
    shown = made.output.splitlines()[-1]
    before = site.policy.read_text()
    for _ in range(2):
        done = CliRunner().invoke(app, ["kit", "trust", str(site.path), "alice", str(tmp_path / "submitter.pub")])
        assert done.exit_code == 0, done.output
        assert shown in " ".join(done.output.split())
    assert [str(one) for one in Policy.read(site.policy).trusted_submitters][:1] == [shown]
    assert site.policy.read_text() == before
