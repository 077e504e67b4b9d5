"""Answer the server's messages at a client: read an instruction, make a message from a reply, and say who the client is.

fl-bn's own application, users' own Flower apps and secure aggregation all use these functions.
Handlers are functions of a module, since Flower's ``run_simulation`` pickles inner functions
with copies of all that they use.
"""

from __future__ import annotations

import faulthandler
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fl_bn.federation.fields import Values
from fl_bn.federation.network import Network
from fl_bn.federation.payload import Payload, to_numpy, to_tensors
from fl_bn.federation.recording import Connect
from fl_bn.federation.schema import KEPT, difference
from fl_bn.federation.values import ClientState, Instruction, Reply
from fl_bn.flower.client_state import StateStore, store_of
from fl_bn.flower.compat import deployed
from fl_bn.flower.layerwise.exchange_address import ExchangeAddresses, connect
from fl_bn.flower.layerwise.transcript import Transcript, detach
from fl_bn.flower.wire.codec import Header, header_of, payload_of, to_records
from fl_bn.flower.wire.gate import Limits
from fl_bn.flower.wire.messages import HEADER, HELLO, OURS, TO_MEASURE, TO_MEET, TO_TELL, TO_TRAIN, Form, here
from fl_bn.methods import Phase
from fl_bn.support.wire import WireError

COUNTS = ("steps", "batch", "measured", "kept", "fewest", "count")  # metrics that are whole numbers


@dataclass(frozen=True)
class Request:
    """Hold the checked content of a message to one client.

    Attributes:
        header: the message's header, which the reply repeats.
        instruction: the instruction for the client's round. For an evaluation, its phase is
            ``Phase.MEASURE``, in which nothing is trained.
        config: the checked values of the message's config.
        transcript: in FedTAN's layer-wise exchange by replay, the server's answers so far.
    """

    header: Header
    instruction: Instruction
    config: Values
    transcript: Transcript = field(default=())

    def kept(self, store: StateStore) -> ClientState:
        """Return the stored state from which the client starts: its newest state before this round.

        A client that measures or evaluates may also start from one that it stored in this
        round. ``counted`` says whether the server used the reply of the state's round.
        """
        trains = self.instruction.trains
        kept = store.read(before=self.instruction.round + (not trains))
        return replace(kept, counted=int(self.config.get("counted", kept.round)) >= kept.round) if trains else kept

    def connect(self, addresses: ExchangeAddresses) -> Connect | None:
        """Return the function by which the client joins the layer-wise exchange of its round; None: there is no exchange."""
        if self.instruction.phase is Phase.EXCHANGE or (not self.instruction.trains and self.config.get("exchange")):
            return partial(connect, addresses, self.config, self.transcript)
        return None


def read(message: Message, network: Network, form: Form | None = None, header: Header | None = None) -> Request:
    """Read a server's message, which must be for the model and method of ``network``.

    ``form`` is that of the message's config; None: to train or to measure, as the header says.
    ``header`` was perhaps read before.

    Raises:
        WireError: a field or an array is not as expected, or the message is none of fl-bn's.
            The error names the first one.
    """
    if header is None and HEADER.name not in message.content:
        raise WireError("header", "", "expected a message of an fl-bn strategy: use a strategy of fl_bn.flower in server_app.py, like FBN")
    header = header or header_of(message.content)
    measures = header.phase == Phase.MEASURE.value
    form = form or (TO_MEASURE if measures else TO_TRAIN)
    if form in (TO_TRAIN, TO_MEASURE) and (form is TO_MEASURE) is not measures:
        doing = "measure" if form is TO_MEASURE else "train"
        raise WireError("header", "phase", f"expected a phase in which clients {doing}, but got {header.phase!r}")
    return request_of(header, payload_of(message.content), config_in(message, form), network)


def config_in(message: Message, form: Form) -> Values:
    """Read the config of a message, which may be missing if no field is needed."""
    return form.of(message.content) if form.name in message.content else form.read({})


def request_of(header: Header, payload: Payload, config: Values, network: Network) -> Request:
    """Build a request from an instruction's header, arrays and config, whose form says what the client is to do.

    A transcript of a layer-wise exchange by replay is removed from ``payload``.

    Raises:
        WireError: the instruction is for another model or method, or an array has another type
            than the header says.
    """
    phase, form = Phase(header.phase), config.form
    transcript = detach(payload, config) if form is TO_TRAIN and phase is Phase.EXCHANGE else []
    mine = Header(network.method.name, header.phase, header.round, network.signature)
    mine.check(header, lambda: difference(network.instruction(), payload))
    sections = {section: to_tensors(arrays) for section, arrays in payload.items()}
    instruction = Instruction(header.round, phase, sections)
    if form is TO_TRAIN:
        rate, share, objective = config["learning-rate"], config["rate-share"], config["objective"]
        instruction = replace(instruction, learning_rate=rate, rate_share=share, objective=objective)
    elif form is TO_MEASURE:
        instruction = replace(instruction, measured=config["measured"], memory=config["exchange-memory"])
    else:
        instruction = replace(instruction, phase=Phase.MEASURE)
    return Request(header, instruction, config, transcript)


