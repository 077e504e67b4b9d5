"""Store the state from which the server can continue a run after a round, in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from fl_bn.federation.checkpoint import FORMAT, UNREADABLE, read, write
from fl_bn.flower.wire.run_id import RunId
from fl_bn.support import durable


@dataclass(frozen=True)
class Checkpoint:
    """Hold the state of a run after a round.

    Schedules, cohorts and batches are not part of it, since they depend only on the round and the seed. It has the states
    of the global random generators, since the user's own code may draw random numbers.

    Attributes:
        round: The last complete round.
        run_id: The id of the run.
        arrays: All shared tensors, by their names in the state_dict.
        optimizer: The buffers of the server optimizer.
        failed: The number of rounds in a row, up to ``round``, that failed.
        kept: For each client, the last round in which it kept tensors of its own.
        history: The length in bytes of each file of results, by its name. Every round adds lines to these files.
        generators: The states of the generators of Python, NumPy and torch, as JSON.
        auxiliary: The tensors that are sent beside the weights, such as control variates, by section and name.
        counted: For each client, the last round in which its reply changed the model.
        releases: The number of noisy sums (of updates and of statistics) that the privacy accountant has counted.
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
        """Write this state to the file ``path``, and replace a file that exists.

        Raises:
            OSError: The file cannot be written. An existing file is unchanged then.
        """
        parts = {part: getattr(self, part) for part in ("arrays", "optimizer", "auxiliary")}
        state = {key: dict(getattr(self, key)) for key in ("kept", "counted", "history")}
        state |= {key: getattr(self, key) for key in ("round", "failed", "releases")}
        about = {"state": json.dumps(state), "run_id": json.dumps(self.run_id.to_config()), "generators": self.generators}
        write(path, parts, about)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a state from the file ``path``.

        Raises:
            Damaged: The file is incomplete or damaged, or is not a checkpoint.
        """
        parts, about = read(path)
        try:
            return cls._read(parts, about)
        except UNREADABLE as error:
            raise durable.Damaged(f"{path}: expected {FORMAT}, but cannot read it: {error!r}") from error

    @classmethod
    def _read(cls, parts: Mapping[str, Mapping[str, Tensor]], about: Mapping[str, str]) -> Checkpoint:
        state = json.loads(about["state"])
        if unknown := parts.keys() - {"arrays", "optimizer", "auxiliary"}:
            raise KeyError(*unknown)
        return cls(
            state["round"],
            RunId.of(json.loads(about["run_id"])),
            parts.get("arrays", {}),
            parts.get("optimizer", {}),
            state["failed"],
            {int(client): round for client, round in state["kept"].items()},
            state["history"],
            about["generators"],
            parts.get("auxiliary", {}),
            {int(client): round for client, round in state["counted"].items()},
            state["releases"],
        )
