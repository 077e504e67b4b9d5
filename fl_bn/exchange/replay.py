"""Exchange vectors by replay: a client computes its round again from the start whenever a new answer has come.

The server sends all answers so far, the transcript. The client uses them in order, and stops where it needs an
answer that has not come yet. Every repetition has the same batch and the same random numbers, so it reaches the
same point. No process waits between messages, so any cohort size works.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fl_bn.exchange.call import Answer, ExchangeFailed, Key, Local, checked


def size(values: Tensor) -> float:
    """Return the sum of the absolute values of ``values``."""
    return float(values.detach().double().abs().sum())


class Unanswered(Exception):
    """Signal that the client needs an answer that is not in the transcript yet.

    Attributes:
        request: the client's request for that answer.
        batch: the number of samples in the client's batch.
        passed: the sum of the absolute values of all requests that the client has made before this one, since it began the round
            anew. The server compares this sum with the sum over the requests that it has received.
    """

    def __init__(self, request: Local, batch: int, passed: float = 0.0) -> None:
        self.request, self.batch, self.passed = request, batch, passed
        super().__init__(f"no answer yet for {request.key}")


class ReplayExchange:
    """Take part in a layer-wise exchange as one client: return a transcript's answers in order, and raise ``Unanswered`` at its end.

    Args:
        transcript: the server's answers so far in this round, in order, each with its key.
        batch: the number of samples in the client's batch.
    """

    def __init__(self, transcript: Sequence[tuple[Key, Answer]], batch: int) -> None:
        self.batch, self.seconds, self._passed = batch, 0.0, 0.0
        self._remaining = list(transcript)

    def __call__(self, key: Key, local: Tensor, count: int) -> Answer:
        """Return the next answer of the transcript.

        Raises:
            Unanswered: the transcript has no more answers.
            ExchangeFailed: the next answer belongs to another key, or does not fit ``local``.
        """
        if not self._remaining:
            raise Unanswered(Local(key, local.detach().cpu(), count), self.batch, self._passed)
        answered, answer = self._remaining.pop(0)
        if answered != key:
            raise ExchangeFailed(
                f"the transcript's next answer is for {answered}, but this repetition of the round needs {key}: make the forward pass "
                "deterministic"
            )
        self._passed += size(local)
        return checked(answer, key, local)

    def close(self, error: str = "") -> None:
        """Do nothing: no other client waits."""
