"""Build the command lines of Flower's programs from a folder of the kit. No other module builds them."""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fl_bn.support.flower_config import NODES, SERVER, Scalar, flower_config
from fl_bn.support.loopback import with_exceptions
from fl_bn.support.user_code import VARIABLE
from fl_bn_site.folders import ServerFolder, SiteFolder, host_port

SUPERLINK = Path(__file__).with_name("superlink.py")  # Flower's SuperLink with repairs
GATE, APPS = "fl_bn_site.gate", "fl_bn_site.apps"  # the modules that guard a site, and run its apps
COMPAT = Path(__file__).parents[1] / "fl_bn" / "flower" / "compat.py"  # run by its path, since the package around it imports torch
OFFLINE = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
PROGRAMS = ("supernode", "clientapp")  # the programs of a site; each may run as a user of its own


@dataclass(frozen=True)
class Command:
    """Describe a program that the supervisor keeps running.

    Attributes:
        name: The name of the program in the log.
        argv: The program and its arguments.
        env: Environment variables that are added to those of this process.
        cwd: The working directory of the program.
        once: True: the program is started again only after a failure. False: it is also started again after exit code 0.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    once: bool = False


def commands(folder: ServerFolder | SiteFolder, only: str = "") -> list[Command]:
    """Return the commands of all programs that run on one machine. ``prepare`` makes the folders that they need.

    Args:
        folder: The folder of the kit on that machine: the server's, or a site's.
        only: The program of a site whose command to return, ``supernode`` or ``clientapp``; empty: both.

    Raises:
        ValueError: ``only`` names no program of this folder, or deployments do not know the installed version of Flower.
    """
    if only and isinstance(folder, ServerFolder):
        raise ValueError(f"--only is for a site's folder, but {folder.path} is the server's: leave out --only")
    if isinstance(folder, ServerFolder):
        return [superlink(folder), serverapp(folder), register(folder)]
    if only and only not in PROGRAMS:
        raise ValueError(f"--only must be {' or '.join(PROGRAMS)}, for a site's folder, but got {only!r} for {folder.path / folder.file}")
    return [command for command in (supernode(folder), clientapp(folder)) if only in ("", command.name)]


def of_1_25() -> bool:
    """Return whether Flower 1.25 is installed. False: it is 1.42, whose SuperLink has one port for sites, runs and ServerApps.

    Raises:
        ValueError: Another version is installed, on which deployments were not tried.
    """
    return bool(runpy.run_path(str(COMPAT))["deploys_by_grpc"]())


def prepare(folder: ServerFolder | SiteFolder, only: str = "") -> list[Path]:
    """Make the folders for state (readable by their owner only) and results.

    Args:
        folder: The server's folder, or a site's.
        only: The program of a site for which to make folders, ``supernode`` or ``clientapp``; empty: both.

    Returns:
        The folders to lock while the programs run. Each program of a site has one of its own, as it may have a user of its own.
    """
    if isinstance(folder, ServerFolder):
        folder.results.mkdir(parents=True, exist_ok=True)
        private, locked = [folder.state], [folder.path]
    else:
        locked = [path for name, path in (("supernode", folder.node_dir), ("clientapp", folder.state_dir)) if only in ("", name)]
        private = locked if only else [*locked, folder.packages, folder.apps_socket.parent]  # with two users, site-users.sh has made these
    for path in private:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return locked


def superlink(server: ServerFolder) -> Command:
    """Return the command of the SuperLink.

    The SuperLink keeps its state in a database and runs apps in separate processes, so runs survive its restart.
    """
    options: dict[str, object] = {
        "--ssl-ca-certfile": server.authority,
        "--ssl-certfile": server.certificate,
        "--ssl-keyfile": server.key,
        "--isolation": "process",
        "--database": server.state / "superlink.db",
    }
    if of_1_25():
        argv = [sys.executable, "-P", str(SUPERLINK)]
        options |= {
            "--storage-dir": server.state / "superlink-files",
            "--fleet-api-address": server.fleet,
            "--control-api-address": server.control,
            "--serverappio-api-address": server.serverappio,
        }
    else:
        argv = [program("flower-superlink"), "--disable-runtime-dependency-installation"]
        options |= dict(zip(("--host", "--port"), host_port(server.fleet), strict=True))
    return Command("superlink", (*argv, "--enable-supernode-auth", *_flat(options)), _environment(server.state), server.path)


def serverapp(server: ServerFolder) -> Command:
    """Return the command of Flower's SuperExec, which starts a ServerApp for each run.

    The working directory of the ServerApps is the parent of the folder ``results``.
    """
    options: dict[str, object]
    if of_1_25():
        options = {"--plugin-type": "serverapp", "--appio-api-address": local(server.serverappio)}
        argv = [program("flower-superexec"), "--insecure"]
    else:
        options = {"--root-certificates": server.authority, "--runtime-api-address": local(server.fleet)}
        argv = [program("flower-superexec")]
    allowed = {VARIABLE: server.allow_modules} if server.allow_modules else {}
    told = {SERVER: str(server.path), NODES: str(server.nodes_file)}
    return Command("serverapp", (*argv, *_flat(options)), _environment(server.state) | allowed | told, server.results.parent)


def register(server: ServerFolder) -> Command:
    """Return the command that tells the SuperLink the public keys of the sites. It runs once."""
    return Command("register", (program("fl-bn"), "register", str(server.path)), _environment(server.state), server.path, once=True)


def supernode(site: SiteFolder) -> Command:
    """Return the command of a site's gate, which starts the SuperNode."""
    options = {
        "--superlink": site.superlink,
        "--root-certificates": site.root_certificates,
        "--auth-supernode-private-key": site.private_key,
        "--isolation": "process",
        "--node-config": flower_config(node_config(site)),
    }
    own = {
        "--home": site.node_dir,
        "--policy": site.policy,
        "--audit": site.audit_log,
        "--packages": site.packages,
        "--apps": site.apps_socket,
        "--clientappio": site.clientappio,
    }
    argv = (sys.executable, "-P", "-m", GATE, *_flat(own), "--", *_flat(options))
    return Command("supernode", argv, _environment(site.node_dir), site.path)


