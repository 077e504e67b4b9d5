"""What a run prints: a live display on a terminal, a short line per round elsewhere."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fl_bn.federation.bar import Bar
from fl_bn.flower.compat import prints
from fl_bn.flower.log import DETAIL, LOGGER
from fl_bn.task import Task


def in_full(record: logging.LogRecord) -> logging.LogRecord:
    """The record with the line of a round in its long form."""
    if not hasattr(record, DETAIL):
        return record
    made = copy.copy(record)
    made.msg, made.args = getattr(record, DETAIL), None
    return made


class Console(logging.Handler):
    """Prints Flower's log in place of ``flower``, the handler that does so otherwise.

    On a terminal there is a ``bar`` for the rounds, and everything else is printed above it. Elsewhere every message is a line with the
    time and without colours. ``verbose``: all is printed as Flower does, with the long line of every round.
    """

    def __init__(self, flower: Any, verbose: bool = False) -> None:
        super().__init__(flower.level)
        self.flower, self._verbose = flower, verbose
        self.bar = Bar(flower.stream) if flower.stream.isatty() and not verbose else None

    def emit(self, record: logging.LogRecord) -> None:
        if self._verbose:
            self.flower.handle(in_full(record))
            return
        level = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        text = f"{level}{record.getMessage().rstrip()}".replace("\t", "  ")
        try:
            if self.bar is None:
                self.flower.stream.write(f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {text}\n")
                self.flower.flush()
            elif not hasattr(record, DETAIL):
                self.bar.say(text, "yellow" if level else "")
        except OSError:  # a full disk, a reader that is gone: the run goes on
            self.handleError(record)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.on_end(None)
        super().close()


@contextmanager
def shown(verbose: bool = False) -> Iterator[None]:
    """Print the log so while this lasts. Nothing changes where it is printed so already, or not at all."""
    before = LOGGER.handlers
    LOGGER.handlers = [Console(one, verbose) if prints(one) else one for one in before]
    try:
        yield
    finally:
        for handler in set(LOGGER.handlers) - set(before):
            handler.close()
        LOGGER.handlers = before


def bars(task: Task) -> list[Bar]:
    """Of the terminals that the log is shown on; they show the metric of ``task``."""
    found = [handler.bar for handler in LOGGER.handlers if isinstance(handler, Console) and handler.bar is not None]
    for bar in found:
        bar.task = task
    return found


class LogFile(logging.Handler):
    """``run.log``: every message with date and time, and the long line of every round. A full disk costs lines, and nothing else."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write(f"{self.format(in_full(record))}\n".encode())
