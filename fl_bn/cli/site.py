"""``fl-bn kit``, ``start``, ``register`` and ``submit``: what people type. Imports are inside the commands, since torch takes seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

kit = typer.Typer(no_args_is_help=True, help="Certificates, keys and one folder per machine, for running on separate machines.")

ServerArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="the server's folder of the kit: kit/server")]
ControlOption = Annotated[str, typer.Option("--control", metavar="HOST:PORT", help="the SuperLink's Control API, if not as in server.toml")]


@kit.command()
def create(
    superlink: Annotated[str, typer.Option(metavar="HOST", help="the name or address by which sites reach the server")],
    sites: Annotated[str, typer.Option(metavar="A,B,C", help="names of the sites; the order gives each its partition-id")],
    output: Annotated[Path, typer.Option(help="folder that is made; keys in it are never overwritten")] = Path("kit"),
    exchange_host: Annotated[str, typer.Option(metavar="HOST", help="by which they reach FedTAN's exchange; default: the same")] = "",
    also: Annotated[str, typer.Option(metavar="NAME,IP", help="further names and addresses for the server's certificate")] = "",
    days: Annotated[int, typer.Option(help="validity of the server's certificate")] = 825,
    fleet_port: Annotated[int, typer.Option(help="where sites connect")] = 9092,
    exchange_port: Annotated[int, typer.Option(help="where FedTAN's exchange listens")] = 9095,
) -> None:
    """Makes a kit: an authority, the server's folder, and one folder per site."""
    from fl_bn.site.kit import KitError, Plan
    from fl_bn.site.kit import create as make

    try:
        make(Plan(superlink, _split(sites), exchange_host, _split(also), days, fleet_port, exchange_port), output)
    except (KitError, OSError) as error:
        raise _refused(error, 2) from error
    typer.echo(
        f"{output}: read {output / 'README.md'} first. Keys are in authority/, server/ and sites/*/: each belongs to one machine only."
    )


@kit.command()
def verify(folder: Annotated[Path, typer.Argument(help="a kit, its server folder, or one of its sites")]) -> None:
    """Whether certificates, keys, modes and TOML files fit together: one line per check; exit code 1 if one fails."""
    from fl_bn.site.verify import verify as checks_of

    checks = checks_of(folder.absolute())
    for check in checks:
        typer.echo(str(check))
    failed = sum(not check.ok for check in checks)
    typer.echo(f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed")
    if failed:
        raise typer.Exit(1)


def start(
    folder: Annotated[Path, typer.Argument(help="kit/server or kit/sites/NAME")],
    show: Annotated[bool, typer.Option("--print", help="only show what would run")] = False,
) -> None:
    """Runs this machine's part of the deployment, and keeps it running until Ctrl-C or SIGTERM."""
    from fl_bn.site.commands import commands, prepare
    from fl_bn.site.folders import FolderError, read_folder
    from fl_bn.site.supervisor import AlreadyRunning, supervise

    try:
        read = read_folder(folder)
        if show:
            typer.echo("\n".join(str(command) for command in commands(read)))
            return
        prepare(read)
        supervise(commands(read), read.logs)
    except (FolderError, AlreadyRunning, OSError, ValueError) as error:
        raise _refused(error, 2) from error


def register(folder: ServerArgument, control: ControlOption = "") -> None:
    """Tells a running SuperLink the sites' public keys; `fl-bn start` does it, too. Those it knows already stay as they are."""
    from fl_bn.site.control import ControlError, register_sites
    from fl_bn.site.folders import FolderError, ServerFolder

    try:
        for site, new in register_sites(ServerFolder.read(folder), control):
            typer.echo(f"{site}: {'registered' if new else 'was registered already'}")
    except (FolderError, ControlError, OSError) as error:
        raise _refused(error, 1) from error


def submit(
    folder: ServerArgument,
    run_config: Annotated[str, typer.Option("--run-config", help="keys to override: \"rounds=10 method='hbn'\"")] = "",
    control: ControlOption = "",
) -> None:
    """Submits a run to the deployed sites, shows its log, and exits with 1 if it does not complete."""
    from fl_bn.run.config import ConfigError
    from fl_bn.site.control import ControlError
    from fl_bn.site.folders import FolderError, ServerFolder
    from fl_bn.site.submit import submit as run

    try:
        completed = run(ServerFolder.read(folder), run_config, control, lambda line: print(line, flush=True))
    except (ConfigError, FolderError) as error:
        raise _refused(error, 2) from error
    except (ControlError, OSError) as error:
        raise _refused(error, 1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if not completed:
        print("the run did not complete: the log above says why; server/logs/serverapp.log has all of it", file=sys.stderr)
        raise typer.Exit(1)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _refused(error: Exception, code: int) -> typer.Exit:
    Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False, soft_wrap=True)
    return typer.Exit(code)
