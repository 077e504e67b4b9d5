"""The exchange without anyone waiting: the server sends the answers so far, the client runs again until it needs the next one.

Stateless, and for any cohort size: the same batch and the same randomness in every run make each the continuation of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fl_bn.exchange.call import Answer, ExchangeFailed, Key, Local, checked


class Unanswered(Exception):
    """The client needs an answer that the transcript does not hold yet; ``request`` is what it sends for it, of a ``batch``."""

    def __init__(self, request: Local, batch: int) -> None:
        self.request, self.batch = request, batch
        super().__init__(f"no answer yet for {request.key}")


class ReplayExchange:
    """Answers from ``transcript``, in order; raises ``Unanswered`` at its end."""

    def __init__(self, transcript: Sequence[tuple[Key, Answer]], batch: int) -> None:
        self.batch, self.seconds = batch, 0.0
        self._remaining = list(transcript)

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        if not self._remaining:
            raise Unanswered(Local(key, local.detach().cpu(), count), self.batch)
        answered, answer = self._remaining.pop(0)
        if answered != key:
            raise ExchangeFailed(f"the transcript has {answered}, but this run needs {key}: the forward pass must be deterministic")
        return checked(answer, key, local)

    def close(self, error: str = "") -> None:
        """Nobody waits, so nobody need be told."""
