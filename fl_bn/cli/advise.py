"""Define the command ``fl-bn advise``, which imports torch only when it runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fl_bn.cli.refusal import refused
from fl_bn.cli.sweep import JobsOption, RunConfigOption, compared

PILOT_ROUNDS, PILOT_SHARE = 10, 0.2  # the fewest rounds of a pilot run, and the share of training samples that it is tested on
TABLE_MODEL = "mlp"  # the network for tables, unless the run config names one
BEST = 3  # how many methods of the map a pilot tries beside plain BatchNorm
SHOWN = {
    "clients": "clients", "middle": "samples of a client", "smallest": "of the smallest client", "largest": "of the largest client",
    "classes": "classes of a client", "label_skew": "label skew", "distance": "distance of features",
    "by_labels": "of which labels and chance explain", "batch_size": "batch size", "participation": "participation",
    "local_steps": "local steps",
}  # fmt: skip
"""Attribute of ``Measured`` -> its name in the table."""
TRAINED = """Your network is pre-trained, unlike the table's. Of one we fine-tuned at four sites, method='fixbn' freeze-after=0
led on photographs, not on digits: compare fedbn (docs/how-to/fine-tune.md)."""
UNTRAINED = "Is your network pre-trained? Then give its model-weights: the table is of new networks."


def advise(
    data: Annotated[
        list[str] | None,
        typer.Argument(help="files or folders (of several, each is a client), a data set's name, or package.module:function"),
    ] = None,
    pilot: Annotated[bool, typer.Option("--pilot", help="compare the best methods in a tenth of the rounds")] = False,
    jobs: JobsOption = 0,
    output: Annotated[str, typer.Option(help="folder of the pilot. Default: runs/advise-<time>")] = "",
    run_config: RunConfigOption = "",
) -> None:
    """Advise which method suits your clients.

    It measures how your clients differ, and prints how accurate each method was on
    the most similar clients we know. With --pilot, the best methods are compared on
    your clients in short runs. Test data take no part.
    """
    from fl_bn.app.advise.measure import measure
    from fl_bn.app.advise.regimes import BASELINE, load, nearest
    from fl_bn.app.config import ConfigError
    from fl_bn.app.usage import Usage

    console = Console()
    try:
        if (jobs or output) and not pilot:
            raise ConfigError("--jobs and --output need --pilot")
        keys = _keys(",".join(data or ()), run_config)
        use = Usage()
        config = use.config(keys)
        measured = measure(config)
        regime = nearest(measured, load())
        table = Table("", "your clients", regime.name, title=f"{config.dataset}: {config.clients} clients, {measured.skew}")
        for name, shown in SHOWN.items():
            table.add_row(shown, *(f"{getattr(of, name):.4g}" for of in (measured, regime.measured)))
        console.print(table)
        table = Table("method", "accuracy (%)", "points above plain BatchNorm", title=f"{regime.problem}: what we measured")
        allowed = []
        for name in regime.methods:
            try:
                use.config({**keys, "method": name})
            except ConfigError as error:
                table.add_row(name, "", f"cannot run: {error}")
            else:
                allowed.append(name)
                table.add_row(name, f"{regime.mean(name):.1f}", regime.gain(name))
        use.check(keys)
        console.print(table, TRAINED if config.model_weights else UNTRAINED)
        if pilot:
            folder = Path(output or f"runs/advise-{datetime.now():%Y%m%d-%H%M%S}")
            rounds = min(config.rounds, max(PILOT_ROUNDS, config.rounds // 10))
            short = {**keys, "rounds": rounds, "validation-share": config.validation_share or PILOT_SHARE}
            if config.freeze_after > 0:  # at the same share of the run
                short["freeze-after"] = max(1, config.freeze_after * rounds // config.rounds)
            best = [name for name in allowed if name != BASELINE][:BEST]
            if compared(",".join([BASELINE, *best]), 1, short, folder, jobs):
                raise typer.Exit(1)
    except (ConfigError, FileNotFoundError, ImportError) as error:
        raise refused(error) from error


def _keys(data: str, run_config: str) -> dict[str, Any]:
    """Return the run-config keys of the user's run, with the data that the argument names.

    ``ConfigError``: argument and run config both name data, or a method is given.
    """
    from fl_bn.app.config import ConfigError
    from fl_bn.app.overrides import parse_overrides
    from fl_bn.data.dataset import named

    keys = parse_overrides(run_config)
    if "method" in keys:
        raise ConfigError(f"advise looks at every method, but got method={keys['method']!r}: leave it out")
    if not data:
        return keys
    if twice := [key for key in ("dataset", "data-path") if key in keys]:
        raise ConfigError(f"the data are named twice, as {data!r} and with {twice[0]}={keys[twice[0]]!r}: leave one of them out")
    dataset, path = named(data)
    keys |= {"dataset": dataset, **({"data-path": path} if path else {})}
    return {"model": TABLE_MODEL, **keys} if dataset == "csv" else keys
