"""The log says of exchanges before round 1 how many clients' statistics could be used: all, some, or none."""

from __future__ import annotations

import copy

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F

from fl_bn import methods
from fl_bn.flower import FBN, InProcessGrid, answer, training

CLIENTS = 3


class Parts(nn.Module):
    """A container, as those of GANs are: the loop calls its parts one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)


class Whole(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def ran(model: nn.Module, failing: tuple[int, ...] = ()) -> None:
    app, method = ClientApp(), methods.fbn()

    def batches(context: Context) -> list[tuple[torch.Tensor, torch.Tensor]]:
        client = int(context.node_config["partition-id"])
        if client in failing:
            raise OSError("the disk is gone")
        return [(torch.randn(8, 4) + client, torch.tensor([0, 1] * 4))]

    answer(app, lambda: copy.deepcopy(model), method, batches)

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        ((x, y),) = batches(context)
        with training(msg, context, copy.deepcopy(model), method, [(x, y)]) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            loss = F.cross_entropy(round.model.head(round.model.norm(x)), y)  # type: ignore[operator]
            loss.backward()
            optimizer.step()
        return round.message(8, loss.item())

    FBN(copy.deepcopy(model), fraction_evaluate=0).start(InProcessGrid(app, CLIENTS, {}), num_rounds=1)


@pytest.mark.parametrize(
    ("model", "failing", "counted"), [(Parts, (), "no client"), (Whole, (1,), f"2 of {CLIENTS} clients"), (Whole, (), "all clients")]
)
def test_the_log_says_how_many_clients_were_measured(
    model: type[Parts], failing: tuple[int, ...], counted: str, log: pytest.LogCaptureFixture
) -> None:
    """A network without forward cannot be measured; before, the log said "statistics measured, by 2 exchanges with all clients"."""
    ran(model(), failing)
    (line,) = [line for line in log.messages if line.strip().startswith("before round 1: ")]
    assert counted in line
