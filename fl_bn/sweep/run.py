"""Running a sweep: everything that can be wrong is said before the first run, and what was done is never done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_bn.data.dataset import DataNotFound
from fl_bn.names import expected
from fl_bn.run import assembly
from fl_bn.run.config import ConfigError
from fl_bn.sweep.cells import ENGINES, OUTCOME, Cell, run_cells
from fl_bn.sweep.file import Sweep

FILE = "sweep.toml"


@dataclass(frozen=True)
class Plan:
    """The cells of a sweep. ``todo``: to run now; ``failed``: failed before and are left, by name with their error."""

    cells: list[Cell]
    todo: list[Cell]
    failed: dict[str, str]


def plan(sweep: Sweep, output: Path, *, retry: bool = False) -> Plan:
    """What is to be done. ``retry``: cells that failed before are begun anew.

    Raises:
        ConfigError: a cell's config is wrong, or its folder holds another run.
    """
    cells = sweep.cells(output)
    open_ = [cell for cell in cells if not cell.finished()]
    failed = {cell.config.name: cell.outcome()["error"] for cell in open_ if cell.outcome().get("status") == "failed"}
    return Plan(cells, [cell for cell in open_ if retry or cell.config.name not in failed], {} if retry else failed)


def check(cells: Sequence[Cell]) -> None:
    """Read the data, divide them and build the network of every kind of cell, so that nothing of this fails in the middle of the night.

    Raises:
        ConfigError: with the first cell's name that it is about.
    """
    seen: set[tuple[object, ...]] = set()
    for cell in cells:
        config = cell.config
        data = (config.dataset, config.data_path, config.image_size, config.shifts, config.samples_per_domain, config.hold_out)
        split = (*data, config.partition, config.partition_parameter, config.sizes, config.clients, config.byzantine, config.seed)
        model = (*data, config.model, config.model_stem, config.model_weights, config.method, config["groups"])
        try:
            for about, look in ((split, assembly.partitions), (model, assembly.client_model)):
                if about not in seen:
                    seen.add(about)
                    look(config)
        except (ValueError, DataNotFound, OSError, ImportError) as error:
            raise ConfigError(f"{config.name}: {error}") from error
    assembly.forget()


def run(
    sweep: Sweep,
    chosen: Plan,
    output: Path,
    jobs: int,
    progress: Callable[[int, int], None],
    engine: str = "in-process",
    running: Callable[[Sequence[Cell]], None] = lambda cells: None,
) -> dict[str, str]:
    """Run what is to be done; the errors of the cells that failed, now or before, by name. ``sweep.toml`` in ``output``: as run."""
    if engine not in ENGINES:
        raise ConfigError(expected("engine", engine, ENGINES))
    output.mkdir(parents=True, exist_ok=True)
    (output / FILE).write_text(sweep.to_toml(), encoding="utf-8")
    for cell in chosen.todo:  # what failed before counts no more, as it is begun anew
        (cell.path / OUTCOME).unlink(missing_ok=True)
    for cell in chosen.cells:  # where it stands may have been renamed since
        if cell.finished() and cell.outcome().get("axes") != dict(cell.axes):
            cell.write_outcome("finished", float(cell.outcome().get("seconds", 0.0)))
    left = {cell.config.name for cell in chosen.todo} | {cell.config.name for cell in chosen.cells if cell.finished()}
    errors = run_cells([cell for cell in chosen.cells if cell.config.name in left], jobs, progress, engine, running)
    return {**chosen.failed, **errors}
