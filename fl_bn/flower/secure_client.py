"""The client's half of secure aggregation: Flower's SecAgg+ mod around the handlers that train and measure.

Acts only on messages that carry a SecAgg+ record. The plain reply never leaves this file: it becomes a vector (``sums``), with noise if
privacy is asked for, and Flower's mod quantises and masks it. What is told in the clear are counts: samples, batches, activations per
sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common import recorddict_compat as compat
from flwr.common.logger import log
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE, Key, Stage

from fl_bn.data.batches import ClientTooSmall, draw_batches
from fl_bn.flower import schema
from fl_bn.flower.client import BATCHES, BatchNormClient
from fl_bn.flower.codec import from_records, header_of
from fl_bn.flower.masks import secagg_mod
from fl_bn.flower.sums import (
    REFERENCE,
    STATISTICS,
    Plan,
    Sections,
    Weighting,
    activations,
    additive,
    dump,
    flags,
    layout,
    references,
    to_vector,
)
from fl_bn.methods import NORMALISERS, Phase, Report
from fl_bn.training.additive import beyond
from fl_bn.training.privacy import clipped, noisy
from fl_bn.training.secure_settings import LEAST, MODULUS
from fl_bn.training.settings import seeded

REQUIRED = "secure-aggregation"  # in the run config, or in a client's own node config: answer nothing in the clear
ROUNDING = 100  # purpose of a seeded generator, beside those in client.py

Handler = Callable[[Message, Context], Message]


class Insecure(ValueError):
    """The server asked for something that would show one client's numbers."""


def secured(handle: Handler, build: Callable[[Context], BatchNormClient]) -> Handler:
    """``handle``, which answers train messages in the clear, behind SecAgg+ for the messages that carry its record.

    Raises (in the handler):
        Insecure: this client must be aggregated securely, and the message asks for a plain reply; or the protocol's parameters, or the
            shares asked for, would undo the masks.
    """

    def secure(message: Message, context: Context) -> Message:
        configs = message.content.config_records.get(RECORD_KEY_CONFIGS)
        if configs is None:
            if any(bool(config.get(REQUIRED, False)) for config in (context.node_config, context.run_config)):
                raise Insecure(f"{REQUIRED} is on, so this client answers no {message.metadata.message_type} message in the clear")
            return handle(message, context)
        stage, plan = configs.get(Key.STAGE), Plan(0, 0, 0)
        if stage == Stage.SETUP:
            check_setup(configs)
            plan = plan_of(build(context), message)
        elif stage == Stage.UNMASK:
            check_unmask(configs, context)
        before = np.random.get_state()  # noqa: NPY002
        try:
            reply = secagg_mod(message, context, lambda m, c: _summand(m, c, handle, build))
        finally:
            np.random.set_state(before)  # noqa: NPY002
        if stage == Stage.SETUP:
            reply.content["plan"] = MetricRecord(asdict(plan))
        elif stage == Stage.UNMASK:
            del context.state[RECORD_KEY_STATE]  # keys and shares have served
        return reply

    return secure


def plan_of(client: BatchNormClient, message: Message) -> Plan:
    """What this client will do in the round of ``message``: the batches are drawn from the run's seed, so they can be counted before."""
    header = header_of(message.content)
    phase, settings, n = Phase(header.phase), client.settings, len(client.site.train)
    if phase is Phase.MEASURE:
        asked = client.asked(message.content.config_records["config"])
        measured = min(asked.samples or n, n)
        return Plan(0, 0, 0) if asked.measured == NORMALISERS and measured < 2 else Plan(n, measured, 0)
    rng = seeded(client.seed, client.site.client, header.round, BATCHES)
    try:
        batches = list(draw_batches(n, settings.batch_size, rng, epochs=settings.epochs, steps=settings.steps))
    except ClientTooSmall:
        return Plan(0, 0, 0)
    behind = {Report.PASS: min(client.method.statistics_pass.samples or n, n), Report.FIRST: len(batches[0])}
    passes = behind.get(client.method.report, sum(map(len, batches)))
    return Plan(len(np.unique(np.concatenate(batches))), passes, len(batches))


def check_setup(configs: Mapping[str, Any]) -> None:
    """Raises Insecure where the parameters leave a client alone in its sum, or its keys to a minority."""
    clients, shares, threshold = (int(configs.get(key, 0)) for key in (Key.SAMPLE_NUMBER, Key.SHARE_NUMBER, Key.THRESHOLD))
    if clients < LEAST or not LEAST <= shares <= clients:
        raise Insecure(f"SecAgg+ needs at least {LEAST} clients and shares, but got {shares} shares among {clients} clients")
    if not shares < 2 * threshold <= 2 * shares:
        raise Insecure(
            f"the threshold must be more than half of the {shares} shares, or two minorities unmask a client, but got {threshold}"
        )
    levels, modulus = int(configs.get(Key.TARGET_RANGE, 0)), configs.get(Key.MOD_RANGE)
    if modulus != MODULUS or clients * levels >= MODULUS or configs.get(Key.MAX_WEIGHT) != 1.0:
        raise Insecure(f"{clients} clients with {levels} levels each need modulus {MODULUS} and weight 1, but got {dict(configs)}")


