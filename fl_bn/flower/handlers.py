"""Translate Flower's messages at the client: read the server's instruction, and make a message from the client's reply.

fl-bn's own application, users' own Flower apps and secure aggregation all use these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flwr.app import Message, MetricRecord
from torch import Tensor

from fl_bn.federation.fields import Values
from fl_bn.federation.narrow import EXACT, PayloadDtype
from fl_bn.federation.network import Network
from fl_bn.federation.payload import Payload, to_numpy, to_tensors
from fl_bn.federation.recording import Connect
from fl_bn.federation.values import ClientState, Instruction, Reply
from fl_bn.flower.client_state import StateStore
from fl_bn.flower.layerwise.exchange_address import ExchangeAddresses, connect
from fl_bn.flower.layerwise.transcript import Transcript, detach
from fl_bn.flower.wire.codec import Header, check_header, header_of, payload_of, to_records
from fl_bn.flower.wire.fields import OURS, Form
from fl_bn.flower.wire.messages import TO_MEASURE, TO_TRAIN
from fl_bn.methods import INPUTS, Phase
from fl_bn.support.wire import WireError

COUNTS = ("steps", "batch", "measured", "kept", "drift-layer", "fewest", "count")  # metrics that are whole numbers


@dataclass(frozen=True)
class Request:
    """Hold the checked content of a message to one client.

    Attributes:
        header: the message's header, which the reply repeats.
        instruction: the instruction for the client's round. For an evaluation, its phase is ``Phase.MEASURE``,
            in which nothing is trained.
        config: the checked values of the message's config.
        rounding: the dtype in which weights are sent, in both directions.
        transcript: in FedTAN's layer-wise exchange by replay, the server's answers so far.
    """

    header: Header
    instruction: Instruction
    config: Values
    rounding: PayloadDtype = EXACT
    transcript: Transcript = field(default=())

    @property
    def trains(self) -> bool:
        """Return whether the client is to train."""
        return self.instruction.phase is not Phase.MEASURE

    def kept(self, store: StateStore) -> ClientState:
        """Return the stored state from which the client starts.

        A client that trains starts from its newest state before this round. The field ``counted`` says whether the
        server used the reply of that state's round. A client that measures or evaluates may also start from a state
        that it stored in this round.
        """
        kept = store.read(before=self.instruction.round + (not self.trains))
        if not self.trains:
            return kept
        return replace(kept, counted=int(self.config.get("counted", kept.round)) >= kept.round)

    def connect(self, addresses: ExchangeAddresses) -> Connect | None:
        """Return the function by which the client joins the layer-wise exchange of its round; None: there is no exchange."""
        if self.instruction.phase is Phase.EXCHANGE or (not self.trains and self.config.get("exchange")):
            return partial(connect, addresses, self.config, self.transcript)
        return None


def read(message: Message, network: Network, form: Form | None = None, header: Header | None = None) -> Request:
    """Read a server's message.

    Args:
        message: the server's message.
        network: the client's network. The message must be for its model and method.
        form: the form of the message's config. None: the form to train or to measure, as the header's phase
            says.
        header: the message's header, if it was read before.

    Raises:
        WireError: a field or an array is not as expected. The error names the first one.
    """
    content = message.content
    header = header or header_of(content)
    form = form or (TO_MEASURE if header.phase == Phase.MEASURE.value else TO_TRAIN)
    config = form.of_configs(content) if form.name in content else form.read({})
    return request_of(header, payload_of(content), config, network)


def request_of(header: Header, payload: Payload, config: Values, network: Network) -> Request:
    """Build a request from an instruction's header, arrays and config.

    Args:
        header: the instruction's header.
        payload: the instruction's arrays, in the dtype in which they were sent. If this round has a layer-wise exchange by
            replay, they include its transcript: the averages computed so far. The function removes the transcript from
            ``payload``.
        config: the instruction's checked config. Its form says whether the client is to train, to measure or to evaluate.
        network: the client's network.

    Raises:
        WireError: the instruction is for another phase, model or method, or an array has another type than the
            header says.
    """
    phase, form = Phase(header.phase), config.form
    if form is TO_TRAIN and phase is Phase.MEASURE:
        raise WireError("header", "phase", f"expected a phase that trains, but got {header.phase!r}")
    if form is TO_MEASURE and phase is not Phase.MEASURE:
        raise WireError("header", "phase", f"expected {Phase.MEASURE.value!r}, but got {header.phase!r}")
    transcript = detach(payload, config) if form is TO_TRAIN and phase is Phase.EXCHANGE else []
    mine = Header(network.method.name, header.phase, header.round, network.signature, payload=header.payload)
    check_header(mine, header, network.instruction(), payload)
    rounding = PayloadDtype.of(header.payload, network.original)
    sections = {section: to_tensors(arrays) for section, arrays in rounding.widen(payload).items()}
    return Request(header, _instruction(header.round, phase, sections, config), config, rounding, transcript)


def _instruction(round: int, phase: Phase, sections: dict[str, Any], config: Values) -> Instruction:
    if config.form is TO_TRAIN:
        rate, share, objective = float(config["learning-rate"]), float(config["rate-share"]), str(config["objective"])
        return Instruction(round, phase, sections, rate, rate_share=share, objective=objective)
    if config.form is TO_MEASURE:
        measured, memory = str(config.get("measured", INPUTS)), int(config.get("exchange-memory", 0))
        return Instruction(round, phase, sections, measured=measured, memory=memory)
    return Instruction(round, Phase.MEASURE, sections)


def reply_to(message: Message, header: Header, reply: Reply, rounding: PayloadDtype = EXACT) -> Message:
    """Return ``reply`` as a Flower message that answers ``message``.

    Args:
        message: the instruction.
        header: the instruction's header, which the answer repeats.
        reply: the client's reply. A reply without tensors and samples says that the client sat out.
        rounding: the dtype in which weights are sent.

    Raises:
        Overflow: a weight is too large for that dtype.
    """
    arrays = {section: to_numpy(tensors) for section, tensors in reply.sections.items()}
    content = to_records(rounding.narrow(arrays), header)
    content[f"{OURS}metrics"] = MetricRecord({"samples": reply.samples, **metrics_of(reply)})
    return Message(content, reply_to=message)


def kept_layers(kept: ClientState, network: Network) -> dict[str, Tensor]:
    """Return the scales, shifts and statistics that a client keeps, by name. The server averages them for new clients.

    Args:
        kept: the client's state.
        network: the client's network, whose tensors stand in for those that are not kept yet.
    """
    local, state = kept.get("local"), network.original.state_dict()
    return {name: local.get(name, state[name]) for name in network.locality.kept_by_clients()}


def metrics_of(reply: Reply) -> Mapping[str, int | float]:
    """Return the metrics of ``reply`` by name: counts (``COUNTS``) as int, all others as float."""
    return {name: int(value) if name in COUNTS else float(value) for name, value in reply.metrics.items()}
