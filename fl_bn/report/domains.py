"""Make the domain an axis of the report, for runs on data of several domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fl_bn.report.cells import Cell
from fl_bn.report.settings import AVERAGE

AXIS = "domain"


def by_domain(cells: Sequence[Cell], each: bool = True) -> list[Cell]:
    """Replace each run by several copies: one per domain, and one for the mean over the domains.

    In the copy of a domain, the metric has its value on the domain's test data. In the copy of the mean, it has the mean
    of these values. Only this copy keeps the metrics of the clients and the diagnostics. A run without metrics
    per domain stays as it is, and counts as a copy of the mean.

    Args:
        cells: The runs.
        each: Whether to return the copies of the domains, too. If False, only the copies of the mean are returned.

    Returns:
        The copies. If ``each`` is True, they have one more axis, ``domain``.
    """
    split = []
    for cell in cells:
        names = list(dict.fromkeys(name for row in cell.rows for name in row.get("per-domain") or ())) if each else []
        for name in names:
            rows = tuple(
                {**row, cell.metric: (row.get("per-domain") or {}).get(name), "clients": [], "per-class": None, "per-domain": None}
                for row in cell.rows
            )
            split.append(replace(cell, axes={**cell.axes, AXIS: name}, rows=rows, layers={}))
        means = tuple({**row, cell.metric: _mean(row["per-domain"])} if row.get("per-domain") else row for row in cell.rows)
        split.append(replace(cell, axes={**cell.axes, AXIS: AVERAGE} if each else cell.axes, rows=means))
    return split


def _mean(by_domain: dict[str, float | None]) -> float | None:
    values = [value for value in by_domain.values() if value is not None]
    return sum(values) / len(values) if len(values) == len(by_domain) else None
