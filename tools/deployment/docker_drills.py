"""Kill or disconnect containers of docker-compose.yml's federation while it trains.

The program reports what happened, how long it took, and what was lost.

    python -m tools.deployment.docker_drills                                  # every drill twice, some 40 minutes on two cores
    python -m tools.deployment.docker_drills --repetitions 1 --only cut       # one of them
    python -m tools.deployment.docker_drills --output drills                  # drills.csv and drills.md
    python -m tools.deployment.docker_drills --repetitions 1 --only clientapp message --times 20

The criterion is that of tools/deployment/drills.py. A run in one process, in which exactly the same replies were missing,
must give the same final model and the same tensors at each site, bit for bit. After a resume, no reply may be missing.

The image is built from this checkout first.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fl_bn.support.flower_config import flower_config
from tests.deployment.federation import wait_until
from tools.deployment.docker_federation import ROOT, SITES, DockerFailed, DockerFederation, command, no_docker
from tools.deployment.outcomes import Case, Outcome, compare, compare_with_gaps

METHODS = ("fedbn", "hbn", "fedtan")
COLUMNS = ("drill", "method", "moment", "what", "seconds", "missing", "lost")
RESULTS = "/kit/server/results"
ROUNDS = 8  # of a run whose ClientApps die, for each death


class Snapshot:
    """Hold copies of the containers' results and sites' states, in the folders of a kit.

    ``outcomes`` can then compare them as those of a federation of processes on this machine.
    """

    sites = list(SITES)

    def __init__(self, federation: DockerFederation, folder: Path) -> None:
        self.kit, self._federation = folder, federation

    def fetch(self) -> None:
        self._federation.fetch(_made(self.kit / "server" / "results"))
        for place, site in enumerate(SITES, 1):
            state = _made(self.kit / "sites" / site / "state")
            command("docker", "cp", f"{self._federation.container(f'clientapp-{place}')}:/state/.", str(state))

    def result(self, name: str) -> Path:
        return self.kit / "server" / "results" / name

    def log(self, part: str, program: str) -> str:
        return self._federation.logs(program, tail=2000)


@dataclass(frozen=True)
class Drill:
    """Hold one run that a drill disturbs: the federation, the case, the run config and the outcome."""

    federation: DockerFederation
    case: Case
    config: dict[str, Any]
    outcome: Outcome

    @property
    def site(self) -> int:
        """The number of the site that the drill hits: 1, 2 or 3."""
        return 1 + self.case.repetition % 3

    def rounds(self) -> int:
        """Return the number of rounds that the server has finished."""
        lines = self.federation.inside("serverapp", "sh", "-c", f"cat {RESULTS}/{self.config['name']}/rounds.csv || true")
        return sum(line[:1].isdigit() for line in lines.splitlines())

    def has_checkpoint(self) -> bool:
        return "round-" in self.federation.inside("serverapp", "sh", "-c", f"ls {RESULTS}/{self.config['name']}/checkpoints || true")

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[str]]:
        """Start the run; yield its process at a random moment after its first round."""
        process = self.federation.start_run(flower_config(self.config))
        said: list[str] = []
        drain = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
        drain.start()
        try:
            begin = time.monotonic()
            while not self.rounds():
                if process.poll() is not None or time.monotonic() - begin > 300:
                    raise DockerFailed("no round was finished:\n" + "".join(said[-30:]))
                time.sleep(1)
            time.sleep(self.case.rng.uniform(0, 25))
            self.outcome.moment = f"after round {self.rounds()} of {self.config['rounds']}"
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            drain.join(5)
            for container in command("docker", "ps", "-q", "--filter", f"name={self.federation.project}_run_run").split():
                command("docker", "rm", "--force", container, check=False)  # it only reads the run's log: the run itself goes on

    def goes_on(self, process: subprocess.Popen[str], what: str) -> None:
        """Wait until the run ends by itself; compare it with a run in one process in which the same replies are
        missing.
        """
        try:
            code = process.wait(900)
        except subprocess.TimeoutExpired:
            self.outcome.what = f"{what}; the run hangs"
            return
        self.outcome.what = f"{what}; the run {'completed' if code == 0 else f'failed ({code})'}"
        if code == 0:
            self._snapshot().fetch()
            compare_with_gaps(self.case, self.config, self.outcome)

    def resumes(self, what: str) -> None:
        """Submit the run again, from its last checkpoint if there is one; its result must be that of an uninterrupted
        run.
        """
        there = self.has_checkpoint()
        self.federation.run(flower_config({**self.config, "resume": "latest"} if there else self.config), timeout=900)
        self.outcome.what = f"{what}; resumed and completed" if there else f"{what}; no checkpoint yet, submitted anew"
        self._snapshot().fetch()
        compare(self.case, self.config, self.outcome)

    def _snapshot(self) -> Snapshot:
        snapshot = self.case.federation
        assert isinstance(snapshot, Snapshot)
        return snapshot


def supernode(drill: Drill) -> None:
    """`docker kill` a SuperNode, `docker start` it at once; the SuperLink refuses it until it notices that the killed
    one is dead.
    """
    name = f"supernode-{drill.site}"
    with drill.started() as process:
        container = drill.federation.container(name)
        command("docker", "kill", container)
        command("docker", "start", container)
        drill.goes_on(process, f"{name} killed and started at once")
    back = drill.federation.wait_healthy(name, f"clientapp-{drill.site}")
    drill.outcome.what += (
        f" ({_restarts(drill.federation, name)} refused starts before it was let in)" if back < 170 else ", but stays away"
    )


def crash(drill: Drill) -> None:
    """Let a SuperNode's process die; the Docker engine alone starts it again."""
    name = f"supernode-{drill.site}"
    with drill.started() as process:
        command("docker", "exec", drill.federation.container(name), "sh", "-c", "kill -9 -1", check=False)
        drill.goes_on(process, f"{name} crashed, restarted by the engine")
    drill.federation.wait_healthy(name, f"clientapp-{drill.site}")


