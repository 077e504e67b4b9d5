"""Write to Flower's log by its name, which is the same in every version of Flower."""

import logging

LOGGER = logging.getLogger("flwr")
log = LOGGER.log
DETAIL = "detail"  # the attribute of a log record that has the long form of a round's line


def say_round(line: str, detail: str) -> None:
    """Log the short ``line`` of a round, with its long form ``detail`` for run.log and ``fl-bn run --verbose``."""
    log(logging.INFO, "%s", line, extra={DETAIL: detail})
