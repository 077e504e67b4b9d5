"""The supervisor, with small programs in Flower's place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fl_bn_site.commands import Command, prepare
from fl_bn_site.supervisor import AlreadyRunning, Program, _alone, supervise
from tests.deployment.federation import wait_until
from tests.deployment.inner import SiteFolder


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


def test_a_site_is_started_once_whether_whole_or_program_by_program(site: SiteFolder) -> None:
    for first, second in (("supernode", ""), ("", "clientapp")):
        with _alone(prepare(site, first)), pytest.raises(AlreadyRunning):
            supervise([], prepare(site, second))
    with _alone(prepare(site, "supernode")), _alone(prepare(site, "clientapp")):
        pass


def test_programs_and_what_they_started_die_with_a_supervisor_that_is_ended_or_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); p = subprocess.Popen(['sleep', '60']);"
        f"print(os.getpid(), p.pid, file=open({str(pids)!r}, 'a')); time.sleep(60)"
    )
    script = (
        "import sys; from pathlib import Path; from fl_bn_site.commands import Command; from fl_bn_site import supervisor;"
        f"supervisor.GRACE = 0.5; folder = Path({str(tmp_path)!r});"
        f"supervisor.supervise([Command('deaf', (sys.executable, '-S', '-c', {code!r}), {{}}, folder)], [folder])"
    )
    for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
        pids.unlink(missing_ok=True)
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as supervisor:
            wait_until("the program runs", lambda: pids.exists() and pids.read_text().endswith("\n"))
            program, child = map(int, pids.read_text().split())
            assert running(program)
            with pytest.raises(AlreadyRunning):
                supervise([], [tmp_path])
            end(supervisor)
        wait_until("the program has ended", lambda program=program: not running(program), 10)  # type: ignore[misc]
        if running(child):  # the supervisor was killed: the service manager ends what is left
            os.kill(child, 9)
            assert end is subprocess.Popen.kill
