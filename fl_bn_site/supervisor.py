"""Keep programs running.

A program that ends is started again, and its output is written to a log. However the supervisor ends, its
programs end with it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from io import TextIOWrapper
from logging import Formatter, Logger, LogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from fl_bn.support.locks import hold
from fl_bn_site.commands import UNREACHABLE, Command, environment

TETHER = Path(__file__).with_name("tether.py")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
DAY = 86400.0  # seconds after which a log file is put aside, however small it is
TICK = 0.1  # seconds between looks at the programs


class AlreadyRunning(RuntimeError):
    """Another ``fl-bn start`` of the same folder is running."""


@dataclass(frozen=True)
class Delays:
    """Say how long to wait, in seconds.

    Attributes:
        first: Before a program is started again. The wait doubles each time.
        longest: The longest such wait.
        steady: After a program ran for so long, the wait is ``first`` again.
        grace: Between asking a program to end and killing it.
    """

    first: float = 1.0
    longest: float = 30.0
    steady: float = 60.0
    grace: float = 10.0

    def delay(self, failures: int) -> float:
        """Return the wait before the next start, after ``failures`` >= 1 in a row."""
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 30))


class DailyLog(RotatingFileHandler):
    """Begin a new log file when the current one is large, or a day old."""

    begun: float | None = None  # when the file's first line was written, in seconds of the clock

    def shouldRollover(self, record: LogRecord) -> bool:  # noqa: N802, as logging names it
        """Return whether the current file is too large or too old for ``record``."""
        if self.begun is None:
            self.begun = self._first(record.created)
        return bool(super().shouldRollover(record)) or record.created - self.begun >= DAY

    def doRollover(self) -> None:  # noqa: N802
        """Begin a new file."""
        super().doRollover()
        self.begun = None

    def _first(self, now: float) -> float:
        with open(self.baseFilename, encoding="utf-8", errors="replace") as file:
            stamp = file.readline(len("2026-11-22 23:59:59"))
        try:
            return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").timestamp()
        except ValueError:  # it is empty
            return now


class Output:
    """Print and log the lines of all programs.

    A line goes to the terminal after its program's name, and to ``logs/NAME.log`` with the time. Each program
    has the logs of the last 14 days, and 14 x 5 MB at most.

    Args:
        logs: The folder of the logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs, self._files, self._lock, self._terminal = logs, dict[str, Logger](), threading.Lock(), True

    def write(self, name: str, line: str) -> None:
        """Write a ``line`` of the program ``name``."""
        line = COLOURS.sub("", line).rstrip()
        with self._lock:
            if name not in self._files:
                handler = DailyLog(self._logs / f"{name}.log", maxBytes=5_000_000, backupCount=13, encoding="utf-8")
                handler.setFormatter(Formatter("%(asctime)s %(message)s"))
                self._files[name] = Logger(name)
                self._files[name].addHandler(handler)
            self._files[name].info("%s", line)
            if self._terminal:
                try:
                    print(f"{name:<9} | {line}", flush=True)
                except OSError:  # the terminal is gone; the programs are not to notice
                    self._terminal = False

    def close(self) -> None:
        """Close the logs."""
        for log in self._files.values():
            for handler in log.handlers:
                handler.close()


