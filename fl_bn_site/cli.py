"""Define the commands of a deployment: ``fl-bn kit``, ``start``, ``register``, ``submit`` and others.

Each command imports its modules only when it runs, since an import of torch takes seconds.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fl_bn.cli.refusal import refused
from fl_bn_site.audit_command import audit
from fl_bn_site.days import MOST_DAYS, SERVER_DAYS

if TYPE_CHECKING:
    from fl_bn_site.folders import ServerFolder

kit = typer.Typer(no_args_is_help=True, help="Certificates, keys and one folder per machine, for running on separate machines.")

ServerArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="the server's folder of the kit: kit/server")]
SiteArgument = Annotated[str, typer.Argument(metavar="NAME", help="the site's name")]
PublicKeyOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="the site.pub of a key pair that the site made itself and sent; default: make a key pair here"),
]
SiteFolderOption = Annotated[
    Path | None, typer.Option("--output", metavar="FOLDER", help="the site's folder; default: sites/NAME beside FOLDER")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="the run's name, or its id")]
ControlOption = Annotated[
    str, typer.Option("--control", metavar="HOST:PORT", help="address of the SuperLink's Control API; default: control in server.toml")
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key", metavar="FILE", help="the submitter's key, which signs the run; default: $FL_BN_SUBMITTER_KEY, or the kit's own"),
]


@kit.command()
def create(
    superlink: Annotated[str, typer.Option(metavar="HOST", help="the name or address by which sites reach the server")],
    sites: Annotated[str, typer.Option(metavar="A,B,C", help="names of the sites; their order gives each its partition-id: 0, 1, ...")],
    output: Annotated[Path, typer.Option(help="the folder to make; keys in it are never overwritten")] = Path("kit"),
    exchange_host: Annotated[
        str, typer.Option(metavar="HOST", help="the name or address by which sites reach FedTAN's exchange; default: as --superlink")
    ] = "",
    also: Annotated[str, typer.Option(metavar="NAME,IP", help="further names and addresses for the server's certificate")] = "",
    days: Annotated[int, typer.Option(help="days for which the server's certificate is valid")] = SERVER_DAYS,
    fleet_port: Annotated[int, typer.Option(help="the port to which sites connect")] = 9092,
    exchange_port: Annotated[int, typer.Option(help="the first port of FedTAN's exchange")] = 9095,
    submitters: Annotated[
        str,
        typer.Option(metavar="A,B", help="who may sign runs: a name (makes a key pair), or a file NAME.pub with a submitter's public key"),
    ] = "submitter",
) -> None:
    """Make a kit: an authority, the server's folder, and one folder per site."""
    from fl_bn_site.kit import KitPlan
    from fl_bn_site.kit import create as make

    with _refusals():
        plan = KitPlan(superlink, _split(sites), exchange_host, _split(also), days, fleet_port, exchange_port, _split(submitters))
        make(plan, output)
    typer.echo(
        f"{output}: read {output / 'README.md'} first. Keys are in authority/, server/, sites/*/ and submitters/*/: "
        "each belongs to one machine, or one person, only."
    )


@kit.command("add-site")
def add_site(
    server: ServerArgument,
    name: SiteArgument,
    public_key: PublicKeyOption = None,
    output: SiteFolderOption = None,
) -> None:
    """Let another site take part. The server and its runs go on meanwhile, and no other site changes."""
    from fl_bn_site.membership import add_site as add

    with _refusals(), _alone(server) as folder:
        place = output or folder.path.parent / "sites" / name
        changed = add(folder, name, public_key, place)
        typer.echo(f"{name} is in {changed.path / changed.file}; runs from now on have {len(changed.sites)} clients")
        if public_key is None:
            typer.echo(f"{place}: send this folder to {name} over a secret channel; its GUIDE.md says how to go on")
        _tell_superlink(changed)


@kit.command("remove-site")
def remove_site(server: ServerArgument, name: SiteArgument) -> None:
    """Shut a site out at once. It gets no further message, not even of a run that has begun."""
    from fl_bn_site.membership import remove_site as remove

    with _refusals(), _alone(server) as folder:
        changed = remove(folder, name)
        typer.echo(f"{name} is no longer in {changed.path / changed.file}; runs from now on have {len(changed.sites)} clients")
        _tell_superlink(changed)