def serverapp(drill: Drill) -> None:
    """`docker kill` the ServerApp, `docker start` it, submit the run again with resume='latest'."""
    with drill.started():
        container = drill.federation.container("serverapp")
        command("docker", "kill", container)
        command("docker", "start", container)
        drill.federation.wait_healthy("serverapp")
        drill.resumes("serverapp killed and started")


def superlink(drill: Drill) -> None:
    """`docker kill` the SuperLink, `docker start` it: its state is in a database, so the run goes on."""
    with drill.started() as process:
        container = drill.federation.container("superlink")
        command("docker", "kill", container)
        command("docker", "start", container)
        drill.goes_on(process, "superlink killed and started")
    drill.federation.wait_healthy()


def cut(drill: Drill) -> None:
    """`docker network disconnect` a site's SuperNode and ClientApp for a minute."""
    network = drill.federation.network("sites")
    containers = [drill.federation.container(f"{role}-{drill.site}") for role in ("supernode", "clientapp")]
    with drill.started() as process:
        for container in containers:
            command("docker", "network", "disconnect", network, container)
        time.sleep(60)
        seen = drill.federation.health(f"supernode-{drill.site}")
        for container in containers:
            command("docker", "network", "connect", network, container)
        drill.goes_on(process, f"site-{drill.site} cut off for 60 s (its SuperNode: {seen})")
    drill.federation.wait_healthy()


def everything(drill: Drill) -> None:
    """`docker kill` all containers, start them again, submit the run again with resume='latest'."""
    with drill.started():
        drill.federation.compose("kill")
        drill.federation.up()
        drill.resumes("all containers killed and started")


def clientapp(drill: Drill) -> None:
    """`docker restart` a ClientApp at random moments; all deaths are in one run."""

    def restart() -> tuple[str, float]:
        name = f"clientapp-{drill.case.rng.randint(1, 3)}"
        time.sleep(drill.case.rng.uniform(0, 10))
        begin = time.monotonic()
        command("docker", "restart", drill.federation.container(name))
        return name, begin

    _deaths(drill, restart)


def message(drill: Drill) -> None:
    """SIGKILL the process that works on a message; all deaths are in one run."""

    def kill() -> tuple[str, float]:
        name = f"clientapp-{drill.case.rng.randint(1, 3)}"
        container = drill.federation.container(name)
        time.sleep(drill.case.rng.uniform(0, 10))
        while True:
            pids = wait_until("a message", lambda: _message_processes(container), 120, 0.05)
            with suppress(ProcessLookupError):
                os.kill(pids[0], signal.SIGKILL)
                return name, time.monotonic()

    _deaths(drill, kill)


def _deaths(drill: Drill, die: Callable[[], tuple[str, float]]) -> None:
    """Make ClientApps die, ``case.times`` times in one run, each time in another round.

    The outcome has the seconds from each death to the end of the next round, and the lines that the server logged about
    the deaths. A ClientApp that dies between two messages causes no such line.

    Args:
        drill: The run.
        die: Kills one ClientApp. It returns the name of the service in docker-compose.yml, and the time of the death
            (``time.monotonic()``).
    """
    seconds: list[float] = []
    with drill.started() as process:
        before = len(_told(drill))
        while len(seconds) < drill.case.times and process.poll() is None:
            name, begin = die()
            rounds = drill.rounds()
            wait_until("a round ends", partial(lambda rounds: drill.rounds() > rounds or process.poll() is not None, rounds), 400)
            seconds.append(time.monotonic() - begin)
            drill.federation.wait_healthy(name)
        drill.goes_on(process, f"{len(seconds)} deaths")
    told = _told(drill)[before:]
    drill.outcome.times = len(seconds)
    drill.outcome.what += f"; seconds to the end of a round: {', '.join(f'{each:.0f}' for each in sorted(seconds))}"
    drill.outcome.what += f"; told {len(told)} times" + "".join(f"; {line}" for line in sorted(set(told)))
    drill.outcome.expect("a site's name in every line", all(any(site in line for site in SITES) for line in told))


