"""The in-process engine with a cohort's clients as one program: the messages are answered as client by client."""

from __future__ import annotations

import pytest
import torch

from fl_bn.methods import METHODS, Method, fedavg, fedtan
from tests.conformance.cases import every_method
from tests.federation import random_samples
from tests.flower.inside import LocalTraining, Samples
from tests.in_process import Run, WatchedGrid, arrays_of, client_app, run
from tests.networks import seeded_network

EPOCHS = LocalTraining(batch_size=6, epochs=1, momentum=0.9)
CLIENTS = [random_samples(n, seed=client) for client, n in enumerate((12, 9, 14, 20))]


def through(engine: str, method: Method, clients: list[Samples] = CLIENTS, dropout: bool = False, raises: str = "") -> Run:
    """Three rounds in float64 on grids that shuffle nothing."""

    def disturb(client: int, what: str) -> None:
        if (client, what) == (1, raises):
            raise RuntimeError("no data today")

    model = seeded_network("cnn" if dropout else "", dtype=torch.float64)
    grid = WatchedGrid(client_app(method, clients, EPOCHS, model=model, disturb=disturb), len(clients), engine=engine)
    return run(method, clients, 3, settings=EPOCHS, grid=grid, model=model, policy={"fraction": 0.75, "calibrate": -1})


def apart(a: Run, b: Run) -> float:
    """Over all that was answered in training, what clients keep, and the shared tensors as evaluated."""
    pairs = [*zip(a.trajectory.values(), b.trajectory.values(), strict=True)]
    for round in (1, 2, 3):
        for x, y in zip(a.grid.train(round, replies=True), b.grid.train(round, replies=True), strict=True):
            pairs += [(x[part], y[part]) for part in x]
    for one, other in zip(a.grid.states(), b.grid.states(), strict=True):
        pairs += [(arrays_of(record), arrays_of(other.array_records[section])) for section, record in one.array_records.items()]
    assert [record.loss for record in a.records] == pytest.approx([record.loss for record in b.records], abs=1e-10)
    assert a.grid.kinds() == b.grid.kinds()
    return max((float(abs(x[name] - y[name]).max()) for x, y in pairs for name in x), default=0.0)


@every_method
def test_methods(method_name: str, caplog: pytest.LogCaptureFixture) -> None:
    method = METHODS[method_name]()
    expected = through("sequential", method)
    assert apart(through("vectorised", method), expected) < 1e-10
    assert method.exchanges or "one by one" not in caplog.text  # what exchanges falls back, and says so once per process
    assert expected.trajectory[1].keys() == expected.trajectory[3].keys()
    moved = [float(abs(expected.trajectory[3][name] - array).max()) for name, array in expected.trajectory[1].items()]
    assert max(moved, default=1.0) > 1e-6  # control


def test_a_client_that_sits_out_and_one_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """The others are one program all the same."""
    small = [*CLIENTS[:3], random_samples(1)]
    one, other = (through(engine, fedavg(), small, raises="train 2") for engine in ("sequential", "vectorised"))
    assert apart(one, other) < 1e-10
    assert "one by one" not in caplog.text
    told = [[[client.refused for client in record.clients] for record in made.records] for made in (one, other)]
    assert told[0] == told[1]


def test_falls_back_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Statistics are measured as one program all the same: in evaluation mode nothing is dropped."""
    assert apart(through("vectorised", fedavg(), dropout=True), through("sequential", fedavg(), dropout=True)) < 1e-10
    assert caplog.text.count("computed one by one: dropout") == 1
    through("vectorised", fedtan())
    assert caplog.text.count("computed one by one: ") == 2