def reply_to(message: Message, header: Header, reply: Reply) -> Message:
    """Return ``reply`` as a Flower message that answers ``message``, with the instruction's header."""
    arrays = {section: to_numpy(tensors) for section, tensors in reply.sections.items()}
    content = to_records(arrays, header)
    content[f"{OURS}metrics"] = MetricRecord({"samples": reply.samples, **metrics_of(reply)})
    return Message(content, reply_to=message)


def metrics_of(reply: Reply) -> Mapping[str, int | float]:
    """Return the metrics of ``reply`` by name: counts (``COUNTS``) as int, all others as float."""
    return {name: int(value) if name in COUNTS else float(value) for name, value in reply.metrics.items()}


@dataclass(eq=False)
class Participant:
    """Describe one client to the server, and find what it keeps.

    Attributes:
        network: the client's converted network.
        client: the client's index, from 0.
        clients: the number of clients.
        samples: returns the number of the client's training samples.
        state: Flower's ``context.state``.
        folder: the folder for files with the tensors that the client keeps; None: they are kept
            in ``state``.
        exchange: the addresses of a layer-wise exchange to which the client may connect.
        tells: whether the client sends the BatchNorm layers that it keeps.
        label_counts: the number of training samples per label; empty: the client does not tell
            it.
    """

    network: Network
    client: int
    clients: int
    samples: Callable[[], int]
    state: RecordDict
    folder: Path | None = None
    exchange: ExchangeAddresses = ExchangeAddresses()
    tells: bool = False
    label_counts: Sequence[int] = ()

    def introduce(self) -> dict[str, int | str]:
        """Return the client's introduction, for which the server asks once, with the number of samples per label as JSON."""
        return {
            "client": self.client,
            "clients": self.clients,
            "samples": self.samples(),
            "signature": self.network.signature,
            "label-counts": json.dumps([*self.label_counts]),
        }

    def store(self, config: Mapping[str, Any]) -> StateStore:
        """Return the store in which this client keeps its own tensors between the rounds of the run that ``config`` names."""
        return store_of(self.state, self.folder, config, self.client, self.network.signature)

    def kept_layers(self, config: Mapping[str, Any], round: int) -> dict[str, Tensor]:
        """Return the scales, shifts and statistics that this client keeps, by name, as they are after ``round``.

        The server averages them over the clients, for new clients. The network's tensors stand
        in for those that are not kept yet.

        Raises:
            PermissionError: this client does not send them.
        """
        if not self.tells:
            raise PermissionError(
                "this client does not send the BatchNorm layers that it keeps: allow it by unseen-client, or by answer(..., tells=True)"
            )
        local, state = self.store(config).read(round + 1).get("local"), self.network.original.state_dict()
        return {name: local.get(name, state[name]) for name in self.network.locality.kept_by_clients()}


Build = Callable[[Context], Participant]
Answer = Callable[[Any, Message, Context], Message]


def _hello(build: Build, message: Message, context: Context) -> Message:
    introduction = {**build(context).introduce(), "version": here()} | ({"label-counts": "[]"} if Limits.of(context).secure else {})
    return Message(RecordDict({HELLO.name: ConfigRecord({**introduction})}), reply_to=message)


def _kept(build: Build, message: Message, context: Context) -> Message:
    client, header = build(context), header_of(message.content)
    layers, samples = client.kept_layers(config_in(message, TO_TELL), header.round), client.samples()
    return reply_to(message, header, Reply(client.client, {KEPT: layers}, samples, samples))


def _rendezvous(build: Build, message: Message, context: Context) -> Message:
    """Join the layer-wise exchange, and leave it. The server tests by this whether a cohort's clients can all run at the same time."""
    connect(build(context).exchange, TO_MEET.of(message.content), [], 1).close()
    return Message(RecordDict(), reply_to=message)


QUERIES: dict[str, Answer] = {"query.hello": _hello, f"query.{KEPT}": _kept, "query.rendezvous": _rendezvous}


def register(app: ClientApp, build: Build, answers: Mapping[str, Answer], mods: Sequence[Any] = ()) -> None:
    """Register functions that answer the server's messages.

    ``answers`` maps Flower's message type to a function of ``build``, message and context.
    ``mods`` are Flower's, around each of them.
    """
    for kind, answer in answers.items():
        category, _, action = kind.partition(".")
        getattr(app, category)(*([action] if action else []), mods=[*mods])(partial(_answered, answer, build))


def _answered(answer: Answer, build: Build, message: Message, context: Context) -> Message:
    """Answer a message, in a deployment within its time to live.

    In a deployment, each message is answered in a process of its own. Without the limit, a
    client whose process hangs, for example on a dead network drive, could join no later round.
    At the limit, the process prints its traceback to stderr and ends.
    """
    limited = deployed()
    if limited:
        faulthandler.dump_traceback_later(message.metadata.ttl, exit=True)
    try:
        return answer(build, message, context)
    finally:
        if limited:
            faulthandler.cancel_dump_traceback_later()
