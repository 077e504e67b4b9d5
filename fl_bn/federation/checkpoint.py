"""Store the state of a run in one file. A crash never leaves an incomplete file.

The format is safetensors, with JSON in the metadata. Loading it cannot run code.
``FederationState`` and ``flower.recovery.Checkpoint`` list what is stored.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_bn.federation.aggregation import Drift
from fl_bn.federation.record import ClientRecord, Disclosure, RoundRecord
from fl_bn.federation.values import ClientState
from fl_bn.support import durable

FORMAT = "fl-bn checkpoint/1"
Parts = Mapping[str, Mapping[str, Tensor]]
PLAIN = ("round", "rounds", "failed", "decides")
"""The fields of ``FederationState`` that are numbers and texts."""
TENSORS = ("arrays", "evaluated", "optimizer", "auxiliary")
"""Its fields that are tensors by name."""
UNREADABLE = (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError)


def write(path: Path, parts: Parts, about: Mapping[str, str]) -> None:
    """Write a checkpoint. An earlier one at ``path`` stays after an ``OSError``.

    ``parts`` is part (a name without slash) -> name -> tensor. ``about`` has texts
    for the metadata.
    """
    tensors = {f"{part}/{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
    durable.save_tensors(path, tensors, {"format": FORMAT, **about})


def read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Read a checkpoint. Return part -> name -> tensor, and the texts by name.

    Raises:
        Damaged: The file is incomplete, or it is no checkpoint.
    """
    tensors, about = durable.load_tensors(path)
    if about.get("format") != FORMAT:
        raise durable.Damaged(f"{path}: expected the format {FORMAT!r}, but got {about.get('format', 'a file without a format')!r}")
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, key = name.partition("/")
        parts.setdefault(part, {})[key] = tensor
    return parts, dict(about)


def generators() -> str:
    """Return the states of the generators of Python, NumPy and torch (CPU), as JSON."""
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
    """Set these generators to ``states``. Empty: change nothing."""
    if not states:
        return
    loaded = json.loads(states)
    version, state, gauss = loaded["python"]
    random.setstate((version, tuple(state), gauss))
    name, keys, *rest = loaded["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(loaded["torch"], dtype=torch.uint8))


@dataclass(frozen=True)
class FederationState:
    """Hold the state of a ``Federation`` after a round.

    Attributes:
        decides: The settings that a continuing federation must share, as text by
            name.
        evaluated: Name -> shared tensor as evaluated last.
        auxiliary: ``section/name`` -> auxiliary tensor.
        loaders: Per client, the states of its loader's generators
            (``local.generators``).
    """

    round: int
    rounds: int
    failed: int
    decides: Mapping[str, str]
    arrays: Mapping[str, Tensor]
    evaluated: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    auxiliary: Mapping[str, Tensor]
    clients: Sequence[ClientState]
    loaders: Sequence[Sequence[Tensor]]
    history: Sequence[RoundRecord]
    generators: str

    def save(self, path: Path) -> None:
        """Write this state to ``path``, see ``write``."""
        named = {
            f"{client}/{section}/{name}": tensor
            for client, kept in enumerate(self.clients)
            for section, own in kept.sections.items()
            for name, tensor in own.items()
        }
        loaders = {f"{client}/{n}": state for client, own in enumerate(self.loaders) for n, state in enumerate(own)}
        parts = {name: getattr(self, name) for name in TENSORS} | {"clients": named, "loaders": loaders}
        state = {name: getattr(self, name) for name in PLAIN} | {
            "clients": [[kept.round, kept.counted, list(kept.sections)] for kept in self.clients],
            "history": [asdict(record) for record in self.history],
        }
        write(path, parts, {"federation": json.dumps(state), "generators": self.generators})

    @classmethod
    def load(cls, path: Path) -> FederationState:
        """Read a state from ``path``.

        Raises:
            Damaged: The file is incomplete, or it is no checkpoint of a
                ``Federation``.
        """
        parts, about = read(path)
        if "federation" not in about:
            raise durable.Damaged(f"{path}: expected a checkpoint of a Federation, but this is a checkpoint of fl-bn run: use fl-bn resume")
        try:
            return cls._read(parts, about)
        except UNREADABLE as error:
            raise durable.Damaged(f"{path}: expected a checkpoint of a Federation, but the file cannot be read: {error!r}") from error

    @classmethod
    def _read(cls, parts: Mapping[str, dict[str, Tensor]], about: Mapping[str, str]) -> FederationState:
        state = json.loads(about["federation"])
        sections: list[dict[str, dict[str, Tensor]]] = [{name: {} for name in names} for _, _, names in state["clients"]]
        for path, tensor in parts.get("clients", {}).items():
            client, section, name = path.split("/", 2)
            sections[int(client)][section][name] = tensor
        loaders: list[list[Tensor]] = [[] for _ in sections]
        for path, tensor in sorted(parts.get("loaders", {}).items(), key=lambda one: [int(part) for part in one[0].split("/")]):
            loaders[int(path.partition("/")[0])].append(tensor)
        kept = [ClientState(round, own, counted) for (round, counted, _), own in zip(state["clients"], sections, strict=True)]
        plain = {name: state[name] for name in PLAIN} | {name: parts.get(name, {}) for name in TENSORS}
        history = [_record(record) for record in state["history"]]
        return cls(**plain, clients=kept, loaders=loaders, history=history, generators=about["generators"])


def _record(saved: dict[str, Any]) -> RoundRecord:
    return RoundRecord(
        **{
            **saved,
            "clients": [ClientRecord(**client) for client in saved["clients"]],
            "drift": None if saved["drift"] is None else Drift(**saved["drift"]),
            "client_evaluation": {int(client): metrics for client, metrics in saved["client_evaluation"].items()},
            "disclosures": [Disclosure(**one) for one in saved["disclosures"]],
        }
    )


def check_same(path: object, saved: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Raise ValueError unless ``saved`` settings, as far as there are some, are ``mine``."""
    for name, ours in mine.items():
        if (theirs := saved.get(name, ours)) != ours:
            raise ValueError(f"{path} is of another federation: {name} was {theirs} there, but is {ours} here: give the same arguments")