@kit.command()
def renew(
    server: ServerArgument,
    site: Annotated[str, typer.Option(metavar="NAME", help="renew the key of this site; default: renew the server's certificate")] = "",
    public_key: PublicKeyOption = None,
    output: SiteFolderOption = None,
    authority: Annotated[
        Path | None, typer.Option(help="the folder `authority` of the kit, which signs the server's certificate; default: beside FOLDER")
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=MOST_DAYS, help="days for which the server's certificate is valid")] = SERVER_DAYS,
    stolen: Annotated[
        bool, typer.Option("--stolen", help="the server's key was stolen: make a new authority, too, and a new ca.crt for every site")
    ] = False,
) -> None:
    """Make a new server certificate, or a new key of a site. The replaced files stay in a folder `former`."""
    from fl_bn_site.certificates import fingerprint
    from fl_bn_site.membership import days_left, renew_server, renew_site, replace_authority

    with _refusals(), _alone(server) as folder:
        if stolen and site:
            raise ValueError("--stolen and --site do different things: give only one of them")
        signs = authority or folder.path.parent / "authority"
        if site:
            made = renew_site(folder, site, public_key, output or folder.path.parent / "sites" / site)
            if made is not None:
                typer.echo(f"{made}: send this key to {site} over a secret channel; {site} has to start again with it")
            _tell_superlink(folder)
        elif stolen:
            files = replace_authority(folder, signs, days)
            typer.echo(f"{signs} has a new authority, and {folder.path} a new certificate and key; the former ones are in folders `former`")
            typer.echo(f"the fingerprint of the new ca.crt is {fingerprint(folder.authority)}; tell it to the sites by telephone")
            typer.echo(f"send {signs / 'ca.crt'} to every site, to put in the place of its own: {', '.join(folder.sites)}")
            if files:
                typer.echo(f"the sites' folders of this kit have the new ca.crt already: {', '.join(map(str, files))}")
            typer.echo("start `fl-bn start` again here, and at each site once it has the new ca.crt")
        else:
            former = renew_server(folder, signs, days)
            typer.echo(f"{folder.certificate} is valid for {days_left(folder)[1]} days; the former one is in {former}")
            typer.echo("start `fl-bn start` again here. Sites connect again, and need no new files")


@kit.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="a kit, its server folder, or one of its sites")],
    noted: Annotated[
        str, typer.Option(metavar="HASH", help="a hash that `fl-bn audit` printed earlier: a line of the log must have it")
    ] = "",
) -> None:
    """Check whether the parts of a kit fit together: certificates, keys, modes, TOML files, audit logs. Exit code 1 if not."""
    from fl_bn_site.verify import verify as findings_of

    findings = list(findings_of(folder.absolute(), noted))
    for finding in findings:
        typer.echo(str(finding))
    failed = sum(finding.status == "fail" for finding in findings)
    typer.echo(f"{failed} of {len(findings)} checks failed" if failed else f"all {len(findings)} checks passed")
    if failed:
        raise typer.Exit(1)


def start(
    folder: Annotated[Path, typer.Argument(help="kit/server or kit/sites/NAME")],
    only: Annotated[
        str, typer.Option(metavar="supernode|clientapp", help="run only this program of a site, where each program has a user of its own")
    ] = "",
) -> None:
    """Start the programs of this machine, and keep them running until Ctrl-C or SIGTERM."""
    from fl_bn_site.commands import commands, prepare
    from fl_bn_site.folders import read_folder
    from fl_bn_site.membership import check_expiry
    from fl_bn_site.supervisor import supervise

    with _refusals():
        kit_folder = read_folder(folder)
        run = commands(kit_folder, only)
        if warning := check_expiry(kit_folder):
            print(warning, file=sys.stderr, flush=True)
        supervise(run, prepare(kit_folder, only))


def register(folder: ServerArgument, control: ControlOption = "") -> None:
    """Tell a running SuperLink which sites may connect: those of server.toml, and no others.

    `fl-bn start` does this, too.
    """
    from fl_bn_site.control import register_sites

    with _refusals(), _alone(folder) as server:
        for site, outcome in register_sites(server, control):
            typer.echo(f"{site}: {outcome}")


