"""Centralised training beside plain PyTorch, in float64: DSGD on merged batches, normalisers, calendars, and what it refuses."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
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
    "model": f"{__name__}:network", "dataset": "digits-plain", "method": "fedavg", "clients": 3, "partition": "similarity",
    "partition-parameter": 0.0, "rounds": len(RATES), "update": "gradients", "local-steps": 1, "batch-size": BATCH,
    "learning-rate": RATES[0], "learning-rate-schedule": "milestones", "learning-rate-milestones": "0.5:0.5", "momentum": MOMENTUM,
    "weight-decay": DECAY, "evaluate-every": 2, "output": "", "pictures": False,
}  # fmt: skip


def network(classes: int, channels: int, image_size: int) -> nn.Module:
    """One normalised hidden layer, in float64."""
    hidden = nn.Linear(channels * image_size**2, 12)
    return nn.Sequential(nn.Flatten(), hidden, nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, classes)).double()


def config(**overrides: Any) -> RunConfig:
    return inside.config(SMALL, **inside.kebab(overrides))


def losses(of: RunConfig) -> list[float]:
    return [record.clients[0].loss for record in run_centralised(of).records]


def drawn(client: int, round: int, indices: np.ndarray) -> np.ndarray:
    """Return the first batch of a shuffled pass over one client's own samples."""
    rng = np.random.default_rng(np.random.SeedSequence([0, client, round, 0]))
    return indices[rng.permutation(len(indices))[:BATCH]]


def by_hand(clients: Sequence[int] = (0, 1, 2), ema: bool = True, decay: float = DECAY) -> list[float]:
    """DSGD (FBN, algorithm 3 and remark 4.1): one gradient of the mean loss over the clients' batches, momentum in EMA form."""
    data, parts = dataset(config()), [part.numpy() for part in partitions(config())]
    model, momentum, found = copy.deepcopy(source_model(config())), dict[str, Tensor](), list[float]()
    for round, rate in enumerate(RATES, 1):
        index = torch.from_numpy(np.concatenate([drawn(client, round, parts[client]) for client in clients]))
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
    for wrong in (by_hand([0]), by_hand(ema=False), by_hand(decay=0.0)):  # controls
        assert max(abs(a - b) for a, b in zip(found, wrong, strict=True)) > 1e-6


STEPS, UNION = 5, {"update": "weights", "local_steps": 5, "weight_decay": 0.0}
SOME = {"partition": "classes", "partition_parameter": 1.0}


def union_by_hand(normaliser: str = "bn", frozen_after: int = len(RATES), some: bool = False) -> list[float]:
    """SGD on batches of 24 of all data that a client has; each round's mean loss. ``normaliser``: "bn", or "gn" with two groups."""
    held = torch.cat(partitions(config(**SOME if some else {}))).sort().values
    data, model, found = dataset(config()), copy.deepcopy(source_model(config())), list[float]()
    if normaliser == "gn":
        model[2] = nn.GroupNorm(2, 12).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[0], momentum=MOMENTUM)
    for round, rate in enumerate(RATES, 1):
        optimizer.param_groups[0]["lr"] = rate
        order, total = np.random.default_rng(np.random.SeedSequence([0, 0, round, 0])).permutation(len(held)), 0.0
        model[2].train(round <= frozen_after)
        for step in range(STEPS):
            index = held[order[step * 24 : (step + 1) * 24]]
            loss = F.cross_entropy(model(data.x_train[index].double() / 127.5 - 1), data.y_train[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        found.append(total / STEPS)
    return found


@listed(
    ("keys", "reference"),
    [
        ({}, {}),
        ({"method": "gn"}, {"normaliser": "gn"}),
        (SOME, {"some": True}),
        ({"method": "fixbn", "clip": "none", "centre_gradients": "never", "frozen_rate": 1.0}, {"frozen_after": 2}),  # half of the rounds
    ],
)
def test_training_on_the_union_is_plain_pytorch(keys: dict[str, Any], reference: dict[str, Any]) -> None:
    found = losses(config(**{**UNION, **keys}))
    assert found == pytest.approx(union_by_hand(**reference), rel=1e-10)
    others = [other for other in ({}, {"normaliser": "gn"}, {"frozen_after": 2}, {"some": True}) if other != reference]
    assert not any(found == pytest.approx(union_by_hand(**other), rel=1e-3) for other in others)  # controls


def of_federation_alone(name: str) -> bool:
    method = METHODS[name]()
    return method.pools or method.exchanges or method.personal or method.refresh is not Refresh.NOTHING


@listed(
    ("overrides", "key"),
    [
        *(({"method": name, "update": "weights"}, f"method='{name}'") for name in METHODS if of_federation_alone(name)),
        ({"byzantine": 1, "attack": "alie"}, "byzantine"),
        ({"server_optimizer": "fedadam"}, "server-optimizer"),
        ({"objective": "fedprox", "update": "weights"}, "objective"),
        ({"declared_byzantine": 1, "update_rule": "median"}, "update-rule"),
    ],
)
def test_what_only_a_federation_has_is_refused(overrides: dict[str, Any], key: str) -> None:
    with refusing(key):
        run_centralised(config(**overrides))


def test_a_part_of_the_clients_is_the_cohort_that_the_server_would_sample() -> None:
    cohort = sorted(random.Random("0/1").sample(range(3), 2))
    (record, *_) = run_centralised(config(fraction=0.67)).records
    assert record.clients[0].loss == pytest.approx(by_hand(cohort)[0], rel=1e-12)
    assert record.clients[0].samples == 2 * BATCH
