"""Run one small federation through each door of fl-bn, by public names only.

A door is a way to use the library. All doors train the same network on the same clients, so they must agree.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn import Federation, SeededBatches, client_model
from fl_bn.flower import InProcessGrid, OwnAppStrategy, evaluating, legacy_client_app, legacy_server_app, run_in_process
from fl_bn.methods import METHODS, Method
from tests.doors.doors import PLAIN_START, RATE, SAME_STEPS, Tensors, client_of, constant, own_app, own_rounds, pickled, steps
from tests.federation import random_samples
from tests.kept import Kept
from tests.networks import seeded_network

Batch = tuple[Tensor, Tensor]
ROUNDS, CLIENTS, CLASSES = 3, 3, 4
SIZES = ((3, 2), (4, 3, 2), (4, 3))
"""Each client's batch sizes. Clients have different numbers of samples and of steps."""


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    return seeded_network("plain", dtype=dtype)


def of_run_config(classes: int, channels: int, image_size: int) -> nn.Module:
    """Build the same network for a run config."""
    return network(torch.float32)


@cache
def images(client: int, seed: int = 0) -> Batch:
    """Return a client's images and labels. Each client's images are brighter than those of the client before."""
    made = random_samples(sum(SIZES[client]), brightness=client / 2, seed=10 * seed + client)
    return made.x, torch.arange(len(made)) % CLASSES


