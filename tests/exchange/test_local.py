"""Clients that take turns in one process: one at a time, always in the same order."""

from __future__ import annotations

import threading

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fl_bn.exchange.call import ExchangeFailed, Key, Quantity
from fl_bn.exchange.local import LocalExchange, Turns, admit, dismiss, end_task
from fl_bn.exchange.session import POLICIES, Session
from fl_bn.flower.in_process import InProcessGrid
from tests.exchange.in_turns import LAYERS, MOMENTS, Broken, Round, Task, breaking

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_clients_run_one_after_the_other_and_change_only_where_they_wait() -> None:
    """The last to come goes on at once, the others in the order in which they came."""
    round = Round()
    assert round.run([round.client(client, exchanges=1) for client in range(3)]) == [[1.0], [1.0], [1.0]]
    assert round.story == [
        *("0 starts", "1 starts", "2 starts", "2 joined", "0 joined", "1 joined"),
        *("1 answered 0", "1 ends", "2 answered 0", "2 ends", "0 answered 0", "0 ends"),
    ]


@pytest.mark.usefixtures("hasty_scheduler")
def test_the_order_does_not_depend_on_the_scheduler() -> None:
    stories = set()
    for _ in range(20):
        round = Round(4)
        round.run([round.client(client, exchanges=3) for client in range(4)])
        stories.add(tuple(round.story))
    assert len(stories) == 1


class Alone:
    """Notices when two threads are inside at once."""

    def __init__(self) -> None:
        self.inside, self.most = 0, 0
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)

    def leave(self) -> None:
        with self._lock:
            self.inside -= 1


@pytest.mark.usefixtures("hasty_scheduler")
def test_only_one_task_runs_at_a_time() -> None:
    round, alone = Round(4), Alone()

    def task(client: int) -> Task:
        def work() -> float:
            alone.enter()
            total = sum(float(torch.ones(8).sum()) for _ in range(20))
            alone.leave()
            return total

        def run() -> list[float]:
            came = [work()]
            exchange = LocalExchange(round.tokens[client], 1)
            for call in range(3):
                came.append(work())
                exchange(Key("bn", Quantity.MEAN, call), torch.ones(2, dtype=torch.float64), 1)
            exchange.close()
            return [*came, work()]

        return run

    assert round.run([task(client) for client in range(4)]) == [[160.0] * 5] * 4
    assert alone.most == 1


def test_threads_that_do_not_take_turns_run_at_once() -> None:
    """The control of the test above."""
    alone, meet = Alone(), threading.Barrier(2, timeout=10)

    def work() -> None:
        alone.enter()
        meet.wait()
        alone.leave()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert alone.most == 2


def test_answers_are_the_cohorts_and_a_gradient_is_cut_off() -> None:
    round = Round(2)
    came: dict[int, tuple[list[float], int, int, bool]] = {}

    def task(client: int) -> Task:
        def run() -> list[float]:
            exchange = LocalExchange(round.tokens[client], (3, 1)[client])
            own = torch.tensor([4.0 * client] * 4, dtype=torch.float64, requires_grad=True)
            answer = exchange(Key("bn", Quantity.GRADIENTS), own, 5)
            came[client] = (answer.values.tolist(), answer.count, answer.batch, answer.values.requires_grad)
            return []

        return run

    round.run([task(0), task(1)])
    assert came == dict.fromkeys((0, 1), ([1.0] * 4, 10, 4, False))


