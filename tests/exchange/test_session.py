"""The session: who is awaited, what is answered, counted and logged."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_bn.exchange import session as session_module
from fl_bn.exchange.call import Answer, Join, Key, Local, Quantity
from fl_bn.exchange.session import POLICIES, Session, Traffic, reduce
from tests.exchange.cohorts import (
    BATCHES,
    GRADIENTS,
    LAYERS,
    MEAN,
    MOMENTS,
    NAN,
    NARROW,
    STATISTICS,
    VARIANCE,
    WIDE,
    Clock,
    Cohort,
    answer,
    bits,
    joined,
    reason,
)

# joining


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_joins_are_answered_when_all_have_joined_with_the_batch_total(order: tuple[int, ...]) -> None:
    cohort, came = Cohort(), []
    for client in order:
        assert all(outcome == [] for outcome in came)
        came.append(cohort.submit(client, Join(BATCHES[client])))
    for outcome in came:
        got = answer(outcome)
        assert (got.batch, got.count, got.values.numel()) == (8, 0, 0)
    assert cohort.session.taking_part == {0: 3, 1: 1, 2: 4}
    assert list(cohort.session.taking_part) == [0, 1, 2]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_client_with_an_empty_batch_sits_out_and_is_not_awaited(order: tuple[int, ...]) -> None:
    cohort = Cohort()
    came = {client: cohort.submit(client, Join((3, 0, 4)[client])) for client in order}
    assert [answer(came[client]).batch for client in range(3)] == [7, 0, 7]
    first, last = cohort.send(0, 1.0, 2.0), cohort.send(2, 3.0, 6.0)
    assert answer(first).values.tolist() == answer(last).values.tolist() == [2.0, 4.0]
    assert answer(last).batch == 7
    assert cohort.session.taking_part == {0: 3, 2: 4}
    assert cohort.session.dropped == {}
    assert cohort.session.failure == ""
    assert reason(cohort.send(1)) == "this client takes no part in the round"
    assert cohort.session.taking_part == {0: 3, 2: 4}


def test_who_sits_out_is_answered_at_once() -> None:
    assert answer(Cohort().submit(1, Join(0))).batch == 0


def test_a_cohort_of_empty_batches_fails_nobody(clock: Clock) -> None:
    cohort = Cohort()
    assert [answer(outcome).batch for outcome in cohort.join(0, 0, 0)] == [0, 0, 0]
    clock.now += 1e6
    cohort.session.expire()
    assert (cohort.session.taking_part, cohort.session.dropped, cohort.session.failure) == ({}, {}, "")


def test_a_stranger_is_turned_away_and_changes_nothing() -> None:
    cohort = joined()
    assert reason(cohort.send(7)) == "this client takes no part in the round"
    cohort.session.leave(7, "spam")
    assert (cohort.session.dropped, cohort.session.failure) == ({}, "")
    assert [answer(outcome).count for outcome in [cohort.send(client) for client in range(3)][2:]] == [3]


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="policy must be one of abort, shrink, but got 'retry'"):
        Session([0], LAYERS, policy="retry")


# what is answered


def client_data(layer: str) -> list[np.ndarray]:
    """Batches (n_i, C) of three clients whose means, scales and sizes differ."""
    rng, channels = np.random.default_rng(7), LAYERS[layer].channels
    return [rng.normal(5.0 * i, 1.0 + i, (n, channels)) for i, n in enumerate((12, 3, 8))]


def requests(layer: str, quantity: Quantity) -> list[Local]:
    """What three clients send of ``client_data``; gradients are arbitrary."""
    data, dtype = client_data(layer), LAYERS[layer].dtype
    common = np.concatenate(data).mean(0)
    vectors = {
        MEAN: [x.mean(0) for x in data],
        VARIANCE: [np.square(x - common).mean(0) for x in data],
        MOMENTS: [np.concatenate([x.mean(0), x.var(0)]) for x in data],
        STATISTICS: [np.concatenate([x.mean(0), x.var(0)]) for x in data],
        GRADIENTS: [np.concatenate([x[0], x[1]]) for x in data],
    }[quantity]
    return [Local(Key(layer, quantity), torch.from_numpy(v).to(dtype), len(x)) for v, x in zip(vectors, data, strict=True)]


def exchange(sent: list[Local], order: tuple[int, ...] = (0, 1, 2), **options: object) -> list[Answer]:
    cohort = joined(**options)
    came = {client: cohort.submit(client, sent[client]) for client in order}
    return [answer(came[client]) for client in sorted(came)]


def deviation(got: Tensor, want: np.ndarray) -> float:
    """In units of the dtype's rounding."""
    return float(np.abs((got.double().numpy() - want) / want).max() / torch.finfo(got.dtype).eps)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("quantity", Quantity)
