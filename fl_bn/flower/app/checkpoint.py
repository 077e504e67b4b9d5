"""Store the state from which the server can continue a run after a round, in one file."""

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
    """Hold the state of a run after a round.

    It needs no schedules, cohorts or batches, since these depend only on the round and the seed. It has the states of
    the global random generators for the case that the user's own code draws random numbers.

    Attributes:
        round: The last complete round.
        run_id: The id of the run.
        arrays: All shared tensors, by their names in the state_dict.
        optimizer: The buffers of the server optimizer.
        failed: The number of failed rounds in a row.
        kept: For each client, the last round in which it kept tensors of its own.
        history: For each file that grows with the run, its length in bytes.
        generators: The states of the generators of Python, NumPy and torch, as JSON.
        auxiliary: The tensors that travel beside the weights, by section and name.
        counted: For each client, the last round in which its reply changed the model.
        releases: The number of releases that the privacy accountant has counted.
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
        """Read a state from the file ``path``.

        Raises:
            Damaged: The file is incomplete or damaged, or is not a checkpoint.
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
    """Return the states of the global random generators of Python, NumPy and torch, as JSON."""
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
    """Set the global random generators to the states that ``generators`` returned. An empty text changes nothing."""
    if not states:
        return
    loaded = json.loads(states)
    version, state, gauss = loaded["python"]
    random.setstate((version, tuple(state), gauss))
    name, keys, *rest = loaded["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(loaded["torch"], dtype=torch.uint8))
