"""Judge a drill (a failure caused on purpose): compare its run, bit for bit, with the same run in one process."""

from __future__ import annotations

import csv
import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from client_app.app import app as CLIENT_APP
from fl_bn.data.dataset import load
from fl_bn.flower import run_in_process
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.population import Population
from tests.deployment.federation import SMALL, Federation, differing, personal


@dataclass
class Outcome:
    """Hold the outcome of a drill.

    Attributes:
        moment: When the failure was caused, in words.
        what: What happened then, in words.
        missing: The replies that the server did not use, and the clients that were offline, in words.
        identical: The run in one process that the result equals, in words: the uninterrupted one, or one in which exactly
            the replies in ``missing`` were missing. Empty: the result equals neither.
        times: How often the failure was caused within the run.
        missed: What should have happened or been reported, but did not or was not.
    """

    drill: str
    repetition: int
    method: str
    moment: str
    what: str = ""
    missing: str = ""
    identical: str = ""
    seconds: float = 0.0
    times: int = 1
    notes: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.identical) and not self.missed

    def expect(self, what: str, happened: bool) -> None:
        self.missed += [] if happened else [what]


@dataclass(frozen=True)
class Case:
    """Hold one repetition of a drill on a running federation.

    Attributes:
        folder: The folder for the runs in one process with which the result is compared.
        times: How often the failure is caused, if it can be repeated in one run.
    """

    federation: Federation
    folder: Path
    name: str
    repetition: int
    rng: random.Random
    times: int = 1

    @property
    def data(self) -> dict[str, Any]:
        """Return run-config keys for the data set digits in an npz file, which clients read faster than they make the data."""
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
            "rounds": 3,
            "evaluate-every": 3,
            "method": method,
            "checkpoint-every": 1,
            "server-optimizer": "fedavgm",
            "server-momentum": 0.5,
            "seed": self.repetition,
            "name": f"{self.name}-{self.repetition}",
            **values,
        }

    def outcome(self, drill: str, config: dict[str, Any], moment: str, times: int = 1) -> Outcome:
        return Outcome(drill, self.repetition, config["method"], moment, times=times)


def run_folders(case: Case) -> list[Path]:
    return [path for path in case.federation.result("").glob("*") if (path / "rounds.csv").exists()]


def rounds_of(folder: Path) -> int:
    file = folder / "rounds.csv"
    return max(0, len(file.read_text().splitlines()) - 1) if file.exists() else 0


def differences(case: Case, deployed: Path, reference: Path) -> list[str]:
    """Return the names of the tensors that differ in any bit.

    The final model and the tensors that the sites keep are compared.
    """
    if not (deployed / "model.safetensors").exists():
        return ["everything: there is no model"]
    wrong = differing(deployed / "model.safetensors", reference / "model.safetensors")
    for site, path in personal(case.federation, deployed.name).items():
        wrong += [f"{site}: {name}" for name in differing(path, reference / "clients" / path.name)]
    return wrong


def compare(case: Case, config: dict[str, Any], outcome: Outcome, kept: tuple[bool, ...] = (False, True)) -> None:
    """Compare the result with runs in one process in which the same replies are missing.

    A reply may be missing because the client died before it stored the round's tensors, or after that. The server cannot
    see which. So both are tried, and one of them must give the same bits. If a client's replies are missing in several
    rounds in a row, it can have stored the tensors of the first only: in the others it was gone already.

    A client that was offline, so that it got no message, is offline in these runs, too. Leaving out its reply instead
    would round the average differently.

    Args:
        case: The repetition of the drill.
        config: The run config.
        outcome: The outcome, to which the result of the comparison is added.
        kept: What to try for a missing reply. False: the client died before it stored the tensors. True: after that.
    """
    deployed = case.federation.result(config["name"])
    gaps, away = gaps_of(deployed, config["clients"])
    shown = [f"client {client} in round {round}" for client, round in gaps]
    outcome.missing = ", ".join(shown + [f"client {client} away in round {round}" for client, round in away])
    closest, first = ["nothing compared"], [(client, round - 1) not in gaps for client, round in gaps]
    for guess in itertools.product(*(kept if begins else (False,) for begins in first)):
        app = with_gaps(dict(zip(gaps, guess, strict=True)))
        folder = case.folder / "reference"
        shutil.rmtree(folder, ignore_errors=True)
        with offline(away):
            reference = run_in_process({**config, "output": str(folder), "device": "cpu", "min-replies": 0.0}, client_app=app)
        assert reference is not None
        wrong = differences(case, deployed, reference)
        if not wrong:
            outcome.identical = "to the run without these replies" if gaps or away else "to the uninterrupted run"
            break
        closest = wrong if len(wrong) < len(closest) or closest == ["nothing compared"] else closest
    if not outcome.identical:
        outcome.notes.append(f"differs in {', '.join(closest[:5])}")
    if "kept tensors in round" in case.federation.log("server"):
        outcome.notes.append("the server noticed lost tensors")
        outcome.identical = ""
    shutil.rmtree(deployed, ignore_errors=True)
    shutil.rmtree(case.folder / "reference", ignore_errors=True)


def gaps_of(folder: Path, clients: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return two lists of (client, round): clients whose reply was not used, and clients that got no message in that round."""
    with (folder / "clients.csv").open() as file:
        used = {(int(row["client"]), int(row["round"])): bool(row["samples"]) and not row["refused"] for row in csv.DictReader(file)}
    every = [(client, round) for round in range(1, rounds_of(folder) + 1) for client in range(clients)]
    return [one for one in every if not used.get(one, True)], [one for one in every if one not in used]


@contextmanager
def offline(away: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Make clients offline during the ``with`` block: for each (client, round) of ``away``, the client is not connected in the round."""
    gone: set[int] = set()  # nodes, which are numbered from 1

    def wait_for(population: Population, least: int, round: int) -> None:
        gone.clear()
        gone.update(client + 1 for client, when in away if when == round)
        real(population, least, round)

    real = Population.wait_for
    with (
        mock.patch.object(Population, "wait_for", wait_for),
        mock.patch.object(InProcessGrid, "get_node_ids", lambda grid: [node for node in grid._contexts if node not in gone]),
    ):
        yield


def with_gaps(gaps: dict[tuple[int, int], bool]) -> ClientApp:
    """Return a ClientApp whose training fails for every (client, round) in ``gaps``.

    The value says when. False: before the client trains. True: after it has stored its tensors.
    """
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        header = message.content.config_records["fl-bn/header"]
        gap = (int(context.node_config["partition-id"]), int(header["round"]))  # type: ignore[arg-type]
        if gap in gaps and not gaps[gap]:
            raise RuntimeError("killed before it trained")
        reply = CLIENT_APP(message, context)
        if gap in gaps:
            raise RuntimeError("killed after it kept its state")
        return reply

    app.evaluate()(CLIENT_APP)
    for kind in ("statistics", "hello", "save"):
        app.query(kind)(CLIENT_APP)
    return app
