"""Run the client's half of secure aggregation: Flower's SecAgg+ mod around training and measuring.

The plain reply never leaves this file. It becomes a vector (``sums``), with noise
if privacy is on, which Flower's mod quantises and masks. Only counts travel
unmasked: samples, batches, and activations per sample.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters

from fl_bn.data.batches import ClientTooSmall
from fl_bn.federation.settings import seeded
from fl_bn.federation.training import BATCHES
from fl_bn.federation.values import ClientState, Sections, to_tensors
from fl_bn.flower.compat import RECORD_KEY_STATE, Key, Stage, fitres_to_recorddict, log
from fl_bn.flower.handlers import read
from fl_bn.flower.local_client import BatchNormClient
from fl_bn.flower.secagg import sums
from fl_bn.flower.secagg.instructions import from_config, history_of, instruction_digest, problem, to_config, training_digest, with_history
from fl_bn.flower.secagg.masks import client_half, secagg_mod
from fl_bn.flower.secagg.sums import REFERENCE, STATISTICS, Plan, Weighting, to_vector
from fl_bn.flower.wire import messages
from fl_bn.flower.wire.codec import OURS, Header, arrays_in, header_of, our_records, records_of
from fl_bn.flower.wire.gate import Insecure, Limits, evaluations_left, sums_evaluations
from fl_bn.flower.wire.messages import COMBINED_HISTORY, OWN_HISTORY, PLAN, RECORD_KEY_CONFIGS, WEIGHED
from fl_bn.methods import NORMALISERS, Phase, StatisticsPass, StatisticsReport
from fl_bn.secure.additive import beyond
from fl_bn.secure.privacy import clipped, noise_reach, noisy
from fl_bn.secure.settings import LEAST, MODULUS
from fl_bn.support.wire import excerpt

ROUNDING = 100  # this random generator in its seed; federation/training.py has the others' numbers
NOBODY = Plan(0, 0, 0)


def secure(build: Callable[[Context], BatchNormClient], message: Message, context: Context) -> Message:
    """Answer a train message of a secure sum, or raise ``Insecure``."""
    content, state = message.content, client_half.SecAggPlusState(**context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord()))
    if why := next(refusals(content, state, context.node_id), ""):
        raise Insecure(why)
    stage, header, digest, vector = content.config_records[RECORD_KEY_CONFIGS][Key.STAGE], header_of(content), b"", _no_vector
    if stage == Stage.SETUP:
        client, cohort = build(context), messages.SET_UP.of(content)["cohort"]
        plan, own = plan_of(client, message, header, context), history_of(kept_in(client, message, header))
        context.state.pop(RECORD_KEY_STATE, None)  # the secrets of a sum that failed
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        client = build(context)
        history = from_config(records_of(content, ConfigRecord).get(COMBINED_HISTORY.name), COMBINED_HISTORY, header.round)
        why = problem(kept_in(client, message, header), history, Limits.of(context).unknown_rounds)
        if why := why or next(noise_refusals(message, context.run_config), ""):
            raise Insecure(why)
        digest = instruction_digest(message, context.run_config, state)
        vector = partial(_evaluated if sums_evaluations(message) else _summand, client, header, digest)
    before = np.random.get_state()  # noqa: NPY002
    try:
        reply = secagg_mod(message, context, vector, digest)
    finally:
        np.random.set_state(before)  # noqa: NPY002
    if stage == Stage.SETUP:
        reply.content[PLAN.name] = MetricRecord(asdict(plan))
        if own:
            reply.content[OWN_HISTORY.name] = ConfigRecord({**to_config(own)})
        context.state.config_records[RECORD_KEY_STATE]["cohort"] = sorted(cohort)
    elif stage == Stage.UNMASK:
        del context.state[RECORD_KEY_STATE]  # the keys and shares are no longer needed
    return reply


def _no_vector(message: Message, context: Context) -> Message:
    raise Insecure("the server asks for this client's vector in a stage of SecAgg+ that needs none")


# what a client refuses, stage by stage


def refusals(content: RecordDict, state: Any, node: int) -> Iterator[str]:
    """Yield why a client must not answer a stage's message."""
    stage, last, order = content.config_records[RECORD_KEY_CONFIGS].get(Key.STAGE), state.current_stage, Stage.all()
    if stage not in order or (stage != Stage.SETUP and order.index(stage) != (order.index(last) + 1) % len(order)):
        # in order, this client sends its shares once, for one masked vector
        yield f"expected the stage of SecAgg+ that follows {last!r}, or the first one again, but the server asks for {excerpt(stage)}"
        return
    form, rules = RULES[str(stage)]
    yield from rules(form.of(content), state, node)


