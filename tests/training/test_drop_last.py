"""A last batch that is smaller than the others, left out of each pass."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.doors import Asked, application


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_a_client_with_less_than_a_batch_sits_out_where_smaller_batches_are_left_out(engine: str) -> None:
    """Clients have 5, 9 and 7 samples."""
    asked = Asked("fedavg", passes=True, seeded=True, dtype=torch.float32)
    dropped = application(asked, engine=engine, **{"setup": "experiments.papers:Papers", "batch-size": 6, "drop-last": True})
    assert dropped.cohorts == [[1, 2]] * 3
    assert dropped.samples == {1: 6, 2: 6}
    assert application(asked, engine=engine, **{"batch-size": 6}).samples == {0: 5, 1: 9, 2: 7}  # control
