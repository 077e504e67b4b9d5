"""Flower's log, in which a run tells its story; by its name, which is the same in every version of Flower."""

import logging

LOGGER = logging.getLogger("flwr")
log = LOGGER.log
