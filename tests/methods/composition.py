"""Run any method with any local objective and any server optimizer, three rounds in a tenth of a second."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import nn

from fl_bn.federation.optimizers import SERVER_OPTIMIZERS
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import BatchNormStrategy, InProcessGrid
from fl_bn.methods import METHODS
from fl_bn.objectives import OBJECTIVES
from fl_bn.run.assembly import source_model
from fl_bn.run.config import RunConfig
from tests.in_process import arrays_of
from tests.kept import Kept
from tests.networks import Block

NETWORKS = ("simple", "resnet")
FEDTAN = ("fedtan", "fedtan2", "fedavg-alg2")
ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
REFUSED = {  # method and objective: what the error says
    **{(method, "scaffold"): "changes each client's gradient by itself" for method in FEDTAN},
    **{(method, "fedsam"): "runs each batch twice" for method in FEDTAN},
    **{("single", objective): "but single shares no weights" for objective in ("fedprox", "scaffold", "moon")},
}
BASE: dict[str, Any] = {
    "dataset": "tests.methods.composition:images",
    "partition": "iid",
    "clients": 3,
    "fraction": 0.67,
    "rounds": 3,
    "local-steps": 2,
    "batch-size": 6,
    "momentum": 0.0,
    "learning-rate": 0.05,
    "learning-rate-schedule": "constant",
    "evaluate-every": 10,
    "wait-timeout": 0.0,
    "retry-timeout": 0.0,
    "device": "cpu",
    "output": "",
}


def images(path: str) -> tuple[np.ndarray, ...]:
    """Make 36 training and 8 test images of 8 by 8 pixels in three colours; each class is brighter than the class before."""
    del path
    rng = np.random.default_rng(0)

    def split(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(n) % 4
        return (30 * y[:, None, None, None] + rng.integers(0, 150, (n, 8, 8, 3))).astype(np.uint8), y

    return *split(36), *split(8)


def simple(classes: int, channels: int, image_size: int) -> nn.Module:
    """Build a network like the HBN paper's Simple-CNN, with few channels."""

    def block(before: int, after: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)

    hidden = (nn.Flatten(), nn.Linear(6 * (image_size // 4) ** 2, 8), nn.ReLU())
    layers = (*block(channels, 4), *block(4, 6), *hidden, nn.Linear(8, classes))
    return nn.Sequential(OrderedDict((f"layer{i}", layer) for i, layer in enumerate(layers)))


def resnet(classes: int, channels: int, image_size: int) -> nn.Module:
    """Build a network with dropout and one residual block, whose BatchNorm in the shortcut is named ``downsample.1``."""
    stem = (nn.Conv2d(channels, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
    top = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2), nn.Linear(24, classes))
    return nn.Sequential(OrderedDict((f"layer{i}", layer) for i, layer in enumerate((*stem, Block(4, 6), *top))))


class Watched(BatchNormStrategy):
    """Keep the result of each round's aggregation, before statistics are measured again."""

    rounds_made: list[dict[str, np.ndarray]]

    def aggregate_train(self, server_round: int, replies: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        made, metrics = super().aggregate_train(server_round, replies)
        assert made is not None
        self.rounds_made.append(arrays_of(made))
        return made, metrics


class ByteGrid(InProcessGrid):
    """Record the names of all sections in messages and replies."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sections: set[str] = set()

    def push_messages(self, messages: Any) -> list[str]:
        messages = list[Message](messages)
        ids = list(super().push_messages(messages))
        for message in [*messages, *(self._answers[identity] for identity in ids)]:
            self.sections |= set(message.content.array_records) if message.has_content() else set()
        return ids


@dataclass
class Made:
    """Hold the results of a run.

    Attributes:
        rounds: The shared tensors after each round.
        sections: The names of all sections that were sent in either direction.
        records: The record of each round.
    """

    rounds: list[dict[str, np.ndarray]]
    sections: set[str]
    records: list[RoundRecord] = field(default_factory=list)


OF_OBJECTIVE: dict[str, dict[str, Any]] = {"moon": {"moon-mu": 2.0}, "fedprox": {"fedprox-mu": 0.5}}


def keys(method: str, objective: str = "none", server: str = "fedavg", network: str = "resnet", **overrides: Any) -> dict[str, Any]:
    rate = {"server-learning-rate": 0.02} if server in ADAPTIVE else {}
    chosen = {"method": method, "objective": objective, "server-optimizer": server, "model": f"tests.methods.composition:{network}"}
    return {
        **BASE,
        "setup": "experiments.papers:Papers",
        **chosen,
        **rate,
        **OF_OBJECTIVE.get(objective, {}),
        **{key.replace("_", "-"): value for key, value in overrides.items()},
    }


@cache
def client_app() -> Any:
    return import_module("client_app.app").app


def made(method: str, objective: str = "none", server: str = "fedavg", network: str = "resnet", **overrides: Any) -> Made:
    """Run the application's server and clients in this process, without files."""
    mapping = keys(method, objective, server, network, **overrides)
    config = RunConfig.from_mapping(mapping)
    grid, records = ByteGrid(client_app(), config.clients, mapping), list[RoundRecord]()
    strategy = Watched(
        source_model(config),
        config.build_method(),
        config.round_policy(),
        optimizer=config.build_server_optimizer(),
        callbacks=[Kept(records)],
    )
    strategy.rounds_made = []
    threads = torch.get_num_threads()
    strategy.start(grid, num_rounds=config.rounds)
    torch.set_num_threads(threads)
    return Made(strategy.rounds_made, grid.sections, records)


Cell = tuple[str, str, str, str]


def steps(method: str, server: str) -> bool:
    """Tell whether the server optimizer may be chosen: under ``single`` clients share nothing on which one could step."""
    return method != "single" or server == "fedavg"


def pairwise() -> list[Cell]:
    """Return one combination for each pair of method and server optimizer.

    Any two choices that are allowed together occur together in at least one of these combinations.
    """

    def cells() -> Iterator[Cell]:
        for i, method in enumerate(METHODS):
            allowed = [objective for objective in OBJECTIVES if (method, objective) not in REFUSED]
            for j, server in enumerate(SERVER_OPTIMIZERS):
                chosen = server if steps(method, server) else "fedavg"
                yield method, allowed[(i + j) % len(allowed)], chosen, NETWORKS[(i // 2 + j + j // len(allowed)) % 2]

    return list(dict.fromkeys(cells()))
