"""HBN's statistics exchange: before each evaluation, for the evaluation alone. And calibration: before the first round."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.data.dataset import to_input
from fl_bn.federation.local import Samples
from fl_bn.federation.payload import decode_moments, to_numpy, to_tensors
from fl_bn.methods import METHODS
from fl_bn.methods.hbn import hbn
from fl_bn.moments import Moments, pool
from tests.federation import union
from tests.in_process import Run, arrays_of, identical, run, sections
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 5))


def local_tensors(ran: Run) -> list[dict[str, np.ndarray]]:
    return [arrays_of(state["fl-bn/local"]) for state in ran.grid.states()]  # type: ignore[arg-type]


def test_a_statistics_exchange_precedes_each_evaluation(clients: list[Samples]) -> None:
    assert run(hbn(), clients, 2).grid.kinds() == ["query.hello 0", "train 1", "query.statistics 1", "train 2", "query.statistics 2"]
    for method, passes in ((hbn(), 1), (hbn(evaluate="exact"), 2), (hbn(lam=1.0), 2), (hbn(lam=1.0, evaluate="hybrid"), 1)):
        for how, messages in (("auto", 1), ("passes", passes)):  # exact passes: one per BatchNorm layer
            sent = [m.metadata.message_type for m in run(method, clients, 1, policy={"recalibration": how}).grid.sent]
            assert sent.count("query.statistics") == 3 * messages
    seldom = run(hbn(), clients, 3, policy={"evaluate_every": 2}).grid.kinds()
    assert seldom == ["query.hello 0", "train 1", "train 2", "query.statistics 2", "train 3", "query.statistics 3"]
    assert run(METHODS["fbn"](), clients, 2).grid.kinds() == ["query.hello 0", "train 1", "train 2"]  # control: they do not lag


@pytest.mark.parametrize("method", [hbn(), hbn(stat_samples=3), hbn(lam=1.0, lower_layers="hybrid")], ids=["hbn", "subset", "exact"])
def test_evaluating_changes_no_bit_of_the_training(method, clients: list[Samples]) -> None:  # type: ignore[no-untyped-def]
    often, seldom = (run(method, clients, 4, policy={"evaluate_every": every, "fraction": 0.7}) for every in (1, 4))
    for round in range(1, 5):
        for replies in (False, True):
            pairs = zip(often.grid.train(round, replies=replies), seldom.grid.train(round, replies=replies), strict=True)
            assert all(identical(a[section], b[section]) for a, b in pairs for section in a)
    assert [c.loss for r in often.records for c in r.clients] == [c.loss for r in seldom.records for c in r.clients]
    assert all(identical(a, b) for a, b in zip(local_tensors(often), local_tensors(seldom), strict=True))
    assert identical(often.trajectory[4], seldom.trajectory[4])
    # control: had the next round started from what was evaluated, its statistics would be others
    (trained, *_) = often.grid.train(2)
    assert not identical(trained["statistics"], {k: often.trajectory[1][k] for k in trained["statistics"]})
    assert identical(trained["weights"], {k: often.trajectory[1][k] for k in trained["weights"]})


def test_what_is_evaluated_is_what_is_saved(clients: list[Samples]) -> None:
    evaluated: list[dict[str, np.ndarray]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        evaluated.append({k: t.numpy().copy() for k, t in model.state_dict().items() if "mixing" not in k and "num_batches" not in k})
        return {"accuracy": 0.5}

    ran = run(hbn(), clients, 3, evaluate=evaluate)
    saved = to_numpy(ran.strategy.shared.tensors())  # what RunDirectory writes
    assert identical(saved, evaluated[-1])
    assert identical(saved, arrays_of(ran.result.arrays))
    measured = [m for m in ran.grid.received if m.metadata.message_type == "query.statistics"][-3:]
    pooled = [decode_moments(to_tensors(sections(m.content)["moments"])) for m in measured]
    for layer in ("1", "5"):
        merged = pool([part[layer] for part in pooled])
        assert np.array_equal(saved[f"{layer}.running_mean"], merged.mean.float().numpy())
        assert np.array_equal(saved[f"{layer}.running_var"], merged.bessel().float().numpy())
    stale = ran.grid.train(3)[0]["statistics"]
    assert not identical({k: saved[k] for k in stale}, stale)  # control


def test_every_client_is_measured_though_some_train(clients: list[Samples]) -> None:
    ran = run(hbn(), clients, 1, policy={"fraction": 0.4})
    kinds = [m.metadata.message_type for m in ran.grid.sent]
    assert kinds.count("train") == 1
    assert kinds.count("query.statistics") == 3


def test_a_client_missing_from_the_exchange_is_named(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    from tests.in_process import WatchedGrid, client_app

    def disturb(client: int, what: str) -> None:
        if client == 1 and what == "measure 1":
            raise OSError("the disk is full")

    ran = run(hbn(), clients, 1, grid=WatchedGrid(client_app(hbn(), clients, disturb=disturb), 3))
    assert "client 1's statistics are missing from the exchange: error: code 2: OSError: the disk is full" in log.text
    assert not identical(ran.trajectory[1], run(hbn(), clients, 1).trajectory[1])


@pytest.mark.parametrize("name", ["fedavg", "fbn", "hbn"])
def test_calibration_measures_the_first_layer_exactly(name: str, clients: list[Samples]) -> None:
    method = METHODS[name]()
    ran = run(method, clients, 1, policy={"calibrate": 2, "recalibration": "passes"})
    assert ran.grid.kinds()[:3] == ["query.hello 0", "query.statistics 0", "train 1"]
    assert sum(m.metadata.message_type == "query.statistics" and m.metadata.group_id == "0" for m in ran.grid.sent) == 6
    first = seeded_network("cnn")[0]
    with torch.no_grad():
        moments = Moments.of(first(to_input(union(clients).x, torch.float32)))
    found, plain = ran.grid.train(1)[0]["statistics"], run(method, clients, 1).grid.train(1)[0]["statistics"]
    assert np.allclose(found["1.running_mean"], moments.mean, rtol=1e-5, atol=1e-7)
    assert np.allclose(found["1.running_var"], moments.bessel(), rtol=1e-5)
    assert not np.allclose(plain["1.running_var"], moments.bessel(), rtol=1e-5)  # control: torch starts from 0 and 1
    assert identical(ran.grid.train(1)[0]["weights"], seeded_weights(ran))


def seeded_weights(ran: Run) -> dict[str, np.ndarray]:
    state = seeded_network("cnn").state_dict()
    return {k: state[k].numpy() for k in ran.grid.train(1)[0]["weights"]}


def test_calibration_settles_the_deeper_layers(clients: list[Samples]) -> None:
    """Each exchange measures a layer under the statistics that the one before found below it; two layers need two."""
    one, two, three = (run(METHODS["fbn"](), clients, 1, policy={"calibrate": n}).grid.train(1)[0]["statistics"] for n in (1, 2, 3))
    assert np.array_equal(one["1.running_var"], two["1.running_var"])
    assert not np.allclose(one["5.running_var"], two["5.running_var"], rtol=1e-3)
    assert identical(two, three)


@pytest.mark.parametrize("name", ["gn", "fedbn", "silobn"])
def test_where_no_statistics_are_shared_there_is_nothing_to_calibrate(name: str, clients: list[Samples]) -> None:
    assert "query.statistics 0" not in run(METHODS[name](), clients, 1, policy={"calibrate": 2}).grid.kinds()
