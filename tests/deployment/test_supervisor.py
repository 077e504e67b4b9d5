"""The supervisor, with small programs in Flower's place; and the SuperNode's shorter pauses."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_bn_site import supernode
from fl_bn_site.commands import Command
from fl_bn_site.supervisor import AlreadyRunning, Program, supervise


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def until(true: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def running(pid: int) -> bool:
    """And no zombie: what has ended may stay in the table of processes until someone asks for its exit code."""
    try:
        return re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is None
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("code", "once", "starts"), [(3, False, [0, 1, 3, 7, 15, 31, 61, 91]), (0, True, [0])])
def test_what_ends_is_started_again_after_longer_and_longer_waits(code: int, once: bool, starts: list[int], tmp_path: Path) -> None:
    """Flower refuses a site whose SuperNode died for a minute: after that it is tried at least every 30 s."""
    program = Program(Command("faulty", (sys.executable, "-ISc", f"raise SystemExit({code})"), {}, tmp_path, once))
    found = []
    for second in range(100):
        program.look(second)
        if program.process is not None:
            found.append(second)
            program.process.wait()
            program.look(second)
    assert found == starts


def test_programs_and_what_they_started_die_with_a_supervisor_that_is_ended_or_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); p = subprocess.Popen(['sleep', '60']);"
        f"print(os.getpid(), p.pid, file=open({str(pids)!r}, 'a')); time.sleep(60)"
    )
    script = (
        "import sys; from pathlib import Path; from fl_bn_site.commands import Command; from fl_bn_site import supervisor;"
        f"supervisor.GRACE = 0.5; folder = Path({str(tmp_path)!r});"
        f"supervisor.supervise([Command('deaf', (sys.executable, '-S', '-c', {code!r}), {{}}, folder)], folder)"
    )
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        pids.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as supervisor:
            until(lambda: lines(pids), 60)
            program, child = (int(pid) for pid in lines(pids)[0].split())
            assert running(program)
            with pytest.raises(AlreadyRunning):
                supervise([], tmp_path)
            end(supervisor)
        until(lambda program=program: not running(program), 10)  # type: ignore[misc]
        if running(child):  # the supervisor was killed: the service manager ends what is left
            os.kill(child, 9)
            assert end is subprocess.Popen.kill


def test_the_supernode_s_pauses_are_short_while_messages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()
    monkeypatch.setattr(time, "sleep", slept.append)
    pauses = supernode.Pauses(0.5)
    for seconds in (3.0, 0.5, 3.0):
        pauses.sleep(seconds)
    assert slept == [3.0, 0.1, 0.5]


def test_a_supernode_whose_message_is_lost_or_whose_run_is_over_ends() -> None:
    """With Flower's own words, in 1.25."""
    ended = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    said = (
        "Failed to receive message %s: %s",
        "Run ID %s is not in `RUNNING` status. Ignoring message %s.",
        "Run ID %s is not in `RUNNING` status. Ignoring reply message %s.",
    )
    for message in said:
        assert supernode.end_when_lost(logging.LogRecord("flwr", 20, "", 0, message, ("a", "b"), None), ended.append)
    signal.signal(signal.SIGTERM, before)
    assert ended == [1, signal.SIGTERM]
