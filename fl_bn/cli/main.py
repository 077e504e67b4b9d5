"""Define the command ``fl-bn``, with the commands that train, compare and look at models."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from fl_bn.cli.advise import advise
from fl_bn.cli.data import data
from fl_bn.cli.doctor import doctor
from fl_bn.cli.new import new
from fl_bn.cli.refusal import Commands, refused
from fl_bn.cli.sweep import compare, report, sweep
from fl_bn.cli.trained import adapt, recalibrate
from fl_bn.support.extras import DEPLOYMENT, lacking, need
from fl_bn.support.imports import without_gc

if TYPE_CHECKING:
    from fl_bn.app.config import RunConfig
    from fl_bn.federation.engines.workers import Workers

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

TRAIN, COMPARE, LOOK, MODEL, DEPLOY = "Train", "Compare", "Look first", "With a trained model", "Separate machines"
KEYED = ("run", "resume", "compare", "sweep", "advise", "doctor", "layers", "adapt", "recalibrate")  # find functions in the user's folder
DEPLOYED = ("kit", "start", "register", "submit", "status", "abort", "audit")  # the commands of fl_bn_site


class AllCommands(Commands):
    """Add the commands of ``fl_bn_site`` to those of this package.

    It is imported only for its own commands, or for the help. Without the extra
    ``deployment``, the help does not list them, and each says what to install.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands that can be used in this installation."""
        return [*super().list_commands(ctx), *(() if lacking("a deployment", *DEPLOYMENT) else DEPLOYED)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command ``cmd_name``, if there is such a one."""
        if cmd_name in KEYED:
            sys.path.insert(0, os.getcwd())
        if cmd_name not in DEPLOYED:
            return super().get_command(ctx, cmd_name)
        need(f"fl-bn {cmd_name}", *DEPLOYMENT)
        return _of_deployments()[cmd_name]


@cache
def _of_deployments() -> Mapping[str, Any]:
    from fl_bn_site.cli import add_to

    commands = typer.Typer()
    add_to(commands, DEPLOY)
    return typer.main.get_group(commands).commands


app = typer.Typer(
    cls=AllCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Batch normalisation that works in federated learning.",
)
app.command(rich_help_panel=TRAIN)(new)
console = Console()

Verbose = Annotated[bool, typer.Option("--verbose", help="print what becomes of each kind of tensor, and a longer line per round")]
CHECKPOINT_EVERY = 5  # rounds between the checkpoints of fl-bn run, from which fl-bn resume goes on
RunConfigOption = Annotated[str, typer.Option("--run-config", help="keys to override, as for flwr run: \"rounds=10 method='hbn'\"")]


