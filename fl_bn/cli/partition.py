"""Define the command ``fl-bn data partition``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fl_bn.cli.refusal import refused


def partition(
    run_config: Annotated[
        str, typer.Option("--run-config", help="keys to override: \"partition='dirichlet' partition-parameter=0.1\"")
    ] = "",
    output: Annotated[str, typer.Option(help="folder for counts.csv and labels.png")] = "partition",
) -> None:
    """Preview a partition: count the samples of each class and domain at each client, as a table and a picture."""
    from fl_bn.run.config import ConfigError, RunConfig
    from fl_bn.run.overrides import parse_overrides
    from fl_bn.run.partition_report import write

    try:
        table, picture = write(RunConfig.from_mapping(parse_overrides(run_config)), Path(output))
    except (ConfigError, FileNotFoundError) as error:
        raise refused(error) from error
    Console().print(f"{table} and {picture}", highlight=False, soft_wrap=True)
