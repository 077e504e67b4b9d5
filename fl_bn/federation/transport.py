"""Define how a run reaches its clients: in this process, by Flower, or your own way."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fl_bn.federation.defence import TooFew
from fl_bn.federation.server import Server
from fl_bn.federation.values import Instruction, Named, RoundReplies


class Transport(ABC):
    """Take instructions to clients, and bring their replies back.

    ``federation.run`` decides when clients train, measure and evaluate. A subclass must define ``train``,
    ``measure`` and ``evaluate``. The other methods have a default. An example is
    tests/extension/threads_transport.py.

    Attributes:
        server: The server of the run. Set it in the constructor.
    """

    server: Server

    @abstractmethod
    def train(self, instruction: Instruction) -> RoundReplies:
        """Let the clients of the round's cohort train, and return their checked replies."""

    @abstractmethod
    def measure(self, instruction: Instruction) -> RoundReplies:
        """Let clients measure all layers in one forward pass. Return their checked replies."""

    @abstractmethod
    def evaluate(self, number: int, tensors: Named) -> dict[str, float]:
        """Evaluate shared ``tensors`` after round ``number``. Return metrics, empty without data."""

    def measure_layer_by_layer(self, instruction: Instruction) -> RoundReplies | None:
        """Let clients measure all layers exactly, layer by layer. Return checked replies.

        None, the default: this transport has no exchange that goes layer by layer.
        """
        return None

    def conclude(self, replies: RoundReplies) -> bool:
        """Combine the ``replies`` of ``train``, and return whether this changed the model."""
        return self.server.conclude(replies)

    def store(self, instruction: Instruction, replies: RoundReplies) -> None:
        """Store measured statistics, from checked ``replies``, in the server.

        Raises:
            TooFew: There is no reply, or there are fewer than the defence needs. The statistics stay unchanged.
            NotFinite: A combined statistic is not finite. The statistics stay unchanged.
        """
        server, parts = self.server, replies.parts
        if not parts:
            raise TooFew("there is no reply to combine")
        server.shared.store(server.shared.measured(parts, server.defence_of(parts, len(replies.wrong)), instruction.measured))

    def finish_round(self, number: int, changed: bool) -> None:
        """Do what is needed at the end of round ``number``, before its record is complete.

        ``changed`` is whether the round changed the model.
        """
        return
