"""Define the commands ``fl-bn compare``, ``fl-bn sweep`` and ``fl-bn report``: every one ends in the report of a folder of runs.

The functions import torch only when they run, since the import takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from fl_bn.cli.progress import rounds_bar
from fl_bn.cli.refusal import refused

if TYPE_CHECKING:  # these would import torch, which takes seconds and is not needed for --help
    from fl_bn.sweep.cells import Cell
    from fl_bn.sweep.file import Sweep
    from fl_bn.sweep.run import Plan

console = Console()

JobsOption = Annotated[int, typer.Option(min=0, max=1024, help="runs at a time, each in a process of its own; 0: one per core")]
DataOption = Annotated[str, typer.Option(help="the folder whose path replaces {data} in a sweep file")]
RunConfigOption = Annotated[str, typer.Option("--run-config", help="run-config keys of all runs: \"rounds=10 device='cuda'\"")]
RetryOption = Annotated[bool, typer.Option("--retry", help="run cells again that failed before")]
OnlyOption = Annotated[str, typer.Option(help="run only the cells whose names match this shell pattern: '*seed0'")]


def compare(
    methods: Annotated[
        str, typer.Option(help="methods, separated by commas; also `centralised` or `centralised-gn`; with keys of their own: fbn:rounds=9")
    ] = ("centralised,fedavg,gn,fixbn,hbn,fbn"),
    seeds: Annotated[int, typer.Option(min=1, help="number of seeds, beginning with the run config's seed")] = 3,
    jobs: JobsOption = 0,
    output: Annotated[str, typer.Option(help="folder; finished runs in it are not repeated. Default: runs/compare-<time>")] = "",
    run_config: RunConfigOption = "",
) -> None:
    """Compare several methods over several seeds: a table of mean (std), curves, and a page."""
    from fl_bn.run.config import ConfigError
    from fl_bn.run.overrides import parse_overrides
    from fl_bn.run.pictures import partition_in_words
    from fl_bn.run.usage import Usage
    from fl_bn.sweep.compare import Variant, check_metric, comparison

    folder = Path(output or f"runs/compare-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        base = parse_overrides(run_config)
        config = Usage().config(base)
        title = f"{config.dataset}, {config.model}, {config.clients} clients, {partition_in_words(config)}, {config.rounds} rounds"
        chosen = range(config.seed, config.seed + seeds)
        variants = comparison([Variant.parse(text) for text in methods.split(",")], chosen, base, title)
        check_metric(variants.cells(folder))
        planned, errors = _carry_out(variants, folder, jobs, retry=True)
        errors = _reported(planned, errors, folder)
    except ConfigError as error:
        raise refused(error) from error
    if errors:
        raise typer.Exit(1)


def sweep(
    file: Annotated[Path, typer.Argument(help="a TOML file in which lists are axes; see docs/how-to/compare.md")],
    variant: Annotated[str, typer.Option(help="the name of a variant in the file ([variants])")] = "",
    jobs: JobsOption = 0,
    data: DataOption = "data",
    output: Annotated[str, typer.Option(help="folder; finished runs in it are not repeated. Default: runs/<name of the file>")] = "",
    retry: RetryOption = False,
    only: OnlyOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only check the file, the data and the networks, and list the runs")] = False,
    run_config: RunConfigOption = "",
) -> None:
    """Run every combination of the axes in a sweep file, then write a table, pictures and a page.

    After an interruption, the same command continues. Given on several machines that share the folder, it divides the runs among them.
    """
    from fl_bn.run.config import ConfigError

    folder = Path(output or f"runs/{file.stem}{f'-{variant}' if variant else ''}")
    try:
        errors = perform(file, variant, data, folder, jobs, retry, run_config, only, dry_run=dry_run)
    except ConfigError as error:
        raise refused(error) from error
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command continues with the remaining runs ({folder})")
        raise typer.Exit(130) from None
    if errors:
        raise typer.Exit(1)


def perform(
    file: Path,
    variant: str,
    data: str,
    folder: Path,
    jobs: int,
    retry: bool,
    run_config: str,
    only: str = "",
    *,
    known: Mapping[str, str] = MappingProxyType({}),
    dry_run: bool = False,
) -> dict[str, str]:
    """Check and run the sweep of a file, and write its report.

    Args:
        file: The sweep file.
        variant: The name of a variant in the file; empty: the file without any variant.
        data: The folder whose path replaces ``{data}`` in the file.
        folder: The folder of the results.
        jobs: The number of runs at a time; 0: one per core.
        retry: Run cells again that failed before.
        run_config: Run-config keys that override those of the file.
        only: A shell pattern; cells whose names do not match it are left out. Empty: all cells.
        known: The cells to leave out, since their results are elsewhere: name of the cell -> file of its result.
        dry_run: Check and list the cells, but run nothing.

    Returns:
        The error of each failed cell, by its name.

    Raises:
        ConfigError: The file, the data or a network is wrong. Nothing was run.
    """
    from fl_bn.run.overrides import parse_overrides
    from fl_bn.sweep.file import made, maker, read

    if function := maker(file, variant):
        data = str(made(function, folder / "data"))
    chosen = read(file, variant, data, parse_overrides(run_config))
    planned, errors = _carry_out(chosen, folder, jobs, retry, only, known=known, dry_run=dry_run)
    return {} if dry_run or not planned.cells else _reported(planned, errors, folder)


def _reported(planned: Plan, errors: dict[str, str], folder: Path) -> dict[str, str]:
    """Write the report of the runs so far, show its table and the failed runs, and return ``errors``."""
    from fl_bn.report import write_report

    if not any(cell.outcome() for cell in planned.cells):
        console.print(f"{folder}: no run has ended yet; other processes compute them", highlight=False, soft_wrap=True)
        return errors
    files = write_report(folder)
    if (table := folder / "table.md").exists():
        console.print(table.read_text(), highlight=False, markup=False, soft_wrap=True)
    if elsewhere := [cell for cell in planned.cells if cell.config.name not in errors and not cell.finished()]:
        console.print(f"{len(elsewhere)} runs are computed by other processes: the same command reports them when they are done")
    for name, problem in errors.items():
        console.print(f"[red]failed[/red] {escape(name)}: {escape(problem)}", highlight=False)
    if errors:
        console.print("the same command leaves out the failed runs: give --retry to run them again")
    console.print(f"{folder}: {', '.join(path.name for path in files)}", highlight=False, soft_wrap=True)
    return errors


def _carry_out(
    chosen: Sweep,
    folder: Path,
    jobs: int,
    retry: bool,
    only: str = "",
    *,
    known: Mapping[str, str] = MappingProxyType({}),
    dry_run: bool = False,
) -> tuple[Plan, dict[str, str]]:
    """Plan, check and run a sweep under progress bars.

    Args:
        chosen: The sweep.
        folder: The folder of the results.
        jobs: The number of runs at a time; 0: one per core.
        retry: Run cells again that failed before.
        only: A shell pattern; cells whose names do not match it are left out. Empty: all cells.
        known: The cells to leave out, since their results are elsewhere: name of the cell -> file of its result.
        dry_run: Check and list the cells, but run nothing.

    Returns:
        The plan, and the error of each failed cell by its name.

    Raises:
        ConfigError: A run config, the data or a network is wrong. Nothing was run.
    """
    from fl_bn.sweep import run

    planned = run.plan(chosen, folder, retry=retry, only=only, known=known)
    run.check(planned.todo)
    done = len([cell for cell in planned.cells if cell.finished()])
    console.print(f"{chosen.title}: {len(planned.cells)} runs, {done} of them finished before, {len(planned.todo)} to do", highlight=False)
    if known:
        where = ", ".join(sorted(set(known.values())))
        console.print(f"{len(known)} more are not run, since their results are in {where}", highlight=False, soft_wrap=True)
    if dry_run:
        for cell in planned.cells:
            console.print(f"  {cell.config.name}", highlight=False)
    if dry_run or not planned.cells:
        return planned, {}
    with _bars() as (show, running):
        return planned, run.run(chosen, planned, folder, jobs, show, running)


def report(
    folders: Annotated[list[Path], typer.Argument(help="the folder of a sweep, finished or not; or folders of runs: runs/NAME ...")],
    output: Annotated[Path, typer.Option(help="folder of the report of several runs")] = Path("runs/report"),
) -> None:
    """Write the report of a sweep's runs so far, or of several runs: table, curves, a page to read offline, and runs.csv.

    Runs that differ only in the seed are one row of the table, and one line with a band.
    """
    from fl_bn.report import write_report
    from fl_bn.run.config import ConfigError

    sweeps = [folder for folder in folders if (folder / "sweep.toml").exists()]
    try:
        made = write_report(folders[0]) if len(folders) == len(sweeps) == 1 else write_report(output, runs=folders)
    except (ConfigError, ValueError, FileNotFoundError) as error:
        raise refused(error) from error
    for path in made:
        console.print(str(path), highlight=False, soft_wrap=True)


class _bars:
    """Show progress bars: one for the rounds of the whole sweep, and one for each running cell."""

    ROWS = 16  # the most bars of running cells

    def __init__(self) -> None:
        self._bar = rounds_bar(console)
        self._places: list[TaskID] = []

    def __enter__(self) -> tuple[Callable[[int, int], None], Callable[[Sequence[Cell]], None]]:
        self._bar.__enter__()
        self._all = self._bar.add_task("all runs", total=None)
        self._places = [self._bar.add_task("", visible=False) for _ in range(self.ROWS)]
        return self._show, self._running

    def __exit__(self, *_: object) -> None:
        for place in self._places:
            self._bar.update(place, visible=False)
        self._bar.__exit__(None, None, None)

    def _show(self, done: int, total: int) -> None:
        self._bar.update(self._all, completed=done, total=total)

    def _running(self, cells: Sequence[Cell]) -> None:
        for n, place in enumerate(self._places):
            if n < len(cells):
                cell = cells[n]
                self._bar.update(
                    place, description=f"  {cell.config.name[:48]}", completed=cell.rounds_done(), total=cell.config.rounds, visible=True
                )
            else:
                self._bar.update(place, visible=False)
