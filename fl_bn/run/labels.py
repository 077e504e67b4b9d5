"""Check the labels of a run's data for likely mistakes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fl_bn.data.csv_files import TableData
from fl_bn.data.dataset import Dataset
from fl_bn.data.record import without_class_0
from fl_bn.flower.compat import LOGGER
from fl_bn.run.errors import ConfigError
from fl_bn.task import LABELS, kind_of


def check_labels(data: Dataset) -> None:
    """Check that the data of a run have samples of every class. Data of a single site are not checked: they may lack classes.

    If class 0 is missing, labels are probably counted from 1, and the network would have one class too many. If another
    class has no training sample, a warning is logged. For CSV tables, every missing class is only a warning. Targets that
    are not labels are not checked.

    Raises:
        ConfigError: No training or test sample has label 0, and the data are no CSV tables.
    """
    if isinstance(data, TableData):
        check_rows(data)
        return
    if kind_of(data.y_train) != LABELS:
        return
    if problem := without_class_0(data):
        raise ConfigError(problem)
    if missing := missing_classes(torch.bincount(data.y_train, minlength=data.classes).tolist()):
        LOGGER.warning(
            "dataset %r has %s classes, since its largest label is %s, but no training sample of class %s: if that is a mistake, correct "
            "the labels",
            data.name,
            data.classes,
            data.classes - 1,
            missing,
        )


def check_rows(data: TableData) -> None:
    """Warn of rows that were left out, of missing or unknown cells that were replaced, and of classes without a training row."""
    for note in data.notes:
        LOGGER.warning("dataset %r: %s", data.name, note)
    for label, name in enumerate(data.columns.classes):
        if not bool((data.y_train == label).any()):
            LOGGER.warning("dataset %r: no training row has the class %r, label %s", data.name, name, label)


def missing_classes(counts: Sequence[int]) -> str:
    """Return a text with the first ten classes without samples and the number of further ones; empty: all classes have samples.

    Args:
        counts: The number of samples of each class.
    """
    none = [str(label) for label, count in enumerate(counts) if not count]
    return "" if not none else ", ".join(none) if len(none) <= 10 else f"{', '.join(none[:10])} and {len(none) - 10} more"
