"""The commands ``fl-bn sweep`` and ``fl-bn report``, and the way that every sweep runs.

Imports are inside functions, since torch takes seconds.
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

if TYPE_CHECKING:  # torch takes seconds, which --help need not
    from fl_bn.sweep.cells import Cell
    from fl_bn.sweep.file import Sweep
    from fl_bn.sweep.run import Place, Plan

console = Console()

JobsOption = Annotated[
    int, typer.Option(min=0, help="runs at a time, each in its own process; 0: one per core, with --engine ray one per CPU of the nodes")
]
DataOption = Annotated[str, typer.Option(help="folder that {data} in a sweep file means")]
RunConfigOption = Annotated[str, typer.Option("--run-config", help="keys that count more than the file's: \"rounds=10 device='cuda'\"")]
EngineOption = Annotated[
    str, typer.Option(help="in-process: processes of this machine; ray: runs spread over the nodes of a Ray cluster (docs/cluster.md)")
]
AddressOption = Annotated[
    str, typer.Option("--ray-address", help="HOST:PORT of the cluster. Default: RAY_ADDRESS, or the one that runs here")
]
GpusOption = Annotated[float, typer.Option("--gpus-per-run", min=0.0, help="with --engine ray: a run's share of a GPU, 0.25 say")]
RetryOption = Annotated[bool, typer.Option("--retry", help="begin cells that failed before anew")]
OnlyOption = Annotated[str, typer.Option(help="only the cells with names that fit this shell pattern: '*seed0'")]


def sweep(
    file: Annotated[Path, typer.Argument(help="TOML: a list is an axis; see docs/sweeps.md")],
    variant: Annotated[str, typer.Option(help="of [variants] in the file")] = "",
    engine: EngineOption = "in-process",
    jobs: JobsOption = 0,
    ray_address: AddressOption = "",
    gpus_per_run: GpusOption = 0.0,
    data: DataOption = "data",
    output: Annotated[str, typer.Option(help="folder; finished runs in it are not repeated. Default: runs/<file's name>")] = "",
    retry: RetryOption = False,
    only: OnlyOption = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only check the file, the data and the networks, and list the runs")] = False,
    run_config: RunConfigOption = "",
) -> None:
    """Run every combination of a sweep file's axes; interrupted, the same command goes on. Tables, pictures and a page at the end."""
    from fl_bn.run.config import ConfigError
    from fl_bn.sweep.run import Place

    folder = Path(output or f"runs/{file.stem}{f'-{variant}' if variant else ''}")
    try:
        place = Place(engine, jobs, ray_address, gpus_per_run)
        errors = perform(file, variant, data, folder, place, retry, run_config, only, dry_run=dry_run)
    except ConfigError as error:
        raise refused(error) from error
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on with the remaining runs ({folder})")
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
    """Check, run and report one sweep.

    Args:
        file: the sweep file.
        variant: of the file; empty: the file itself.
        data: the folder that {data} means.
        folder: of the results.
        place: where the cells run.
        retry: whether cells that failed before are begun anew.
        run_config: keys that count more than the file's.
        only: a shell pattern for the names of cells.
        known: cells that have their result elsewhere and are not run, by name; the file that holds it.
        dry_run: whether nothing is run.

    Returns:
        The errors of the failed cells, by name.

    Raises:
        ConfigError: before anything runs.
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
        console.print("failed cells are left as they are: --retry begins them anew")
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
    """Plan a sweep, check it and run it behind its bars: of a file, of ``fl-bn compare`` or of ``fl-bn attack-grid``.

    Args:
        chosen: the sweep. The other arguments are those of ``perform``.
        folder: of the results.
        place: where the cells run.
        retry: whether cells that failed before are begun anew.
        only: a shell pattern for the names of cells.
        known: cells that have their result elsewhere, by name.
        dry_run: whether nothing is run.

    Returns:
        The plan, and the errors of the failed cells by name.

    Raises:
        ConfigError: before anything runs.
    """
    from fl_bn.sweep import run

    planned = run.plan(chosen, folder, retry=retry, only=only, known=known)
    run.check(planned.todo)
    done = len([cell for cell in planned.cells if cell.finished()])
    console.print(f"{chosen.title}: {len(planned.cells)} runs, {done} of them finished before, {len(planned.todo)} to do", highlight=False)
    if known:
        where = ", ".join(sorted(set(known.values())))
        console.print(f"{len(known)} more have their result in {where} and are not run", highlight=False, soft_wrap=True)
    if dry_run:
        for cell in planned.cells:
            console.print(f"  {cell.config.name}", highlight=False)
    if dry_run or not planned.cells:
        return planned, {}
    with _bars() as (show, running):
        return planned, run.run(chosen, planned, folder, place, show, running)


def report(folder: Annotated[Path, typer.Argument(help="of a sweep, finished or not")]) -> None:
    """Write tables (CSV, Markdown, LaTeX), pictures, and one page that opens offline, of a sweep's runs so far."""
    from fl_bn.report import write_report
    from fl_bn.run.config import ConfigError

    try:
        made = write_report(folder)
    except (ConfigError, ValueError, FileNotFoundError) as error:
        raise refused(error) from error
    for path in made:
        console.print(str(path), highlight=False, soft_wrap=True)


class _bars:
    """Show the rounds of a whole sweep, and of every run that is going on."""

    ROWS = 16  # runs shown at a time

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
