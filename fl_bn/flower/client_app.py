"""The ClientApp: Flower's message handlers in front of a ``BatchNormClient``."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.federation.fields import Values
from fl_bn.federation.schema import KEPT, kept_layers
from fl_bn.flower.client import BatchNormClient
from fl_bn.flower.codec import Header, flatten, from_records, header_of, to_records, unflatten
from fl_bn.flower.exchange_address import deployed
from fl_bn.flower.fields import Form
from fl_bn.flower.messages import HEADER, LAYOUT, RECORD_KEY_CONFIGS, REQUIRED, TO_EVALUATE, TO_MEASURE, TO_MEET, TO_TELL, TO_TRAIN
from fl_bn.flower.versions import check_server, here
from fl_bn.methods import Phase

HELLO = "query.hello"
STATISTICS = "query.statistics"
RENDEZVOUS = "query.rendezvous"
Handler = Callable[[Message, Context], Message]


def make_client_app(build: Callable[[Context], BatchNormClient]) -> ClientApp:
    """A ClientApp that builds its client from Flower's context and answers train, evaluate, and the queries
    ``statistics``, ``hello`` and ``rendezvous``."""
    app = ClientApp()

    def fit(message: Message, context: Context) -> Message:
        check_server(message)
        payload, header = from_records(message.content)
        arrays, layout = flatten(payload)
        form = TO_MEASURE if header.phase == Phase.MEASURE.value else TO_TRAIN
        out, samples, metrics = build(context).fit(arrays, _call(message, form, header, layout))
        content = to_records(unflatten(out, metrics.pop("layout")), header)
        content["metrics"] = MetricRecord({"samples": samples, **metrics})
        return Message(content, reply_to=message)

    def evaluate(message: Message, context: Context) -> Message:
        check_server(message)
        payload, header = from_records(message.content)
        arrays, layout = flatten(payload)
        loss, samples, metrics = build(context).evaluate(arrays, _call(message, TO_EVALUATE, header, layout))
        content = to_records({}, header)
        content["metrics"] = MetricRecord({"samples": samples, "loss": loss, **metrics})
        return Message(content, reply_to=message)

    def kept(message: Message, context: Context) -> Message:
        check_server(message)
        client, header = build(context), header_of(message.content)
        arrays = client.get_parameters(_call(message, TO_TELL, header))
        named = dict(zip(kept_layers(client.model, client.method).sections[KEPT], arrays, strict=True))
        content = to_records({KEPT: named}, header)
        content["metrics"] = MetricRecord({"samples": len(client.site.train)})
        return Message(content, reply_to=message)

    def hello(message: Message, context: Context) -> Message:
        check_server(message)
        return Message(RecordDict({"hello": ConfigRecord({**build(context).get_properties({}), "version": here()})}), reply_to=message)

    def rendezvous(message: Message, context: Context) -> Message:
        build(context).meet(TO_MEET.of_configs(message.content))
        return Message(RecordDict(), reply_to=message)

    app.train()(_within_its_time(_secured(fit, build)))
    app.evaluate()(_within_its_time(evaluate))
    app.query("statistics")(_within_its_time(_secured(fit, build)))
    app.query("hello")(_within_its_time(hello))
    app.query(KEPT)(_within_its_time(_secured(kept, build)))
    app.query("rendezvous")(_within_its_time(rendezvous))
    return app


def _secured(handle: Handler, build: Callable[[Context], BatchNormClient]) -> Handler:
    """``handle``, behind SecAgg+ where the message carries its record, or where this client answers nothing in the clear."""

    def answer(message: Message, context: Context) -> Message:
        required = any(bool(config.get(REQUIRED, False)) for config in (context.node_config, context.run_config))
        if RECORD_KEY_CONFIGS not in message.content and not required:
            return handle(message, context)
        from fl_bn.flower.secure_client import secured  # only now: a plain run does without SecAgg+

        return secured(handle, build)(message, context)

    return answer


def _within_its_time(handle: Handler) -> Handler:
    """``handle``; in a deployment, where each message has a process of its own, that process ends when nobody waits for it any longer.

    One that hangs (on a dead network drive, say) would keep its client from every later round. Where it hung is printed to stderr.
    """
    if not deployed():
        return handle

    def within(message: Message, context: Context) -> Message:
        faulthandler.dump_traceback_later(message.metadata.ttl, exit=True)
        try:
            return handle(message, context)
        finally:
            faulthandler.cancel_dump_traceback_later()

    return within


def _call(message: Message, form: Form, header: Header, layout: str = "") -> Values:
    """What a ``NumPyClient`` takes as its config: the message's, checked, with the header and the arrays' ``layout``."""
    values = form.of_configs(message.content) if form.record in message.content else form.read({})
    return Values(form.and_also(HEADER, LAYOUT), {**values, **header.values(), "layout": layout})
