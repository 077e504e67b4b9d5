"""A federated run of no rounds: the bits of the pure function, exact through the wire, evaluated, refused where it makes no sense."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.local import Samples
from fl_bn.federation.recalibration import recalibrate
from fl_bn.flower import RunFailed
from fl_bn.flower.app.checkpoint import Checkpoint
from fl_bn.methods import METHODS
from tests.federation import random_samples, union
from tests.in_process import Run, WatchedGrid, client_app, run
from tests.networks import seeded_network
from tests.training.test_recalibration import EXACT, LAYERS, network, off, reference

Clients = Callable[..., list[Samples]]
SHARING = ["fedavg", "fixbn", "hbn", "fbn", "fedtan", "static-bn"]


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((6, 4, 9))


def measured(method: str, clients: list[Samples], model: nn.Module, calibrate: int = -1, **options: object) -> Run:
    """By passes: see test_layer_by_layer for the exchange."""
    policy = {"calibrate": calibrate, "recalibration": "passes", **options.pop("policy", {})}  # type: ignore[dict-item]
    return run(METHODS[method](), clients, 0, model=model, policy=policy, **options)  # type: ignore[arg-type]


def same_bits(ran: Run, model: nn.Module) -> bool:
    found, wanted = running_statistics(ran.strategy.shared.model), running_statistics(model)
    return found.keys() == wanted.keys() and all(
        torch.equal(found[k].mean, wanted[k].mean) and torch.equal(found[k].var, wanted[k].var) for k in wanted
    )


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", SHARING)
def test_the_federated_run_has_the_bits_of_the_pure_function(method: str, name: str, clients: list[Samples]) -> None:
    large = [*clients, random_samples(700, seed=9)]  # measured in several batches: what travels is rounded
    alone = network(name, torch.float32)
    passes = recalibrate(alone, large)
    ran = measured(method, large, network(name, torch.float32))
    assert same_bits(ran, alone)
    assert ran.strategy.statistics.outcomes == passes
    fewer = network(name, torch.float32)
    recalibrate(fewer, clients)
    assert not same_bits(ran, fewer)  # control
    assert not same_bits(ran, network(name, torch.float32))


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_exact_through_the_wire(name: str, clients: list[Samples]) -> None:
    ran = measured("fedavg", clients, network(name))
    true = reference(network(name), union(clients))
    assert max(off(running_statistics(ran.strategy.shared.model), true).values()) < EXACT
    assert min(off(running_statistics(network(name)), true).values()) > 1e-2  # control: as it came
    one = measured("fedavg", clients, network(name), 1)
    assert max(off(running_statistics(one.strategy.shared.model), true).values()) > 1e-4  # control: the first layer alone


def test_nothing_but_statistics_changes_and_all_that_happens_is_recorded(clients: list[Samples]) -> None:
    evaluated: list[float] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        evaluated.append(float(model[1].running_var.sum()))  # type: ignore[index,union-attr,operator]
        return {"accuracy": 0.25 * len(evaluated)}

    kept: list[Checkpoint] = []

    def keep(checkpoint: Checkpoint) -> int:
        kept.append(checkpoint)
        return checkpoint.round

    model = network("chain")
    policy = {"evaluate_every": 3, "checkpoint_every": 1}
    ran = measured("fedavg", clients, model, policy=policy, evaluate=evaluate, keep_checkpoint=keep)
    assert set(ran.grid.kinds()) == {"query.hello 0", "query.statistics 0"}  # nobody trains
    assert [record.round for record in ran.records] == [0, 1, 2, 3, 4]
    assert [record.evaluation.get("accuracy") for record in ran.records] == [0.25, None, None, 0.5, 0.75]  # before, third, last
    assert kept == []
    before, after = model.state_dict(), ran.strategy.shared.model.state_dict()
    assert all(torch.equal(before[k], after[k]) == ("running" not in k) for k in before if "num_batches" not in k)
    last = ran.records[-1]
    assert [c.client for c in last.accepted] == [0, 1, 2]
    assert [c.samples for c in last.clients] == [6, 4, 9]
    assert last.bytes_up.keys() == {"moments"}
    assert last.drift is not None
    assert last.drift.largest == pytest.approx(ran.strategy.statistics.outcomes[-1].largest.mean)
    assert list(ran.trajectory) == [0, 3, 4]
    assert np.array_equal(ran.trajectory[0]["1.running_mean"], before["1.running_mean"])  # type: ignore[arg-type]


def test_until_nothing_moves_before_training_too(clients: list[Samples]) -> None:
    passes = {"recalibration": "passes"}
    still = run(METHODS["fbn"](), clients, 1, model=network("resnet"), policy={**passes, "calibrate": -1})
    many = run(METHODS["fbn"](), clients, 1, model=network("resnet"), policy={**passes, "calibrate": 9})
    settled = [one.settled for one in still.strategy.statistics.outcomes]
    assert settled == [False, False, False, False, True]
    assert [one.settled for one in many.strategy.statistics.outcomes] == settled  # the other four would not move a bit
    a, b = (ran.grid.train(1)[0]["statistics"] for ran in (still, many))
    assert all(np.array_equal(a[k], b[k]) for k in a)
    true = reference(network("resnet"), union(clients))
    assert max(float(np.abs(a[f"{k}.running_mean"] - true[k].mean.numpy()).max()) for k in true) < EXACT
    two = run(METHODS["fbn"](), clients, 1, model=network("resnet"), policy={"calibrate": 2}).grid.train(1)[0]["statistics"]
    assert any(not np.array_equal(a[k], two[k]) for k in a)  # control


def test_refreshing_makes_one_exchange_per_layer(clients: list[Samples]) -> None:
    ran = run(METHODS["static-bn"](), clients, 1, model=network("resnet"), policy={"recalibration": "passes"})
    kinds = [m.metadata.message_type for m in ran.grid.sent]
    assert kinds.count("query.statistics") == 5 * len(clients)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("gn", "no BatchNorm layer, so there are no running statistics"),
        ("fedbn", "keeps running statistics at the clients"),
        ("silobn", "keeps running statistics at the clients"),
        ("single", "keeps running statistics at the clients"),
    ],
)
def test_without_shared_statistics_there_is_nothing_to_measure(method: str, message: str, clients: list[Samples]) -> None:
    with pytest.raises(RunFailed, match=message):
        measured(method, clients, seeded_network("cnn"))


def test_a_run_of_no_rounds_must_say_what_it_measures(clients: list[Samples]) -> None:
    with pytest.raises(RunFailed, match="a run of 0 rounds only measures statistics: set calibrate to -1"):
        measured("fedavg", clients, seeded_network("cnn"), 0)
    with pytest.raises(RunFailed, match="a run of 0 rounds only measures statistics: set calibrate to -1"):
        measured("fedavg", clients, seeded_network("cnn"), -2)  # fedavg wants none
    with pytest.raises(ValueError, match=r"calibrate must be >= -2, but got -3"):
        measured("fedavg", clients, seeded_network("cnn"), -3)


def test_clients_that_do_not_answer(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    def lost(*who: int) -> WatchedGrid:
        def disturb(client: int, what: str) -> None:
            if client in who:
                raise OSError("the disk is full")

        model = network("resnet")
        return WatchedGrid(client_app(METHODS["fedavg"](), clients, disturb=disturb, model=model), 3)

    ran = measured("fedavg", clients, network("resnet"), grid=lost(1))
    assert "client 1's statistics are missing from the exchange: error: code 2: OSError: the disk is full" in log.text
    assert {one.clients for one in ran.strategy.statistics.outcomes} == {2}
    true = reference(network("resnet"), union([clients[0], clients[2]]))
    assert max(off(running_statistics(ran.strategy.shared.model), true).values()) < EXACT
    with pytest.raises(RunFailed, match="pass 1: the statistics of 1 clients could be used, but 2 are needed"):
        measured("fedavg", clients, network("resnet"), grid=lost(0, 1))
    policy = {"calibrate": -1, "recalibration": "passes"}
    kept = run(METHODS["fedavg"](), clients, 1, model=network("resnet"), policy=policy, grid=lost())
    assert kept.strategy.statistics.outcomes[-1].settled
