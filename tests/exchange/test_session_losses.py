"""The session, and those who leave, die, are late, or disagree."""

from __future__ import annotations

import pytest

from fl_bn.exchange.call import Answer, Join, Key, Request
from fl_bn.exchange.session import POLICIES
from tests.exchange.cohorts import (
    BATCHES,
    GOOD,
    GRADIENTS,
    LAYERS,
    MEAN,
    NARROW,
    VARIANCE,
    WIDE,
    Clock,
    Cohort,
    Outcome,
    answer,
    joined,
    reason,
)

# leaving


def dying(policy: str, moment: str) -> tuple[Cohort, Outcome, list[Outcome], Outcome]:
    """Client 1 waits, client 0 dies, client 2 comes last: the cohort, and what became of their requests (of client 0's, if any)."""
    cohort = Cohort(policy=policy) if "joining" in moment else joined(policy)
    ask: list[Request] = [Join(batch) if "joining" in moment else GOOD for batch in BATCHES]
    waits = cohort.submit(1, ask[1])
    own = [cohort.submit(0, ask[0])] if moment in ("joining", "waiting") else []
    cohort.session.leave(0, "its stream broke")
    return cohort, waits, own, cohort.submit(2, ask[2])


DEATHS = ["before joining", "joining", "computing", "waiting"]


@pytest.mark.parametrize("moment", DEATHS)
def test_under_abort_a_death_fails_the_round_for_all(moment: str) -> None:
    cohort, waits, own, last = dying("abort", moment)
    assert [reason(outcome) for outcome in own] == ["its stream broke"] * len(own)
    assert reason(waits) == reason(last) == cohort.session.failure == "client 0: its stream broke"
    assert cohort.session.dropped == {0: "its stream broke"}


@pytest.mark.parametrize("moment", DEATHS)
def test_under_shrink_the_others_go_on_without_the_dead(moment: str) -> None:
    cohort, waits, own, last = dying("shrink", moment)
    assert [reason(outcome) for outcome in own] == ["its stream broke"] * len(own)
    assert answer(waits).batch == answer(last).batch == 5
    assert cohort.session.taking_part == {1: 1, 2: 4}
    assert cohort.session.dropped == {0: "its stream broke"}
    assert cohort.session.failure == ""


def test_under_shrink_the_death_of_the_last_awaited_answers_the_others_at_once() -> None:
    cohort = joined("shrink")
    waits = [cohort.send(client, *values, key=Key(WIDE, GRADIENTS)) for client, values in ((0, (4.0,) * 4), (1, (8.0,) * 4))]
    assert waits == [[], []]
    cohort.session.leave(2, "its stream broke")
    assert [answer(outcome).values.tolist() for outcome in waits] == [[5.0] * 4] * 2  # batches of 3 and 1


def test_under_shrink_the_last_one_alive_gets_its_own_values() -> None:
    cohort = joined("shrink")
    for client in (0, 2):
        cohort.session.leave(client, "its stream broke")
    assert answer(cohort.send(1, 0.1, 0.7)).values.tolist() == [0.1, 0.7]
    cohort.session.leave(1, "its stream broke")
    assert cohort.session.taking_part == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_at_the_end_of_a_round_all_leave_in_good_order_and_all_took_part(policy: str) -> None:
    cohort = joined(policy)
    outcomes = [cohort.send(client) for client in range(3)]
    for client in range(3):
        cohort.session.leave(client)
        cohort.session.leave(client)  # a second time does nothing
    cohort.session.close()
    cohort.session.leave(1, "the process ended")  # nor does this, now
    assert [answer(outcome).batch for outcome in outcomes] == [8, 8, 8]
    assert cohort.session.taking_part == {0: 3, 1: 1, 2: 4}
    assert (cohort.session.dropped, cohort.session.failure) == ({}, "")


@pytest.mark.parametrize("policy", POLICIES)
def test_who_dies_after_leaving_in_good_order_did_not_take_part(policy: str) -> None:
    """Training goes on after the last exchange, and can fail there."""
    cohort = joined(policy)
    cohort.session.leave(0)
    cohort.session.leave(0, "out of memory")
    assert cohort.session.dropped == {0: "out of memory"}
    assert cohort.session.failure == ("client 0: out of memory" if policy == "abort" else "")
    assert cohort.session.taking_part == {1: 1, 2: 4}


@pytest.mark.parametrize("policy", POLICIES)
def test_who_sits_out_may_end_in_any_way(policy: str) -> None:
    cohort = Cohort(policy=policy)
    cohort.join(3, 0, 4)
    for said in ("", "out of memory"):
        cohort.session.leave(1, said)
    assert (cohort.session.dropped, cohort.session.failure) == ({}, "")


