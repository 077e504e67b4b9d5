"""Byzantine clients in the run config: what does not go together, who has which data, and what reaches the strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fl_bn.federation.defence import NO_DEFENCE, Defence
from fl_bn.options import kebab
from fl_bn.robust.attacks import ATTACKS, LABEL_FLIP, Adversary
from fl_bn.run.assembly import client_samples, dataset, partitions
from fl_bn.run.config import ConfigError, RunConfig
from tests.experiment.small_data import CLASSES, small_config
from tests.listed import listed


def config(**values: object) -> RunConfig:
    return RunConfig.from_mapping({kebab(key): value for key, value in values.items()})


@listed(
    ("values", "message"),
    [
        ({"clients": 3, "byzantine": 3}, "byzantine must be less than clients=3, so that one client is honest, but got 3"),
        ({"clients": 3, "byzantine": 7}, "byzantine must be less than clients=3, so that one client is honest, but got 7"),
        ({"attack": "foe"}, "attack='foe' has no effect with byzantine=0: it counts only with attackers"),
        ({"byzantine": 1, "attack": "fall"}, "attack must be one of none, sign-flip, foe, .*, but got 'fall'"),
        ({"byzantine": 1, "attack": "foe", "attack_on": "labels"}, "attack-on must be one of statistics, updates, both, but got 'labels'"),
        ({"statistics_rule": "medain"}, r"statistics-rule must be mean, median, .* before it nnm\+ or bucketing\+, but got 'medain'"),
        ({"update_rule": "median+nnm"}, r"update-rule must be mean, median, .*, but got 'median\+nnm'"),
        ({"update_rule": ""}, "update-rule must be mean, .*, but got ''"),
        ({"byzantine": 5, "statistics_rule": "median"}, "median withstands f=5 Byzantine clients among at least 11, but got n=10"),
        ({"byzantine": 4, "update_rule": "krum"}, "krum withstands f=4 Byzantine clients among at least 11, but got n=10"),
        (
            {"declared_byzantine": 5, "update_rule": "nnm+median"},
            "nnm\\+median withstands f=5 Byzantine clients among at least 11, but got n=10",
        ),
        ({"byzantine": 3, "update_rule": "median", "fraction": 0.6}, "f=3 Byzantine clients among at least 7, but got n=6"),
        ({"clients": 2, "declared_byzantine": 1, "update_rule": "median"}, "among at least 3, but got n=2"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_it_takes(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"byzantine": 4, "statistics_rule": "median", "update_rule": "nnm+trimmed-mean"},
        {"byzantine": 3, "update_rule": "krum"},
        {"byzantine": 9},
        {"byzantine": 5, "declared_byzantine": 4, "update_rule": "median"},
        {"byzantine": 3, "update_rule": "median", "fraction": 0.7},
        {"declared_byzantine": 4, "update_rule": "median"},
    ],
)
def test_just_enough_is_enough(values: dict[str, object]) -> None:
    """Control."""
    config(**values)


def test_the_defence_is_told_of_as_many_as_there_are_unless_it_is_told_otherwise() -> None:
    rules = {"statistics_rule": "nnm+median", "update_rule": "krum"}
    assert config(byzantine=2, **rules).defence() == Defence(2, "nnm+median", "krum")
    assert config(byzantine=2, declared_byzantine=1, **rules).defence() == Defence(1, "nnm+median", "krum")
    assert config(byzantine=2, declared_byzantine=0).defence() == NO_DEFENCE
    assert config().defence() == NO_DEFENCE


@pytest.mark.parametrize("method", ["fbn", "fixbn", "fedtan2", "hbn"])
def test_the_attack_reaches_every_method(method: str) -> None:
    made = config(method=method, byzantine=2, attack="foe", attack_on="updates", attack_strength=0.3).build_method()
    assert made.adversary == Adversary("foe", 2, "updates", 0.3)
    frozen = config(method=method, byzantine=2, attack="nan", freeze_after=3).build_method()
    assert frozen.adversary == Adversary("nan", 2)
    assert config(method=method, byzantine=2).build_method().adversary is None
    assert all(config(byzantine=1, attack=name).build_method().adversary is not None for name in ATTACKS)


@pytest.mark.parametrize("kind", ["iid", "similarity", "dirichlet"])
@pytest.mark.parametrize("byzantine", [1, 2, 4])
def test_the_data_are_the_honest_clients(kind: str, byzantine: int, tmp_path: Path) -> None:
    own = {**small_config(tmp_path), "partition": kind, "partition-parameter": 1.0 if kind == "iid" else 0.5}
    made = RunConfig.from_mapping({**own, "byzantine": byzantine})
    parts, honest = partitions(made), 5 - byzantine
    assert len(parts) == 5
    assert sorted(torch.cat(parts[:honest]).tolist()) == list(range(48))  # each sample once
    for i in range(byzantine):
        assert torch.equal(parts[honest + i], parts[i % honest])
    alone = partitions(RunConfig.from_mapping({**own, "clients": honest}))
    assert all(torch.equal(a, b) for a, b in zip(parts[:honest], alone, strict=True))
    split_over_all = partitions(RunConfig.from_mapping(own))  # control
    assert not all(torch.equal(a, b) for a, b in zip(parts, split_over_all, strict=True))


def test_label_flip_flips_the_labels_of_byzantine_clients_alone(tmp_path: Path) -> None:
    own = small_config(tmp_path) | {"partition": "iid"}
    flipped = RunConfig.from_mapping({**own, "byzantine": 2, "attack": LABEL_FLIP})
    other = RunConfig.from_mapping({**own, "byzantine": 2, "attack": "foe"})
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