def setup_refusals(asked: Mapping[str, Any], state: Any, node: int) -> Iterator[str]:
    """Yield what is wrong with the protocol's parameters.

    The sum could have too few clients or exceed the modulus, or a minority could
    unmask a vector.
    """
    clients, shares, threshold, levels = (asked[name] for name in ("sample_num", "share_num", "threshold", "target_range"))
    if not LEAST <= shares <= clients:
        yield f"SecAgg+ needs {LEAST} or more shares, and at most one per client, but got {shares} shares among {clients} clients"
    if not len(set(asked["cohort"])) == len(asked["cohort"]) == clients or node not in asked["cohort"]:
        yield f"expected {clients} nodes in the cohort, one of them this client's, but got {excerpt(asked['cohort'])}"
    if not shares < 2 * threshold <= 2 * shares:
        yield f"the threshold must be more than half of the {shares} shares (else minorities could unmask) and at most all, not {threshold}"
    if asked["mod_range"] != MODULUS or clients * levels >= MODULUS or asked["max_weight"] != 1.0:
        told = f"{asked['mod_range']}, {asked['max_weight']}, {clients} and {levels}"
        yield f"expected modulus {MODULUS}, weight 1, and clients times levels below the modulus, but the server asks for {told}"


def keys_refusals(asked: Mapping[str, Any], state: Any, node: int) -> Iterator[str]:
    """Yield what is wrong with the public keys of all clients, two of each, by node."""
    keys = {name: pair for name, pair in asked.items() if name != Key.STAGE}
    if len(keys) != state.share_num or not {str(node)} <= keys.keys() <= set(map(str, state.cohort)):
        yield f"expected the keys of {state.share_num} clients of the cohort, this one among them, but got those of {excerpt(list(keys))}"
    pems = [pem for pair in keys.values() for pem in (pair if type(pair) is list and len(pair) == 2 else [None])]
    if any(type(pem) is not bytes or len(pem) > messages.KEY for pem in pems) or len(set(pems)) != len(pems):
        yield "expected two keys of each client, all of them different, but a client's are missing, invalid or equal to others"
    if keys[str(node)] != [state.pk1, state.pk2]:
        yield "the server gives the other clients false keys of this client"


def shares_refusals(asked: Mapping[str, Any], state: Any, node: int) -> Iterator[str]:
    """Yield what is wrong with the encrypted shares, one from each client with keys."""
    wanted = sorted(set(state.public_keys_dict) - {node})
    if sorted(asked["srcs"]) != wanted or len(asked["ctxts"]) != len(wanted):
        yield f"expected the shares of each of nodes {wanted} once, but got those of {excerpt(asked['srcs'])}"


def unmask_refusals(asked: Mapping[str, Any], state: Any, node: int) -> Iterator[str]:
    """Yield why the requested shares could remove more than the masks of this sum.

    This client gives a share of one of two secrets for every client whose shares it
    holds. Both would unmask a client's vector. So would shares of one secret for
    too many of its neighbours. Flower's own mod does not refuse such requests.
    """
    active, lost, held = asked["active_nids"], asked["dead_nids"], sorted(state.rd_seed_share_dict)
    if sorted(active + lost) != held:
        asks = f"{excerpt(sorted(active))} in the sum and {excerpt(sorted(lost))} lost"
        yield f"any other than one share of each of nodes {excerpt(held)} could unmask a client, but the server asks for those of {asks}"
    if node not in active:
        yield "the server counts this client among the lost clients, although this client sent its masked vector"
    if len(active) < state.threshold:
        yield f"a sum needs {state.threshold} clients to hide each of them, but only {len(active)} are in it"


