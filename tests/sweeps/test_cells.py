"""How many cells of a sweep run at a time."""

from __future__ import annotations

import pytest

from fl_bn.run.config import RunConfig
from fl_bn.sweep import cells
from fl_bn.sweep.cells import Cell, at_a_time


@pytest.mark.parametrize(
    ("cores", "workers", "jobs", "expected"), [(8, 1, 4, 4), (8, 1, 20, 20), (8, 4, 4, 2), (2, 2, 2, 1), (4, 0, 3, 1), (2, 8, 2, 1)]
)
def test_cells_with_workers_take_no_more_than_the_cores(
    cores: int, workers: int, jobs: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "cores", lambda: cores)
    some = [Cell(RunConfig(name="a", output="x", workers=number)) for number in (1, workers)]
    assert at_a_time(jobs, some) == expected
