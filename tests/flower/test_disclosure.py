"""What left each client, against the messages themselves, and the warning where few samples are behind a statistic."""

from __future__ import annotations

from typing import Any

import pytest

from fl_bn.flower.disclosure import FEW
from fl_bn.methods import METHODS, Refresh
from tests.conformance.cases import every_method
from tests.flower.inside import Clients, Disclosure, LocalTraining, Samples
from tests.hostile.liars import LIAR, lied, sets
from tests.in_process import TWO_STEPS, Run, run, sections
from tests.listed import listed

ONE_STEP, EPOCHS = LocalTraining(batch_size=4, steps=1), LocalTraining(batch_size=4, epochs=3)


@pytest.fixture
def clients(tiny_clients: Clients) -> list[Samples]:
    return tiny_clients((16, 12, 10))


def of(ran: Run, client: int, section: str, round: int = 1) -> list[Disclosure]:
    return [d for d in ran.records[round - 1].disclosures if (d.client, d.section) == (client, section)]


@every_method
def test_every_array_that_came_is_counted(method_name: str, clients: list[Samples]) -> None:
    method = METHODS[method_name]()
    ran = run(method, clients, 2, policy={"calibrate": 1})
    told = [d for record in ran.records for d in record.disclosures if d.section not in ("metrics", "exchange", "evaluation")]
    came = [m for m in ran.grid.received if m.metadata.message_type in ("train", "query.statistics") and m.has_content()]
    arrays = [array for m in came for part in sections(m.content).values() for array in part.values()]
    assert sum(d.tensors for d in told) == len(arrays)
    assert sum(d.nbytes for d in told) == sum(array.nbytes for array in arrays)
    exchanged = [d for record in ran.records for d in record.disclosures if d.section == "exchange"]
    if method.refresh is Refresh.EXACT:  # two layers of 4 and 6 channels, each before two evaluations
        assert sum(d.nbytes for d in exchanged) == 3 * 2 * 4 * 2 * (4 + 6)
    else:
        assert sum(d.nbytes for d in exchanged) == 3 * sum(record.bytes_up.get("exchange", 0) for record in ran.records)
        assert bool(exchanged) == method.exchanges


@listed(
    ("name", "options", "settings", "section", "samples"),
    [
        ("fedavg", {}, TWO_STEPS, "statistics", [8]),  # of several batches their different samples
        ("fedavg", {}, EPOCHS, "statistics", [10]),  # however often they come
        ("fbn", {"report": "first"}, EPOCHS, "moments", [4]),
        ("fbn", {"report": "pass"}, TWO_STEPS, "moments", [10]),
        ("fbn", {"report": "all"}, TWO_STEPS, "moments", [8]),
        ("hbn", {}, TWO_STEPS, "moments", [10, 10]),  # a pass before training, and what training normalises with
        ("hbn", {"stat_samples": 6}, TWO_STEPS, "moments", [6, 6]),
        ("hbn", {"measured": "normalisers", "stat_samples": 6}, TWO_STEPS, "moments", [6]),
        ("hbn", {"separate": False, "evaluate_clients": "cohort"}, TWO_STEPS, "moments", [8]),
        ("fedtan", {}, TWO_STEPS, "exchange", [4]),
        ("fedavg-alg2", {}, TWO_STEPS, "exchange", [4]),
        ("fedtan", {}, ONE_STEP, "statistics", [0]),  # what is known to all is nobody's
    ],
)
def test_how_many_samples_are_behind_what_was_told(
    name: str,
    options: Any,
    settings: LocalTraining,
    section: str,
    samples: list[int],
    clients: list[Samples],
    log: pytest.LogCaptureFixture,
) -> None:
    found = of(run(METHODS[name](**options), clients, 1, settings=settings), 2, section)
    assert [d.samples for d in found][: len(samples)] == samples
    if few := [d.samples for d in found if 0 < d.samples < FEW]:
        assert f"client 2 revealed statistics of {few[0]} samples" in log.text


def test_a_reply_that_is_refused_has_left_all_the_same() -> None:
    (record,) = lied(sets("train", "metrics", samples=99), "fedavg", rounds=1).records
    assert record.clients[LIAR].refused
    left = {d.client: d.nbytes for d in record.disclosures if d.section == "weights"}
    assert left[LIAR] == left[0] > 0


def test_every_evaluation_is_counted_with_the_fewest_samples_behind_a_number(tiny_clients: Clients) -> None:
    clients = tiny_clients((6, 9, 5))
    ran = run(METHODS["fedbn"](), clients, 2, policy={"evaluate_every": 1})
    for record in ran.records:
        found = {d.client: d for d in record.disclosures if d.section == "evaluation"}
        assert found.keys() == {0, 1, 2}
        for index, disclosure in found.items():
            counts = clients[index].y.bincount()
            assert disclosure.samples == int(counts[counts > 0].min())
            assert disclosure.nbytes == 8 * 6
