"""Run the exchange in one process: a thread per client, of which one runs at a time.

When a client waits for an answer, the next thread runs, in a fixed order, with its
own state of torch's random generators. So results do not depend on how threads are
scheduled, dropout is the same as when clients run one after the other, and models
need not be thread-safe.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor, nn

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Local, Request
from fl_bn.exchange.session import Session

T = TypeVar("T")
MOST, MOST_BYTES = 256, 2 * 2**30  # limits for one process: the number of clients, and the bytes of their models
_sessions: dict[str, tuple[Session, int]] = {}


def too_many(clients: int, model: nn.Module) -> str:
    """Return why one process cannot hold ``clients`` copies of ``model``; empty if it can."""
    nbytes = clients * sum(tensor.nbytes for tensor in model.state_dict().values())
    if clients <= MOST and nbytes <= MOST_BYTES:
        return ""
    return f"{clients} models ({nbytes / 2**30:.2g} GiB) are too many for one process: at most {MOST}, and {MOST_BYTES / 2**30:.2g} GiB"


def admit(session: Session) -> dict[int, str]:
    """Make a token for each client of ``session``, by which it joins."""
    tokens = {client: secrets.token_hex(16) for client in session.active}
    _sessions.update({token: (session, client) for client, token in tokens.items()})
    return tokens


def end_task(token: str, error: str) -> None:
    """Record that a client's task has ended, so that none waits for it."""
    if token in _sessions:
        session, client = _sessions[token]
        session.leave(client, error)


def dismiss(tokens: dict[int, str]) -> None:
    """Delete tokens of ``admit``, so that no client can join with them."""
    for token in tokens.values():
        _sessions.pop(token, None)


class Turns:
    """Run each task in its own thread, one at a time, in the order of readiness."""

    _here = threading.local()

    def __init__(self, tasks: int) -> None:
        self._go = [threading.Semaphore(0) for _ in range(tasks)]
        self._ready = list(range(tasks))  # tasks that can go on, in order
        self._lock = threading.Lock()
        self._waiting: list[int] = []
        self._stuck = False

    @classmethod
    def here(cls) -> tuple[Turns, int] | None:
        """Return the ``Turns`` that run the calling thread, and its task, if any."""
        return getattr(cls._here, "turn", None)

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Run all tasks and return their results in order, or raise the error that failed the others.

        Ctrl-C ends the tasks, too: they would go on to draw from the generators.
        """
        at_start, threads, futures = random_states(), dict[int, int](), list[Future[T]]()

        def work(index: int) -> T:
            Turns._here.turn, threads[index] = (self, index), threading.get_ident()
            self._go[index].acquire()
            set_random_states(at_start)
            try:
                return tasks[index]()
            finally:
                self._next()

        with ThreadPoolExecutor(max(1, len(tasks)), "client") as pool:
            try:
                futures.extend(pool.submit(work, index) for index in range(len(tasks)))
                self._next()
                wait(futures)
            except BaseException as error:
                for index, future in enumerate(futures):
                    if not future.done():  # 0 is no thread: a task that has not begun is let go on
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threads.get(index, 0)), ctypes.py_object(type(error)))
                        self._go[index].release()
                raise
        set_random_states(at_start)
        return [future.result() for future in sorted(futures, key=lambda one: isinstance(one.exception(), ExchangeFailed))]

    def wait(self, index: int) -> None:
        """Let others run until this task is ``ready``, or raise ``ExchangeFailed``."""
        before = random_states()
        self._waiting.append(index)
        self._next()
        self._go[index].acquire()
        self._waiting.remove(index)
        set_random_states(before)
        if self._stuck:
            raise ExchangeFailed("every client waits for another client, so no client can go on: do all run the same model?")

    def ready(self, index: int) -> None:
        """Mark the waiting task ``index`` as ready, behind those that became ready before it."""
        with self._lock:
            self._ready.append(index)

    def all_wait(self) -> list[int]:
        """Return the tasks to wake when all wait, so that none could call ``ready``.

        Here these tasks fail. A subclass may do what they wait for.
        """
        self._stuck = True
        return self._waiting[:1]

    def _next(self) -> None:
        with self._lock:
            if not self._ready and self._waiting:
                self._ready = self.all_wait()
            if self._ready:
                self._go[self._ready.pop(0)].release()


def random_states() -> tuple[Tensor, list[Tensor]]:
    """Return the states of torch's generators, of GPUs only if they are used."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_random_states(states: tuple[Tensor, list[Tensor]]) -> None:
    """Set torch's generators to what ``random_states`` returned."""
    cpu, cuda = states
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


class LocalExchange:
    """Take part in a layer-wise exchange, while the cohort's others run in the same process.

    Raises:
        ExchangeFailed: the token or the thread is wrong, the session refuses the
            client, or not all join.
    """

    def __init__(self, token: str, batch: int) -> None:
        if token not in _sessions or (here := Turns.here()) is None:
            raise ExchangeFailed("the local exchange needs a token of this round, and all clients in this process: choose another exchange")
        self.batch, self.seconds, self._closed = batch, 0.0, False
        (self._session, self._client), (self._turns, self._index) = _sessions[token], here
        self._ask(Join(batch))

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Average ``local`` (d,). Meanwhile the other clients run."""
        return self._ask(Local(key, local.detach().cpu(), count))

    def close(self, error: str = "") -> None:
        """Leave the session, as ``Exchange.close`` says."""
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
