"""Keep the programs of ``fl-bn start`` running: one that ends is started again. Their output is this process's own."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fl_bn.support.durable import hold
from fl_bn_site.commands import Command, environment

LOCK = ".running"  # locked in a folder of the kit while its programs run
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent ends
FIRST, LONGEST = 1.0, 30.0  # seconds before a program is started again; each failure doubles them. Flower may refuse a site for a minute
STEADY = 60.0  # seconds after which a program counts as sound again
GRACE = 10.0  # seconds that the programs have to end
TICK = 0.1  # seconds between two looks at the programs


class AlreadyRunning(RuntimeError):
    """Signal that another ``fl-bn start`` of the same folder is running."""


class Program:
    """Keep one program running, from the first call of ``look`` on.

    Args:
        command: The command that starts the program.
    """

    def __init__(self, command: Command) -> None:
        self._command, self._failures, self._started, self._due = command, 0, 0.0, 0.0
        self.process: subprocess.Popen[bytes] | None = None

    def look(self, now: float) -> None:
        """Start the program if it is due, and notice its end. Call this at short intervals with the time of ``time.monotonic``."""
        if self.process is None:
            if now >= self._due:
                self._start(now)
        elif (code := self.process.poll()) is not None:
            self.kill()
            self._failures = 0 if now - self._started >= STEADY else self._failures + 1
            wait = min(LONGEST, FIRST * 2.0 ** max(0, self._failures - 1))
            self._due = now + wait
            if self._command.once and code == 0:
                self._due = float("inf")
            else:
                say(f"{self._command.name} ended with {'exit code' if code >= 0 else 'signal'} {abs(code)}; started again in {wait:g} s")

    def _start(self, now: float) -> None:
        command = self._command
        self.process = subprocess.Popen(
            command.argv,
            cwd=command.cwd,
            env=environment(command.env),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for this process
            preexec_fn=end_with_parent,
        )
        self._started = now
        say(f"{command.name} started, process {self.process.pid}")

    def kill(self) -> None:
        """Kill the program and all that it has started, which could keep its ports in use."""
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def end_with_parent() -> None:
    """Let the system kill this process when its parent has ended, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def say(text: str) -> None:
    """Print a line of this process's own between those of its programs."""
    with suppress(OSError):  # the terminal is gone
        print(f"fl-bn: {text}", flush=True)


def supervise(commands: Sequence[Command], folders: Sequence[Path]) -> None:
    """Keep programs running until this process gets SIGINT, SIGTERM or SIGHUP, then end them.

    Args:
        commands: The commands of the programs.
        folders: The server's folder, or a folder per program of a site. They are locked meanwhile.

    Raises:
        AlreadyRunning: Another ``fl-bn start`` of one of these folders is running.
    """
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP under nohup
            signal.signal(number, lambda number, frame: received.append(number))
    with _alone(folders):
        programs = [Program(command) for command in commands]
        try:
            while not received:
                for program in programs:
                    program.look(time.monotonic())
                time.sleep(TICK)
        finally:
            running = [program for program in programs if program.process is not None]
            for program in running:
                program.process.terminate()  # type: ignore[union-attr]
            end = time.monotonic() + GRACE
            for program in running:
                with suppress(subprocess.TimeoutExpired):
                    program.process.wait(max(0.0, end - time.monotonic()))  # type: ignore[union-attr]
                program.kill()


@contextmanager
def _alone(folders: Sequence[Path]) -> Iterator[None]:
    with ExitStack() as held:
        for folder in folders:
            try:
                hold(held.enter_context((folder / LOCK).open("a")))
            except BlockingIOError as error:
                raise AlreadyRunning(f"another `fl-bn start` has locked {folder}: end that first (Ctrl-C, or systemctl stop)") from error
        yield
