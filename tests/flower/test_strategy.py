"""The server's loop over a real ClientApp: rounds, failures, weights, and the base class's loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import Strategy

from fl_bn.federation.local import Samples
from fl_bn.federation.optimizers import server_optimizer
from fl_bn.federation.payload import to_numpy
from fl_bn.federation.record import RoundRecord
from fl_bn.flower import BatchNormStrategy, FedAvgBNStrategy, FixBNStrategy, HBNStrategy, Rounds, RunFailed
from fl_bn.flower.wire import codec
from fl_bn.methods import METHODS, freeze
from fl_bn.secure.settings import SecureAggregation
from tests.in_process import FULL_BATCH, WatchedGrid, a_tenth, arrays_of, client_app, identical, run
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
    assert ran.records[0].aggregated
    assert [len(record.accepted) for record in ran.records] == [2, 3]
    assert not identical(ran.trajectory[1], run(FBN, clients, 2).trajectory[1])


def test_a_failed_round_changes_no_bit(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    ran = run(FBN, clients, 3, grid=failing(clients, {0, 1}, {"train 2"}))
    assert "round 2: only 1 of 3 replies could be used, but 2 are needed (min-replies, min-cohort): nothing changes" in log.text
    assert [record.aggregated for record in ran.records] == [True, False, True]
    assert identical(ran.trajectory[2], ran.trajectory[1])
    assert not identical(ran.trajectory[3], ran.trajectory[2])
    assert list(ran.result.train_metrics_clientapp) == [1, 3]


def test_a_failed_round_does_not_step_the_server_optimiser(clients: list[Samples]) -> None:
    disturbed = run(FBN, clients, 3, grid=failing(clients, {0, 1, 2}, {"train 2"}), optimizer=server_optimizer("fedavgm", 1.0, 0.9))
    plain = run(FBN, clients, 3, optimizer=server_optimizer("fedavgm", 1.0, 0.9))
    assert identical(disturbed.trajectory[1], disturbed.trajectory[2])
    assert identical(disturbed.trajectory[1], plain.trajectory[1])
    assert not identical(disturbed.trajectory[3], plain.trajectory[3])


def test_persistent_failures_stop_the_run(clients: list[Samples]) -> None:
    seen: list[RoundRecord] = []
    rounds = Rounds(3, max_failed=2, wait=0.0, calibrate=0)  # nothing moves before round 1 either
    strategy = BatchNormStrategy(seeded_network("cnn"), FBN, rounds, callbacks=[Kept(seen)])
    start = to_numpy(strategy.shared.tensors())
    with pytest.raises(RunFailed, match="2 rounds in a row had too few usable replies. The first reason: client 0: .*OSError: the disk"):
        strategy.start(failing(clients, {0, 1, 2}, set()), num_rounds=9)
    assert [record.round for record in seen] == [1, 2]
    assert identical(to_numpy(strategy.shared.tensors()), start)
    now_and_then = failing(clients, {0, 1, 2}, {"train 1", "train 3", "train 5"})
    assert len(run(FBN, clients, 6, grid=now_and_then, policy={"max_failed": 2}).records) == 6  # control: never two in a row


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_run_of_which_no_round_was_usable_has_failed(rounds: int, clients: list[Samples]) -> None:
    """Also where it is shorter than the failed rounds in a row that stop one."""
    strategy = BatchNormStrategy(seeded_network("cnn"), FBN, Rounds(3, max_failed=3, wait=0.0))
    with pytest.raises(RunFailed, match=f"none of the {rounds} rounds had enough usable replies, so nothing was trained"):
        strategy.start(failing(clients, {0, 1, 2}, set()), num_rounds=rounds)
    assert len(run(FBN, clients, 2, grid=failing(clients, {0, 1, 2}, {"train 1"}), policy={"max_failed": 3}).records) == 2  # control


@pytest.mark.parametrize("method", ["fbn", "gn"])
def test_a_client_with_one_sample_trains_where_no_layer_needs_its_batch(method: str, tiny_clients: Clients) -> None:
    ran = run(METHODS[method](), tiny_clients((3, 1, 5)), 1)
    assert [(c.client, c.samples) for c in ran.records[0].accepted] == [(0, 3), (1, 1), (2, 5)]


@pytest.mark.parametrize("method", ["hbn", "fedavg", "static-bn"])
def test_a_client_with_one_sample_sits_out_by_name(method: str, tiny_clients: Clients, log: pytest.LogCaptureFixture) -> None:
    ran = run(METHODS[method](), tiny_clients((3, 1, 5)), 1)
    assert "client 1 sits round 1 out: batch statistics need at least 2 samples, but this client has 1" in log.text
    assert "round 1: client 1's reply is not used: metrics/samples: 0: the client trained on no samples in this round" in log.text
    assert [c.client for c in ran.records[0].accepted] == [0, 2]
    assert ran.records[0].aggregated


def test_every_message_dies_at_the_deadline(clients: list[Samples]) -> None:
    ran = run(METHODS["hbn"](), clients, 1, policy={"timeout": 45.0})
    assert ran.grid.kinds() == ["query.hello 0", "train 1", "query.statistics 1"]
    assert {message.metadata.ttl for message in ran.grid.sent} == {45.0}


@pytest.mark.parametrize(("client_weights", "shares"), [("samples", (3, 7, 5)), ("uniform", (1, 1, 1))])
def test_clients_count_by_their_samples_or_alike(client_weights: str, shares: tuple[int, ...], clients: list[Samples]) -> None:
    ran = run(METHODS["gn"](), clients, 1, settings=FULL_BATCH, policy={"client_weights": client_weights})
    replies = [reply["weights"] for reply in ran.grid.train(1, replies=True)]
    by_hand = {k: sum(w * r[k].astype("float64") for w, r in zip(shares, replies, strict=True)) / sum(shares) for k in replies[0]}
    wrong = {k: sum(w * r[k].astype("float64") for w, r in zip((7, 3, 5), replies, strict=True)) / 15 for k in replies[0]}
    after = ran.trajectory[1]
    assert all(np.allclose(after[k], by_hand[k], rtol=0, atol=1e-7) for k in by_hand)
    assert not all(np.allclose(after[k], wrong[k], rtol=0, atol=1e-7) for k in by_hand)  # control
    assert [c.samples for c in ran.records[0].clients] == [3, 7, 5]


@pytest.mark.parametrize("name", ["fedavg", "fbn"])
def test_the_loop_of_flowers_base_class_gives_the_same_bits(name: str, clients: list[Samples]) -> None:
    method = METHODS[name]()
    ours = run(method, clients, 3)
    strategy = BatchNormStrategy(seeded_network("cnn"), method, Rounds(3, wait=0.0, rate=a_tenth))
    grid = WatchedGrid(client_app(method, clients), 3)
    result = Strategy.start(strategy, grid, codec.arrays_of(strategy.shared.tensors()), num_rounds=3)
    assert identical(arrays_of(result.arrays), ours.trajectory[3])
    assert not identical(arrays_of(result.arrays), ours.trajectory[2])


def test_a_run_can_start_from_given_arrays(clients: list[Samples]) -> None:
    first = run(FBN, clients, 2)
    strategy = BatchNormStrategy(seeded_network("cnn", seed=5), FBN, Rounds(3, wait=0.0, calibrate=0, rate=a_tenth))
    grid = WatchedGrid(client_app(FBN, clients), 3)
    strategy.start(grid, first.result.arrays, num_rounds=1)
    (sent, *_) = grid.train(1)
    assert identical({k: a for section in sent.values() for k, a in section.items()}, first.trajectory[2])


def test_frozen_rounds_keep_the_statistics_bit_for_bit_and_report_none(clients: list[Samples]) -> None:
    ran = run(freeze(METHODS["fedavg"](), 1), clients, 3)
    down = [ran.grid.train(round)[0]["statistics"] for round in (1, 2, 3)]
    up = [ran.grid.train(round, replies=True)[0] for round in (1, 2, 3)]
    assert [record.phase for record in ran.records] == ["train", "frozen", "frozen"]
    assert identical(down[1], down[2])
    assert identical(down[2], {k: ran.trajectory[3][k] for k in down[2]})
    assert not identical(down[0], down[1])  # control: round 1 moved them
    assert [set(reply) for reply in up] == [{"weights", "statistics"}, {"weights"}, {"weights"}]
    assert [set(record.bytes_up) for record in ran.records] == [{"weights", "statistics"}, {"weights"}, {"weights"}]
    assert not np.array_equal(ran.trajectory[2]["1.weight"], ran.trajectory[3]["1.weight"])  # affine trains on


def test_the_named_strategies_bind_their_method() -> None:
    rounds = Rounds(3)
    assert FedAvgBNStrategy(seeded_network("cnn"), rounds).method.name == "fedavg"
    assert FixBNStrategy(seeded_network("cnn"), rounds, freeze_after=1).method.phase(2, 4).value == "frozen"
    assert HBNStrategy(seeded_network("cnn"), rounds, stat_samples=5).method.statistics_pass.samples == 5


@listed(
    ("wrong", "message"),
    [
        ({"clients": 0}, "the round policy's clients must be 1..100000, but got 0"),
        ({"fraction": 0.0}, r"fraction must be in \(0, 1\], but got 0.0"),
        ({"min_replies": 1.5}, "min_replies must be 0..1, but got 1.5"),
        ({"timeout": 0.0}, "timeout must be > 0, but got 0.0"),
        ({"retry": -1.0}, "retry must be >= 0, but got -1.0"),
        ({"min_cohort": 4}, "min_cohort must be 1..3, the number of clients, but got 4"),
        ({"min_cohort": 0}, "min_cohort must be >= 1, but got 0"),
        ({"checkpoint_every": -1}, "checkpoint_every must be >= 0, but got -1"),
        ({"client_weights": "steps"}, "client_weights must be one of samples, uniform, but got 'steps'"),
    ],
)
def test_rounds_refuse_what_is_out_of_range(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rounds(**{"clients": 3, **wrong})


def test_the_pace_of_a_round_falls_with_the_learning_rate_and_is_1_in_a_warm_up() -> None:
    falling = Rounds(3, rate=lambda round, rounds: 0.2 / round)
    assert [falling.pace(0.2 / round, 4) for round in (1, 2, 4)] == pytest.approx([1, 0.5, 0.25])
    rising = Rounds(3, rate=lambda round, rounds: 0.1 * (round - 1))
    assert [rising.pace(0.1 * (round - 1), 4) for round in (1, 2, 4)] == [1, 1, 1]


def test_a_slower_round_moves_the_shared_statistics_less(clients: list[Samples]) -> None:
    """Of the same reports: the second round's rate is a tenth of the first's, and so is what its moments weigh."""
    policy = {"rate": lambda round, rounds: 1e-9 if round == 1 else 1e-10}  # the weights stay where they are
    for secure in (None, SecureAggregation(quantization_range=24)):
        ran = run(METHODS["fbn"](tracking=0.5), clients, 2, settings=FULL_BATCH, policy=policy, secure=secure)
        one, two = (ran.trajectory[round]["1.running_mean"] for round in (1, 2))
        measured = 2 * one  # the start is 0
        assert np.allclose(two, one + 0.05 * (measured - one), rtol=1e-3, atol=1e-5)


def test_a_float64_model_stays_float64(clients: list[Samples]) -> None:
    ran = run(FBN, clients, 1, model=seeded_network("cnn", dtype=torch.float64))
    assert {str(array.dtype) for array in ran.trajectory[1].values()} == {"float64"}
    assert ran.records[0].aggregated


class Scaled(torch.nn.Module):
    """A network with a learnable number: a tensor without any axis."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = seeded_network("cnn"), torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.body(x)


def test_tensors_without_axes_travel(clients: list[Samples]) -> None:
    ran = run(METHODS["fedavg"](), clients, 2, model=Scaled())
    assert [len(record.accepted) for record in ran.records] == [3, 3]
    assert ran.trajectory[2]["scale"].shape == ()
    assert ran.trajectory[2]["scale"] != 2
