"""The session: who is awaited, what is answered; what it refuses; and those who leave, die, are late, or disagree.

The state machine of ``tools/hostile/exchange_machine.py`` tries sequences of requests; here is what it cannot tell.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fl_bn.exchange.call import Answer, Join, Key, Local, Quantity, Request
from fl_bn.exchange.session import LARGEST_COUNT, POLICIES, reduce
from tests.exchange.cohorts import BATCHES, GOOD, LAYERS, NARROW, WIDE, Clock, Cohort, answer, joined, local, reason
from tests.listed import listed
from tools.hostile.fuzz import sequences

both_policies = pytest.mark.parametrize("policy", POLICIES)


def test_whatever_a_liar_asks_in_whatever_order_nobody_hangs_and_only_the_liar_is_lost() -> None:
    assert sequences(150, 3) == (150, [])


@listed("order", itertools.permutations(range(3)))
def test_a_client_with_an_empty_batch_sits_out_and_is_not_awaited(order: tuple[int, ...]) -> None:
    cohort = Cohort()
    came = {client: cohort.submit(client, Join((3, 0, 4)[client])) for client in order}
    assert [answer(came[client]).batch for client in range(3)] == [7, 0, 7]
    first, last = cohort.send(0, 1.0, 2.0), cohort.send(2, 3.0, 6.0)
    assert answer(first).values.tolist() == answer(last).values.tolist() == [2.0, 4.0]
    assert reason(cohort.send(1)) == "this client takes no part in the round"
    for said in ("", "out of memory"):  # it may end in any way
        cohort.session.leave(1, said)
    assert (cohort.session.taking_part, cohort.session.dropped, cohort.session.failure) == ({0: 3, 2: 4}, {}, "")


def test_under_a_defence_the_unbiased_variance_is_that_of_counts_as_the_median_client_s() -> None:
    """As ``Defence.believed`` has it: of counts 2 and 6 it is 4."""
    sent = [Local(Key(WIDE, Quantity.STATISTICS), torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64), count) for count in (2, 6)]
    cohort = joined(batches=(1, 1), believing=False)
    cohort.submit(0, sent[0])
    got = answer(cohort.submit(1, sent[1]))
    assert (got.count, got.values.tolist()) == (8, [1.0, 1.0, 2 * (8 / 7), 2 * (8 / 7)])
    parts = [Local(Key("0", Quantity.GRADIENTS), torch.tensor([value]), 1) for value in (1e8, 1.0, -1e8)]
    assert float(reduce(parts, [1, 1, 1])) == pytest.approx(1 / 3, rel=1e-6)  # float32 is summed in float64


# the session's gate

MANY = LARGEST_COUNT + 1
BEFORE: dict[str, tuple[Request, ...]] = {  # what client 0 sends before all have joined, the last of it wrong
    "a second join": (Join(3), Join(3)),
    "values before joining": (GOOD,),
    "a negative batch": (Join(-1),),
    "a huge batch": (Join(MANY),),
}
AFTER: dict[str, tuple[tuple[Request, ...], str]] = {  # and afterwards, with a word of the refusal
    "a request while one is unanswered": ((GOOD, GOOD), ""),
    "an unknown layer": ((local(1.0, 1.0, layer="head.bn"),), "head.bn"),
    "too narrow": ((local(1.0),), "(1,)"),
    "another dtype": ((local(1.0, 1.0, dtype=torch.float32),), "torch.float32"),
    "a count of 0": ((local(1.0, 1.0, count=0),), "0"),
    "NaN": ((local(1.0, math.nan),), "nan"),
    "Inf": ((local(-math.inf, math.inf, 1.0, 1.0, quantity=Quantity.GRADIENTS),), "inf"),
    "a huge mean": ((local(1.0, -1e154),), "1e+154"),
    "gradients whose squares overflow": ((local(*[1e20] * 6, quantity=Quantity.GRADIENTS, layer=NARROW, dtype=torch.float32),), "1e+20"),
    "a negative variance": ((local(1.0, 1.0, -1e-3, 2.0, quantity=Quantity.MOMENTS),), "-0.001"),
}


@both_policies
@listed("kind", [*BEFORE, *AFTER])
def test_a_refusal_ends_its_client_and_under_abort_the_round(kind: str, policy: str) -> None:
    """Client 1 waits while client 0 misbehaves, and client 2 comes later."""
    cohort, after = Cohort(policy=policy), kind in AFTER
    sends, word = AFTER[kind] if after else (BEFORE[kind], "")
    if after:
        cohort.join(*BATCHES)
    waits = cohort.submit(1, GOOD if after else Join(BATCHES[1]))
    own = [cohort.submit(0, request) for request in sends]
    later = cohort.submit(2, local(5.0, 9.0, count=3) if after else Join(4))
    assert reason(own[-1]).startswith("refused: ")
    assert word in reason(own[-1])
    assert list(cohort.session.dropped) == [0]
    if policy == "abort":
        assert reason(waits) == reason(later) == cohort.session.failure == f"client 0: {reason(own[-1])}"
    else:
        assert answer(waits).batch == answer(later).batch == 5
        assert not after or answer(waits).values.tolist() == answer(later).values.tolist() == [4.0, 7.0]  # weights over the others


@both_policies
@pytest.mark.parametrize("joins", [False, True], ids=["joining", "sending"])
def test_who_does_not_come_in_time_is_late(joins: bool, policy: str, clock: Clock) -> None:
    cohort = Cohort(policy=policy, join_deadline=1.0 if joins else 30.0, deadline=30.0 if joins else 1.0)
    if joins:
        cohort.join(*BATCHES)
        clock.now += 40  # the first comes when it likes: nobody waits yet
        cohort.session.expire()
    waits = [cohort.send(client, 2.0, 3.0) if joins else cohort.submit(client, Join(BATCHES[client])) for client in (0, 2)]
    clock.now += 29.9
    cohort.session.expire()
    assert waits == [[], []]  # control: not late yet
    clock.now += 0.1
    cohort.session.expire()
    said = cohort.session.dropped[1]
    assert "within 30 s" in said
    if policy == "abort":
        assert [reason(outcome) for outcome in waits] == [f"client 1: {said}"] * 2
    else:
        assert [answer(outcome).batch for outcome in waits] == [7, 7]
        assert cohort.session.taking_part == {0: 3, 2: 4}
    assert not isinstance(cohort.submit(1, Join(1))[0], Answer)


@both_policies
def test_who_waits_alone_starts_no_clock(policy: str, clock: Clock) -> None:
    """A client that sends early, or once more after the last layer, would have the others dropped, which train for longer than that."""
    cohort = joined(policy, (3, 1, 4, 1, 5), deadline=30.0)
    waits = [cohort.send(1)]
    for passes, senders, dropped in ((1000, (0, 2, 3), []), (29, (), []), (2, (), [4])):  # it counts from when half of them wait
        clock.now += passes
        cohort.session.expire()
        assert list(cohort.session.dropped) == dropped
        assert dropped or not any(waits)
        waits += [cohort.send(client) for client in senders]
    assert bool(cohort.session.failure) == (policy == "abort")


@both_policies
@pytest.mark.parametrize("which", [(0, 1), (0, 0, 1, 1, 2)])
def test_a_tie_fails_the_round_under_both_policies(which: tuple[int, ...], policy: str) -> None:
    keys = (Key(WIDE, Quantity.MEAN), Key(WIDE, Quantity.VARIANCE), Key(NARROW, Quantity.MEAN))
    cohort = joined(policy, batches=(1,) * len(which))
    outcomes = [cohort.send(client, *[1.0] * LAYERS[keys[i].layer].channels, key=keys[i]) for client, i in enumerate(which)]
    assert {reason(outcome) for outcome in outcomes} == {cohort.session.failure}
    assert cohort.session.dropped == {}


def test_close_tells_all_that_the_round_is_over_and_blames_nobody(clock: Clock) -> None:
    cohort = joined()
    waits = cohort.send(0)
    cohort.session.close()
    assert reason(waits) == reason(cohort.send(1)) == cohort.session.out(2) == "the round is over"
    clock.now += 1e6
    cohort.session.expire()
    cohort.session.leave(2, "too late")
    assert (cohort.session.taking_part, cohort.session.dropped, cohort.session.failure) == ({0: 3, 1: 1, 2: 4}, {}, "")
