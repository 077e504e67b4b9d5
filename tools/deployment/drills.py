"""Rehearse failures of a real deployment. Each drill causes one failure, and returns what happened and what was lost.

All drills have the same criterion. The final model must be, bit for bit, that of a run in one process in which exactly
the same replies were missing. After a resume, no reply may be missing.
"""

from __future__ import annotations

import csv
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from tests.deployment.federation import Federation, message_processes, wait_until
from tools.deployment.outcomes import Case, Outcome, compare, compare_all, compare_with_gaps, rounds_of, run_folders

METHODS = ("fedbn", "hbn", "fedtan")
MEMORY = 3 * 10**9  # bytes for all processes that compute a site's messages; ``moody`` asks for more


def kill_supernode(case: Case) -> Outcome:
    """SIGKILL one SuperNode at a random moment of a FedBN run.

    ``fl-bn start`` starts it again. The site must then have the BatchNorm layers that it had kept before.
    """
    site = case.rng.choice(case.federation.sites)
    config = case.config("fedbn", **{"round-timeout": 150.0, "name": f"supernode-{case.repetition}"})
    before = len(starts(case.federation, site))
    with Running(case, config) as (run, moment):
        os.kill(case.federation.find("supernode", site)[0], signal.SIGKILL)
        outcome = Outcome("SIGKILL a SuperNode", case.repetition, "fedbn", moment)
        code = run.wait(600)
    outcome.what = f"site {site} killed; run {'completed' if code == 0 else f'failed ({code})'}"
    wait_until(f"site {site} is back", lambda: len(starts(case.federation, site)) > before, 180)
    if code == 0:
        compare_with_gaps(case, config, outcome)
    return outcome


def kill_message(case: Case) -> Outcome:
    """SIGKILL the process of a message at a random moment, ``case.times`` times in one run.

    The server asks the site again, so that the run loses time but no reply.
    """
    site = case.federation.sites[1]
    config = case.config("fedbn", **{"rounds": 18 * case.times + 4, "evaluate-every": 1000, "name": f"message-{case.repetition}"})
    lost: list[float] = []

    def told() -> int:
        return case.federation.log("server", "serverapp").count(f"site {site}: its process was killed by SIGKILL; it is asked again")

    with Running(case, config, wait=False) as (run, _):
        wait_until("a round", lambda: rounds_done(case, config) >= 1, 600)
        while len(lost) < case.times and run.poll() is None:
            time.sleep(case.rng.uniform(0.0, 5.0))
            pids = wait_until("a message", lambda: message_processes(case.federation, site), 120, 0.01)
            time.sleep(case.rng.uniform(0.0, 0.2))
            before, rounds, begin = told(), rounds_done(case, config), time.monotonic()
            try:
                os.kill(pids[0], signal.SIGKILL)
                wait_until("the server is told", lambda before=before: told() > before, 5)
            except (ProcessLookupError, TimeoutError):
                continue  # it had sent its answer already
            wait_until("the round ends", lambda rounds=rounds: rounds_done(case, config) > rounds or run.poll() is not None, 400)
            lost.append(time.monotonic() - begin)
        code = run.wait(3600)
    what = f"told by name and reason, run {'completed' if code == 0 else f'failed ({code})'}"
    outcome = Outcome("SIGKILL the process of a message", case.repetition, "fedbn", "any time", what, times=len(lost))
    outcome.notes.append(f"seconds from a death to the end of its round: {', '.join(f'{seconds:.0f}' for seconds in sorted(lost))}")
    compare_all(case, [config], outcome)
    return outcome


def kill_serverapp(case: Case) -> Outcome:
    """SIGKILL the ServerApp at a random moment, and resume: the result must be identical to an uninterrupted run."""
    method = METHODS[case.repetition % len(METHODS)]
    config = case.config(method)
    with Running(case, config) as (run, moment):
        if found := case.federation.find("serverapp"):
            os.kill(found[-1], signal.SIGKILL)
        outcome = Outcome("SIGKILL the ServerApp", case.repetition, method, moment)
        _resume(case, config, outcome, "" if found else "it had not started; ")
        run.send_signal(signal.SIGINT)
    return outcome


def kill_superlink(case: Case) -> Outcome:
    """SIGKILL the SuperLink at a random moment and start it again; the run goes on, or is resumed."""
    method = METHODS[case.repetition % len(METHODS)]
    config = case.config(method)
    with Running(case, config) as (run, moment):
        os.kill(case.federation.find("superlink")[0], signal.SIGKILL)
        outcome = Outcome("SIGKILL the SuperLink", case.repetition, method, moment)
        code = run.wait(600)
    if code == 0:
        outcome.what = "the run went on by itself"
        compare(case, config, outcome)
    else:
        _resume(case, config, outcome, f"submit ended with {code}; ")
    return outcome


