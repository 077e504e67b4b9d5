"""Guard a site: check each message and its package, write the audit log, and let an app answer in a process of its own.

Usage: ``python -P -m fl_bn_site.gate --home FOLDER ... -- ARGUMENT...``, with the arguments of Flower's SuperNode.

For each message, Flower starts the command ``flwr-clientapp``, which it finds in PATH. Here that command is a small script
(``home/bin``), and the gate does its work: it runs Flower's own program with two functions replaced. So only the gate talks
to Flower. It sees a package before anything of it is unpacked, and an answer before it leaves, and no answer is ever partial.

The gate forks Flower's SuperNode and SuperExec, and ends when one of the two ends. Whoever supervises the gate then starts
all of them again. The gate runs as the user who may read the site's key. It imports nothing that a run brings; the apps run
in ``apps.py``, as another user where the site has two.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import runpy
import secrets
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

from fl_bn_site.answer import Answer, Site
from fl_bn_site.apps import PACKET, PROGRAM, fork, listen
from fl_bn_site.commands import COMPAT, of_1_25
from fl_bn_site.folders import host_port
from fl_bn_site.programs import SUPEREXEC, SUPERNODE, end, listens, pause_less, start

SOCKET = "gate.sock"  # in the home of the gate: the command connects there
SECRET = "superexec.secret"  # there, too: without it, each user of this machine could take messages of Flower 1.42 and answer them
TICK = 0.5  # seconds between two looks at the programs
COMMAND = """#!/bin/sh
'''exec' "{python}" -IS "$0" "$@" #'''  # a path with a space can stand in no first line
# The command that Flower starts for each message: the gate of this site does its work.
import json, os, socket, sys
os.chdir({home!r})
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gate:
    gate.connect({socket!r})
    gate.send(json.dumps(sys.argv[1:]).encode())
    gate.recv(1)  # until the gate is done
"""


def flowers_program(answer: Answer) -> Callable[[], None]:
    """Return Flower's program ``flwr-clientapp``, which asks ``answer`` in the place of a ClientApp."""
    find = runpy.run_path(str(COMPAT))["find"]
    names = find("run_clientapp").__globals__
    if not names.keys() >= {"install_from_fab", "get_load_client_app_fn"}:
        raise SystemExit("this version of Flower loads apps in another way: install one that docs/how-to/flower-versions.md names")
    names["install_from_fab"], names["get_load_client_app_fn"] = answer.install, answer.loader
    program: Callable[[], None] = find("flwr_clientapp")
    return program


def serve(run: Callable[[], None], listener: socket.socket, programs: Sequence[BaseProcess]) -> str:
    """Answer the command ``flwr-clientapp`` by ``run``, each time in a process that is forked from this one.

    Returns:
        Which program has ended, when one of ``programs`` has.
    """
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    children: set[int] = set()
    while True:
        for program in programs:
            if program.exitcode is not None:
                return f"{program.name} has ended with exit code {program.exitcode}"
        children = {child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0}
        if ready.poll(TICK * 1000):
            connection, _ = listener.accept()
            with connection:
                children.add(fork(partial(_work, run, connection, listener)))


def _work(run: Callable[[], None], connection: socket.socket, listener: socket.socket) -> None:
    """Do the work of one command in this process."""
    listener.close()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = [PROGRAM, *json.loads(connection.recv(PACKET))]
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    pause_less()
    run()


def _end_with(connection: socket.socket) -> None:
    """End this process when Flower ends its command."""
    connection.recv(1)
    os._exit(1)


def write_command(home: Path) -> None:
    """Write the command ``flwr-clientapp``, alone in PATH, and a new secret of SuperNode and SuperExec.

    Flower 1.42 starts whatever program the server names, and most of them load a package unchecked.
    """
    folder = home / "bin"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (home / SECRET).write_bytes(secrets.token_bytes(32))
    (home / SECRET).chmod(0o600)
    command = folder / PROGRAM
    command.write_text(COMMAND.format(python=sys.executable, home=str(home), socket=SOCKET), encoding="utf-8")
    command.chmod(0o700)
    os.environ["PATH"] = str(folder)


def options(words: list[str]) -> tuple[Site, str, dict[str, list[str]]]:
    """Split a command line: the site, ``clientappio``, and the arguments of SuperNode and SuperExec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("home", "policy", "audit", "packages", "apps"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--clientappio", required=True)
    parser.add_argument("supernode", nargs="+")
    given = vars(parser.parse_args(words))
    supernode, address = (given.pop(name) for name in ("supernode", "clientappio"))
    superexec = ["--insecure"]
    if of_1_25():
        supernode += ["--clientappio-api-address", address]
        superexec += ["--plugin-type", "clientapp", "--appio-api-address", address]
    else:
        host, port = host_port(address)
        supernode += ["--host", host, "--port", str(port)]
        superexec += ["--runtime-api-address", address]
        for words in (supernode, superexec):
            words += ["--superexec-auth-secret-file", str(given["home"].absolute() / SECRET)]
    site = Site(**{name: path.absolute() for name, path in given.items()})
    return site, address, {SUPERNODE: supernode, SUPEREXEC: superexec}


def main() -> None:
    """Run the gate, the SuperNode and the SuperExec until this process is stopped.

    Raises:
        SystemExit: A program of Flower has ended.
    """
    site, address, arguments = options(sys.argv[1:])
    listener = listen(site.home / SOCKET)
    write_command(site.home)
    shutil.rmtree(site.home / "flower/supernode/ffs", ignore_errors=True)  # Flower keeps each package that a server has sent
    run = flowers_program(Answer(site))
    gc.freeze()  # the pages of what is imported stay shared with the forked processes
    node = start(SUPERNODE, arguments[SUPERNODE], listener, lambda: True)
    # Where another site of this machine has the address, a SuperExec would take that site's messages.
    programs = [node, start(SUPEREXEC, arguments[SUPEREXEC], listener, partial(listens, node.pid, host_port(address)[1]))]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    try:
        what = serve(run, listener, programs)
        sys.exit(f"{what}: the gate ends, to be started again. If a port is in use, give clientappio in site.toml another than {address}")
    finally:
        end(programs)


if __name__ == "__main__":
    main()
