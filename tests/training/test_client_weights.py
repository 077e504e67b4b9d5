"""How many samples a client counts for in averages: those of its round, or all that it has."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.doors import SIZES, Asked, application

ONE_STEP = {"local-steps": 1, "local-epochs": 0}


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_client_counts_for_what_it_drew_or_for_all_it_has(engine: str) -> None:
    asked = Asked("fedavg", passes=True, seeded=True, dtype=torch.float32)
    drawn, all_of_it = (application(asked, engine=engine, **ONE_STEP, **more) for more in ({}, {"client-weights": "data"}))
    assert [drawn.samples[client] for client in range(3)] == [5, 4, 4]  # a batch of each; five samples are one batch
    assert [all_of_it.samples[client] for client in range(3)] == [sum(sizes) for sizes in SIZES]


def test_fedtan_weighs_the_samples_of_its_batches() -> None:
    with pytest.raises(ValueError, match="client_weights"):
        application(Asked("fedtan", passes=True, seeded=True, dtype=torch.float32), **ONE_STEP, **{"client-weights": "data"})
