"""A round's replies taken one by one: what a reply adds to the average is added when it comes, and its weights are freed.

Clients are added in client order, so that the order of arrival changes no bit; a reply that is ahead of its turn waits. The average is the
sum of the replies times ``weight / total``, and the total is known only with the last reply: what is used is the total that was planned, of
all clients of the cohort. Where all of them count as much as planned, the average is bit for bit that of ``aggregation.average``. Where not
(a client is lost or refused), it is multiplied by ``planned / total`` at the end, which rounds once more in float64.

A reply that may yet be refused waits, and with it all after it, until all have come: one with numbers so large that the server's step could
overflow, or whose claims are far from the others'. Where claims are compared, nothing is added before enough replies are there to tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from fl_bn.federation.blocks import WeightedSum
from fl_bn.federation.values import Reply

FOLDED = ("weights", "gradients")
COMPARED = 5  # replies that a claim is compared with as replies come; at the end it is with all
TOGETHER = 2  # replies that are added at once: the sum is read and written half as often as one by one, and no more wait in memory


@dataclass
class PartialAverage:
    """The first part of an average: ``sum`` of the tensors of those clients that are in it, each times its weight / ``planned``."""

    planned: float
    sum: WeightedSum = field(default_factory=WeightedSum)

    def mean(self, parts: Sequence[Reply], section: str, weights: Sequence[float]) -> dict[str, Tensor]:
        """The average of all ``parts``, those in the sum among them. Without others it takes the sum itself, which is then empty."""
        total, others = float(sum(weights)), [(p, w) for p, w in zip(parts, weights, strict=True) if not p.folded]
        made, self.sum = self.sum, self.sum.copy() if others else WeightedSum()
        if others:
            made.add([part.sections[section] for part, _ in others], [weight / self.planned for _, weight in others])
        if total != self.planned:
            for tensor in made.tensors.values():
                tensor.mul_(self.planned / total)
        return made.tensors


class StreamingAverage:
    """Adds replies up as they come.

    ``planned``: the weight of each client of the cohort; ``weigh``: a reply's; ``waits``: whether it may yet be refused, given some of the
    others; ``least``: how many replies must have come before one is added.
    """

    def __init__(
        self,
        planned: Mapping[int, float],
        weigh: Callable[[Reply], float],
        waits: Callable[[Reply, Collection[Reply]], bool],
        least: int = 1,
    ) -> None:
        self._turns, self._weigh, self._waits, self._least = deque(sorted(planned)), weigh, waits, least
        self._replies: dict[int, Reply] = {}
        self._absent, self._next = set[int](), list[Reply]()
        self._folded = PartialAverage(float(sum(planned.values())) or 1.0)

    def take(self, reply: Reply) -> None:
        """A checked reply; each client's first."""
        self._replies[reply.client] = reply
        self._advance()

    def leave_out(self, client: int) -> None:
        """There will be no usable reply of ``client``."""
        self._absent.add(client)
        self._advance()

    def end(self) -> tuple[list[Reply], PartialAverage]:
        """All replies in client order, and the sum of those whose turn came; their weights are tensors without memory."""
        self._fold()
        return [self._replies[client] for client in sorted(self._replies)], self._folded

    def _advance(self) -> None:
        if len(self._replies) < self._least:
            return
        while self._turns and ((client := self._turns[0]) in self._replies or client in self._absent):
            self._turns.popleft()
            if client in self._absent:
                continue
            others = [other for other in islice(self._replies.values(), COMPARED) if other.client != client]
            if self._waits(reply := self._replies[client], others):
                self._turns.clear()  # all after it wait, too
                return
            self._next.append(reply)
            if len(self._next) == TOGETHER:
                self._fold()

    def _fold(self) -> None:
        replies, self._next = self._next, []
        if not replies:
            return
        (section,) = (section for section in FOLDED if section in replies[0].sections)
        self._folded.sum.add([r.sections[section] for r in replies], [self._weigh(r) / self._folded.planned for r in replies])
        for reply in replies:
            gone = {name: torch.empty_like(tensor, device="meta") for name, tensor in reply.sections[section].items()}
            self._replies[reply.client] = replace(reply, sections={**reply.sections, section: gone}, folded=True)
