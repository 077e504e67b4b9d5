"""Write the checkpoints of a run, restore one after the server has died, and find clients that lost their tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, Message

from fl_bn.federation.checkpoint import generators, set_generators
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.shared_model import SharedModel
from fl_bn.federation.values import Reply
from fl_bn.flower.app.checkpoint import Checkpoint
from fl_bn.flower.log import log
from fl_bn.flower.population import Client, RunFailed
from fl_bn.flower.wire.codec import tensors_of
from fl_bn.flower.wire.fields import add_to_config
from fl_bn.flower.wire.run_id import RunId
from fl_bn.secure.privacy import Accountant
from fl_bn.support.client_names import UNNAMED, ClientNames


class Recovery:
    """Write the checkpoints of one run, and remember in which rounds its clients kept tensors of their own.

    Args:
        name: The name of the run.
        every: The number of rounds between two checkpoints; 0: none are written. The last round has no checkpoint,
            since its results are written anyway.
        store: Stores a checkpoint, and returns the oldest round to which the run can go back; None: no checkpoints.
        accountant: Counts the privacy budget; None: no noise is added.
        called: The names of the clients in the log.
    """

    def __init__(
        self,
        name: str,
        every: int = 0,
        store: Callable[[Checkpoint], int] | None = None,
        accountant: Accountant | None = None,
        called: ClientNames = UNNAMED,
    ) -> None:
        self.run_id, self._accountant, self._called = RunId.new(name), accountant, called
        self._every, self._store = every if store else 0, store
        self._kept: dict[int, int] = {}  # the round in which each client last kept tensors of its own
        self._counted: dict[int, int] = {}  # the last round in which the reply of each client changed the model

    def after_round(
        self, round: int, rounds: int, arrays: ArrayRecord, shared: SharedModel, optimizer: ServerOptimizer, failed: int
    ) -> None:
        """Store a checkpoint after a round, if one is due.

        Args:
            round: The number of the round.
            rounds: The number of rounds of the run.
            arrays: The shared tensors.
            shared: The shared model, with its auxiliary tensors.
            optimizer: The server optimizer.
            failed: The number of failed rounds in a row.
        """
        if self._store is None or not self._every:
            self.run_id = replace(self.run_id, durable=round)
        elif round % self._every == 0 and round < rounds:
            state = Checkpoint(
                round,
                self.run_id,
                tensors_of(arrays),
                optimizer.buffers(),
                failed,
                dict(self._kept),
                generators=generators(),
                auxiliary=shared.auxiliary_tensors(),
                counted=dict(self._counted),
                releases=0 if self._accountant is None else self._accountant.releases,
            )
            self.run_id = replace(self.run_id, durable=self._store(state))

    def keeps(self, client: int) -> bool:
        """Return whether a client keeps tensors of its own. Tensors from a round that a resume has undone do not count."""
        return client in self._kept

    def tell(self, messages: list[Message], clients: Sequence[Client]) -> list[Message]:
        """Add to each message the last round in which its client's reply changed the model; 0 if there is none.

        Args:
            messages: The messages, one for each client. They are changed in place.
            clients: The clients, in the same order.

        Returns:
            ``messages``.
        """
        for message, client in zip(messages, clients, strict=True):
            add_to_config(message.content, {"counted": self._counted.get(client.index, 0)})
        return messages

    def count(self, round: int, replies: Sequence[Reply]) -> None:
        """Record that the replies in ``replies`` changed the model in ``round``."""
        self._counted |= dict.fromkeys((part.client for part in replies), round)

    def go_back(self, checkpoint: Checkpoint, rounds: int, shared: SharedModel, optimizer: ServerOptimizer) -> None:
        """Restore the state of a checkpoint.

        Args:
            checkpoint: The checkpoint.
            rounds: The number of rounds of the run.
            shared: The shared model, which is changed in place.
            optimizer: The server optimizer, which is changed in place.

        Raises:
            RunFailed: The checkpoint is of another model or method, or the run has no rounds after it.
        """
        if checkpoint.round >= rounds:
            raise RunFailed(
                f"there is nothing to resume: the checkpoint is of round {checkpoint.round}, and the run has only {rounds} rounds: "
                "raise the number of rounds"
            )
        try:
            shared.restore(checkpoint.arrays, checkpoint.auxiliary)
        except ValueError as error:
            raise RunFailed(f"the checkpoint is not of this model and method: {error}") from error
        self.run_id, self._kept = checkpoint.run_id.resumed(checkpoint.round), dict(checkpoint.kept)
        self._counted = dict(checkpoint.counted)
        if self._accountant is not None:
            self._accountant.at_least(checkpoint.releases)
        optimizer.restore(checkpoint.optimizer)
        set_generators(checkpoint.generators)
        log(logging.INFO, "going on after round %s of %s", checkpoint.round, rounds)

    def check(self, round: int, replies: Sequence[Reply]) -> None:
        """Log a warning for each client that did not start from the tensors that it had kept last, but from older ones.

        Args:
            round: The number of the round.
            replies: The replies of the round.
        """
        for part in replies:
            if "kept" not in part.metrics:
                continue
            index, kept, known = part.client, int(part.metrics["kept"]), self._kept.get(part.client, 0)
            if kept < known:
                tensors = f"those of round {kept}" if kept else "none"
                advice = "the later ones were lost with its process or disk (state-dir in the node config keeps them in files)"
                log(
                    logging.WARNING,
                    "round %s: %s kept tensors in round %s, but started from %s: %s",
                    round,
                    self._called.client(index),
                    known,
                    tensors,
                    advice,
                )
            self._kept[index] = round
