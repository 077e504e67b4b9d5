"""``fl-bn submit`` and the queue: whoever submits is told what the run waits for, and may leave."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from fl_bn import durable
from fl_bn.site import submit as submit_module
from fl_bn.site.folders import ServerFolder
from fl_bn.site.queue import WAITING, NameTaken, NoQueue, Queue
from fl_bn.site.registered import Submitted
from fl_bn.site.runs import abort, listed
from fl_bn.site.submit import submit
from tests.deployment.superlink import THEN, named


def test_submit_waits_its_turn_and_says_for_whom(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]
    monkeypatch.setattr("fl_bn.site.submit.time.sleep", lambda seconds: superlink.end(1))
    said: list[str] = []
    assert submit(server, "name='mine' rounds=1", say=said.append)
    assert said == [
        "mine waits: other is going on, and 1 may at a time",
        "run 2 is submitted to h:1 as mine, for sites a, b",
        "a line",
        f"run 2: {submit_module.COMPLETED}",
    ]
    with pytest.raises(NameTaken):
        submit(server, "name='mine' rounds=1", say=said.append)


def test_a_submit_that_is_interrupted_leaves_its_run_in_the_queue(
    server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    superlink.known = [Submitted(1, "running", {"name": "other"}, THEN, None)]

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fl_bn.site.submit.time.sleep", interrupted)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        submit(server, "name='mine' rounds=1", say=said.append)
    assert said[-1] == f"  fl-bn abort {server.path} mine"
    assert [(run.name, run.state) for run in listed(server)] == [("mine", WAITING), ("other", "running")]
    assert abort(server, "mine") == "mine is no more in the queue; it had not begun"
    assert [run.name for run in listed(server)] == ["other"]


def test_a_folder_that_may_not_be_written_to_has_no_queue(server: ServerFolder, superlink: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path, data: bytes, mode: int = 0o600) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(durable, "write", read_only)
    said: list[str] = []
    assert submit(server, "name='mine' rounds=1", say=said.append)
    assert "the run does not wait for others, but starts at once" in said[0]
    with pytest.raises(NoQueue):
        Queue(server).add(named("x"))