def submit(
    folder: ServerArgument,
    run_config: Annotated[str, typer.Option("--run-config", help="keys to override: \"rounds=10 method='hbn'\"")] = "",
    control: ControlOption = "",
    key: KeyOption = None,
    own: Annotated[
        Path | None,
        typer.Option("--app", metavar="FOLDER", help="a Flower app of your own, or a folder with modules: a network, a loader, a loss"),
    ] = None,
    sites: Annotated[str, typer.Option(metavar="A,B", help="the sites that take part; default: all of server.toml")] = "",
    sign_only: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="only sign the run and write it to FILE; FOLDER may be a copy on another machine"),
    ] = None,
    signed: Annotated[Path | None, typer.Option(metavar="FILE", help="submit the run in FILE, which --sign-only wrote")] = None,
) -> None:
    """Submit a run to the deployed sites, and show its log. It goes on beside runs that are not over.

    The exit code is 1 if the run does not complete.
    """
    from fl_bn_site.submit import sign_only as write_signed
    from fl_bn_site.submit import submit as run
    from fl_bn_site.submit import submit_signed

    if signed and (sign_only or key or run_config or own):
        raise refused(ValueError("--signed submits a run unchanged: give --run-config, --key and --app when you sign it (--sign-only)"))
    if sign_only and sites:
        raise refused(ValueError("--sites is not signed: give it with --signed, on the server's machine"))
    if sign_only:
        with _refusals():
            name = write_signed(_server(folder), run_config, sign_only, key, own)
            typer.echo(f"{sign_only}: {name}, signed. On the server's machine: fl-bn submit FOLDER --signed {sign_only.name}")
        return
    if signed:
        _carry_out(lambda: submit_signed(_server(folder), signed, control, _say, sites))
        return
    _carry_out(lambda: run(_server(folder), run_config, control, _say, key, own, sites))


def resume(folder: Path, name: str, control: str, key: Path | None = None, own: Path | None = None) -> None:
    """Resume a deployed run, and show its log, as ``submit`` does.

    Args:
        folder: The server's folder.
        name: The name of the run; empty: the run with the newest checkpoint.
        control: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.
        key: The submitter's key, which signs the run anew; None: the key that ``submitters.key_file`` finds.
        own: The folder of modules that was submitted with the run; None: there was no such folder.
    """
    from fl_bn_site.submit import resume as run

    _carry_out(lambda: run(_server(folder), name, control, _say, key=key, own=own))


def _say(line: str) -> None:
    print(line, flush=True)


def _carry_out(run: Callable[[], bool]) -> None:
    with _refusals():
        try:
            completed = run()
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    if not completed:
        raise typer.Exit(1)


def abort(folder: ServerArgument, run: RunArgument, control: ControlOption = "") -> None:
    """End a run, which may take a minute. The results of its rounds so far stay."""
    from fl_bn_site.runs import abort as end

    with _refusals():
        typer.echo(end(_server(folder), run, control))


def status(
    folder: ServerArgument,
    control: ControlOption = "",
    all_runs: Annotated[bool, typer.Option("--all", help="show all runs; default: those that go on, and the last five")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for programs")] = False,
) -> None:
    """Show which sites are online, when each was last seen, and how far each run is."""
    from fl_bn_site.status import status as of
    from fl_bn_site.tables import tables_of_status, wide_console

    with _refusals():
        current = of(_server(folder), control, all_runs)
    if as_json:
        typer.echo(current.to_json())
    else:
        wide_console().print(tables_of_status(current))


def _server(folder: Path) -> ServerFolder:
    from fl_bn_site.folders import ServerFolder

    return ServerFolder.read(folder)


@contextmanager
def _alone(folder: Path) -> Iterator[ServerFolder]:
    """Read the server's folder, which no other command changes meanwhile."""
    from fl_bn_site.folders import one_at_a_time

    with one_at_a_time(_server(folder).path):
        yield _server(folder)


def _tell_superlink(server: ServerFolder) -> None:
    """Register the sites of ``server`` at its SuperLink, and print a line for each site.

    If the SuperLink does not answer, print that ``fl-bn start`` or ``fl-bn register`` will register them. If it refuses a
    key, the command fails.
    """
    from fl_bn_site.control import ControlError, register_sites

    try:
        for site, outcome in register_sites(server, wait=0.0):
            typer.echo(f"{site}: {outcome}")
    except ControlError as error:
        again = f"fl-bn register {shlex.quote(str(server.path))}"
        typer.echo(f"the SuperLink does not know of this change yet ({error}): `fl-bn start` or `{again}` reports it")


@contextmanager
def _refusals() -> Iterator[None]:
    from fl_bn_site.control import ControlError, KeyRefused
    from fl_bn_site.supervisor import AlreadyRunning

    try:
        yield
    except ValueError as error:  # ConfigError, FolderError, KitError and NameTaken are ValueErrors
        raise refused(error) from error
    except (ControlError, KeyRefused, AlreadyRunning, OSError) as error:
        raise refused(error, 1) from error


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def add_to(app: typer.Typer, panel: str) -> None:
    """Add the commands of a deployment to ``app``, under the heading ``panel`` of its help."""
    for command in (start, register, submit, status, abort, audit):
        app.command(rich_help_panel=panel)(command)
    from fl_bn_site import cli_signing

    kit.command()(cli_signing.submitter)
    kit.command()(cli_signing.trust)
    app.add_typer(kit, name="kit", rich_help_panel=panel)
