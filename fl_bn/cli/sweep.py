"""Define ``fl-bn compare``, ``fl-bn sweep`` and ``fl-bn report``, which end in a report.

The functions import torch only when they run, since the import takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fl_bn.cli.refusal import refused

if TYPE_CHECKING:  # these would import torch, which takes seconds and is not needed for --help
    from fl_bn.app.report.page import Further
    from fl_bn.app.sweep.file import Sweep

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
    from fl_bn.app.config import ConfigError
    from fl_bn.app.overrides import parse_overrides

    folder = Path(output or f"runs/compare-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        errors = compared(methods, seeds, parse_overrides(run_config), folder, jobs)
    except (ConfigError, OSError) as error:
        raise refused(error) from error
    if errors:
        raise typer.Exit(1)


def compared(methods: str, seeds: int, keys: Mapping[str, Any], folder: Path, jobs: int) -> dict[str, str]:
    """Run several methods over several seeds, from the run config's on, and write the report.

    ``jobs`` 0: one run per core. Return the error of each failed run, by its name.
    ``ConfigError``: a key is wrong, or the methods cannot be compared.
    """
    from fl_bn.app.sweep.compare import comparison
    from fl_bn.app.usage import Usage

    config = Usage().config(keys)
    title = f"{config.dataset}, {config.model}, {config.clients} clients, {config.partition_in_words()}, {config.rounds} rounds"
    sweep = comparison(methods.split(","), range(config.seed, config.seed + seeds), keys, title)
    return carry_out(sweep, folder, jobs, retry=True)


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

    After an interruption, the same command continues. Given on several machines
    that share the folder, it divides the runs among them.
    """
    from fl_bn.app.config import ConfigError
    from fl_bn.app.overrides import parse_overrides
    from fl_bn.app.sweep.file import read

    folder = Path(output or f"runs/{file.stem}{f'-{variant}' if variant else ''}")
    try:
        chosen = read(file, variant, data, parse_overrides(run_config))
        errors = carry_out(chosen, folder, jobs, retry, only, dry_run=dry_run)
    except (ConfigError, OSError) as error:
        raise refused(error) from error
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command continues with the remaining runs ({folder})")
        raise typer.Exit(130) from None
    if errors:
        raise typer.Exit(1)


def carry_out(
    chosen: Sweep,
    folder: Path,
    jobs: int,
    retry: bool,
    only: str = "",
    *,
    known: Mapping[str, str] | None = None,
    dry_run: bool = False,
    further: Further | None = None,
) -> dict[str, str]:
    """Plan, check and run a sweep under a progress bar, and write its report.

    Args:
        chosen: The sweep.
        folder: The folder of the results.
        jobs: The number of runs at a time; 0: one per core.
        retry: Run cells again that failed before.
        only: A shell pattern of the cells' names. Empty: all cells.
        known: Cells to leave out: name -> file of its result elsewhere.
        dry_run: Check and list the cells, but run nothing.
        further: Makes pictures beyond those of ``write_report``.

    Return the error of each failed cell, by its name. ``ConfigError``: the data or
    a network is wrong.
    """
    from fl_bn.app.report import write_report
    from fl_bn.app.sweep import run

    plan = run.plan(chosen, folder, retry=retry, only=only, known=known or ())
    run.check(plan.todo)
    done = sum(cell.finished() for cell in plan.cells)
    console.print(f"{chosen.title}: {len(plan.cells)} runs, {done} of them finished before, {len(plan.todo)} to do", highlight=False)
    if known:
        where = ", ".join(sorted(set(known.values())))
        console.print(f"{len(known)} more are not run, since their results are in {where}", highlight=False, soft_wrap=True)
    if dry_run:
        for cell in plan.cells:
            console.print(f"  {cell.config.name}", highlight=False)
    if dry_run or not plan.cells:
        return {}
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rounds"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)
        errors = run.run(chosen, plan, folder, jobs, lambda done, total: bar.update(task, completed=done, total=total))
    if any(cell.outcome() for cell in plan.cells):
        planned = {name: of for name, of in chosen.named() if name not in (known or ())}
        files = write_report(folder, further=further, planned=planned)
        console.print((folder / "table.md").read_text(encoding="utf-8"), highlight=False, markup=False, soft_wrap=True)
        console.print(f"{folder}: {', '.join(path.name for path in files)}", highlight=False, soft_wrap=True)
    elsewhere = [cell for cell in plan.cells if cell.config.name not in errors and not cell.finished()]
    if elsewhere:
        console.print(f"{len(elsewhere)} runs are computed by other processes: the same command reports them when they are done")
    for name, problem in errors.items():
        console.print(f"[red]failed[/red] {escape(name)}: {escape(problem)}", highlight=False)
    if errors and not retry:
        console.print("the same command leaves out the failed runs: give --retry to run them again")
    return errors


def report(
    folders: Annotated[list[Path], typer.Argument(help="the folder of a sweep, finished or not; or folders of runs: runs/NAME ...")],
    output: Annotated[str, typer.Option(help="folder of the report of several runs. Default: runs/report")] = "",
) -> None:
    """Write the report of a sweep's runs so far, or of several runs: table, curves, a page to read offline, and runs.csv.

    Runs that differ only in the seed are one row of the table, and one line with a
    band.
    """
    from fl_bn.app.config import ConfigError
    from fl_bn.app.report import write_report
    from fl_bn.app.sweep.file import read
    from fl_bn.app.sweep.run import FILE

    try:
        if len(folders) == 1 and (folders[0] / FILE).exists():
            if output:
                raise ConfigError("a sweep's report lies in its folder: --output is for several runs")
            made = write_report(folders[0], planned=dict(read(folders[0] / FILE).named()))
        else:
            made = write_report(Path(output or "runs/report"), runs=folders)
    except (ConfigError, ValueError, OSError) as error:
        raise refused(error) from error
    for path in made:
        console.print(str(path), highlight=False, soft_wrap=True)
