"""Make the domain an axis of the report, for runs on data of several domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fl_bn.report.cells import Cell
from fl_bn.report.settings import AVERAGE

AXIS = "domain"


def by_domain(cells: Sequence[Cell], each: bool = True) -> list[Cell]:
    """Replace each run by one run per domain, and by one run for the mean over the domains.

    The run of a domain has the metric on the test data of that domain. The run of the mean also has the numbers of the
    whole run (clients, diagnostics). A run without metrics per domain counts as a run of the mean.

    Args:
        cells: The runs.
        each: True: return the runs per domain and the runs of the mean. False: return only the runs of the mean.

    Returns:
        The new runs. If ``each`` is True, they have one more axis, ``domain``.
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
