"""Write the checkpoints of a run, restore one, and find clients that lost or lack their tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Message
from torch import Tensor

from fl_bn.federation.checkpoint import FORMAT, UNREADABLE, generators, read, set_generators, write
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.schema import START
from fl_bn.federation.shared_model import SharedModel
from fl_bn.federation.values import Named, Reply, nbytes, to_numpy
from fl_bn.flower.compat import log
from fl_bn.flower.population import Client, RunFailed
from fl_bn.flower.wire.codec import tensors_of, to_record
from fl_bn.flower.wire.messages import OURS, RunId, add_to_config
from fl_bn.secure.privacy import Accountant
from fl_bn.support import durable
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import printable


@dataclass(frozen=True)
class Checkpoint:
    """Hold the state of a run after a round.

    Schedules, cohorts and batches depend only on the round and the seed, so they are not part of it.
    The user's own code may draw from the global random generators, so it has their states.

    Attributes:
        round: The last complete round.
        arrays: All shared tensors, by their names in the state_dict.
        optimizer: The buffers of the server optimizer.
        failed: The number of rounds in a row, up to ``round``, that failed.
        kept: For each client, the last round in which it kept tensors of its own.
        history: The length in bytes of each file of results, to which every round adds lines, by its name.
        generators: The states of the generators of Python, NumPy and torch, as JSON.
        auxiliary: The tensors that are sent beside the weights (control variates), by section and name.
        counted: For each client, the last round in which its reply changed the model.
        releases: The number of noisy sums that the privacy accountant has counted.
    """

    round: int
    run_id: RunId
    arrays: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    failed: int = 0
    kept: Mapping[int, int] = field(default_factory=dict)
    history: Mapping[str, int] = field(default_factory=dict)
    generators: str = ""
    auxiliary: Mapping[str, Tensor] = field(default_factory=dict)
    counted: Mapping[int, int] = field(default_factory=dict)
    releases: int = 0

    def save(self, path: Path) -> None:
        """Write this state to the file ``path``. If that fails (``OSError``), an old file stays."""
        parts = {part: getattr(self, part) for part in ("arrays", "optimizer", "auxiliary")}
        state = {key: dict(getattr(self, key)) for key in ("kept", "counted", "history")}
        state |= {key: getattr(self, key) for key in ("round", "failed", "releases")}
        about = {"state": json.dumps(state), "run_id": json.dumps(self.run_id.to_config()), "generators": self.generators}
        write(path, parts, about)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a state from the file ``path``, or raise ``Damaged`` if it is not a whole checkpoint."""
        parts, about = read(path)
        try:
            state = json.loads(about["state"])
            state |= {key: {int(client): round for client, round in state[key].items()} for key in ("kept", "counted")}
            stored: dict[str, Any] = {"arrays": {}, "optimizer": {}, **parts, **state}
            return cls(run_id=RunId.of(json.loads(about["run_id"])), generators=about["generators"], **stored)
        except UNREADABLE as error:
            raise durable.Damaged(f"{path}: expected {FORMAT}, but cannot read it: {error!r}") from error


class Recovery:
    """Write a run's checkpoints, and remember in which rounds its clients kept tensors of their own.

    Args:
        every: The number of rounds between two checkpoints; 0: none are written. The last round has none,
            since its results are written anyway.
        store: Stores a checkpoint, and returns the oldest round to which the run can go back.
        accountant: Counts the privacy budget; None: no noise is added.
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

    def after_round(self, round: int, rounds: int, tensors: Named, shared: SharedModel, optimizer: ServerOptimizer, failed: int) -> None:
        """Store a checkpoint after a round, if one is due. ``failed`` rounds in a row have failed."""
        if self._store is None or not self._every:
            self.run_id = replace(self.run_id, durable=round)
        elif round % self._every == 0 and round < rounds:
            state = Checkpoint(
                round,
                self.run_id,
                tensors,
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
        """Return whether a client keeps tensors of its own, from rounds that no resume has undone."""
        return client in self._kept

    def tell(self, messages: list[Message], clients: Sequence[Client]) -> list[Message]:
        """Add to each client's message the last round in which its reply changed the model."""
        for message, client in zip(messages, clients, strict=True):
            add_to_config(message.content, {"counted": self._counted.get(client.index, 0)})
        return messages

    def count(self, round: int, replies: Sequence[Reply]) -> None:
        """Record that the replies in ``replies`` changed the model in ``round``."""
        self._counted |= dict.fromkeys((part.client for part in replies), round)

    def go_back(self, checkpoint: Checkpoint, rounds: int, shared: SharedModel, optimizer: ServerOptimizer) -> None:
        """Restore a checkpoint in place, or raise ``RunFailed`` if it does not fit, or no round is left."""
        if checkpoint.round >= rounds:
            raise RunFailed(f"there is nothing to resume after round {checkpoint.round}: the run has only {rounds} rounds")
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
        """Log a warning for each client that started from older tensors than those that it kept last."""
        for part in replies:
            if "kept" not in part.metrics:
                continue
            index, kept, known = part.client, int(part.metrics["kept"]), self._kept.get(part.client, 0)
            if kept < known:
                line = "round %s: %s kept tensors in round %s, but started from %s: state-dir in the node config keeps them in files"
                log(logging.WARNING, line, round, self._called.client(index), known, f"those of round {kept}" if kept else "none")
            self._kept[index] = round


class Starts:
    """Send clients the initial values of the tensors that stay at the clients, in one run.

    In a user's own Flower app, a client builds a new network with initial weights of its own. In fl-bn's
    application the values are sent only if a run does not start from its model (``begin_with``).
    """

    def __init__(self, shared: SharedModel, sends: bool = False) -> None:
        self._shared, self._sends = shared, sends
        self._bytes: dict[int, int] = {}  # client -> the bytes of the initial values that it got in this round

    def begin_with(self, arrays: ArrayRecord) -> None:
        """Let the run start from ``arrays``, by state_dict name, and send clients their initial values."""
        own, tensors = self._shared.model.state_dict(), tensors_of(arrays)
        for name in {**tensors, **self._shared.tensors()}:
            given, here = (str(tuple(one[name].shape)) if name in one else "nothing" for one in (tensors, own))
            if given != here:
                raise ValueError(f"initial_arrays: expected shape {here} of {printable(name)}, but got {given}: give net.state_dict()")
        self._shared.load(tensors)
        self._sends = True

    def add(self, messages: Sequence[Message], clients: Sequence[Client], keeps: Callable[[int], bool]) -> None:
        """Add the initial values to the messages for clients for which ``keeps`` is false."""
        start = self._shared.start() if self._sends else {}
        self._bytes = {client.index: nbytes(start) for client in clients if start and not keeps(client.index)}
        for message, client in zip(messages, clients, strict=True):
            if client.index in self._bytes:
                message.content[OURS + START] = to_record(to_numpy(start[START]))

    def counted(self, record: RoundRecord) -> RoundRecord:
        """Return ``record`` with the bytes of this round's initial values added."""
        if not self._bytes:
            return record
        down = {**record.bytes_down, START: max(self._bytes.values())}
        clients = [replace(c, bytes_down=c.bytes_down + self._bytes.get(c.client, 0)) for c in record.clients]
        return replace(record, bytes_down=down, clients=clients)
