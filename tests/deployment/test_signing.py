"""Signatures of runs: what they cover, and whose count."""

from __future__ import annotations

import io
import json
import subprocess
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.common.config import parse_config_args
from flwr.common.serde import user_config_from_proto, user_config_to_proto

from fl_bn_site.policy import NotAllowed
from fl_bn_site.signing import AHEAD, DAY, LASTS, Accepted, check, fingerprint, read_submitter, sign
from fl_bn_site.submitters import public_line
from tests.deployment.inner import KEY, OF_SERVER, NotSigned, Package, Policy, Submitter, flower_config, hand_out, read_key
from tests.listed import listed

MINE, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
ALICE = Submitter("alice", MINE.public_key().public_bytes_raw())
CODE, NOW = "c0de" * 16, 1_800_000_000.0
CONFIG: dict[str, Any] = {"method": "hbn", "rounds": 3, "learning-rate": 0.1, "pictures": False, "dataset": "", "output": "/srv/results"}


def signed(private: Ed25519PrivateKey = MINE, code: str = CODE, config: Mapping[str, Any] = CONFIG, now: float = NOW) -> dict[str, Any]:
    return {**config, KEY: sign(private, code, config, now)}


def refused(code: str, config: Mapping[str, Any], now: float = NOW) -> str:
    with pytest.raises(NotSigned) as told:
        check(code, config, [ALICE], now)
    return str(told.value)


def test_a_signature_says_who_signed_which_run() -> None:
    config = signed()
    found = check(CODE, config, [Submitter("bob", OTHER.public_key().public_bytes_raw()), ALICE], NOW)
    assert (found.submitter, found.at) == (ALICE, NOW)
    assert found.nonce != check(CODE, signed(), [ALICE], NOW).nonce, "two runs alike are two runs"


@listed(
    "change",
    [
        *({"method": value} for value in ("fbn", "HBN", "hbn ")),
        *({"rounds": value} for value in (4, 3.0, "3", True)),
        *({"learning-rate": value} for value in (0.2, "0.1")),
        {"pictures": 0},
        {"dataset": "os:system"},
        {"seed": 0},
        *({name: None} for name in CONFIG if name not in OF_SERVER),
        *({name: "whatever it is when the run starts"} for name in OF_SERVER),
    ],
)
def test_whatever_is_changed_in_a_signed_run_config_is_noticed(change: dict[str, Any]) -> None:
    """Or left out of it. Negative control: what the server fills in is its own, and a signature that covered all would fail there."""
    config = {key: value for key, value in (signed() | change).items() if value is not None}
    if change.keys() <= set(OF_SERVER):
        assert check(CODE, config, [ALICE], NOW).submitter == ALICE
    else:
        assert "the signature of alice is for another package or run config" in refused(CODE, config)


def test_another_package_is_noticed_and_so_is_each_part_of_a_signature() -> None:
    config = signed()
    assert "another package" in refused("c0de" * 15 + "c0df", config)
    version, key, at, nonce, signature = config[KEY].split(".")
    other = f"{int(signature[0], 16) ^ 1:x}{signature[1:]}"
    for parts in (
        (version, key, str(int(at) + 1), nonce, signature),
        (version, key, at, "0" * 32, signature),
        (version, key, at, nonce, other),
    ):
        assert "another package" in refused(CODE, {**config, KEY: ".".join(parts)}), parts
    for text in ("", "1", 1, "1" + config[KEY][1:], config[KEY] + "\n", config[KEY].upper()):
        assert "another package" not in refused(CODE, {**CONFIG, KEY: text}), "what is no signature is none"


def test_a_key_that_is_not_trusted_is_named() -> None:
    stranger = fingerprint(OTHER.public_key().public_bytes_raw())
    assert refused(CODE, signed(OTHER)) == f"the run is signed by the key {stranger}, and this site trusts {ALICE}"
    lent = signed(OTHER)
    lent[KEY] = lent[KEY].replace(OTHER.public_key().public_bytes_raw().hex(), ALICE.key.hex())  # under alice's name
    assert "the signature of alice is for another package" in refused(CODE, lent)


def test_a_signature_lasts_some_weeks_and_clocks_need_agree_to_a_day() -> None:
    config = signed()
    for now in (NOW - AHEAD, NOW, NOW + LASTS):
        check(CODE, config, [ALICE], now)
    assert f"a signature lasts {LASTS // DAY} days: submit the run again" in refused(CODE, config, NOW + LASTS + 1)
    assert "ahead of this site's clock" in refused(CODE, config, NOW - AHEAD - 1)


def test_what_is_signed_is_what_arrives() -> None:
    """Through Flower's text, its protocol and the SuperLink's database, which stores a run config as JSON."""
    config = {**CONFIG, "learning-rate": 1e-5, "seed": -7, "name": "it's", "task": 'a "b"', "dp-delta": 1.0, "x": 0.1 + 0.2}
    package = Package(b"zip", MINE)
    sent = parse_config_args([flower_config(package.signed(config))])
    arrived = json.loads(json.dumps(user_config_from_proto(user_config_to_proto(sent))))
    assert check(package.code, arrived, [ALICE]).submitter == ALICE


