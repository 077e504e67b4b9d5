"""The supervisor, with small programs in Flower's place; and once with Flower's."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_bn_site.commands import Command
from fl_bn_site.supervisor import AlreadyRunning, Delays, supervise

QUICK = Delays(first=0.2, longest=0.8, grace=1.0)


def command(name: str, code: str, folder: Path, **more: object) -> Command:
    return Command(name, (sys.executable, "-I", "-S", "-u", "-c", code), {"SUPERVISED": "yes"}, folder, **more)  # type: ignore[arg-type]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def until(true: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def supervised(commands: list[Command], folder: Path, end_when: Callable[[], object], patience: Delays = QUICK) -> list[str]:
    """Supervises until ``end_when``, then sends SIGTERM; what the supervisor itself said."""

    def end() -> None:
        try:
            until(end_when)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    supervise(commands, folder, patience)
    thread.join()
    return [line[24:] for line in lines(folder / "fl-bn.log")]


def running(pid: int) -> bool:
    """And no zombie: what has ended may stay in the table of processes until someone asks for its exit code."""
    try:
        return re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE) is None
    except FileNotFoundError:
        return False


def test_a_program_that_ends_is_started_again_after_longer_and_longer_waits(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = f"import time; print(time.monotonic(), file=open({str(starts)!r}, 'a')); raise SystemExit(3)"
    supervised([command("faulty", code, tmp_path)], tmp_path, lambda: len(lines(starts)) >= 5)
    times = [float(line) for line in lines(starts)]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert all(gap >= wait for gap, wait in zip(gaps, [0.2, 0.4, 0.8, 0.8], strict=False)), gaps


def test_a_program_starts_again_when_a_file_that_it_has_read_changes(tmp_path: Path) -> None:
    """A site's new key, though a SuperNode that tries to connect does not hear SIGTERM. While the file is away, nothing happens."""
    key, starts = tmp_path / "site.key", tmp_path / "starts"
    key.write_text("old")
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    code = f"{ignores}import time; print(open({str(key)!r}).read(), file=open({str(starts)!r}, 'a')); time.sleep(60)"
    steps: list[str] = []

    def done() -> bool:
        if not steps and lines(starts) == ["old"]:
            key.unlink()
            steps.append("away")
            time.sleep(0.5)
            assert lines(starts) == ["old"]
            key.write_text("new")
        return lines(starts) == ["old", "new"]

    supervised([command("supernode", code, tmp_path, reads=(key,))], tmp_path, done)


def test_programs_are_asked_to_end_and_killed_if_they_do_not(tmp_path: Path) -> None:
    ready, polite = tmp_path / "ready", tmp_path / "polite"
    on_term = "import os, signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: {then}); {ready}; time.sleep(60)"
    tells = f"print(os.getpid(), file=open({str(ready)!r}, 'a'))"
    bye = f"(print('bye', file=open({str(polite)!r}, 'a')), sys.exit(0))"
    commands = [
        command(name, on_term.format(then=then, ready=tells), tmp_path) for name, then in (("polite", bye), ("deaf", "time.sleep(60)"))
    ]
    start = time.monotonic()
    supervised(commands, tmp_path, lambda: len(lines(ready)) == 2)
    assert lines(polite) == ["bye"]
    assert time.monotonic() - start < 15
    until(lambda: not any(running(int(pid)) for pid in lines(ready)))  # a killed process takes a moment to end


def test_a_folder_is_started_once(tmp_path: Path) -> None:
    refused = []

    def try_again() -> bool:
        if lines(tmp_path / "fl-bn.log"):
            with pytest.raises(AlreadyRunning) as error:
                supervise([], tmp_path)  # the lock comes before the signals, which only a main thread may set
            refused.append(error)
        return bool(refused)

    supervised([command("one", "import time; time.sleep(60)", tmp_path)], tmp_path, try_again)
    assert refused


def test_programs_and_what_they_started_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); p = subprocess.Popen(['sleep', '60']);"
        f"print(os.getpid(), p.pid, file=open({str(pids)!r}, 'a')); time.sleep(60)"
    )
    script = (
        "import sys; from pathlib import Path; from fl_bn_site.commands import Command;"
        "from fl_bn_site.supervisor import supervise;"
        f"supervise([Command('deaf', (sys.executable, '-S', '-c', {code!r}), {{}}, Path({str(tmp_path)!r}))], Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL) as supervisor:
        until(lambda: lines(pids), 60)
        both = [int(pid) for pid in lines(pids)[0].split()]
        assert all(running(pid) for pid in both)
        supervisor.kill()
    until(lambda: not any(running(pid) for pid in both), 10)
