"""Store all that the server needs to go on from a round, in one file that is whole or absent."""

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
    """Hold the state of a run after ``round``.

    Calendar and schedules depend on the round alone. Cohorts, batches and dropout depend on the seed and the
    round. The generators of Python, NumPy and torch are stored for random numbers that a user's own code draws.

    Attributes:
        round: the last round that is in this state.
        run_id: the run.
        arrays: all shared tensors, by state_dict name.
        optimizer: the server optimizer's buffers.
        failed: the number of failed rounds in a row.
        kept: by client, the last round in which it kept tensors of its own.
        history: by file that grows with the run, its length in bytes.
        generators: the generators' states as JSON.
        auxiliary: the tensors that travel beside the weights, by section and name.
        counted: by client, the last round in which its reply changed the model.
        releases: the number of releases that the privacy accountant has counted.
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
        """Write this state to ``path``, in place of the file that was there.

        Raises:
            OSError: the file cannot be written. The old file is unchanged then.
        """
        parts = {part: getattr(self, part) for part in ("arrays", "optimizer", "auxiliary")}
        state = {key: dict(getattr(self, key)) for key in ("kept", "counted", "history")}
        state |= {key: getattr(self, key) for key in ("round", "failed", "releases")}
        about = {"state": json.dumps(state), "run_id": json.dumps(self.run_id.to_config()), "generators": self.generators}
        write(path, parts, about)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a state from ``path``.

        Raises:
            Damaged: the file is not whole, or it is no checkpoint.
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
