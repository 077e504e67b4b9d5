"""Define the command ``fl-bn adapt``. It imports torch only when it runs, since the import takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fl_bn.cli.refusal import refused

if TYPE_CHECKING:
    from fl_bn.task import MetricState


def adapt(
    model: Annotated[Path, typer.Option(help="the folder of a finished run, with config.toml, model.safetensors and clients/")],
    domain: Annotated[
        str, typer.Option(help="domain of the run's data to which the new client belongs. Default: the domain that the run held out")
    ] = "",
    data: Annotated[str, typer.Option(help="the new client's own data: npz:PATH, folder:PATH or package.module:function")] = "",
    how: Annotated[
        str,
        typer.Option(
            help="ways of adapting, separated by commas: average-affine, recompute, test-batch; all: every way that the method allows"
        ),
    ] = "all",
    samples: Annotated[int, typer.Option(min=0, help="number of training samples, without labels, for the statistics; 0: all")] = 0,
    batch_size: Annotated[int, typer.Option(min=2, help="number of test samples in a batch of the way test-batch")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="seed of the drawn samples, and of the order of the test samples")] = 0,
    output: Annotated[str, typer.Option(help="folder for the table, picture and models. Default: adapt-CLIENT in the run's folder")] = "",
) -> None:
    """Adapt the model of a finished run to a new client.

    BatchNorm is fitted to the client's unlabelled data. The metrics before and after are shown.
    """
    from fl_bn.federation.adaptation import HOW
    from fl_bn.run import adapt as adapting
    from fl_bn.run.assembly import limit_threads, task
    from fl_bn.run.device import device

    try:
        config = adapting.read_config(model)
        limit_threads(config.threads)
        run = adapting.read_run(model)
        chosen = adapting.ways(run, how)
        client = adapting.newcomer(config, domain, data).drawn(samples, seed)
        of = task(config, client.test.y)
        plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in client.name)
        folder = Path(output) if output else model / f"adapt-{plain}"
        adapting.check_new(folder)
        outcomes = adapting.adapt(run, client, chosen, batch_size, device(config, {"device": "auto"}), of)
    except (ValueError, FileNotFoundError, ImportError) as error:
        raise refused(error) from error
    adapting.write(outcomes, client, config, folder)
    unit = " (%)" if of.scale() == 100 else ""
    shown = Table("how", f"before{unit}", f"after{unit}", "", title=f"{config.method}: {client.name}, {len(client.test)} test samples")
    for outcome in outcomes:
        shown.add_row(outcome.how, _shown(outcome.before), _shown(outcome.after), outcome.note)
    console = Console()
    console.print(shown)
    if client.seen:
        console.print(f"beware: the run was trained on {client.name}, so this client is not new to it (hold-out removes a domain)")
    for reason in filter(None, map(run.refusal, HOW if how.strip() == "all" else [])):
        console.print(f"left out: {reason}", highlight=False)
    console.print(f"adaptation.csv, adaptation.png and the models: {folder}", highlight=False, soft_wrap=True)


def _shown(state: MetricState | None) -> str:
    from fl_bn.run.pictures import in_table

    return "unknown" if state is None else in_table(state.task, state[state.task.metric])
