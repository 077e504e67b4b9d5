"""Rehearse failures of a real deployment. Each drill causes one failure, and returns what happened and what was lost.

All drills have the same criterion. The final model must be, bit for bit, that of a run in one process in which exactly
the same replies were missing. After a resume, no reply may be missing. Besides, whoever has to act must be told.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deployment.federation import ROOT, Federation, wait_until
from tools.deployment.outcomes import Case, Outcome, compare, rounds_of
from tools.deployment.pace import of_site

METHODS = ("fedbn", "hbn", "fedtan")
SKEW = 300  # seconds


@dataclass
class Run:
    """Hold a submitted run: the process of ``fl-bn submit``, the lines that it has printed so far, and the moment in words."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)
    moment: str = ""

    def end(self) -> str:
        """Wait for the end of the run, and return it in words."""
        code = self.process.wait(3600)
        return "run completed" if code == 0 else f"run failed ({code})"


@contextmanager
def running(case: Case, config: dict[str, Any], until: int = 0) -> Iterator[Run]:
    """Submit a run for the ``with`` block. Its end kills ``fl-bn submit``.

    Args:
        case: The repetition of the drill.
        config: The run config.
        until: The block begins at a random moment after a round that is drawn, from the first to this one, and before the last
            round begins. 0: after the first round.
    """
    run, folder = Run(case.federation.submit(config)), case.federation.result(config["name"])
    assert run.process.stdout is not None
    drain = threading.Thread(target=run.said.extend, args=(run.process.stdout,), daemon=True)
    drain.start()
    try:
        target = case.rng.randint(1, until or 1)
        wait_until(f"round {target}", lambda: rounds_of(folder) >= target or run.process.poll() is not None, 600)
        end = time.monotonic() + (case.rng.uniform(0.0, 12.0) if until else 0.0)
        while time.monotonic() < end and rounds_of(folder) < config["rounds"] - 1:
            time.sleep(0.1)
        run.moment = f"{rounds_of(folder)} rounds done"
        yield run
    finally:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        drain.join(5)


# Kills


def kill_supernode(case: Case) -> Outcome:
    """SIGKILL a SuperNode at a random moment. ``fl-bn start`` starts it again, with the layers that the site had kept."""
    site = case.rng.choice(case.federation.sites)
    config = case.config("fedbn", **{"round-timeout": 150.0})
    before = starts(case.federation, site)
    with running(case, config, until=2) as run:
        os.kill(case.federation.find("supernode", site)[0], signal.SIGKILL)
        outcome = case.outcome("SIGKILL a SuperNode", config, run.moment)
        outcome.what = f"site {site} killed; {run.end()}"
    wait_until(f"site {site} is back", lambda: starts(case.federation, site) > before, 180)
    compare(case, config, outcome)
    return outcome


def kill_serverapp(case: Case) -> Outcome:
    """SIGKILL the ServerApp at a random moment, and resume: the result must be that of an uninterrupted run."""
    config = case.config(METHODS[case.repetition % len(METHODS)])
    with running(case, config, until=2) as run:
        os.kill(case.federation.find("serverapp")[-1], signal.SIGKILL)
        outcome = case.outcome("SIGKILL the ServerApp", config, run.moment)
    outcome.what = _resumed(case, config)
    compare(case, config, outcome)
    return outcome


def kill_superlink(case: Case) -> Outcome:
    """SIGKILL the SuperLink at a random moment; ``fl-bn start`` starts it again. The run goes on, or is resumed."""
    config = case.config(METHODS[case.repetition % len(METHODS)])
    with running(case, config, until=2) as run:
        os.kill(case.federation.find("superlink")[0], signal.SIGKILL)
        outcome = case.outcome("SIGKILL the SuperLink", config, run.moment)
        ended = run.end()
    outcome.what = "the run went on by itself" if ended == "run completed" else _resumed(case, config)
    compare(case, config, outcome)
    return outcome


def port_taken(case: Case) -> Outcome:
    """SIGKILL the SuperLink, and let another program have its port for half a minute."""
    federation, config = case.federation, case.config("fedbn", **{"round-timeout": 150.0})
    with running(case, config, until=2) as run:
        outcome = case.outcome("SIGKILL the SuperLink, whose port is then taken", config, run.moment)
        os.kill(federation.find("superlink")[0], signal.SIGKILL)
        with wait_until("the port is free", lambda: listener(federation.fleet), 10, pause=0.01):
            time.sleep(30)
        ended = run.end()
    outcome.what = "the run went on by itself" if ended == "run completed" else _resumed(case, config)
    compare(case, config, outcome)
    return outcome


