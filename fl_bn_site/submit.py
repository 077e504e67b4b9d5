"""Submit a run to the deployed sites, and show its log: ``fl-bn submit`` and ``fl-bn resume``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fl_bn.app.checkpoints import CONFIG, FOLDER, LOCK, config_to_resume
from fl_bn.app.config import ConfigError, RunConfig
from fl_bn.app.overrides import parse_overrides
from fl_bn.support.flower_config import PROGRESS, Scalar, flower_config
from fl_bn_site.control import SILENCE, Control, ControlError, control_of
from fl_bn_site.folders import FolderError, ServerFolder, in_use
from fl_bn_site.launch import complete_config, launch
from fl_bn_site.membership import check_expiry
from fl_bn_site.own_config import own_config
from fl_bn_site.project import build
from fl_bn_site.signing import KEY, OF_SERVER
from fl_bn_site.submitters import VARIABLE, Package, key_file, read_key, read_signed, write_signed

COMPLETED = "finished:completed"
LOOK = 1.0  # seconds between two looks at the status of the run
# run-config keys that are not taken from a run to resume: they follow from the server's folder, and a run is signed anew
OF_FOLDER = ("output", "client-nodes", "name", KEY)
Say = Callable[[str], None]


def run_config(server: ServerFolder, overrides: str) -> dict[str, Scalar]:
    """Return the run config with which ``fl-bn submit`` would submit a run.

    It has the user's keys, and other keys that follow from the server's folder, such as ``clients`` and ``output``.

    Args:
        server: The server's folder.
        overrides: The user's keys, such as ``rounds=10 method='hbn'``.

    Raises:
        ConfigError: A key of the user is unknown or has no effect, or a value is out of range.
    """
    return _complete(server, parse_overrides(overrides))


UNSIGNED = (
    'the run is not signed, so sites with allow-code = "signed" refuse it: give the submitter\'s key by --key or '
    f"{VARIABLE} (`fl-bn kit submitter` makes one)"
)


def submit(
    server: ServerFolder,
    overrides: str,
    address: str = "",
    say: Say = print,
    key: Path | None = None,
    own: Path | None = None,
    sites: str = "",
) -> bool:
    """Submit a run, and follow its log to the end.

    Args:
        server: The server's folder.
        overrides: The user's keys of the run config, such as ``rounds=10 method='hbn'``.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.
        say: Called with each message, and with each line of the log.
        key: The submitter's key, which signs the run; None: the key that ``submitters.key_file`` finds.
        own: The folder of the user's own app or modules, as for ``project.build``; None: fl-bn's app alone.
        sites: The names of the sites that take part, separated by commas; empty: all.

    Returns:
        Whether the run completed.

    Raises:
        ConfigError: The run config is wrong.
        NameTaken: Another run has the name.
        FolderError: A file of the kit or of the project is wrong.
        ControlError: The SuperLink does not answer, or the run was refused. The message has the reason.
    """
    package = _package(server, key, say, own)
    given, fresh = _named(server, overrides, package)
    return _carry_out(server, given, address, say, fresh, package, own, sites)


def sign_only(server: ServerFolder, overrides: str, file: Path, key: Path | None = None, own: Path | None = None) -> str:
    """Sign a run, and write it to a file for ``submit_signed``. This machine need not be the server's.

    Args:
        server: The server's folder, or a copy of it. Its keys are not needed.
        overrides: The user's keys of the run config, as for ``submit``.
        file: The file to write.
        key: The submitter's key; None: the key that ``submitters.key_file`` finds.
        own: As for ``submit``.

    Returns:
        The name of the run.

    Raises:
        ConfigError: The run config is wrong.
        FolderError: There is no key, or a file of the kit or of the project is wrong.
    """
    if (signs := key_file(server, key)) is None:
        raise FolderError(f"there is no key to sign with: give --key or {VARIABLE} (`fl-bn kit submitter` makes one)")
    package = Package(build(server, own), read_key(signs))
    given, _ = _named(server, overrides, package)
    if unsigned := sorted(given.keys() & set(OF_SERVER)):
        raise ConfigError(f"{', '.join(unsigned)}: no signature covers what the server fills in: give --sites with --signed instead")
    write_signed(file, package.signed(complete_config(server, given)), package)
    return str(given.get("resume") or given["name"])


def submit_signed(server: ServerFolder, file: Path, address: str = "", say: Say = print, sites: str = "") -> bool:
    """Submit, unchanged, a run that ``sign_only`` wrote to a file, and show its log, as ``submit`` does.

    Args:
        server: The server's folder.
        file: The file that ``sign_only`` wrote.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.
        say: Called with each message, and with each line of the log.
        sites: As for ``submit``.

    Returns:
        Whether the run completed.

    Raises:
        ConfigError: The run config does not fit this server.
        NameTaken: Another run has the name.
        FolderError: A file cannot be read.
        ControlError: The SuperLink does not answer, or the run was refused. The message has the reason.
    """
    signed, package = read_signed(file)
    RunConfig.from_mapping({"name": signed.get("name", "")} if package.own else _complete(server, signed))
    return _carry_out(server, signed, address, say, False, package, sites=sites)


def _named(server: ServerFolder, overrides: str, package: Package) -> tuple[dict[str, Scalar], bool]:
    """Return the user's run-config keys and the run's name in one dict, and whether this function made the name."""
    if package.own:
        return own_config(package, overrides, datetime.now())
    given = parse_overrides(overrides)
    checked = RunConfig.from_mapping(_complete(server, given))
    fresh = not checked.name and not checked.resume
    if fresh:
        given["name"] = checked.name_at(datetime.now())  # in the run config, by which the SuperLink's runs are found again
    return given, fresh


def _package(server: ServerFolder, key: Path | None, say: Say, own: Path | None = None) -> Package:
    file = key_file(server, key)
    if file is None:
        say(UNSIGNED)
    return Package(build(server, own), read_key(file) if file else None)


def resume(
    server: ServerFolder,
    name: str,
    address: str = "",
    say: Say = print,
    key: Path | None = None,
    own: Path | None = None,
) -> bool:
    """Resume a run from its last checkpoint, with the run config in its folder, and show the log, as ``submit`` does.

    Args:
        server: The server's folder.
        name: The name of the run; empty: the run with the newest checkpoint.
        address: The address of the Control API, HOST:PORT; empty: ``control`` in server.toml.
        say: Called with each message, and with each line of the log.
        key: The submitter's key, which signs the run anew; None: the key that ``submitters.key_file`` finds.
        own: The folder of the user's own modules that was submitted with the run; None: there was no such folder.

    Returns:
        Whether the run completed.

    Raises:
        ConfigError: There is no run to resume, or the run belongs to a user's own Flower app.
        FolderError: A file of the kit or of the project is wrong.
        ControlError: The SuperLink does not answer, or the run was refused. The message has the reason.
    """
    name = name or _newest(server)
    if _is_of_own_app(server, name, address):
        raise ConfigError(f"{name} cannot be resumed: {AGAIN}")
    known = config_to_resume(server.results / name, deployed=True).to_mapping()
    given = {key: value for key, value in known.items() if key not in OF_FOLDER}
    if not given["client-names"]:
        del given["client-names"]
    package = _package(server, key, say, own)
    if package.own:
        raise ConfigError(f"--app {own} is a Flower app, but {name} is a run of fl-bn's own app: give a folder of modules, or no --app")
    return _carry_out(server, given, address, say, False, package, own)


def _is_of_own_app(server: ServerFolder, name: str, address: str) -> bool:
    """Return whether a run belongs to a user's own Flower app. Such a run has no config.toml, and the SuperLink knows its app."""
    if (server.results / name / CONFIG).exists():
        return False
    try:
        with control_of(server, address) as control:
            return any(run.own for run in control.runs() if name in (run.name, str(run.id)))
    except ControlError:
        return (server.results / name / PROGRESS).exists()


