"""Byzantine clients in the run config: who has which data, and what reaches the strategy. ``test_keys`` has what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.methods import METHODS
from fl_bn.robust.attacks import ATTACKS, LABEL_FLIP, Adversary
from tests.experiment.inside import client_samples, config, dataset, partitions
from tests.experiment.small_data import CLASSES, small_config
from tests.listed import listed


def test_the_defence_is_told_of_as_many_as_there_are_unless_it_is_told_otherwise() -> None:
    rules = {"statistics_rule": "nnm+median", "update_rule": "krum"}
    assert config(byzantine=2, **rules).defence() == Defence(2, "nnm+median", "krum")
    assert config(byzantine=2, declared_byzantine=1, **rules).defence() == Defence(1, "nnm+median", "krum")
    assert config(byzantine=2, declared_byzantine=0).defence() == config().defence() == NO_DEFENCE


@listed("method", [name for name, make in METHODS.items() if name != "single"])
def test_the_attack_reaches_every_method(method: str) -> None:
    made = config(method=method, byzantine=2, attack="foe", attack_on="updates", attack_strength=0.3).build_method()
    assert made.adversary == Adversary("foe", 2, "updates", 0.3)
    assert config(method=method, byzantine=2).build_method().adversary is None
    assert all(config(method=method, byzantine=1, attack=name).build_method().adversary is not None for name in ATTACKS)


@listed("kind", ["iid", "similarity", "dirichlet"])
@pytest.mark.parametrize("byzantine", [1, 4])
def test_the_data_are_the_honest_clients(kind: str, byzantine: int, tmp_path: Path) -> None:
    own = {**small_config(tmp_path), "partition": kind, "partition-parameter": 1.0 if kind == "iid" else 0.5}
    parts, honest = partitions(config({**own, "byzantine": byzantine})), 5 - byzantine
    assert len(parts) == 5
    assert sorted(torch.cat(parts[:honest]).tolist()) == list(range(48))  # each sample once
    assert all(torch.equal(parts[honest + i], parts[i % honest]) for i in range(byzantine))
    alone = partitions(config({**own, "clients": honest}))
    assert all(torch.equal(a, b) for a, b in zip(parts[:honest], alone, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(parts, partitions(config(own)), strict=True)), "control: split over all"


def test_label_flip_flips_the_labels_of_byzantine_clients_alone(tmp_path: Path) -> None:
    own = small_config(tmp_path) | {"partition": "iid", "byzantine": 2}
    flipped, other = config({**own, "attack": LABEL_FLIP}), config({**own, "attack": "foe"})
    data = dataset(flipped)
    for client in range(5):
        (train, test, counts), part = client_samples(flipped, client), partitions(flipped)[client]
        labels = data.y_train[part]
        assert torch.equal(train.x, data.x_train[part])
        assert torch.equal(train.y, CLASSES - 1 - labels if client >= 3 else labels)
        assert torch.equal(test.y, data.y_test)
        assert sum(counts) == len(part)
        assert torch.equal(client_samples(other, client)[0].y, labels)  # control
    assert torch.equal(data.y_train, torch.arange(48) % CLASSES)