@pytest.mark.parametrize("moment", ["before joining", "computing"])
def test_who_leaves_in_good_order_while_the_others_go_on_is_dropped(moment: str) -> None:
    cohort = Cohort(policy="shrink")
    if moment == "computing":
        cohort.join(*BATCHES)
    else:
        joins = [cohort.submit(client, Join(BATCHES[client])) for client in (1, 2)]
    cohort.session.leave(0)
    if moment == "before joining":
        assert [answer(outcome).batch for outcome in joins] == [5, 5]  # it is not awaited
    assert cohort.session.dropped == {}  # until then it may have been the end for all
    outcomes = [cohort.send(1, 1.0, 1.0), cohort.send(2, 3.0, 5.0)]
    assert [answer(outcome).values.tolist() for outcome in outcomes] == [[2.0, 3.0]] * 2
    assert cohort.session.dropped == {0: "left the round and did not send its values of stem.bn (mean)"}
    assert cohort.session.taking_part == {1: 1, 2: 4}


@pytest.mark.parametrize("first", ["it leaves", "the others ask"])
def test_under_abort_leaving_in_good_order_while_the_others_go_on_fails_the_round(first: str) -> None:
    cohort = joined("abort")
    if first == "it leaves":
        cohort.session.leave(0)
    outcomes = [cohort.send(1), cohort.send(2)]
    if first == "the others ask":
        assert outcomes == [[], []]
        cohort.session.leave(0)
    said = "client 0: left the round and did not send its values of stem.bn (mean)"
    assert [reason(outcome) for outcome in outcomes] == [said] * 2
    assert cohort.session.failure == said


def test_who_leaves_with_a_request_unanswered_is_told_and_the_others_go_on() -> None:
    cohort = joined("shrink")
    own, waits = cohort.send(0), cohort.send(1, 2.0, 2.0)
    cohort.session.leave(0)
    assert reason(own) == "left the round and did not send its values of stem.bn (mean)"
    assert waits == []
    assert answer(cohort.send(2, 2.0, 2.0)).values.tolist() == answer(waits).values.tolist() == [2.0, 2.0]


def test_one_client_that_goes_on_cannot_drop_the_majority_that_left_in_good_order() -> None:
    """One request too many, sent at the end, must not throw the round of all the others away."""
    cohort = joined("shrink")
    for client in (0, 1):
        cohort.session.leave(client)
    assert cohort.session.taking_part == {0: 3, 1: 1, 2: 4}
    cohort.send(2)
    assert {0, 1} <= set(cohort.session.taking_part)


# disagreement


@pytest.mark.parametrize("other", [Key(WIDE, VARIANCE), Key(WIDE, MEAN, 1), Key(NARROW, MEAN)])
@pytest.mark.parametrize("odd", range(3))
def test_under_shrink_the_minority_that_disagrees_is_dropped(odd: int, other: Key) -> None:
    """Heads are counted, not samples: client 2 has half of these."""
    cohort = joined("shrink")
    wrong = [1.0] * LAYERS[other.layer].channels
    outcomes = [cohort.send(c, *wrong, key=other) if c == odd else cohort.send(c, 1.0, 5.0) for c in range(3)]
    said = f"expected the client's values of stem.bn (mean), but it sent those of {other}: does it run the same model and version?"
    assert reason(outcomes.pop(odd)) == said
    assert [answer(outcome).values.tolist() for outcome in outcomes] == [[1.0, 5.0]] * 2
    assert cohort.session.dropped == {odd: said}
    assert odd not in cohort.session.taking_part
    assert cohort.session.exchanges == 1


def test_several_minorities_are_all_dropped() -> None:
    cohort = joined("shrink", batches=(1, 1, 1, 1))
    outcomes = [cohort.send(client, key=key) for client, key in enumerate((Key(WIDE, MEAN, 5), Key(WIDE, MEAN), Key(WIDE, VARIANCE)))]
    outcomes.append(cohort.send(3))
    assert [isinstance(outcome[0], Answer) for outcome in outcomes] == [False, True, False, True]
    assert sorted(cohort.session.dropped) == [0, 2]
    assert answer(outcomes[1]).batch == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("which", [(0, 1), (0, 1, 1, 0), (0, 1, 2), (0, 0, 1, 1, 2)])
def test_a_tie_fails_the_round_under_both_policies(which: tuple[int, ...], policy: str) -> None:
    """Each of these keys may come first."""
    keys = (Key(WIDE, MEAN), Key(WIDE, VARIANCE), Key(NARROW, MEAN))
    cohort = joined(policy, batches=(1,) * len(which))
    outcomes = [cohort.send(client, *[1.0] * LAYERS[keys[i].layer].channels, key=keys[i]) for client, i in enumerate(which)]
    said = "the clients disagree about the next layer: some sent stem.bn (mean), others stem.bn (variance). "
    said += "Do all run the same model and version, and does forward call the same layers for every batch?"
    assert [reason(outcome) for outcome in outcomes] == [said] * len(which)
    assert cohort.session.failure == said
    assert cohort.session.dropped == {}


