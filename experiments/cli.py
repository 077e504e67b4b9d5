"""Define the commands of ``python -m experiments``, which exist only in a checkout of fl-bn's repository.

Each command imports what it needs itself, because importing torch takes seconds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fl_bn.cli.refusal import refused
from fl_bn.cli.sweep import DataOption, JobsOption, OnlyOption, RetryOption, RunConfigOption, carry_out

console = Console()
experiments = typer.Typer(no_args_is_help=True, help="Reproduce the papers' tables and figures, each by one command.")


@experiments.command("list")
def list_() -> None:
    """List all experiments, by paper: the table or figure that each reproduces, and its variants."""
    from experiments.catalogue import find

    tables: dict[str, Table] = {}
    for experiment in find():
        table = tables.setdefault(experiment.paper, Table("experiment", "what it shows", "variants", expand=True))
        table.add_row(experiment.name, escape(experiment.title), ", ".join(experiment.variants))
    for paper, table in tables.items():
        console.print(f"\n[bold]{escape(paper)}[/bold]", table, sep="\n")
    console.print("\nOne of them, in minutes and offline:  python -m experiments run NAME --variant small")
    console.print("All of them:                          python -m experiments run all --variant small")


@experiments.command("run")
def run_(
    names: Annotated[list[str], typer.Argument(help="names of `python -m experiments list`, or all; 000 stands for all of paper 000")],
    variant: Annotated[
        str,
        typer.Option(
            help="small: bundled data, minutes on a laptop; evidence: hours of a CPU; paper, or empty: the paper's own settings. If "
            "you name several experiments, those without this variant are left out"
        ),
    ] = "",
    jobs: JobsOption = 0,
    data: DataOption = "data",
    output: Annotated[str, typer.Option(help="the folder in which each experiment makes its own folder")] = "runs/experiments",
    retry: RetryOption = False,
    only: OnlyOption = "",
    results: Annotated[
        Path | None,
        typer.Option(help="the --folder of `compact`: runs that have a result there are not repeated, whatever machine ran them"),
    ] = None,
    run_config: RunConfigOption = "",
) -> None:
    """Run one or several experiments, or all of them, and write a page with their tables and pictures.

    After an interruption, the same command continues.
    """
    from experiments.catalogue import Log, data_of, find, perform_program
    from experiments.evidence import known_cells
    from experiments.pages import PAGE, write_index
    from experiments.pictures import further
    from fl_bn.app.config import ConfigError
    from fl_bn.app.overrides import parse_overrides
    from fl_bn.app.sweep.file import read
    from fl_bn.federation.engines.workers import cores

    folder, failed = Path(output), dict[str, str]()
    try:
        matches = find(names)
        chosen = matches if len(matches) == 1 else [one for one in matches if one.has(variant)]
        if not chosen:
            raise ConfigError(f"none of {', '.join(names)} has a variant {variant!r}: see the variants in `python -m experiments list`")
        programs = [one.name for one in chosen if one.program]
        given = {"--run-config": run_config, "--only": only, "--results": results, "--retry": retry}
        if programs and (ignored := ", ".join(option for option, value in given.items() if value)):
            problem = f"{ignored} can be given for sweeps, but not for experiments that are programs"
            if len(programs) == len(chosen):
                raise ConfigError(f"{problem} ({', '.join(programs)}): leave it out")
            console.print(f"{problem}; these run without it: {', '.join(programs)}", highlight=False, soft_wrap=True)
        log = Log(folder / "log.csv")
        for experiment in chosen:
            begin, place = time.monotonic(), folder / f"{experiment.name}{f'-{variant}' if variant else ''}"
            try:
                if experiment.program:
                    perform_program(experiment, variant, data, place, jobs or cores())
                    errors: dict[str, str] = {}
                else:
                    known = known_cells(experiment, variant, results) if results else {}
                    of = data_of(experiment, variant, data, place)
                    sweep = read(experiment.file, variant, of, parse_overrides(run_config))
                    errors = carry_out(sweep, place, jobs, retry, only, known=known, further=further)
            except Exception as error:  # if several experiments are run, an error in one must not end the others
                if len(chosen) == 1:
                    raise
                errors = {experiment.name: f"{type(error).__name__}: {error}"}
                console.print(f"[red]{experiment.name}[/red]: {escape(errors[experiment.name])}", highlight=False)
            failed |= {f"{experiment.name}/{name}": problem for name, problem in errors.items()}
            log.add(experiment.name, variant, time.monotonic() - begin, errors, place)
        page = write_index([place for place in sorted(folder.iterdir()) if (place / PAGE).exists()], folder / "index.html")
    except ConfigError as error:
        raise refused(error) from error
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command continues with the remaining cells ({folder})")
        raise typer.Exit(130) from None
    console.print(f"{folder / 'log.csv'}: the runs and their seconds; {page}: all tables and pictures", highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@experiments.command("compact")
def compact(
    runs: Annotated[Path, typer.Argument(help="the output folder of `python -m experiments run ... --variant evidence`")],
    data: DataOption = "data",
    folder: Annotated[Path, typer.Option(help="the folder with results/NAME.jsonl")] = Path("experiments"),
) -> None:
    """Write the results of finished runs to files that can be committed; leave out the variant small.

    Each result has the settings of the run, the commit of fl-bn, and the curve of its metrics.
    """
    from experiments import evidence
    from experiments.catalogue import find
    from fl_bn.app.config import ConfigError

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
    folder: Annotated[Path, typer.Option(help="the folder with results/NAME.jsonl, into which EVIDENCE.md is written")] = Path(
        "experiments"
    ),
    pages: Annotated[
        Path | None, typer.Option(help="the folder for one page per claim, which can be read offline; default: no pages")
    ] = None,
    readme: Annotated[Path | None, typer.Option(help="the README.md whose table of verdicts is updated; default: none")] = None,
) -> None:
    """Judge every claim of the papers by the committed results, and write EVIDENCE.md.

    EVIDENCE.md has our numbers for each claim, a paired test over seeds, and a verdict.
    """
    from experiments.evidence_page import write_evidence
    from fl_bn.app.config import ConfigError

    try:
        made = write_evidence(folder, pages, readme_file=readme)
    except ConfigError as error:
        raise refused(error) from error
    for path in made:
        console.print(str(path), highlight=False, soft_wrap=True)
