"""``fl-bn sweep``, ``fl-bn report`` and ``fl-bn experiments``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID
from rich.table import Table

from fl_bn.cli.progress import rounds_bar
from fl_bn.cli.refusal import refused

if TYPE_CHECKING:  # torch takes seconds, which --help need not
    from fl_bn.sweep.cells import Cell
    from fl_bn.sweep.run import Place

console = Console()
experiments = typer.Typer(no_args_is_help=True, help="The papers' tables and figures, each one command.")

JobsOption = Annotated[
    int, typer.Option(min=0, help="runs at a time, each in a process of its own; 0: 2, with --engine ray as many as the nodes have CPUs")
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
    """Every combination of a sweep file's axes; interrupted, the same command goes on. Tables, pictures and a page at the end."""
    from fl_bn.run.config import ConfigError
    from fl_bn.sweep.run import Place

    folder = Path(output or f"runs/{file.stem}{f'-{variant}' if variant else ''}")
    try:
        place = Place(engine, jobs, ray_address, gpus_per_run)
        errors = perform(file, variant, data, folder, place, retry, run_config, only, dry_run=dry_run)
    except ConfigError as error:
        raise refused(error) from error
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on with what is left ({folder})")
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
    results: Path | None = None,
    dry_run: bool = False,
) -> dict[str, str]:
    """Check, run and report one sweep; the errors of its failed cells. Raises ConfigError before anything runs.

    ``results``: a file of `compact`; the cells in it are not run.
    """
    from fl_bn.report import write_report
    from fl_bn.run.overrides import parse_overrides
    from fl_bn.sweep import run
    from fl_bn.sweep.experiments import made
    from fl_bn.sweep.file import maker, read
    from fl_bn.sweep.kept import ANY_DATA, cells_of, load

    if function := maker(file, variant):
        data = str(made(function, folder / "data"))
    chosen = read(file, variant, data, parse_overrides(run_config))
    known = {cell.name for cell in load(results, cells_of(read(file, variant, ANY_DATA)))} if results else ()
    planned = run.plan(chosen, folder, retry=retry, only=only, known=known)
    run.check(planned.todo)
    done = len([cell for cell in planned.cells if cell.finished()])
    console.print(f"{chosen.title}: {len(planned.cells)} runs, {done} of them finished before, {len(planned.todo)} to do", highlight=False)
    if known:
        console.print(f"{len(known)} more have their result in {results} and are not run", highlight=False, soft_wrap=True)
    if dry_run:
        for cell in planned.cells:
            console.print(f"  {cell.config.name}", highlight=False)
    if dry_run or not planned.cells:
        return {}
    with _bars() as (show, running):
        errors = run.run(chosen, planned, folder, place, show, running)
    files = write_report(folder)
    if (table := folder / "table.md").exists():
        console.print(table.read_text(), highlight=False, markup=False, soft_wrap=True)
    for name, problem in errors.items():
        console.print(f"[red]failed[/red] {escape(name)}: {escape(problem)}", highlight=False)
    if errors:
        console.print("failed cells are left as they are: --retry begins them anew")
    console.print(f"{folder}: {', '.join(path.name for path in files)}", highlight=False, soft_wrap=True)
    return errors


def report(folder: Annotated[Path, typer.Argument(help="of a sweep, finished or not")]) -> None:
    """Tables (CSV, Markdown, LaTeX), pictures, and one page that opens offline, of what a sweep has so far."""
    from fl_bn.report import write_report
    from fl_bn.run.config import ConfigError

    try:
        made = write_report(folder)
    except (ConfigError, ValueError, FileNotFoundError) as error:
        raise refused(error) from error
    for path in made:
        console.print(str(path), highlight=False, soft_wrap=True)


@experiments.command("list")
def list_() -> None:
    """Every experiment: which table or figure of which paper, and its variants."""
    from fl_bn.sweep.experiments import find

    tables: dict[str, Table] = {}
    for experiment in find():
        table = tables.setdefault(experiment.paper, Table("experiment", "what it shows", "variants", expand=True))
        table.add_row(experiment.name, escape(experiment.title), ", ".join(experiment.variants))
    for paper, table in tables.items():
        console.print(f"\n[bold]{escape(paper)}[/bold]", table, sep="\n")
    console.print("\nOne of them, in minutes and offline:  fl-bn experiments run NAME --variant small")
    console.print("All of them:                          fl-bn experiments run all --variant small")


