"""Make the ClientApp, whose message handlers call a ``LocalClient``."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from functools import partial

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fl_bn.federation.schema import KEPT
from fl_bn.federation.values import Reply
from fl_bn.flower.handlers import read, reply_to
from fl_bn.flower.layerwise.exchange_address import deployed
from fl_bn.flower.local_client import LocalClient
from fl_bn.flower.wire.codec import header_of
from fl_bn.flower.wire.gate import Gate, Handler, Limits
from fl_bn.flower.wire.messages import HELLO as INTRODUCTION
from fl_bn.flower.wire.messages import RECORD_KEY_CONFIGS, TO_EVALUATE, TO_MEET, TO_SAVE, TO_TELL
from fl_bn.flower.wire.versions import here

HELLO = "query.hello"
STATISTICS = "query.statistics"
RENDEZVOUS = "query.rendezvous"
SAVE = "query.save"


def make_client_app(build: Callable[[Context], LocalClient]) -> ClientApp:
    """Make a ClientApp that answers the server's messages. Its ``Gate`` checks each message and each reply.

    The ClientApp answers train and evaluate messages, and the queries ``statistics``, ``kept``, ``hello``,
    ``rendezvous`` and ``save``.

    Args:
        build: Makes the client, for example a ``BatchNormClient``, from Flower's context of a message.
    """
    app = ClientApp(mods=[Gate()])

    def work(message: Message, context: Context) -> Message:
        if RECORD_KEY_CONFIGS in message.content:  # only train messages have it; the gate refuses it in others
            from fl_bn.flower.secagg.client import secured  # imported here, since a run without secure aggregation does not need it

            return secured(build)(message, context)
        client = build(context)
        request = read(message, client.network)
        limits = Limits.of(context)  # a site that limits its evaluations sends no further ones with its training replies
        client.tells_tests = limits.max_evaluations is None and len(client.site.test) >= limits.min_samples
        return client.compute(request, partial(reply_to, message, request.header, rounding=request.rounding))

    def evaluate(message: Message, context: Context) -> Message:
        client = build(context)
        request = read(message, client.network, TO_EVALUATE)
        return reply_to(message, request.header, client.evaluation(request, Limits.of(context).min_samples))

    def save(message: Message, context: Context) -> Message:
        client = build(context)
        client.save(read(message, client.network, TO_SAVE))
        return Message(RecordDict(), reply_to=message)

    def kept(message: Message, context: Context) -> Message:
        client, header = build(context), header_of(message.content)
        config = TO_TELL.of_configs(message.content) if TO_TELL.name in message.content else TO_TELL.read({})
        samples, layers = len(client.site.train), client.kept_layers(config, header.round)
        return reply_to(message, header, Reply(client.site.client, {KEPT: layers}, samples, samples))

    def hello(message: Message, context: Context) -> Message:
        introduction = {**build(context).introduce(), "version": here()} | ({"label-counts": "[]"} if Limits.of(context).secure else {})
        return Message(RecordDict({INTRODUCTION.name: ConfigRecord({**introduction})}), reply_to=message)

    def rendezvous(message: Message, context: Context) -> Message:
        build(context).meet(TO_MEET.of_configs(message.content))
        return Message(RecordDict(), reply_to=message)

    app.train()(_within_its_time(work))
    app.evaluate()(_within_its_time(evaluate))
    app.query("statistics")(_within_its_time(work))
    app.query("hello")(_within_its_time(hello))
    app.query(KEPT)(_within_its_time(kept))
    app.query("rendezvous")(_within_its_time(rendezvous))
    app.query("save")(_within_its_time(save))
    return app


def _within_its_time(handle: Handler) -> Handler:
    """Return ``handle`` with a time limit, which is the time to live of the message. In a simulation, return it unchanged.

    In a deployment, each message is answered in a process of its own. Without the limit, a client whose process hangs,
    for example on a dead network drive, could join no later round. At the limit, the process prints its traceback to
    stderr and ends.
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
