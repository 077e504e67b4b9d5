"""SCAFFOLD's control variates through the messages: the server's is the mean of the clients', also after replies were lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from fl_bn.federation.auxiliary import auxiliary
from fl_bn.methods import METHODS
from fl_bn.objectives import Scaffold
from tests.federation import random_samples
from tests.flower.inside import LocalTraining
from tests.in_process import WatchedGrid, client_app, run
from tests.networks import seeded_network

SETTINGS = LocalTraining(64, steps=2, objective=Scaffold(2))
FEDAVG = METHODS["fedavg"]()


class LosingGrid(WatchedGrid):
    """Loses the replies of (client, round), and what round each client is told of as counted."""

    lost: frozenset[tuple[int, int]] = frozenset()
    deaf = False

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        came = list(super().pull_messages(message_ids))
        return [
            m for m in came if (m.metadata.src_node_id - 1, int(m.metadata.group_id)) not in self.lost or m.metadata.message_type != "train"
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages if self.deaf else []:
            if message.metadata.message_type == "train":
                del message.content.config_records["fl-bn/config"]["counted"]
        return super().push_messages(messages)


def offset(lost: set[tuple[int, int]], rounds: int = 5, deaf: bool = False, **policy: Any) -> float:
    """Largest difference between the server's control variate and the mean of the clients', after ``rounds``."""
    clients = [random_samples(n, brightness=i / 2, seed=i) for i, n in enumerate((6, 14, 10))]
    network = seeded_network("cnn", dtype=torch.float64)
    grid = LosingGrid(client_app(FEDAVG, clients, SETTINGS, model=network), 3)
    grid.lost, grid.deaf = frozenset(lost), deaf
    ran = run(FEDAVG, clients, rounds, settings=SETTINGS, model=network, grid=grid, policy={"auxiliary": auxiliary(SETTINGS), **policy})
    server = ran.strategy.shared.auxiliary["control"]
    own = [{k: a.numpy() for k, a in state.array_records["fl-bn/objective"].items()} for state in grid.states()]
    assert max(float(c.abs().max()) for c in server.values()) > 1e-3
    return max(float(np.abs(c.numpy() - sum(kept[name] for kept in own) / 3).max()) for name, c in server.items())


@pytest.mark.parametrize(
    ("lost", "policy"),
    [
        (set(), {}),
        ({(0, 1)}, {}),
        ({(1, 2), (1, 3), (0, 3)}, {}),
        ({(0, 2), (1, 2)}, {"min_replies": 1.0, "max_failed": 3}),
    ],
)
def test_the_servers_variate_is_the_mean_of_the_clients(lost: set[tuple[int, int]], policy: dict[str, Any]) -> None:
    """The control: clients that are not told what was counted drift off for good."""
    assert offset(lost, **policy) < 1e-15
    assert not lost or (1, 2) not in lost or offset(lost, deaf=True, **policy) > 1e-3
