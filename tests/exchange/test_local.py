"""Clients that take turns in one process: one at a time, in the same order, with their own random numbers; none is stuck if one fails."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fl_bn import Federation, methods
from fl_bn.federation.local import torch_seed
from tests.exchange.cohorts import POLICIES, ExchangeFailed, Key, Layer, LocalExchange, Quantity, Session, Turns, admit, dismiss, end_task
from tests.listed import listed

MOMENTS = ["before", "exchange 0", "exchange 1", "after"]
Task = Callable[[], list[float]]

both_policies = pytest.mark.parametrize("policy", POLICIES)
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_thread_is_left")]


def drawn() -> Tensor:
    return torch.cat([torch.rand(3), torch.nn.functional.dropout(torch.ones(16))])


class Round:
    """Hold a session of ``clients`` clients, their tokens, the moments that they reach, and the numbers that they draw."""

    def __init__(self, clients: int = 3, policy: str = "abort") -> None:
        self.session = Session(range(clients), {"bn": Layer(2, torch.float64)}, policy=policy)
        self.tokens, self.moments = admit(self.session), list[str]()
        self.drawn: dict[int, list[Tensor]] = {client: [] for client in range(clients)}

    def run(self, tasks: list[Task]) -> list[list[float] | str]:
        """Run one task per client; return what each task returned, or its error as text. Failed tasks end as in ``InProcessGrid``."""

        def ending(client: int) -> list[float] | str:
            try:
                result: list[float] | str = tasks[client]()
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            end_task(self.tokens[client], result if isinstance(result, str) else "")
            return result

        try:
            return Turns(len(tasks)).run([lambda c=client: ending(c) for client in range(len(tasks))])  # type: ignore[misc]
        finally:
            dismiss(self.tokens)

    def client(self, client: int, exchanges: int = 2, breaks: str = "") -> Task:
        """Return the task of a client: send its own index in each of ``exchanges`` exchanges, and return the answers.

        ``breaks`` is the moment at which it raises an error.
        """

        def reach(moment: str) -> None:
            self.moments.append(f"{client} {moment}")
            if moment == breaks:
                raise RuntimeError(f"at {moment}")

        def task() -> list[float]:
            reach("before")
            exchange = LocalExchange(self.tokens[client], client + 1)
            came = []
            with torch_seed(client, torch.device("cpu")):
                for call in range(exchanges):
                    reach(f"exchange {call}")
                    self.drawn[client].append(drawn())
                    answer = exchange(Key("bn", Quantity.MEAN, call), torch.full((2,), float(client), dtype=torch.float64), 1)
                    came.append(float(answer.values[0]))
                self.drawn[client].append(drawn())
            exchange.close()
            reach("after")
            return came

        return task


def test_clients_run_one_after_the_other_and_change_only_where_they_wait() -> None:
    """The last to come goes on at once, the others in the order in which they came."""
    round = Round()
    assert round.run([round.client(client, 1) for client in range(3)]) == [[1.0], [1.0], [1.0]]
    begin, exchange, end = [0, 1, 2], [2, 0, 1], [1, 2, 0]
    assert round.moments == [*(f"{i} before" for i in begin), *(f"{i} exchange 0" for i in exchange), *(f"{i} after" for i in end)]


@listed("clients", [1, 3])
def test_each_client_draws_what_it_draws_on_its_own_and_torchs_generator_is_as_it_was(clients: int) -> None:
    round, before = Round(clients), torch.get_rng_state()
    round.run([round.client(client) for client in range(clients)])
    assert torch.equal(torch.get_rng_state(), before)
    for client, numbers in round.drawn.items():
        with torch_seed(client, torch.device("cpu")):
            assert all(torch.equal(number, drawn()) for number in numbers)
            assert len(numbers) == 3


@both_policies
@listed("broken", range(3))
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_task_that_raises_ends_all_under_abort_and_itself_alone_under_shrink(moment: str, broken: int, policy: str) -> None:
    """After its last exchange the others have theirs, too; the session says that it failed."""
    round = Round(policy=policy)
    results = round.run([round.client(c, breaks=moment if c == broken else "") for c in range(3)])
    assert results.pop(broken) == f"RuntimeError: at {moment}"
    assert round.session.dropped == {broken: f"RuntimeError: at {moment}"}
    if policy == "abort":
        assert round.session.failure == f"client {broken}: RuntimeError: at {moment}"
        assert results == [[1.0, 1.0] if moment == "after" else f"ExchangeFailed: {round.session.failure}"] * 2
    else:
        rest = sum({0, 1, 2} - {broken}) / 2
        exchanged = {"before": 0, "exchange 0": 0, "exchange 1": 1, "after": 2}[moment]
        assert results == [[1.0] * exchanged + [rest] * (2 - exchanged)] * 2
        assert list(round.session.taking_part) == sorted({0, 1, 2} - {broken})


@both_policies
def test_a_task_that_ends_without_joining_or_needs_more_exchanges_than_the_others_keeps_nobody_waiting(policy: str) -> None:
    round = Round(policy=policy)
    first, own, last = round.run([round.client(0), lambda: [7.0], round.client(2)])
    assert own == [7.0]
    assert first == last
    assert first == [1.0, 1.0] if policy == "shrink" else str(first).startswith("ExchangeFailed: client 1: ")
    round = Round(2, policy)
    results = round.run([round.client(0, exchanges=1), round.client(1, exchanges=3)])
    assert results[0] == [0.5]
    assert str(results[1]).startswith("ExchangeFailed: ")


def test_clients_that_all_wait_for_one_that_ended_unheard_are_told_so() -> None:
    round = Round(2)
    with pytest.raises(ExchangeFailed):
        Turns(2).run([lambda: [0.0], round.client(1)])
    dismiss(round.tokens)


def test_in_a_federation_a_client_whose_values_are_refused_costs_the_round_and_a_users_own_error_ends_the_run() -> None:
    x, y, factors = torch.rand(4, 3), torch.arange(4) % 2, iter([math.nan, 1.0])

    class Spoilt:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield x * next(factors), y

    fed = Federation(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), methods.fedtan(), [[(x, y)], Spoilt()])
    rounds = fed.run(3)
    first, second = next(rounds), next(rounds)
    assert (first.aggregated, second.aggregated) == (False, True)
    assert "client 1: refused: 1 (moments" in first.clients[0].refused
    with pytest.raises(RuntimeError, match="StopIteration"):  # not that the others' exchange has failed
        next(rounds)


def test_ctrl_c_ends_the_task_that_works_and_those_that_wait() -> None:
    begun = list[int]()

    def works(client: int) -> None:
        begun.append(client)
        while True:
            torch.rand(1)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        Turns(3).run([partial(works, client) for client in range(3)])
    assert begun == [0]
