"""Define ``fl-bn data list``, ``check`` and ``columns``. These commands import torch and Rich only when they run."""

from __future__ import annotations

from typing import Annotated

import typer

data = typer.Typer(no_args_is_help=True, help="List the data sets, check their files, describe columns, and preview a partition.")
COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


@data.command("list")
def list_sets() -> None:
    """List every data set: its name, content and size, its terms of use, and how to get it."""
    from rich.console import Console
    from rich.table import Table

    from fl_bn.data.catalogue import CATALOGUE

    table = Table("name", "what", "training + test", "terms", "how to get it")
    for name, entry in CATALOGUE.items():
        got = f"downloaded, or by hand: {entry.source}" if entry.source else "included"
        table.add_row(name, entry.title, "{:,} + {:,}".format(*entry.samples), entry.terms, got)
    table.add_row("npz", "your own archives, one per site", "", "", "data-path names them, separated by commas")
    table.add_row("folder", "your own images, train/CLASS/* and test/CLASS/*", "", "", "data-path names the folder, or one per site")
    table.add_row("csv", "your own tables, one CSV file per site and a columns.toml", "", "", "data-path names the folder, or files")
    table.add_row("package.module:function", "your own function", "", "", "returns x_train, y_train, x_test, y_test")
    Console().print(table)


@data.command("check")
def check_set(
    name: Annotated[str, typer.Argument(help="the name of a data set in `fl-bn data list`")],
    path: Annotated[str, typer.Option(help="the key data-path of the run; empty: data")] = "",
) -> None:
    """Check that the files of a data set are complete and in the right form. Nothing is downloaded.

    It prints one line per finding: ok, warn or fail, and what to do. The exit code is 1 after a failure, 2 for an
    unknown name, else 0.
    """
    from fl_bn.data.check import check_files

    try:
        findings = check_files(name, path)
    except ValueError as error:
        typer.echo(f"{typer.style('ValueError', fg=typer.colors.RED)}: {error}", err=True)
        raise typer.Exit(2) from error
    for finding in findings:
        line = str(finding)
        typer.echo(typer.style(line[:4], fg=COLOURS[finding.status]) + line[4:])
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


@data.command("columns")
def draft_columns(
    path: Annotated[str, typer.Argument(help="a folder of CSV files, or files, separated by commas")],
    target: Annotated[str, typer.Option(help="name of the target column")],
    regression: Annotated[bool, typer.Option(help="the target is a number, and no class")] = False,
    delimiter: Annotated[str, typer.Option(help="character between cells")] = ",",
) -> None:
    """Print a draft of columns.toml, the description of a table's columns, for you to read and correct.

    The draft has the categories and the rounded means of these files: look at it before you give it to another site.
    """
    from fl_bn.data.draft_columns import draft

    try:
        typer.echo(draft(path, target, regression=regression, delimiter=delimiter), nl=False)
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"{typer.style(type(error).__name__, fg=typer.colors.RED)}: {error}", err=True)
        raise typer.Exit(2) from error