def test_keys_are_openssh_s(tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True, timeout=60)
    shown = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, text=True, check=True, timeout=60).stdout
    public = read_submitter("bob", (tmp_path / "key.pub").read_text())
    assert fingerprint(public.key) == shown.split()[1]
    assert read_key(tmp_path / "key").public_key().public_bytes_raw() == public.key
    assert read_submitter("bob", public_line(public)) == public


@listed("line", ["", "ssh-ed25519", "ssh-ed25519 AAAA", "ssh-ed25519 ????", "ssh-rsa AAAAC3NzaC1lZDI1NTE5", public_line(ALICE)[:-20]])
def test_another_key_is_no_submitter_s(line: str) -> None:
    with pytest.raises(ValueError, match="bob"):
        read_submitter("bob", line)


# No signature serves twice


def test_a_signature_serves_for_one_run_also_after_a_restart(tmp_path: Path) -> None:
    one, two = (check(CODE, signed(), [ALICE], NOW) for _ in range(2))
    accepted = Accepted(tmp_path / "accepted")
    for _ in range(2):
        accepted.admit(7, one, CODE)  # each message of the run
    accepted.admit(8, two, CODE)
    for again in (accepted, Accepted(tmp_path / "accepted")):
        with pytest.raises(NotSigned):
            again.admit(9, one, CODE)
    (file,) = (path for path in (tmp_path / "accepted").iterdir() if one.nonce in path.name)
    assert json.loads(file.read_text()) == {"run": 7, "submitter": "alice", "key": fingerprint(ALICE.key), "code": CODE, "at": int(NOW)}
    file.write_text("{")
    with pytest.raises(NotSigned):
        accepted.admit(7, one, CODE)


def test_of_two_runs_that_come_at_once_one_is_let_in(tmp_path: Path) -> None:
    one, outcomes, gate = check(CODE, signed(), [ALICE], NOW), [], threading.Barrier(8)

    def comes(run: int) -> None:
        gate.wait()
        try:
            Accepted(tmp_path / f"{run % 2}" / ".." / "accepted").admit(run, one, CODE)
            outcomes.append(run)
        except NotSigned:
            pass

    for place in "01":
        (tmp_path / place).mkdir()
    threads = [threading.Thread(target=comes, args=(run,)) for run in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 1


# The policy's decision


def package_of(files: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


PYPROJECT = (
    '[project]\nname = "app"\nversion = "1"\n[tool.flwr.app]\npublisher = "p"\n'
    '[tool.flwr.app.components]\nserverapp = "a:b"\nclientapp = "a:b"\n[tool.flwr.app.config]\nrounds = 1\nrun-signature = ""\n'
)
FILES = {"pyproject.toml": PYPROJECT, "fl_bn/__init__.py": "VERSION = 1\n"}


def policy(folder: Path, text: str) -> Policy:
    hand_out([ALICE], folder)
    (folder / "policy.toml").write_text(text)
    return Policy.read(folder / "policy.toml")


def test_the_policy_asks_who_signed_the_whole_run_config(tmp_path: Path) -> None:
    fab, defaults = package_of(FILES), {"rounds": 1, KEY: ""}
    mine = policy(tmp_path, 'allow-code = "signed"')
    signed = defaults | Package(fab, MINE).signed({"rounds": 2})
    found = mine.check_package(fab, signed)
    assert found is not None
    assert found.submitter == ALICE
    for package, config in ((fab, defaults), (fab, signed | {"rounds": 3}), (fab + b"0", signed), (fab, signed | {"added": 1})):
        with pytest.raises(NotAllowed, match="allow-code = signed, but the"):
            mine.check_package(package, config)
    assert policy(tmp_path, 'allow-code = "any"').check_package(fab, defaults) is None


def test_a_run_that_lasts_longer_than_its_signature_ends_here(tmp_path: Path) -> None:
    fab, mine = package_of(FILES), policy(tmp_path, 'allow-code = "signed"')
    config = {"rounds": 2, KEY: sign(MINE, Package(fab).code, {"rounds": 2}, NOW)}
    mine.check_package(fab, config, now=NOW + LASTS)
    with pytest.raises(NotAllowed, match="a signature lasts 30 days"):
        mine.check_package(fab, config, now=NOW + LASTS + 1)


def test_only_installed_code_is_a_whole_package_of_the_same_files(tmp_path: Path) -> None:
    installed, fab = policy(tmp_path, 'allow-code = "installed"'), package_of(FILES)
    (tmp_path / "fl_bn").mkdir()
    (tmp_path / "fl_bn/__init__.py").write_text(FILES["fl_bn/__init__.py"])
    installed.check_package(fab, {}, tmp_path / "fl_bn")
    for broken in (b"", b"no zip file", fab.replace(b"VERSION = 1", b"VERSION = 2"), fab[:-30]):
        with pytest.raises(NotAllowed, match="cannot be read"):
            installed.check_package(broken, {}, tmp_path / "fl_bn")
