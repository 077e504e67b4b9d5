"""What left each client, against the messages themselves, and the warning where few samples are behind a statistic."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fl_bn.federation.local import Samples
from fl_bn.federation.record import Disclosure
from fl_bn.federation.settings import LocalTraining
from fl_bn.flower.app.disclosure import FEW, LAYER_BY_LAYER, NAMED
from fl_bn.methods import METHODS
from tests.in_process import FULL_BATCH, Run, WatchedGrid, client_app, run, sections
from tests.networks import seeded_network

Clients = Callable[..., list[Samples]]
ONE_STEP = LocalTraining(batch_size=4, steps=1)


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((16, 12, 10))


def of(ran: Run, client: int, section: str, round: int = 1) -> list[Disclosure]:
    return [d for d in ran.records[round - 1].disclosures if (d.client, d.section) == (client, section)]


@pytest.mark.parametrize("name", METHODS)
def test_every_array_that_came_is_counted(name: str, clients: list[Samples]) -> None:
    ran = run(METHODS[name](), clients, 2, policy={"calibrate": 1})
    told = [d for record in ran.records for d in record.disclosures if d.section not in ("metrics", "exchange", "evaluation")]
    came = [m for m in ran.grid.received if m.metadata.message_type in ("train", "query.statistics") and m.has_content()]
    arrays = [array for m in came for part in sections(m.content).values() for array in part.values()]
    assert sum(d.tensors for d in told) == len(arrays)
    assert sum(d.nbytes for d in told) == sum(array.nbytes for array in arrays)
    exchanged = [d for record in ran.records for d in record.disclosures if d.section == "exchange"]
    if name == "static-bn":  # two layers of 4 and 6 channels, each before two evaluations
        assert {d.what for d in exchanged} == {LAYER_BY_LAYER}
        assert sum(d.nbytes for d in exchanged) == 3 * 2 * 4 * 2 * (4 + 6)
    else:
        assert sum(d.nbytes for d in exchanged) == 3 * sum(record.bytes_up.get("exchange", 0) for record in ran.records)
        assert bool(exchanged) == (name in ("fedtan", "fedtan2", "fedavg-alg2"))


def test_of_one_batch_the_running_statistics_can_be_computed_back(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    ran = run(METHODS["fedavg"](), clients, 2, settings=ONE_STEP)
    (disclosure,) = of(ran, 1, "statistics")
    assert disclosure == Disclosure(
        1, "statistics", "running means and variances after 1 batch, from which the batch's own can be computed", 4, 2 * (4 + 6) * 4, 4
    )
    assert of(ran, 1, "weights")[0].samples == 4
    sent, reply = ran.grid.train(1)[1]["statistics"], ran.grid.train(1, replies=True)[1]["statistics"]
    mean = (reply["1.running_mean"] - 0.9 * sent["1.running_mean"]) / 0.1  # so it is
    model = ran.strategy.server.source[0]
    with torch.no_grad():
        weights = torch.from_numpy(np.array(ran.grid.train(1)[1]["weights"]["0.weight"]))
        x = clients[1].batch(np.arange(len(clients[1])), weights)[0]
        own = torch.nn.functional.conv2d(x, weights, padding=model.padding).mean((2, 3))  # per sample, (12, 4)
    subsets = torch.combinations(torch.arange(12), 4)
    distances = (own[subsets].mean(1) - torch.from_numpy(mean)).abs().amax(1)
    assert int((distances < 1e-4).sum()) == 1  # and names its four samples among all 495 choices
    assert log.text.count("client 1 revealed statistics of 4 samples in round 1 (running means and variances after 1 batch") == 1
    assert log.text.count("can be traced to a person; raise batch-size") == 3  # once per client


def test_of_many_clients_the_warnings_name_a_few(tiny_clients: Clients, log: pytest.LogCaptureFixture) -> None:
    ran = run(METHODS["fedavg"](), tiny_clients((4,) * 25), 2, settings=ONE_STEP)
    assert log.text.count("can be traced to a person") == NAMED  # none in round 2
    others = f"15 other clients, too, revealed summaries of fewer than {FEW} samples in round 1"
    assert f"{others}: the disclosure report names all of them" in log.text
    assert {d.client for d in ran.records[0].disclosures if d.section == "statistics" and d.samples == 4} == set(range(25))
    log.clear()
    run(METHODS["fedavg"](), tiny_clients((4,) * NAMED), 1, settings=ONE_STEP)
    assert log.text.count("can be traced to a person") == NAMED  # control: all of so many are named
    assert "other clients" not in log.text


def test_after_several_batches_their_different_samples_count(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    ran = run(METHODS["fedavg"](), clients, 1)  # two of 4
    (disclosure,) = of(ran, 0, "statistics")
    assert (disclosure.what, disclosure.samples) == ("running means and variances after 2 batches", 8)
    assert of(ran, 0, "weights")[0].samples == 0
    assert "traced" not in log.text  # control: eight are enough


def test_few_samples_are_few_however_many_batches(tiny_clients: Clients, log: pytest.LogCaptureFixture) -> None:
    ran = run(METHODS["fedavg"](), tiny_clients((FEW - 1, FEW)), 1, settings=LocalTraining(batch_size=4, epochs=3))
    assert [of(ran, client, "statistics")[0].samples for client in (0, 1)] == [FEW - 1, FEW]
    assert f"client 0 revealed statistics of {FEW - 1} samples" in log.text
    assert "client 1: statistics" not in log.text


def test_where_the_last_batch_alone_counts(tiny_clients: Clients) -> None:
    clients = tiny_clients((16, 16))
    model = seeded_network("cnn")
    model[1].momentum = 1.0
    ran = run(METHODS["fedavg"](), clients, 1, model=model)
    assert of(ran, 0, "statistics")[0].samples == 4
    assert "the last alone counts" in of(ran, 0, "statistics")[0].what


@pytest.mark.parametrize(
    ("options", "what", "samples"),
    [
        ({"measured": "normalisers", "stat_samples": 6}, "moments that training normalises with, of a pass before it", 6),
        ({"separate": False, "evaluate_clients": "cohort"}, "moving averages over 2 batches", 8),
    ],
)
def test_what_hbn_reports_otherwise(clients: list[Samples], options: dict[str, object], what: str, samples: int) -> None:
    disclosures = of(run(METHODS["hbn"](**options), clients, 1), 2, "moments")
    assert (disclosures[0].what, disclosures[0].samples) == (what, samples)


def test_moments_of_a_pass_and_of_the_batches(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    ran = run(METHODS["hbn"](stat_samples=6), clients, 1)
    kinds = [(d.what, d.samples, d.values) for d in of(ran, 2, "moments")]
    assert kinds == [("moments of a pass before training", 6, 6 * 64), ("moments that training normalises with", 6, 6 * 64)]
    assert "client 2 revealed statistics of 6 samples in round 1 (moments of a pass before training)" in log.text
    assert "raise hbn-stat-samples" in log.text
    whole = run(METHODS["hbn"](), clients, 1)
    assert [d.samples for d in of(whole, 2, "moments")] == [10, 10]
    passes = {"calibrate": 1, "recalibration": "passes"}
    exact = run(METHODS["hbn"](lam=1.0, stat_samples=6), clients, 1, policy=passes)  # two layers: two exchanges with all data
    assert [(d.what, d.samples) for d in of(exact, 2, "moments")] == [
        ("moments of a pass without training", 10),
        ("moments of a pass before training", 6),
        *[("moments of a pass without training", 10)] * 2,
    ]
    for report, expected in {
        "first": ("moments of the first batch", 4, 256),
        "pass": ("moments of a pass before training", 10, 640),
        "all": ("moments of 2 batches, pooled", 8, 512),
    }.items():
        ran = run(METHODS["fbn"](report=report), clients, 1)
        assert [(d.what, d.samples, d.values) for d in of(ran, 2, "moments")] == [expected]


def test_the_first_batch_is_as_large_as_it_is_however_often_samples_come(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    ran = run(METHODS["fbn"](), clients, 1, settings=LocalTraining(batch_size=4, epochs=3))
    assert [of(ran, client, "moments")[0].samples for client in range(3)] == [4, 4, 4]
    assert "client 2 revealed statistics of 4 samples in round 1 (moments of the first batch): " in log.text
    assert "raise batch-size" in log.text


def test_fedtans_exchange(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    ran = run(METHODS["fedtan"](), clients, 1)
    (disclosure,) = of(ran, 0, "exchange")
    assert disclosure.what == "means and variances and their gradients of one batch, in FedTAN's exchange"
    assert (disclosure.tensors, disclosure.samples) == (4, 4)  # two layers, forward and backward
    assert "client 0 revealed statistics of 4 samples in round 1 (means and variances and their gradients" in log.text
    forward = run(METHODS["fedavg-alg2"](), clients, 1)
    assert (of(forward, 0, "exchange")[0].what, of(forward, 0, "exchange")[0].tensors) == (
        "means and variances of one batch, in FedTAN's exchange",
        2,
    )
    one = run(METHODS["fedtan"](), clients, 1, settings=ONE_STEP)  # what is known to all is nobody's
    assert of(one, 0, "statistics")[0].samples == 0


def test_exchanges_before_round_1_are_in_its_record(clients: list[Samples]) -> None:
    for recalibration, passes in (("passes", 2), ("auto", 1)):
        ran = run(METHODS["fbn"](), clients, 2, policy={"calibrate": 2, "recalibration": recalibration})
        assert sum(d.what == "moments of a pass without training" for d in ran.records[0].disclosures) == passes * 3
        assert sum(d.what == LAYER_BY_LAYER for d in ran.records[0].disclosures) == (2 - passes) * 3
        assert not any("without training" in d.what for d in ran.records[1].disclosures)


def test_a_reply_that_is_refused_has_left_all_the_same(clients: list[Samples]) -> None:
    class Spoiling(WatchedGrid):
        def pull_messages(self, message_ids):  # type: ignore[no-untyped-def]
            for reply in (replies := list(super().pull_messages(message_ids))):
                if reply.metadata.message_type == "train" and reply.metadata.src_node_id == 2:
                    reply.content["fl-bn/metrics"]["samples"] = 99
            return replies

    ran = run(METHODS["fedavg"](), clients, 1, grid=Spoiling(client_app(METHODS["fedavg"](), clients), 3), settings=FULL_BATCH)
    assert [c.client for c in ran.records[0].accepted] == [0, 2]
    assert of(ran, 1, "weights")[0].nbytes == of(ran, 0, "weights")[0].nbytes > 0


def test_who_stays_silent_or_fails_sends_nothing(clients: list[Samples]) -> None:
    def disturb(client: int, what: str) -> None:
        if client == 1:
            raise OSError("no")

    ran = run(METHODS["fedavg"](), clients, 1, grid=WatchedGrid(client_app(METHODS["fedavg"](), clients, disturb=disturb), 3))
    assert {d.client for d in ran.records[0].disclosures} == {0, 2}


def test_what_stays_home_is_not_there(clients: list[Samples]) -> None:
    for name, more in (("fedbn", {"evaluation"}), ("gn", set[str]())):
        assert {d.section for d in run(METHODS[name](), clients, 1).records[0].disclosures} == {"weights", "metrics"} | more
    assert {d.section for d in run(METHODS["single"](), clients, 1).records[0].disclosures} <= {"metrics", "evaluation"}


def test_the_order_of_replies_changes_nothing_in_the_report(clients: list[Samples]) -> None:
    told = []
    for shuffle in (None, 1, 2):
        grid = WatchedGrid(client_app(METHODS["fedbn"](), clients), len(clients), shuffle)
        told.append(run(METHODS["fedbn"](), clients, 1, grid=grid).records[0].disclosures)
    assert told[0] == told[1] == told[2]
    assert sum(d.section == "evaluation" for d in told[0]) == len(clients)


def test_every_evaluation_is_counted_with_the_fewest_samples_behind_a_number(tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 9, 5))
    ran = run(METHODS["fedbn"](), clients, 2, policy={"evaluate_every": 1})
    for record in ran.records:
        found = {d.client: d for d in record.disclosures if d.section == "evaluation"}
        assert found.keys() == {0, 1, 2}
        for index, disclosure in found.items():
            assert disclosure.what == "numbers on test data: accuracy, accuracy-class-*, loss"
            counts = clients[index].y.bincount()
            assert disclosure.samples == int(counts[counts > 0].min())
            assert disclosure.nbytes == 8 * 6
