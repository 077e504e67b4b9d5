"""A server that asks a client questions of yes and no about its samples, by evaluations of weights of its own choice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import ConfigRecord, Message
from torch import nn

from fl_bn.federation.local import Samples
from fl_bn.federation.shared_model import SharedModel
from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.flower.wire.codec import header_for, to_records
from fl_bn.methods import METHODS, Method, Phase
from tests.in_process import WatchedGrid

FEATURE, CLASSES, SIDE = 5, 2, 4


def network() -> nn.Module:
    """With a BatchNorm layer that leaves its inputs as they are, in evaluation mode and as torch makes it."""
    return nn.Sequential(nn.BatchNorm2d(3, eps=1e-12), nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))


def samples(n: int, seed: int = 0, of_class_0: int = 3) -> Samples:
    """``n`` samples of inputs between 0 and 1, of which the first ``of_class_0`` are of class 0."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.random((n, 3, SIDE, SIDE), dtype=np.float32))
    return Samples(x, torch.tensor([0] * of_class_0 + [1] * (n - of_class_0)))


def secrets_of(data: Samples) -> list[float]:
    """Feature ``FEATURE`` of the samples of class 0, in order."""
    return sorted(data.x[data.y == 0].reshape(-1, 3 * SIDE * SIDE)[:, FEATURE].tolist())


class Bisecting:
    """Knows no client's data. ``answers``: how many evaluations it got; ``refusals``: the reasons of those that it did not get."""

    def __init__(self, grid: WatchedGrid, method: Method | None = None) -> None:
        self.grid, self.answers, self.refusals = grid, 0, list[str]()
        self.shared: SharedModel = BatchNormStrategy(network(), method or METHODS["fedavg"](), Rounds(clients=1, wait=0.0)).shared

    def message(self, node: int, threshold: float, kind: str = "evaluate") -> Message:
        """Weights under which a sample is of class 0 where its feature lies above ``threshold``."""
        named = {name: tensor.clone() for part in self.shared.sections().values() for name, tensor in part.items()}
        for name, tensor in named.items():
            if name.endswith("2.weight"):
                tensor.zero_()
                tensor[0, FEATURE] = 1.0
            elif name.endswith("2.bias"):
                tensor.copy_(torch.tensor([-threshold, 0.0]))
        payload = {section: {name: named[name].numpy() for name in part} for section, part in self.shared.sections().items()}
        content = to_records(payload, header_for(self.shared, 1, Phase.TRAIN))
        content["fl-bn/config"] = ConfigRecord({"learning-rate": 0.0, "save": ""})
        return Message(content, node, kind, ttl=600.0, group_id="1")

    def ask(self, node: int, threshold: float, number: str) -> float:
        """What the client says of ``number``; NaN if it says nothing."""
        (reply,) = self.grid.send_and_receive([self.message(node, threshold)])
        if reply.has_error():
            self.refusals.append(str(reply.error.reason))
            return math.nan
        self.answers += 1
        records = reply.content.metric_records
        return float(records.get("fl-bn/metrics", records.get("metrics"))[number])  # type: ignore[arg-type,index]

    def bisect(self, node: int, number: str, of: Sequence[float], rounds: int = 22) -> list[tuple[float, float]]:
        """For each share in ``of`` the interval in which ``number`` falls below it: one feature of one sample each."""
        found = []
        for share in of:
            low, high = 0.0, 1.0
            for _ in range(rounds):
                said = self.ask(node, (low + high) / 2, number)
                if math.isnan(said):
                    break
                low, high = ((low + high) / 2, high) if said >= share - 1e-9 else (low, (low + high) / 2)
            found.append((low, high))
        return sorted(found)


def with_node_config(grid: WatchedGrid, **node_config: int | bool | str) -> WatchedGrid:
    for context in grid._contexts.values():
        context.node_config.update({key.replace("_", "-"): value for key, value in node_config.items()})
    return grid
