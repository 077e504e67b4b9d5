"""What can die or fail in a deployment, done to a real one: each drill returns what happened, and whether anything was lost.

The measure is always the same: the final model must be, bit for bit, that of a run in one process in which exactly the same replies
were missing; after a resume none may be missing.
"""

from __future__ import annotations

import csv
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.app import app as CLIENT_APP
from fl_bn.data.dataset import load
from fl_bn.flower import run_in_process
from tests.deployment.federation import SMALL, Federation, differing, in_process, personal, wait_until

METHODS = ("fedbn", "hbn", "fedtan")


@dataclass
class Outcome:
    """``identical``: to the uninterrupted run, or to one in which exactly the replies named in ``missing`` were; "" if it is neither."""

    drill: str
    repetition: int
    method: str
    moment: str
    what: str = ""
    missing: str = ""
    identical: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.identical)


@dataclass(frozen=True)
class Case:
    """One repetition on a running federation; ``folder``: for the runs in one process that it is compared with."""

    federation: Federation
    folder: Path
    repetition: int
    rng: random.Random

    @property
    def data(self) -> dict[str, Any]:
        """The digits as a file, which every process of a message reads faster than it makes them."""
        path = self.folder / "digits.npz"
        if not path.exists():
            digits = load("digits-plain")
            images = {f"x_{split}": x.permute(0, 2, 3, 1).numpy() for split, x in (("train", digits.x_train), ("test", digits.x_test))}
            np.savez(path, **images, y_train=digits.y_train.numpy(), y_test=digits.y_test.numpy())
        return {"dataset": "npz", "data-path": str(path)}

    def config(self, method: str, **values: Any) -> dict[str, Any]:
        return {
            **SMALL,
            "clients": len(self.federation.sites),
            **self.data,
            "rounds": 4,
            "evaluate-every": 4,
            "method": method,
            "checkpoint-every": 1,
            "server-momentum": 0.5,
            "seed": self.repetition,
            **values,
        }


def kill_supernode(case: Case) -> Outcome:
    """SIGKILL one SuperNode at a random moment of a FedBN run; it is started again, and has the layers it had."""
    site = case.rng.choice(case.federation.sites)
    config = case.config("fedbn", rounds=5, **{"round-timeout": 150.0, "name": f"supernode-{case.repetition}"})
    before = len(_starts(case.federation, site))
    with _run(case, config) as (run, moment):
        os.kill(case.federation.find("supernode", site)[0], signal.SIGKILL)
        outcome = Outcome("SIGKILL a SuperNode", case.repetition, "fedbn", moment)
        code = run.wait(600)
    outcome.what = f"site {site} killed; run {'completed' if code == 0 else f'failed ({code})'}"
    wait_until(f"site {site} is back", lambda: len(_starts(case.federation, site)) > before, 180)
    if code == 0:
        _compare_with_gaps(case, config, outcome)
    return outcome


def kill_serverapp(case: Case) -> Outcome:
    """SIGKILL the ServerApp at a random moment, resume: identical to an uninterrupted run."""
    method = METHODS[case.repetition % len(METHODS)]
    config = case.config(method)
    with _run(case, config) as (run, moment):
        if found := case.federation.find("serverapp"):
            os.kill(found[-1], signal.SIGKILL)
        outcome = Outcome("SIGKILL the ServerApp", case.repetition, method, moment)
        _resume(case, config, outcome, "" if found else "it had not started; ")
        run.send_signal(signal.SIGINT)
    return outcome


def kill_superlink(case: Case) -> Outcome:
    """SIGKILL the SuperLink at a random moment; it is started again, and the run goes on, or is resumed."""
    method = METHODS[case.repetition % len(METHODS)]
    config = case.config(method)
    with _run(case, config) as (run, moment):
        os.kill(case.federation.find("superlink")[0], signal.SIGKILL)
        outcome = Outcome("SIGKILL the SuperLink", case.repetition, method, moment)
        code = run.wait(600)
    if code == 0:
        outcome.what = "the run went on by itself"
        _compare(case, config, outcome)
    else:
        _resume(case, config, outcome, f"submit ended with {code}; ")
    return outcome