@pytest.mark.parametrize("odd", [Key(WIDE, MEAN, 1), Key(WIDE, GRADIENTS), Key(WIDE, MEAN, 7)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_in_a_tie_what_cannot_come_next_loses(order: tuple[int, ...], odd: Key) -> None:
    """Passes of a layer come one by one, and gradients after them."""
    cohort = joined("shrink", batches=(1, 1))
    width = odd.quantity.width(LAYERS[odd.layer].channels)
    outcomes = {client: cohort.send(client, *[1.0] * (width if client else 2), key=odd if client else None) for client in order}
    assert answer(outcomes[0]).batch == 1
    assert cohort.session.dropped == {
        1: f"expected the client's values of stem.bn (mean), but it sent those of {odd}: does it run the same model and version?"
    }


# one request too many


@pytest.mark.parametrize("extra", [Key(WIDE, MEAN), Key(WIDE, MEAN, 1), Key(WIDE, GRADIENTS)])
@pytest.mark.parametrize("when", range(4))
@pytest.mark.parametrize("clients", [3, 5, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_request_after_the_last_layer_costs_its_sender_alone(policy: str, clients: int, when: int, extra: Key) -> None:
    """However many have left when it comes: who has not spoken yet has not voted. Before, whoever left first was dropped."""
    cohort = joined(policy, batches=(1,) * clients)
    for client in range(clients):
        cohort.send(client)
    liar, honest = clients - 1, list(range(clients - 1))
    came: Outcome = []
    for client in honest:
        if client == min(when, clients - 2):
            came = cohort.send(liar, *[1.0] * extra.quantity.width(2), key=extra)
        cohort.session.leave(client)
    said = f"the client sent its values of {extra}, but most clients have finished the round: does it run the same model and version?"
    assert cohort.session.dropped == {liar: said}
    assert list(cohort.session.taking_part) == honest
    assert cohort.session.failure == (f"client {liar}: {said}" if policy == "abort" else "")
    assert reason(came) == said


@pytest.mark.parametrize("moment", ["before joining", "after joining"])
def test_who_left_may_ask_for_nothing_more(moment: str) -> None:
    """Before, a join of one that had left answered, with nothing, those who waited for a layer."""
    cohort = Cohort(policy="shrink")
    if moment == "before joining":
        cohort.session.leave(0)
    for client in (0, 1, 2) if moment == "after joining" else (1, 2):
        cohort.submit(client, Join(BATCHES[client]))
    if moment == "after joining":
        cohort.session.leave(0)
    waits = [cohort.send(client) for client in (1,)]
    late = reason(cohort.submit(0, Join(1) if moment == "before joining" else GOOD))
    assert late == "refused: the client sent a request after it had left the round"
    waits.append(cohort.send(2))
    assert [answer(outcome).values.tolist() for outcome in waits] == [[1.0, 1.0]] * 2
    assert list(cohort.session.dropped) == [0]


def test_under_abort_disagreement_fails_the_round_and_names_the_minority() -> None:
    cohort = joined("abort")
    outcomes = [cohort.send(0), cohort.send(1, key=Key(WIDE, VARIANCE)), cohort.send(2)]
    said = "expected the client's values of stem.bn (mean), but it sent those of stem.bn (variance): "
    said += "does it run the same model and version?"
    assert reason(outcomes.pop(1)) == said
    assert [reason(outcome) for outcome in outcomes] == [f"client 1: {said}"] * 2
    assert cohort.session.dropped == {1: said}


# the end


def test_close_tells_all_that_the_round_is_over_and_blames_nobody(clock: Clock) -> None:
    cohort = joined()
    waits = cohort.send(0)
    cohort.session.close()
    assert reason(waits) == reason(cohort.send(1)) == "the round is over"
    clock.now += 1e6
    cohort.session.expire()
    cohort.session.leave(2, "too late")
    assert cohort.session.taking_part == {0: 3, 1: 1, 2: 4}
    assert (cohort.session.dropped, cohort.session.failure) == ({}, "")


def test_fail_tells_all_why_and_the_first_reason_stays() -> None:
    cohort = joined("shrink")
    waits = cohort.send(0)
    cohort.session.fail("the first reason")
    cohort.session.fail("the second")
    cohort.session.close()
    assert reason(waits) == reason(cohort.send(1)) == cohort.session.failure == "the first reason"
    assert cohort.session.dropped == {}


def test_out_says_why_there_will_be_no_further_answer() -> None:
    cohort = joined("shrink")
    cohort.session.leave(0, "its stream broke")
    assert [cohort.session.out(client) for client in (0, 1, 2)] == ["its stream broke", "", ""]
    assert cohort.session.out(7) == "this client takes no part in the round"
    cohort.session.close()
    assert {cohort.session.out(client) for client in range(3)} == {"the round is over"}
