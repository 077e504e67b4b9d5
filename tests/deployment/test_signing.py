"""Signatures of runs: what they cover, whose count, and that a SuperNode takes in nothing of a run that it refuses."""

from __future__ import annotations

import io
import json
import subprocess
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.serde import user_config_from_proto, user_config_to_proto
from flwr.common.typing import Fab, Run
from flwr.supercore.object_store import ObjectStoreFactory

from fl_bn_site import supernode
from fl_bn_site.admission import Admission, refuse_runs
from fl_bn_site.signing import AHEAD, DAY, LASTS, Accepted, check, fingerprint, read_submitter, sign
from fl_bn_site.submitters import public_line
from tests.deployment.inner import KEY, OF_SERVER, NotSigned, Package, Policy, Submitter, find, flower_config, hand_out, read_key
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
    for text in ("", "1", 1, "2" + config[KEY][1:], config[KEY] + "\n", config[KEY].upper()):
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
    sent = find("parse_config_args")([flower_config(package.signed(config))])
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


def test_the_decision_is_a_value_that_says_who_and_what(tmp_path: Path) -> None:
    fab, trusting = package_of(FILES), 'allow-code = "signed"\ntrusted-submitters = ["alice"]'
    package, config = Package(fab, MINE), {"rounds": 2}
    for lines, of, submitter in ((trusting, package.signed(config), "alice"), (trusting, config, ""), ('allow-code = "any"', config, "")):
        decision = policy(tmp_path, lines).decide(package.code, fab, of, tmp_path)
        assert (decision.submitter, decision.code) == (submitter, package.code)
        assert bool(decision.refusal) == (lines == trusting and not submitter)
        assert "another hash than the server says" in policy(tmp_path, lines).decide("0" * 64, fab, of, tmp_path).refusal
    installed = policy(tmp_path, 'allow-code = "installed"')
    for broken in (b"", b"no zip file", fab.replace(b"VERSION = 1", b"VERSION = 2"), fab[:-30]):
        assert "cannot be read" in installed.decide(Package(broken).code, broken, {}, tmp_path / "fl_bn").refusal


# The SuperNode


class Node:
    """Flower's own step of a SuperNode, with a server that answers as it likes."""

    def __init__(self, folder: Path, run: Run, fab: bytes) -> None:
        self.runs, self.fabs, self.asked, self.kept, self.confirmed = [run], [fab], 0, {}, []
        self.state = find("InMemoryNodeState")(ObjectStoreFactory().store())
        self.state.set_node_id(1)
        self.admission = Admission(folder / "policy.toml", folder / "accepted")
        module = find("start_client_internal").__globals__
        self.names = {"_pull_and_store_message": module["_pull_and_store_message"]}
        refuse_runs(self.names, self.admission, lambda *of: supernode.fail(*of, refused=True))
        self.run_id = run.run_id

    def step(self, trusted_entities: dict[str, str] | None = None) -> int | None:
        message = Message(RecordDict(), dst_node_id=1, message_type="query")
        message.metadata.__dict__.update(_run_id=self.run_id, _message_id=message.object_id)
        tree = find("start_client_internal").__globals__["get_object_tree"](message)
        return self.names["_pull_and_store_message"](
            state=self.state,
            ffs=SimpleNamespace(put=lambda fab, meta: self.kept.update({Package(fab).code: (fab, meta)}), get=self.kept.get),
            object_store=self.state.object_store,
            node_config={},
            receive=lambda: (message, tree),
            get_run=self.get_run,
            get_fab=self.get_fab,
            pull_object=lambda run, identity: b"",
            confirm_message_received=lambda run, identity: self.confirmed.append(identity),
            trusted_entities=trusted_entities,
        )

    def get_run(self, run: int) -> Run:
        self.asked += 1
        return self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]

    def get_fab(self, code: str, run: int) -> Fab:
        fab = self.fabs.pop(0) if len(self.fabs) > 1 else self.fabs[0]
        return Fab(code, fab, {})

    def answers(self) -> list[Message]:
        return list(self.state.get_messages(is_reply=True))


def run_of(fab: bytes, config: Mapping[str, Any], run_id: int = 5) -> Run:
    return replace(Run.create_empty(run_id), fab_id="p/app", fab_version="1", fab_hash=Package(fab).code, override_config=dict(config))