def test_the_answer_is_the_weighted_average_computed_by_hand(layer: str, quantity: Quantity) -> None:
    """Gradients are weighted by batch sizes, all else by counts. Control: each with the other's weights is elsewhere."""
    sent = requests(layer, quantity)
    values = [r.values.double().numpy() for r in sent]
    by_counts, by_batches = np.array([12, 3, 8]) / 23, np.array(BATCHES) / 8
    if quantity in (MOMENTS, STATISTICS):
        means, variances = ([np.split(v, 2)[half] for v in values] for half in (0, 1))

        def average(weights: np.ndarray) -> np.ndarray:
            mean = sum(w * m for w, m in zip(weights, means, strict=True))
            spread = sum(w * (v + (m - mean) ** 2) for w, m, v in zip(weights, means, variances, strict=True))
            return np.concatenate([mean, spread * (23 / 22 if quantity is STATISTICS else 1)])
    else:

        def average(weights: np.ndarray) -> np.ndarray:
            return np.asarray(sum(w * v for w, v in zip(weights, values, strict=True)))

    right, wrong = (by_batches, by_counts) if quantity is GRADIENTS else (by_counts, by_batches)
    for got in exchange(sent):
        assert (got.count, got.batch) == (23, 8)
        assert got.values.dtype == LAYERS[layer].dtype
        assert got.values.shape == (quantity.width(LAYERS[layer].channels),)
        assert deviation(got.values, average(right)) < 8
        assert deviation(got.values, average(wrong)) > 1e3


@pytest.mark.parametrize("layer", LAYERS)
def test_both_schedules_yield_the_moments_of_the_union(layer: str) -> None:
    """Control: the plain average of the clients' variances does not."""
    union = np.concatenate(client_data(layer))
    want = np.concatenate([union.mean(0), union.var(0)])
    merged = exchange(requests(layer, MOMENTS))[0].values
    paper = torch.cat([exchange(requests(layer, quantity))[0].values for quantity in (MEAN, VARIANCE)])
    assert deviation(merged, want) < 20
    assert deviation(paper, want) < 20
    counts = torch.tensor([12.0, 3.0, 8.0], dtype=torch.float64)
    plain = (torch.stack([r.values.double() for r in requests(layer, MOMENTS)]) * (counts / 23)[:, None]).sum(0)
    assert deviation(plain.to(merged.dtype), want) > 1e3


@pytest.mark.parametrize("layer", LAYERS)
def test_statistics_are_those_of_the_union_with_an_unbiased_variance(layer: str) -> None:
    union = np.concatenate(client_data(layer))
    got = exchange(requests(layer, STATISTICS))[0].values
    assert deviation(got, np.concatenate([union.mean(0), union.var(0, ddof=1)])) < 20
    assert deviation(got, np.concatenate([union.mean(0), union.var(0)])) > 1e3  # control


def test_statistics_of_a_single_value_have_no_unbiased_variance() -> None:
    cohort = joined(batches=(1,))
    got = answer(cohort.send(0, 3.0, 4.0, 0.0, 0.0, key=Key(WIDE, STATISTICS)))
    assert (got.count, got.values.tolist()) == (1, [3.0, 4.0, 0.0, 0.0])


def test_under_a_defence_the_unbiased_variance_is_that_of_counts_as_the_median_client_s() -> None:
    """As ``Defence.believed`` has it: of counts 2 and 6 it is 4."""
    sent = [Local(Key(WIDE, STATISTICS), torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64), count) for count in (2, 6)]
    cohort = joined(batches=(1, 1), believing=False)
    cohort.submit(0, sent[0])
    got = answer(cohort.submit(1, sent[1]))
    assert (got.count, got.values.tolist()) == (8, [1.0, 1.0, 2 * (8 / 7), 2 * (8 / 7)])


