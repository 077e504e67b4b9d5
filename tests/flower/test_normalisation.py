"""What was done with every normalisation layer, said out loud: the line of a round, and warnings about statistics that run away."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F

from fl_bn import Classification, methods
from fl_bn.federation.aggregation import Drift
from fl_bn.federation.record import in_words, watch
from fl_bn.flower import FBN, InProcessGrid, answer, training
from tests.flower.inside import ClientRecord, RoundRecord
from tests.listed import listed

TASK = Classification()


def record(drift: Drift | None = None, round: int = 2, loss: float = 0.5) -> RoundRecord:
    made = RoundRecord(
        round, "train", 0.05, [ClientRecord(0, 10, 2, loss)], drift, 12, 15, {"weights": 2048}, {"weights": 2048, "moments": 1024}
    )
    return replace(made, aggregated=True, seconds=1.23, evaluation={"accuracy": 0.512})


FAILED = RoundRecord(3, "train", 0.05, [ClientRecord(0, refused="late")])


def test_the_lines_of_a_round_say_what_was_done() -> None:
    line = in_words(record(), 60, TASK)
    assert all(said in line for said in ("[round 2/60] 1/1 clients", "loss 0.5000", "accuracy 51.2%", "1.2 s"))
    assert "loss" not in in_words(replace(record(), clients=[ClientRecord(0, 5, loss=math.nan)]), 60, TASK)
    assert all(said in in_words(FAILED, 60, TASK) for said in ("0/1 clients", "nothing changed"))


@listed(
    ("made", "warned"),
    [
        (record(), ""),
        (record(loss=math.nan), "round.reply"),  # nobody may have told it
        (record(loss=math.inf), "diverged"),
    ],
    ids=["control", "loss nan", "loss inf"],
)
def test_a_diverged_loss_is_warned_about(made: RoundRecord, warned: str) -> None:
    said = list(watch(made))
    assert len(said) == bool(warned)
    assert not said or warned in said[0]


# How many clients' statistics could be measured before round 1: all, some, or none

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