def check_unmask(configs: Mapping[str, Any], context: Context) -> None:
    """Raises Insecure where both secrets of one client are asked for: together they remove every mask of its vector.

    Flower's mod answers such a request.
    """
    active, dead = set(configs.get(Key.ACTIVE_NODE_ID_LIST, [])), set(configs.get(Key.DEAD_NODE_ID_LIST, []))
    if both := active & dead:
        raise Insecure(f"shares of both secrets of nodes {sorted(both)} were asked for, which would unmask them")
    if context.node_id not in active:
        raise Insecure("the server counts this client, which sent its masked vector, among the lost")


def _summand(message: Message, context: Context, handle: Handler, build: Callable[[Context], BatchNormClient]) -> Message:
    """The plain reply as Flower's mod wants it: one vector, weight 1, and the counts."""
    client, plan = build(context), plan_of(build(context), message)
    received, header = from_records(message.content)
    reference = references(received.pop(REFERENCE, received.get("statistics", {})))
    message.content.pop(REFERENCE, None)  # not for the handler: the model keeps the statistics that came with its weights
    phase, config = Phase(header.phase), message.content.config_records["config"]
    plain = handle(message, context)
    reply, repeated = from_records(plain.content)
    told = plain.content.metric_records["metrics"]
    if (came := (told.get("samples"), told.get("steps", 0))) != (plan.samples, plan.steps):
        raise ValueError(f"client {client.site.client} planned {plan.samples} samples and {plan.steps} steps, but did {came}")
    trained, private = phase is not Phase.MEASURE, "dp-noise" in config
    shapes = layout(schema.reply(client.model, client.method, phase, client.settings.update), loss=trained and not private, cut=not private)
    weighting = Weighting(*(int(config[f"secagg-{key}-weight"]) for key in ("update", "statistics", "samples")))  # type: ignore[arg-type]
    per_sample = activations(reply, plan)
    state = context.state.config_records[RECORD_KEY_STATE]
    limit = float(state[Key.CLIPPING_RANGE])  # type: ignore[arg-type]
    parts, cut = additive(reply, received.get("weights", {}), reference, limit)
    parts = {s: {k: t * weighting.of(s, plan) for k, t in part.items()} for s, part in parts.items() if s in shapes}
    if private:
        parts = _private(parts, config, int(state[Key.THRESHOLD]))  # type: ignore[arg-type]
    beyond_range = {f"{s}/{k}": n for s, part in parts.items() for k, n in beyond(part, limit).items()}
    _warn(client, header.round, {k: n for k, n in cut.items() if n}, beyond_range, limit)
    loss = float(told.get("loss", 0.0))  # type: ignore[arg-type]
    parts |= flags(loss, weighting.of("loss", plan), any(cut.values()), bool(beyond_range), limit)
    counts: dict[str, Any] = {**asdict(plan), "activations": dump(per_sample), **({"kept": told["kept"]} if "kept" in told else {})}
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([to_vector(parts, shapes)]), 1, counts | asdict(repeated))
    if not private:  # a sum of integers is exact: with the same roundings a run is reproducible, bit for bit
        rng = seeded(client.seed, client.site.client, header.round, ROUNDING, not trained)
        np.random.seed(int(rng.integers(2**32)))  # noqa: NPY002
    content: RecordDict = compat.fitres_to_recorddict(result, keep_input=False)
    return Message(content, reply_to=message)


def _private(parts: Sections, config: Mapping[str, Any], contributors: int) -> Sections:
    """Update and statistics, each clipped as one vector and with this client's share of its noise."""
    done: Sections = {section: {} for section in parts}
    for statistics, key in ((False, "dp-clip"), (True, "dp-statistics-clip")):
        vector = {f"{s}/{k}": t for s, part in parts.items() if (s in STATISTICS) == statistics for k, t in part.items()}
        clip = float(config[key])
        for name, tensor in noisy(clipped(vector, clip), clip, float(config["dp-noise"]), contributors).items():
            section, _, key_of = name.partition("/")
            done[section][key_of] = tensor
    return done


def _warn(client: BatchNormClient, round: int, statistics: Mapping[str, int], values: Mapping[str, int], limit: float) -> None:
    """Say here what is cut off: the server sees the sum alone, and in it how many clients cut anything."""
    who = f"client {client.site.client}, round {round}"
    for layer, count in statistics.items():
        text = (
            "%s: layer %s: the statistics of %d channels lie more than %g standard deviations, or a variance %g times, from the reference"
        )
        log(logging.WARNING, f"{text}, and are cut to that", who, layer or "model", count, limit, limit**2)
    for name, count in values.items():
        text = "%s: %d values of %s exceed the quantiser's range of %g and are cut off: raise secagg-clipping-range"
        log(logging.WARNING, text, who, count, name, limit)
