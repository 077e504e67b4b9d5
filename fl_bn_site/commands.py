"""Build Flower's command lines from a folder of the kit. Nothing else builds them."""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fl_bn.support.flower_config import NODES, SERVER, Scalar, flower_config
from fl_bn.support.loopback import with_exceptions
from fl_bn.support.user_code import VARIABLE
from fl_bn_site.folders import ServerFolder, SiteFolder

WATCHED = Path(__file__).with_name("watched.py")  # notices where a SuperNode would hang
SUPERLINK = Path(__file__).with_name("superlink.py")  # Flower's, with a repair
SUPERNODE = SUPERLINK.with_name("supernode.py")  # Flower's, asking more often
APP_HOST = SUPERLINK.with_name("app_host.py")  # runs a site's ClientApp
COMPAT = Path(__file__).parents[1] / "fl_bn" / "flower" / "compat.py"  # run by its path: the package around it imports torch
PROGRAMS = ("supernode", "clientapp")  # of a site; each may belong to a user of its own
UNREACHABLE = "Connection attempt failed"  # Flower's words, also for a process of the site itself that has just ended


@dataclass(frozen=True)
class Command:
    """Describe a program to keep running.

    Attributes:
        name: Its name in the log.
        argv: The program and its arguments.
        env: What is added to this process's environment.
        cwd: The folder in which it runs.
        once: Whether it has done its work when it exits with 0.
        hints: By words in its output: what they mean, and what to do.
        reads: Files that it reads at its start. When one changes, the program is started again.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    once: bool = False
    hints: Mapping[str, str] = field(default_factory=dict)
    reads: tuple[Path, ...] = ()

    def __str__(self) -> str:
        """Return the command as a shell would run it."""
        return " ".join(
            [f"cd {shlex.quote(str(self.cwd))} &&", *(f"{k}={shlex.quote(v)}" for k, v in self.env.items()), shlex.join(self.argv)]
        )


def commands(folder: ServerFolder | SiteFolder, only: str = "") -> list[Command]:
    """Return the commands that run on the machine with ``folder``. ``prepare`` makes the folders that they need.

    Args:
        folder: The server's folder, or a site's.
        only: The name of one program of a site; empty: all.

    Raises:
        WrongFlower: The installed Flower is not the deployment's.
        ValueError: There is no such program.
    """
    check_flower("fl-bn start")
    all_commands = server_commands(folder) if isinstance(folder, ServerFolder) else [supernode(folder), clientapp(folder)]
    if only and (isinstance(folder, ServerFolder) or only not in PROGRAMS):
        raise ValueError(f"--only must be {' or '.join(PROGRAMS)}, of a site's folder, but got {only!r} for {folder.path / folder.file}")
    return [command for command in all_commands if only in ("", command.name)]


def check_flower(what: str) -> None:
    """Raise WrongFlower (a ValueError) where the installed Flower is not the one whose programs ``what`` starts."""
    runpy.run_path(str(COMPAT))["check_deployed"](what)


def prepare(folder: ServerFolder | SiteFolder, only: str = "") -> Path:
    """Make the folders for state (readable by its owner only), results and logs.

    Args:
        folder: The server's folder, or a site's.
        only: The name of one program of a site, whose folders alone are made; empty: all.

    Returns:
        The folder of the logs.
    """
    if isinstance(folder, ServerFolder):
        folder.results.mkdir(parents=True, exist_ok=True)
        private = [folder.state]
    else:
        private = [path for name, path in (("supernode", folder.node_dir), ("clientapp", folder.state_dir)) if only in ("", name)]
    for path in private:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    logs = private[0] / "logs" if only else folder.logs  # each program's own, where each has its own user
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def server_commands(server: ServerFolder) -> list[Command]:
    """Return the commands of the server's machine."""
    published = [metrics(server)] if server.metrics else []
    return [superlink(server), serverapp(server), register(server), queue(server), *published]


def superlink(server: ServerFolder) -> Command:
    """Return the command of the SuperLink.

    Its database and separate processes for apps let a run survive its restart.
    """
    options = {
        "--ssl-ca-certfile": server.authority,
        "--ssl-certfile": server.certificate,
        "--ssl-keyfile": server.key,
        "--isolation": "process",
        "--database": server.state / "superlink.db",
        "--storage-dir": server.state / "superlink-files",
        "--fleet-api-address": server.fleet,
        "--control-api-address": server.control,
        "--serverappio-api-address": server.serverappio,
    }
    return Command(
        "superlink",
        (sys.executable, "-P", str(SUPERLINK), "--enable-supernode-auth", *_flat(options)),
        _environment(server.state),
        server.path,
    )