def certificate_renewed(case: Case) -> Outcome:
    """Renew the server's certificate during a run, and start the server again, which ends its programs. No site does anything."""
    federation, config = case.federation, case.config(METHODS[case.repetition % len(METHODS)])
    certificate = federation.kit / "server/server.crt"
    with running(case, config, until=2) as run:
        outcome = case.outcome("the certificate renewed, the server started again", config, run.moment)
        old = certificate.read_bytes()
        federation.command("kit renew")
        federation.stop("server")
        federation.start("server")
        wait_until("all sites are online", lambda: federation.online() == federation.sites, 300)
        ended = run.end()
    outcome.expect("the server has another certificate", certificate.read_bytes() != old)
    outcome.what = "the run went on by itself" if ended == "run completed" else _resumed(case, config)
    compare(case, config, outcome)
    return outcome


def listener(port: int) -> socket.socket | None:
    """Return a socket that listens on ``port``; None while another one does."""
    with suppress(OSError):
        return socket.create_server(("127.0.0.1", port))
    return None


def site_stopped(case: Case) -> Outcome:
    """Stop all processes of a site for a minute, as a laptop that sleeps."""
    processes = of_site(case.federation.kit / "sites" / case.rng.choice(case.federation.sites))
    return _for_a_minute(case, "a site stopped for a minute", *(["kill", f"-{how}", *map(str, processes)] for how in ("STOP", "CONT")))


def network_cut(case: Case) -> Outcome:
    """Drop all packets to the SuperLink for a minute; on Flower 1.42, those of the ServerApp, too."""
    rule = ["INPUT", "-p", "tcp", "--dport", str(case.federation.fleet), "-j", "DROP"]
    return _for_a_minute(case, "the network cut for a minute", ["iptables", "-I", *rule], ["iptables", "-D", *rule])


def _for_a_minute(case: Case, drill: str, begin: list[str], end: list[str]) -> Outcome:
    """Run the command ``begin`` at a random moment, and the command ``end`` a minute later."""
    config = case.config("fedbn", **{"round-timeout": 150.0})
    with running(case, config, until=2) as run:
        outcome = case.outcome(drill, config, run.moment)
        subprocess.run(begin, check=True)
        try:
            time.sleep(60)
        finally:
            subprocess.run(end, check=True)
        outcome.what = run.end()
    outcome.what = outcome.what if outcome.what == "run completed" else _resumed(case, config)
    compare(case, config, outcome)
    return outcome


def _resumed(case: Case, config: Mapping[str, Any]) -> str:
    """Go on with a run, and return in words how."""
    said = case.federation.command("resume", config["name"])
    going_on = [line[line.index("going on after") :] for line in said.splitlines() if "going on after" in line]
    return f"resumed ({going_on[0]})" if going_on else f"resumed: {said[-300:]}"


# Troubles that come and go, several times in one run


def client_raises(case: Case) -> Outcome:
    """Make one site's data unreadable for a while. The server leaves the site out by name; later, it takes part again."""
    return _episodes(case, "a client that raises", "fedbn", "the network drive is gone", _mood(case, "raise"))


def app_killed(case: Case) -> Outcome:
    """SIGKILL the process of a message."""
    return _episodes(case, "SIGKILL an app", "fedbn", "killed by SIGKILL", _mood(case, "kill"))


def client_hangs(case: Case) -> Outcome:
    """Make one site's process hang. The round goes on at its deadline, and the site takes part again later.

    The method is FedAvg, which keeps no tensors at the sites. So it does not matter whether the process that hung has
    finished its reply after the deadline.
    """
    return _episodes(case, "a client that never answers", "fedavg", "no reply before the deadline", _mood(case, "hang"))


def disk_full_at_a_site(case: Case) -> Outcome:
    """Fill the disk with a site's state for a while. The site sends no reply, and the other sites go on."""
    state = case.federation.kit / "sites" / case.federation.sites[1] / "state"
    return _episodes(case, "disk full at a site", "fedbn", "No space left on device", lambda: filled(state))


def disk_full_at_the_server(case: Case) -> Outcome:
    """Fill the disk with the results for a while. The log reports it, and in the end no result is missing."""
    return _episodes(case, "disk full at the server", "fedbn", "", lambda: filled(case.federation.result("")))


