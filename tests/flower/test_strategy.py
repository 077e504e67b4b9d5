"""The server's loop over a real ClientApp: rounds, failures, weights and metrics."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fl_bn.federation.optimizers import server_optimizer
from fl_bn.flower import BatchNormStrategy, Rounds, RunFailed
from fl_bn.methods import METHODS
from fl_bn.secure.settings import SecureAggregation
from tests.flower.inside import Clients, LocalTraining, RoundRecord, Samples
from tests.in_process import FULL_BATCH, WatchedGrid, client_app, identical, run
from tests.kept import Kept
from tests.networks import seeded_network

FBN = METHODS["fbn"]()


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((3, 7, 5))


def failing(clients: list[Samples], who: set[int], when: set[str]) -> WatchedGrid:
    def disturb(client: int, what: str) -> None:
        if client in who and (what in when or not when):
            raise OSError("the disk is full")

    return WatchedGrid(client_app(FBN, clients, disturb=disturb), len(clients))


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
    with pytest.raises(RunFailed):  # also where it is shorter than that
        run(FBN, clients, 2, grid=failing(clients, {0, 1, 2}, set()), policy={"max_failed": 3})
    now_and_then = failing(clients, {0, 1, 2}, {"train 1", "train 3", "train 5"})
    assert len(run(FBN, clients, 6, grid=now_and_then, policy={"max_failed": 2}).records) == 6  # control: never two in a row


def test_a_slower_round_moves_the_shared_statistics_less_and_a_warm_up_does_not(clients: list[Samples]) -> None:
    """Of the same reports: the second round's rate is a tenth of the first's, or ten times it, and so is what its moments weigh."""
    secure = SecureAggregation(quantization_range=24)
    for second, weight, options in ((1e-10, 0.05, {}), (1e-10, 0.05, {"secure": secure}), (1e-8, 0.5, {})):  # weights stay where they are
        rate = lambda round, rounds, second=second: 1e-9 if round == 1 else second  # noqa: E731
        ran = run(METHODS["fbn"](tracking=0.5), clients, 2, settings=FULL_BATCH, policy={"rate": rate}, **options)
        one, two = (ran.trajectory[round]["1.running_mean"] for round in (1, 2))
        assert np.allclose(two, one + weight * (2 * one - one), rtol=1e-3, atol=1e-5)  # the start is 0, so 2 * one was measured


@pytest.mark.parametrize("name", ["fbn", "fedavg", "hbn"])
def test_statistics_of_bfloat16_activations_are_summed_in_float32(name: str, clients: list[Samples]) -> None:
    """Sums of thousands of bfloat16 numbers, with 8 bits each, would be off by percents: they are right to the activations' own error."""
    big = [Samples(c.x.repeat(12, 1, 1, 1), c.y.repeat(12)) for c in clients]
    method, settings = METHODS[name](), LocalTraining(batch_size=128, steps=1)
    frozen = {"rate": lambda round, rounds: 1e-12}
    plain, mixed = (run(method, big, 1, settings=replace(settings, precision=p), policy=frozen) for p in ("float32", "mixed"))
    a, b = (ran.trajectory[1] for ran in (plain, mixed))
    for key in (key for key in a if "running" in key):
        assert not np.array_equal(a[key], b[key]) or method.report.name == "PASS"  # before training, in float32
        assert np.allclose(a[key], b[key], rtol=4e-3, atol=2e-3), key