def serverapp(server: ServerFolder) -> Command:
    """Return the command that starts a ServerApp for each run, beside ``results``."""
    options = {"--plugin-type": "serverapp", "--appio-api-address": local(server.serverappio)}
    argv = (program("flower-superexec"), "--insecure", *_flat(options))
    allowed = {VARIABLE: server.allow_modules} if server.allow_modules else {}
    told = {SERVER: str(server.path), NODES: str(server.nodes_file)}
    return Command("serverapp", argv, _environment(server.state) | allowed | told, server.results.parent)


def register(server: ServerFolder) -> Command:
    """Return the command that tells the SuperLink the sites' public keys, and ends."""
    return Command("register", (program("fl-bn"), "register", str(server.path)), _environment(server.state), server.path, once=True)


def queue(server: ServerFolder) -> Command:
    """Return the command that starts the runs that wait, one after the other."""
    return Command("queue", (program("fl-bn"), "queue", str(server.path)), _environment(server.state), server.path)


def metrics(server: ServerFolder) -> Command:
    """Return the command that publishes the server's state for Prometheus and writes the health file."""
    argv = (program("fl-bn"), "status", str(server.path), "--serve", server.metrics)
    return Command("metrics", argv, _environment(server.state), server.path)


def supernode(site: SiteFolder) -> Command:
    """Return the command of a site's SuperNode."""
    options = {
        "--superlink": site.superlink,
        "--root-certificates": site.root_certificates,
        "--auth-supernode-private-key": site.private_key,
        "--isolation": "process",
        "--clientappio-api-address": site.clientappio,
        "--node-config": flower_config(node_config(site)),
    }
    hints = {
        UNREACHABLE: f"{site.superlink} does not answer, or not as the server that ca.crt vouches for. It goes on trying; "
        "`fl-bn doctor .` finds out which",
        "CERTIFICATE_VERIFY_FAILED": f"{site.superlink} is not the server that ca.crt vouches for: another server, or another kit's",
        "No SuperNode found with the given public key": "the server does not know this site's key yet. It goes on trying. If that does not "
        "end, send site.pub to the server's operator, who enters it there: `fl-bn kit add-site`, or `fl-bn kit renew --site`",
        "Invalid timestamp": "this machine's clock is 5 s or more ahead of the server's, or 305 s or more behind, and Flower refuses that: "
        "set the clock right, on whichever of the two it is wrong (chrony, systemd-timesyncd). It goes on trying",
        "could not be activated": "the server still counts this site as connected, as it does for a minute after a crash. It goes on "
        "trying; if that does not end, another machine uses this site's key",
    }
    flower = (sys.executable, "-P", str(SUPERNODE), "--poll-seconds", str(site.poll_seconds))
    argv = (sys.executable, "-I", "-S", str(WATCHED), *flower, *_flat(options))
    return Command("supernode", argv, _environment(site.node_dir), site.path, hints=hints, reads=(site.private_key,))


def clientapp(site: SiteFolder) -> Command:
    """Return the command that runs what the server sends.

    It needs no key, so another user than the SuperNode's may own it.
    """
    options = {"--appio-api-address": site.clientappio, "--policy": site.policy}
    return Command("clientapp", (sys.executable, "-P", str(APP_HOST), *_flat(options)), _environment(site.state_dir), site.path)


def node_config(site: SiteFolder) -> dict[str, Scalar]:
    """Return the node config, which tells the ClientApp about this site. Paths are absolute."""
    config: dict[str, Scalar] = {
        "site": site.site,
        "state-dir": str(site.state_dir),
        "device": site.device,
        "exchange-addresses": site.exchange_addresses or site.superlink.rpartition(":")[0],
    }
    optional = {"dataset": site.dataset, "data-path": site.data_path, "allow-modules": site.allow_modules}
    return config | {name: value for name, value in optional.items() if value}


def local(address: str) -> str:
    """Return the address at which this machine reaches a service that listens on ``address``."""
    host, _, port = address.rpartition(":")
    return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"


def program(name: str) -> str:
    """Return the path of the program ``name`` in this Python's environment, active or not."""
    path = Path(sysconfig.get_path("scripts")) / name
    return str(path) if path.exists() else name


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with ``extra``.

    Flower's programs start each other by name, so this Python's programs come first in PATH. On this machine
    they call each other without a proxy.
    """
    scripts = sysconfig.get_path("scripts")
    path = f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path, **with_exceptions(os.environ), **extra}


def _environment(state: Path) -> dict[str, str]:
    return {"FLWR_HOME": str(state / "flower"), "FLWR_TELEMETRY_ENABLED": "0", "PYTHONUNBUFFERED": "1"}


def _flat(options: Mapping[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (name, str(value))]
