"""The SuperNode's own audit log: each error that it makes itself is a line before it leaves. Flower's own step, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from typer.testing import CliRunner

from fl_bn_site import supernode
from fl_bn_site.node_audit import write_errors
from tests.deployment.inner import KitPlan, Package, SiteFolder, app, append, check, create, files_in, find, lines_in, verify
from tests.deployment.test_signing import FILES, Node, package_of, run_of

DIED = "its process was killed by SIGKILL: out of memory"
BROKEN = b"bytes that are no archive"


def a_site(folder: Path, lines: str, package: bytes, **config: Any) -> Node:
    """A SuperNode with a policy that is given in ``lines``, and a run that brings ``package``."""
    (folder / "policy.toml").write_text(lines)
    return Node(folder, run_of(package, config), package)


def died(node: Node) -> None:
    """Let the process that works on a message of the run die."""
    node.step()  # the SuperNode knows the run now
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    message.metadata.__dict__.update(_run_id=5, _message_id=message.object_id, _src_node_id=1)
    node.state.store_message(message)
    supernode.fail(node.state, 5, DIED)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of all errors that Flower's classes insert in this test."""
    names = find("start_client_internal").__globals__
    monkeypatch.setitem(names, "_insert_message", names["_insert_message"])
    asked: dict[str, Any] = {}
    write_errors(names, tmp_path / "node/audit", lambda state, run: state.get_run(run) or asked.get("run"))
    return tmp_path / "node/audit"


def entries(log: Path) -> list[dict[str, Any]]:
    assert check(log).faults == ()
    return [line.values for line in lines_in(log) if line.values]


def test_a_refusal_is_a_line(tmp_path: Path, log: Path) -> None:
    node = a_site(tmp_path, 'allow-code = "installed"\n', package_of(FILES), name="mine")
    node.step()
    (answer,) = node.answers()
    (line,) = entries(log)
    assert (line["run"], line["message"], line["decision"], line["by"]) == ("5", "query", "refused", "supernode")
    assert line["id"] == answer.metadata.reply_to_message_id
    assert (line["sections"], line["tensors"], line["bytes"], line["submitter"]) == ({}, 0, 0, None)
    assert line["reason"] == answer.error.reason
    assert "allow-code = installed" in line["reason"]
    assert 0 < line["message-bytes"] < 2000, "nothing but the text of an error"


def test_a_process_that_died_is_a_line_with_the_run_s_code(tmp_path: Path, log: Path) -> None:
    fab = package_of(FILES)
    node = a_site(tmp_path, 'allow-code = "any"\n', fab, rounds=2)
    died(node)
    (line,) = entries(log)
    assert (line["name"], line["code"]) == (None, Package(fab).code)
    assert (line["decision"], line["reason"], line["message"]) == ("failed", DIED, "train")


def test_an_app_that_cannot_be_opened_is_answered_and_is_a_line(tmp_path: Path, log: Path) -> None:
    node = a_site(tmp_path, 'allow-code = "any"\n', BROKEN)
    supernode.answer_for_the_unreadable(node.names)
    assert node.step() == 5
    (answer,) = node.answers()
    assert answer.error.code == ErrorCode.LOAD_CLIENT_APP_EXCEPTION, "a server does not ask again"
    assert node.confirmed == [answer.metadata.reply_to_message_id]
    (line,) = entries(log)
    assert (line["decision"], line["reason"], line["bytes"]) == ("failed", answer.error.reason, 0)
    assert node.state.get_run(5) is None, "nothing of it is kept"


def test_where_no_line_can_be_written_an_error_that_says_so_leaves(tmp_path: Path, log: Path) -> None:
    (tmp_path / "node").write_text("a file in the place of the folder")
    node = a_site(tmp_path, 'allow-code = "any"\n', package_of(FILES))
    died(node)
    (answer,) = node.answers()
    assert answer.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "a server does not ask again"
    assert ("AuditError" in str(answer.error.reason), DIED in str(answer.error.reason)) == (True, False)


# Both logs of a site


@pytest.fixture
def site(tmp_path: Path) -> SiteFolder:
    create(KitPlan("127.0.0.1", ["a"]), tmp_path / "kit")
    return SiteFolder.read(tmp_path / "kit/sites/a")


def line(name: str, decision: str, reason: str = "") -> dict[str, Any]:
    return {
        "run": "7", "name": name, "submitter": None, "code": "c", "message": "train", "id": "m", "round": 1, "method": "fbn",
        "sections": {} if reason else {"weights": {"tensors": 4, "bytes": 1000}}, "tensors": 0, "bytes": 0, "smallest-samples": None,
        "message-bytes": 100, "decision": decision, "reason": reason,
    }  # fmt: skip


def shown(*words: str, code: int = 0) -> str:
    found = CliRunner().invoke(app, ["audit", *words], env={"COLUMNS": "220"})
    assert found.exit_code == code, found.output
    return found.output


def test_an_officer_reads_both_logs_in_the_order_of_time(site: SiteFolder) -> None:
    append(site.node_audit_log, line("first", "refused", "by the policy"))
    assert "by the policy" in shown(str(site.path)), "a site that only refused has a log"
    append(site.audit_log, line("second", "sent"))
    append(site.node_audit_log, line("third", "failed", DIED))
    said = shown(str(site.path))
    assert said.index("by the policy") < said.index(DIED)
    assert all(check(log).head in said for log in (site.audit_log, site.node_audit_log))
    assert [name in shown(str(site.path), "--lines", "--run", "third") for name in ("first", "second", "third")] == [False, False, True]
    assert "second" not in shown(str(site.node_audit_log))


def test_a_change_of_either_log_is_named(site: SiteFolder) -> None:
    for log in (site.audit_log, site.node_audit_log):
        for _ in range(3):
            append(log, line("x", "failed", DIED))
    noted = check(site.node_audit_log).head
    checks = [one for one in verify(site.path, noted) if "audit" in one.subject]
    assert [one.ok for one in checks] == [True, True, True]
    (file,) = files_in(site.node_audit_log)
    file.write_bytes(file.read_bytes().replace(b"SIGKILL", b"SIGTERM", 1))
    assert [one.ok for one in verify(site.path) if "audit" in one.subject] == [True, False]
    assert "line 1 was changed" in shown(str(site.path), code=1)
