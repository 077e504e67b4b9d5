"""Add the replies of a round to the average one by one, as they arrive, and free the memory of their weights.

So the server needs the memory of three models, however many clients there are. With 50 replies of a ResNet-18 it
needs 138 MB, where a list of all replies takes 2,266 MB (``benchmarks/server.py``).

Replies are added in the order of the clients' numbers, so that the order of arrival changes no bit of the average. A reply waits
until the replies of all clients before it are added. The average is the sum of the replies times
``weight / total``. The true total is known only with the last reply, so the sum uses the planned total of the
cohort. If every client has its planned weight, the average is bit for bit that of ``aggregation.average``. If a
client is lost or refused, the sum is multiplied by ``planned / total`` at the end. This rounds once more in float64.

Some replies may still be refused after all have arrived. Their values are so large that the server's step could
overflow, or their claimed counts are far from the other clients' counts. Such a reply waits until every reply has
arrived, and so do all replies after it. If counts are compared, no reply is added before enough replies for the
comparison have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_bn.federation.blocks import WeightedSum
from fl_bn.federation.unmoved import Unmoved
from fl_bn.federation.values import Reply
from fl_bn.methods import Phase, StatisticsReport
from fl_bn.support.stated_sizes import FEWEST

if TYPE_CHECKING:
    from fl_bn.federation.server import Server

FOLDED = ("weights", "gradients")
COMPARED = 5  # how many replies a claim is compared with while replies arrive; in the end it is compared with all
TOGETHER = 2  # how many replies are added at once: with 2, the sum is read and written half as often, and one reply waits in memory


@dataclass
class PartialAverage:
    """Hold a weighted sum of some clients' tensors, from which ``mean`` computes the average over all clients.

    Attributes:
        planned: The planned total weight of the cohort.
        sum: The sum of the added clients' tensors, each times its weight / ``planned``.
        unmoved: Compares the added clients' weights with those that they received.
    """

    planned: float
    sum: WeightedSum = field(default_factory=WeightedSum)
    unmoved: Unmoved = field(default_factory=Unmoved)

    def mean(self, parts: Sequence[Reply], section: str, weights: Sequence[float]) -> dict[str, Tensor]:
        """Return the average of all replies: those in the sum, and those that are added now.

        If all replies are in the sum already, the result takes the sum's memory, and the sum is empty afterwards.

        Args:
            parts: All replies of the average. ``folded`` tells which are in the sum already.
            section: The section of the replies whose tensors are averaged.
            weights: The weight of each reply.
        """
        total, others = float(sum(weights)), [(p, w) for p, w in zip(parts, weights, strict=True) if not p.folded]
        made, self.sum = self.sum, self.sum.copy() if others else WeightedSum()
        if others:
            made.add([part.sections[section] for part, _ in others], [weight / self.planned for _, weight in others])
        if total != self.planned:
            for tensor in made.tensors.values():
                tensor.mul_(self.planned / total)
        return made.tensors


class StreamingAverage:
    """Add replies to a weighted sum as they arrive, in the order of the clients' numbers.

    Args:
        planned: Client of the cohort -> its planned weight.
        weigh: Returns the weight of a reply.
        waits: ``waits(reply, others)`` tells whether the server may still refuse ``reply``, given some of the replies
            that have arrived. If so, this reply and all after it are not added before ``end``.
        least: The number of replies that must have arrived before the first reply is added.
        unmoved: Compares the clients' weights with those that they received. Default: nothing is compared.
    """

    def __init__(
        self,
        planned: Mapping[int, float],
        weigh: Callable[[Reply], float],
        waits: Callable[[Reply, Collection[Reply]], bool],
        least: int = 1,
        unmoved: Unmoved | None = None,
    ) -> None:
        self._turns, self._weigh, self._waits, self._least = deque(sorted(planned)), weigh, waits, least
        self._replies: dict[int, Reply] = {}
        self._absent, self._next = set[int](), list[Reply]()
        self._folded = PartialAverage(float(sum(planned.values())) or 1.0, unmoved=unmoved or Unmoved())

    def take(self, reply: Reply) -> None:
        """Store a checked reply. Add it to the sum as soon as the replies before it are added. Call this once per client."""
        self._replies[reply.client] = reply
        self._advance()

    def leave_out(self, client: int) -> None:
        """Stop waiting for ``client``, because its reply is missing or refused."""
        self._absent.add(client)
        self._advance()

    def end(self) -> tuple[list[Reply], PartialAverage]:
        """Return all replies in client order, and the sum of the replies that were added.

        The weights of added replies are replaced by tensors of the device ``meta``, which have no values.
        """
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
                self._turns.clear()  # all replies after it wait, too
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
            self._folded.unmoved.add(reply.sections[section])
            gone = {name: torch.empty_like(tensor, device="meta") for name, tensor in reply.sections[section].items()}
            self._replies[reply.client] = replace(reply, sections={**reply.sections, section: gone}, folded=True)


def streaming(server: Server, samples: Mapping[int, int]) -> StreamingAverage | None:
    """Make the average that takes the replies of the server's round one by one, and frees the memory of their weights.

    Args:
        server: The server; its round has begun.
        samples: Client of the cohort -> the number of samples that it announced.

    Returns:
        The average. None if all replies are needed at the same time: for robust rules, the layer-wise
        exchange, and auxiliary tensors (control variates, momentum). None, too, after a reply in an average has spoilt a round
        (``Server.keeps_replies``).
    """
    phase, policy = Phase(server.record.phase), server.policy
    if server.defence.active or phase is Phase.EXCHANGE or policy.auxiliary or server.keeps_replies:
        return None
    by_samples, compares = policy.client_weights == "samples", server.method.reports(phase) is not StatisticsReport.NOTHING
    return StreamingAverage(
        {client: float(policy.planned(n)) if by_samples else 1.0 for client, n in samples.items()},
        lambda reply: float(reply.weight) if by_samples else 1.0,
        lambda reply, others: server.shared.may_be_refused(reply) or reply.client in server.far([*others, reply], phase),
        FEWEST if compares else 1,
        server.shared.unmoved(phase, server.optimizer, server.rounding) if policy.update == "weights" else None,
    )
