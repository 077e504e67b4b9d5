"""From Flower's replies to checked contributions in client order; what is wrong is named and left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flwr.app import Message

from fl_bn.federation.blocks import views
from fl_bn.federation.narrow import EXACT, Rounding
from fl_bn.federation.schema import Schema
from fl_bn.federation.values import Reply
from fl_bn.flower.codec import Header, from_records
from fl_bn.flower.fields import Form
from fl_bn.flower.messages import REPLIED, TRAINED
from fl_bn.flower.population import Client
from fl_bn.wire import Absent, WireError, check_samples, reason


class Reading:
    """Reads a round's replies, message by message. ``refused``: why a client's is not usable, by index; ``wrong``: those among the refused
    whose reply no correct client would have sent.

    Replies with samples 0 (a client that sat out), errors, and late or missing ones count as refused, with the reason.
    ``form``: of the reply's metrics. ``max_steps``: local steps that a client may claim, 0 if unknown.
    ``rounding``: how the replies carry weights and gradients.
    ``sent``: the messages replied to, since Flower itself answers for a node that is gone, and does not say for which.
    """

    def __init__(
        self,
        cohort: Sequence[Client],
        schema: Schema,
        header: Header,
        form: Form,
        sent: Iterable[Message] = (),
        max_steps: int = 0,
        rounding: Rounding = EXACT,
    ) -> None:
        self._cohort, self._expected = cohort, (schema, header, form, max_steps, rounding)
        self._by_node, self._sent, self._read = {client.node: client for client in cohort}, sent, set[int]()
        self.refused: dict[int, str] = {}
        self.wrong: set[int] = set()

    def read(self, message: Message) -> int | Reply | None:
        """The reply, or the index of a client whose reply is refused; None where nothing was asked, or not again."""
        node = message.metadata.src_node_id
        if node not in self._by_node and message.has_error():
            asked = message.metadata.reply_to_message_id
            node = next((m.metadata.dst_node_id for m in self._sent if m.metadata.message_id == asked), node)
        client = self._by_node.get(node)
        if client is None or client.index in self._read:
            return None
        self._read.add(client.index)
        try:
            return _read(message, client, *self._expected)
        except Absent as error:
            self.refused[client.index] = str(error)
        except WireError as error:
            self.refused[client.index] = str(error)
            self.wrong.add(client.index)
        return client.index

    def end(self) -> None:
        """No more replies come: the other clients count as refused."""
        self.refused |= {c.index: "no reply before the deadline" for c in self._cohort if c.index not in self._read}


def read_replies(replies: Iterable[Message], reading: Reading) -> tuple[list[Reply], dict[int, str], set[int]]:
    """``(contributions in client order, reason by client index, who was wrong)``: every client of the cohort is in one of the first two."""
    found = [reply for message in replies if isinstance(reply := reading.read(message), Reply)]
    reading.end()
    return sorted(found, key=lambda reply: reply.client), reading.refused, reading.wrong


def _read(reply: Message, client: Client, schema: Schema, header: Header, form: Form, max_steps: int, rounding: Rounding) -> Reply:
    if reply.has_error():
        raise Absent("error", "", f"code {reply.error.code}: {reason(reply.error.reason)}")
    payload, came = from_records(reply.content)
    header.check(came)
    samples: int = REPLIED.of_metrics(reply.content)["samples"]
    check_samples(samples)
    if schema.sections and samples > client.samples:
        raise WireError("metrics", "samples", f"expected at most {client.samples}, as the client said of itself, but got {samples}")
    payload = rounding.widen(payload)
    largest = schema.check(payload)
    values = form.of_metrics(reply.content)
    if form is TRAINED and 0 < max_steps < values["steps"]:
        raise WireError("metrics", "steps", f"expected at most {max_steps}, as the server asked for, but got {values['steps']}")
    if form is TRAINED and "kept" in values and values["kept"] >= header.round:
        raise WireError("metrics", "kept", f"expected a round before {header.round}, but got {values['kept']}")
    numbers = {key: float(value) for key, value in values.items() if not isinstance(value, list)}
    updates = tuple(values.get("updates", ())) if form is TRAINED else ()
    sections = {section: views(arrays) for section, arrays in payload.items()}
    return Reply(client.index, sections, samples, samples, numbers, updates, largest)