class SupervisedProgram:
    """Keep one command running. It is running, waits to be started again, or is done.

    Args:
        command: The command.
        patience: How long to wait before it is started again.
        output: Where its lines go.
    """

    def __init__(self, command: Command, patience: Delays, output: Output) -> None:
        self._command, self._patience, self._output = command, patience, output
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._failures, self._started, self._due = 0, 0.0, 0.0
        self._read = dict[Path, float]()  # the files that it read at its start, and when they were changed last
        self._outdated = False  # whether it was asked to end since one of them has changed
        self._hinted: set[str] = set()  # said once per start
        self.done = False

    def look(self, now: float) -> None:
        """Start the program if it is due, or notice that it has ended. ``now`` is in monotonic seconds."""
        if self._process is None:
            if not self.done and now >= self._due:
                self._start(now)
        elif (code := self._process.poll()) is not None:
            self._reap()
            if self._command.once and code == 0:
                self.done = True
                return
            if self._outdated:
                self._failures, self._due = 0, now
                return
            self._failures = 1 if now - self._started >= self._patience.steady else self._failures + 1
            wait = self._patience.delay(self._failures)
            self._due = now + wait
            self._say(f"ended with {_code(code)}; it is started again in {wait:g} s")
        elif not self._outdated and (file := self._changed_file()):
            self._outdated = True
            self._say(f"is started again, since {file} has changed")
            self._process.terminate()

    def _changed_file(self) -> Path | None:
        """Return a file that has changed since the program read it. One that is away at the moment has not."""
        return next((file for file, before in self._read.items() if (time_of_change(file) or before) != before), None)

    def end(self) -> None:
        """Ask the program to end."""
        self.done = True
        if self._process is not None:
            self._process.terminate()

    def ended(self) -> bool:
        """Return whether the program has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._reap()
        return self._process is None

    def kill(self) -> None:
        """Kill the program if it still runs."""
        if self._process is not None:
            self._say("does not end, and is killed")
            self._process.kill()
            self._process.wait()
            self._reap()

    def _start(self, now: float) -> None:
        self._read = {file: time_of_change(file) for file in self._command.reads}
        argv = [sys.executable, "-I", "-S", str(TETHER), *self._command.argv]
        self._process = subprocess.Popen(
            argv,
            cwd=self._command.cwd,
            env=environment(self._command.env),
            stdin=subprocess.PIPE,  # its end tells the tether of ours
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is for the supervisor
        )
        assert self._process.stdout is not None
        self._started, self._hinted, self._outdated = now, set(), False
        self._say(f"started, process {self._process.pid}")
        self._reader = threading.Thread(target=self._copy, args=(self._process.stdout,), name=self._command.name, daemon=True)
        self._reader.start()

    def _copy(self, stream: IO[bytes]) -> None:
        with stream:  # closed here, since closing waits for whoever reads, and what outlives the program may keep it open
            for line in stream:
                text = line.decode("utf-8", "replace")
                self._output.write(self._command.name, text)
                for words, hint in self._command.hints.items():
                    general = words == UNREACHABLE and bool(self._hinted)  # what was said before says more
                    if words in text and words not in self._hinted and not general and not self.done:
                        self._hinted.add(words)
                        self._say(f"said {words!r}: {hint}")

    def _reap(self) -> None:
        """Clean up after the program's end. What it has started is killed, since that would hold its ports."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._reader is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join(timeout=2)
        self._process.stdin.close()
        self._process = None

    def _say(self, text: str) -> None:
        self._output.write("fl-bn", f"{self._command.name} {text}")


def time_of_change(file: Path) -> float:
    """Return when ``file`` was changed last, in seconds; 0 where it is not there."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def supervise(commands: Sequence[Command], logs: Path, patience: Delays | None = None) -> None:
    """Keep the commands running until SIGINT, SIGTERM or SIGHUP. Call it from the main thread, where signals arrive.

    Args:
        commands: The commands.
        logs: The folder of the logs.
        patience: How long to wait before a program is started again.

    Raises:
        AlreadyRunning: Another ``fl-bn start`` of this folder is running.
    """
    patience = patience or Delays()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a program may print what the terminal cannot show
    with _alone(logs), _signals() as received:
        output = Output(logs)
        programs = [SupervisedProgram(command, patience, output) for command in commands]
        try:
            while not received:
                for program in programs:
                    program.look(time.monotonic())
                time.sleep(TICK)
            output.write("fl-bn", f"{signal.Signals(received[0]).name}: ending")
        finally:
            for program in programs:
                program.end()
            deadline = time.monotonic() + patience.grace
            while not all(program.ended() for program in programs) and time.monotonic() < deadline:
                time.sleep(TICK)
            for program in programs:
                program.kill()
            output.write("fl-bn", "all ended")
            output.close()


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that ask to end, while the block runs."""
    received: list[int] = []
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        wanted.append(signal.SIGHUP)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in wanted]
    try:
        yield received
    finally:
        for number, handler in zip(wanted, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _alone(logs: Path) -> Iterator[None]:
    with open(logs / ".lock", "w") as lock:
        try:
            hold(lock)
        except BlockingIOError as error:
            raise AlreadyRunning(
                f"`fl-bn start` is running in {logs.parent} already: end that one first (Ctrl-C, or systemctl stop)"
            ) from error
        yield


def _code(code: int) -> str:
    """Say how a program ended. The tether reports a signal as 128 + its number, as a shell does."""
    killed = code - 128 if code > 128 else -code
    return signal.Signals(killed).name if killed in set(signal.Signals) else f"exit code {code}"
