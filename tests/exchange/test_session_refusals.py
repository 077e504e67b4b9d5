"""The session refuses what it did not ask for, by name, and nobody else suffers unless the policy says so."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Local, Request
from fl_bn.exchange.session import LARGEST_COUNT
from fl_bn.federation.defence import Defence
from tests.exchange.cohorts import (
    BATCHES,
    GOOD,
    GRADIENTS,
    INF,
    MEAN,
    MOMENTS,
    NAN,
    NARROW,
    STATISTICS,
    VARIANCE,
    WIDE,
    Cohort,
    Outcome,
    answer,
    joined,
    local,
    reason,
)
from tests.listed import listed

# what is refused


class Case(NamedTuple):
    """What client 0 sends, the last of it wrong. ``joined``: after all have joined."""

    joined: bool
    sends: tuple[Request, ...]
    says: str


REFUSED = {
    "a second join": Case(False, (Join(3), Join(3)), "expected one request at a time"),
    "a request while one is unanswered": Case(True, (GOOD, GOOD), "expected one request at a time"),
    "values before joining": Case(False, (GOOD,), r"the client sent its values of stem.bn \(mean\) before it had joined the round"),
    "joining twice": Case(True, (Join(3),), "the client joined the round twice"),
    "sitting out after joining": Case(True, (Join(0),), "the client joined the round twice"),
    "a negative batch": Case(False, (Join(-1),), "expected a batch of 0 to 9007199254740992 samples, but got -1"),
    "a huge batch": Case(False, (Join(LARGEST_COUNT + 1),), "expected a batch of .*, but got 9007199254740993"),
    "an unknown layer": Case(
        True,
        (local(1.0, 1.0, layer="head.bn"),),
        r"head.bn \(mean\): the server's model has no such BatchNorm layer; it has 2 \(stem.bn, .*\)",
    ),
    "too narrow": Case(
        True, (local(1.0),), r"stem.bn \(mean\): expected shape \(2,\) and torch.float64, but got shape \(1,\) and torch.float64"
    ),
    "too wide": Case(
        True,
        (local(1.0, 1.0, quantity=MOMENTS),),
        r"stem.bn \(moments\): expected shape \(4,\) and torch.float64, but got shape \(2,\) and torch.float64",
    ),
    "no vector": Case(
        True, (Local(Key(WIDE, MEAN, 1), torch.ones(2, 1).double(), 1),), r"stem.bn \(mean, call 2\): expected shape \(2,\) .* \(2, 1\)"
    ),
    "another dtype": Case(
        True, (local(1.0, 1.0, dtype=torch.float32),), r"expected shape \(2,\) and torch.float64, but got shape \(2,\) and torch.float32"
    ),
    "a wider dtype": Case(
        True, (local(1.0, 1.0, 1.0, layer=NARROW),), r"the model \(mean\): expected shape \(3,\) and torch.float32, .* torch.float64"
    ),
    "whole numbers": Case(True, (local(1, 1, dtype=torch.int64),), "and torch.float64, but got .* and torch.int64"),
    "a count of 0": Case(
        True, (local(1.0, 1.0, count=0),), r"stem.bn \(mean\): expected 1 to 9007199254740992 activations per channel, but got 0"
    ),
    "a negative count": Case(True, (local(1.0, 1.0, count=-5),), "expected 1 to 9007199254740992 activations per channel, but got -5"),
    "a huge count": Case(True, (local(1.0, 1.0, count=LARGEST_COUNT + 1),), "expected 1 to 9007199254740992 .*, but got 9007199254740993"),
    "NaN": Case(True, (local(1.0, NAN),), r"stem.bn \(mean\): 1 of 2 values are not finite \(NaN or Inf\)"),
    "Inf": Case(True, (local(-INF, INF, 1.0, 1.0, quantity=GRADIENTS),), r"stem.bn \(gradients\): 2 of 4 values are not finite"),
    "a NaN variance": Case(True, (local(1.0, 1.0, NAN, 1.0, quantity=MOMENTS),), "1 of 4 values are not finite"),
    "a huge mean": Case(True, (local(1.0, -1e154),), r"stem.bn \(mean\): expected means within .*, but the largest is 1e\+154"),
    "a huge mean among moments": Case(
        True, (local(1e154, 1.0, 1.0, 1.0, quantity=MOMENTS),), r"stem.bn \(moments\): expected means within"
    ),
    "a huge variance": Case(
        True, (local(1.0, 1e308, quantity=VARIANCE),), r"stem.bn \(variance\): expected variances up to .*, but the largest is 1e\+308"
    ),
    "gradients whose squares overflow": Case(
        True,
        (local(1.0, -1e154, 1.0, 1.0, quantity=GRADIENTS),),
        r"stem.bn \(gradients\): expected gradients within .*, but the largest is 1e\+154",
    ),
    "float32 gradients whose squares overflow": Case(
        True,
        (local(*[1e20] * 6, quantity=GRADIENTS, layer=NARROW, dtype=torch.float32),),
        r"the model \(gradients\): expected gradients within .*, but the largest is 1e\+20",
    ),
    "a negative variance": Case(
        True, (local(1.0, -0.25, quantity=VARIANCE),), r"stem.bn \(variance\): expected variances >= 0, but the smallest is -0.25"
    ),
    "a negative variance among moments": Case(
        True, (local(1.0, 1.0, -1e-3, 2.0, quantity=MOMENTS),), r"stem.bn \(moments\): expected variances >= 0, but the smallest is -0.001"
    ),
}


def meanwhile(cohort: Cohort, case: Case) -> Outcome:
    """Client 1 waits while client 0 misbehaves, and client 2 comes later. Returns what client 1 was told."""
    if case.joined:
        cohort.join(*BATCHES)
    waits = cohort.submit(1, GOOD if case.joined else Join(BATCHES[1]))
    assert waits == []
    return waits


@pytest.mark.parametrize("kind", REFUSED)
def test_under_abort_a_refusal_fails_all_who_wait_and_all_who_come_later(kind: str) -> None:
    case, cohort = REFUSED[kind], Cohort(policy="abort")
    waits = meanwhile(cohort, case)
    own = [cohort.submit(0, request) for request in case.sends]
    after = cohort.submit(2, GOOD if case.joined else Join(4)), cohort.submit(0, GOOD)
    for outcome in own:
        pytest.raises(ExchangeFailed, _raise, outcome).match(f"^refused: .*{case.says}")
    for outcome in (waits, *after):
        pytest.raises(ExchangeFailed, _raise, outcome).match(f"^client 0: refused: .*{case.says}")
    assert cohort.session.failure == reason(waits)
    assert list(cohort.session.dropped) == [0]
    assert 0 not in cohort.session.taking_part


@pytest.mark.parametrize("kind", REFUSED)
def test_under_shrink_a_refusal_drops_that_client_and_answers_the_others(kind: str) -> None:
    case, cohort = REFUSED[kind], Cohort(policy="shrink")
    waits = meanwhile(cohort, case)
    own = [cohort.submit(0, request) for request in case.sends]
    for outcome in own:
        pytest.raises(ExchangeFailed, _raise, outcome).match(f"^refused: .*{case.says}")
    assert waits == []  # for client 2
    after = cohort.submit(2, local(5.0, 9.0, count=3) if case.joined else Join(4))
    assert answer(waits).batch == answer(after).batch == 5
    if case.joined:
        assert answer(waits).values.tolist() == answer(after).values.tolist() == [4.0, 7.0]  # 1/4 and 3/4: weights over the others
        assert answer(waits).count == 4
    assert cohort.session.taking_part == {1: 1, 2: 4}
    assert list(cohort.session.dropped) == [0]
    pytest.raises(ExchangeFailed, _raise, cohort.submit(0, GOOD)).match(f"^refused: .*{case.says}")  # its own reason, also later
    assert cohort.session.failure == ""


def _raise(outcome: Outcome) -> None:
    (came,) = outcome
    if isinstance(came, ExchangeFailed):
        raise came


ACCEPTED: dict[str, tuple[Request, ...]] = {
    "the largest batch": (Join(LARGEST_COUNT),),
    "the largest count": (Join(1), local(1.0, 1.0, count=LARGEST_COUNT)),
    "one value": (Join(1), local(1.0, 1.0, count=1)),
    "a variance of 0": (Join(1), local(0.0, -0.0, quantity=VARIANCE)),
    "a negative mean": (Join(1), local(-1.0, -2.0, 0.0, 0.0, quantity=MOMENTS)),
    "negative gradients": (Join(1), local(-1.0, -2.0, -3.0, -4.0, quantity=GRADIENTS)),
    "large gradients": (Join(1), local(*[3e153] * 4, quantity=GRADIENTS)),
    "large float32 gradients": (Join(1), local(*[-4e18] * 6, quantity=GRADIENTS, layer=NARROW, dtype=torch.float32)),
    "large moments": (Join(1), local(-3e153, 3e153, 8e307, 8e307, quantity=MOMENTS)),
    "large float32 moments": (Join(1), local(*[-4e18] * 3, *[1.6e38] * 3, quantity=MOMENTS, layer=NARROW, dtype=torch.float32)),
    "subnormal values": (Join(1), local(5e-324, 5e-324, quantity=VARIANCE)),
}


@listed("kind", ACCEPTED)
def test_what_is_just_right_is_answered(kind: str) -> None:
    """The control of the refusals: a client alone gets its own values back."""
    cohort = Cohort(clients=1)
    for request in ACCEPTED[kind]:
        got = answer(cohort.submit(0, request))
        if isinstance(request, Local):
            assert torch.equal(got.values, request.values)
            assert got.count == request.count
    assert cohort.session.dropped == {}


@pytest.mark.parametrize("request_", [Join(LARGEST_COUNT + 1), local(1.0, 1.0, count=LARGEST_COUNT + 1)], ids=["batch", "count"])
def test_the_refusal_of_too_large_a_number_names_the_largest(request_: Request) -> None:
    """That 9007199254740993 is not "at least 1" would puzzle its reader."""
    cohort = Cohort(clients=1)
    if isinstance(request_, Local):
        cohort.join(1)
    pytest.raises(ExchangeFailed, _raise, cohort.submit(0, request_)).match(r"9007199254740992|2\*\*53|2\^53")


@pytest.mark.parametrize(("far", "answered"), [(1.0, True), (4.6e18, True), (1e20, False), (3e38, False)])
def test_an_answer_is_finite_or_there_is_none(far: float, answered: bool) -> None:
    """Means that are finite in float32 can lie so far apart that the variance of the union is not."""
    cohort = joined(batches=(1, 1))
    outcomes = [cohort.send(client, *[sign * far] * 3, *[1.7e38] * 3, key=Key(NARROW, MOMENTS)) for client, sign in enumerate((1, -1))]
    for (came,) in outcomes:
        assert isinstance(came, Answer) == answered
        assert isinstance(came, ExchangeFailed) or came.values.isfinite().all()


@pytest.mark.parametrize("clients", [3, 5])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("steep", [1e6, 1e12, 4e18, 1e20, 3e38])
def test_gradients_that_dwarf_the_others_cost_their_sender_alone(steep: float, order: int, clients: int) -> None:
    """Their mean would make every client diverge. Control: a hundred times the others', and large values that all have, are believed."""
    for value, believed in ((steep, False), (100.0, True)):
        cohort = joined("shrink", (1,) * clients)
        outcomes = {c: cohort.send(c, *[value if c == 1 else 0.5] * 6, key=Key(NARROW, GRADIENTS)) for c in range(clients)[::order]}
        assert [c for c in range(clients) if isinstance(outcomes[c][0], Answer)] == [c for c in range(clients) if believed or c != 1]
        assert list(cohort.session.dropped) == ([] if believed else [1])
        assert answer(outcomes[0]).values.abs().max() <= 50
    scaled = joined("shrink", (1,) * clients)
    assert [len(scaled.send(c, *[1e9 * (c + 1)] * 6, key=Key(NARROW, GRADIENTS))) for c in range(clients)][-1] == 1
    assert scaled.session.dropped == {}


