"""Print the log of a run: as a progress bar on a terminal, else as one short line per round."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fl_bn.federation.bar import Bar
from fl_bn.flower.compat import DETAIL, LOGGER, OF_A_ROUND, prints
from fl_bn.task import Task


class Console(logging.Handler):
    """Print Flower's log in place of Flower's own handler.

    On a terminal, a progress bar shows the rounds, and messages are printed above it. Elsewhere, every message is a
    line with the time and without colours.

    Args:
        flower: Flower's handler.
        verbose: Print messages in Flower's format, and also details.
    """

    def __init__(self, flower: Any, verbose: bool = False) -> None:
        super().__init__(flower.level)
        self.flower, self._verbose = flower, verbose
        self.bar = Bar(flower.stream) if flower.stream.isatty() and not verbose else None

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        if self._verbose:
            self.flower.handle(record)
            return
        if hasattr(record, DETAIL):
            return
        level = "" if record.levelno <= logging.INFO else f"{record.levelname}: "
        text = f"{level}{record.getMessage().rstrip()}".replace("\t", "  ")
        try:
            if self.bar is None:
                self.flower.stream.write(f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {text}\n")
                self.flower.flush()
            elif not hasattr(record, OF_A_ROUND):
                self.bar.say(text, "yellow" if level else "")
        except OSError:  # the run goes on if the disk is full, or the program that reads the output has ended
            self.handleError(record)

    def close(self) -> None:
        """Close the bar, if there is one."""
        if self.bar is not None:
            self.bar.on_end(None)
        super().close()


@contextmanager
def shown(verbose: bool = False) -> Iterator[None]:
    """Print the log through ``Console`` inside the ``with`` block.

    The handlers with which Flower prints are replaced. Other handlers stay, among them a ``Console`` from an outer block.
    """
    before = LOGGER.handlers
    LOGGER.handlers = [Console(one, verbose) if prints(one) else one for one in before]
    try:
        yield
    finally:
        for handler in set(LOGGER.handlers) - set(before):
            handler.close()
        LOGGER.handlers = before


def bars(task: Task) -> list[Bar]:
    """Make the progress bars on the terminal show the metric of ``task``, and return these bars."""
    displayed = [handler.bar for handler in LOGGER.handlers if isinstance(handler, Console) and handler.bar is not None]
    for bar in displayed:
        bar.task = task
    return displayed


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
