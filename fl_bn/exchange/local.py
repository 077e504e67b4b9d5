"""The exchange inside one process: clients take turns, each running until it has to wait for the others.

Threads serve as coroutines: only the one whose turn it is runs, and torch's generators change hands with the turn. So results do not
depend on scheduling, dropout draws what it draws when clients run one after the other, and models need not be safe to train in two threads.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Local, Request
from fl_bn.exchange.session import Session

T = TypeVar("T")
MOST, MOST_BYTES = 256, 2 * 2**30  # clients that measure statistics together in one process, each in a thread, and their models
_sessions: dict[str, tuple[Session, int]] = {}


def too_many(clients: int, model: nn.Module) -> str:
    """Why so many clients, each with a ``model`` of its own, should not be in one process at once; empty where they may."""
    nbytes = clients * sum(tensor.nbytes for tensor in model.state_dict().values())
    if clients <= MOST and nbytes <= MOST_BYTES:
        return ""
    return f"{clients} clients with a model each ({nbytes / 2**30:.2g} GiB) are too many to be in one process at once"


def admit(session: Session) -> dict[int, str]:
    """A token per client of ``session``, by which ``LocalExchange`` finds it in this process."""
    tokens = {client: secrets.token_hex(16) for client in session.active}
    _sessions.update({token: (session, client) for client, token in tokens.items()})
    return tokens


def ended(token: str, error: str) -> None:
    """The task of ``token``'s client has ended, with ``error`` if any: nobody should wait for it."""
    if token in _sessions:
        session, client = _sessions[token]
        session.leave(client, error)


def dismiss(tokens: dict[int, str]) -> None:
    """Forget tokens of ``admit``."""
    for token in tokens.values():
        _sessions.pop(token, None)


class Turns:
    """Runs tasks in threads of their own, one at a time, in order; ``current`` is the one that the calling thread belongs to."""

    _here = threading.local()

    def __init__(self, tasks: int) -> None:
        self._go = [threading.Semaphore(0) for _ in range(tasks)]
        self._ready = list(range(tasks))  # tasks that can go on, in order
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        self._stuck = False

    @classmethod
    def current(cls) -> tuple[Turns, int]:
        here = getattr(cls._here, "turn", None)
        if here is None:
            raise ExchangeFailed("the local exchange needs all clients in one process, as run_in_process has them")
        turns, index = here
        return turns, index

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """The results of ``tasks``, in order. What a task raises is raised here, after all have ended."""
        at_start, results = _generators(), dict[int, T]()
        errors: dict[int, BaseException] = {}

        def work(index: int) -> None:
            Turns._here.turn = (self, index)
            self._go[index].acquire()
            _set_generators(at_start)
            try:
                results[index] = tasks[index]()
            except BaseException as error:
                errors[index] = error
            self._next()

        threads = [threading.Thread(target=work, args=(index,), name=f"client-{index}") for index in range(len(tasks))]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()
        _set_generators(at_start)
        for index in sorted(errors):
            raise errors[index]
        return [results[index] for index in range(len(tasks))]

    def wait(self, index: int) -> None:
        """Hand the turn on, until ``ready`` was called for this task.

        Raises:
            ExchangeFailed: every task waits for another.
        """
        before = _generators()
        self._waiting.append(index)
        self._next()
        self._go[index].acquire()
        self._waiting.remove(index)
        _set_generators(before)
        if self._stuck:
            raise ExchangeFailed("every client waits for another one")

    def ready(self, index: int) -> None:
        with self._lock:
            self._ready.append(index)

    def _next(self) -> None:
        with self._lock:
            if not self._ready and self._waiting:  # nobody is left who could call ``ready``: they are told so, one at a time
                self._stuck, self._ready = True, [self._waiting[0]]
            if self._ready:
                self._go[self._ready.pop(0)].release()


def _generators() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _set_generators(states: tuple[Tensor, list[Tensor]]) -> None:
    cpu, cuda = states
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


class LocalExchange:
    """One client's side of a session in this process."""

    def __init__(self, token: str, batch: int) -> None:
        if token not in _sessions:
            raise ExchangeFailed("the local exchange knows no such token: the round is over, or its server runs in another process")
        self.batch, self.seconds = batch, 0.0
        self._closed = False
        self._session, self._client = _sessions[token]
        self._turns, self._index = Turns.current()
        self._ask(Join(batch))

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        return self._ask(Local(key, local.detach().cpu(), count))

    def close(self, error: str = "") -> None:
        if not self._closed:
            self._closed = True
            self._session.leave(self._client, error)

    def _ask(self, request: Request) -> Answer:
        answers: list[Answer | ExchangeFailed] = []
        waiting = False

        def deliver(answer: Answer | ExchangeFailed) -> None:
            answers.append(answer)
            if waiting:
                self._turns.ready(self._index)

        self._session.submit(self._client, request, deliver)
        if not answers:
            waiting = True
            self._turns.wait(self._index)
        answer = answers[0]
        if isinstance(answer, ExchangeFailed):
            raise answer
        return answer
