"""Define ``fl-bn data check`` and ``columns``. These commands import torch only when they run."""

from __future__ import annotations

from typing import Annotated

import typer

from fl_bn.cli.refusal import refused

data = typer.Typer(no_args_is_help=True, help="Check the files of a data set, and describe the columns of tables.")
COLOURS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


@data.command("check")
def check_set(
    name: Annotated[str, typer.Argument(help="the name of a data set (docs/data.md)")],
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
        raise refused(error) from error
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
        raise refused(error) from error