def test_results_are_in_the_order_of_tasks_and_the_first_error_is_raised_after_all_have_ended() -> None:
    assert Turns(3).run([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
    done = []

    def fails(name: str) -> int:
        done.append(name)
        raise Broken(name)

    with pytest.raises(Broken, match="second"):
        # type: ignore[func-returns-value]
        Turns(4).run([lambda: 1, lambda: fails("second"), lambda: fails("third"), lambda: done.append("fourth") or 4])
    assert done == ["second", "third", "fourth"]
    assert Turns(0).run([]) == []


@pytest.mark.parametrize("clients", [2, 4])
def test_clients_that_all_wait_for_one_that_ended_unheard_are_told_so(clients: int) -> None:
    """Nobody called ``ended`` for client 0.."""
    round = Round(clients)
    others: list[Task] = [round.client(client) for client in range(1, clients)]
    with pytest.raises(ExchangeFailed, match="every client waits for another client"):
        Turns(clients).run([lambda: [0.0], *others])
    dismiss(round.tokens)
    assert [line for line in round.story if not line.endswith("starts")] == []


def test_clients_that_are_told_so_still_run_one_at_a_time() -> None:
    round, meet = Round(3), threading.Barrier(2)
    met = []

    def task(client: int) -> Task:
        def run() -> list[float]:
            with pytest.raises(ExchangeFailed):
                LocalExchange(round.tokens[client], 1)
            try:
                meet.wait(0.2)
                met.append(client)
            except threading.BrokenBarrierError:
                pass
            return []

        return run

    Turns(3).run([task(0), task(1), lambda: [0.0]])
    dismiss(round.tokens)
    assert met == []


def test_a_local_exchange_outside_of_turns_is_refused_before_it_joins() -> None:
    round = Round(1)
    with pytest.raises(ExchangeFailed, match="needs all clients in this process"):
        LocalExchange(round.tokens[0], 1)
    assert round.session.batches == {}
    assert round.run([round.client(0)]) == [[0.0, 0.0]]  # control: the token was good, and still is


def test_tokens_are_secrets_of_one_round() -> None:
    first, second = Round(), Round()
    tokens = [*first.tokens.values(), *second.tokens.values()]
    assert len(set(tokens)) == 6
    assert all(len(token) >= 32 for token in tokens)
    dismiss(first.tokens)
    dismiss(second.tokens)


@pytest.mark.parametrize("kind", ["dismissed", "of nobody", "empty"])
def test_a_token_that_is_not_admitted_is_refused(kind: str) -> None:
    over, round = Round(1), Round(1)
    dismiss(over.tokens)
    token = {"dismissed": over.tokens[0], "of nobody": "0" * 32, "empty": ""}[kind]

    def task() -> list[float]:
        with pytest.raises(
            ExchangeFailed, match="does not know this client's token: the round is over, or its server runs in another process"
        ):
            LocalExchange(token, 1)
        return [1.0]

    assert round.run([task]) == [[1.0]]
    end_task(token, "does nothing")
    assert (over.session.dropped, over.session.failure) == ({}, "")
    dismiss(over.tokens)  # as does this


def test_after_many_rounds_no_thread_is_left() -> None:
    """Whether they end well or not; the fixture counts once more."""
    before = set(threading.enumerate())
    for number in range(200):
        round = Round(3, POLICIES[number % 2])
        round.run([round.client(c, disturb=breaking(MOMENTS[number % 4]) if number % 3 == c else breaking()) for c in range(3)])
        assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_client_app_that_raises_anything_keeps_nobody_waiting(error: type[BaseException]) -> None:
    """In the grid itself. An app that calls ``sys.exit`` must end the run, as it does without an exchange, not stop it for ever."""
    session = Session(range(2), LAYERS)
    tokens = admit(session)
    turns: list[Turns] = []

    def app(message: Message, context: Context) -> Message:
        turns.append(Turns.current()[0])
        client = int(context.node_config["partition-id"])
        if client == 1:
            raise error("enough")
        exchange = LocalExchange(tokens[client], 1)
        exchange.close()
        return Message(RecordDict(), reply_to=message)

    grid = InProcessGrid(app, 2, {})  # type: ignore[arg-type]
    messages = [
        Message(RecordDict({"fl-bn/config": ConfigRecord({"exchange": "local", "exchange-token": tokens[client]})}), client + 1, "train")
        for client in range(2)
    ]
    raised: list[BaseException] = []

    def push() -> None:
        try:
            grid.push_messages(messages)
        except BaseException as came:
            raised.append(came)

    pusher = threading.Thread(target=push)
    pusher.start()
    pusher.join(1.0)
    hangs = pusher.is_alive()
    if hangs:  # so that this test ends
        session.fail("stuck")
        turns[0]._next()
        pusher.join()
    dismiss(tokens)
    assert not hangs
    assert [type(came) for came in raised] == ([] if error is RuntimeError else [SystemExit])
