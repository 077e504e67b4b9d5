"""Compute curves over rounds, bytes, exchanges or local steps, as mean and standard deviation over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fl_bn.report.cells import Cell
from fl_bn.report.layout import Layout
from fl_bn.report.settings import X

Array = np.ndarray


@dataclass(frozen=True)
class Series:
    """Hold the curve of the runs in one row and one column of the table.

    Attributes:
        row: The name of the row.
        column: The name of the column.
        rounds: The rounds in which every seed has a finite value.
        x: Quantity of ``X`` -> its mean over seeds after each round, of shape (rounds,). Unknown quantities are left out.
        mean: The mean over seeds, of shape (rounds,).
        std: The standard deviation over seeds, of shape (rounds,); 0 for one seed.
        seeds: The number of seeds.
        runs: The number of runs, with and without a result.
    """

    row: str
    column: str
    rounds: tuple[int, ...]
    x: Mapping[str, Array]
    mean: Array
    std: Array
    seeds: int
    runs: int = 0


def series(layout: Layout, metric: str) -> list[Series]:
    """Return a curve for each row and column of the table that has finished runs with values of ``metric``."""
    made = (_series(row, column, layout.finished(row, column), metric) for column in layout.columns for row in layout.rows)
    return [replace(one, runs=len(layout.groups[one.row, one.column])) for one in made if one is not None]


def _series(row: str, column: str, cells: Sequence[Cell], metric: str) -> Series | None:
    """Return one curve; None: no round has a finite value of ``metric`` for every seed.

    A round in which any seed has no finite value is left out. With fewer seeds, the mean would jump there.
    """
    curves = [curve for cell in cells if (curve := cell.curve(metric))]
    if not curves:
        return None
    shared = [r for r in curves[0] if all(math.isfinite(curve.get(r, math.nan)) for curve in curves)]
    if not shared:
        return None
    values = np.array([[curve[r] for r in shared] for curve in curves])
    x: dict[str, Array] = {}
    for quantity in X:
        ways = [cell.travelled(quantity) for cell in cells if cell.curve(metric)]
        known = [way for way in ways if way is not None]
        if len(known) == len(ways):
            x[quantity] = np.array([[way[r] for r in shared] for way in known]).mean(0)
    std = values.std(0, ddof=1) if len(values) > 1 else np.zeros(len(shared))
    return Series(row, column, tuple(shared), x, values.mean(0), std, len(values))