@experiments.command("run")
def run_(
    names: Annotated[list[str], typer.Argument(help="as `fl-bn experiments list` says, or all; 000 is all of paper 000")],
    variant: Annotated[
        str,
        typer.Option(
            help="small: bundled data, minutes on a laptop; evidence: hours of a CPU; paper, or empty: the paper's own settings. Of "
            "several experiments, those that have it"
        ),
    ] = "",
    engine: EngineOption = "in-process",
    jobs: JobsOption = 0,
    ray_address: AddressOption = "",
    gpus_per_run: GpusOption = 0.0,
    data: DataOption = "data",
    output: Annotated[str, typer.Option(help="folder; each experiment has one of its own in it")] = "runs/experiments",
    retry: RetryOption = False,
    only: OnlyOption = "",
    results: Annotated[
        Path | None, typer.Option(help="the --folder of `compact`: cells that have a result there are not run again, on any machine")
    ] = None,
    run_config: RunConfigOption = "",
) -> None:
    """One table or figure of a paper, several, or all; then a page with all of them. Interrupted, the same command goes on."""
    from fl_bn.report import write_index
    from fl_bn.run.config import ConfigError
    from fl_bn.sweep.evidence import results_of
    from fl_bn.sweep.experiments import Log, find, perform_program
    from fl_bn.sweep.run import JOBS, Place

    folder, failed = Path(output), dict[str, str]()
    try:
        where = Place(engine, jobs, ray_address, gpus_per_run)
        found = find(names)
        chosen = found if len(found) == 1 else [one for one in found if one.has(variant)]
        if not chosen:
            raise ConfigError(f"none of {', '.join(names)} has a variant {variant!r}; fl-bn experiments list names them")
        programs = [one.name for one in chosen if one.program]
        given = {"--run-config": run_config, "--only": only, "--results": results, "--retry": retry, "--engine": engine != "in-process"}
        if programs and (ignored := ", ".join(option for option, value in given.items() if value)):
            said = f"{ignored}: for sweeps, not for experiments that are programs"
            if len(programs) == len(chosen):
                raise ConfigError(f"{said} ({', '.join(programs)}): leave it out")
            console.print(f"{said}; these run without: {', '.join(programs)}", highlight=False, soft_wrap=True)
        log = Log(folder / "log.csv")
        for experiment in chosen:
            begin, place = time.monotonic(), folder / f"{experiment.name}{f'-{variant}' if variant else ''}"
            try:
                if experiment.program:
                    perform_program(experiment, variant, data, place, jobs or JOBS)
                    errors: dict[str, str] = {}
                else:
                    known = results_of(experiment, variant, results) if results else None
                    errors = perform(experiment.file, variant, data, place, where, retry, run_config, only, results=known)
            except Exception as error:  # one of many must not end the others
                if len(chosen) == 1:
                    raise
                errors = {experiment.name: f"{type(error).__name__}: {error}"}
                console.print(f"[red]{experiment.name}[/red]: {escape(errors[experiment.name])}", highlight=False)
            failed |= {f"{experiment.name}/{name}": problem for name, problem in errors.items()}
            log.add(experiment.name, variant, time.monotonic() - begin, errors, place)
        page = write_index([place for place in sorted(folder.iterdir()) if (place / "report.html").exists()], folder / "index.html")
    except ConfigError as error:
        raise refused(error) from error
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on with what is left ({folder})")
        raise typer.Exit(130) from None
    console.print(f"{folder / 'log.csv'}: what was run, and for how long; {page}: all tables and pictures", highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@experiments.command("compact")
def compact(
    runs: Annotated[Path, typer.Argument(help="the output folder of `fl-bn experiments run ... --variant evidence`")],
    data: DataOption = "data",
    folder: Annotated[Path, typer.Option(help="where results/NAME.jsonl are")] = Path("experiments"),
) -> None:
    """Finished cells of every variant but small, as files to commit: settings, commit, curve."""
    from fl_bn.run.config import ConfigError
    from fl_bn.sweep import evidence
    from fl_bn.sweep.experiments import find

    try:
        measures = evidence.measures()
        for experiment in find():
            for variant, measure in evidence.sources(experiment, measures):
                if (place := runs / f"{experiment.name}-{variant}").exists():
                    file, cells, of = evidence.compact(experiment, variant, place, data, folder, measure)
                    console.print(f"{file}: {cells} of {of} cells", highlight=False, soft_wrap=True)
    except ConfigError as error:
        raise refused(error) from error


@experiments.command("evidence")
def evidence(
    folder: Annotated[Path, typer.Option(help="where results/NAME.jsonl are, and EVIDENCE.md is written")] = Path("experiments"),
    pages: Annotated[Path | None, typer.Option(help="folder for a page per claim that opens offline")] = None,
    readme: Annotated[Path | None, typer.Option(help="a README.md whose table of verdicts is written anew")] = None,
) -> None:
    """EVIDENCE.md: every claim with our numbers, a paired test over seeds and a verdict, from the results in the folder alone."""
    from fl_bn.run.config import ConfigError
    from fl_bn.sweep.evidence_page import write_evidence

    try:
        made = write_evidence(folder, pages, readme_file=readme)
    except ConfigError as error:
        raise refused(error) from error
    for path in made:
        console.print(str(path), highlight=False, soft_wrap=True)


class _bars:
    """One display for a sweep: rounds in all, and of every run that is going on."""

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