def truncate_checkpoint(case: Case) -> Outcome:
    """SIGKILL the ServerApp after its second checkpoint, cut the newest one short, resume."""
    config = case.config("fedbn")
    with _run(case, config, wait=False) as (run, _):
        folder = wait_until("two checkpoints", lambda: _checkpointed(case, 2), 300)
        os.kill(case.federation.find("serverapp")[-1], signal.SIGKILL)
        newest = sorted((folder / "checkpoints").glob("round-*.safetensors"))[-1]
        os.truncate(newest, case.rng.randrange(newest.stat().st_size))
        outcome = Outcome("truncated checkpoint", case.repetition, "fedbn", f"{newest.name} cut short")
        _resume(case, config, outcome)
        run.send_signal(signal.SIGINT)
    if not list(folder.glob("checkpoints/*.set-aside-1")) and "Set aside" not in case.federation.log("server", "serverapp"):
        outcome.notes.append("nothing was set aside")
    return outcome


def client_raises(case: Case) -> Outcome:
    """One site's data cannot be read for a while: it is left out by name, and comes back."""
    return _in_a_mood(case, "raise", "a client that raises", "the network drive is gone", **{"round-timeout": 120.0})


def client_hangs(case: Case) -> Outcome:
    """One site's process hangs for ever: the round goes on at the deadline, and the site is there again later."""
    return _in_a_mood(case, "hang", "a client that never answers", "no reply before the deadline", **{"round-timeout": 40.0, "rounds": 6})


def disk_full_at_a_site(case: Case) -> Outcome:
    """A site's state cannot be kept: neither is its reply sent, and the others go on."""
    site = case.federation.sites[1]
    config = case.config("fedbn", rounds=5, name=f"site-disk-{case.repetition}")
    with _run(case, config, wait=False) as (run, _):
        state = case.federation.kit / "sites" / site / "state"
        wait_until("a round", lambda: _rounds_of(case, config) >= 1, 300)
        with _full(state):
            begin = _rounds_of(case, config)
            wait_until("two rounds", lambda: _rounds_of(case, config) >= begin + 2 or run.poll() is not None, 300)
        code = run.wait(600)
    outcome = Outcome(
        "disk full at a site", case.repetition, "fedbn", f"after round {begin}", f"run {'completed' if code == 0 else 'failed'}"
    )
    if "No space left on device" not in case.federation.log("server", "serverapp"):
        outcome.notes.append("the server's log does not name the reason")
    _compare_with_gaps(case, config, outcome)
    return outcome


def disk_full_at_the_server(case: Case) -> Outcome:
    """The results' disk is full for some rounds: said in the log, and nothing is missing in the end."""
    config = case.config("fedbn", rounds=5, name=f"server-disk-{case.repetition}")
    with _run(case, config, wait=False) as (run, _):
        wait_until("a round", lambda: _rounds_of(case, config) >= 1, 300)
        with _full(case.federation.result("")):
            wait_until("the log says so", lambda: "No space left" in case.federation.log("server", "serverapp"), 300)
        code = run.wait(600)
    outcome = Outcome("disk full at the server", case.repetition, "fedbn", "after round 1", f"run {'completed' if code == 0 else 'failed'}")
    if _rounds_of(case, config) != 5:
        outcome.notes.append(f"rounds.csv has {_rounds_of(case, config)} of 5 rounds")
    _compare_with_gaps(case, config, outcome)
    return outcome


DRILLS: dict[str, Callable[[Case], Outcome]] = {
    "supernode": kill_supernode,
    "serverapp": kill_serverapp,
    "superlink": kill_superlink,
    "checkpoint": truncate_checkpoint,
    "raise": client_raises,
    "hang": client_hangs,
    "site-disk": disk_full_at_a_site,
    "server-disk": disk_full_at_the_server,
}


