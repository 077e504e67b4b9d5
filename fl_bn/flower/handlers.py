"""Flower's messages to and from the values of a round: here an instruction is read out of a message, and a reply put into one.

fl-bn's own application, a Flower app of one's own and secure aggregation all read and answer through these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from flwr.app import Message, MetricRecord

from fl_bn.federation.client import Connect
from fl_bn.federation.fields import Values
from fl_bn.federation.narrow import EXACT, PayloadDtype
from fl_bn.federation.network import Network
from fl_bn.federation.payload import Payload, to_numpy, to_tensors
from fl_bn.federation.values import ClientState, Instruction, Reply
from fl_bn.flower.app.client_state import StateStore
from fl_bn.flower.layerwise.exchange_address import ExchangeAddresses, connect
from fl_bn.flower.layerwise.transcript import Transcript, detach
from fl_bn.flower.wire.codec import Header, check_header, header_of, payload_of, to_records
from fl_bn.flower.wire.fields import Form
from fl_bn.flower.wire.messages import TO_MEASURE, TO_TRAIN
from fl_bn.methods import INPUTS, Phase
from fl_bn.support.wire import WireError

COUNTS = ("steps", "batch", "measured", "kept", "drift-layer", "fewest", "count")  # metrics that are whole numbers


@dataclass(frozen=True)
class Request:
    """What a message asks of one client, checked.

    Attributes:
        header: of the message; the reply repeats it.
        instruction: of the client's round. An evaluation is asked for as a phase that trains nothing (``Phase.MEASURE``).
        config: the checked values of the message's config.
        rounding: the type in which weights travel, in both directions.
        transcript: the answers so far, of a layer-wise exchange by replay.
    """

    header: Header
    instruction: Instruction
    config: Values
    rounding: PayloadDtype = EXACT
    transcript: Transcript = field(default=())

    @property
    def trains(self) -> bool:
        """Whether the client is to train."""
        return self.instruction.phase is not Phase.MEASURE

    def kept(self, store: StateStore) -> ClientState:
        """Return the state that the client goes on from: of the rounds before, or, where it does not train, of this one, too."""
        kept = store.read(before=self.instruction.round + (not self.trains))
        if not self.trains:
            return kept
        return replace(kept, counted=int(self.config.get("counted", kept.round)) >= kept.round)

    def connect(self, addresses: ExchangeAddresses) -> Connect | None:
        """Return how the client joins the layer-wise exchange of its round; None where there is none."""
        if self.instruction.phase is Phase.EXCHANGE or (not self.trains and self.config.get("exchange")):
            return partial(connect, addresses, self.config, self.transcript)
        return None


def read(message: Message, network: Network, form: Form | None = None, header: Header | None = None) -> Request:
    """Read what ``message`` asks of a client.

    Args:
        message: from the server.
        network: the client's; the message must be for this model and method.
        form: of the config; None: to train or to measure, as the header's phase says.
        header: of the message, where it was read before.

    Raises:
        WireError: for the first thing that is not as expected.
    """
    content = message.content
    header = header or header_of(content)
    form = form or (TO_MEASURE if header.phase == Phase.MEASURE.value else TO_TRAIN)
    config = form.of_configs(content) if form.record in content else form.read({})
    return request_of(header, payload_of(content), config, network)


def request_of(header: Header, payload: Payload, config: Values, network: Network) -> Request:
    """Return what a header, the arrays beside it and the values of a config ask of a client.

    Args:
        header: of the instruction.
        payload: its arrays as they travel. A transcript is taken out of them.
        config: its checked values. Their form says whether the client is to train, to measure or to evaluate.
        network: the client's.

    Raises:
        WireError: they are for another phase, model or method, or an array has another type than the header says.
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
        return Instruction(round, phase, sections, float(config["learning-rate"]), rate_share=float(config["rate-share"]))
    if config.form is TO_MEASURE:
        measured, memory = str(config.get("measured", INPUTS)), int(config.get("exchange-memory", 0))
        return Instruction(round, phase, sections, measured=measured, memory=memory)
    return Instruction(round, Phase.MEASURE, sections)


def reply_to(message: Message, header: Header, reply: Reply, rounding: PayloadDtype = EXACT) -> Message:
    """Make the message that answers ``message`` by ``reply``.

    Args:
        message: the instruction.
        header: of the instruction, which the answer repeats.
        reply: of the client; without tensors and samples it says that the client sat out.
        rounding: the type in which weights travel.

    Raises:
        Overflow: a weight does not fit that type.
    """
    arrays = {section: to_numpy(tensors) for section, tensors in reply.sections.items()}
    content = to_records(rounding.narrow(arrays), header)
    content["metrics"] = MetricRecord({"samples": reply.samples, **metrics_of(reply)})
    return Message(content, reply_to=message)


def metrics_of(reply: Reply) -> Mapping[str, int | float]:
    """Return the metrics of ``reply``, counts as whole numbers."""
    return {name: int(value) if name in COUNTS else float(value) for name, value in reply.metrics.items()}
