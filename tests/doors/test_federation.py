"""Door 1: any loader, network, task, optimiser and scheduler; what is recorded, saved and said."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from fl_bn import Callback, Federation, SeededBatches, methods
from fl_bn.federation.optimizers import fedadam
from fl_bn.methods import Refresh
from tests.doors.doors import apart
from tests.listed import listed


def net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, outputs))


def made(client: int, n: int = 48) -> tuple[Tensor, Tensor]:
    """Three classes that a linear map tells apart."""
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(client)) + 0.2 * client
    return x, x[:, :3].argmax(1)


CLIENTS = [made(client) for client in range(3)]
TEST = [made(9, 200)]
LOADERS = [DataLoader(TensorDataset(*client), batch_size=16, shuffle=True) for client in CLIENTS]
SEEDED = [SeededBatches(*client, 16) for client in CLIENTS]


@listed("batches", [LOADERS, [[client] for client in CLIENTS], SEEDED], ids=["loader", "list", "seeded"])
def test_adamw_with_a_scheduler(batches: list) -> None:
    fed = Federation(
        net(),
        methods.fixbn(),
        batches,
        test=TEST,
        optimizer=partial(AdamW, lr=0.01),
        scheduler=partial(CosineAnnealingLR, T_max=6),
        schedule=lambda round, rounds: 1 - (round - 1) / rounds,
        local_epochs=2,
    )
    first, *_, last = fed.run(6)
    assert last.evaluation["loss"] < first.evaluation["loss"]
    rates = [min(0.01 * (1 - n / 6), 0.001 if n >= 3 else 1) for n in range(6)]  # FixBN is frozen then
    assert [record.learning_rate for record in fed.history] == pytest.approx(rates)


def test_dropout_draws_other_numbers_in_each_round_and_at_each_client() -> None:
    model = nn.Sequential(nn.Dropout(0.5), *net())
    fed = Federation(model, methods.fedavg(), [[CLIENTS[0]]] * 2, optimizer=partial(SGD, lr=0.0))
    losses = [client.loss for record in fed.run(2) for client in record.clients]
    assert len(set(losses)) == 4


class Ends(Callback):
    """Notes the model of each evaluation, and may stop the run after round 5."""

    def __init__(self, stops: bool) -> None:
        self.stops, self.evaluated = stops, dict[int, dict[str, Tensor]]()

    def on_start(self, running: Any) -> None:
        self.running = running

    def on_evaluation(self, record: Any, rounds: int) -> None:
        self.evaluated[record.round] = dict(self.running.arrays())

    def on_round(self, record: Any, rounds: int) -> None:
        if record.round == 5 and self.stops:
            self.running.stop("time is up")


@listed(("name", "by"), [("hbn", "stop"), ("hbn", "break"), ("hbn", "a look"), ("static-bn", "stop"), ("fbn", "stop")])
def test_the_model_is_one_that_was_evaluated_where_statistics_are_measured(name: str, by: str) -> None:
    """Else static BN's would have mean 0 and variance 1, and HBN's the statistics of another exchange."""
    notes = Ends(by == "stop")
    fed = Federation(net(), methods.METHODS[name](), SEEDED, test=TEST, evaluate_every=2, callbacks=[notes])
    going = fed.run(8)
    for record in going:
        if record.round == 5 and by != "stop":
            break
    if by == "break":
        going.close()  # type: ignore[attr-defined]
    found, measures = fed.model.state_dict(), fed.method.refresh is not Refresh.NOTHING
    same = [key for key, tensor in notes.evaluated[4].items() if "tracked" not in key and torch.equal(found[key], tensor)]
    assert (len(same) > 4) == measures  # control: the others' weights are those of round 5
    assert found["1.running_mean"].any()


def test_a_second_run_begins_without_the_momentum_of_the_first() -> None:
    again = Federation(net(), methods.fedavg(), SEEDED, server_optimizer=fedadam(), clip="none")
    list(again.run(2))
    new = Federation(again.model, methods.fedavg(), SEEDED, server_optimizer=fedadam(), clip="none")
    runs = [[one.model.state_dict() for _ in one.run(1)] for one in (again, new)]
    assert apart(*runs) == 0


def test_one_sample_in_all_gives_running_statistics() -> None:
    """A sample of 36 values per channel: FedAvg averages what torch measured, however few samples there are."""
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))
    one = Federation(image, methods.fedavg(), [[(torch.rand(1, 1, 8, 8) + 5, torch.tensor([1]))]])
    list(one.run(1))
    assert one.model.get_buffer("1.running_mean").abs().min() > 0


def test_the_network_given_is_not_changed() -> None:
    model = net()
    list(Federation(model, methods.fbn(), SEEDED).run(1))
    assert apart([model.state_dict()], [net().state_dict()]) == 0
