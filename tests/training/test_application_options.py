"""Options of local training in the application: which samples count, random changes of images, and what may freeze."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.methods import METHODS
from fl_bn.run.config import RunConfig
from tests.conformance.doors import SIZES, Asked, application
from tests.listed import listed
from tests.local import train
from tests.refusals import naming
from tests.training.core import LocalTraining, Samples, build

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
