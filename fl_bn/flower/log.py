"""Flower's log, in which a run tells its story."""

from flwr.common.logger import FLOWER_LOGGER as LOGGER

__all__ = ["LOGGER"]