class WithKeys(TyperCommand):
    """Add frequent run-config keys to the help of a command, read only when it is shown."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. A key without ``--run-config`` at first raises ``BadParameter``."""
        if args and re.match(r"[a-z-]+=", args[0]):
            raise typer.BadParameter(f'keys follow --run-config: fl-bn {ctx.info_name} --run-config "{" ".join(args)}"', ctx)
        return list(super().parse_args(ctx, args))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, and below it a line per key."""
        from fl_bn.app.config import RunConfig
        from fl_bn.app.keys import often_used

        super().format_help(ctx, formatter)
        keys = Table("key", "default", "meaning", box=None, title="Keys that are often used (all: fl-bn config)", title_justify="left")
        for row in often_used(RunConfig.keys()):
            keys.add_row(*row)
        console.print(keys, highlight=False)


@app.command(rich_help_panel=TRAIN, cls=WithKeys)
def run(run_config: RunConfigOption = "", verbose: Verbose = False) -> None:
    """Train once in this process, without Ray.

    The ServerApp, the ClientApp, the run config and the files are those of `flwr
    run .`. Ctrl-C leaves a folder with all results so far. `fl-bn resume` continues
    from the last checkpoint in it. There is a checkpoint every 5 rounds, unless the
    key checkpoint-every says otherwise.
    """
    from fl_bn.app.errors import ConfigError
    from fl_bn.app.overrides import parse_overrides

    try:
        values = parse_overrides(run_config)
        with _started(values.get("workers", 0)) as workers:
            with without_gc():
                from fl_bn.app.config import RunConfig
            config = RunConfig.from_mapping(values)
            if config.output and "checkpoint-every" not in values:
                config = replace(config, checkpoint_every=CHECKPOINT_EVERY)
            _run(config, verbose, workers)
    except (ConfigError, OSError) as error:
        raise refused(error) from error


@contextmanager
def _started(count: object) -> Iterator[Workers | None]:
    """Start ``count`` worker processes, which import torch at the same time as this process.

    The number is not checked yet. Below 2, or if there may not be so many, none are
    started.
    """
    from fl_bn.federation.engines.workers import MOST_WORKERS, Workers

    if type(count) is not int or not 2 <= count <= MOST_WORKERS:
        yield None
        return
    with closing(Workers(count)) as workers:
        workers.load("fl_bn.app.client")
        yield workers


@app.command(rich_help_panel=TRAIN)
def resume(
    folder: Annotated[Path, typer.Argument(help="the run's folder, e.g. runs/NAME; for a deployed run, the server's folder: kit/server")],
    name: Annotated[str, typer.Argument(metavar="[RUN]", help="the name of a deployed run; default: that of the newest checkpoint")] = "",
    verbose: Verbose = False,
    control: Annotated[str, typer.Option(metavar="HOST:PORT", help="for a deployed run: the SuperLink's Control API")] = "",
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="for a deployed run: the submitter's key")] = None,
    own: Annotated[Path | None, typer.Option("--app", metavar="FOLDER", help="for a deployed run: the folder of its modules")] = None,
) -> None:
    """Resume an interrupted run from its last checkpoint, with the run config in its folder."""
    if (folder / "server.toml").exists():
        need("a run on separate machines", *DEPLOYMENT)
        from fl_bn_site.cli import resume as go_on

        go_on(folder, name, control, key, own)
        return
    from fl_bn.app.checkpoints import config_to_resume
    from fl_bn.app.errors import ConfigError

    try:
        config = config_to_resume(folder)
    except ConfigError as error:
        raise refused(error) from error
    _run(config, verbose)


def _run(config: RunConfig, verbose: bool, workers: Workers | None = None) -> None:
    with without_gc():
        from fl_bn.app.config import ConfigError
        from fl_bn.app.console import shown
        from fl_bn.bn.kinds import Unconvertible
        from fl_bn.flower import RunFailed, run_in_process
        from fl_bn.support.durable import Damaged

    try:
        with shown(verbose):
            run_in_process(config.to_mapping(), workers=workers)
    except (ConfigError, Damaged, Unconvertible, RunFailed, OSError) as error:
        raise refused(error) from error
    except KeyboardInterrupt:  # the log says already where the results are, and how to resume
        raise typer.Exit(130) from None


@app.command(rich_help_panel=LOOK)
def layers(
    model: Annotated[str, typer.Argument(help="name of a model (docs/config.md), or package.module:function")],
    method: Annotated[str, typer.Option(help="name of a method")] = "fedavg",
    classes: Annotated[int, typer.Option(help="number of classes, or of outputs")] = 10,
    channels: Annotated[int, typer.Option(help="channels of the images; of a table: its inputs, with --image-size 1")] = 3,
    image_size: Annotated[int, typer.Option(help="pixels along each side")] = 32,
    buffers: Annotated[str, typer.Option(help="roles of buffers, as in the run-config key buffers")] = "",
    tensors: Annotated[bool, typer.Option("--tensors", help="also print a line per tensor: name, role, shape, dtype, place")] = False,
) -> None:
    """Show which normalisation layers a model has, and what a method does with each of their tensors.

    The last line is the signature of the model, which must be the same at the
    server and at all clients.
    """
    from fl_bn import convert
    from fl_bn.bn.roles import parse_buffer_roles, set_buffer_roles
    from fl_bn.federation.composition import describe_layers, looks_like_norm, no_batch_norm
    from fl_bn.federation.network import Network
    from fl_bn.methods import METHODS
    from fl_bn.models import build
    from fl_bn.support.names import check_name, escaped
    from fl_bn.support.user_code import import_extensions

    try:
        import_extensions()
        check_name("method", method, METHODS)
        source = set_buffer_roles(build(model, classes=classes, channels=channels, image_size=image_size), parse_buffer_roles(buffers))
        converted = convert(source, METHODS[method]())
        for line in describe_layers(source, converted, METHODS[method]()):
            console.print(line, highlight=False)
        for line in map(escaped, filter(None, [no_batch_norm(source, METHODS[method]()), *looks_like_norm(source)])):
            console.print(line, highlight=False)
        network = Network(converted, METHODS[method]())
        for name, tensor in converted.state_dict().items() if tensors else ():
            kind = f"{network.locality.role[name].value}  {tuple(tensor.shape)}  {str(tensor.dtype).removeprefix('torch.')}"
            typer.echo(f"{escaped(name)}  {kind}  {network.locality.place[name].value}")
        console.print(f"signature {network.signature}", highlight=False)
    except ValueError as error:
        raise refused(error) from error


@app.command(rich_help_panel=LOOK)
def config(
    toml: Annotated[bool, typer.Option("--toml", help="print the defaults as \\[tool.flwr.app.config] of pyproject.toml")] = False,
) -> None:
    """Print every key of the run config: its default, its values and its meaning.

    Keys of installed packages that add methods are included.
    """
    from fl_bn.app.config import ConfigError, RunConfig
    from fl_bn.app.keys import defaults, described

    try:
        keys = RunConfig.keys()
    except ConfigError as error:
        raise refused(error) from error
    typer.echo(defaults(keys) if toml else described(keys))


OF_OTHER_FILES: Mapping[str, Sequence[Callable[..., None]]] = {
    COMPARE: (advise, compare, sweep, report),
    MODEL: (adapt, recalibrate),
    LOOK: (doctor,),
}
for _panel, _commands in OF_OTHER_FILES.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
app.add_typer(data, name="data", rich_help_panel=LOOK)

if __name__ == "__main__":
    app()