AGAIN = "a run of a Flower app of your own is not resumed by fl-bn after an early end, so submit it again"


def how_to_go_on(server: ServerFolder, name: str, own: bool = False, modules: Path | None = None) -> str:
    """Return a text that says what to do after a run has ended early: the command that resumes it or begins it anew.

    Args:
        server: The server's folder.
        name: The name of the run.
        own: Whether the run belongs to a user's own Flower app.
        modules: The folder of modules that was submitted with the run; None: there was no such folder, or it is not known.
    """
    if own:
        again = f"fl-bn submit {shlex.quote(str(server.path))} --app FOLDER"
        return f"the output of `fl-bn start` says why it ended; {AGAIN}: {again}"
    run = server.results / name
    rounds = sorted(int(path.stem.removeprefix("round-")) for path in (run / FOLDER).glob("round-*.safetensors"))
    if rounds:
        words = ["fl-bn", "resume", str(server.path), name, *(("--app", str(modules)) if modules else ())]
        return f"resume it from its checkpoint after round {rounds[-1]}: {shlex.join(words)}"
    where = f"the output of `fl-bn start` and {run} say" if run.exists() else "the output of `fl-bn start` says"
    again = f'fl-bn submit {shlex.quote(str(server.path))} --run-config "..."'
    return f"it has no checkpoint to resume from. {where} why it ended. Begin it anew: {again}"


