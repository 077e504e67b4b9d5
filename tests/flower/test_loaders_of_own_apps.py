"""Loaders in Flower apps of one's own: samplers, crops and targets of any form are counted as they are drawn."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, default_collate

from fl_bn import flower, methods
from fl_bn.federation.checkpoint import generators
from fl_bn.flower import FedAvgBN, RunFailed, answer, training
from fl_bn.flower.own import counting
from fl_bn.flower.own.counting import samples_in
from fl_bn.task import CLASSIFICATION
from tests.flower.own_apps import SAMPLES, client_of, data, net, own_app
from tests.flower.test_others_own_apps import CLIENTS, ran


def several(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Four crops of each sample, as MONAI's RandCropByPosNegLabeld and its collate function make them."""
    x, y = default_collate(rows)
    return x.repeat(4, 1), y.repeat(4)


def samples_of(client: int) -> TensorDataset:
    parts = data(client)
    return TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def weighted(client: int) -> Any:
    return DataLoader(samples_of(client), 8, sampler=WeightedRandomSampler(torch.ones(SAMPLES), 2 * SAMPLES))


LOADERS = {
    "a sampler that draws each sample twice": weighted,
    "four crops of each sample": lambda client: DataLoader(samples_of(client), 8, collate_fn=several),
    "targets in a tuple": lambda client: [(x, (y, y)) for x, y in data(client)],
    "targets in a dict": lambda client: [(x, {"a": y, "b": y}) for x, y in data(client)],
}


@pytest.mark.parametrize("method", ["fedavg", "hbn", "fbn"])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_client_s_samples_are_counted_as_its_loader_draws_them(loader: str, method: str) -> None:
    """Before, the dataset's length or the number of targets counted: replies were refused, or statistics stayed at 0 and 1."""
    app = ClientApp()
    answer(app, net, methods.METHODS[method](), lambda context: LOADERS[loader](client_of(context)))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        batches = LOADERS[loader](client_of(context))
        with training(message, context, net(), methods.METHODS[method](), batches) as round:
            optimizer, seen = torch.optim.SGD(round.model.parameters(), lr=0.1), 0
            for x, y in batches:
                seen += len(x)
                labels = y if isinstance(y, torch.Tensor) else next(iter(y.values() if isinstance(y, dict) else y))
                optimizer.zero_grad()
                F.cross_entropy(round.model(x), labels).backward()
                optimizer.step()
        return round.message(seen, 1.0)

    result = ran(flower.OwnAppStrategy(net(), methods.METHODS[method](), fraction_evaluate=0), app, rounds=2)
    assert [[client.refused for client in record.clients] for record in result.records] == [[""] * CLIENTS] * 2
    mean = result.arrays.to_torch_state_dict()["1.running_mean"]
    assert mean.abs().max() > 0.01


def test_a_dataset_of_samples_in_the_place_of_a_loader_is_named() -> None:
    app = own_app("fedavg", batches=samples_of)  # type: ignore[arg-type]
    with pytest.raises(RunFailed, match=r"batches\(context\): expected batches, but got a TensorDataset of single samples"):
        ran(FedAvgBN(net()), app)


def with_lengths(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return batches that only the user's own loop can read."""
    x, y = default_collate(rows)
    return x, torch.full((len(x),), x.shape[1]), y


def test_batches_that_only_the_user_s_loop_can_read() -> None:
    """Before, FedAvg, FedBN and FixBN, which never read them, ended in round 1 since the samples could not be counted."""
    app = ClientApp()
    answer(app, net, methods.fedbn(), lambda context: DataLoader(samples_of(client_of(context)), 8, collate_fn=with_lengths))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with training(message, context, net(), methods.fedbn()) as round:
            optimizer = torch.optim.SGD(round.model.parameters(), lr=0.1)
            for x, _, y in DataLoader(samples_of(client_of(context)), 8, collate_fn=with_lengths):
                optimizer.zero_grad()
                F.cross_entropy(round.model(x), y).backward()
                optimizer.step()
        return round.message(SAMPLES, 1.0)

    result = ran(flower.OwnAppStrategy(net(), methods.fedbn(), fraction_evaluate=0), app, rounds=2)
    assert [[client.samples for client in record.accepted] for record in result.records] == [[SAMPLES] * CLIENTS] * 2


def noisy(rows: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = several(rows)
    return x + torch.randn(()) + np.random.rand() + random.random(), y


def test_counting_does_not_move_the_loader_s_random_numbers() -> None:
    made = torch.Generator().manual_seed(0)
    loader = DataLoader(samples_of(0), 8, collate_fn=noisy, shuffle=True, generator=made)
    before, everywhere = made.get_state(), generators()
    assert samples_in(loader, CLASSIFICATION) == 4 * SAMPLES
    assert torch.equal(made.get_state(), before)
    assert generators() == everywhere


def test_a_stream_without_an_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the introduction read it for ever."""
    monkeypatch.setattr(counting, "MOST_BATCHES", 50)
    batch = data(0)[0]
    with pytest.raises(ValueError, match=r"batches\(context\) has no length, and no end after 50 batches"):
        samples_in(itertools.repeat(batch), CLASSIFICATION)
    assert samples_in(iter([batch] * 3), CLASSIFICATION) == 3 * len(batch[1])  # control