def _in_a_mood(case: Case, mood: str, drill: str, reason: str, **values: Any) -> Outcome:
    config = case.config("fedbn", rounds=5, dataset="tests.deployment.moody:load", name=f"{mood}-{case.repetition}") | values
    file = case.federation.mood(case.federation.sites[1])
    with _run(case, config, wait=False) as (run, _):
        wait_until("a round", lambda: _rounds_of(case, config) >= 1, 300)
        file.write_text(mood)
        try:
            wait_until("it was left out", lambda: reason in _text(case.federation.result(config["name"]) / "clients.csv"), 300)
        finally:
            file.write_text("")
        moment = f"after round {_rounds_of(case, config)}"
        code = run.wait(600)
    outcome = Outcome(drill, case.repetition, "fedbn", moment, f"run {'completed' if code == 0 else 'failed'}")
    _compare_with_gaps(case, config, outcome)
    return outcome


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    """No byte is left on the file system of ``folder``, which must be a small one of its own."""
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


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _rounds_of(case: Case, config: dict[str, Any]) -> int:
    return max(0, len(_text(case.federation.result(config["name"]) / "rounds.csv").splitlines()) - 1)


class _run:
    """A submitted run, and a random moment of it. Ends with the block."""

    def __init__(self, case: Case, config: dict[str, Any], wait: bool = True) -> None:
        self._case, self._config, self._wait = case, config, wait

    def __enter__(self) -> tuple[subprocess.Popen[str], str]:
        begin = time.monotonic()
        self._runs = set(_run_folders(self._case))
        self._process = self._case.federation.submit(self._config)
        self._drain = _drained(self._process)
        if not self._wait:
            return self._process, ""
        wait_until("the run directory", lambda: set(_run_folders(self._case)) - self._runs, 180)
        time.sleep(self._case.rng.uniform(0.0, 40.0))
        rounds = _rounds(max(_run_folders(self._case), key=lambda p: p.stat().st_mtime))
        return self._process, f"{time.monotonic() - begin:.1f} s after submission, {rounds} rounds done"

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._drain.join(5)


def _drained(process: subprocess.Popen[str]) -> Any:
    import threading

    assert process.stdout is not None
    thread = threading.Thread(target=process.stdout.read, daemon=True)
    thread.start()
    return thread


def _run_folders(case: Case) -> list[Path]:
    return [path for path in case.federation.result("").glob("*") if (path / "rounds.csv").exists()]


def _checkpointed(case: Case, count: int) -> Path | None:
    for folder in _run_folders(case):
        if len(list((folder / "checkpoints").glob("round-*.safetensors"))) >= count:
            return folder
    return None


def _rounds(folder: Path) -> int:
    return len((folder / "rounds.csv").read_text().splitlines()) - 1


def _starts(federation: Federation, site: str) -> list[str]:
    return [line for line in federation.log(f"sites/{site}", "supernode").splitlines() if "SuperNode ID" in line]


def _finished(case: Case, config: dict[str, Any]) -> Path:
    """The newest run directory with a model, of this seed."""
    done = [path for path in _run_folders(case) if (path / "model.safetensors").exists() and f"seed{config['seed']}" in path.name]
    return max(done, key=lambda path: (path / "model.safetensors").stat().st_mtime)


def _resume(case: Case, config: dict[str, Any], outcome: Outcome, what: str = "") -> None:
    """Submit again, from the last checkpoint or, where there was none yet, anew; then compare."""
    if _checkpointed(case, 1):
        config, what = {**config, "resume": "latest"}, f"{what}resumed"
    else:
        what += "no checkpoint yet: submitted anew"
    out = case.federation.run(config)
    going_on = [line.split("INFO :")[-1].strip() for line in out.splitlines() if "going on after" in line]
    outcome.what = f"{what} ({going_on[0]})" if going_on else what
    _compare(case, config, outcome)


