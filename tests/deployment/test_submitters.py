"""Whoever submits runs has a key: how it is made, found and used, and how a site comes to trust it."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from fl_bn.app.checkpoints import LOCK
from fl_bn.support.durable import release, take
from fl_bn_site.submit import sign_only, submit_signed, wait_for_the_end
from fl_bn_site.submitters import VARIABLE, key_file, read_key, read_signed, write_submitter_key
from tests.deployment.inner import FolderError, KitPlan, Policy, ServerFolder, SiteFolder, add_site, app, create


def test_the_key_is_the_one_that_is_named(kit: Path, server: ServerFolder) -> None:
    own = kit / "submitters/submitter/submitter.key"
    assert key_file(server) == own
    write_submitter_key(kit / "submitters/bob", "bob")
    with pytest.raises(FolderError):
        key_file(server)
    with mock.patch.dict(os.environ, {VARIABLE: "alice.key"}):
        assert (key_file(server), key_file(server, own)) == (Path("alice.key"), own)
    with pytest.raises(FolderError):  # of another kind
        read_key(server.key)
    with pytest.raises(FileExistsError):
        write_submitter_key(own.parent, "submitter")


def test_without_a_key_nothing_is_signed_nor_is_anything_else_submitted(kit: Path, server: ServerFolder, tmp_path: Path) -> None:
    (kit / "submitters/submitter/submitter.key").unlink()
    with pytest.raises(FolderError):
        sign_only(server, "rounds=1", tmp_path / "run")
    form = '"form": "fl-bn signed run 1"'
    for text in ("", "{}", "[]", f"{{{form}}}", f'{{{form}, "config": {{}}}}'):
        (tmp_path / "run").write_text(text)
        with pytest.raises(FolderError):
            submit_signed(server, tmp_path / "run")
    assert CliRunner().invoke(app, ["submit", str(server.path), "--signed", "run", "--run-config", "rounds=1"]).exit_code == 2


def test_a_copy_of_server_toml_is_enough_to_sign_also_a_resume_and_sites_are_not_signed(kit: Path, tmp_path: Path) -> None:
    copy, key, file = tmp_path / "copy", kit / "submitters/submitter/submitter.key", tmp_path / "run"
    copy.mkdir()
    (copy / "server.toml").write_text((kit / "server/server.toml").read_text())
    assert sign_only(ServerFolder.read(copy), "rounds=1 resume='trial'", file, key) == "trial"
    config, _ = read_signed(file)
    assert {name: config.get(name) for name in ("resume", "name", "rounds")} == {"resume": "trial", "name": None, "rounds": 1}
    words = ["submit", str(copy), "--sign-only", str(file), "--key", str(key)]
    for sites in (["--sites", "a"], ["--run-config", "client-names='a' clients=1"]):
        assert CliRunner().invoke(app, [*words, *sites]).exit_code == 2


def test_a_kit_hands_out_public_keys_alone(tmp_path: Path) -> None:
    alice = write_submitter_key(tmp_path / "alice", "alice")
    (tmp_path / "alice/submitter.pub").rename(tmp_path / "alice.pub")
    create(KitPlan("127.0.0.1", ["a", "b"], submitters=[str(tmp_path / "alice.pub"), "bob"]), tmp_path / "kit")
    assert [path.parent.name for path in (tmp_path / "kit").rglob("submitter.key")] == ["bob"]
    add_site(ServerFolder.read(tmp_path / "kit/server"), "c", None, tmp_path / "kit/sites/c")
    for site in ("a", "b", "c"):
        read = Policy.read(tmp_path / "kit/sites" / site / "policy.toml")
        assert (read.allow_code, read.trusted_submitters[0]) == ("signed", alice)
        assert [one.name for one in read.trusted_submitters] == ["alice", "bob"]


def test_a_site_trusts_another_submitter_by_a_command(site: SiteFolder, tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["kit", "submitter", "alice", "--output", str(tmp_path)])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "submitter.key").stat().st_mode & 0o777 == 0o600
    shown = made.output.splitlines()[-1]
    before = site.policy.read_text()
    for _ in range(2):
        done = CliRunner().invoke(app, ["kit", "trust", str(site.path), "alice", str(tmp_path / "submitter.pub")])
        assert done.exit_code == 0, done.output
        assert shown in " ".join(done.output.split())
    (site.path / "submitters/.bob.pub").write_bytes((tmp_path / "submitter.pub").read_bytes())  # hidden: put aside
    assert [str(one) for one in Policy.read(site.policy).trusted_submitters][:1] == [shown]
    assert site.policy.read_text() == before


def test_a_run_goes_on_when_its_former_server_app_has_let_go_of_its_folder(tmp_path: Path) -> None:
    """As one that looks for its SuperLink has not, when Flower has ended its run."""
    held, said, nothing_runs = take(tmp_path / LOCK), list[str](), mock.Mock(**{"runs.return_value": []})
    wait_for_the_end(nothing_runs, tmp_path, lambda line: (said.append(line), release(held, tmp_path / LOCK)))
    wait_for_the_end(nothing_runs, tmp_path, said.append)
    assert len(said) == 1, "it waits in the first case alone"
