"""The server's loop over a real ClientApp: rounds, failures, weights and metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from fl_bn.federation.optimizers import server_optimizer
from fl_bn.flower import BatchNormStrategy, Rounds, RunFailed
from fl_bn.methods import METHODS
from fl_bn.secure.settings import SecureAggregation
from fl_bn.task import CLASS
from tests.federation import random_samples
from tests.in_process import FULL_BATCH, RoundRecord, Samples, WatchedGrid, client_app, identical, run
from tests.kept import Kept
from tests.listed import listed
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
FBN = METHODS["fbn"]()


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((3, 7, 5))


def failing(clients: list[Samples], who: set[int], when: set[str]) -> WatchedGrid:
    def disturb(client: int, what: str) -> None:
        if client in who and (what in when or not when):
            raise OSError("the disk is full")

    return WatchedGrid(client_app(FBN, clients, disturb=disturb), len(clients))


def test_a_client_that_raises_is_named_and_the_round_goes_on(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    ran = run(FBN, clients, 2, grid=failing(clients, {1}, {"train 1"}))
    assert [c.refused for c in ran.records[0].clients] == ["", "error: code 2: OSError: the disk is full", ""]
    assert "round 1: client 1's reply is not used: error: code 2: OSError: the disk is full" in log.text
    assert [len(record.accepted) for record in ran.records if record.aggregated] == [2, 3]
    assert not identical(ran.trajectory[1], run(FBN, clients, 2).trajectory[1])


def test_a_failed_round_changes_no_bit_and_steps_no_server_optimiser(clients: list[Samples]) -> None:
    optimizer = lambda: {"optimizer": server_optimizer("fedavgm", 1.0, 0.9)}  # noqa: E731
    ran, plain = run(FBN, clients, 3, grid=failing(clients, {0, 1}, {"train 2"}), **optimizer()), run(FBN, clients, 3, **optimizer())
    assert [record.aggregated for record in ran.records] == [True, False, True]
    assert identical(ran.trajectory[1], ran.trajectory[2])
    assert identical(ran.trajectory[1], plain.trajectory[1])
    assert not identical(ran.trajectory[3], ran.trajectory[2])
    assert not identical(ran.trajectory[3], plain.trajectory[3])
    assert list(ran.result.train_metrics_clientapp) == [1, 3]


def test_persistent_failures_stop_the_run(clients: list[Samples]) -> None:
    seen: list[RoundRecord] = []
    strategy = BatchNormStrategy(seeded_network("cnn"), FBN, Rounds(3, max_failed=2, wait=0.0), callbacks=[Kept(seen)])
    with pytest.raises(RunFailed, match="client 0: .*OSError"):
        strategy.start(failing(clients, {0, 1, 2}, set()), num_rounds=9)
    assert [record.round for record in seen] == [1, 2]
    now_and_then = failing(clients, {0, 1, 2}, {"train 1", "train 3", "train 5"})
    assert len(run(FBN, clients, 6, grid=now_and_then, policy={"max_failed": 2}).records) == 6  # control: never two in a row


def test_a_run_of_which_no_round_was_usable_has_failed(clients: list[Samples]) -> None:
    """Also where it is shorter than the failed rounds in a row that stop one."""
    for rounds in (1, 2):
        with pytest.raises(RunFailed):
            run(FBN, clients, rounds, grid=failing(clients, {0, 1, 2}, set()), policy={"max_failed": 3})
    assert len(run(FBN, clients, 2, grid=failing(clients, {0, 1, 2}, {"train 1"}), policy={"max_failed": 3}).records) == 2  # control


@listed(("method", "trains"), [("fbn", True), ("gn", True), ("hbn", False), ("static-bn", False)])
def test_a_client_with_one_sample_sits_out_by_name(method: str, trains: bool, tiny_clients: Clients, log: pytest.LogCaptureFixture) -> None:
    """It does where layers normalise with their batch."""
    (record,) = run(METHODS[method](), tiny_clients((3, 1, 5)), 1).records
    assert [c.client for c in record.accepted] == ([0, 1, 2] if trains else [0, 2])
    assert ("client 1 sits round 1 out" in log.text) is not trains
    assert record.aggregated


def test_a_slower_round_moves_the_shared_statistics_less_and_a_warm_up_does_not(clients: list[Samples]) -> None:
    """Of the same reports: the second round's rate is a tenth of the first's, or ten times it, and so is what its moments weigh."""
    secure = SecureAggregation(quantization_range=24)
    for second, weight, options in ((1e-10, 0.05, {}), (1e-10, 0.05, {"secure": secure}), (1e-8, 0.5, {})):  # weights stay where they are
        rate = lambda round, rounds, second=second: 1e-9 if round == 1 else second  # noqa: E731
        ran = run(METHODS["fbn"](tracking=0.5), clients, 2, settings=FULL_BATCH, policy={"rate": rate}, **options)
        one, two = (ran.trajectory[round]["1.running_mean"] for round in (1, 2))
        assert np.allclose(two, one + weight * (2 * one - one), rtol=1e-3, atol=1e-5)  # the start is 0, so 2 * one was measured


def test_accuracies_per_class_are_the_mean_of_the_clients_that_have_the_class() -> None:
    made = [random_samples(12, brightness=b, seed=i) for i, b in enumerate((0.0, 0.5, 1.0))]
    clients = [Samples(own.x, own.y % (3 if i == 2 else 2)) for i, own in enumerate(made)]  # class 3 is nowhere, class 2 at the last one
    ran = run(METHODS["fedbn"](), clients, 1)
    records = (reply.content.metric_records.get("fl-bn/metrics", {}) for reply in ran.grid.received)
    sent = [metrics for metrics in records if "accuracy" in metrics]
    values = np.array([[float(metrics[f"{CLASS}{c}"]) for c in range(4)] for metrics in sent])
    assert np.isnan(values).sum(axis=0).tolist() == [0, 0, 2, 3]
    for row, metrics, own in zip(values, sent, clients, strict=True):  # by hand: the accuracies of classes make the accuracy
        counts = np.bincount(own.y.numpy(), minlength=4)
        assert np.nansum(row * counts) / counts.sum() == pytest.approx(metrics["accuracy"])
    found = [ran.records[0].evaluation[f"{CLASS}{c}"] for c in range(4)]
    assert found[:3] == pytest.approx([*values[:, :2].mean(axis=0), values[2, 2]])
    assert math.isnan(found[3])