def truncate_checkpoint(case: Case) -> Outcome:
    """SIGKILL the ServerApp once it has two checkpoints, truncate the newest at a random byte, and resume.

    This is done ``case.times`` times.
    """
    config = case.config("fedbn", rounds=2 * case.times + 3)
    outcome = Outcome("truncated checkpoint", case.repetition, "fedbn", "when there are two checkpoints", times=case.times)
    cut = 0
    with ExitStack() as runs:
        for _ in range(case.times):
            run, _ = runs.enter_context(Running(case, {**config, "resume": "latest"} if cut else config, wait=False))
            folder = wait_until("two checkpoints", lambda cut=cut: _checkpointed(case, 2, beyond=cut), 300)
            os.kill(case.federation.find("serverapp")[-1], signal.SIGKILL)
            newest = sorted((folder / "checkpoints").glob("round-*.safetensors"))[-1]
            cut = int(newest.stem.removeprefix("round-"))
            os.truncate(newest, case.rng.randrange(newest.stat().st_size))
            run.send_signal(signal.SIGINT)
            wait_until("the ServerApp is gone", lambda: not case.federation.find("serverapp"), 60)
        _resume(case, config, outcome)
    outcome.what = f"set aside, and resumed from the one before ({outcome.what})"
    return outcome


def client_raises(case: Case) -> Outcome:
    """Make one site's data unreadable for a while.

    The server must leave the site out and name it. Later, the site must take part again.
    """
    return _in_a_mood(case, "raise", "a client that raises", "the network drive is gone", **{"round-timeout": 120.0})


def client_hangs(case: Case) -> Outcome:
    """Make one site's process hang. The round must go on at its deadline, and the site must take part again later.

    The method is FedAvg, which keeps no tensors at the sites. So it does not matter whether the process that hung has
    finished its reply after the deadline.
    """
    return _in_a_mood(case, "hang", "a client that never answers", "no reply before the deadline", **{"round-timeout": 75.0})


def memory_limit_hit(case: Case) -> Outcome:
    """Make one site's data need more memory than its control group allows, ``case.times`` times in one run.

    The kernel then kills the process of the message. The server must name the site and the reason, and send the message again.
    """
    federation, site = case.federation, case.federation.sites[1]
    config = case.config(
        "fedbn",
        dataset="tools.deployment.moody:load",
        **{"rounds": 12 * case.times + 4, "evaluate-every": 1000, "name": f"memory-{case.repetition}"},
    )
    lost: list[float] = []

    def told() -> int:
        said = f"site {site}: its process was killed by SIGKILL: out of memory; it is asked again"
        return federation.log("server", "serverapp").count(said)

    with control_group(MEMORY, federation.find("clientapp", site)), Running(case, config, wait=False) as (run, _):
        wait_until("a round", lambda: rounds_done(case, config) >= 1, 600)
        for _ in range(case.times):
            time.sleep(case.rng.uniform(0.0, 5.0))
            before = told()
            federation.mood(site).write_text("memory")
            wait_until("the server is told", lambda before=before: told() > before or run.poll() is not None, 120)
            federation.mood(site).write_text("")
            rounds, begin = rounds_done(case, config), time.monotonic()
            wait_until("the round ends", lambda rounds=rounds: rounds_done(case, config) > rounds or run.poll() is not None, 400)
            lost.append(time.monotonic() - begin)
        code = run.wait(3600)
    what = f"told by name and reason, run {'completed' if code == 0 else f'failed ({code})'}"
    outcome = Outcome("the memory limit of a site hit", case.repetition, "fedbn", "any time", what, times=case.times)
    outcome.notes.append(f"seconds from a death to the end of its round: {', '.join(f'{seconds:.0f}' for seconds in sorted(lost))}")
    compare_all(case, [config], outcome)
    return outcome


