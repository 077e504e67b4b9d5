"""Run the client's half of secure aggregation: Flower's SecAgg+ mod around the handlers that train and measure.

The plain reply never leaves this file. It becomes a vector (``sums``), with noise if privacy is on. Flower's
mod quantises and masks the vector. Only counts travel unmasked: samples, batches, and activations per sample.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from cryptography.fernet import InvalidToken
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters

from fl_bn.data.batches import ClientTooSmall
from fl_bn.federation.narrow import AS_THE_MODEL
from fl_bn.federation.one_sample import fewest
from fl_bn.federation.payload import Sections, to_tensors
from fl_bn.federation.settings import seeded
from fl_bn.federation.sources import BATCHES
from fl_bn.federation.values import ClientState, Reply
from fl_bn.flower.compat import RECORD_KEY_STATE, Key, Stage, decrypt, fitres_to_recorddict, log, share_keys_plaintext_separate
from fl_bn.flower.handlers import read
from fl_bn.flower.local_client import LocalClient
from fl_bn.flower.secagg import evaluation as secure_evaluation
from fl_bn.flower.secagg.instruction_digest import instruction_digest, training_digest
from fl_bn.flower.secagg.instruction_history import from_config, history_of, problem, telling, to_config
from fl_bn.flower.secagg.masks import client_half, secagg_mod
from fl_bn.flower.secagg.sums import (
    REFERENCE,
    STATISTICS,
    Plan,
    Weighting,
    activations,
    additive,
    dump,
    flags,
    layout,
    references,
    to_vector,
)
from fl_bn.flower.wire.codec import Header, arrays_in, header_of
from fl_bn.flower.wire.fields import OURS, our_records, records_of
from fl_bn.flower.wire.gate import Handler, Insecure, Limits, evaluations_left, sums_evaluations
from fl_bn.flower.wire.messages import (
    COLLECT,
    COMBINED_HISTORY,
    KEY,
    NOISE,
    OWN_HISTORY,
    PLAN,
    RECORD_KEY_CONFIGS,
    RUN,
    SECURE,
    SET_UP,
    SHARE_KEYS,
    TO_EVALUATE,
    TO_MEASURE,
    UNMASK,
    WEIGHED,
    WEIGHTS,
)
from fl_bn.methods import NORMALISERS, Phase, StatisticsReport
from fl_bn.secure.additive import beyond
from fl_bn.secure.privacy import clipped, noisy
from fl_bn.secure.settings import LEAST, MODULUS
from fl_bn.support.wire import excerpt

ROUNDING = 100  # stands for this random generator in its seed; federation/sources.py has the numbers of other generators


def secured(build: Callable[[Context], LocalClient]) -> Handler:
    """Return the handler that answers a secure sum's messages, which are train messages of Flower.

    The ``Gate`` has checked these messages before. The handler raises ``Insecure`` if the protocol's parameters or the
    requested shares would reveal a single client's vector.

    Args:
        build: makes the client from Flower's context of a message.
    """

    def secure(message: Message, context: Context) -> Message:
        content = message.content
        stage, plan, digest, summand = str(content.config_records[RECORD_KEY_CONFIGS].get(Key.STAGE)), Plan(0, 0, 0), b"", _no_vector
        _check_order(stage, context)
        if stage == Stage.SETUP:
            setup = SET_UP.of_configs(content)
            check_setup(setup, context.node_id)
            client, header = build(context), header_of(content)
            plan, kept = plan_of(client, message, header, context), kept_in(client, message, header)
        elif stage == Stage.SHARE_KEYS:
            check_keys(SHARE_KEYS.of_configs(content), _state(context), context.node_id)
        elif stage == Stage.COLLECT_MASKED_VECTORS:
            if unreadable := check_collect(COLLECT.of_configs(content), _state(context), context.node_id):
                del context.state[RECORD_KEY_STATE]
                return Message(RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({"unreadable": unreadable})}), reply_to=message)
            history = from_config(_config(message), COMBINED_HISTORY)
            client, header = build(context), header_of(content)
            if why := problem(kept_in(client, message, header), history, Limits.of(context).unknown_rounds):
                raise Insecure(why)
            digest = instruction_digest(message, context.run_config, _state(context))
            summand = partial(_evaluated if sums_evaluations(message) else _summand, client, header, digest)
        else:
            check_unmask(UNMASK.of_configs(content), _state(context), context.node_id)
        before = np.random.get_state()  # noqa: NPY002
        try:
            reply = secagg_mod(message, context, summand, digest)
        finally:
            np.random.set_state(before)  # noqa: NPY002
        if stage == Stage.SETUP:
            reply.content[PLAN.name] = MetricRecord(asdict(plan))
            if own := history_of(kept):
                reply.content[OWN_HISTORY.name] = ConfigRecord({**to_config(own)})
            context.state.config_records[RECORD_KEY_STATE]["cohort"] = sorted(setup["cohort"])
        elif stage == Stage.UNMASK:
            del context.state[RECORD_KEY_STATE]  # the keys and shares are no longer needed
        return reply

    return secure


def _no_vector(message: Message, context: Context) -> Message:
    raise Insecure("the server asks for this client's vector in a stage of SecAgg+ that needs none")


def plan_of(client: LocalClient, message: Message, header: Header, context: Context) -> Plan:
    """Count the samples and batches that this client will use in the round of ``message``.

    The run's seed decides the batches, so the client can count them before it trains. For an evaluation, the test
    samples are counted.

    Args:
        client: the client.
        message: the server's message.
        header: the message's header.
        context: Flower's context of the client.

    Returns:
        The counts. All are 0 if the client has too few samples, or if its site allows no further evaluation.
    """
    if sums_evaluations(message):
        tested, limits = len(client.site.test), Limits.of(context)
        if tested >= max(limits.min_samples, 1) and evaluations_left(context, limits):
            return Plan(tested, 0, 0)
        log(
            logging.WARNING,
            "client %s takes no part in the evaluation: its %d test samples are too few, or its evaluations are used up (%s)",
            client.site.client,
            tested,
            limits,
        )
        return Plan(0, 0, 0)
    phase, settings, n = Phase(header.phase), client.settings, len(client.site.train)
    if phase is Phase.MEASURE:
        requested = client.requested_pass(TO_MEASURE.of_configs(message.content))
        samples = min(requested.samples or n, n)
        return Plan(0, 0, 0) if requested.measured == NORMALISERS and samples < 2 else Plan(n, samples, 0)
    rng, least = seeded(client.seed, client.site.client, header.round, BATCHES), fewest(client.model, client.network.locality, phase)
    try:
        batches = settings.draw(n, rng, least)
    except ClientTooSmall:
        return Plan(0, 0, 0)
    in_pass = client.method.statistics_pass.size(n, settings.planned(n))
    behind = {StatisticsReport.PASS: in_pass, StatisticsReport.FIRST: len(batches[0])}
    passes = behind.get(client.method.report, sum(map(len, batches)))
    return Plan(len(np.unique(np.concatenate(batches))), passes, len(batches))


def kept_in(client: LocalClient, message: Message, header: Header) -> ClientState:
    """Return the state from which this client computes its vector for ``message``.

    For training, this is the state before the round; for evaluation and statistics, the state after the round.
    """
    after = sums_evaluations(message) or header.phase == Phase.MEASURE.value
    return client.kept(RUN.of_configs(message.content), header.round + after)


def _config(message: Message) -> ConfigRecord | None:
    return records_of(message.content, ConfigRecord).get(COMBINED_HISTORY.name)


def check_setup(configs: Mapping[str, Any], node: int) -> None:
    """Check the parameters of the protocol.

    Args:
        configs: the parameters.
        node: this client's node.

    Raises:
        Insecure: the sum could have too few clients or exceed the modulus; a minority of the clients could unmask a
            vector; or this client is not in the cohort.
    """
    clients, shares, threshold = configs["sample_num"], configs["share_num"], configs["threshold"]
    if clients < LEAST or not LEAST <= shares <= clients:
        raise Insecure(
            f"SecAgg+ needs at least {LEAST} clients and {LEAST} shares, and at most one share per client, but got {shares} shares among "
            f"{clients} clients"
        )
    if len(cohort := set(configs["cohort"])) != clients or len(configs["cohort"]) != clients or node not in cohort:
        raise Insecure(f"expected {clients} nodes in the cohort, one of them this client's, but got {excerpt(configs['cohort'])}")
    if not shares < 2 * threshold <= 2 * shares:
        raise Insecure(
            f"the threshold must be more than half of the {shares} shares (else two minorities could unmask a client) and at most all, "
            f"but got {threshold}"
        )
    levels, modulus = configs["target_range"], configs["mod_range"]
    if modulus != MODULUS or clients * levels >= MODULUS or configs["max_weight"] != 1.0:
        raise Insecure(
            f"expected modulus {MODULUS}, weight 1 and a product of clients and levels below the modulus, but the server asks for modulus "
            f"{modulus}, weight {configs['max_weight']}, {clients} clients and {levels} levels"
        )


def _check_order(stage: str, context: Context) -> None:
    """Check that the server asks for the stages in order. So this client sends its shares once, for one masked vector.

    Raises:
        Insecure: ``stage`` is neither the first stage nor the one that follows the client's last stage.
    """
    last = _state(context).current_stage
    order = Stage.all()
    if stage not in order or (stage != Stage.SETUP and order.index(stage) != (order.index(last) + 1) % len(order)):
        raise Insecure(
            f"expected the stage of SecAgg+ that follows {last!r}, or the first one again, but the server asks for {excerpt(stage)}"
        )


def _state(context: Context) -> Any:
    return client_half.SecAggPlusState(**context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord()))


def check_keys(configs: Mapping[str, Any], state: Any, node: int) -> None:
    """Check the public keys of all clients, which the server passes on.

    Args:
        configs: the two public keys of each client, by node.
        state: this client's state of SecAgg+.
        node: this client's node.

    Raises:
        Insecure: there are not as many clients as shares, a client is not of the cohort, or this client is missing. Or two
            keys are equal or invalid, or the server names false keys of this client.
    """
    keys = {name: pair for name, pair in configs.items() if name != Key.STAGE}
    nodes = [int(name) for name in keys if name.isascii() and name.isdigit() and str(int(name[:24])) == name]
    if len(nodes) != len(keys) or len(nodes) != state.share_num or node not in nodes:
        raise Insecure(f"expected the keys of {state.share_num} clients, this one among them, but got those of {excerpt(list(keys))}")
    if others := set(nodes) - set(state.cohort):
        raise Insecure(f"expected keys of clients of the cohort, but got those of nodes {excerpt(sorted(others))}")
    pems = [pem for pair in keys.values() for pem in (pair if type(pair) is list and len(pair) == 2 else [None])]
    if any(type(pem) is not bytes or len(pem) > KEY for pem in pems) or len(set(pems)) != len(pems):
        raise Insecure("expected two keys of each client, all of them different, but a client's are missing, invalid or equal to others")
    if keys[str(node)] != [state.pk1, state.pk2]:
        raise Insecure("the server gives the other clients false keys of this client")


def check_collect(configs: Mapping[str, Any], state: Any, node: int) -> list[int]:
    """Check the encrypted shares that the server passes on.

    Args:
        configs: the encrypted shares, with the nodes that made them.
        state: this client's state of SecAgg+.
        node: this client's node.

    Returns:
        The nodes whose shares cannot be read. Either the node or the server is at fault.

    Raises:
        Insecure: there is not exactly one share from each client whose keys the server passed on.
    """
    sources, ciphertexts, wanted = configs["srcs"], configs["ctxts"], set(state.public_keys_dict) - {node}
    if len(sources) != len(wanted) or set(sources) != wanted or len(ciphertexts) != len(sources):
        raise Insecure(f"expected the shares of each of nodes {sorted(wanted)} once, but got those of {excerpt(sources)}")
    pairs = zip(sources, ciphertexts, strict=True)
    return [source for source, sealed in pairs if not _readable(sealed, state.ss2_dict[source], source, node)]


def _readable(sealed: bytes, key: bytes, source: int, node: int) -> bool:
    try:
        sender, recipient, mask_share, key_share = share_keys_plaintext_separate(decrypt(key, sealed))
    except (InvalidToken, ValueError, TypeError):
        return False
    return (sender, recipient) == (source, node) and all(len(share) >= 20 and len(share) % 16 == 4 for share in (mask_share, key_share))


def check_unmask(configs: Mapping[str, Any], state: Any, node: int) -> None:
    """Check that the requested shares can only remove the masks of this sum.

    Each client has two secrets, and this client holds a share of each. It gives exactly one of the two shares, for every
    client whose shares it holds. Shares of both secrets of a client would remove all masks of its vector. So would
    shares of one secret for too many of its neighbours. Flower's own mod does not refuse such requests.

    Args:
        configs: the nodes whose shares are requested.
        state: this client's state of SecAgg+.
        node: this client's node.

    Raises:
        Insecure: the shares could remove other masks, too.
    """
    active, dead = configs["active_nids"], configs["dead_nids"]
    if both := set(active) & set(dead):
        raise Insecure(f"the server asks for shares of both secrets of nodes {sorted(both)}, which would unmask their vectors")
    if len(set(active)) != len(active) or len(set(dead)) != len(dead):
        raise Insecure("the server asks for the shares of one node more than once")
    if node not in active:
        raise Insecure("the server counts this client among the lost clients, although this client sent its masked vector")
    if (requested := {*active, *dead}) != (held := set(state.rd_seed_share_dict)):
        nodes = f"nodes {excerpt(sorted(held))}, but the server asks for those of nodes {excerpt(sorted(requested))}"
        raise Insecure(f"expected a request for the shares of {nodes}")
    if len(active) < state.threshold:
        raise Insecure(f"a sum needs {state.threshold} clients to hide each of them, but only {len(active)} are in it")


def check_weights(weighting: Weighting, sections: Iterable[str], plan: Plan, levels: int) -> None:
    """Check that this client's weight in the sum is at most 1, and large enough for its values to survive quantisation.

    Args:
        weighting: the counts at which a client's weight in the sum is 1, as the server sent them.
        sections: the sections of the vector.
        plan: this client's counts.
        levels: the number of levels of the quantiser. The smallest allowed weight is 2 / ``levels``.

    Raises:
        Insecure: a weight is too small or too large.
    """
    for section in sections:
        if not 2 / levels <= (weight := weighting.of(section, plan)) <= 1:
            raise Insecure(
                f"the weight of this client's {section} must be from 2 / {levels} to 1, but with its counts {asdict(plan)} and the "
                "server's weights "
                f"{asdict(weighting)} it would be {weight:g}"
            )


def _summand(client: LocalClient, header: Header, digest: bytes, message: Message, context: Context) -> Message:
    """Train or measure, and return the reply in the form that Flower's mod expects: one vector with weight 1, and the counts.

    Raises:
        Insecure: the server asks for rounded weights, or for a weight in the sum that ``check_weights`` refuses.
        WireError: the instruction has no weights for the sum, or asks for noise without naming the clips.
        ValueError: the client trained on other numbers of samples or batches than it announced.
    """
    plan = plan_of(client, message, header, context)
    if header.payload != AS_THE_MODEL:
        raise Insecure(
            f"SecAgg+ masks whole numbers of full length, so payload-dtype must be {AS_THE_MODEL}, but the server asks for {header.payload}"
        )
    about = our_records(message.content, ArrayRecord).get(REFERENCE)
    # the reference is not part of the instruction: the model keeps the statistics that came with its weights
    message.content.pop(OURS + REFERENCE, None)
    request = read(message, client.network, header=header)
    sent = request.instruction.sections
    reference = references(sent.get("statistics", {}) if about is None else to_tensors(arrays_in(about, REFERENCE)))
    phase, weights = request.instruction.phase, WEIGHTS.of_configs(message.content)
    noise = NOISE.of_configs(message.content) if "dp-noise" in SECURE.of_configs(message.content) else None
    with telling(training_digest(message, context.run_config)):
        client.tells_tests = False
        reply = client.compute(request, _as_it_is)
    if (reply.samples, reply.steps) != (plan.samples, plan.steps):
        raise ValueError(
            f"client {client.site.client} announced {plan.samples} samples and {plan.steps} steps, but trained with {reply.samples} "
            f"samples and {reply.steps} steps"
        )
    trained, private = phase is not Phase.MEASURE, noise is not None
    shapes = layout(client.network.reply(phase, client.settings.update), loss=trained and not private, cut=not private)
    weighting = Weighting(*(weights[name] for name in WEIGHED))
    per_sample = activations(reply.sections, plan)
    state = context.state.config_records[RECORD_KEY_STATE]
    check_weights(weighting, shapes, plan, int(state[Key.TARGET_RANGE]))  # type: ignore[arg-type]
    limit = float(state[Key.CLIPPING_RANGE])  # type: ignore[arg-type]
    parts, cut = additive(reply.sections, sent.get("weights", {}), reference, limit)
    parts = {s: {k: t * weighting.of(s, plan) for k, t in part.items()} for s, part in parts.items() if s in shapes}
    if noise is not None:
        parts = _private(parts, noise, int(state[Key.THRESHOLD]))  # type: ignore[arg-type]
    beyond_range = {f"{s}/{k}": n for s, part in parts.items() for k, n in beyond(part, limit).items()}
    _warn(client, header.round, {k: n for k, n in cut.items() if n}, beyond_range, limit)
    loss = float(reply.metrics.get("loss", 0.0))
    parts |= flags(loss, weighting.of("loss", plan), any(cut.values()), bool(beyond_range), limit)
    counts: dict[str, Any] = {**asdict(plan), "activations": dump(per_sample), "digest": digest.hex()}
    if not private:
        _seed_rounding(client, header.round, 0 if trained else 1)
    return _vector_reply(message, to_vector(parts, shapes), counts | header.values())


def _as_it_is(reply: Reply) -> Reply:
    """Return ``reply`` unchanged. ``LocalClient.compute`` calls this function in place of one that makes an outgoing message.

    In a secure sum, the client does not send this reply. It converts the reply to a vector, and sends the masked vector.
    """
    return reply


def _evaluated(client: LocalClient, header: Header, digest: bytes, message: Message, context: Context) -> Message:
    """Evaluate, and return the reply in the form that Flower's mod expects: one vector with weight 1, and the counts."""
    plan = plan_of(client, message, header, context)
    if not plan.samples:
        raise Insecure("after this sum began, this client used up its evaluations or lost test samples, so it can no longer take part")
    reply = client.evaluation(read(message, client.network, TO_EVALUATE, header), Limits.of(context).min_samples)
    limit = float(context.state.config_records[RECORD_KEY_STATE][Key.CLIPPING_RANGE])  # type: ignore[arg-type]
    numbers = {name: value for name, value in reply.metrics.items() if isinstance(value, float)}
    vector = to_vector(secure_evaluation.parts_of(numbers, client.task, limit), secure_evaluation.layout(client.task))
    _seed_rounding(client, header.round, 2)
    return _vector_reply(message, vector, {**asdict(plan), "activations": dump({}), "digest": digest.hex(), **header.values()})


