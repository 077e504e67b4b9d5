"""Define ``fl-bn adapt`` and ``fl-bn recalibrate``, which import torch only when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fl_bn.cli.refusal import refused

console = Console()


def adapt(
    model: Annotated[Path, typer.Option(help="the folder of a finished run, with config.toml, model.safetensors and clients/")],
    domain: Annotated[str, typer.Option(help="domain of the run's data. Default: the domain that the run held out")] = "",
    data: Annotated[str, typer.Option(help="the new client's own data: npz:PATH, folder:PATH or package.module:function")] = "",
    how: Annotated[str, typer.Option(help="average-affine, recompute, test-batch, separated by commas; all: all that can be")] = "all",
    samples: Annotated[int, typer.Option(min=0, help="number of training samples, without labels, for the statistics; 0: all")] = 0,
    batch_size: Annotated[int, typer.Option(min=2, help="number of test samples in a batch of the way test-batch")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="seed of the drawn samples, and of the order of the test samples")] = 0,
    output: Annotated[str, typer.Option(help="folder for the table and models. Default: adapt-CLIENT in the run's folder")] = "",
) -> None:
    """Adapt the model of a finished run to a new client.

    BatchNorm is fitted to the client's unlabelled data. The metrics before and
    after are shown.
    """
    from fl_bn.app import adapt as adapting
    from fl_bn.app.assembly import limit_threads, task
    from fl_bn.app.device import device
    from fl_bn.app.former import values_of
    from fl_bn.app.usage import Usage
    from fl_bn.federation.recalibration import HOW

    try:
        config = Usage().config(values_of(model))
        limit_threads(config.threads)
        run = adapting.read_run(model)
        chosen = adapting.ways(run, how)
        client = adapting.newcomer(config, domain, data).drawn(samples, seed)
        of = task(config, client.test.y)
        plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in client.name)
        folder = Path(output) if output else model / f"adapt-{plain}"
        if (folder / adapting.TABLE).exists():
            raise FileExistsError(f"{folder} has the results of an earlier adapt: give another folder (--output), or remove this one")
        outcomes = adapting.adapt(run, client, chosen, batch_size, device(config, {"device": "auto"}), of)
        adapting.write(outcomes, client, config, folder)
    except (ValueError, OSError, ImportError) as error:
        raise refused(error) from error
    shown = Table("how", "before", "after", "", title=f"{config.method}: {client.name}, {len(client.test)} test samples, {of.metric}")
    for outcome in outcomes:
        before = "unknown" if outcome.before is None else of.format_metric(outcome.before[of.metric])
        shown.add_row(outcome.how, before, of.format_metric(outcome.after[of.metric]), outcome.note)
    console.print(shown)
    if client.seen:
        console.print(f"beware: the run was trained on {client.name}, so this client is not new to it (hold-out removes a domain)")
    for reason in filter(None, map(run.refusal, HOW if how.strip() == "all" else [])):
        console.print(f"left out: {reason}", highlight=False)
    console.print(f"{adapting.TABLE} and the models: {folder}", highlight=False, soft_wrap=True)


def recalibrate(
    source: Annotated[Path, typer.Argument(help="the folder of a finished run, or a file of weights", metavar="RUNDIR")],
    run_config: Annotated[str, typer.Option("--run-config", help="keys that differ from the run's; for a file: its model and data")] = "",
    passes: Annotated[int, typer.Option(min=0, help="the number of passes; 0: until all layers are exact (see the key recalibration)")] = 0,
    output: Annotated[Path | None, typer.Option(help="the folder to make. Default: RUNDIR-recalibrated")] = None,
) -> None:
    """Give every BatchNorm layer of a trained model the exact statistics of all clients' data.

    The command makes a federated run without training, which changes only running
    statistics. A pass that goes layer by layer makes all layers exact. Otherwise,
    pass p makes layers 1..p exact.
    """
    from fl_bn.app.overrides import parse_overrides
    from fl_bn.app.recalibrate import planned
    from fl_bn.flower import RunFailed, run_in_process

    try:
        folder = run_in_process(planned(source, parse_overrides(run_config), passes, output).to_mapping())
    except (ValueError, RunFailed, OSError) as error:
        raise refused(error) from error
    assert folder is not None
    console.print((folder / "summary.md").read_text(encoding="utf-8"), highlight=False, markup=False, soft_wrap=True)
    console.print(f"model.safetensors, recalibration.csv, summary.md: {folder}", highlight=False, soft_wrap=True)
