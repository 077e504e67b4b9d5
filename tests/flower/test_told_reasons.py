"""An error is reported as what it is: a user's exception, values that are not finite, or a rate that is too high. In every door."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flwr.app import Context, Message
from torch import Tensor

from fl_bn import Federation, SeededBatches, convert, local_round, server_round, server_state
from fl_bn.flower import FedAvgBN, RunFailed
from fl_bn.methods import METHODS
from tests.flower.own_apps import CLIENTS, data, epoch, net, own_app, ran, refused
from tests.in_process import LocalTraining, Samples, run
from tests.listed import listed

FEDAVG = METHODS["fedavg"]()
RATE = "lower the learning rate"


def spoilt(client: int) -> list[tuple[Tensor, Tensor]]:
    batches = data(client)
    if client == 1:
        batches[0][0][2, 1] = math.nan
    return batches


def together(client: int) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*spoilt(client), strict=True)]


def the_user_s(message: Message, context: Context) -> None:
    raise KeyError("my loss: 3 values are not finite")


@listed("rounds", [1, 5])
def test_a_user_s_exception_is_told_with_its_client_class_and_message(rounds: int, log: pytest.LogCaptureFixture) -> None:
    app = own_app("fedavg", before=the_user_s)
    refused(lambda: ran(FedAvgBN(net(), fraction_evaluate=0), app, rounds), RunFailed, "client 0", "KeyError", "my loss")
    assert RATE not in log.text  # these are the user's words


def federation(engine: str, make: Callable[[int], Any]) -> Any:
    fed = Federation(net(), FEDAVG, [make(i) for i in range(CLIENTS)], progress=False, engine=engine)
    return next(fed.run(1))


def loop() -> Any:
    state, replies = server_state(net(), FEDAVG, rounds=1, clients=CLIENTS), []
    for i in range(CLIENTS):
        with local_round(convert(net(), FEDAVG), FEDAVG, state.instruction()) as round:
            epoch(round, spoilt(i), 0.1)
        replies.append(round.reply(samples=16, client=i)[0])
    return server_round(state, replies)[1]


DOORS: dict[str, Callable[[], Any]] = {
    "own app": lambda: ran(FedAvgBN(net(), fraction_evaluate=0), own_app("fedavg", batches=spoilt)).records[0],
    "application": lambda: run(
        FEDAVG, [Samples(*together(i)) for i in range(CLIENTS)], 1, settings=LocalTraining(batch_size=8, epochs=1), model=net()
    ).records[0],
    "loop": loop,
    "federation": lambda: federation("sequential", lambda i: SeededBatches(*together(i), 8)),
    "federation of lists": lambda: federation("sequential", spoilt),
    "one program": lambda: federation("vectorised", lambda i: SeededBatches(*together(i), 8)),
}


@listed("door", DOORS)
def test_a_client_whose_inputs_are_not_finite_is_refused_alone(door: str) -> None:
    refused = [client.refused for client in DOORS[door]().clients]
    assert [bool(one) for one in refused] == [False, True, False]
    assert "values are not finite" in refused[1]


