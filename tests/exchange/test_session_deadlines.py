"""The session, and those who are late."""

from __future__ import annotations

import pytest

from fl_bn.exchange.call import ExchangeFailed, Join, Key
from fl_bn.exchange.session import POLICIES
from tests.exchange.cohorts import (
    BATCHES,
    MEAN,
    VARIANCE,
    WIDE,
    Clock,
    Cohort,
    answer,
    joined,
    reason,
)


@pytest.mark.parametrize("policy", POLICIES)
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


@pytest.mark.parametrize("batch", [1, 0])
def test_the_join_deadline_starts_again_with_each_newcomer(batch: int, clock: Clock) -> None:
    """A newcomer that sits out counts, too."""
    cohort = Cohort(policy="shrink", join_deadline=60.0)
    waits = cohort.submit(0, Join(3))
    clock.now += 40
    cohort.submit(1, Join(batch))
    clock.now += 59
    cohort.session.expire()  # 99 s after the first
    assert waits == []
    clock.now += 1
    cohort.session.expire()
    assert list(cohort.session.dropped) == [2]
    assert answer(waits).batch == 3 + batch


@pytest.mark.parametrize("policy", POLICIES)
def test_where_nobody_joins_all_are_late(policy: str, clock: Clock) -> None:
    cohort = Cohort(policy=policy, join_deadline=60.0)
    clock.now += 61
    cohort.session.expire()
    assert cohort.session.dropped == dict.fromkeys(range(3), "did not join within 60 s")
    assert cohort.session.taking_part == {}
    assert cohort.session.failure == ("clients 0, 1, 2: did not join within 60 s" if policy == "abort" else "")


@pytest.mark.parametrize("policy", POLICIES)
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


def test_several_late_ones_are_named_together(clock: Clock) -> None:
    cohort = joined("abort", (3, 1, 4, 1), deadline=0.5)
    waits = [cohort.send(client) for client in (1, 3)]
    clock.now += 1
    cohort.session.expire()
    assert {reason(outcome) for outcome in waits} == {"clients 0, 2: did not send its values of stem.bn (mean) within 0.5 s"}


@pytest.mark.parametrize("policy", POLICIES)
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


def test_who_waits_alone_is_not_counted_with_those_that_left(clock: Clock) -> None:
    cohort = joined("shrink", (3, 1, 4, 1, 5), deadline=30.0)
    cohort.send(1)
    for client in (0, 2, 3):
        cohort.session.leave(client)
    clock.now += 1000
    cohort.session.expire()  # client 4 still trains
    assert cohort.session.dropped == {}
    cohort.session.leave(4)
    assert list(cohort.session.dropped) == [1]


def test_the_deadline_starts_again_with_each_answer(clock: Clock) -> None:
    cohort = joined("shrink", deadline=30.0)
    for call in range(4):
        cohort.send(0, key=Key(WIDE, MEAN, call))
        clock.now += 29
        cohort.session.expire()
        for client in (1, 2):
            cohort.send(client, key=Key(WIDE, MEAN, call))
    assert cohort.session.exchanges == 4
    assert cohort.session.dropped == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_while_nobody_waits_nobody_is_late(policy: str, clock: Clock) -> None:
    """All are computing, or training on after the last exchange."""
    cohort = joined(policy)
    clock.now += 1e6
    cohort.session.expire()
    for client in range(3):
        cohort.session.leave(client)
    clock.now += 1e6
    cohort.session.expire()
    assert (cohort.session.dropped, cohort.session.failure) == ({}, "")
    assert cohort.session.taking_part == {0: 3, 1: 1, 2: 4}


def test_who_left_before_joining_is_not_late(clock: Clock) -> None:
    cohort = Cohort(policy="shrink", join_deadline=60.0)
    cohort.session.leave(0)
    cohort.submit(1, Join(1))
    clock.now += 61
    cohort.session.expire()
    assert list(cohort.session.dropped) == [2]