def _told(drill: Drill) -> list[str]:
    """Return the lines that the server has logged about messages that it sends again after a failure."""
    lines = drill.federation.logs("serverapp", tail=10_000).splitlines()
    return [line.partition("WARNING")[2].lstrip(" :") for line in lines if line.endswith("it is asked again")]


def _message_processes(container: str) -> list[int]:
    """Return the ids of the processes that work on a message in a ClientApp's ``container``.

    Such a process has no children. Its ancestors are the engine's init, the host, the cold process and a watcher (see
    ``fl_bn_site/app_host.py``).
    """
    lines = command("docker", "top", container, "-eo", "pid,ppid", check=False).splitlines()[1:]
    parents = {int(pid): int(parent) for pid, parent in (line.split() for line in lines if line.replace(" ", "").isdigit())}

    def depth(pid: int) -> int:
        return 1 + depth(parents[pid]) if pid in parents else 0

    return [pid for pid in parents if depth(pid) >= 5 and pid not in parents.values()]


DRILLS: dict[str, Callable[[Drill], None]] = {
    "supernode": supernode,
    "crash": crash,
    "serverapp": serverapp,
    "superlink": superlink,
    "cut": cut,
    "everything": everything,
    "clientapp": clientapp,
    "message": message,
}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _restarts(federation: DockerFederation, service: str) -> int:
    return int(command("docker", "inspect", "--format", "{{.RestartCount}}", federation.container(service)))


def perform(federation: DockerFederation, name: str, repetition: int, times: int) -> Outcome:
    """Wait until the federation is healthy, and do one repetition of the drill ``name``.

    Args:
        federation: The federation.
        name: A key of ``DRILLS``.
        repetition: The number of the repetition, from which its random moments are drawn.
        times: The number of ClientApps that die, for the drills ``clientapp`` and ``message``.
    """
    federation.wait_healthy()
    with tempfile.TemporaryDirectory() as folder:
        snapshot: Any = Snapshot(federation, Path(folder) / "fetched")
        case = Case(snapshot, Path(folder), repetition, random.Random(f"docker {name} {repetition}"), times)
        method = "fedbn" if name in ("supernode", "crash", "clientapp", "message") else METHODS[(repetition + list(DRILLS).index(name)) % 3]
        values = {"rounds": 40, "evaluate-every": 40, "round-timeout": 180.0, "name": f"{name}-seed{repetition}", "max-failed-rounds": 4}
        if name in ("clientapp", "message"):
            values |= {"rounds": ROUNDS * times + 4, "evaluate-every": 1000}
        values |= {"dataset": "digits", "data-path": ""}  # the containers have no file of this machine
        outcome = Outcome(name, repetition, method, "")
        begin = time.monotonic()
        try:
            DRILLS[name](Drill(federation, case, case.config(method, **values), outcome))
        except Exception as error:
            outcome.notes.append(f"the drill itself failed: {type(error).__name__}: {error}"[:2000])
        outcome.seconds = time.monotonic() - begin
        return outcome


def row(outcome: Outcome) -> dict[str, str]:
    lost = f"nothing: identical {outcome.identical}" if outcome.ok else f"? {'; '.join(outcome.notes)}"
    words = (DRILLS[outcome.drill].__doc__ or "").split(";")[0].rstrip(".")
    values = (words, outcome.method, outcome.moment, outcome.what, f"{outcome.seconds:.0f}", outcome.missing or "none", lost)
    return dict(zip(COLUMNS, values, strict=True))


def markdown(rows: list[dict[str, str]]) -> str:
    lines = ["| event | method | when | what happened | seconds | replies missing | lost |", "|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row[column].replace('|', '/') for column in COLUMNS)} |" for row in rows)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills and cuts in docker-compose.yml's federation.")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--times", type=int, default=3, help="deaths in one run, of the drills clientapp and message")
    parser.add_argument("--only", nargs="+", choices=list(DRILLS), default=list(DRILLS))
    parser.add_argument("--output", default="", help="write OUTPUT.csv and OUTPUT.md")
    parser.add_argument("--as-built", action="store_true", help="use the existing image; build none")
    parser.add_argument("--compose", default="docker-compose", help="the compose command")
    given = parser.parse_args()
    if reason := no_docker():
        print(f"docker-compose.yml cannot be started here: {reason}", file=sys.stderr)
        return 2
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # silences the runs in one process: some lose clients on purpose
    outcomes: list[Outcome] = []
    with DockerFederation("fl-bn-drills", given.compose) as federation:
        if not given.as_built:
            federation.build()
        federation.up()
        for repetition in range(given.repetitions):
            for name in given.only:
                outcomes.append(perform(federation, name, repetition, given.times))
                print(row(outcomes[-1]), flush=True)
                if given.output:
                    rows = [row(outcome) for outcome in outcomes]
                    (ROOT / f"{given.output}.md").write_text(markdown(rows))
                    with (ROOT / f"{given.output}.csv").open("w", newline="") as file:
                        writer = csv.DictWriter(file, COLUMNS)
                        writer.writeheader()
                        writer.writerows(rows)
    print(markdown([row(outcome) for outcome in outcomes]))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