def _complete(server: ServerFolder, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    config = complete_config(server, given)
    RunConfig.from_mapping(config)
    try:
        flower_config(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return config


def _newest(server: ServerFolder) -> str:
    runs = sorted(server.results.glob(f"*/{FOLDER}/round-*.safetensors"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ConfigError(f"no run in {server.results} has a checkpoint to resume from: submit runs with checkpoint-every above 0")
    return runs[-1].parent.parent.name


def _carry_out(
    server: ServerFolder,
    given: Mapping[str, Any],
    address: str,
    say: Say,
    rename: bool,
    package: Package,
    modules: Path | None = None,
    sites: str = "",
) -> bool:
    if warning := check_expiry(server):
        say(warning)
    with control_of(server, address) as control:
        if run := given.get("resume"):
            wait_for_the_end(control, server.results / str(run), say)
        name, run, sites = launch(server, {**given, **_of(server, sites)}, control, package, rename, say)
        say(f"run {run} is submitted to {control.address} as {name}{f', for sites {sites}' if sites else ''}")
        if package.own:
            say(f"if it is interrupted: {AGAIN}")
        try:
            status = _follow(control, run, say)
        except KeyboardInterrupt:
            say(f"{name} goes on; only this log has ended. To end the run:")
            words = ["fl-bn", "abort", str(server.path), name, *(("--control", address) if address else ())]
            say(f"  {shlex.join(words)}")
            raise
    say(f"run {run}: {status}")
    if status != COMPLETED:
        say(how_to_go_on(server, name, package.own, modules))
    return status == COMPLETED


def _of(server: ServerFolder, sites: str) -> dict[str, Scalar]:
    """Return the run-config keys of a run in which only ``sites`` take part: names, separated by commas; empty: all sites."""
    names = [name.strip() for name in sites.split(",")] if sites else []
    if wrong := [name for name in names if name not in server.sites or names.count(name) > 1]:
        file = server.path / server.file
        raise FolderError(f"--sites: {file} has no site {wrong[0]!r}, or it is given twice: expected, each once, {', '.join(server.sites)}")
    return {"clients": len(names), "client-names": ",".join(names)} if names else {}


def wait_for_the_end(control: Control, folder: Path, say: Say) -> None:
    """Wait until the run in ``folder`` is over, so that it can be resumed.

    Flower takes a minute or two to notice that its server died. It may have ended a run whose ServerApp still looks for the
    SuperLink, and still has the folder.
    """
    said = False
    while in_use(folder / LOCK) or any(run.name == folder.name and not run.status.startswith("finished") for run in control.runs()):
        if not said:
            say(f"{folder.name} waits, since Flower or its ServerApp has not ended it yet")
        said = True
        time.sleep(LOOK)


def _follow(control: Control, run: str, say: Say) -> str:
    """Call ``say`` once with each line of a run's log, until the run has ended.

    If the SuperLink is restarted meanwhile, the log continues after the last line seen.

    Args:
        control: The SuperLink.
        run: Flower's id of the run.
        say: Called with each line.

    Returns:
        The last status of the run, such as ``finished:completed``.

    Raises:
        ControlError: The SuperLink has not answered for ``SILENCE`` seconds.
    """
    shown, last_answer, status, problem = 0, time.monotonic(), "", ""
    while True:
        for number, line in enumerate(filter(None, _lines(control, run))):
            if number >= shown:
                say(line)
                shown = number + 1
        if status.startswith("finished"):
            return status
        try:
            status = control.status(run)
        except ControlError as error:
            if time.monotonic() - last_answer > SILENCE:
                raise
            if str(error) != problem:
                problem = str(error)
                say(f"{error}; trying again for up to {SILENCE:.0f} s")
        else:
            if problem:
                say(f"the SuperLink at {control.address} answers again")
            last_answer, problem = time.monotonic(), ""
        if not status.startswith("finished"):
            time.sleep(LOOK)


def _lines(control: Control, run: str) -> Iterator[str]:
    """Yield the lines of a run's log, until Flower's command ends. It may hang after the connection broke: then until the run's end."""
    for line in control.log(run):
        yield line
        if not line:
            with suppress(ControlError):
                if control.status(run).startswith("finished"):
                    return
