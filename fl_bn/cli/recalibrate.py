"""Define the command ``fl-bn recalibrate``. It imports torch only when it runs, since the import takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fl_bn.cli.refusal import refused


def recalibrate(
    source: Annotated[
        Path, typer.Argument(help="the folder of a finished run, or a file of weights (.pt, .pth, .safetensors)", metavar="RUNDIR")
    ],
    run_config: Annotated[
        str, typer.Option("--run-config", help="keys that differ from those of the run; for a file of weights: its model and data")
    ] = "",
    passes: Annotated[int, typer.Option(min=0, help="the number of passes; 0: until all layers are exact (see the key recalibration)")] = 0,
    output: Annotated[Path | None, typer.Option(help="the folder to make. Default: RUNDIR-recalibrated")] = None,
) -> None:
    """Give every BatchNorm layer of a trained model the exact statistics of all clients' data.

    The command makes a federated run without training, which changes only running statistics. A pass that goes layer by
    layer makes all layers exact. Otherwise, pass p makes layers 1..p exact.
    """
    from fl_bn.bn.kinds import Unconvertible
    from fl_bn.flower import RunFailed, run_in_process
    from fl_bn.run.assembly import task
    from fl_bn.run.config import ConfigError
    from fl_bn.run.overrides import parse_overrides
    from fl_bn.run.pictures import axis_of, in_table
    from fl_bn.run.recalibrate import elsewhere, planned, rows

    console = Console()
    try:
        config = planned(source, parse_overrides(run_config), passes, output)
        folder = run_in_process(config.to_mapping())
    except FileExistsError as error:
        problem = f"{Path(config.output) / config.name} exists already: give another folder (--output), or remove it"
        raise refused(ConfigError(problem)) from error
    except (ConfigError, Unconvertible, RunFailed, OSError) as error:
        raise refused(error) from error
    assert folder is not None
    of = task(config)
    table = Table("pass", axis_of(of), "largest move of a mean (sd)", "in layer", "clients", title=f"re-calibration of {source}")
    for row in rows(folder, of.metric):
        value = "" if row.metric is None else in_table(of, row.metric)
        moved = "" if row.moved is None else f"{row.moved:.3g}"
        first = row.number == 0
        table.add_row("before" if first else str(row.number), value, moved, row.layer, "" if first else f"{row.clients}/{config.clients}")
    console.print(table)
    for line in (folder / "summary.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("- ") and (f"{of.metric} before" in line or "BatchNorm layers: " in line or "not all clients" in line):
            console.print(line.removeprefix("- ").replace("*", ""), highlight=False, soft_wrap=True)
    console.print(f"model.safetensors, recalibration.csv, summary.md: {folder}", highlight=False, soft_wrap=True)
    text = f"the same run on Ray (a deployment can use its run config, too):\n{elsewhere(config)}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)
