"""Keep the tensors of a client between its rounds, in Flower's ``context.state`` or in files.

The tensors are those that stay at the client, and the optimizer's momentum. ``context.state``
is in the memory of the simulation or of the SuperNode. Files survive the end of both. In a
resumed run, each client reads from its files the state of the round to which the run goes back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fl_bn.federation.payload import to_numpy, to_tensors
from fl_bn.federation.values import NOTHING, ClientState
from fl_bn.flower.compat import log
from fl_bn.flower.wire.codec import to_record
from fl_bn.flower.wire.messages import OURS, RunId, our_records
from fl_bn.support import durable

Sections = Mapping[str, Mapping[str, Tensor]]


OWNER = f"{OURS}kept-for"  # the record that says to which run, model and method the tensors belong
PREVIOUS = "previous/"  # prefix for the sections of the state before the newest one


class MemoryState:
    """Store the newest state of a client, and the one before it, in Flower's ``context.state``.

    The older state is needed when a client gets the message of the newest round again. Tensors
    of another ``signature`` (of model and method) or of another ``run`` are not used. An empty
    ``run``: those of any run are.
    """

    def __init__(self, state: RecordDict, signature: str, run: str = "") -> None:
        self._state, self._signature, self._run = state, signature, run

    def read(self, before: int) -> ClientState:
        """Return the newest state from a round before ``before``; ``NOTHING`` if this store has none."""
        owner: Any = self._state.get(OWNER, {})
        if owner.get("signature") != self._signature or (self._run and owner["run"] not in ("", self._run)):
            return NOTHING
        for prefix in ("", PREVIOUS):
            if 0 < (round := owner[f"{prefix}round"]) < before:
                records = {
                    name.removeprefix(PREVIOUS): r
                    for name, r in our_records(self._state, ArrayRecord).items()
                    if name.startswith(PREVIOUS) == bool(prefix)
                }
                sections = {section: to_tensors({k: a.numpy() for k, a in record.items()}) for section, record in records.items()}
                return ClientState(round, sections)
        return NOTHING

    def write(self, round: int, sections: Sections) -> None:
        """Store ``sections`` as the state after ``round``. Of the states from earlier rounds, only the newest is kept."""
        before = self.read(round)
        for section in our_records(self._state, ArrayRecord):
            del self._state[OURS + section]
        kept = dict(sections) | {f"{PREVIOUS}{section}": tensors for section, tensors in before.sections.items()}
        for section, tensors in kept.items():
            self._state[OURS + section] = to_record(to_numpy(tensors))
        self._state[OWNER] = ConfigRecord(
            {"signature": self._signature, "run": self._run, "round": round, f"{PREVIOUS}round": before.round}
        )


class FileState:
    """Store the states of one client in one run, in one file per round.

    Files of rounds to which the run cannot go back any more are deleted. A file that is
    damaged, or belongs to another client, model or method, is renamed with a message in the
    log, and not used.
    """

    def __init__(self, folder: Path, run_id: RunId, client: int, signature: str) -> None:
        self.folder, self.run_id = folder / run_id.run / f"client-{client}", run_id
        self._owner = {"run": run_id.run, "client": str(client), "signature": signature}

    def read(self, before: int) -> ClientState:
        """Return the newest state from a round before ``before``; ``NOTHING`` if there is none.

        A run that was resumed has undone the rounds after its checkpoint. States of these
        rounds are ignored.
        """
        for round, attempt, path in self._files():
            if round < before and self.run_id.counts(round, attempt) and (sections := self._load(path)) is not None:
                return ClientState(round, sections)
        return NOTHING

    def write(self, round: int, sections: Sections) -> None:
        """Write the tensors in ``sections`` as the state after ``round``, and delete files that are no longer needed."""
        tensors = {f"{section}/{name}": tensor for section, part in sections.items() for name, tensor in part.items()}
        path = self.folder / f"round-{round:06}.{self.run_id.attempt}{durable.SUFFIX}"
        durable.save_tensors(
            path, tensors, {**self._owner, "round": str(round), "what": "the tensors that one fl-bn client keeps to itself"}
        )
        needed = True
        for kept, attempt, old in self._files():
            on_the_line = self.run_id.counts(kept, attempt)
            if not needed or (attempt in self.run_id.attempts and not on_the_line):
                old.unlink(missing_ok=True)
            needed = needed and not (on_the_line and kept <= self.run_id.durable)

    def _files(self) -> list[tuple[int, str, Path]]:
        """Return round, token (``RunId.attempt``) and path of every file, the newest round first."""
        names = {path: re.fullmatch(rf"round-(\d+)\.(\w+){re.escape(durable.SUFFIX)}", path.name) for path in self.folder.glob("round-*")}
        return sorted(((int(name[1]), name[2], path) for path, name in names.items() if name), reverse=True)

    def _load(self, path: Path) -> dict[str, dict[str, Tensor]] | None:
        try:
            tensors, about = durable.load_tensors(path)
            for key, expected in self._owner.items():
                if about.get(key) != expected:
                    raise durable.Damaged(f"{path}: expected a state for {key} {expected!r}, but it is for {about.get(key)!r}")
        except durable.Damaged as problem:
            log(
                logging.WARNING,
                "%s. The file is renamed to %s; the client goes on from an older state, if it has one",
                problem,
                durable.set_aside(path).name,
            )
            return None
        sections: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            section, _, key = name.partition("/")
            sections.setdefault(section, {})[key] = tensor
        return sections


StateStore = MemoryState | FileState
"""Keeps a client's own tensors (those that it does not share) between its rounds, by round and section."""


def store_of(state: RecordDict, folder: Path | None, config: Mapping[str, Any], client: int, signature: str) -> StateStore:
    """Return the store for a client's own tensors: a ``FileState`` in ``folder``, or else a ``MemoryState`` in ``state``.

    ``config`` is that of a message. If it names no run, nothing is stored in files.
    """
    run_id = RunId.of(config)
    if folder is None or not run_id.run:
        return MemoryState(state, signature, run_id.run)
    return FileState(folder, run_id, client, signature)
