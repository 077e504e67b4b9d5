"""Write the checkpoints of a run, and restore one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_bn.federation.checkpoint import FORMAT, UNREADABLE, generators, read, set_generators, write
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.shared_model import SharedModel
from fl_bn.federation.values import Named
from fl_bn.flower.compat import log
from fl_bn.flower.population import KeptTensors, RunFailed
from fl_bn.flower.wire.codec import RunId
from fl_bn.secure.privacy import Accountant
from fl_bn.support import durable


@dataclass(frozen=True)
class Checkpoint:
    """Hold the state of a run after a round.

    Schedules, cohorts and batches depend only on the round and the seed.

    Attributes:
        round: The last complete round.
        optimizer: The buffers of the server optimizer.
        failed: The number of rounds in a row, up to ``round``, that failed.
        kept: For each client, the last round in which it kept tensors of its own.
        history: The length in bytes of each file of results, by name.
        generators: The states of Python's, NumPy's and torch's generators, as JSON,
            for the user's code.
        auxiliary: The tensors beside the weights (control variates), by section and
            name.
        counted: For each client, the last round in which its reply changed the
            model.
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
        """Write this state to a file. If that fails (``OSError``), an old file stays."""
        parts = {part: getattr(self, part) for part in ("arrays", "optimizer", "auxiliary")}
        state = {key: dict(getattr(self, key)) for key in ("kept", "counted", "history")}
        state |= {key: getattr(self, key) for key in ("round", "failed", "releases")}
        about = {"state": json.dumps(state), "run_id": json.dumps(self.run_id.to_config()), "generators": self.generators}
        write(path, parts, about)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a state, or raise ``Damaged`` if the file is no whole checkpoint."""
        parts, about = read(path)
        try:
            state = json.loads(about["state"])
            state |= {key: {int(client): round for client, round in state[key].items()} for key in ("kept", "counted")}
            stored: dict[str, Any] = {"arrays": {}, "optimizer": {}, **parts, **state}
            return cls(run_id=RunId.of(json.loads(about["run_id"])), generators=about["generators"], **stored)
        except UNREADABLE as error:
            raise durable.Damaged(f"{path}: expected {FORMAT}, but cannot read it: {error!r}") from error


class Recovery:
    """Write a run's checkpoints, and go back to one.

    One is due after ``every`` rounds, but not after the last; 0: never. ``store``
    returns the oldest round to which the run can go back.
    """

    def __init__(
        self,
        name: str,
        kept: KeptTensors,
        every: int = 0,
        store: Callable[[Checkpoint], int] | None = None,
        accountant: Accountant | None = None,
    ) -> None:
        self.run_id, self._kept, self._accountant = RunId.new(name), kept, accountant
        self._every, self._store = every if store else 0, store

    def after_round(self, round: int, rounds: int, tensors: Named, shared: SharedModel, optimizer: ServerOptimizer, failed: int) -> None:
        """Store a checkpoint, if one is due. ``failed`` rounds in a row have failed."""
        if self._store is None or not self._every:
            self.run_id = replace(self.run_id, durable=round)
        elif round % self._every == 0 and round < rounds:
            state = Checkpoint(
                round,
                self.run_id,
                tensors,
                optimizer.buffers(),
                failed,
                dict(self._kept.rounds),
                generators=generators(),
                auxiliary=shared.auxiliary_tensors(),
                counted=dict(self._kept.counted),
                releases=0 if self._accountant is None else self._accountant.releases,
            )
            self.run_id = replace(self.run_id, durable=self._store(state))

    def go_back(self, checkpoint: Checkpoint, rounds: int, shared: SharedModel, optimizer: ServerOptimizer) -> None:
        """Restore a checkpoint in place. ``RunFailed``: it does not fit, or no round is left."""
        if checkpoint.round >= rounds:
            raise RunFailed(f"there is nothing to resume after round {checkpoint.round}: the run has only {rounds} rounds")
        try:
            shared.restore(checkpoint.arrays, checkpoint.auxiliary)
        except ValueError as error:
            raise RunFailed(f"the checkpoint is not of this model and method: {error}") from error
        self.run_id = checkpoint.run_id.resumed(checkpoint.round)
        self._kept.rounds, self._kept.counted = dict(checkpoint.kept), dict(checkpoint.counted)
        if self._accountant is not None:
            self._accountant.at_least(checkpoint.releases)
        optimizer.restore(checkpoint.optimizer)
        set_generators(checkpoint.generators)
        log(logging.INFO, "going on after round %s of %s", checkpoint.round, rounds)