def _seed_rounding(client: LocalClient, round: int, purpose: int) -> None:
    """Seed the quantiser's random rounding by the run's seed. Sums of integers are exact, so a run is reproducible bit for bit."""
    rng = seeded(client.seed, client.site.client, round, ROUNDING, purpose)
    np.random.seed(int(rng.integers(2**32)))  # noqa: NPY002


def _vector_reply(message: Message, vector: np.ndarray, counts: Mapping[str, Any]) -> Message:
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), 1, dict(counts))
    content: RecordDict = fitres_to_recorddict(result, keep_input=False)
    return Message(content, reply_to=message)


def _private(parts: Sections, config: Mapping[str, Any], contributors: int) -> Sections:
    """Clip the update and the statistics, each as one vector, and add this client's share of the noise.

    Args:
        parts: the values to sum, by section and name.
        config: the instruction's clips and noise (``NOISE``).
        contributors: the smallest number of clients in a sum. The shares of so many clients add up to the whole noise.
    """
    noised: Sections = {section: {} for section in parts}
    for statistics, key in ((False, "dp-clip"), (True, "dp-statistics-clip")):
        vector = {f"{s}/{k}": t for s, part in parts.items() if (s in STATISTICS) == statistics for k, t in part.items()}
        clip = float(config[key])
        for name, tensor in noisy(clipped(vector, clip), clip, float(config["dp-noise"]), contributors).items():
            section, _, key_of = name.partition("/")
            noised[section][key_of] = tensor
    return noised


def _warn(client: LocalClient, round: int, statistics: Mapping[str, int], values: Mapping[str, int], limit: float) -> None:
    """Log which values of this client were clipped. The server learns only how many clients clipped values.

    Args:
        client: the client.
        round: the round.
        statistics: layer -> the number of channels whose statistics were clipped to a distance from the reference.
        values: tensor -> the number of its values that were clipped to the quantiser's range.
        limit: the largest absolute value that the quantiser takes.
    """
    who = f"client {client.site.client}, round {round}"
    for layer, count in statistics.items():
        text = (
            "%s: layer %s: %d channels have a mean more than %g standard deviations from the reference's mean, or a variance more than %g "
            "times the reference's variance"
        )
        log(logging.WARNING, f"{text}; these statistics are clipped to these limits", who, layer or "model", count, limit, limit**2)
    for name, count in values.items():
        text = "%s: %d values of %s exceed the quantiser's range of %g and are cut off: raise secagg-clipping-range"
        log(logging.WARNING, text, who, count, name, limit)
