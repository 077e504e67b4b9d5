"""Answer the server's messages at a client, for fl-bn's own app, users' apps and secure aggregation.

Handlers are functions of a module, since ``run_simulation`` pickles inner functions
with all that they use.

A client keeps its own tensors and the optimizer's momentum in Flower's
``context.state``, in the memory of the simulation or of the SuperNode, or in files,
which survive both. In a resumed run, each client reads the state of the round to
which the run goes back.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fl_bn.federation.fields import Values
from fl_bn.federation.network import Network
from fl_bn.federation.recording import Connect
from fl_bn.federation.schema import KEPT, difference
from fl_bn.federation.values import NOTHING, ClientState, Instruction, Reply, to_numpy, to_tensors
from fl_bn.flower.compat import deployed, log
from fl_bn.flower.layerwise.exchange_address import connect
from fl_bn.flower.layerwise.transcript import Transcript, detach
from fl_bn.flower.wire.codec import HEADER, OURS, Form, Header, RunId, header_of, our_records, payload_of, tensors_of, to_record, to_records
from fl_bn.flower.wire.gate import Limits
from fl_bn.flower.wire.messages import HELLO, TO_MEASURE, TO_MEET, TO_TELL, TO_TRAIN, here
from fl_bn.methods import Phase
from fl_bn.support import durable
from fl_bn.support.wire import WireError

COUNTS = ("steps", "batch", "measured", "kept", "fewest", "count")  # metrics that are whole numbers


OWNER = f"{OURS}kept-for"  # the record that says to which run, model and method the tensors belong
PREVIOUS = "previous/"  # prefix for the sections of the state before the newest one


class MemoryState:
    """Store the newest state of a client, and the one before it, in Flower's ``context.state``.

    The older state is needed when the message of the newest round comes again.
    Tensors of another ``signature`` (of model and method) or named ``run`` are not
    used.
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
                records = our_records(self._state, ArrayRecord).items()
                own = {name.removeprefix(PREVIOUS): record for name, record in records if name.startswith(PREVIOUS) == bool(prefix)}
                return ClientState(round, {section: tensors_of(record) for section, record in own.items()})
        return NOTHING

    def write(self, round: int, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Store ``sections`` as the state after ``round``, and keep the newest earlier one."""
        before = self.read(round)
        for section in our_records(self._state, ArrayRecord):
            del self._state[OURS + section]
        kept = dict(sections) | {f"{PREVIOUS}{section}": tensors for section, tensors in before.sections.items()}
        for section, tensors in kept.items():
            self._state[OURS + section] = to_record(to_numpy(tensors))
        owner: dict[str, Any] = {"signature": self._signature, "run": self._run, "round": round, f"{PREVIOUS}round": before.round}
        self._state[OWNER] = ConfigRecord(owner)


class FileState:
    """Store the states of one client in one run, in one file per round.

    Files to which the run cannot go back are deleted. A file that is damaged, or
    belongs to another client, model or method, is renamed with a message in the
    log, and not used.
    """

    def __init__(self, folder: Path, run_id: RunId, client: int, signature: str) -> None:
        self.folder, self.run_id = folder / run_id.run / f"client-{client}", run_id
        self._owner = {"run": run_id.run, "client": str(client), "signature": signature}

    def read(self, before: int) -> ClientState:
        """Return the newest state from a round before ``before`` that no resume has undone."""
        for round, attempt, path in self._files():
            if round < before and self.run_id.counts(round, attempt) and (sections := self._load(path)) is not None:
                return ClientState(round, sections)
        return NOTHING

    def write(self, round: int, sections: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write ``sections`` as the state after ``round``, and delete files not needed any more."""
        tensors = {f"{section}/{name}": tensor for section, part in sections.items() for name, tensor in part.items()}
        path = self.folder / f"round-{round:06}.{self.run_id.attempt}{durable.SUFFIX}"
        about = {**self._owner, "round": str(round), "what": "the tensors that one fl-bn client keeps to itself"}
        durable.save_tensors(path, tensors, about)
        needed = True
        for kept, attempt, old in self._files():
            on_the_line = self.run_id.counts(kept, attempt)
            if not needed or (attempt in self.run_id.attempts and not on_the_line):
                old.unlink(missing_ok=True)
            needed = needed and not (on_the_line and kept <= self.run_id.durable)

    def _files(self) -> list[tuple[int, str, Path]]:
        """Return round, token (``RunId.attempt``) and path of every file, newest first."""
        names = {path: re.fullmatch(rf"round-(\d+)\.(\w+){re.escape(durable.SUFFIX)}", path.name) for path in self.folder.glob("round-*")}
        return sorted(((int(name[1]), name[2], path) for path, name in names.items() if name), reverse=True)

    def _load(self, path: Path) -> dict[str, dict[str, Tensor]] | None:
        try:
            tensors, about = durable.load_tensors(path)
            for key, expected in self._owner.items():
                if about.get(key, "").split("/")[-1] != expected.split("/")[-1]:  # folders may move
                    raise durable.Damaged(f"{path}: expected a state for {key} {expected!r}, but it is for {about.get(key)!r}")
        except durable.Damaged as problem:
            aside = durable.set_aside(path).name
            log(logging.WARNING, "%s. The file is renamed to %s; the client goes on from an older state, if it has one", problem, aside)
            return None
        sections: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            section, _, key = name.partition("/")
            sections.setdefault(section, {})[key] = tensor
        return sections


StateStore = MemoryState | FileState
"""Keeps a client's own tensors between its rounds, by round and section."""


def store_of(state: RecordDict, folder: Path | None, config: Mapping[str, Any], client: int, signature: str) -> StateStore:
    """Return the store for a client's own tensors: a ``FileState`` in ``folder``, or else a ``MemoryState``.

    If the message's ``config`` names no run, nothing is stored in files.
    """
    run_id = RunId.of(config)
    if folder is None or not run_id.run:
        return MemoryState(state, signature, run_id.run)
    return FileState(folder, run_id, client, signature)


@dataclass(frozen=True)
class Request:
    """Hold the checked content of a message to one client, whose ``header`` the reply repeats.

    Attributes:
        instruction: what to do; its phase is ``Phase.MEASURE`` for an evaluation.
        transcript: in FedTAN's layer-wise exchange by replay, the server's answers
            so far.
    """

    header: Header
    instruction: Instruction
    config: Values
    transcript: Transcript = field(default=())

    def kept(self, store: StateStore) -> ClientState:
        """Return the stored state from which the client starts: its newest before this round.

        To measure or evaluate, it may be of this round. ``counted`` says whether
        the server used its reply.
        """
        trains = self.instruction.trains
        kept = store.read(before=self.instruction.round + (not trains))
        return replace(kept, counted=int(self.config.get("counted", kept.round)) >= kept.round) if trains else kept

    def connect(self, node_config: Mapping[str, Any]) -> Connect | None:
        """Return the function by which the client joins the round's layer-wise exchange, if any."""
        if self.instruction.phase is Phase.EXCHANGE or (not self.instruction.trains and self.config.get("exchange")):
            return partial(connect, node_config, self.config, self.transcript)
        return None


def read(message: Message, network: Network, form: Form | None = None, header: Header | None = None) -> Request:
    """Read a server's message, which must be for the model and method of ``network``, else ``WireError``.

    ``form`` is that of the message's config; None: to train or to measure, as the
    header says.
    """
    if header is None and HEADER.name not in message.content:
        raise WireError("header", "", "expected a message of an fl-bn strategy: use a strategy of fl_bn.flower in server_app.py, like FBN")
    header = header or header_of(message.content)
    measures = header.phase == Phase.MEASURE.value
    form = form or (TO_MEASURE if measures else TO_TRAIN)
    if form in (TO_TRAIN, TO_MEASURE) and (form is TO_MEASURE) is not measures:
        doing = "measure" if form is TO_MEASURE else "train"
        raise WireError("header", "phase", f"expected a phase in which clients {doing}, but got {header.phase!r}")
    phase, config, payload = Phase(header.phase), config_in(message, form), payload_of(message.content)
    transcript = detach(payload, config) if form is TO_TRAIN and phase is Phase.EXCHANGE else []
    mine = Header(network.method.name, header.phase, header.round, network.signature)
    mine.check(header, lambda: difference(network.instruction(), payload))
    instruction = Instruction(header.round, phase, {section: to_tensors(arrays) for section, arrays in payload.items()})
    if form is TO_TRAIN:
        rate, share, objective = config["learning-rate"], config["rate-share"], config["objective"]
        instruction = replace(instruction, learning_rate=rate, rate_share=share, objective=objective)
    elif form is TO_MEASURE:
        instruction = replace(instruction, measured=config["measured"], memory=config["exchange-memory"])
    else:
        instruction = replace(instruction, phase=Phase.MEASURE)
    return Request(header, instruction, config, transcript)


def config_in(message: Message, form: Form) -> Values:
    """Read the config of a message, which may be missing if no field is needed."""
    return form.of(message.content) if form.name in message.content else form.read({})


def reply_to(message: Message, header: Header, reply: Reply) -> Message:
    """Return ``reply`` as a Flower message that answers ``message``."""
    arrays = {section: to_numpy(tensors) for section, tensors in reply.sections.items()}
    content = to_records(arrays, header)
    metrics = {name: int(value) if name in COUNTS else float(value) for name, value in reply.metrics.items()}
    content[f"{OURS}metrics"] = MetricRecord({"samples": reply.samples, **metrics})
    return Message(content, reply_to=message)


@dataclass(eq=False)
class Participant:
    """Describe one client to the server, and find what it keeps.

    ``folder`` is for the client's own tensors; without it, Flower's ``state`` has
    them. The client ``tells`` the BatchNorm layers that it keeps, if asked.
    """

    network: Network
    client: int
    clients: int
    samples: Callable[[], int]
    state: RecordDict
    folder: Path | None = None
    node_config: Mapping[str, Any] = field(default_factory=dict)
    tells: bool = False
    label_counts: Sequence[int] = ()

    def introduce(self) -> dict[str, int | str]:
        """Return the client's introduction, for which the server asks once."""
        return {
            "client": self.client,
            "clients": self.clients,
            "samples": self.samples(),
            "signature": self.network.signature,
            "label-counts": json.dumps([*self.label_counts]),
        }

    def store(self, config: Mapping[str, Any]) -> StateStore:
        """Return the store for this client's own tensors in the run of ``config``."""
        return store_of(self.state, self.folder, config, self.client, self.network.signature)

    def kept_layers(self, config: Mapping[str, Any], round: int) -> dict[str, Tensor]:
        """Return the scales, shifts and statistics that this client keeps after ``round``, by name.

        Those not kept yet are the network's. A client that does not send them
        raises ``PermissionError``.
        """
        if not self.tells:
            raise PermissionError("this client keeps its BatchNorm layers: set unseen-client, or tells=True in client_app.py")
        local, state = self.store(config).read(round + 1).get("local"), self.network.original.state_dict()
        return {name: local.get(name, state[name]) for name in self.network.locality.kept_by_clients()}


Build = Callable[[Context], Participant]
Answer = Callable[[Any, Message, Context], Message]


def _hello(build: Build, message: Message, context: Context) -> Message:
    limits, told = Limits.of(context), {**build(context).introduce(), "version": here()}
    told |= {"label-counts": "[]"} if limits.secure or limits.min_samples else {}
    return Message(RecordDict({HELLO.name: ConfigRecord({**told})}), reply_to=message)


def _kept(build: Build, message: Message, context: Context) -> Message:
    client, header = build(context), header_of(message.content)
    layers, samples = client.kept_layers(config_in(message, TO_TELL), header.round), client.samples()
    return reply_to(message, header, Reply(client.client, {KEPT: layers}, samples, samples))


def _rendezvous(build: Build, message: Message, context: Context) -> Message:
    """Join and leave the layer-wise exchange, to test whether a cohort can run at once."""
    connect(build(context).node_config, TO_MEET.of(message.content), [], 1).close()
    return Message(RecordDict(), reply_to=message)


QUERIES: dict[str, Answer] = {"query.hello": _hello, f"query.{KEPT}": _kept, "query.rendezvous": _rendezvous}


def register(app: ClientApp, build: Build, answers: Mapping[str, Answer], mods: Sequence[Any] = ()) -> None:
    """Register answers by Flower's message type, with ``mods`` around each."""
    for kind, answer in answers.items():
        category, _, action = kind.partition(".")
        handler = partial(_in_time, answer, build) if deployed() else partial(answer, build)
        getattr(app, category)(*([action] if action else []), mods=[*mods])(handler)


def _in_time(answer: Answer, build: Build, message: Message, context: Context) -> Message:
    """Answer a message in a deployment within its time to live.

    There, each message has a process of its own. A client whose process hangs, for
    example on a dead network drive, could join no later round. At the limit, the
    process prints its traceback to stderr and ends.
    """
    faulthandler.dump_traceback_later(message.metadata.ttl, exit=True)
    try:
        return answer(build, message, context)
    finally:
        faulthandler.cancel_dump_traceback_later()