def test_float32_values_are_averaged_in_float64() -> None:
    """Of 2^25, 1 and -2^25 a float32 sum forgets the 1."""
    sent = [Local(Key(NARROW, MEAN), torch.full((3,), v), 1) for v in (2.0**25, 1.0, -(2.0**25))]
    assert exchange(sent)[0].values.tolist() == [torch.tensor(1 / 3).item()] * 3
    assert (torch.tensor(2.0**25) + torch.tensor(1.0)) - torch.tensor(2.0**25) == 0  # control


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("quantity", Quantity)
def test_every_order_of_submission_gives_the_same_bits(layer: str, quantity: Quantity) -> None:
    sent = requests(layer, quantity)
    assert len({bits(got.values) for order in itertools.permutations(range(3)) for got in exchange(sent, order)}) == 1


def test_without_the_sessions_order_the_bits_would_differ() -> None:
    """The control of the test above."""
    sent = requests(WIDE, MOMENTS)
    found = {bits(reduce([sent[i] for i in order], [BATCHES[i] for i in order])) for order in itertools.permutations(range(3))}
    assert len(found) > 1


@pytest.mark.parametrize("quantity", Quantity)
def test_the_average_it_is_given_is_used_for_every_quantity(quantity: Quantity) -> None:
    weights: list[list[float]] = []

    def median(values: Tensor, counts: Tensor) -> Tensor:
        assert values.dtype == counts.dtype == torch.float64
        weights.append(counts.tolist())
        return values.median(0).values

    sent = requests(WIDE, quantity)
    stacked = torch.stack([r.values for r in sent])
    want = stacked.median(0).values
    if quantity in (MOMENTS, STATISTICS):  # the robust variance is about the robust mean
        means, variances = stacked.chunk(2, dim=1)
        want = torch.cat([want[:2], (variances + (means - want[:2]) ** 2).median(0).values * (23 / 22 if quantity is STATISTICS else 1)])
    robust, plain = exchange(sent, average=median)[0].values, exchange(sent)[0].values
    assert torch.equal(robust, want)
    assert not torch.allclose(plain, want)  # control
    assert weights == [[3.0, 1.0, 4.0] if quantity is GRADIENTS else [12.0, 3.0, 8.0]] * (2 if quantity in (MOMENTS, STATISTICS) else 1)


def test_nobody_is_answered_before_the_last_has_sent() -> None:
    cohort = joined()
    first, second = cohort.send(0, 1.0, 1.0), cohort.send(2, 1.0, 1.0)
    assert first == second == []
    third = cohort.send(1, 4.0, 7.0, count=2)
    assert [answer(outcome).values.tolist() for outcome in (first, second, third)] == [[2.5, 4.0]] * 3


def test_what_is_exchanged_may_come_in_any_sequence_that_all_share() -> None:
    """Twice through the same layer, another layer, gradients first: the clients' program decides, not the session."""
    cohort = joined(batches=(1, 1))
    for key in (Key(NARROW, GRADIENTS), Key(WIDE, MEAN), Key(WIDE, MEAN), Key(WIDE, MEAN, 1), Key(NARROW, MOMENTS, 3)):
        width = key.quantity.width(LAYERS[key.layer].channels)
        cohort.send(0, *[1.0] * width, key=key)
        assert answer(cohort.send(1, *[1.0] * width, key=key)).count == 2
    assert cohort.session.exchanges == 5


# traffic


def test_traffic_counts_exchanges_and_bytes_both_ways() -> None:
    """Joins are free; a client that was dropped keeps what it had; 4 float64 are 32 bytes, 3 float32 are 12."""
    cohort = Cohort(4, "shrink")
    cohort.join(3, 1, 4, 0)
    assert cohort.session.traffic == dict.fromkeys(range(4), Traffic())
    for client in range(3):
        cohort.send(client, *[1.0] * 4, key=Key(WIDE, MOMENTS))
    assert cohort.session.traffic == {**dict.fromkeys(range(3), Traffic(1, 32, 32)), 3: Traffic()}
    cohort.send(0, NAN, NAN, NAN, key=Key(NARROW, MEAN))
    for client in (1, 2):
        cohort.send(client, *[1.0] * 3, key=Key(NARROW, MEAN))
    assert cohort.session.traffic == {0: Traffic(1, 32, 32), 1: Traffic(2, 44, 44), 2: Traffic(2, 44, 44), 3: Traffic()}
    assert cohort.session.exchanges == 2


# what came is said in the log


@pytest.mark.parametrize(("policy", "says"), [("abort", "has failed"), ("shrink", "2 clients")], ids=POLICIES)
def test_the_log_says_who_was_dropped_why_and_what_follows(
    policy: str, says: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module.LOGGER, "propagate", True)
    cohort = joined(policy)
    cohort.session.leave(1, "its stream broke")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("exchange: client 1: its stream broke")
    assert says in line
