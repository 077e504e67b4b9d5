"""Training with random changes of its images, and FixBN's Table H: what else than the statistics may freeze."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.data.augment import augmenter
from fl_bn.methods import METHODS, Phase, Role, StatisticsReport
from fl_bn.methods.fixbn import FROZEN
from fl_bn.run.config import ConfigError, RunConfig
from tests.local import train
from tests.training.core import LocalTraining, Samples, build, roles, seeded

SETTINGS = LocalTraining(batch_size=8, steps=3, momentum=0.9, weight_decay=1e-2)
BATCHES = [np.arange(8), np.arange(8, 16), np.arange(8)]


def samples() -> Samples:
    rng = np.random.default_rng(0)
    return Samples(torch.from_numpy(rng.integers(0, 256, (16, 3, 8, 8), dtype=np.uint8)), torch.arange(16) % 4)


def network() -> nn.Module:
    return build("simple-cnn", classes=4, image_size=8, seed=3)


def trained(method: str = "fedavg", phase: Phase = Phase.TRAIN, augment: str = "none", seed: int = 1, **options: str) -> nn.Module:
    model = network()
    change = augmenter(augment, seeded(seed))
    train(model, samples(), BATCHES, SETTINGS, 0.1, METHODS[method](**options), phase, augment=change)
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_augmentation_is_of_the_seed_alone_and_changes_training() -> None:
    assert same(trained(augment="flip"), trained(augment="flip"))
    assert same(trained(augment="none", seed=1), trained(augment="none", seed=2))
    assert not same(trained(augment="flip", seed=1), trained(augment="flip", seed=2))
    assert not same(trained(augment="flip"), trained())


def test_training_with_every_image_flipped_is_training_on_flipped_images() -> None:
    """Oracle: the augmentation reaches the batches, all of them, before they are scaled, and nothing else."""
    data, model, other = samples(), network(), network()
    train(model, data, BATCHES, SETTINGS, 0.1, METHODS["fedavg"](), augment=lambda x, y: (x.flip(-1), y))
    train(other, Samples(data.x.flip(-1), data.y), BATCHES, SETTINGS, 0.1, METHODS["fedavg"]())
    assert same(model, other)
    assert not same(model, trained())  # control


@pytest.mark.parametrize("what", FROZEN)
def test_what_freezes_stays_bit_for_bit_and_the_rest_moves(what: str) -> None:
    start = network()
    before, after, role = start.state_dict(), trained("fixbn", Phase.FROZEN, freeze_what=what).state_dict(), roles(start)
    for name, kind in role.items():
        moves = kind is Role.WEIGHT or (kind in (Role.AFFINE, Role.STATISTIC) and kind not in FROZEN[what])
        if kind is not Role.COUNTER:
            assert torch.equal(before[name], after[name]) != moves, name
    reports = METHODS["fixbn"](freeze_what=what).reports(Phase.FROZEN)
    assert reports is (StatisticsReport.RUNNING if what == "affine" else StatisticsReport.NOTHING)


@pytest.mark.parametrize("what", FROZEN)
def test_a_frozen_affine_and_gradients_do_not_go_together(what: str) -> None:
    """The server would step what the clients hold still."""
    config = {"setup": "experiments.papers:Papers", "method": "fixbn", "update": "gradients", "local-steps": 1, "freeze-what": what}
    with nullcontext() if what == "statistics" else pytest.raises(ConfigError, match="update"):
        RunConfig.from_mapping(config)
    RunConfig.from_mapping({**config, "update": "weights"})  # control
    with pytest.raises(ConfigError, match="freeze-what") if what != "statistics" else nullcontext():
        RunConfig.from_mapping({"setup": "experiments.papers:Papers", "method": "fedavg", "freeze-what": what})