def test_under_abort_the_round_ends_with_the_name_of_who_sent_such_gradients() -> None:
    cohort = joined("abort")
    outcomes = [cohort.send(c, *[1e12 if c == 1 else 0.5] * 4, key=Key(WIDE, GRADIENTS)) for c in range(3)]
    for client, outcome in enumerate(outcomes):
        pytest.raises(ExchangeFailed, _raise, outcome).match(
            f"^{'' if client == 1 else 'client 1: '}refused: stem.bn .gradients.: expected"
        )


def test_under_a_defence_the_rule_decides_about_large_gradients() -> None:
    cohort = joined("shrink", (1, 1, 1), average=Defence(1, "median", "median").average, believing=False)
    outcomes = [cohort.send(c, *[1e12 if c == 1 else 0.5] * 4, key=Key(WIDE, GRADIENTS)) for c in range(3)]
    assert [answer(outcome).values.tolist() for outcome in outcomes] == [[0.5] * 4] * 3


def test_whose_values_overflow_in_the_answer_is_left_out() -> None:
    """The unbiased variance of two activations is twice the biased one."""
    cohort = joined("shrink", (1, 1))
    far = 4.6e18
    mine = cohort.send(0, *[far] * 3, *[1.7e38] * 3, key=Key(NARROW, STATISTICS))
    its = cohort.send(1, *[-far] * 3, *[1.69e38] * 3, key=Key(NARROW, STATISTICS))
    assert isinstance(mine[0], ExchangeFailed)
    assert "its values, up to 1.7e+38, make the cohort's average overflow" in str(mine[0])
    assert answer(its).values.isfinite().all()