RULES = {  # of a stage's message: its form, and what depends on the stages before
    Stage.SETUP: (messages.SET_UP, setup_refusals),
    Stage.SHARE_KEYS: (messages.SHARE_KEYS, keys_refusals),
    Stage.COLLECT_MASKED_VECTORS: (messages.COLLECT, shares_refusals),
    Stage.UNMASK: (messages.UNMASK, unmask_refusals),
}


def weight_refusals(weighting: Weighting, sections: Iterable[str], plan: Plan, levels: int) -> Iterator[str]:
    """Yield each section in which this client's weight is above 1, or below 2 / ``levels``.

    A smaller weight would not survive the quantiser.
    """
    for section in sections:
        if not 2 / levels <= (weight := weighting.of(section, plan)) <= 1:
            counts = f"its counts {asdict(plan)} and the server's weights {asdict(weighting)}"
            yield f"the weight of this client's {section} must be from 2 / {levels} to 1, but with {counts} it would be {weight:g}"


def noise_refusals(message: Message, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a vector would lack noise that the run config has, which the run's submitter may have signed."""
    signed, told = ({name: of[name] for name in messages.NOISES if name in of} for of in (config, messages.SECURE.of(message.content)))
    if config.get("dp-noise") and (sums_evaluations(message) or signed.items() - told.items()):
        yield f"the run config has {signed}, but the server asks for {'an evaluation' if sums_evaluations(message) else told or 'no noise'}"


# what a client computes


def plan_of(client: BatchNormClient, message: Message, header: Header, context: Context) -> Plan:
    """Count the samples and batches of this client's round; for an evaluation, the test samples.

    The run's seed decides the batches. All counts are 0 if the client has too few
    samples, or if its site allows no further evaluation.
    """
    who = client.site.client
    if sums_evaluations(message):
        tested, limits = len(client.site.test), Limits.of(context)
        if tested >= max(limits.min_samples, 1) and evaluations_left(context, limits):
            return Plan(tested, 0, 0)
        log(logging.WARNING, "client %s is not in this evaluation: %s test samples are too few, or its limits are used up", who, tested)
        return NOBODY
    phase, settings, n = Phase(header.phase), client.settings, len(client.site.train)
    if phase is Phase.MEASURE:
        asked = messages.TO_MEASURE.of(message.content)["measured"]
        requested = StatisticsPass.for_exchange(asked, client.method.statistics_pass.samples)
        samples = min(requested.samples or n, n)
        return NOBODY if requested.measured == NORMALISERS and samples < 2 else Plan(n, samples, 0)
    rng, least = seeded(client.seed, who, header.round, BATCHES), client.network.locality.fewest(phase)
    try:
        batches = settings.draw(n, rng, least)
    except ClientTooSmall:
        return NOBODY
    in_pass = client.method.statistics_pass.size(n, settings.planned(n))
    behind = {StatisticsReport.PASS: in_pass, StatisticsReport.FIRST: len(batches[0])}
    passes = behind.get(client.method.report, sum(map(len, batches)))
    return Plan(len(np.unique(np.concatenate(batches))), passes, len(batches))


def kept_in(client: BatchNormClient, message: Message, header: Header) -> ClientState:
    """Return the state before the round, to train, or that after it."""
    after = sums_evaluations(message) or header.phase == Phase.MEASURE.value
    return client.store(messages.RUN.of(message.content)).read(header.round + after)


def _summand(client: BatchNormClient, header: Header, digest: bytes, message: Message, context: Context) -> Message:
    """Train or measure. Reply as Flower's mod expects: a vector with weight 1, and the counts."""
    about = our_records(message.content, ArrayRecord).get(REFERENCE)
    # the reference is not part of the instruction: the model keeps the statistics that came with its weights
    message.content.pop(OURS + REFERENCE, None)
    request = read(message, client.network, header=header)
    sent, phase = request.instruction.sections, request.instruction.phase
    reference = sums.references(sent.get("statistics", {})) | sums.references(to_tensors(arrays_in(about or ArrayRecord(), REFERENCE)))
    plan, weights = plan_of(client, message, header, context), messages.WEIGHTS.of(message.content)
    noise = messages.NOISE.of(message.content) if "dp-noise" in messages.SECURE.of(message.content) else None
    trained, weighting = phase is not Phase.MEASURE, Weighting(*(weights[name] for name in WEIGHED))
    shapes = sums.layout(client.network.reply(phase, client.settings.update), loss=trained and noise is None, cut=noise is None)
    state: Mapping[str, Any] = context.state.config_records[RECORD_KEY_STATE]
    if why := next(weight_refusals(weighting, shapes, plan, state[Key.TARGET_RANGE]), ""):
        raise Insecure(why)
    client.stores = partial(with_history, training_digest(message, context.run_config))
    reply = client.compute(request, lambda reply: reply)  # the reply becomes a vector, and never leaves
    limit: float = state[Key.CLIPPING_RANGE]
    parts, cut = sums.additive(reply.sections, sent.get("weights", {}), reference, limit)
    parts = {s: {k: t * weighting.of(s, plan) for k, t in part.items()} for s, part in parts.items() if s in shapes}
    if noise is not None:
        parts = _private(parts, noise, state[Key.THRESHOLD], limit)
    far = {f"values of {s}/{k} exceed": n for s, part in parts.items() for k, n in beyond(part, limit).items()}
    layers = {f"channels' statistics of layer {k or 'model'} are, about the reference, beyond": n for k, n in cut.items() if n}
    for what, count in (far | layers).items():
        who = f"client {client.site.client}, round {header.round}"
        log(logging.WARNING, "%s: %d %s the quantiser's range of %g and are cut off: raise secagg-clipping-range", who, count, what, limit)
    parts |= sums.flags(float(reply.metrics.get("loss", 0.0)), weighting.of("loss", plan), bool(layers), bool(far), limit)
    if noise is None:
        _seed_rounding(client, header.round, 0 if trained else 1)
    return _vector_reply(message, to_vector(parts, shapes), sums.activations(reply.sections, plan), digest)


def _evaluated(client: BatchNormClient, header: Header, digest: bytes, message: Message, context: Context) -> Message:
    """Evaluate, and reply as Flower's mod expects."""
    if not plan_of(client, message, header, context).samples:
        raise Insecure("after this sum began, this client used up its evaluations or lost test samples, so it can no longer take part")
    reply = client.evaluation(read(message, client.network, messages.TO_EVALUATE, header), Limits.of(context).min_samples)
    limit = float(context.state.config_records[RECORD_KEY_STATE][Key.CLIPPING_RANGE])  # type: ignore[arg-type]
    numbers = {name: value for name, value in reply.metrics.items() if isinstance(value, float)}
    vector = to_vector(sums.evaluation_parts(numbers, client.task, limit), sums.evaluation_layout(client.task))
    _seed_rounding(client, header.round, 2)
    return _vector_reply(message, vector, {}, digest)


def _seed_rounding(client: BatchNormClient, round: int, purpose: int) -> None:
    """Seed the quantiser's random rounding by the run's seed."""
    np.random.seed(int(seeded(client.seed, client.site.client, round, ROUNDING, purpose).integers(2**32)))  # noqa: NPY002


def _vector_reply(message: Message, vector: np.ndarray, activations: Mapping[str, int], digest: bytes) -> Message:
    # a metric of Flower's ``FitRes`` is a single value
    told: dict[str, Any] = {"activations": json.dumps(activations), "digest": digest.hex()}
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), 1, told)
    return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)


def _private(parts: Sections, config: Mapping[str, Any], contributors: int, limit: float) -> Sections:
    """Clip the update and the statistics, each as one vector, and add this client's share of the noise.

    The shares of ``contributors`` clients, the smallest number in a sum, add up to
    the whole noise. Noise that the quantiser's range ``limit`` would cut off raises
    ``Insecure``.
    """
    noised: Sections = {section: {} for section in parts}
    for statistics, key in ((False, "dp-clip"), (True, "dp-statistics-clip")):
        vector = {f"{s}/{k}": t for s, part in parts.items() if (s in STATISTICS) == statistics for k, t in part.items()}
        clip, multiplier = float(config[key]), float(config["dp-noise"])
        if vector and (reach := noise_reach(multiplier, clip, contributors)) > limit:
            said = f"noise of four deviations, {reach:.3g}"
            raise Insecure(f"{said}, would be cut off at the quantiser's range of {limit:g}")
        for name, tensor in noisy(clipped(vector, clip), clip, multiplier, contributors).items():
            section, _, key_of = name.partition("/")
            noised[section][key_of] = tensor
    return noised
