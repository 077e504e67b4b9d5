"""Define ``fl-bn data columns``. It imports torch only when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from fl_bn.cli.refusal import refused

data = typer.Typer(no_args_is_help=True)


@data.callback()
def about() -> None:
    """Describe the columns of tables."""


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
