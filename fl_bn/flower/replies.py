"""From Flower's replies to checked contributions in client order; what is wrong is named and left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flwr.app import Message

from fl_bn.federation.payload import to_tensors
from fl_bn.federation.schema import Schema
from fl_bn.federation.values import Reply
from fl_bn.flower.codec import Header, from_records
from fl_bn.flower.fields import Form
from fl_bn.flower.messages import REPLIED, TRAINED
from fl_bn.flower.population import Client
from fl_bn.wire import WireError, reason


class Absent(WireError):
    """A client that could not take part, and says so."""


def read_replies(
    replies: Iterable[Message],
    cohort: Sequence[Client],
    schema: Schema,
    header: Header,
    form: Form,
    sent: Iterable[Message] = (),
    max_steps: int = 0,
) -> tuple[list[Reply], dict[int, str], set[int]]:
    """``(contributions in client order, reason by client index, who was wrong)``: every client of the cohort is in one of the first two.

    Replies with samples 0 (a client that sat out), errors, and late or missing ones count as refused, with the reason. The third are
    those among the refused whose reply no correct client would have sent.
    ``form``: of the reply's metrics. ``max_steps``: local steps that a client may claim, 0 if unknown.
    ``sent``: the messages replied to, since Flower itself answers for a node that is gone, and does not say for which.
    """
    by_node = {client.node: client for client in cohort}
    addressee = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
    contributions: dict[int, Reply] = {}
    refused: dict[int, str] = {}
    wrong: set[int] = set()
    for reply in replies:
        node = reply.metadata.src_node_id
        if node not in by_node and reply.has_error():
            node = addressee.get(reply.metadata.reply_to_message_id, node)
        client = by_node.get(node)
        if client is None or client.index in contributions or client.index in refused:
            continue
        try:
            contributions[client.index] = _read(reply, client, schema, header, form, max_steps)
        except Absent as error:
            refused[client.index] = str(error)
        except WireError as error:
            refused[client.index] = str(error)
            wrong.add(client.index)
    for client in cohort:
        if client.index not in contributions and client.index not in refused:
            refused[client.index] = "no reply before the deadline"
    return [contributions[index] for index in sorted(contributions)], refused, wrong


def _read(reply: Message, client: Client, schema: Schema, header: Header, form: Form, max_steps: int) -> Reply:
    if reply.has_error():
        raise Absent("error", "", f"code {reply.error.code}: {reason(reply.error.reason)}")
    payload, came = from_records(reply.content)
    header.check(came)
    samples: int = REPLIED.of_metrics(reply.content)["samples"]
    if samples == 0:
        raise Absent("metrics", "samples", "0: the client trained on nothing this round")
    if schema.sections and samples > client.samples:
        raise WireError("metrics", "samples", f"expected at most {client.samples}, as the client said of itself, but got {samples}")
    schema.check(payload)
    values = form.of_metrics(reply.content)
    if form is TRAINED and 0 < max_steps < values["steps"]:
        raise WireError("metrics", "steps", f"expected at most {max_steps}, as the server asked for, but got {values['steps']}")
    if form is TRAINED and "kept" in values and values["kept"] >= header.round:
        raise WireError("metrics", "kept", f"expected a round before {header.round}, but got {values['kept']}")
    numbers = {key: float(value) for key, value in values.items() if not isinstance(value, list)}
    updates = tuple(values.get("updates", ())) if form is TRAINED else ()
    sections = {section: to_tensors(arrays) for section, arrays in payload.items()}
    return Reply(client.index, sections, samples, samples, numbers, updates)
