"""Print the log of a run as one short line per message, and write it to a file."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fl_bn.flower.compat import DETAIL, LOGGER, prints


class Lines(logging.Handler):
    """Print Flower's log in place of Flower's handler: lines with the time, without colours.

    If ``verbose``, messages have Flower's format, and details are printed.
    """

    def __init__(self, flower: Any, verbose: bool) -> None:
        super().__init__(flower.level)
        self.flower, self._verbose = flower, verbose

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        if self._verbose:
            self.flower.handle(record)
        elif not hasattr(record, DETAIL):
            level = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
            text = record.getMessage().rstrip().replace("\t", "  ")
            with suppress(OSError):  # the run goes on if the disk is full, or the program that reads the output has ended
                self.flower.stream.write(f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {level}{text}\n")
                self.flower.flush()


@contextmanager
def shown(verbose: bool = False) -> Iterator[None]:
    """Print the log through ``Lines`` inside the ``with`` block, unless an outer block does so."""
    before = LOGGER.handlers
    LOGGER.handlers = [Lines(one, verbose) if prints(one) else one for one in before]
    try:
        yield
    finally:
        LOGGER.handlers = before


class LogFile(logging.Handler):
    """Write ``run.log``: every message with date and time, and a line per round.

    If the disk is full, lines are lost, and the run goes on.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Append one message."""
        with suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write(f"{self.format(record)}\n".encode())