def _compare(case: Case, config: dict[str, Any], outcome: Outcome) -> None:
    deployed, reference = _finished(case, config), in_process(config, case.folder / "reference")
    wrong = differing(deployed / "model.safetensors", reference / "model.safetensors")
    for site, path in personal(case.federation, deployed.name).items():
        wrong += [f"{site}: {name}" for name in differing(path, reference / "clients" / path.name)]
    outcome.identical = "" if wrong else "to the uninterrupted run"
    outcome.notes += [f"differs in {', '.join(wrong[:5])}"] if wrong else []
    _tidy(case, deployed)


def _compare_with_gaps(case: Case, config: dict[str, Any], outcome: Outcome) -> None:
    """A reply may be missing because its client died before it kept the round's state, or after: one of these must be what happened."""
    deployed = case.federation.result(config["name"])
    gaps = _gaps(deployed, config["clients"])
    outcome.missing = " ".join(f"client {client} in round {round}" for client, round in gaps)
    closest = ["nothing compared"]
    for kept in itertools.product((False, True), repeat=len(gaps)):
        app = _with_gaps(dict(zip(gaps, kept, strict=True)))
        folder = case.folder / "reference"
        shutil.rmtree(folder, ignore_errors=True)
        reference = run_in_process({**config, "output": str(folder), "device": "cpu", "min-replies": 0.0}, client_app=app)
        assert reference is not None
        wrong = differing(deployed / "model.safetensors", reference / "model.safetensors")
        for site, path in personal(case.federation, deployed.name).items():
            wrong += [f"{site}: {name}" for name in differing(path, reference / "clients" / path.name)]
        if not wrong:
            outcome.identical = "to the run without these replies" if gaps else "to the uninterrupted run"
            break
        closest = wrong if len(wrong) < len(closest) or closest == ["nothing compared"] else closest
    if not outcome.identical:
        outcome.notes.append(f"differs in {', '.join(closest[:5])}")
    if "kept tensors in round" in case.federation.log("server", "serverapp"):
        outcome.notes.append("the server noticed lost tensors")
        outcome.identical = ""
    _tidy(case, deployed)


def _gaps(folder: Path, clients: int) -> list[tuple[int, int]]:
    """(client, round) of every reply that was not used."""
    with (folder / "clients.csv").open() as file:
        used = {(int(row["client"]), int(row["round"])) for row in csv.DictReader(file) if row["samples"] and not row["refused"]}
    rounds = _rounds(folder)
    return [(client, round) for round in range(1, rounds + 1) for client in range(clients) if (client, round) not in used]


def _with_gaps(gaps: dict[tuple[int, int], bool]) -> ClientApp:
    """The ClientApp, whose reply is missing for some (client, round): before it trained, or (True) after it kept its state."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        header = message.content.config_records["header"]
        gap = (int(context.node_config["partition-id"]), int(header["round"]))  # type: ignore[arg-type]
        if gap in gaps and not gaps[gap]:
            raise RuntimeError("killed before it trained")
        reply = CLIENT_APP(message, context)
        if gap in gaps:
            raise RuntimeError("killed after it kept its state")
        return reply

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return CLIENT_APP(message, context)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return CLIENT_APP(message, context)

    return app


def _tidy(case: Case, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(case.folder / "reference", ignore_errors=True)


def repetitions(federation: Federation, folder: Path, drill: str, numbers: range) -> Iterator[Outcome]:
    for number in numbers:
        begin = time.monotonic()
        try:
            outcome = DRILLS[drill](Case(federation, folder, number, random.Random(f"{drill} {number}")))
        except Exception as error:
            outcome = Outcome(drill, number, "", "", f"the drill itself failed: {type(error).__name__}: {error}"[:400])
        outcome.seconds = time.monotonic() - begin
        for left in _run_folders(Case(federation, folder, number, random.Random())):
            shutil.rmtree(left, ignore_errors=True)
        yield outcome


__all__ = ["DRILLS", "Case", "Outcome", "repetitions"]
