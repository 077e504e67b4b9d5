"""Define ``fl-bn data partition`` and ``columns``. These commands import torch only when they run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer

from fl_bn.cli.refusal import refused

data = typer.Typer(no_args_is_help=True, help="Show how data are divided among clients, and describe the columns of tables.")


@data.command()
def partition(
    run_config: Annotated[str, typer.Option("--run-config", help="keys of the run: \"partition='dirichlet' clients=5\"")] = "",
    output: Annotated[Path, typer.Option(help="folder for counts.csv and labels.png")] = Path("partition"),
) -> None:
    """Show how the training data of a run are divided among its clients, in a table and a picture."""
    from fl_bn.data.partition import label_counts
    from fl_bn.run.assembly import dataset, partitions, shape
    from fl_bn.run.config import RunConfig
    from fl_bn.run.overrides import parse_overrides
    from fl_bn.run.pictures import draw_labels

    try:
        config = RunConfig.from_mapping(parse_overrides(run_config))
        whole, parts = dataset(config), [part.numpy() for part in partitions(config)]
    except (ValueError, FileNotFoundError) as error:
        raise refused(error) from error
    counts = label_counts(whole.y_train.numpy(), parts, shape(config)[0]).tolist()
    owners = () if whole.domain_train is None else whole.domain_train.numpy()
    domains = {name: [int((owners[part] == index).sum()) for part in parts] for index, name in enumerate(whole.domains)}
    output.mkdir(parents=True, exist_ok=True)
    with (output / "counts.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["client", *(f"class-{label}" for label in range(len(counts[0]))), *domains, "total"])
        for client, part in enumerate(parts):
            writer.writerow([client, *counts[client], *(held[client] for held in domains.values()), len(part)])
    totals = {client: counts[client] or [len(part)] for client, part in enumerate(parts)}
    draw_labels(totals, config, output / "labels.png", domains)
    typer.echo(f"{output / 'counts.csv'} and {output / 'labels.png'}")


@data.command()
def columns(
    path: Annotated[str, typer.Argument(help="a folder of CSV files, or files, separated by commas")],
    target: Annotated[str, typer.Option(help="name of the target column")],
    regression: Annotated[bool, typer.Option(help="the target is a number, and no class")] = False,
    delimiter: Annotated[str, typer.Option(help="character between cells")] = ",",
) -> None:
    """Print a draft of columns.toml, the description of a table's columns, for you to read and correct."""
    from fl_bn.data.draft_columns import draft

    try:
        typer.echo(draft(path, target, regression=regression, delimiter=delimiter), nl=False)
    except (ValueError, FileNotFoundError) as error:
        raise refused(error) from error
