"""Keep the programs of ``fl-bn start`` running.

The supervisor starts a program again when it ends, and writes its output to a log. When the supervisor itself
ends, even by SIGKILL, its programs end, too.
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
DAY = 86400.0  # seconds after which a new log file is begun, even if the old one is small
TICK = 0.1  # seconds between two looks at the programs


class AlreadyRunning(RuntimeError):
    """Signal that another ``fl-bn start`` of the same folder is running."""


@dataclass(frozen=True)
class Delays:
    """Hold the times that the supervisor waits, in seconds.

    Attributes:
        first: The wait before a program is started again after its first failure. Each further failure doubles it.
        longest: The longest wait before a program is started again.
        steady: After a program has run for this time, its next failure counts as its first failure again.
        grace: How long a program may take to end after SIGTERM, before it is killed.
    """

    first: float = 1.0
    longest: float = 30.0
    steady: float = 60.0
    grace: float = 10.0

    def delay(self, failures: int) -> float:
        """Return the wait before the next start, in seconds, after this number of ``failures`` in a row (at least 1)."""
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 30))


class DailyLog(RotatingFileHandler):
    """Write a log, and begin a new file when the current one is too large or a day old."""

    begun: float | None = None  # Unix time of the first line in the file; None: not read yet

    def shouldRollover(self, record: LogRecord) -> bool:  # noqa: N802, as logging names it
        """Return whether ``record`` has to go to a new file, since the current one is too large or too old."""
        if self.begun is None:
            self.begun = self._first(record.created)
        return bool(super().shouldRollover(record)) or record.created - self.begun >= DAY

    def doRollover(self) -> None:  # noqa: N802
        """Begin a new file, and rename the old ones."""
        super().doRollover()
        self.begun = None

    def _first(self, now: float) -> float:
        with open(self.baseFilename, encoding="utf-8", errors="replace") as file:
            stamp = file.readline(len("2026-11-22 23:59:59"))
        try:
            return datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S").timestamp()
        except ValueError:  # the file is empty
            return now


class Output:
    """Print and log the lines of all programs.

    In the terminal, each line begins with the name of its program. In the file ``NAME.log``, each line begins with the time.
    The logs of a program have at most 14 files, each of at most a day and 5 MB.

    Args:
        logs: The folder for the log files.
    """

    def __init__(self, logs: Path) -> None:
        self._logs, self._files, self._lock, self._terminal = logs, dict[str, Logger](), threading.Lock(), True

    def write(self, name: str, line: str) -> None:
        """Print and log one line of output of the program ``name``. Several threads may call this."""
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
                except OSError:  # the terminal is gone; go on with the log alone
                    self._terminal = False

    def close(self) -> None:
        """Close the log files."""
        for log in self._files.values():
            for handler in log.handlers:
                handler.close()


class SupervisedProgram:
    """Keep one program running.

    At any time, the program runs, waits to be started again, or is done.

    Args:
        command: The command that starts the program.
        patience: How long to wait before the program is started again.
        output: Prints and logs the lines of the program.
    """

    def __init__(self, command: Command, patience: Delays, output: Output) -> None:
        self._command, self._patience, self._output = command, patience, output
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._failures, self._started, self._due = 0, 0.0, 0.0
        self._read = dict[Path, float]()  # the files that it read at its start, and when they were changed last
        self._outdated = False  # whether it was asked to end because one of these files has changed
        self._hinted: set[str] = set()  # words whose hint was given since the last start
        self.done = False

    def look(self, now: float) -> None:
        """Look after the program once. Call this method at short intervals.

        A program whose wait is over is started. One that has ended is started again after a wait, unless it runs only
        once and has succeeded. A program is asked to end if a file that it has read at its start has changed. It is
        killed if it does not end, and is then started again.

        Args:
            now: The present time, as ``time.monotonic()`` returns it.
        """
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
            self._outdated, self._due = True, now + self._patience.grace
            self._say(f"is started again, since {file} has changed")
            self._process.terminate()
        elif self._outdated and now >= self._due:  # the program may wait for an event that the change has made impossible
            self._say("does not end, and is killed")
            self._process.kill()

    def _changed_file(self) -> Path | None:
        """Return a file that has changed since the program read it, or None. A missing file counts as unchanged."""
        return next((file for file, before in self._read.items() if (time_of_change(file) or before) != before), None)

    def end(self) -> None:
        """Ask the program to end, by SIGTERM. It is not started again."""
        self.done = True
        if self._process is not None:
            self._process.terminate()

    def ended(self) -> bool:
        """Return whether the program has ended, or was never started. Clean up after it if it has just ended."""
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
            stdin=subprocess.PIPE,  # when this process ends, the pipe ends, and tether.py kills the program
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
        with stream:  # closed in this thread, since closing waits for the reader, and children of the program may keep the pipe open
            for line in stream:
                text = line.decode("utf-8", "replace")
                self._output.write(self._command.name, text)
                for words, hint in self._command.hints.items():
                    general = words == UNREACHABLE and bool(self._hinted)  # a more specific hint was given before
                    if words in text and words not in self._hinted and not general and not self.done:
                        self._hinted.add(words)
                        self._say(f"said {words!r}: {hint}")

    def _reap(self) -> None:
        """Clean up after the end of the program.

        Processes that the program has started are killed, since they could keep its ports in use.
        """
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
    """Return when ``file`` was changed last, in seconds since 1970; 0 where the file does not exist."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def supervise(commands: Sequence[Command], logs: Path, patience: Delays | None = None) -> None:
    """Keep programs running until this process gets SIGINT, SIGTERM or SIGHUP, then end them.

    Call this function from the main thread, since Python handles signals only there.

    Args:
        commands: The commands of the programs.
        logs: The folder for the log files.
        patience: How long to wait before a program is started again; None: the defaults of ``Delays``.

    Raises:
        AlreadyRunning: Another ``fl-bn start`` of this folder is running.
    """
    patience = patience or Delays()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a program may print characters that the terminal cannot show
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
    """Catch the signals that ask this process to end, inside the ``with`` block.

    Yields:
        A list to which the number of each signal is appended when it arrives.
    """
    received: list[int] = []
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is ignored under nohup
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
                f"another `fl-bn start` is running in {logs.parent} already: end that one first (Ctrl-C, or systemctl stop)"
            ) from error
        yield


def _code(code: int) -> str:
    """Return in words how a program ended, such as ``exit code 1`` or ``SIGKILL``.

    Args:
        code: The exit code of tether.py, which is 128 + the number of the signal where a signal ended the program.
    """
    killed = code - 128 if code > 128 else -code
    return signal.Signals(killed).name if killed in set(signal.Signals) else f"exit code {code}"