def clientapp(site: SiteFolder) -> Command:
    """Return the command that runs the ClientApps of a site, with the code that the server sends.

    This program needs no key, so it may run as another user than the gate.
    """
    found = {"PYTHONPATH": os.pathsep.join([*site.code, *filter(None, [os.environ.get("PYTHONPATH")])])} if site.code else {}
    argv = (sys.executable, "-P", "-m", APPS, str(site.apps_socket))
    return Command("clientapp", argv, _environment(site.state_dir) | found, site.path)


def node_config(site: SiteFolder) -> dict[str, Scalar]:
    """Return the node config of a site, by which the ClientApp knows the site's data, device and folders.

    Paths in it are absolute. Optional lines that site.toml leaves empty are absent.
    """
    config: dict[str, Scalar] = {
        "site": site.site,
        "state-dir": str(site.state_dir),
        "device": site.device,
        "exchange-addresses": site.exchange_addresses or site.superlink.rpartition(":")[0],
    }
    optional = {"dataset": site.dataset, "data-path": site.data_path, "allow-modules": site.allow_modules}
    quiet: dict[str, Scalar] = {} if site.share_label_counts else {"share-label-counts": False}
    return config | {name: value for name, value in optional.items() if value} | quiet


def local(address: str) -> str:
    """Return the address, HOST:PORT, by which programs of this machine reach a service that listens on ``address``."""
    host, _, port = address.rpartition(":")
    return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"


def program(name: str) -> str:
    """Return the path of the program ``name`` in the environment of this Python, also if that environment is not active.

    Where it has no such program, return ``name``, which is then looked up in PATH.
    """
    path = Path(sysconfig.get_path("scripts")) / name
    return str(path) if path.exists() else name


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a program that this process starts.

    They are those of this process with four changes. In PATH, the programs of this Python come first, since
    Flower's programs start each other by name. Addresses of this machine are excepted from proxies.
    Flower does not call its makers. The variables in ``extra`` are added last.
    """
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    return {**os.environ, "PATH": path, **with_exceptions(os.environ), **OFFLINE, **extra}


def _environment(state: Path) -> dict[str, str]:
    # threads of torch that wait by spinning stop each other where cores are shared: a step took 600 ms in the place of 5
    told = {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
    return {"FLWR_HOME": str(state / "flower")} | told


def _flat(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (name, str(value))]
