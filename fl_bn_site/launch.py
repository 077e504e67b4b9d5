"""Complete the run config of a run by what the server's folder says, and submit the run to the SuperLink."""

from __future__ import annotations

import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from fl_bn.support.flower_config import Scalar
from fl_bn_site.control import Control, ControlError, Node, nodes_of
from fl_bn_site.folders import FolderError, ServerFolder, one_at_a_time
from fl_bn_site.submitters import Package

PATIENCE = 3.0  # seconds from a run's submission that a site has to come online
WAITS = {"wait-timeout", "clients-at-start"}  # run-config keys with which a run waits for sites
FREE_DISK = 32  # MiB that must be free on the disks of the state and of temporary files before a run starts
CHECKPOINT_EVERY = 5  # rounds between checkpoints, from which fl-bn resume goes on, unless the run config has the key


class NameTaken(ValueError):
    """Signal that another run has this name, or that the run to resume is still going on."""


def complete_config(server: ServerFolder, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return ``given`` and the run-config keys that follow from the server's folder, such as ``clients`` and ``output``.

    Where ``given`` has such a key, the value in ``given`` stays.
    """
    named = [name for name in str(given.get("client-names") or "").split(",") if name]
    of_folder: dict[str, Scalar] = {
        "clients": len(named or server.sites),
        "output": str(server.results),
        "checkpoint-every": CHECKPOINT_EVERY,
    }
    return of_folder | dict(given)


def sites_of(server: ServerFolder, config: Mapping[str, Scalar]) -> list[str]:
    """Return the names of the sites that take part in a run, in the order of the clients.

    Args:
        server: The server's folder.
        config: The whole run config.

    Returns:
        The names at ``client-names``. Without such names, those of server.toml; empty where ``clients`` is not the number
        of sites.
    """
    if names := [name for name in str(config.get("client-names") or "").split(",") if name]:
        return names
    return list(server.sites) if config["clients"] == len(server.sites) else []


def with_sites(server: ServerFolder, given: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the whole run config for the keys in ``given``.

    The sites are the clients of the run. ``client-nodes`` gets the id of each site's Flower node, found by the public key.

    Raises:
        FolderError: A client of the run is not a site in server.toml any more.
        ControlError: The key of a site was not registered.
    """
    config = complete_config(server, given)
    names = sites_of(server, config)
    if missing := [name for name in names if name not in server.sites]:
        run = config.get("resume") or config.get("name")
        raise FolderError(
            f"clients of the run {run} are not sites in {server.path / server.file} any more: {', '.join(missing)}. "
            "Add them again with new keys (`fl-bn kit add-site`), or submit a new run"
        )
    if names and not config.get("client-nodes"):
        nodes = nodes_of(server, names, all_needed=bool(config.get("resume") or not config.get("min-sites")))
        config["client-nodes"] = ",".join(map(str, nodes))
        config["client-names"] = ",".join(names)
    return config


def present(
    config: Mapping[str, Scalar], control: Control, first: Future[dict[int, Node]], end: float, waits: bool, say: Callable[[str], None]
) -> dict[str, Scalar]:
    """Return the whole run config of a new run, without the sites that are offline if ``min-sites`` others are online.

    Args:
        config: The whole run config, as ``with_sites`` returns it.
        control: The SuperLink.
        first: The SuperLink's nodes, which were asked for already.
        end: Until when sites may come online, by ``time.monotonic``.
        waits: Whether the run waits for sites that are offline, where it needs them.
        say: Called with a line for each site that is offline.

    Raises:
        ControlError: The run needs a site that is offline, and does not wait for it.
    """
    names, ids = (str(config.get(key) or "").split(",") for key in ("client-names", "client-nodes"))
    nodes = {name: node for name, node in zip(names, ids, strict=False) if name}
    seen = first.result()
    while (
        away := [name for name, node in nodes.items() if int(node) not in seen or not seen[int(node)].online]
    ) and time.monotonic() < end:
        seen = control.nodes()
    here = {name: node for name, node in nodes.items() if name not in away}
    enough = 0 < int(config.get("min-sites") or 0) <= len(here)
    for name in away:
        say(f"site {name} is {'offline' if int(nodes[name]) else 'not registered'}: {'it is left out' if enough else 'the run needs it'}")
    if enough:
        return {**config, "clients": len(here), "client-names": ",".join(here), "client-nodes": ",".join(here.values())}
    if away and (not waits or "0" in nodes.values()):
        choices = f"set min-sites, or --sites {','.join(here)}, to go on without them; set wait-timeout to wait for them"
        raise ControlError(f"offline: {', '.join(away)}. Start them, or {choices}")
    return dict(config)


def launch(
    server: ServerFolder,
    given: Mapping[str, Scalar],
    control: Control,
    package: Package,
    rename: bool,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[str, str, str]:
    """Submit a run to the SuperLink, which starts it at once, beside the runs that are going on.

    Args:
        server: The server's folder.
        given: The keys of the run config. ``name`` is the name of a new run, ``resume`` that of a run to resume.
        control: The SuperLink.
        package: The package of the run, with the key that signs it.
        say: Called with a line for each site that is offline.
        rename: What to do where another run has the name. True: append a number to the name. False: raise NameTaken.

    Returns:
        The name of the run, Flower's id of it, and the names of its sites, separated by commas.

    Raises:
        NameTaken: Another run has the name, or the run to resume is still going on.
        ControlError: The SuperLink does not answer or refuses the run, or the machine lacks what the run needs.
        FolderError: A site of the run is not in server.toml any more.
    """
    with one_at_a_time(server.path), ThreadPoolExecutor() as pool:
        end, nodes = time.monotonic() + PATIENCE, pool.submit(control.nodes)  # beside the runs: on 1.42 each answer takes seconds
        runs = control.runs()
        values, resumes = dict(given), str(given.get("resume") or "")
        if resumes:
            if any(run.name == resumes and not run.status.startswith("finished") for run in runs):
                raise NameTaken(f"{resumes} cannot be resumed while it is going on: see `fl-bn status {shlex.quote(str(server.path))}`")
        else:
            values["name"] = _free_name(server, str(given.get("name") or ""), {run.name for run in runs})
            if values["name"] != given.get("name") and not rename:
                raise NameTaken(
                    f"another run here is called {given.get('name')}: give another name, or resume that run: "
                    f"{shlex.join(('fl-bn', 'resume', str(server.path), str(given.get('name'))))}"
                )
        _check_disks(server)
        values |= package.signed(complete_config(server, values))
        config = with_sites(server, values)
        if not resumes:
            config = present(config, control, nodes, end, package.own or bool(given.keys() & WAITS), say)
        run = control.start_run(package.content, package.known(config))
    return resumes or str(values["name"]), run, str(config.get("client-names") or "")


def _free_name(server: ServerFolder, name: str, taken: set[str]) -> str:
    """Return ``name``, or ``NAME-2``, ``NAME-3``, ... if it is in ``taken`` or a folder in ``results`` has it."""
    free, number = name, 1
    while free in taken or (server.results / free).exists():
        number += 1
        free = f"{name}-{number}"
    return free


def _check_disks(server: ServerFolder) -> None:
    """Check that the disks of the SuperLink's database and of temporary files have room, since Flower would not say what is wrong.

    Raises:
        ControlError: One of them has too little room to start a run.
    """
    for folder in (server.state if server.state.exists() else server.path, Path(tempfile.gettempdir())):
        if (free := shutil.disk_usage(folder).free // 2**20) < FREE_DISK:
            raise ControlError(f"{free} MiB are free on the disk of {folder}, but {FREE_DISK} must be free to start a run: make room there")
