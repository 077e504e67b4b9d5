"""Store all that the server needs to go on from a round, in one file that is whole or absent."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_bn.flower.wire.run_id import RunId
from fl_bn.support import durable

FORMAT = "fl-bn checkpoint/1"


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
        tensors = {f"arrays/{name}": tensor for name, tensor in self.arrays.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in self.optimizer.items()}
        tensors |= {f"auxiliary/{name}": tensor for name, tensor in self.auxiliary.items()}
        state = {key: dict(getattr(self, key)) for key in ("kept", "counted", "history")}
        state |= {key: getattr(self, key) for key in ("round", "failed", "releases")}
        run_id = self.run_id.to_config()
        about = {"format": FORMAT, "state": json.dumps(state), "run_id": json.dumps(run_id), "generators": self.generators}
        durable.save_tensors(path, tensors, about)

    @classmethod
    def load(cls, path: Path) -> Checkpoint:
        """Read a state from ``path``.

        Raises:
            Damaged: the file is not whole, or it is no checkpoint.
        """
        tensors, about = durable.load_tensors(path)
        if about.get("format") != FORMAT:
            raise durable.Damaged(f"{path}: expected {FORMAT}, but got {about.get('format', 'a file without a format')!r}")
        try:
            return cls._read(tensors, about)
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise durable.Damaged(f"{path}: expected {FORMAT}, but cannot read it: {error!r}") from error

    @classmethod
    def _read(cls, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> Checkpoint:
        state = json.loads(about["state"])
        parts: dict[str, dict[str, Tensor]] = {"arrays": {}, "optimizer": {}, "auxiliary": {}}
        for name, tensor in tensors.items():
            part, _, key = name.partition("/")
            parts[part][key] = tensor
        return cls(
            state["round"],
            RunId.of(json.loads(about["run_id"])),
            parts["arrays"],
            parts["optimizer"],
            state["failed"],
            {int(client): round for client, round in state["kept"].items()},
            state["history"],
            about["generators"],
            parts["auxiliary"],
            {int(client): round for client, round in state["counted"].items()},
            state["releases"],
        )


def generators() -> str:
    """Return the states of the global generators of Python, NumPy and torch, as JSON."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, state, gauss = random.getstate()
    return json.dumps(
        {
            "python": [version, list(state), gauss],
            "numpy": [name, np.asarray(keys).tolist(), *rest],
            "torch": torch.get_rng_state().tolist(),
        }
    )


def set_generators(states: str) -> None:
    """Set the global generators to ``states``, as ``generators`` returned them; an empty text changes nothing."""
    if not states:
        return
    loaded = json.loads(states)
    version, state, gauss = loaded["python"]
    random.setstate((version, tuple(state), gauss))
    name, keys, *rest = loaded["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(loaded["torch"], dtype=torch.uint8))