def data(client: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Batch:
    """Return a client's samples, scaled to -1..1."""
    x, y = images(client, seed)
    return x.to(dtype) / 127.5 - 1, y


def batches(client: int, broken: int | None = None, sizes: Sequence[Sequence[int]] = SIZES) -> list[Batch]:
    """Return a client's batches, the same in each round; those of client ``broken`` are not finite."""
    x, y = data(client)
    x = x * float("nan") if client == broken else x
    return [*zip(x.split(sizes[client]), y.split(sizes[client]), strict=True)]


def held_out(dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Return the test samples, the same for all clients."""
    return [data(client, 1, dtype) for client in range(CLIENTS)]


@dataclass
class Outcome:
    """Hold what a federation left behind.

    ``rounds`` are the networks after each round, as the server evaluates them, and ``clients`` the clients' after the last one, without
    counters. By round: ``cohorts``, whose replies were used, and ``refused``, with the reasons. ``metrics`` are the last evaluation's
    loss and accuracy, ``sent`` the tensors that left the clients, as ``section/name``, and ``samples`` what a client counted for in the
    application's last round.
    """

    rounds: list[Tensors] = field(default_factory=list)
    clients: list[Tensors] = field(default_factory=list)
    cohorts: list[list[int]] = field(default_factory=list)
    refused: list[dict[int, str]] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    samples: Mapping[int, int] = field(default_factory=dict)

    def note(self, *records: Any) -> None:
        """Keep the facts of rounds' records."""
        for record in records:
            self.cohorts.append([one.client for one in record.accepted])
            self.refused.append({one.client: one.refused for one in record.clients if one.refused})
            self.metrics = {name: record.evaluation[name] for name in ("loss", "accuracy") if name in record.evaluation} or self.metrics


def floats(state: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in state.items() if tensor.is_floating_point()}


@dataclass(frozen=True)
class Asked:
    """Say what a federation is asked for.

    The clients ``cohort`` of a loop of one's own train, or all; the data of client ``broken`` are not finite. After round ``stop`` the run
    is stopped, and goes on from what it saved. ``equal``: clients report equal numbers of samples. ``passes``: statistics are measured and
    weights rescaled before round 1, as by default.
    """

    method: str
    frozen: Method | None = None
    rounds: int = ROUNDS
    fraction: float = 1.0
    cohort: tuple[int, ...] = ()
    broken: int | None = None
    stop: int = 0
    passes: bool = False
    seeded: bool = False
    dtype: torch.dtype = torch.float64
    equal: bool = False

    @property
    def made(self) -> Method:
        """Return the method."""
        return self.frozen or METHODS[self.method]()

    @property
    def before(self) -> dict[str, Any]:
        """Return the arguments that decide what happens before round 1."""
        return {} if self.passes else PLAIN_START

    @property
    def weights(self) -> list[int]:
        """Return the numbers of samples that clients report."""
        return [5 if self.equal else sum(sizes) for sizes in SIZES]

    def loaders(self) -> list[Any]:
        """Return each client's batches."""
        if self.seeded:
            return [SeededBatches(*images(client), 4) for client in range(CLIENTS)]
        return [batches(client, self.broken) for client in range(CLIENTS)]


# Federation


def federation(asked: Asked, **options: Any) -> Outcome:
    """Train by ``Federation``."""

    def made() -> Federation:
        how = {**SAME_STEPS, "fraction": asked.fraction, "test": held_out(asked.dtype), **asked.before, **options}
        return Federation(network(asked.dtype), asked.made, asked.loaders(), **how)

    fed, outcome = made(), Outcome()
    with TemporaryDirectory() as folder:
        for record in fed.run(asked.rounds):
            outcome.note(record)
            outcome.rounds.append(floats(fed.model.state_dict()))
            if record.round == asked.stop:
                fed.checkpoint(Path(folder) / "saved")
                break
        if asked.stop:
            fed = made()
            fed.resume(Path(folder) / "saved")
            for record in fed.run(asked.rounds):
                outcome.note(record)
                outcome.rounds.append(floats(fed.model.state_dict()))
    outcome.clients = [floats(fed.client_model(client).state_dict()) for client in range(CLIENTS)]
    return outcome


# A loop of one's own


def own_loop(asked: Asked) -> Outcome:
    """Train by ``local_round`` and ``server_round``; the cohorts are those of ``Federation``. What stops is pickled after each round."""
    net, method, outcome = network(), asked.made, Outcome()
    cohorts = federation(asked).cohorts if asked.fraction < 1 else [[*(asked.cohort or range(CLIENTS))]] * asked.rounds
    how: dict[str, Any] = {"samples": asked.weights, "between": pickled if asked.stop else None}
    for done in own_rounds(net, method, asked.loaders(), cohorts, **how):
        outcome.note(done.record)
        outcome.rounds.append(floats(done.state.model.state_dict()))
        outcome.sent |= {f"{section}/{name}" for reply in done.replies for section, tensors in reply.sections.items() for name in tensors}
    last, kept = done.state.instruction(), [[done.kept[client]] if client in done.kept else [] for client in range(CLIENTS)]
    outcome.clients = [floats(client_model(net, method, last, *own).state_dict()) for own in kept]
    return outcome


# A Flower app of one's own


def spied(outcome: Outcome) -> Callable[[Message, Context, Any], Message]:
    """Return a mod, Flower's own means, that notes which arrays leave a client when it trains."""

    def spy(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == "train" and reply.has_content():
            outcome.sent |= {f"{section}/{name}" for section, record in reply.content.array_records.items() for name in record}
        return reply

    return spy


def flower(asked: Asked, strategy: type[OwnAppStrategy] = OwnAppStrategy) -> Outcome:
    """Train by a Flower app of one's own, with Flower's messages."""
    method, outcome, networks, tested = asked.made, Outcome(), dict[int, Tensors](), held_out(asked.dtype)
    app = own_app(network(asked.dtype), method, asked.loaders(), samples=asked.weights, spies=[spied(outcome)])

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model = evaluating(message, context, network(asked.dtype), method)
        networks[client_of(context)] = floats(model.state_dict())
        return Message(RecordDict({"metrics": MetricRecord(measured(model, tested))}), reply_to=message)

    def at_server(round: int, arrays: ArrayRecord) -> MetricRecord:
        if round:
            outcome.rounds.append(floats(arrays.to_torch_state_dict()))
        return MetricRecord({})

    kept = Kept()
    made = strategy(network(asked.dtype), method, fraction_train=asked.fraction, rate=constant, callbacks=[kept], **asked.before)
    made.start(InProcessGrid(app, CLIENTS, {}), num_rounds=asked.rounds, evaluate_fn=at_server)
    outcome.note(*kept.records)
    outcome.clients = [networks.get(client, {}) for client in range(CLIENTS)]
    return outcome


@torch.no_grad()
def measured(model: nn.Module, tests: Sequence[Batch]) -> dict[str, Any]:
    """Compute loss and accuracy over all test samples, in plain torch."""
    model.eval()
    x, y = torch.cat([x for x, _ in tests]), torch.cat([y for _, y in tests])
    output = model(x)
    accuracy = float((output.argmax(1) == y).double().mean())
    return {"loss": float(F.cross_entropy(output, y)), "accuracy": accuracy, "num-examples": len(y)}


# A NumPyClient, of Flower's older API


class Client(NumPyClient):
    """A client that knows nothing of fl-bn."""

    def __init__(self, client: int, asked: Asked, tests: Sequence[Batch], seen: dict[int, Tensors]) -> None:
        self.net, self.trainloader = network(asked.dtype), asked.loaders()[client]
        self.client, self.asked, self.tests, self.seen = client, asked, tests, seen

    def load(self, parameters: list[np.ndarray]) -> None:
        state = self.net.state_dict()
        self.net.load_state_dict({name: torch.tensor(array) for name, array in zip(state, parameters, strict=True)})

    def fit(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.load(parameters)
        loss = steps(self.net.train(), self.trainloader, config["lr"])
        return [tensor.numpy() for tensor in self.net.state_dict().values()], self.asked.weights[self.client], {"loss": loss}

    def evaluate(self, parameters: list[np.ndarray], config: dict[str, Any]) -> Any:
        self.load(parameters)
        self.seen[self.client] = floats(self.net.state_dict())
        found = measured(self.net, self.tests)
        return found["loss"], found.pop("num-examples"), found


def numpy_client(asked: Asked) -> Outcome:
    """Train by a ``NumPyClient`` and a ``server_fn``."""
    method, outcome, networks = asked.made, Outcome(), dict[int, Tensors]()
    tests = held_out(asked.dtype)

    def at_server(round: int, arrays: list[np.ndarray], config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        if round:
            names = network().state_dict()
            outcome.rounds.append(floats({name: torch.tensor(array) for name, array in zip(names, arrays, strict=True)}))
        return 0.0, {}

    def server_fn(context: Context) -> ServerAppComponents:
        fit = {"fraction_fit": asked.fraction, "on_fit_config_fn": lambda round: {"lr": RATE}}
        return ServerAppComponents(config=ServerConfig(num_rounds=asked.rounds), strategy=FedAvg(evaluate_fn=at_server, **fit))

    kept = Kept()
    app = legacy_client_app(lambda context: Client(client_of(context), asked, tests, networks), method, mods=[spied(outcome)])
    server = legacy_server_app(server_fn, lambda: network(asked.dtype), method, callbacks=[kept], **asked.before)
    server(InProcessGrid(app, CLIENTS, {}), Context(1, 0, {}, RecordDict(), {}))
    outcome.note(*kept.records)
    outcome.clients = [networks.get(client, {}) for client in range(CLIENTS)]
    return outcome


# The application, as ``fl-bn run`` and ``flwr run`` start it


def application(asked: Asked, **keys: Any) -> Outcome:
    """Train by the application in this process, on a file of images for each client."""
    outcome = Outcome()
    with TemporaryDirectory() as folder:
        files = []
        for client in range(CLIENTS):
            named = {}
            for split, (x, y) in {"train": images(client), "test": images(client, 1)}.items():
                named |= {f"x_{split}": x.permute(0, 2, 3, 1).numpy(), f"y_{split}": y.numpy()}
            files.append(f"{folder}/site-{client}.npz")
            np.savez(files[-1], **named)
        passes = {} if asked.passes else {"calibrate": 0, "unit-scale": False, "setup": "experiments.papers:Papers"}
        chosen = {"method": asked.method, "fraction": asked.fraction, "data-path": ",".join(files), "output": folder}
        path = run_in_process({**RUN_CONFIG, **passes, **chosen, **keys})
        assert path is not None
        outcome.rounds = [floats(load_file(path / "model.safetensors"))]
        shared = outcome.rounds[0]
        own = [path / "clients" / f"client-{client}.safetensors" for client in range(CLIENTS)]
        outcome.clients = [shared | floats(load_file(file)) if file.exists() else shared for file in own]
        with (path / "clients.csv").open() as lines:
            used = [{key: int(row[key]) for key in ("round", "client", "samples")} for row in csv.DictReader(lines) if not row["refused"]]
        outcome.cohorts = [[row["client"] for row in used if row["round"] == n] for n in range(1, ROUNDS + 1)]
        outcome.samples = {row["client"]: row["samples"] for row in used if row["round"] == ROUNDS}
        with (path / "rounds.csv").open() as lines:
            last = list(csv.DictReader(lines))[-1]
        outcome.metrics = {"loss": float(last["test-loss"]), "accuracy": float(last["accuracy"])}
    return outcome


RUN_CONFIG: dict[str, Any] = {
    "dataset": "npz", "partition": "natural", "test-on": "all", "model": "tests.conformance.doors:of_run_config", "clients": CLIENTS,
    "rounds": ROUNDS, "batch-size": 4, "local-epochs": 1, "local-steps": 0, "learning-rate": RATE, "learning-rate-schedule": "constant",
    "momentum": 0.9, "weight-decay": 0.0, "clip": "none", "evaluate-every": 1, "wait-timeout": 0.0, "device": "cpu", "pictures": False,
}  # fmt: skip
