"""Planning and running a sweep: mistakes are refused before the first run, and finished cells are not run again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fl_bn.data.dataset import DataNotFound
from fl_bn.run import assembly
from fl_bn.run.centralised import check_centralised
from fl_bn.run.config import ConfigError
from fl_bn.run.run_directory import diagnostics_of
from fl_bn.support.names import expected
from fl_bn.sweep.cells import Cell, run_cells
from fl_bn.sweep.file import Sweep

FILE = "sweep.toml"
ENGINES = ("in-process", "ray")


@dataclass(frozen=True)
class Place:
    """Say where cells run.

    Attributes:
        engine: one of ``ENGINES``.
        jobs: runs at a time; 0: in process one per core, on Ray as many as the nodes have room for.
        address: of a Ray cluster.
        gpus: the share of a GPU that each run has there.
    """

    engine: str = "in-process"
    jobs: int = 0
    address: str = ""
    gpus: float = 0.0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(expected("engine", self.engine, ENGINES))
        if self.engine != "ray" and (self.address or self.gpus):
            raise ConfigError("an address and GPUs per run are for --engine ray")

    def run(self, cells: Sequence[Cell], progress: Callable[[int, int], None], running: Callable[[Sequence[Cell]], None]) -> dict[str, str]:
        """Run the cells that are not finished; return the errors of those that failed, by name."""
        if self.engine == "in-process":
            return run_cells(cells, self.jobs, progress, running)
        from fl_bn.sweep import cluster  # imports Ray

        return cluster.run_cells(cells, self.jobs, progress, running, address=self.address, gpus=self.gpus)


@dataclass(frozen=True)
class Plan:
    """Divide the cells of a sweep.

    Attributes:
        cells: all of them.
        todo: the cells to run now.
        failed: the errors of cells that failed before and are not run, by name.
    """

    cells: list[Cell]
    todo: list[Cell]
    failed: dict[str, str]


def plan(sweep: Sweep, output: Path, *, retry: bool = False, only: str = "", known: Collection[str] = ()) -> Plan:
    """Plan which cells of a sweep run.

    Args:
        sweep: whose cells.
        output: the sweep's folder.
        retry: whether cells that failed before are begun anew.
        only: a shell pattern for the names of the plan's cells.
        known: names of cells that are no part of the plan.

    Raises:
        ConfigError: a cell's config is wrong, its folder holds another run, or no cell's name fits ``only``.
    """
    cells = [cell for cell in sweep.cells(output) if fnmatchcase(cell.config.name, only or "*")]
    if not cells:
        raise ConfigError(expected("only", only, [cell.config.name for cell in sweep.cells(output)]))
    cells = [cell for cell in cells if cell.config.name not in known]
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
        limit = (config.samples_per_domain, config.samples_share)
        data = (config.dataset, config.data_path, config.image_size, config.shifts, limit, config.hold_out)
        split = (*data, config.partition, config.partition_parameter, config.sizes, config.clients, config.byzantine, config.seed)
        whose = (split, config.validation_share)
        model = (*data, config.model, config.model_stem, config.model_weights, config.method, config["groups"])
        try:
            if cell.centralised:
                check_centralised(config)
            for about, look in (
                (whose, assembly.partitions),
                (model, assembly.client_model),
                ((*model, config.diagnostics), diagnostics_of),
            ):
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
    place: Place,
    progress: Callable[[int, int], None],
    running: Callable[[Sequence[Cell]], None] = lambda cells: None,
) -> dict[str, str]:
    """Run the planned cells of a sweep, and write it as run to ``sweep.toml``.

    Args:
        sweep: the sweep.
        chosen: its plan.
        output: its folder.
        place: where the cells run.
        progress: takes rounds done and rounds in all.
        running: takes the cells that run.

    Returns:
        The errors of the cells that failed, now or before, by name.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / FILE).write_text(sweep.used().to_toml(), encoding="utf-8")
    for cell in chosen.todo:
        cell.remove_failed()
    for cell in chosen.cells:  # where it stands may have been renamed since
        if cell.finished() and cell.outcome().get("axes") != dict(cell.axes):
            cell.write_outcome("finished", float(cell.outcome().get("seconds", 0.0)))
    names = {cell.config.name for cell in chosen.todo} | {cell.config.name for cell in chosen.cells if cell.finished()}
    errors = place.run([cell for cell in chosen.cells if cell.config.name in names], progress, running)
    return {**chosen.failed, **errors}
