"""Flower's log, in which a run tells its story; by its name, which is the same in every version of Flower."""

import logging

LOGGER = logging.getLogger("flwr")
log = LOGGER.log
DETAIL = "detail"  # attribute of a log record that has a long form, too: of the line of a round


def say_round(line: str, detail: str) -> None:
    """The short ``line`` of a round; ``detail`` is for run.log and ``fl-bn run --verbose``."""
    log(logging.INFO, "%s", line, extra={DETAIL: detail})
