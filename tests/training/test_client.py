"""The client's half: what it steps itself, rates, which samples count, changes of images, and that nothing of another client is left.

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
from torch import Tensor, nn

from fl_bn import Federation, convert, methods
from fl_bn.app.config import RunConfig
from fl_bn.bn.roles import roles
from fl_bn.federation.gradients import norm_in_round
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining, Schedule, milestones_of
from fl_bn.methods import METHODS, Role
from fl_bn.models import build
from tests.conformance.doors import SIZES, Asked, application
from tests.listed import listed
from tests.local import train
from tests.networks import seeded_network
from tests.refusals import naming

Clients = Callable[..., list[Samples]]
DSGD = LocalTraining(batch_size=4, steps=1, momentum=0.99, weight_decay=0.01, update="gradients")


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
        (Schedule(1.0, "milestones", 0.9, milestones_of("0.37499999999999994:0.5")), [1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_learning_rate_schedules(schedule: Schedule, rates: list[float]) -> None:
    assert [schedule(t, 8) for t in range(1, 9)] == pytest.approx(rates)
    assert [Schedule(1.0, "step", 0.1)(t, 10) for t in (5, 6, 7, 8)] == pytest.approx([1, 0.1, 0.1, 0.01])  # 10 is no multiple of 4


def test_a_round_of_more_steps_has_a_smaller_limit_and_one_of_none_that_of_one() -> None:
    assert [norm_in_round(20.0, 0.1, steps, 0.5) for steps in (0, 1, 4)] == pytest.approx([100.0, 100.0, 25.0])


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


def test_a_frozen_affine_and_gradients_do_not_go_together() -> None:
    """The server would step what the clients hold still."""
    config = {**PAPERS, "method": "fixbn", "local-steps": 1, "update": "gradients"}
    with naming("update"):
        RunConfig.from_mapping({**config, "freeze-what": "both"})
    RunConfig.from_mapping({**config, "freeze-what": "statistics"})  # control


class Counting(nn.Module):
    """Counts its calls in an attribute, a list and a buffer that no state_dict has, which change its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("hidden", torch.zeros(()), persistent=False)
        self.calls, self.seen = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(1)
        self.hidden += 1
        return self.norm(self.first(x)) * (self.calls + 2 * len(self.seen) + 3 * self.hidden)


def test_what_a_client_changes_is_put_back() -> None:
    torch.manual_seed(0)
    own = [(torch.randn(8, 4), torch.arange(8) % 4)] * 2
    records = [*Federation(Counting(), methods.fixbn(), [own, own, own], workers=1).run(2)]
    for record in records:
        assert len({client.loss for client in record.clients}) == 1
    assert records[0].loss != records[1].loss  # control