def _episodes(case: Case, drill: str, method: str, reason: str, trouble: Callable[[], AbstractContextManager[None]]) -> Outcome:
    """Make one run, and cause ``trouble`` in it ``case.times`` times.

    Each time, ``trouble`` lasts until the server refuses a client for ``reason``. If ``reason`` is empty, it lasts until
    ``fl-bn submit`` prints that there is no checkpoint.
    """
    values = {"rounds": 4 * case.times + 4, "evaluate-every": 1000, "round-timeout": 75.0 if method == "fedavg" else 120.0}
    config = case.config(method, dataset="tools.deployment.moody:load", **values)
    folder = case.federation.result(config["name"])

    def seen() -> int:
        if reason:
            return (folder / "clients.csv").read_text().count(reason)
        return "".join(run.said).count("no checkpoint after round")

    with running(case, config) as run:
        for _ in range(case.times):
            time.sleep(case.rng.uniform(0.0, 2.0))  # at most two rounds, so there are rounds left after the last time
            before = seen()
            with trouble():
                wait_until("it shows", lambda before=before: seen() > before or run.process.poll() is not None, 400)
            rounds = rounds_of(folder)
            wait_until("a round without it", lambda rounds=rounds: rounds_of(folder) > rounds or run.process.poll() is not None, 400)
        outcome = case.outcome(drill, config, "any time", case.times)
        outcome.what = f"said in {'clients.csv' if reason else 'the log'}, {run.end()}"
    outcome.expect("rounds.csv has every round", rounds_of(folder) == config["rounds"])
    compare(case, config, outcome, kept=(False,))
    return outcome


def _mood(case: Case, mood: str) -> Callable[[], AbstractContextManager[None]]:
    """Return a block during which one site's data set (``moody``) has the mood."""
    file = case.federation.mood(case.federation.sites[1])

    @contextmanager
    def moody() -> Iterator[None]:
        file.write_text(mood)
        try:
            yield
        finally:
            file.write_text("")

    return moody


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Fill the file system of ``folder`` during the ``with`` block. ``folder`` must be the mount point of a small file system.

    Raises:
        RuntimeError: ``folder`` is not a mount point.
    """
    if not os.path.ismount(folder):
        raise RuntimeError(f"{folder} must be a file system of its own (Federation(small_disks=True), as root)")
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as target, suppress(OSError):
        while True:
            target.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


# A clock


def clock_skew(case: Case) -> Outcome:
    """Stop a site during a run, and start it again with a wrong clock; correct the clock later.

    The clock is five minutes ahead, so Flower refuses the site, whose programs end, or five minutes behind. Only the clock
    that the site's Python processes read is wrong (``skewed/sitecustomize.py``). TLS reads the true clock.
    """
    federation, ahead = case.federation, case.rng.random() < 0.7
    site = case.rng.choice(federation.sites)
    part, words = f"sites/{site}", "supernode ended" if ahead else "SuperNode ID"
    usual = federation.environment[part]
    clock = {"PYTHONPATH": f"{Path(__file__).with_name('skewed')}:{ROOT}", "FL_BN_SKEW": str(SKEW if ahead else -SKEW)}
    config = case.config("fedbn", rounds=8, **{"retry-timeout": 20.0})
    with running(case, config, until=4) as run:
        outcome = case.outcome("clock skew of five minutes", config, run.moment)
        federation.stop(part)
        before = federation.log(part).count(words)
        federation.environment[part] = {**usual, **clock}
        federation.start(part)
        wait_until(f"site {site}: {words}", lambda: federation.log(part).count(words) > before, 120)
        time.sleep(case.rng.uniform(0.0, 10.0))
        federation.stop(part)
        federation.environment[part], before = usual, starts(federation, site)
        federation.start(part)
        wait_until(f"site {site} is back", lambda: starts(federation, site) > before, 180)
        outcome.what = f"site {site} {'ahead' if ahead else 'behind'}; {run.end()}"
    compare(case, config, outcome)
    return outcome


DRILLS: dict[str, Callable[[Case], Outcome]] = {
    "supernode": kill_supernode,
    "serverapp": kill_serverapp,
    "superlink": kill_superlink,
    "port": port_taken,
    "certificate": certificate_renewed,
    "stopped": site_stopped,
    "cut": network_cut,
    "app": app_killed,
    "raise": client_raises,
    "hang": client_hangs,
    "site-disk": disk_full_at_a_site,
    "server-disk": disk_full_at_the_server,
    "skew": clock_skew,
}
IN_ONE_RUN = ("app", "raise", "hang", "site-disk", "server-disk")


def starts(federation: Federation, site: str) -> int:
    """Return how often the site's SuperNode has connected."""
    return federation.log(f"sites/{site}").count("SuperNode ID")
