"""Signatures of runs: what they cover, and whose count."""

from __future__ import annotations

import io
import json
import subprocess
import threading
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.common.config import parse_config_args
from flwr.common.serde import user_config_from_proto, user_config_to_proto

from fl_bn_site.signing import AHEAD, LASTS, admit, check, fingerprint, read_submitter, sign
from fl_bn_site.submitters import public_line
from tests.deployment.inner import KEY, OF_SERVER, NotSigned, Package, Submitter, flower_config, read_key
from tests.listed import listed
from tests.refusals import naming

MINE, OTHER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
ALICE = Submitter("alice", MINE.public_key().public_bytes_raw())
CODE, NOW = "c0de" * 16, 1_800_000_000.0
CONFIG: dict[str, Any] = {"method": "hbn", "rounds": 3, "learning-rate": 0.1, "pictures": False, "dataset": "", "output": "/srv/results"}


def signed(private: Ed25519PrivateKey = MINE, code: str = CODE, config: Mapping[str, Any] = CONFIG, now: float = NOW) -> dict[str, Any]:
    return {**config, KEY: sign(private, code, config, now)}


BOB = Submitter("bob", OTHER.public_key().public_bytes_raw())
CHANGES: dict[str, dict[str, Any]] = {  # what a server may do to a signed run: code, config, the part of the signature, or the time
    "another package": {"code": "c0de" * 15 + "c0df"},
    **{f"{name} = {value!r}": {"config": {name: value}} for name, value in (
        ("method", "fbn"), ("method", "HBN"), ("method", "hbn "), ("rounds", 4), ("rounds", 3.0), ("rounds", "3"), ("rounds", True),
        ("learning-rate", 0.2), ("dataset", "os:system"), ("seed", 0),
        *((name, None) for name in CONFIG if name not in OF_SERVER),
    )},
    **{f"part {place} = {value}": {"part": (place, value)} for place, value in (
        (0, "1"), (1, BOB.key.hex()), (2, "1800000001"), (3, "0" * 32), (4, "0" * 128), (4, ""),
    )},
    "too old": {"now": NOW + LASTS + 1},
    "of tomorrow": {"now": NOW - AHEAD - 1},
    "under another name": {"private": OTHER, "part": (1, ALICE.key.hex())},
    "signed by a stranger": {"private": OTHER},
    **{f"the signature {text!r}": {"config": {KEY: text}} for text in ("", "1", 1, None)},
}  # fmt: skip


@listed("change", CHANGES.values(), ids=CHANGES)
def test_whatever_is_changed_in_a_signed_run_is_noticed(change: dict[str, Any]) -> None:
    config = signed(change.get("private", MINE))
    if "part" in change:
        place, value = change["part"]
        parts = config[KEY].split(".")
        config[KEY] = ".".join([*parts[:place], value, *parts[place + 1 :]])
    config = {key: value for key, value in (config | change.get("config", {})).items() if value is not None}
    with pytest.raises(NotSigned):
        check(change.get("code", CODE), config, [ALICE], change.get("now", NOW))


def test_what_the_server_fills_in_and_clocks_that_agree_to_a_day_are_no_change() -> None:
    config = signed() | dict.fromkeys(OF_SERVER, "whatever it is when the run starts")
    for now in (NOW - AHEAD, NOW, NOW + LASTS):
        found = check(CODE, config, [BOB, ALICE], now)
        assert (found.submitter, found.at) == (ALICE, NOW)
    assert found.nonce != check(CODE, signed(), [ALICE], NOW).nonce, "two runs alike are two runs"
    for form in (f"{signed()[KEY]}\n", signed()[KEY].upper()):
        with pytest.raises(NotSigned):
            check(CODE, {**CONFIG, KEY: form}, [ALICE], NOW)


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
    for line in ("", "ssh-ed25519", "ssh-ed25519 ????", "ssh-rsa AAAAC3NzaC1lZDI1NTE5", public_line(ALICE)[:-20]):
        with naming("bob"):
            read_submitter("bob", line)


def test_a_signature_serves_for_one_run(tmp_path: Path) -> None:
    one, two = (check(CODE, signed(), [ALICE], NOW) for _ in range(2))
    accepted = tmp_path / "accepted"
    for _ in range(2):
        admit(accepted, 7, one, CODE)  # each message of the run
    admit(accepted, 8, two, CODE)
    with pytest.raises(NotSigned):
        admit(accepted, 9, one, CODE)
    (file,) = (path for path in (tmp_path / "accepted").iterdir() if one.nonce in path.name)
    assert json.loads(file.read_text()) == {"run": 7, "submitter": "alice", "key": fingerprint(ALICE.key), "code": CODE, "at": int(NOW)}
    file.write_text("{")
    with pytest.raises(NotSigned):
        admit(accepted, 7, one, CODE)


def test_of_runs_that_come_at_once_one_is_let_in(tmp_path: Path) -> None:
    one, gate = check(CODE, signed(), [ALICE], NOW), threading.Barrier(8)

    def comes(run: int) -> bool:
        gate.wait()
        with suppress(NotSigned):
            admit(tmp_path / "accepted", run, one, CODE)
            return True
        return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(comes, range(8))) == 1


def package_of(files: Mapping[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()
