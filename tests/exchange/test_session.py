"""The session: who is awaited, what is answered, counted and logged; what it refuses; and those who leave, die, are late, or disagree."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.exchange.cohorts import (
    BATCHES,
    GOOD,
    GRADIENTS,
    INF,
    LARGEST_COUNT,
    LAYERS,
    MEAN,
    MOMENTS,
    NAN,
    NARROW,
    POLICIES,
    STATISTICS,
    VARIANCE,
    WIDE,
    Answer,
    Clock,
    Cohort,
    ExchangeFailed,
    Join,
    Key,
    Local,
    Quantity,
    Request,
    Session,
    answer,
    joined,
    local,
    reason,
)
from tests.listed import listed
from tools.hostile.fuzz import sequences

both_policies = pytest.mark.parametrize("policy", POLICIES)

# joining


@listed("order", itertools.permutations(range(3)))
def test_a_client_with_an_empty_batch_sits_out_and_is_not_awaited(order: tuple[int, ...]) -> None:
    cohort = Cohort()
    came = {client: cohort.submit(client, Join((3, 0, 4)[client])) for client in order}
    assert [answer(came[client]).batch for client in range(3)] == [7, 0, 7]
    first, last = cohort.send(0, 1.0, 2.0), cohort.send(2, 3.0, 6.0)
    assert answer(first).values.tolist() == answer(last).values.tolist() == [2.0, 4.0]
    assert answer(last).batch == 7
    assert reason(cohort.send(1)) == "this client takes no part in the round"
    for said in ("", "out of memory"):  # it may end in any way
        cohort.session.leave(1, said)
    assert cohort.session.taking_part == {0: 3, 2: 4}
    assert (cohort.session.dropped, cohort.session.failure) == ({}, "")


def test_a_stranger_is_turned_away_and_changes_nothing() -> None:
    cohort = joined()
    assert reason(cohort.send(7)) == cohort.session.out(7) == "this client takes no part in the round"
    cohort.session.leave(7, "spam")
    assert (cohort.session.dropped, cohort.session.failure) == ({}, "")
    assert [answer(outcome).count for outcome in [cohort.send(client) for client in range(3)][2:]] == [3]
    with pytest.raises(ValueError):  # noqa: PT011
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


def test_under_a_defence_the_unbiased_variance_is_that_of_counts_as_the_median_client_s() -> None:
    """As ``Defence.believed`` has it: of counts 2 and 6 it is 4."""
    sent = [Local(Key(WIDE, STATISTICS), torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64), count) for count in (2, 6)]
    cohort = joined(batches=(1, 1), believing=False)
    cohort.submit(0, sent[0])
    got = answer(cohort.submit(1, sent[1]))
    assert (got.count, got.values.tolist()) == (8, [1.0, 1.0, 2 * (8 / 7), 2 * (8 / 7)])


# the session's gate


class Case(NamedTuple):
    """What client 0 sends, the last of it wrong, and words of the refusal. ``joined``: after all have joined."""

    joined: bool
    sends: tuple[Request, ...]
    words: tuple[str, ...] = ()


MANY = LARGEST_COUNT + 1
REFUSED = {  # one of each rule; the fuzzer finds the others
    "a second join": Case(False, (Join(3), Join(3))),
    "a request while one is unanswered": Case(True, (GOOD, GOOD)),
    "values before joining": Case(False, (GOOD,), (WIDE,)),
    "joining twice": Case(True, (Join(3),)),
    "a negative batch": Case(False, (Join(-1),), ("batch", "-1")),
    "a huge batch": Case(False, (Join(MANY),), ("batch", str(LARGEST_COUNT), str(MANY))),
    "an unknown layer": Case(True, (local(1.0, 1.0, layer="head.bn"),), ("head.bn", WIDE)),
    "too narrow": Case(True, (local(1.0),), (WIDE, "(2,)", "(1,)")),
    "another dtype": Case(True, (local(1.0, 1.0, dtype=torch.float32),), ("torch.float64", "torch.float32")),
    "a count of 0": Case(True, (local(1.0, 1.0, count=0),), (WIDE, "0")),
    "a huge count": Case(True, (local(1.0, 1.0, count=MANY),), (str(LARGEST_COUNT), str(MANY))),
    "NaN": Case(True, (local(1.0, NAN),), (WIDE, "nan")),
    "Inf": Case(True, (local(-INF, INF, 1.0, 1.0, quantity=GRADIENTS),), (WIDE, "inf")),
    "a huge mean": Case(True, (local(1.0, -1e154),), (WIDE, "1e+154")),
    "a huge variance": Case(True, (local(1.0, 1e308, quantity=VARIANCE),), (WIDE, "1e+308")),
    "float32 gradients whose squares overflow": Case(
        True, (local(*[1e20] * 6, quantity=GRADIENTS, layer=NARROW, dtype=torch.float32),), ("gradients", "1e+20")
    ),
    "a negative variance among moments": Case(True, (local(1.0, 1.0, -1e-3, 2.0, quantity=MOMENTS),), ("variances", "-0.001")),
}


@listed("policy", POLICIES)
@listed("kind", REFUSED)
def test_a_refusal_ends_its_client_and_under_abort_the_round(kind: str, policy: str) -> None:
    """Client 1 waits while client 0 misbehaves, and client 2 comes later."""
    case, cohort = REFUSED[kind], Cohort(policy=policy)
    if case.joined:
        cohort.join(*BATCHES)
    waits = cohort.submit(1, GOOD if case.joined else Join(BATCHES[1]))
    own = [cohort.submit(0, request) for request in case.sends]
    assert bool(waits) == (policy == "abort")
    after = cohort.submit(2, local(5.0, 9.0, count=3) if case.joined else Join(4))
    for outcome in own:
        assert reason(outcome).startswith("refused: ")
        assert all(word in reason(outcome) for word in case.words), reason(outcome)
    again = reason(cohort.submit(0, GOOD))
    if policy == "abort":
        assert again == reason(waits) == reason(after) == cohort.session.failure == f"client 0: {reason(own[-1])}"
        assert 0 not in cohort.session.taking_part
    else:
        assert again == reason(own[-1])  # its own reason, also later
        assert answer(waits).batch == answer(after).batch == 5
        if case.joined:
            assert answer(waits).values.tolist() == answer(after).values.tolist() == [4.0, 7.0]  # 1/4 and 3/4: weights over the others
            assert answer(waits).count == 4
        assert cohort.session.taking_part == {1: 1, 2: 4}
        assert cohort.session.failure == ""
    assert list(cohort.session.dropped) == [0]


# those who are late


@both_policies
def test_who_does_not_join_in_time_is_late(policy: str, clock: Clock) -> None:
    cohort = Cohort(policy=policy, join_deadline=60.0, deadline=5.0)
    waits = [cohort.submit(client, Join(BATCHES[client])) for client in (0, 2)]
    clock.now += 59.9
    cohort.session.expire()
    assert waits == [[], []]  # control: not late yet
    clock.now += 0.1
    cohort.session.expire()
    assert cohort.session.dropped == {1: "did not join within 60 s"}
    if policy == "shrink":
        assert [answer(outcome).batch for outcome in waits] == [7, 7]
        assert cohort.session.taking_part == {0: 3, 2: 4}
    else:
        assert [reason(outcome) for outcome in waits] == ["client 1: did not join within 60 s"] * 2
    assert isinstance(cohort.submit(1, Join(1))[0], ExchangeFailed)


@both_policies
def test_who_does_not_send_in_time_is_late(policy: str, clock: Clock) -> None:
    cohort = joined(policy, deadline=30.0, join_deadline=1.0)
    clock.now += 40  # the first comes when it likes: nobody waits yet
    cohort.session.expire()
    waits = [cohort.send(client, 2.0, 3.0, key=Key(WIDE, VARIANCE, 1)) for client in (0, 2)]
    clock.now += 29.9
    cohort.session.expire()
    assert waits == [[], []]  # control
    clock.now += 0.1
    cohort.session.expire()
    said = "did not send its values of stem.bn (variance, call 2) within 30 s"
    assert cohort.session.dropped == {1: said}
    if policy == "shrink":
        assert [answer(outcome).values.tolist() for outcome in waits] == [[2.0, 3.0]] * 2
        assert [answer(outcome).batch for outcome in waits] == [7, 7]
    else:
        assert [reason(outcome) for outcome in waits] == [f"client 1: {said}"] * 2


@both_policies
def test_who_waits_alone_starts_no_clock(policy: str, clock: Clock) -> None:
    """A client that sends early, or once more after the last layer, would have the others dropped, which train for longer than that."""
    cohort = joined(policy, (3, 1, 4, 1, 5), deadline=30.0)
    early = cohort.send(1)
    clock.now += 1000
    cohort.session.expire()
    waits = [cohort.send(client) for client in (0, 2, 3)]
    clock.now += 29
    cohort.session.expire()
    assert [early, *waits] == [[]] * 4
    assert cohort.session.dropped == {}  # the deadline counts from when half of them wait
    clock.now += 2
    cohort.session.expire()
    assert list(cohort.session.dropped) == [4]  # control
    assert bool(cohort.session.failure) == (policy == "abort")


# disagreement


@both_policies
@pytest.mark.parametrize("which", [(0, 1), (0, 1, 2), (0, 0, 1, 1, 2)])
def test_a_tie_fails_the_round_under_both_policies(which: tuple[int, ...], policy: str) -> None:
    """Each of these keys may come first."""
    keys = (Key(WIDE, MEAN), Key(WIDE, VARIANCE), Key(NARROW, MEAN))
    cohort = joined(policy, batches=(1,) * len(which))
    outcomes = [cohort.send(client, *[1.0] * LAYERS[keys[i].layer].channels, key=keys[i]) for client, i in enumerate(which)]
    assert {reason(outcome) for outcome in outcomes} == {cohort.session.failure}
    assert all(str(key) in cohort.session.failure for key in keys[:2])
    assert cohort.session.dropped == {}


# the end


def test_close_tells_all_that_the_round_is_over_and_blames_nobody(clock: Clock) -> None:
    cohort = joined()
    waits = cohort.send(0)
    cohort.session.close()
    assert reason(waits) == reason(cohort.send(1)) == cohort.session.out(2) == "the round is over"
    clock.now += 1e6
    cohort.session.expire()
    cohort.session.leave(2, "too late")
    assert cohort.session.taking_part == {0: 3, 1: 1, 2: 4}
    assert (cohort.session.dropped, cohort.session.failure) == ({}, "")


def test_whatever_a_liar_asks_in_whatever_order_nobody_hangs_and_only_the_liar_is_lost() -> None:
    """A state machine of hypothesis: see tools/hostile/exchange_machine.py. Its negative control is in tests/hostile/test_fuzz.py."""
    assert sequences(150, 3) == (150, [])
