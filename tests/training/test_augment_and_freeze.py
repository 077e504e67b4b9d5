"""Training with random changes of its images, and FixBN's Table H: what else than the statistics may freeze."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.data.augment import augmenter
from fl_bn.federation.composition import check_composition
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.methods import METHODS, Phase, StatisticsReport
from fl_bn.methods.fixbn import FROZEN
from fl_bn.models import build
from fl_bn.roles import Role, roles
from fl_bn.run.config import ConfigError, RunConfig
from tests.local import train

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


def test_before_the_freeze_nothing_is_frozen() -> None:
    assert same(trained("fixbn", freeze_what="both"), trained())
    assert not same(trained("fixbn", Phase.FROZEN, freeze_what="both"), trained())  # control


def test_the_config_key_is_fixbns_alone() -> None:
    assert RunConfig.from_mapping({"method": "fixbn", "freeze-what": "both"}).build_method().frozen == {Role.STATISTIC, Role.AFFINE}
    for values in ({}, {"method": "fedavg"}):
        with pytest.raises(ConfigError, match="freeze-what='both' has no effect .* only with method='fixbn'"):
            RunConfig.from_mapping({"freeze-what": "both", **values})


@pytest.mark.parametrize("what", FROZEN)
def test_a_frozen_affine_and_gradients_do_not_go_together(what: str) -> None:
    """The server would step what the clients hold still. The library refuses it, and so the config does."""
    config = {"method": "fixbn", "update": "gradients", "local-steps": 1, "freeze-what": what}
    method, one_step = METHODS["fixbn"](freeze_what=what), LocalTraining(batch_size=2, steps=1, update="gradients")
    for check, error in ((lambda: check_composition(method, one_step), ValueError), (lambda: RunConfig.from_mapping(config), ConfigError)):
        with nullcontext() if what == "statistics" else pytest.raises(error, match="freezes scale and shift at the clients, but"):
            check()
    check_composition(method, LocalTraining(batch_size=2, steps=1))  # control: weights


def test_training_leaves_the_samples_as_they_are() -> None:
    data = samples()
    copied = copy.deepcopy(data.x)
    train(network(), data, BATCHES, SETTINGS, 0.1, METHODS["fedavg"](), augment=augmenter("crop-flip", seeded(0)))
    assert torch.equal(data.x, copied)
