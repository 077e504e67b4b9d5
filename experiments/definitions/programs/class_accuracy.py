"""Measure a finished run's test accuracy on the classes that its model knows least, and on the others.

If each client holds one class, a robust rule that leaves a client's gradients out leaves its class out.
"""

from __future__ import annotations

from statistics import fmean

from fl_bn.run.history import PER_CLASS
from fl_bn.sweep.cells import Cell
from fl_bn.task import CLASS

LEAST = 3  # as many classes as clients that the experiment's rules may leave out
AXIS = "classes"
WAYS = ("all", "three known least", "the others")


def measured(cell: Cell) -> dict[str, float]:
    """Return way -> test accuracy in the last round, as a share, mean over the classes."""
    accuracies = sorted(cell.rows()[-1][PER_CLASS[CLASS]])
    return dict(zip(WAYS, (fmean(accuracies), fmean(accuracies[:LEAST]), fmean(accuracies[LEAST:])), strict=True))
