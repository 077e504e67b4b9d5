"""Run the clients of one exchange session in turns in one process."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.exchange.cohorts import Key, Layer, LocalExchange, Quantity, Session, Turns, admit, dismiss, end_task

LAYERS = {"bn": Layer(2, torch.float64)}
CPU = torch.device("cpu")
Task = Callable[[], list[float]]


class Round:
    """Hold a session of ``clients`` clients, and their tokens."""

    def __init__(self, clients: int = 3, policy: str = "abort") -> None:
        self.session = Session(range(clients), LAYERS, policy=policy)
        self.tokens = admit(self.session)

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

    def client(self, client: int, exchanges: int = 2, disturb: Callable[[str], None] = lambda moment: None) -> Task:
        """Return the task of a client: send its own index in each of ``exchanges`` exchanges, and return the answers.

        ``disturb`` is called with the name of the moment before, between and after the exchanges. It may raise.
        """

        def task() -> list[float]:
            disturb("before")
            exchange = LocalExchange(self.tokens[client], client + 1)
            came = []
            for call in range(exchanges):
                disturb(f"exchange {call}")
                answer = exchange(Key("bn", Quantity.MEAN, call), torch.full((2,), float(client), dtype=torch.float64), 1)
                came.append(float(answer.values[0]))
            exchange.close()
            disturb("after")
            return came

        return task


MOMENTS = ["before", "exchange 0", "exchange 1", "after"]


class Broken(RuntimeError):
    """Make a client fail, at a moment that a test chooses."""


def breaking(*moments: str) -> Callable[[str], None]:
    def disturb(moment: str) -> None:
        if moment in moments:
            raise Broken(f"at {moment}")

    return disturb
