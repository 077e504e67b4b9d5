"""Start runs with real processes at two sites, one of which is killed while it works."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_bn_site import commands
from fl_bn_site.commands import environment
from fl_bn_site.folders import SiteFolder
from tests.deployment.federation import ROOT, SMALL, Federation, message_processes, wait_until
from tools.deployment.outcomes import Case


class Run:
    """Run four rounds. From round 2 on, a site stops responding while its mood file says ``hang``."""

    def __init__(self, federation: Federation, folder: Path, name: str, **values: Any) -> None:
        case = Case(federation, folder, name, 0, random.Random(0))
        self.federation, self.rounds = federation, federation.result(name) / "rounds.jsonl"
        self.config = {
            **SMALL, **case.data, "clients": 2, "method": "fedbn", "rounds": 4, "evaluate-every": 4, "name": name, "round-timeout": 300.0,
            **values,
        }  # fmt: skip
        self._process = federation.submit({**self.config, "dataset": "tools.deployment.moody:load"})
        wait_until("round 1", lambda: self.done() >= 1, 600)

    def done(self) -> int:
        return self.rounds.read_bytes().count(b"\n") if self.rounds.exists() else 0

    def hang(self, site: str) -> int:
        """Make ``site`` hang; return the process id of the message that hangs there."""
        self.federation.mood(site).write_text("hang")
        seen: dict[int, float] = {}

        def hangs() -> int:
            for pid in message_processes(self.federation, site):
                if time.monotonic() - seen.setdefault(pid, time.monotonic()) > 3:
                    return pid
            return 0

        return int(wait_until(f"a message hangs at {site}", hangs, 300))

    def end(self) -> str:
        out, _ = self._process.communicate(timeout=900)
        assert self._process.returncode == 0, out
        return out

    def asked_again(self, site: str, why: str) -> float:
        """Wait until the server's log says that it sends the message to ``site`` again; return the seconds that this took.

        Args:
            site: The name of the site.
            why: The reason that the log must give.
        """
        begin, log = time.monotonic(), self.federation.log
        wait_until("the server is told", lambda: f"site {site}: {why}; it is asked again" in log("server", "serverapp"), 200)
        return time.monotonic() - begin


def kill(federation: Federation, site: str, pid: int) -> None:
    federation.mood(site).write_text("")
    os.kill(pid, signal.SIGKILL)


class Parts:
    """Start and end the programs of a site one by one: call the object with a program's name to start it."""

    def __init__(self, federation: Federation, site: str, supernode: Path) -> None:
        folder = SiteFolder.read(federation.kit / "sites" / site)
        self._commands = {command.name: command for command in (commands.supernode(folder), commands.clientapp(folder))}
        self._supernode, self._site, self._federation = supernode, site, federation
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __call__(self, name: str) -> None:
        command, own = self._commands[name], self._federation.environment[f"sites/{self._site}"]
        words = [str(self._supernode) if word == str(commands.SUPERNODE) else word for word in command.argv]
        given = environment({**command.env, **own, "PYTHONPATH": str(ROOT), "FL_BN_ALLOW_MODULES": "tools.deployment"})
        with (self._federation.kit / f"{self._site}-{name}.out").open("ab") as output:
            self._running[name] = subprocess.Popen(words, env=given, cwd=command.cwd, stdout=output, stderr=output, start_new_session=True)

    def end(self, name: str) -> None:
        process = self._running.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def parts(federation: Federation, site: str, supernode: Path) -> Iterator[Parts]:
    made = Parts(federation, site, supernode)
    made("supernode")
    output: Callable[[], str] = (federation.kit / f"{site}-supernode.out").read_text
    seen = output().count("SuperNode ID")
    wait_until("it is let in", lambda: output().count("SuperNode ID") > seen, 240)  # not before the SuperLink misses the former one
    try:
        yield made
    finally:
        for name in list(made._running):
            made.end(name)
