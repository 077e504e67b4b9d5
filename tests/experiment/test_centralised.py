"""Centralised training beside plain PyTorch, in float64: DSGD on merged batches, normalisers, calendars, and what it refuses."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.methods import METHODS, Refresh
from tests.experiment import inside
from tests.experiment.inside import RunConfig, dataset, partitions, refusing, run_centralised, source_model
from tests.listed import listed

BATCH, MOMENTUM, DECAY, RATES = 8, 0.9, 0.01, (0.5, 0.5, 0.25, 0.25)
SMALL = {
    "model": f"{__name__}:network",
    "dataset": "digits-plain",
    "method": "fedavg",
    "clients": 3,
    "partition": "similarity",
    "partition-parameter": 0.0,
    "rounds": len(RATES),
    "update": "gradients",
    "local-steps": 1,
    "batch-size": BATCH,
    "learning-rate": RATES[0],
    "learning-rate-schedule": "milestones",
    "learning-rate-milestones": "0.5:0.5",
    "momentum": MOMENTUM,
    "weight-decay": DECAY,
    "evaluate-every": 2,
    "output": "",
    "pictures": False,
}


def network(classes: int, channels: int, image_size: int) -> nn.Module:
    """One normalised hidden layer, in float64."""
    layers = {
        "flatten": nn.Flatten(),
        "hidden": nn.Linear(channels * image_size**2, 12),
        "norm": nn.BatchNorm1d(12),
        "relu": nn.ReLU(),
        "head": nn.Linear(12, classes),
    }
    return nn.Sequential(OrderedDict(layers)).double()


def config(**overrides: Any) -> RunConfig:
    return inside.config(SMALL, **inside.kebab(overrides))


def losses(of: RunConfig) -> list[float]:
    return [record.clients[0].loss for record in run_centralised(of).records]


def drawn(client: int, round: int, indices: np.ndarray) -> np.ndarray:
    """Return the first batch of a shuffled pass over one client's own samples."""
    rng = np.random.default_rng(np.random.SeedSequence([0, client, round, 0]))
    return indices[rng.permutation(len(indices))[:BATCH]]


def by_hand(merged: bool = True, ema: bool = True, decay: float = DECAY) -> list[float]:
    """DSGD (FBN, algorithm 3 and remark 4.1): one gradient of the mean loss over all clients' batches, momentum in EMA form."""
    data, parts = dataset(config()), [part.numpy() for part in partitions(config())]
    model, momentum, found = copy.deepcopy(source_model(config())), dict[str, Tensor](), list[float]()
    for round, rate in enumerate(RATES, 1):
        own = [drawn(client, round, part) for client, part in enumerate(parts)]
        index = torch.from_numpy(np.concatenate(own) if merged else own[0])
        loss = F.cross_entropy(model(data.x_train[index].double() / 127.5 - 1), data.y_train[index])
        found.append(float(loss.detach()))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
                before = momentum.get(name, torch.zeros_like(p))
                momentum[name] = MOMENTUM * before + ((1 - MOMENTUM) if ema else 1) * (g + decay * p)
                p.sub_(rate * momentum[name])
    return found


def test_gradients_are_those_of_the_clients_merged_batches() -> None:
    found = losses(config())
    assert found == pytest.approx(by_hand(), rel=1e-12)
    for wrong in (by_hand(merged=False), by_hand(ema=False), by_hand(decay=0.0)):  # controls
        assert max(abs(a - b) for a, b in zip(found, wrong, strict=True)) > 1e-6


def test_merged_batches_depend_on_the_division_and_those_of_the_union_do_not() -> None:
    iid = {"partition": "iid", "partition_parameter": RunConfig.partition_parameter}
    assert losses(config(**iid)) != losses(config())
    union = {"update": "weights", "momentum": 0.0}
    assert losses(config(**iid, **union)) == losses(config(**union))


STEPS, UNION = 5, {"update": "weights", "local_steps": 5, "weight_decay": 0.0}


