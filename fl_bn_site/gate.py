"""Guard a site: check each message and its package, write the audit log, and let an app answer in a process of its own.

Usage: ``python -P -m fl_bn_site.gate --home FOLDER ... -- SUPERNODE ARGUMENT...``. For each message, Flower starts the
command ``flwr-clientapp``, which it finds in PATH. Here that command is a small script (``home/bin``), and the gate does
its work: it runs Flower's own program with two functions replaced. So only the gate talks to Flower. It sees a package
before anything of it is unpacked, and an answer before it leaves, and no answer is ever partial.

The gate starts the SuperNode and Flower's SuperExec, and ends when one of the two ends. Whoever supervises the gate then
starts all of them again. The gate runs as the user who may read the site's key. It imports nothing that a run brings; the apps
run in ``apps.py``, as another user where the site has two.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from fl_bn_site.answer import Answer, Site
from fl_bn_site.apps import PACKET, PROGRAM, fork, listen
from fl_bn_site.commands import COMPAT, of_1_25
from fl_bn_site.folders import host_port

SOCKET = "gate.sock"  # in the home of the gate: the command connects there
TICK = 0.5  # seconds between two looks at the programs
GRACE = 8.0  # seconds that the programs have to end
COMMAND = """#!{python} -IS
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
    names["install_from_fab"], names["get_load_client_app_fn"] = answer.install, answer.loader
    program: Callable[[], None] = find("flwr_clientapp")
    return program


def serve(site: Site, listener: socket.socket, programs: Mapping[str, subprocess.Popen[bytes]]) -> str:
    """Answer the command ``flwr-clientapp``, each time in a process that is forked from this one.

    Returns:
        Which program has ended, when one of ``programs`` has.
    """
    run = flowers_program(Answer(site))
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    children: set[int] = set()
    while True:
        for name, program in programs.items():
            if program.poll() is not None:
                return f"{name} has ended with exit code {program.returncode}"
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
    run()


def _end_with(connection: socket.socket) -> None:
    """End this process when Flower ends its command, for example because the run was stopped."""
    connection.recv(1)
    os._exit(1)


def write_command(home: Path) -> Path:
    """Write the command ``flwr-clientapp``, and return its folder."""
    folder = home / "bin"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = folder / PROGRAM
    command.write_text(COMMAND.format(python=sys.executable, home=str(home), socket=SOCKET), encoding="utf-8")
    command.chmod(0o700)
    return folder


def options(words: list[str]) -> tuple[Site, dict[str, list[str]]]:
    """Split the words of a command line into the site and the commands of SuperNode and SuperExec, by their names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("home", "policy", "audit", "packages", "apps"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--clientappio", required=True)
    parser.add_argument("supernode", nargs="+")
    given = vars(parser.parse_args(words))
    supernode, address = given.pop("supernode"), given.pop("clientappio")
    superexec = [sys.executable, "-P", str(Path(__file__).with_name("superexec.py")), "--insecure"]
    if of_1_25():
        supernode += ["--clientappio-api-address", address]
        superexec += ["--plugin-type", "clientapp", "--appio-api-address", address]
    else:
        host, port = host_port(address)
        supernode += ["--host", host, "--port", str(port)]
        superexec += ["--runtime-api-address", address]
    site = Site(**{name: path.absolute() for name, path in given.items()})
    return site, {"the SuperNode": supernode, "the SuperExec": superexec}


def main() -> None:
    """Run the gate, the SuperNode and the SuperExec until this process is stopped.

    Raises:
        SystemExit: A program of Flower has ended.
    """
    site, commands = options(sys.argv[1:])
    listener = listen(site.home / SOCKET)
    environment = {**os.environ, "PATH": f"{write_command(site.home)}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    programs = {name: subprocess.Popen(command, env=environment) for name, command in commands.items()}
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: sys.exit(0))
    why = ""
    try:
        why = serve(site, listener, programs)
    finally:
        for program in programs.values():
            program.terminate()
        end = time.monotonic() + GRACE
        for program in programs.values():
            with suppress(subprocess.TimeoutExpired):
                program.wait(max(0.0, end - time.monotonic()))
            program.kill()
    sys.exit(f"{why}: the gate ends, to be started again")


if __name__ == "__main__":
    main()
