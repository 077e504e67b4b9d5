"""Centralised training beside plain PyTorch, in float64: DSGD on merged batches, normalisers, calendars, and what it refuses."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_bn.run.assembly import dataset, partitions, source_model
from fl_bn.run.centralised import run_centralised
from fl_bn.run.config import RunConfig

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
    return RunConfig.from_mapping({**SMALL, **{key.replace("_", "-"): value for key, value in overrides.items()}})


def losses(of: RunConfig) -> list[float]:
    return [record.clients[0].loss for record in run_centralised(of).records]


def drawn(client: int, round: int, indices: np.ndarray) -> np.ndarray:
    """The first batch of a shuffled pass over one client's own samples."""
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
    assert losses(config(partition="iid")) != losses(config())
    union = {"update": "weights", "momentum": 0.0}
    assert losses(config(partition="iid", **union)) == losses(config(**union))
