"""Check the labels of a run's data for likely mistakes."""

from __future__ import annotations

from fl_bn.data.dataset import Dataset
from fl_bn.data.record import untrained_classes
from fl_bn.flower.compat import LOGGER
from fl_bn.run.errors import ConfigError


def check_labels(data: Dataset) -> None:
    """Check that the data of a run have training samples of every class. Data of a single site are not checked: they may lack classes.

    If the number of classes was stated, as by folders or by columns.toml, a missing class is only a warning.

    Raises:
        ConfigError: A class has no training sample, and the number of classes is the largest label plus one.
    """
    say_notes(data)
    if not (missing := untrained_classes(data)):
        return
    problem = f"dataset {data.name!r}: no training sample has label {missing}, but labels are 0..{data.classes - 1}"
    if data.counted:
        raise ConfigError(f"{problem}: labels count from 0 without gaps, and every class needs training samples; correct the labels")
    LOGGER.warning("%s: if that is a mistake, correct the labels", problem)


def say_notes(data: Dataset) -> None:
    """Warn of rows that were left out, and of missing or unknown cells that were replaced."""
    for note in data.notes:
        LOGGER.warning("dataset %r: %s", data.name, note)
