"""The client's half: what frozen rounds leave on, what it steps itself, rates, generators, which samples count, and changes of images.

That gradients with momentum are DSGD, and that clipping is that of its papers, stands in tests/oracles.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn import convert
from fl_bn.federation.gradients import norm_in_round
from fl_bn.methods import METHODS, Phase, Role
from fl_bn.run.config import RunConfig
from tests.conformance.doors import SIZES, Asked, application
from tests.listed import listed
from tests.local import train
from tests.networks import seeded_network
from tests.refusals import naming
from tests.training.core import LocalTraining, Samples, Schedule, build, milestones_of, roles, seeded, statistics_pass, torch_seed

Clients = Callable[..., list[Samples]]
CPU = torch.device("cpu")
DSGD = LocalTraining(batch_size=4, steps=1, momentum=0.99, weight_decay=0.01, update="gradients")


def test_frozen_training_switches_off_no_dropout(tiny_clients: Clients) -> None:
    (client,) = tiny_clients((8,))
    model = seeded_network("cnn")
    modes: list[list[bool]] = []
    parts = [next(m for m in model.modules() if isinstance(m, kind)) for kind in (nn.Dropout, nn.BatchNorm2d)]
    model.register_forward_hook(lambda *_: modes.append([m.training for m in parts]))
    for phase in (Phase.FROZEN, Phase.TRAIN):
        train(model, client, [np.arange(8)], LocalTraining(8, steps=1), 0.1, METHODS["fixbn"](), phase)
    assert modes == [[True, False], [True, True]]


@pytest.mark.parametrize(("name", "home"), [("fedbn", Role.AFFINE), ("hbn", Role.MIXING)])
def test_with_gradients_the_client_steps_what_stays_home(name: str, home: Role, tiny_clients: Clients) -> None:
    (client,) = tiny_clients((8,))
    method = METHODS[name]()
    model = convert(seeded_network("plain"), method)
    before, role = copy.deepcopy(model.state_dict()), roles(model)
    result = train(model, client, [np.arange(8)], DSGD, 0.5, method)
    for key, parameter in model.named_parameters():
        want = before[key] - 0.5 * result.gradients[key] if role[key] is home else before[key]
        assert torch.equal(parameter, want), key
        assert torch.equal(parameter, before[key]) == (role[key] is not home)


@listed(
    ("schedule", "rates"),
    [
        (Schedule(0.1, "constant", 0.5), [0.1] * 8),
        (Schedule(1.0, "step", 0.1), [1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01]),
        (Schedule(1.0, "exponential", 0.5), [0.5**t for t in range(8)]),
        (Schedule(1.0, "cosine", 0.5), [(1 + math.cos(math.pi * t / 8)) / 2 for t in range(8)]),
        (Schedule(2.0, "milestones", 0.9, milestones_of("0.25:0.5, 0.75:0.1")), [2, 2, 1, 1, 1, 1, 0.2, 0.2]),
    ],
)
def test_learning_rate_schedules(schedule: Schedule, rates: list[float]) -> None:
    assert [schedule(t, 8) for t in range(1, 9)] == pytest.approx(rates)


def test_seeded_depends_on_the_key_alone() -> None:
    draws = {key: seeded(*key).integers(2**62) for key in [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1, 2, 0)]}
    assert seeded(0, 1, 2).integers(2**62) == draws[(0, 1, 2)]
    assert len(set(draws.values())) >= 3


def test_a_round_of_more_steps_has_a_smaller_limit_and_one_of_none_that_of_one() -> None:
    assert [norm_in_round(20.0, 0.1, steps, 0.5) for steps in (0, 1, 4)] == pytest.approx([100.0, 100.0, 25.0])


@pytest.mark.parametrize("lower_layers", ["shared", "hybrid"])
def test_a_failing_statistics_pass_restores_modes_and_hooks(lower_layers: str, tiny_clients: Clients) -> None:
    (client,) = tiny_clients((8,))
    method = METHODS["hbn"](lower_layers=lower_layers)
    model = convert(nn.Sequential(seeded_network("cnn"), nn.Linear(5, 2)), method).train()
    with pytest.raises(RuntimeError):
        statistics_pass(model, client, method.statistics_pass, np.random.default_rng(0))
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_torch_seed_leaves_the_global_generators_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    reseeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    state, draws = torch.get_rng_state(), []
    for seed in (1, 1, 2):
        with torch_seed(seed, CPU):
            draws.append(torch.rand(3))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    with pytest.raises(RuntimeError), torch_seed(1, CPU):
        torch.rand(3).reshape(2)
    assert torch.equal(state, torch.get_rng_state())
    assert reseeded == []  # a plain seed touches every accelerator


PAPERS = {"setup": "experiments.papers:Papers"}
ONE_STEP = {"local-steps": 1, "local-epochs": 0}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_which_samples_a_client_counts_for(engine: str) -> None:
    """Clients have 5, 9 and 7 samples."""

    def samples(**keys: Any) -> Mapping[int, int]:
        return application(Asked("fedavg", passes=True, seeded=True, dtype=torch.float32), engine=engine, **keys).samples

    assert samples(**ONE_STEP) == {0: 5, 1: 4, 2: 4}  # a batch of each; five samples are one batch
    assert samples(**ONE_STEP, **{"client-weights": "data"}) == dict(enumerate(map(sum, SIZES)))
    assert samples(**{"batch-size": 6}) == {0: 5, 1: 9, 2: 7}
    assert samples(**PAPERS, **{"batch-size": 6, "drop-last": True}) == {1: 6, 2: 6}  # who has less than a batch sits out


def test_training_with_every_image_flipped_is_training_on_flipped_images() -> None:
    """Oracle: the augmentation reaches the batches, all of them, before they are scaled, and nothing else."""
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (16, 3, 8, 8), dtype=np.uint8))
    data, flipped = Samples(x, torch.arange(16) % 4), Samples(x.flip(-1), torch.arange(16) % 4)
    settings = LocalTraining(batch_size=8, steps=3, momentum=0.9, weight_decay=1e-2)

    def trained(samples: Samples, augment: Any = None) -> nn.Module:
        model = build("simple-cnn", classes=4, image_size=8, seed=3)
        train(model, samples, [np.arange(8), np.arange(8, 16), np.arange(8)], settings, 0.1, METHODS["fedavg"](), augment=augment)
        return model

    found, expected, control = trained(data, lambda x, y: (x.flip(-1), y)), trained(flipped), trained(data)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found.parameters(), control.parameters(), strict=True))


@listed("what", ["affine", "both"])
def test_a_frozen_affine_and_gradients_do_not_go_together(what: str) -> None:
    """The server would step what the clients hold still."""
    config = {**PAPERS, "method": "fixbn", "local-steps": 1, "freeze-what": what}
    with naming("update"):
        RunConfig.from_mapping({**config, "update": "gradients"})
    RunConfig.from_mapping({**config, "update": "weights"})  # control
    RunConfig.from_mapping({**config, "update": "gradients", "freeze-what": "statistics"})  # control
