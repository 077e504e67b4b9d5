"""Store the state of a run in one file. A crash never leaves an incomplete file.

The format is safetensors, with JSON in the metadata. Loading such a file cannot run code. Runs over Flower and
``Federation`` both use this format. ``flower.recovery.Checkpoint`` and ``FederationState`` list what each of them stores.
A checkpoint describes as text what decides the results of its run, so that it can tell whether a federation continues it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_bn.federation.aggregation import Drift
from fl_bn.federation.record import ClientRecord, Disclosure, RoundRecord
from fl_bn.federation.values import ClientState
from fl_bn.methods import Method
from fl_bn.support import durable

CALENDAR = "calendar"
IN_WORDS = {CALENDAR: "calendar (a hash of all phases and learning rates)"}
FORMAT = "fl-bn checkpoint/1"
Parts = Mapping[str, Mapping[str, Tensor]]
PLAIN = ("round", "rounds", "failed", "decides")
"""The fields of ``FederationState`` that are numbers and texts."""
TENSORS = ("arrays", "evaluated", "optimizer", "auxiliary")
"""Its fields that are tensors by name."""
UNREADABLE = (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError)


def write(path: Path, parts: Parts, about: Mapping[str, str]) -> None:
    """Write a checkpoint to ``path``, in place of the file that was there.

    Args:
        path: The file.
        parts: Part -> name -> tensor. A part is a group of tensors; its name has no slash.
        about: Texts by name, for the file's metadata.

    Raises:
        OSError: The file cannot be written. An older file at ``path`` is then unchanged.
    """
    tensors = {f"{part}/{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
    durable.save_tensors(path, tensors, {"format": FORMAT, **about})


def read(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, str]]:
    """Read a checkpoint.

    Returns:
        Part -> name -> tensor, and the texts by name.

    Raises:
        Damaged: The file is incomplete, or it is no checkpoint.
        OSError: The file cannot be read.
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
    """Return the states of the global generators of Python, NumPy and torch (on the CPU), as JSON."""
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
    """Set the global generators of Python, NumPy and torch to ``states``, a result of ``generators``. Empty: change nothing."""
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
        round: The last finished round.
        rounds: The number of rounds of the run.
        failed: The number of failed rounds in a row up to this round.
        decides: Name -> value, as text, of every setting that determines the run's results. A federation that
            continues the run must have the same values.
        arrays: Name -> shared tensor.
        evaluated: Name -> shared tensor of the model that was evaluated last.
        optimizer: The buffers of the server's optimiser.
        auxiliary: ``section/name`` -> auxiliary tensor.
        clients: The state that each client keeps, in order.
        loaders: For each client, the states of its loader's generators, in the order of ``local.generators``.
        history: The records of all rounds so far.
        generators: The states of the global generators, see ``generators``.
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
        """Write this state to ``path``, in place of the file that was there.

        Raises:
            OSError: The file cannot be written. An older file at ``path`` is then unchanged.
        """
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
            Damaged: The file is incomplete, or it is no checkpoint of a ``Federation``.
            OSError: The file cannot be read.
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
    """Rebuild a record from ``saved`` fields, which were read from JSON."""
    return RoundRecord(
        **{
            **saved,
            "clients": [ClientRecord(**client) for client in saved["clients"]],
            "drift": None if saved["drift"] is None else Drift(**saved["drift"]),
            "client_evaluation": {int(client): metrics for client, metrics in saved["client_evaluation"].items()},
            "disclosures": [Disclosure(**one) for one in saved["disclosures"]],
        }
    )


def described(value: Any) -> str:
    """Return ``value`` as text that is the same in every process.

    A function has its name, and the arguments that ``partial`` gives it. A value without a text of its own has its type's name.

    >>> from functools import partial
    >>> described([1, partial(round, ndigits=2)])
    '[1, round(ndigits=2)]'
    """
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real):  # equal numbers have the same text: 1 and 1.0, 0.1 and numpy.float64(0.1)
        number = float(value)
        return repr(int(number) if number.is_integer() else number)
    if isinstance(value, Tensor):
        return described(value.tolist())
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {described(one)}' for key, one in value.items())}}}"
    if isinstance(value, Collection):
        parts = [described(one) for one in value]
        return f"[{', '.join(parts if isinstance(value, Sequence) else sorted(parts))}]"
    if is_dataclass(value) and not isinstance(value, type):
        return _call(type(value).__name__, [], {one.name: getattr(value, one.name) for one in fields(value)})
    if isinstance(value, partial):
        return _call(described(value.func), value.args, value.keywords)
    return str(getattr(value, "__qualname__", type(value).__name__))


def of_method(method: Method) -> dict[str, str]:
    """Return name -> text of every part of a method, for the options with which it was made."""
    return {f"the method's {one.name}": described(getattr(method, one.name)) for one in fields(method) if one.name != "name"}


def of_optimizer(optimizer: Optimizer) -> str:
    """Return the kind of an optimiser and the settings of its groups of parameters.

    Settings that are off (None or False) are left out, because other versions of torch have other such settings.
    """
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names") and value is not None and value is not False}
        for group in optimizer.param_groups
    ]
    return " + ".join(dict.fromkeys(_call(type(optimizer).__name__, [], group) for group in groups))


def check_same(path: object, saved: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Check that a federation has the settings of the run in a checkpoint.

    Args:
        path: The checkpoint.
        saved: Name -> text of the settings in the checkpoint. What an older fl-bn did not save is not checked.
        mine: Name -> text of the federation's own settings.

    Raises:
        ValueError: A setting differs. The message has both values.
    """
    for name, ours in mine.items():
        if (theirs := saved.get(name, ours)) != ours:
            raise ValueError(
                f"{path} is of another federation: {IN_WORDS.get(name, name)} was {theirs} there, but is {ours} here: make the federation "
                "with the same arguments"
            )


def _call(name: str, given: Sequence[Any], named: Mapping[str, Any]) -> str:
    parts = [*map(described, given), *(f"{key}={described(value)}" for key, value in sorted(named.items()))]
    return f"{name}({', '.join(parts)})"