def union_by_hand(normaliser: str = "bn", steps: int = STEPS, frozen_after: int = len(RATES)) -> list[float]:
    """SGD on batches of 24 of all data; each round's mean loss. ``normaliser``: "bn", or "gn" with two groups."""
    data, model, found = dataset(config()), copy.deepcopy(source_model(config())), list[float]()
    if normaliser == "gn":
        model.norm = nn.GroupNorm(2, 12).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0], momentum=MOMENTUM)
    for round, rate in enumerate(RATES, 1):
        optimizer.param_groups[0]["lr"] = rate
        order, total = np.random.default_rng(np.random.SeedSequence([0, 0, round, 0])).permutation(len(data.y_train)), 0.0
        model.norm.train(round <= frozen_after)
        for step in range(steps):
            index = torch.from_numpy(order[step * 24 : (step + 1) * 24])
            loss = F.cross_entropy(model(data.x_train[index].double() / 127.5 - 1), data.y_train[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        found.append(total / steps)
    return found


def test_as_many_steps_a_round_as_a_client_makes() -> None:
    found = losses(config(**UNION))
    assert found == pytest.approx(union_by_hand(), rel=1e-10)
    assert losses(config(**{**UNION, "local_steps": 1})) == pytest.approx(union_by_hand(steps=1), rel=1e-10)
    assert union_by_hand(steps=1)[-1] != pytest.approx(found[-1], rel=1e-3)  # control


def test_the_normaliser_is_the_methods() -> None:
    found = losses(config(method="gn", **UNION))
    assert found == pytest.approx(union_by_hand("gn"), rel=1e-10)
    assert union_by_hand()[-1] != pytest.approx(found[-1], rel=1e-3)  # control: BatchNorm


def test_statistics_freeze_after_half_of_the_rounds_with_fixbn() -> None:
    plain = {"method": "fixbn", "clip": "none", "centre_gradients": "never", **UNION}
    found = losses(config(frozen_rate=1.0, **plain))
    assert found == pytest.approx(union_by_hand(frozen_after=2), rel=1e-10)
    assert union_by_hand()[2] != pytest.approx(found[2], rel=1e-3)  # control: never
    slower = losses(config(**plain))
    assert slower[:3] != found[:3]  # a tenth of the rate from round 3 on, where none is said
    assert slower[:2] == found[:2]


FEDERATED = [
    name
    for name, make in METHODS.items()
    if (method := make()).pools or method.exchanges or method.personal or method.refresh is not Refresh.NOTHING
]


@listed("method", FEDERATED)
def test_a_method_of_federation_alone_is_refused(method: str) -> None:
    overrides = {"update": "weights"} if METHODS[method]().exchanges else {}
    with refusing(f"method='{method}'"):
        run_centralised(config(method=method, **overrides))


@listed(
    ("overrides", "key"),
    [
        ({"byzantine": 1, "attack": "alie"}, "byzantine"),
        ({"server_optimizer": "fedadam"}, "server-optimizer"),
        ({"objective": "fedprox", "update": "weights"}, "objective"),
        ({"declared_byzantine": 1, "update_rule": "median"}, "update-rule"),
    ],
)
def test_what_only_clients_and_servers_have_is_refused(overrides: dict[str, Any], key: str) -> None:
    with refusing(key):
        run_centralised(config(**overrides))


def test_a_part_of_the_clients_is_the_cohort_that_the_server_would_sample() -> None:
    rng = random.Random("0/1")
    cohort = sorted(rng.sample(range(3), 2))
    (record, *_) = run_centralised(config(fraction=0.67)).records
    data, parts = dataset(config()), [part.numpy() for part in partitions(config())]
    index = torch.from_numpy(np.concatenate([drawn(client, 1, parts[client]) for client in cohort]))
    loss = F.cross_entropy(copy.deepcopy(source_model(config()))(data.x_train[index].double() / 127.5 - 1), data.y_train[index])
    assert record.clients[0].loss == pytest.approx(float(loss.detach()), rel=1e-12)
    assert record.clients[0].samples == 2 * BATCH
