"""Run Flower's SuperNode and SuperExec in processes that are forked from the gate, so that Flower is in memory once.

Flower's SuperExec asks for work every second; here it asks ten times a second. Flower's SuperNode asks the server for
messages every 3 s. Here it asks after a fifth of the time that it has had no message, so the sites that a round waited for
hear of the next one at once, and the others do not ask often. It looks for the answer of its app every 0.1 s, not every
0.5 s. For a tensor that has not arrived, it and its app wait 1 s, then 2 s, 4 s, 8 s, and 10 s from then on; the app always
has to wait, since it is started before the tensors are here. Here no wait is longer than a fifth of the time since the
first one began. No name of Flower is used but those of its programs.

Flower 1.25 waits for ever for the answer to a message that it could not receive completely. Where a run ends while its
message arrives, all later answers are sent one message too late. Here the SuperNode ends in both cases. Whoever keeps the
site's programs running starts it again. In the first case the server is told within a minute that the message has no answer.
"""

import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from fl_bn_site.supervisor import end_with_parent

SUPERNODE, SUPEREXEC = "flower-supernode", "flower-superexec"
GRACE = 8.0  # seconds that the programs have to end
ASKING = 3.0  # seconds that Flower sleeps between two questions to the server; it sleeps less only while its app works
SHORTEST = 0.1  # seconds between two looks for the answer of the app, or for work; the shortest pause between two questions
SHARE = 0.2  # of the time without a message, or without a tensor, that passes until the next question
BACKOFF = 12.0  # seconds of the longest wait for a tensor: 10 s and a fifth; the waits between heartbeats are longer
LOST = "Failed to receive message"  # how Flower's log begins to tell it
OVER = "Run ID %s is not in `RUNNING` status. Ignoring message"


def pause_less() -> None:
    """Shorten the pauses of Flower in this process: ``time.sleep``, and ``threading.Event.wait`` for a tensor."""
    sleep, wait, worked = time.sleep, threading.Event.wait, -math.inf

    def shorter_sleep(seconds: float) -> None:
        nonlocal worked
        if seconds < ASKING:  # the app works on a message, or this is the SuperExec
            worked, seconds = time.monotonic(), min(seconds, SHORTEST)
        # A program that ends sleeps longer: so long Flower lets it hand in its answer, and say goodbye to the server.
        sleep(seconds if seconds > ASKING else min(seconds, max(SHORTEST, SHARE * (time.monotonic() - worked))))

    def shorter_wait(event: threading.Event, timeout: float | None = None) -> bool:
        began = vars(event).setdefault("began", time.monotonic())  # the tensors of a message have an event of their own
        most = max(SHORTEST, SHARE * (time.monotonic() - began))
        return wait(event, min(timeout, most) if timeout and timeout <= BACKOFF else timeout)

    time.sleep = shorter_sleep
    threading.Event.wait = shorter_wait  # type: ignore[method-assign, assignment]


def end_when_lost(record: logging.LogRecord, end: Callable[[int], object] = os._exit) -> bool:
    """End this process if a log record of Flower says that a message is lost, or that its run is over. Return True."""
    if str(record.msg).startswith(LOST):
        print(f"{record.getMessage()}: the SuperNode ends, to be started again", file=sys.stderr, flush=True)
        end(1)  # without a goodbye, so that the server counts the message as lost
    elif str(record.msg).startswith(OVER):
        signal.raise_signal(signal.SIGTERM)  # with a goodbye, so that this site is let in again at once
    return True


def listens(process: int | None, port: int) -> bool:
    """Return whether the process itself listens on a TCP port, and not another program of this machine."""
    with suppress(OSError):  # the process has ended, or closes a file
        tables = [table for name in ("tcp", "tcp6") if (table := Path(f"/proc/{process}/net/{name}")).exists()]  # IPv6 may be off
        rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
        # 0A is the state of a socket that listens
        ports = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port}
        return any(os.readlink(file) in ports for file in Path(f"/proc/{process}/fd").iterdir())
    return False


def start(name: str, words: list[str], listener: socket.socket, ready: Callable[[], bool]) -> BaseProcess:
    """Fork a process that runs Flower's program ``name``.

    Args:
        name: ``SUPERNODE`` or ``SUPEREXEC``. ``ps`` shows its first 15 characters.
        words: The arguments of the program.
        listener: A socket of this process, which is closed in the other one.
        ready: The program waits until this function returns True.
    """
    program: Callable[[], None] = next(one for one in entry_points(group="console_scripts") if one.name == name).load()

    def run() -> None:
        end_with_parent()
        listener.close()
        Path("/proc/self/comm").write_text(name)
        while not ready():
            time.sleep(SHORTEST)
        sys.argv = [name, *words]
        pause_less()
        logging.getLogger("flwr").addFilter(end_when_lost)
        program()

    process = get_context("fork").Process(target=run, name=name)
    process.start()
    return process


def end(programs: Sequence[BaseProcess]) -> None:
    """End processes that ``start`` has returned, by SIGKILL where that takes longer than ``GRACE`` seconds."""
    last = time.monotonic() + GRACE
    for program in programs:
        program.terminate()
    for program in programs:
        program.join(max(0.0, last - time.monotonic()))
        program.kill()
