"""A process that works on a message dies, at a site of real processes: the server is told why within seconds, and asks again once."""

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

import pytest

from fl_bn_site import commands
from fl_bn_site.commands import environment
from fl_bn_site.folders import SiteFolder
from tests.deployment.federation import ROOT, SMALL, Federation, differing, in_process, message_processes, wait_until
from tools.deployment.outcomes import Case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SECONDS = 15.0  # from a death until the site is asked again
DEAF = Path(__file__).with_name("deaf_supernode.py")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with Federation(tmp_path_factory.mktemp("federation"), ("east", "west")) as running:
        running.start_all()
        yield running


class Run:
    """A run of four rounds whose sites wait in round 2 or later, wherever their mood is `hang`."""

    def __init__(self, federation: Federation, folder: Path, name: str, **values: Any) -> None:
        case = Case(federation, folder, 0, random.Random(0))
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
        """The process of a message at ``site``, which hangs."""
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
        """Wait until the server says that it asks ``site`` again for ``why``. Return the seconds that it took."""
        begin, log = time.monotonic(), self.federation.log
        wait_until("the server is told", lambda: f"site {site}: {why}; it is asked again" in log("server", "serverapp"), 200)
        return time.monotonic() - begin


def kill(federation: Federation, site: str, pid: int) -> None:
    federation.mood(site).write_text("")
    os.kill(pid, signal.SIGKILL)


def test_a_message_whose_process_is_killed_is_done_again(federation: Federation, tmp_path: Path) -> None:
    run = Run(federation, tmp_path, "killed")
    kill(federation, "west", run.hang("west"))
    seconds = run.asked_again("west", "its process was killed by SIGKILL")
    print(f"told after {seconds:.1f} s")
    assert seconds < SECONDS
    out = run.end()
    assert out.count("2/2 clients") == 4, out
    reference = in_process(run.config, tmp_path / "reference")
    assert differing(run.rounds.parent / "model.safetensors", reference / "model.safetensors") == []


def test_a_process_that_dies_again_costs_its_site_the_round_and_no_more(federation: Federation, tmp_path: Path) -> None:
    run = Run(federation, tmp_path, "twice")
    first = run.hang("west")
    os.kill(first, signal.SIGSEGV)
    run.asked_again("west", "its process was killed by SIGSEGV")
    begin = time.monotonic()
    kill(federation, "west", run.hang("west"))
    rounds = run.done()
    wait_until("the round ends", lambda: run.done() > rounds, 250)
    print(f"round done {time.monotonic() - begin:.1f} s after the first death was known")
    out = run.end()
    assert "site west: its process was killed by SIGKILL; that is the second time, and the round goes on without this client" in out
    assert (out.count("1/2 clients"), out.count("2/2 clients")) == (1, 3), out


def test_a_host_that_is_started_again_gives_up_its_predecessor_s_messages(federation: Federation, tmp_path: Path) -> None:
    run = Run(federation, tmp_path, "restarted")
    run.hang("east")
    kill(federation, "east", federation.find("clientapp", "east")[0])
    seconds = run.asked_again("east", "the program that runs its ClientApps was started again in the midst of the message")
    print(f"told after {seconds:.1f} s")
    assert seconds < SECONDS
    assert run.end().count("2/2 clients") == 4


def test_a_site_whose_host_stays_away_is_left_out_within_seconds(federation: Federation, tmp_path: Path) -> None:
    federation.stop("sites/west")
    with parts(federation, "west", commands.SUPERNODE) as start:
        start("clientapp")
        run = Run(federation, tmp_path, "away")
        run.hang("west")
        federation.mood("west").write_text("")
        start.end("clientapp")
        rounds, begin = run.done(), time.monotonic()
        wait_until("the round ends", lambda: run.done() > rounds, 250)
        print(f"round done {time.monotonic() - begin:.1f} s after the host had gone")
        start("clientapp")
        out = run.end()
    federation.start("sites/west")
    assert "site west: the program that runs its ClientApps has not asked for work for 15 s" in out
    assert out.count("2/2 clients") >= 1


def test_without_the_mechanism_the_round_waits_until_its_deadline(federation: Federation, tmp_path: Path) -> None:
    """Negative control: Flower's own SuperNode notices after a minute, and fails to say so."""
    federation.stop("sites/west")
    with parts(federation, "west", DEAF) as start:
        start("clientapp")
        run = Run(federation, tmp_path, "deaf", **{"round-timeout": 90.0})
        kill(federation, "west", run.hang("west"))
        rounds, begin = run.done(), time.monotonic()
        wait_until("the round ends", lambda: run.done() > rounds, 120)
        seconds = time.monotonic() - begin
        print(f"round done {seconds:.1f} s after the death")
        out = run.end()
    federation.start("sites/west")
    assert seconds > 60
    assert "asked again" not in out
    assert "no reply before the deadline" in (run.rounds.parent / "clients.csv").read_text()


class Parts:
    """The programs of a site, started and ended one by one."""

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
            self._running[name] = subprocess.Popen(
                words, env=given, cwd=command.cwd, stdout=output, stderr=output, start_new_session=True
            )

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
