"""A transport that somebody else writes: one file of under 60 lines, and the numbers of ``Federation``."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_bn import Federation, SeededBatches, methods
from fl_bn.federation.run import run
from tests.extension import threads_transport
from tests.federation import random_samples
from tests.training.core import LocalTraining, Server, ServerPolicy

CLIENTS = [random_samples(n) for n in (12, 16, 20)]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))


@pytest.mark.parametrize("name", ["fedavg", "fedbn", "fbn", "silobn", "fixbn"])
def test_threads_give_the_numbers_of_a_federation(name: str) -> None:
    """Both draw the same batches; the optimiser is the same, unclipped."""
    assert len(Path(threads_transport.__file__).read_text().splitlines()) < 60
    method = getattr(methods, name)()
    settings = LocalTraining(batch_size=8, epochs=1, momentum=0.0, clip="none")
    server = Server(net(), method, ServerPolicy(clients=3, rate=lambda round, rounds: 0.1))
    records = [one.record for one in run(server, threads_transport.Threads(server, net(), CLIENTS, settings), 3)]
    batches = [SeededBatches(one.x, one.y, 8) for one in CLIENTS]
    known = Federation(net(), method, batches, optimizer=partial(torch.optim.SGD, lr=0.1), clip="none")
    assert [(r.aggregated, r.loss) for r in records] == [(True, pytest.approx(r.loss, rel=1e-6)) for r in known.run(3)]
    for key, tensor in known.server.shared.tensors().items():
        assert torch.allclose(server.shared.tensors()[key], tensor, atol=1e-6), key
    assert len({round(r.loss, 6) for r in records}) == 3  # control: it does train
