"""The ClientApp: Flower's message handlers in front of a ``BatchNormClient``."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.federation.fields import Values
from fl_bn.federation.schema import KEPT, kept_layers
from fl_bn.flower.layerwise.exchange_address import deployed
from fl_bn.flower.numpy_client import BatchNormClient
from fl_bn.flower.wire.codec import Header, flatten, from_records, header_of, to_records, unflatten
from fl_bn.flower.wire.fields import Form
from fl_bn.flower.wire.gate import Gate, Handler, Limits, enough
from fl_bn.flower.wire.messages import HEADER, LAYOUT, RECORD_KEY_CONFIGS, TO_EVALUATE, TO_MEASURE, TO_MEET, TO_SAVE, TO_TELL, TO_TRAIN
from fl_bn.flower.wire.versions import here
from fl_bn.methods import Phase

HELLO = "query.hello"
STATISTICS = "query.statistics"
RENDEZVOUS = "query.rendezvous"
SAVE = "query.save"


def make_client_app(build: Callable[[Context], BatchNormClient]) -> ClientApp:
    """A ClientApp that builds its client from Flower's context and answers train, evaluate, and the queries
    ``statistics``, ``kept``, ``hello``, ``rendezvous`` and ``save``, all through the ``Gate``."""
    app = ClientApp(mods=[Gate()])

    def fit(message: Message, context: Context) -> Message:
        payload, header = from_records(message.content)
        arrays, layout = flatten(payload)
        form = TO_MEASURE if header.phase == Phase.MEASURE.value else TO_TRAIN
        out, samples, metrics = build(context).fit(arrays, _call(message, form, header, layout))
        content = to_records(unflatten(out, metrics.pop("layout")), header)
        content["metrics"] = MetricRecord({"samples": samples, **metrics})
        return Message(content, reply_to=message)

    def evaluate(message: Message, context: Context) -> Message:
        payload, header = from_records(message.content)
        arrays, layout = flatten(payload)
        client = build(context)
        loss, samples, metrics = client.evaluate(arrays, _call(message, TO_EVALUATE, header, layout))
        behind = client.task.samples_behind(client.site.test.y)
        metrics, fewest = enough(metrics, samples, behind, Limits.of(context).min_samples)
        content = to_records({}, header)
        content["metrics"] = MetricRecord({"samples": samples, "loss": loss, "fewest": fewest, **metrics})
        return Message(content, reply_to=message)

    def save(message: Message, context: Context) -> Message:
        payload, header = from_records(message.content)
        arrays, layout = flatten(payload)
        build(context).save(arrays, _call(message, TO_SAVE, header, layout))
        return Message(RecordDict(), reply_to=message)

    def kept(message: Message, context: Context) -> Message:
        client, header = build(context), header_of(message.content)
        arrays = client.get_parameters(_call(message, TO_TELL, header))
        named = dict(zip(kept_layers(client.model, client.method).sections[KEPT], arrays, strict=True))
        content = to_records({KEPT: named}, header)
        content["metrics"] = MetricRecord({"samples": len(client.site.train)})
        return Message(content, reply_to=message)

    def hello(message: Message, context: Context) -> Message:
        told = {**build(context).get_properties({}), "version": here()} | ({"label-counts": "[]"} if Limits.of(context).secure else {})
        return Message(RecordDict({"hello": ConfigRecord(told)}), reply_to=message)

    def rendezvous(message: Message, context: Context) -> Message:
        build(context).meet(TO_MEET.of_configs(message.content))
        return Message(RecordDict(), reply_to=message)

    def train(message: Message, context: Context) -> Message:
        if RECORD_KEY_CONFIGS not in message.content:
            return fit(message, context)
        from fl_bn.flower.secagg.client import secured  # only now: a plain run does without SecAgg+

        return secured(fit, evaluate, build)(message, context)

    app.train()(_within_its_time(train))
    app.evaluate()(_within_its_time(evaluate))
    app.query("statistics")(_within_its_time(fit))
    app.query("hello")(_within_its_time(hello))
    app.query(KEPT)(_within_its_time(kept))
    app.query("rendezvous")(_within_its_time(rendezvous))
    app.query("save")(_within_its_time(save))
    return app


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