@contextmanager
def control_group(most: int, pids: Sequence[int]) -> Iterator[None]:
    """Limit the memory of the processes ``pids``, and of those that they fork, to ``most`` bytes during the block (root only)."""
    one = Path("/sys/fs/cgroup/memory")  # of version 1
    group = (one if one.is_dir() else Path("/sys/fs/cgroup")) / f"fl-bn-drill-{os.getpid()}"
    group.mkdir()
    (group / ("memory.limit_in_bytes" if one.is_dir() else "memory.max")).write_text(str(most))
    home = one / Path("/proc/self/cgroup").read_text().partition(":memory:/")[2].partition("\n")[0] if one.is_dir() else group.parent
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        while left := (group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                (home / "cgroup.procs").write_text(left[0])
        group.rmdir()


def site_renewed(case: Case) -> Outcome:
    """Renew a site's key during a run, ``case.times`` times. The site must go on in the same run; the other sites need no change.

    The method is FedAvg, which keeps no tensors at the sites. So it does not matter whether the SuperNode ended before or
    after the site had trained.
    """
    federation, site = case.federation, case.federation.sites[1]
    config = case.config("fedavg", **{"rounds": 14 * case.times + 4, "evaluate-every": 1000, "name": f"renewed-{case.repetition}"})
    lost: list[float] = []
    with Running(case, config, wait=False) as (run, _):
        wait_until("a round", lambda: rounds_done(case, config) >= 1, 300)
        for _ in range(case.times):
            time.sleep(case.rng.uniform(0.0, 5.0))
            rounds, before, begin = rounds_done(case, config), len(starts(federation, site)), time.monotonic()
            federation.membership("renew", "--site", site)  # the new key lies in the site's folder, where its ``fl-bn start`` finds it
            wait_until("the site is back", lambda before=before: len(starts(federation, site)) > before, 240)
            wait_until("a round", lambda rounds=rounds: rounds_done(case, config) > rounds + 1 or run.poll() is not None, 400)
            lost.append(time.monotonic() - begin)
        code = run.wait(3600)
    what = f"back by itself with the other key, run {'completed' if code == 0 else f'failed ({code})'}"
    outcome = Outcome("a site's key renewed in mid-run", case.repetition, "fedavg", "any time", what, times=case.times)
    outcome.notes.append(f"seconds until the site was back and had trained: {', '.join(f'{seconds:.0f}' for seconds in sorted(lost))}")
    compare_with_gaps(case, config, outcome, kept=(False,))
    return outcome


def disk_full_at_a_site(case: Case) -> Outcome:
    """Fill the disk with a site's state for a while. The site must then send no reply, and the other sites must go on."""
    state = case.federation.kit / "sites" / case.federation.sites[1] / "state"
    config = case.config("fedbn", name=f"site-disk-{case.repetition}")
    return _episodes(case, config, "disk full at a site", "No space left on device", lambda: filled(state))


def disk_full_at_the_server(case: Case) -> Outcome:
    """Fill the disk with the results for a while. The log must report it, and in the end no result may be missing."""
    config = case.config("fedbn", name=f"server-disk-{case.repetition}")
    results = case.federation.result("")
    return _episodes(case, config, "disk full at the server", "", lambda: filled(results))


DRILLS: dict[str, Callable[[Case], Outcome]] = {
    "supernode": kill_supernode,
    "message": kill_message,
    "serverapp": kill_serverapp,
    "superlink": kill_superlink,
    "checkpoint": truncate_checkpoint,
    "raise": client_raises,
    "hang": client_hangs,
    "memory": memory_limit_hit,
    "renew": site_renewed,
    "site-disk": disk_full_at_a_site,
    "server-disk": disk_full_at_the_server,
}
ONE_PER_RUN = ("supernode", "serverapp", "superlink")


def _in_a_mood(case: Case, mood: str, drill: str, reason: str, **values: Any) -> Outcome:
    file = case.federation.mood(case.federation.sites[1])

    @contextmanager
    def moody() -> Iterator[None]:
        file.write_text(mood)
        try:
            yield
        finally:
            file.write_text("")

    method = "fedavg" if mood == "hang" else "fedbn"
    config = case.config(method, dataset="tools.deployment.moody:load", name=f"{mood}-{case.repetition}") | values
    return _episodes(case, config, drill, reason, moody)


def _episodes(case: Case, config: dict[str, Any], drill: str, reason: str, trouble: Callable[[], AbstractContextManager[None]]) -> Outcome:
    """Make one run, and cause ``trouble`` in it ``case.times`` times.

    Each time, ``trouble`` lasts until the server refuses a client for ``reason``. If ``reason`` is empty, it lasts until
    the server logs that it could not write a checkpoint.
    """
    config = {**config, "rounds": 2 * case.times + 4, "evaluate-every": 1000}
    csv_file = case.federation.result(config["name"]) / "clients.csv"

    def seen() -> int:
        return text_of(csv_file).count(reason) if reason else case.federation.log("server", "serverapp").count("no checkpoint after round")

    with Running(case, config, wait=False) as (run, _):
        wait_until("a round", lambda: rounds_done(case, config) >= 1, 300)
        for _ in range(case.times):
            time.sleep(case.rng.uniform(0.0, 5.0))
            before = seen()
            with trouble():
                wait_until("it shows", lambda before=before: seen() > before or run.poll() is not None, 400)
            rounds = rounds_done(case, config)
            wait_until("a round without it", lambda rounds=rounds: rounds_done(case, config) > rounds or run.poll() is not None, 400)
        code = run.wait(3600)
    what = f"said in {'clients.csv' if reason else 'the log'}, run {'completed' if code == 0 else f'failed ({code})'}"
    outcome = Outcome(drill, case.repetition, config["method"], "any time", what, times=case.times)
    with (case.federation.result(config["name"]) / "rounds.csv").open() as file:
        took = sorted(float(row["seconds"]) for row in csv.DictReader(file))
    outcome.notes.append(f"seconds of a round: median {median(took):.1f}, longest {', '.join(f'{seconds:.1f}' for seconds in took[-3:])}")
    if rounds_done(case, config) != config["rounds"]:
        outcome.notes.append(f"rounds.csv has {rounds_done(case, config)} of {config['rounds']} rounds")
    compare_with_gaps(case, config, outcome, kept=(False,))
    return outcome


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


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def rounds_done(case: Case, config: dict[str, Any]) -> int:
    return max(0, len(text_of(case.federation.result(config["name"]) / "rounds.csv").splitlines()) - 1)


class Running:
    """Submit a run for a ``with`` block, which begins at a random moment of the run. Its end kills ``fl-bn submit``.

    The ``with`` statement gives the process of ``fl-bn submit`` and the moment in words. ``said`` has the lines that
    ``fl-bn submit`` has printed so far.
    """

    def __init__(self, case: Case, config: dict[str, Any], wait: bool = True, until: int = 0) -> None:
        """Define the run to submit, and when the block begins.

        Args:
            case: The repetition of the drill.
            config: The run config.
            wait: True: begin the block at a random moment. False: begin it at once.
            until: The block begins in or before this round: after a random number of rounds, less than ``until``, and up to
                12 s more. 0: the number of rounds of the run.
        """
        self._case, self._config, self._wait, self._until = case, config, wait, until or config["rounds"]
        self.said: list[str] = []

    def __enter__(self) -> tuple[subprocess.Popen[str], str]:
        begin = time.monotonic()
        self._runs = set(run_folders(self._case))
        self._process = self._case.federation.submit(self._config)
        self._drain = drained(self._process, self.said)
        if not self._wait:
            return self._process, ""
        newest = wait_until("the run directory", lambda: set(run_folders(self._case)) - self._runs, 180).pop()
        target = self._case.rng.randrange(self._until)
        wait_until(f"round {target}", lambda: rounds_of(newest) >= target or self._process.poll() is not None, 300)
        time.sleep(self._case.rng.uniform(0.0, 12.0))
        return self._process, f"{time.monotonic() - begin:.0f} s after submission, {rounds_of(newest)} rounds done"

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._drain.join(5)


def drained(process: subprocess.Popen[str], said: list[str]) -> threading.Thread:
    """Start a thread that adds the lines of ``process`` to ``said`` until the process ends."""
    assert process.stdout is not None
    thread = threading.Thread(target=said.extend, args=(process.stdout,), daemon=True)
    thread.start()
    return thread


def _checkpointed(case: Case, count: int, beyond: int = 0) -> Path | None:
    """Return the folder of a run with ``count`` or more checkpoints, the newest of which is of a round after ``beyond``.

    None: there is no such run yet.
    """
    for folder in run_folders(case):
        found = sorted(int(path.stem.removeprefix("round-")) for path in (folder / "checkpoints").glob("round-*.safetensors"))
        if len(found) >= count and found[-1] > beyond:
            return folder
    return None


def starts(federation: Federation, site: str) -> list[str]:
    return [line for line in federation.log(f"sites/{site}", "supernode").splitlines() if "SuperNode ID" in line]


def _resume(case: Case, config: dict[str, Any], outcome: Outcome, what: str = "") -> None:
    """Submit the run again, and compare its result. It resumes from the last checkpoint; without one, it begins anew."""
    if _checkpointed(case, 1):
        config, what = {**config, "resume": "latest"}, f"{what}resumed"
    else:
        what += "no checkpoint yet: submitted anew"
    out = case.federation.run(config)
    going_on = [line[line.index("going on after") :] for line in out.splitlines() if "going on after" in line]
    outcome.what = f"{what} ({going_on[0]})" if going_on else what
    compare(case, config, outcome)


def perform(federation: Federation, folder: Path, do: Callable[[Case], Outcome], drill: str, number: int, times: int = 1) -> Outcome:
    """Do the drill ``do`` once. An error in the drill itself becomes an outcome, too.

    Args:
        federation: The running federation.
        folder: The folder for the runs in one process with which the result is compared.
        do: The drill.
        drill: The name of the drill.
        number: The number of the repetition, from which its random moments are drawn.
        times: How often the failure is caused, if it can be repeated in one run.
    """
    begin, case = time.monotonic(), Case(federation, folder, number, random.Random(f"{drill} {number}"), times)
    try:
        outcome = do(case)
    except Exception as error:
        outcome = Outcome(drill, number, "", "", f"the drill itself failed: {type(error).__name__}: {error}"[:400], times=times)
    outcome.seconds = time.monotonic() - begin
    for left in run_folders(case):
        shutil.rmtree(left, ignore_errors=True)
    return outcome