@pytest.fixture
def strict(tmp_path: Path) -> Path:
    policy(tmp_path, 'allow-code = "signed"\ntrusted-submitters = ["alice"]')
    return tmp_path


def test_a_supernode_takes_in_what_is_signed(strict: Path) -> None:
    """Control of those below."""
    fab = package_of(FILES)
    node = Node(strict, run_of(fab, Package(fab, MINE).signed({"rounds": 2})), fab)
    assert [node.step(), node.step()] == [5, 5]
    assert (node.answers(), list(node.kept), node.asked) == ([], [Package(fab).code], 1)
    assert node.state.get_context(5).run_config["rounds"] == 2
    assert [path.suffix for path in (strict / "accepted").iterdir()] == [".json"]


def test_of_a_run_that_it_refuses_nothing_is_kept_and_the_server_is_told(strict: Path) -> None:
    fab = package_of(FILES)
    node = Node(strict, run_of(fab, {"rounds": 2}), fab)
    assert node.step() == 5
    (answer,) = node.answers()
    assert answer.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert "NotAllowed'>:<'this site's policy has allow-code = signed, but the run is not signed'>" in str(answer.error.reason)
    assert (node.kept, node.state.get_run(5), node.state.get_context(5)) == ({}, None, None)
    assert not (strict / "accepted").exists()
    asked = answer.metadata.reply_to_message_id
    assert node.confirmed == [asked]
    assert node.state.get_message_processing_duration(asked) >= 0  # else Flower 1.25 drops the answer


def test_what_was_checked_is_what_is_taken_in(strict: Path) -> None:
    """A server that answers a second question otherwise is not asked a second time."""
    fab, other = package_of(FILES), package_of(FILES | {"fl_bn/__init__.py": "import evil"})
    config = Package(fab, MINE).signed({"rounds": 2})
    node = Node(strict, run_of(fab, config), fab)
    node.runs.append(run_of(other, config | {"rounds": 99}))
    node.fabs.append(other)
    node.step()
    assert (list(node.kept), node.state.get_run(5).override_config["rounds"]) == ([Package(fab).code], 2)


def test_what_is_asked_for_again_is_checked_again(strict: Path) -> None:
    """Flower keeps nothing of a run that it cannot open: here the server has added a key that the package does not know."""
    fab, other = package_of(FILES), package_of(FILES | {"fl_bn/__init__.py": "import evil"})
    config = Package(fab, MINE).signed({"rounds": 2})
    node = Node(strict, run_of(fab, config | {"output": "/srv"}), fab)
    supernode.answer_for_the_unreadable(node.names)
    node.step()
    node.runs, node.fabs = [run_of(other, config)], [other]
    node.state.delete_messages()
    node.step()
    assert node.kept == {}
    assert ["one of the two was changed after the signing" in str(answer.error.reason) for answer in node.answers()] == [True]


def test_a_submitter_who_is_trusted_no_more_is_refused_in_the_middle_of_a_run(strict: Path) -> None:
    fab = package_of(FILES)
    node = Node(strict, run_of(fab, Package(fab, MINE).signed({"rounds": 2})), fab)
    node.step()
    assert node.answers() == []
    (strict / "policy.toml").write_text('allow-code = "signed"\ntrusted-submitters = []\n')
    node.state.delete_messages()
    node.step()
    assert "needs trusted-submitters" in str(node.answers()[0].error.reason)


def test_a_run_that_lasts_longer_than_its_signature_ends_here(strict: Path) -> None:
    fab = package_of(FILES)
    admission = Admission(strict / "policy.toml", strict / "accepted")
    run = run_of(fab, {"rounds": 2, KEY: sign(MINE, Package(fab).code, {"rounds": 2}, NOW)})
    assert not admission.decide(5, run, lambda: fab, NOW + LASTS).refusal
    assert "a signature lasts 30 days" in admission.decide(5, run, lambda: fab, NOW + LASTS + 1).refusal


def test_where_it_cannot_be_written_down_no_run_is_let_in(strict: Path) -> None:
    fab = package_of(FILES)
    (strict / "accepted").write_text("a file in the place of the folder")
    node = Node(strict, run_of(fab, Package(fab, MINE).signed({"rounds": 2})), fab)
    node.step()
    assert "cannot write down that it accepted the run" in str(node.answers()[0].error.reason)
    assert node.kept == {}
