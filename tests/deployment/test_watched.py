"""A program that says it will hang is ended, and every other one is left alone: its output, its exit code, its signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from fl_bn_site.commands import WATCHED

SAY = "import sys, time; print({line!r}, flush=True); time.sleep({sleep}); sys.exit({code})"


def watched(line: str, sleep: float, code: int = 0) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", str(WATCHED), sys.executable, "-c", SAY.format(line=line, sleep=sleep, code=code)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def test_one_that_would_hang_is_ended_with_code_1() -> None:
    begin = time.monotonic()
    process = watched("ERROR :     Failed to receive message 0ceb1601: <_InactiveRpcError", 60)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert time.monotonic() - begin < 20
    assert out.splitlines()[0].startswith("ERROR :     Failed to receive")
    assert "it is ended here" in out


@pytest.mark.parametrize("code", [0, 3])
def test_any_other_ends_by_itself_with_its_own_code(code: int) -> None:
    process = watched("INFO :      Received successfully", 0.2, code)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "INFO :      Received successfully\n")


def test_its_death_is_noticed_though_what_it_started_lives_on() -> None:
    child = (
        "import subprocess, os, signal; subprocess.Popen(['sleep', '20']); print('up', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    begin = time.monotonic()
    process = subprocess.Popen([sys.executable, "-I", "-S", str(WATCHED), sys.executable, "-c", child], stdout=subprocess.DEVNULL)
    assert process.wait(15) == 128 + signal.SIGKILL
    assert time.monotonic() - begin < 15


def test_sigterm_reaches_it_and_a_kill_shows_in_the_code() -> None:
    process = watched("up", 60)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
