"""The command ``fl-bn``."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Batch normalisation that works in federated learning."
)
console = Console()

RunConfigOption = Annotated[str, typer.Option("--run-config", help="keys to override, as for flwr run: \"rounds=10 method='hbn'\"")]


@app.command()
def run(run_config: RunConfigOption = "") -> None:
    """One run in this process, without Ray: the same ServerApp, ClientApp, config and files as `flwr run .`."""
    from fl_bn.experiment.config import ConfigError, RunConfig
    from fl_bn.experiment.overrides import parse_overrides
    from fl_bn.flower import RunFailed, run_in_process
    from fl_bn.layers import Unconvertible

    try:
        config = RunConfig.from_mapping(parse_overrides(run_config))
        run_in_process(config.to_mapping())
    except (ConfigError, Unconvertible, RunFailed, FileNotFoundError, FileExistsError) as error:
        raise _refused(error) from error


@app.command()
def compare(
    methods: Annotated[
        str, typer.Option(help="separated by commas; `centralised` too; one may differ in keys: fbn:learning-rate=0.01;rounds=9")
    ] = ("centralised,fedavg,gn,fixbn,hbn,fbn"),
    seeds: Annotated[int, typer.Option(min=1, help="number of seeds, from the config's seed on")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time, each in a process of its own")] = 2,
    output: Annotated[str, typer.Option(help="folder; finished runs in it are not repeated. Default: runs/compare-<time>")] = "",
    run_config: RunConfigOption = "",
) -> None:
    """Several methods in process, over several seeds: a table of mean (std) and one picture with all curves."""
    from fl_bn.experiment.compare import Variant, gather, plan, run_cells, write
    from fl_bn.experiment.compare import table as rows_of
    from fl_bn.experiment.config import ConfigError, RunConfig
    from fl_bn.experiment.overrides import parse_overrides

    folder = Path(output or f"runs/compare-{datetime.now():%Y%m%d-%H%M%S}")
    try:
        base = parse_overrides(run_config)
        config = RunConfig.from_mapping(base)
        cells = plan([Variant.parse(text) for text in methods.split(",")], range(config.seed, config.seed + seeds), base, folder)
    except ConfigError as error:
        raise _refused(error) from error
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"{len(cells)} runs", total=None)
        errors = run_cells(cells, jobs, lambda done, total: bar.update(task, completed=done, total=total))
    outcome = gather(cells)
    split = f"{config.partition} {config.partition_parameter:g}"
    title = f"{config.dataset}, {config.model}, {config.clients} clients, {split}, {config.rounds} rounds"
    write(outcome, title, folder)
    shown = Table("method", "last round (%)", "best round (%)", "runs", title=title)
    for row in rows_of(outcome):
        shown.add_row(*row)
    console.print(shown)
    console.print(f"table.md, table.csv, curves.csv, comparison.png and all runs: {folder}")
    for name, problem in errors.items():
        console.print(f"[red]failed[/red] {name}: {problem}")
    if errors:
        raise typer.Exit(1)


@app.command()
def layers(
    model: str, method: Annotated[str, typer.Option(help="name of a method")] = "fedavg", classes: int = 10, image_size: int = 32
) -> None:
    """Which normalisation layers a model has, and what a method does with each of their tensors."""
    from fl_bn import convert
    from fl_bn.flower.normalisation import describe_layers
    from fl_bn.methods import METHODS
    from fl_bn.models import build

    try:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, but got {method!r}")
        source = build(model, classes=classes, image_size=image_size)
        for line in describe_layers(source, convert(source, METHODS[method]()), METHODS[method]()):
            console.print(line, highlight=False)
    except ValueError as error:
        raise _refused(error) from error


@app.command()
def config() -> None:
    """Every key of the run config: default, values, meaning (Markdown)."""
    from fl_bn.experiment.config import RunConfig
    from fl_bn.experiment.keys import table

    typer.echo(table(RunConfig))


def _refused(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False)
    return typer.Exit(2)


if __name__ == "__main__":
    app()
