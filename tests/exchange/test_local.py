"""Clients that take turns in one process: one at a time, in the same order, with their own random numbers; none is stuck if one fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from fl_bn.federation.local import torch_seed
from fl_bn.flower.in_process import InProcessGrid
from tests.exchange.cohorts import POLICIES, ExchangeFailed, Key, LocalExchange, Quantity, Session, Turns, admit, dismiss
from tests.exchange.in_turns import CPU, LAYERS, MOMENTS, Round, Task, breaking
from tests.listed import listed

both_policies = pytest.mark.parametrize("policy", POLICIES)
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("no_thread_is_left")]


def test_clients_run_one_after_the_other_and_change_only_where_they_wait() -> None:
    """The last to come goes on at once, the others in the order in which they came."""
    round, moments = Round(), list[str]()
    tasks = [round.client(client, 1, lambda moment, client=client: moments.append(f"{client} {moment}")) for client in range(3)]
    assert round.run(tasks) == [[1.0], [1.0], [1.0]]
    begin, exchange, end = [0, 1, 2], [2, 0, 1], [1, 2, 0]
    assert moments == [*(f"{i} before" for i in begin), *(f"{i} exchange 0" for i in exchange), *(f"{i} after" for i in end)]


@pytest.mark.parametrize("clients", [2, 4])
def test_clients_that_all_wait_for_one_that_ended_unheard_are_told_so(clients: int) -> None:
    """Nobody called ``ended`` for client 0.."""
    round = Round(clients)
    others: list[Task] = [round.client(client) for client in range(1, clients)]
    with pytest.raises(ExchangeFailed):
        Turns(clients).run([lambda: [0.0], *others])
    dismiss(round.tokens)
    assert round.session.batches == {}


def test_a_local_exchange_outside_of_turns_is_refused_before_it_joins() -> None:
    round = Round(1)
    with pytest.raises(ExchangeFailed):
        LocalExchange(round.tokens[0], 1)
    assert round.session.batches == {}
    assert round.run([round.client(0)]) == [[0.0, 0.0]]  # control: the token was good, and still is


# clients that fail: nobody is stuck


@both_policies
@listed("broken", range(3))
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_task_that_raises_ends_all_under_abort_and_itself_alone_under_shrink(moment: str, broken: int, policy: str) -> None:
    """After its last exchange the others have theirs, too; the session says that it failed."""
    round = Round(policy=policy)
    results = round.run([round.client(c, disturb=breaking(moment) if c == broken else breaking()) for c in range(3)])
    assert results.pop(broken) == f"Broken: at {moment}"
    assert round.session.dropped == {broken: f"Broken: at {moment}"}
    if policy == "abort":
        assert round.session.failure == f"client {broken}: Broken: at {moment}"
        assert results == [[1.0, 1.0] if moment == "after" else f"ExchangeFailed: client {broken}: Broken: at {moment}"] * 2
    else:
        rest = sum({0, 1, 2} - {broken}) / 2
        exchanged = {"before": 0, "exchange 0": 0, "exchange 1": 1, "after": 2}[moment]
        assert results == [[1.0] * exchanged + [rest] * (2 - exchanged)] * 2
        assert list(round.session.taking_part) == sorted({0, 1, 2} - {broken})
        assert round.session.failure == ""


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


# random numbers: clients that take turns draw those that they draw alone


def draws(exchanges: int, exchange: Callable[[int], None] = lambda call: None, seed: int | None = None) -> list[Tensor]:
    """Uniform numbers and dropout masks, around ``exchanges`` exchanges."""
    numbers = list[Tensor]()
    with nullcontext() if seed is None else torch_seed(seed, CPU):
        for call in range(exchanges):
            numbers += [torch.rand(3), torch.nn.functional.dropout(torch.ones(16))]
            exchange(call)
        return [*numbers, torch.randn(3)]


def random_round(clients: int, exchanges: int, *, seeded: bool = True) -> dict[int, list[Tensor]]:
    """What each client draws in its turns."""
    round, numbers = Round(clients), dict[int, list[Tensor]]()

    def task(client: int) -> list[float]:
        channel, ones = LocalExchange(round.tokens[client], 1), torch.ones(2, dtype=torch.float64)
        exchange = lambda call: channel(Key("bn", Quantity.MEAN, call), ones, 1)  # noqa: E731
        numbers[client] = draws(exchanges, exchange, 100 + client if seeded else None)
        channel.close()
        return []

    assert round.run([partial(task, client) for client in range(clients)]) == [[]] * clients
    return numbers


@listed("exchanges", [0, 1, 3])
@listed("clients", [1, 3])
def test_each_client_draws_what_it_draws_on_its_own_and_torchs_generator_is_as_it_was(clients: int, exchanges: int) -> None:
    before = torch.get_rng_state()
    for client, numbers in random_round(clients, exchanges).items():
        assert all(torch.equal(a, b) for a, b in zip(numbers, draws(exchanges, seed=100 + client), strict=True))
        assert not torch.equal(numbers[-1], draws(exchanges, seed=101 + client)[-1])  # control: another seed
    random_round(clients, exchanges, seeded=False)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):  # control: drawing outside of turns moves it
        draws(1)
        assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_client_app_that_raises_anything_keeps_nobody_waiting(error: type[BaseException]) -> None:
    """In the grid itself. An app that calls ``sys.exit`` must end the run, as it does without an exchange, not stop it for ever."""
    tokens = admit(Session(range(2), LAYERS))

    def app(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            raise error("enough")
        LocalExchange(tokens[0], 1).close()
        return Message(RecordDict(), reply_to=message)

    config = [ConfigRecord({"exchange": "local", "exchange-token": tokens[client]}) for client in range(2)]
    messages = [Message(RecordDict({"fl-bn/config": config[client]}), client + 1, "train") for client in range(2)]
    with nullcontext() if error is RuntimeError else pytest.raises(SystemExit):
        InProcessGrid(app, 2, {}).push_messages(messages)  # type: ignore[arg-type]
    dismiss(tokens)
