"""Clients that take turns, and fail: nobody is stuck."""

from __future__ import annotations

import pytest
import torch

from fl_bn.exchange.call import Key, Quantity
from fl_bn.exchange.local import LocalExchange
from fl_bn.exchange.session import POLICIES
from tests.exchange.in_turns import MOMENTS, Round, breaking

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("moment", MOMENTS)
def test_under_abort_a_task_that_raises_ends_all_the_others(moment: str, broken: int) -> None:
    """After its last exchange the others have theirs, too; the session says that the round failed."""
    round = Round()
    results = round.run([round.client(c, disturb=breaking(moment) if c == broken else breaking()) for c in range(3)])
    assert results.pop(broken) == f"Broken: at {moment}"
    assert round.session.failure == f"client {broken}: Broken: at {moment}"
    if moment == "after":
        assert all(result == [1.0, 1.0] for result in results)
    else:
        assert results == [f"ExchangeFailed: client {broken}: Broken: at {moment}"] * 2


@pytest.mark.parametrize("broken", range(3))
@pytest.mark.parametrize("moment", MOMENTS)
def test_under_shrink_a_task_that_raises_ends_itself_alone(moment: str, broken: int) -> None:
    round = Round(policy="shrink")
    results = round.run([round.client(c, disturb=breaking(moment) if c == broken else breaking()) for c in range(3)])
    assert results.pop(broken) == f"Broken: at {moment}"
    rest = sum({0, 1, 2} - {broken}) / 2
    exchanged = {"before": 0, "exchange 0": 0, "exchange 1": 1, "after": 2}[moment]
    assert results == [[1.0] * exchanged + [rest] * (2 - exchanged)] * 2
    assert round.session.dropped == {broken: f"Broken: at {moment}"}
    assert list(round.session.taking_part) == sorted({0, 1, 2} - {broken})
    assert round.session.failure == ""


@pytest.mark.parametrize("policy", POLICIES)
def test_all_may_raise_at_different_moments(policy: str) -> None:
    round = Round(4, policy)
    results = round.run([round.client(client, disturb=breaking(moment)) for client, moment in enumerate(MOMENTS)])
    assert len(round.session.dropped) == (1 if policy == "abort" else 4)
    assert all(isinstance(result, str) for result in results)
    assert results[0] == "Broken: at before"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_task_that_ends_without_joining_does_not_keep_the_others_waiting(policy: str) -> None:
    round = Round(policy=policy)
    results = round.run([round.client(0), lambda: [7.0], round.client(2)])
    assert results[1] == [7.0]
    said = "client 1: left the round and did not send its values of bn (mean)"
    others = [[1.0, 1.0]] * 2 if policy == "shrink" else [f"ExchangeFailed: {said}"] * 2
    assert [results[0], results[2]] == others


@pytest.mark.parametrize("policy", POLICIES)
def test_a_task_that_needs_more_exchanges_than_the_others_does_not_hang(policy: str) -> None:
    round = Round(2, policy)
    results = round.run([round.client(0, exchanges=1), round.client(1, exchanges=3)])
    assert results == [
        [0.5],
        "ExchangeFailed: the clients disagree about which layer is the last: client 0 finished, but client 1 went on. Do all run the "
        "same model and version, and does forward call the same layers for every batch?",
    ]


def test_a_refused_request_raises_in_the_task_that_sent_it() -> None:
    round = Round(2, "shrink")

    def wrong() -> list[float]:
        exchange = LocalExchange(round.tokens[1], 1)
        exchange(Key("bn", Quantity.MEAN), torch.ones(3), 1)
        return []

    results = round.run([round.client(0), wrong])
    assert results[0] == [0.0, 0.0]
    assert str(results[1]).startswith(
        "ExchangeFailed: refused: bn (mean): expected shape (2,) and torch.float64, but got shape (3,) and torch.float32"
    )


def test_a_client_that_sits_out_keeps_nobody_waiting() -> None:
    round = Round()

    def small() -> list[float]:
        LocalExchange(round.tokens[1], 0).close()
        return []

    assert round.run([round.client(0), small, round.client(2)]) == [[1.0, 1.0], [], [1.0, 1.0]]
    assert round.session.taking_part == {0: 1, 2: 3}


def test_closing_twice_does_nothing_the_second_time() -> None:
    """Not even with an error: the first call says how it ended."""
    round = Round(1)

    def task() -> list[float]:
        exchange = LocalExchange(round.tokens[0], 2)
        exchange.close()
        exchange.close("too late")
        return []

    round.run([task])
    assert round.session.dropped == {}
    again = Round(1)

    def failing() -> list[float]:
        LocalExchange(again.tokens[0], 2).close("out of memory")
        return []

    again.run([failing])
    assert again.session.dropped == {0: "out of memory"}  # control
