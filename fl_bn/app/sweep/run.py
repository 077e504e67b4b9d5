"""Plan, check and run a sweep. Mistakes are found before the first run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fl_bn.app import assembly
from fl_bn.app.centralised import check_centralised
from fl_bn.app.config import ConfigError
from fl_bn.app.report.cells import CENTRALISED
from fl_bn.app.sweep.cells import Cell, run_cells
from fl_bn.app.sweep.file import Sweep
from fl_bn.data.dataset import DataNotFound
from fl_bn.support import durable
from fl_bn.support.names import expected

FILE = "sweep.toml"


@dataclass(frozen=True)
class Plan:
    """Say which cells of a sweep are run now.

    Attributes:
        cells: All cells of the plan, finished ones included.
        todo: The cells to run now.
        failed: The errors of cells that failed before and are not run again, by
            name.
    """

    cells: list[Cell]
    todo: list[Cell]
    failed: dict[str, str]


def plan(sweep: Sweep, output: Path, *, retry: bool = False, only: str = "", known: Collection[str] = ()) -> Plan:
    """Plan which cells of a sweep to run.

    Args:
        sweep: The sweep.
        output: The folder of the sweep.
        retry: Run cells again that failed before.
        only: A shell pattern of the cells' names. Empty: all cells.
        known: The names of cells to leave out, since their results are elsewhere.

    Raises:
        ConfigError: The run config of a cell is wrong, its folder holds another
            run, or no name matches ``only``.
    """
    cells = [cell for cell in sweep.cells(output) if fnmatchcase(cell.config.name, only or "*")]
    if not cells:
        raise ConfigError(expected("only", only, [cell.config.name for cell in sweep.cells(output)]))
    cells = [cell for cell in cells if cell.config.name not in known]
    open_ = [cell for cell in cells if not cell.finished()]
    failed = {cell.config.name: cell.outcome()["error"] for cell in open_ if cell.outcome().get("status") == "failed"}
    return Plan(cells, [cell for cell in open_ if retry or cell.config.name not in failed], {} if retry else failed)


def check(cells: Sequence[Cell]) -> None:
    """Check the data and networks of all cells before the first run, or raise ``ConfigError``.

    Of cells that differ only in their seeds, one is checked.
    """
    from fl_bn.app.preflight import try_data  # torch, which a typed command does not import

    seen = list[Mapping[str, object]]()
    for cell in cells:
        config = cell.config
        if (keys := {**config.to_mapping(), "seed": 0, "name": "", CENTRALISED: cell.centralised}) in seen:
            continue
        seen.append(keys)
        try:
            if cell.centralised:
                check_centralised(config)
            assembly.partitions(config)
            try_data(config)
            config.changes.measurements(config)
        except (ValueError, DataNotFound, OSError, ImportError) as error:
            raise ConfigError(f"{config.name}: {error}") from error
    assembly.forget()


def run(sweep: Sweep, chosen: Plan, output: Path, jobs: int, progress: Callable[[int, int], None]) -> dict[str, str]:
    """Run the planned cells, and write the sweep to ``sweep.toml`` in the folder ``output``.

    ``jobs`` and ``progress`` are those of ``run_cells``. Return the error of each
    cell that failed, now or before, by its name.
    """
    durable.write(output / FILE, sweep.to_toml().encode(), mode=0o666)
    for cell in chosen.cells:  # axes may have got other labels since, and `fl-bn resume` may have ended a run
        if cell.finished() and ((told := cell.outcome()).get("status"), told.get("axes")) != ("finished", dict(cell.axes)):
            cell.write_outcome("finished", float(told.get("seconds", 0.0)))
    names = {cell.config.name for cell in chosen.todo} | {cell.config.name for cell in chosen.cells if cell.finished()}
    return {**chosen.failed, **run_cells([cell for cell in chosen.cells if cell.config.name in names], jobs, progress)}
