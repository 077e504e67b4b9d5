"""Define the commands ``fl-bn sweep`` and ``fl-bn report``, and ``carry_out``, which every command with a sweep calls.

The functions import torch only when they run, since the import takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    from fl_bn.sweep.run import Place, Plan

console = Console()

JobsOption = Annotated[
    int, typer.Option(min=0, help="runs at a time, each in its own process; 0: one per core, with --engine ray one per CPU of the nodes")
]
DataOption = Annotated[str, typer.Option(help="the folder whose path replaces {data} in a sweep file")]
RunConfigOption = Annotated[str, typer.Option("--run-config", help="keys that override those of the file: \"rounds=10 device='cuda'\"")]
EngineOption = Annotated[
    str, typer.Option(help="in-process: processes of this machine; ray: runs spread over the nodes of a Ray cluster (docs/cluster.md)")
]
AddressOption = Annotated[
    str, typer.Option("--ray-address", help="HOST:PORT of the cluster. Default: RAY_ADDRESS, or the cluster of this machine")
]
GpusOption = Annotated[
    float, typer.Option("--gpus-per-run", min=0.0, help="with --engine ray: the share of a GPU that a run gets, e.g. 0.25")
]
RetryOption = Annotated[bool, typer.Option("--retry", help="run cells again that failed before")]
OnlyOption = Annotated[str, typer.Option(help="run only the cells whose names match this shell pattern: '*seed0'")]


def sweep(
    file: Annotated[Path, typer.Argument(help="a TOML file in which lists are axes; see docs/sweeps.md")],
    variant: Annotated[str, typer.Option(help="the name of a variant in the file ([variants])")] = "",
    engine: EngineOption = "in-process",
    jobs: JobsOption = 0,
    ray_address: AddressOption = "",
    gpus_per_run: GpusOption = 0.0,
    data: DataOption = "data",
    output: Annotated[str, typer.Option(help="folder; finished runs in it are not repeated. Default: runs/<name of the file>")] = "",
    retry: RetryOption = False,
    only: OnlyOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only check the file, the data and the networks, and list the runs")] = False,
    run_config: RunConfigOption = "",
) -> None:
    """Run every combination of the axes in a sweep file, then write tables, pictures and a page.

    After an interruption, the same command continues.
    """
    from fl_bn.run.config import ConfigError
    from fl_bn.sweep.run import Place

    folder = Path(output or f"runs/{file.stem}{f'-{variant}' if variant else ''}")
    try:
        place = Place(engine, jobs, ray_address, gpus_per_run)
        errors = perform(file, variant, data, folder, place, retry, run_config, only, dry_run=dry_run)
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
    place: Place,
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
        place: Where the cells run.
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
    from fl_bn.report import write_report
    from fl_bn.run.overrides import parse_overrides
    from fl_bn.sweep.file import made, maker, read

    if function := maker(file, variant):
        data = str(made(function, folder / "data"))
    chosen = read(file, variant, data, parse_overrides(run_config))
    planned, errors = carry_out(chosen, folder, place, retry, only, known=known, dry_run=dry_run)
    if dry_run or not planned.cells:
        return {}
    files = write_report(folder)
    if (table := folder / "table.md").exists():
        console.print(table.read_text(), highlight=False, markup=False, soft_wrap=True)
    for name, problem in errors.items():
        console.print(f"[red]failed[/red] {escape(name)}: {escape(problem)}", highlight=False)
    if errors:
        console.print("the same command leaves out the failed runs: give --retry to run them again")
    console.print(f"{folder}: {', '.join(path.name for path in files)}", highlight=False, soft_wrap=True)
    return errors


def carry_out(
    chosen: Sweep,
    folder: Path,
    place: Place,
    retry: bool,
    only: str = "",
    *,
    known: Mapping[str, str] = MappingProxyType({}),
    dry_run: bool = False,
) -> tuple[Plan, dict[str, str]]:
    """Plan, check and run the sweep of a file, ``fl-bn compare`` or ``fl-bn attack-grid``, under progress bars.

    Args:
        chosen: The sweep.
        folder: The folder of the results.
        place: Where the cells run.
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
        return planned, run.run(chosen, planned, folder, place, show, running)


def report(folder: Annotated[Path, typer.Argument(help="the folder of a sweep, finished or not")]) -> None:
    """Write the report of a sweep's runs so far: tables (CSV, Markdown, LaTeX), pictures, and a page to read offline."""
    from fl_bn.report import write_report
    from fl_bn.run.config import ConfigError

    try:
        made = write_report(folder)
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
