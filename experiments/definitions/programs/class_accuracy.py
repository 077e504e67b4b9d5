"""Measure a finished run's test accuracy on the three classes with the lowest accuracy, and on the other classes.

If each client holds one class, a robust rule that leaves out a client's gradients also leaves out this client's class.
"""

from __future__ import annotations

from statistics import fmean

from fl_bn.app.history import PER_CLASS
from fl_bn.app.sweep.cells import Cell
from fl_bn.task import CLASS

LEAST = 3  # the number of clients, and so of classes, that the robust rules of the experiment may leave out
AXIS = "classes"
WAYS = ("all", "three known least", "the others")


def measured(cell: Cell) -> dict[str, float]:
    """Return three mean test accuracies (0..1) in the last round, by the names in ``WAYS``.

    They are means over all classes, over the three classes with the lowest accuracy, and over the other classes.
    """
    accuracies = sorted(cell.rows()[-1][PER_CLASS[CLASS]])
    return dict(zip(WAYS, (fmean(accuracies), fmean(accuracies[:LEAST]), fmean(accuracies[LEAST:])), strict=True))
