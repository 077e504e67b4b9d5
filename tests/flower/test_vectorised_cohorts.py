"""The in-process engine with a cohort's clients as one program: the messages are answered as client by client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS, Method, fedavg, fedbn, fedtan, hbn
from tests.federation import random_samples
from tests.in_process import Run, WatchedGrid, client_app, run
from tests.integration.runs import tiny
from tests.networks import seeded_network

EPOCHS = LocalTraining(batch_size=6, epochs=1, momentum=0.9)
CLIENTS = [random_samples(n, seed=client) for client, n in enumerate((12, 9, 14, 20))]


def through(
    engine: str,
    method: Method,
    clients: Sequence[Samples] = CLIENTS,
    settings: LocalTraining = EPOCHS,
    dropout: bool = False,
    **options: Any,
) -> Run:
    """Three rounds in float64 on grids that shuffle nothing."""
    model = seeded_network("cnn" if dropout else "", dtype=torch.float64)
    app = client_app(method, clients, settings, model=model, **options)
    grid = WatchedGrid(app, len(clients), engine=engine)
    return run(method, clients, 3, settings=settings, grid=grid, model=model, policy={"fraction": 0.75, "calibrate": -1})


def apart(a: Run, b: Run) -> float:
    """Over all that was sent and answered in training, and the shared tensors as evaluated."""
    found = [float(abs(x[name] - y[name]).max()) for x, y in zip(a.trajectory.values(), b.trajectory.values(), strict=True) for name in x]
    for round in (1, 2, 3):
        for x, y in zip(a.grid.train(round, replies=True), b.grid.train(round, replies=True), strict=True):
            found += [float(abs(x[part][name] - y[part][name]).max()) for part in x for name in x[part]]
    assert [record.loss for record in a.records] == pytest.approx([record.loss for record in b.records], abs=1e-10)
    assert a.grid.kinds() == b.grid.kinds()
    return max(found)


@pytest.mark.parametrize("name", ["fedavg", "fixbn", "fedbn", "hbn", "fbn", "gn", "static-bn"])
def test_methods(name: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = through("sequential", METHODS[name]())
    assert apart(through("vectorised", METHODS[name]()), expected) < 1e-10
    other = [random_samples(n, seed=client + 1) for client, n in enumerate((12, 9, 14, 20))]
    assert max(float(abs(x).max()) for x in differences(expected, through("vectorised", METHODS[name](), other))) > 1e-6
    assert "one by one" not in caplog.text


def differences(a: Run, b: Run) -> list[Any]:
    return [a.trajectory[3][name] - b.trajectory[3][name] for name in a.trajectory[3]]


@pytest.mark.parametrize("method", [fedbn(), hbn()], ids=["fedbn", "hbn"])
def test_what_stays_at_home(method: Method) -> None:
    one, other = (through(engine, method).grid.states() for engine in ("sequential", "vectorised"))
    for a, b in zip(one, other, strict=True):
        assert a.array_records.keys() == b.array_records.keys()
        for section, record in a.array_records.items():
            for name, array in record.items():
                assert abs(array.numpy() - b.array_records[section][name].numpy()).max() < 1e-10


def test_a_client_that_sits_out_and_one_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """The others are one program all the same."""

    def disturb(client: int, what: str) -> None:
        if client == 1 and what == "train 2":
            raise RuntimeError("no data today")

    small = [*CLIENTS[:3], random_samples(1)]
    runs = [through(engine, fedavg(), small, disturb=disturb) for engine in ("sequential", "vectorised")]
    assert apart(*runs) < 1e-10
    assert "one by one" not in caplog.text
    refused = [[client.refused for client in record.clients] for made in runs for record in made.records]
    assert refused[:3] == refused[3:]


def test_falls_back_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """Statistics are measured as one program all the same: in evaluation mode nothing is dropped."""
    assert apart(through("vectorised", fedavg(), dropout=True), through("sequential", fedavg(), dropout=True)) < 1e-10
    assert caplog.text.count("these clients are computed one by one: dropout") == 1
    assert apart(through("vectorised", fedtan()), through("sequential", fedtan())) < 1e-10
    assert caplog.text.count("they exchange statistics through the server within a local step") == 1


def test_a_run_of_a_run_config(tmp_path: Path) -> None:
    one, other = (load_file(tiny(tmp_path / engine, "hbn", engine=engine) / "model.safetensors") for engine in ("sequential", "vectorised"))
    assert one.keys() == other.keys()
    assert max(float((one[name].double() - other[name].double()).abs().max()) for name in one) < 1e-4  # float32
