"""How a run reaches its clients: the one thing that engines and networks do differently."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fl_bn.federation.payload import Named
from fl_bn.federation.server import Server
from fl_bn.federation.values import Instruction, RoundReplies


class Transport(ABC):
    """Take instructions to clients, and bring their replies back.

    ``run`` asks for rounds, statistics and evaluations; a transport only carries. Write ``train``, ``measure`` and ``evaluate``; the other
    methods have a default.
    """

    server: Server

    @abstractmethod
    def train(self, instruction: Instruction) -> RoundReplies:
        """Have the round's cohort train as instructed, and return its checked replies."""

    @abstractmethod
    def measure(self, instruction: Instruction) -> RoundReplies:
        """Have clients measure statistics as instructed, in one forward pass, and return their checked replies."""

    @abstractmethod
    def evaluate(self, number: int, tensors: Named) -> dict[str, float]:
        """Return metrics of the shared ``tensors`` after round ``number``, by name; none where there is nothing to evaluate on."""

    def measure_layer_by_layer(self, instruction: Instruction) -> RoundReplies | None:
        """Have clients measure all layers exactly in one pass that goes layer by layer; None where this transport cannot."""
        return None

    def round(self, number: int) -> bool:
        """Carry out round ``number`` of training, and return whether it changed the model."""
        return self.server.conclude(self.train(self.server.begin(number)))

    def store(self, instruction: Instruction, replies: RoundReplies) -> RoundReplies:
        """Store the measured statistics in the server, and return the replies that count."""
        parts, refused = self.server.store(replies, instruction.measured)
        return replies.only(parts, refused)

    def finish_round(self, number: int, changed: bool) -> None:
        """Do what follows round ``number`` before its record is complete; nothing by default."""
        return
