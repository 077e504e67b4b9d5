"""A server that finds out samples of a client: it sends weights of its choice, and asks the client to evaluate them.

Each answer tells for how many samples a feature lies above a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import ConfigRecord, Message
from torch import nn

from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.methods import METHODS, Method, Phase
from tests.hostile.liars import Samples, SharedModel, header_for, to_records
from tests.in_process import WatchedGrid

FEATURE, CLASSES, SIDE = 5, 2, 4


def network() -> nn.Module:
    """Build a linear classifier after a BatchNorm layer, which leaves its inputs unchanged in evaluation mode."""
    return nn.Sequential(nn.BatchNorm2d(3, eps=1e-12), nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))


def samples(n: int, seed: int = 0, of_class_0: int = 3) -> Samples:
    """Make ``n`` samples with inputs between 0 and 1. The first ``of_class_0`` are of class 0, the others of class 1."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.random((n, 3, SIDE, SIDE), dtype=np.float32))
    return Samples(x, torch.tensor([0] * of_class_0 + [1] * (n - of_class_0)))


def secrets_of(data: Samples) -> list[float]:
    """Return feature ``FEATURE`` of the samples of class 0, in ascending order."""
    return sorted(data.x[data.y == 0].reshape(-1, 3 * SIDE * SIDE)[:, FEATURE].tolist())


class Bisecting:
    """Find samples of a client by bisection, without any knowledge of its data.

    Attributes:
        answers: The number of evaluations that the client answered.
        refusals: The reasons for which it refused the others.
    """

    def __init__(self, grid: WatchedGrid, method: Method | None = None) -> None:
        self.grid, self.answers, self.refusals = grid, 0, list[str]()
        self.shared: SharedModel = BatchNormStrategy(network(), method or METHODS["fedavg"](), Rounds(clients=1, wait=0.0)).transport.shared

    def message(self, node: int, threshold: float, kind: str = "evaluate") -> Message:
        """Make a message with weights that assign a sample to class 0 if its feature is above ``threshold``."""
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
        """Let the client evaluate these weights; return its metric ``number``, or NaN if it refuses."""
        (reply,) = self.grid.send_and_receive([self.message(node, threshold)])
        if reply.has_error():
            self.refusals.append(str(reply.error.reason))
            return math.nan
        self.answers += 1
        records = reply.content.metric_records
        return float(records.get("fl-bn/metrics", records.get("metrics"))[number])  # type: ignore[arg-type,index]

    def bisect(self, node: int, number: str, of: Sequence[float], rounds: int = 22) -> list[tuple[float, float]]:
        """Return, for each share in ``of``, the interval of thresholds in which the metric ``number`` falls below the share.

        Each interval contains the feature of one sample.
        """
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
