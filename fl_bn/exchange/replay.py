"""The exchange without waiting: the client runs again with all answers so far, until it needs the next one.

The server sends the answers. The exchange keeps no state, and fits any cohort size. Every run has the same
batch and the same randomness, so it continues the run before.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fl_bn.exchange.call import Answer, ExchangeFailed, Key, Local, checked


class Unanswered(Exception):
    """The client needs an answer that is not in the transcript yet.

    Attributes:
        request: the client's request for it.
        batch: size of the client's batch.
    """

    def __init__(self, request: Local, batch: int) -> None:
        self.request, self.batch = request, batch
        super().__init__(f"no answer yet for {request.key}")


class ReplayExchange:
    """Answers from ``transcript``, in order. It raises ``Unanswered`` at the end."""

    def __init__(self, transcript: Sequence[tuple[Key, Answer]], batch: int) -> None:
        self.batch, self.seconds = batch, 0.0
        self._remaining = list(transcript)

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Return the next answer of the transcript.

        Raises:
            Unanswered: the transcript has no more answers.
            ExchangeFailed: the next answer is that of another key, or does not fit.
        """
        if not self._remaining:
            raise Unanswered(Local(key, local.detach().cpu(), count), self.batch)
        answered, answer = self._remaining.pop(0)
        if answered != key:
            raise ExchangeFailed(f"the transcript has {answered}, but this run needs {key}: the forward pass must be deterministic")
        return checked(answer, key, local)

    def close(self, error: str = "") -> None:
        """Do nothing: no other client waits."""
