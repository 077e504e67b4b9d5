"""The server's half of secure aggregation: Flower's SecAgg+ workflow, stage by stage, over this project's own messages.

Four messages per client and sum: setup (keys; the client says how much it will count), share keys, collect masked vectors (the only one
with the model), unmask. Clients lost in the first two stages are left out and the others begin again; one lost after its keys were shared
is taken out of the sum by the shares that the others hold; with fewer than ``threshold`` of them nothing is revealed.

What the server gets: the sum of the vectors, and of each client its counts. The protocol protects against a server that is curious, not
against one that invents clients.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common import recorddict_compat as compat
from flwr.common.logger import log
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.server import LegacyContext
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid

from fl_bn.flower.codec import LONGEST_HEAD, Header, array_from, header_from
from fl_bn.flower.fields import WireError, reason, said
from fl_bn.flower.masks import server_half
from fl_bn.flower.messages import KEYS, MASKED, PLAN, RESULT, SHARES_BACK, SHARES_OUT, STATUS, UNREADABLE, WEIGHT
from fl_bn.flower.population import Client
from fl_bn.flower.posting import send_and_receive
from fl_bn.flower.sums import Plan, Weighting
from fl_bn.training.additive import average_error
from fl_bn.training.secure_settings import LEAST, MODULUS, SecureAggregation

CURVE = "secp384r1"  # of Flower's keys
MASKED_STILL = "the masks did not cancel (server and clients with different versions of fl-bn, or a false share)"


class SumFailed(Exception):
    """No sum came about, and nothing was revealed; ``refused``: what is known of which client, by index."""

    def __init__(self, reason: str, refused: Mapping[int, str]) -> None:
        self.refused = dict(refused)
        super().__init__(reason)


@dataclass(frozen=True)
class Summand:
    """What the server knows of one client in a sum: its counts. ``activations``: per sample, by layer."""

    client: Client
    plan: Plan
    activations: dict[str, int]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Sum:
    """``mean`` (d,) of the weighted vectors of the ``parts``, float64; ``refused``: who is not in it, and why."""

    mean: np.ndarray
    parts: list[Summand]
    weighting: Weighting
    refused: dict[int, str]

    def weight(self, section: str) -> float:
        """Sum of the clients' weights in ``section`` over their number: divides ``mean`` there."""
        return sum(self.weighting.of(section, part.plan) for part in self.parts) / len(self.parts)

    def error(self, section: str, settings: SecureAggregation) -> float:
        """Worst-case error of the average in ``section``, by quantisation alone, in the units of the vector."""
        weights = [self.weighting.of(section, part.plan) for part in self.parts]
        return average_error(settings.clipping_range, settings.quantization_range, weights, 1.0)


@dataclass
class _Stages:
    """What Flower's workflow takes for a grid: its messages get this project's records and time to live, and what is wrong with a reply
    is found here: Flower's stages see checked values alone.

    ``layers``: whose activations a client counts; ``max_steps`` that it may plan, 0: unknown. ``shares``: the replies of the last stage,
    of which ``without`` withholds one.
    """

    grid: Grid
    header: Header
    clients: dict[int, Client]
    instructions: dict[int, Message]
    timeout: float
    size: int
    layers: frozenset[str]
    max_steps: int
    plans: dict[int, Plan] = field(default_factory=dict)
    activations: dict[int, dict[str, int]] = field(default_factory=dict)
    kept: dict[int, dict[str, float]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    complaints: set[frozenset[int]] = field(default_factory=set)
    shares: dict[int, Message] = field(default_factory=dict)  # replies of the last stage
    without: int = -1

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Replies for Flower's stages. Each holds what this file has checked and put together, and nothing else of what came."""
        sent = [self._ours(message) for message in messages]
        stage = str(sent[0].content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]) if sent else ""
        if stage == Stage.UNMASK and self.shares:  # asked already, and to be tried without someone
            return [reply for node, reply in self.shares.items() if node != self.without]
        asked = {m.metadata.dst_node_id: dict(m.content.config_records[RECORD_KEY_CONFIGS]) for m in sent}
        checked = dict[int, RecordDict]()
        replies = dict[int, Message]()
        for reply in send_and_receive(self.grid, sent, self.timeout):
            node = next((m.metadata.dst_node_id for m in sent if m.metadata.message_id == reply.metadata.reply_to_message_id), None)
            if node is None or node in replies:
                continue
            replies[node] = reply
            try:
                checked[node] = self._checked(reply, node, stage, asked[node])
            except WireError as error:
                self._refuse(node, str(error), stage)
        for node, why in self._at_odds(stage, checked).items():
            del checked[node]
            self._refuse(node, why, stage)
        for node in asked:
            if node not in replies:
                self._refuse(node, f"no reply in stage {stage!r} before the deadline", stage)
        for node, content in checked.items():
            replies[node].content = content
        good = {node: replies[node] for node in checked}
        if stage == Stage.UNMASK:
            self.shares = good
        return list(good.values())

    def _refuse(self, node: int, why: str, stage: str) -> None:
        client = self.clients[node].index
        if stage == Stage.UNMASK:
            log(logging.WARNING, "client %s's shares are not used: %s", client, why)
        self.refused.setdefault(client, why)

    def _ours(self, message: Message) -> Message:
        """With records of its own: Flower's stages share one, and its mod takes it apart."""
        node = message.metadata.dst_node_id
        m, content = self.instructions[node], RecordDict()
        for key, record in message.content.items():
            content[key] = ConfigRecord(dict(record)) if isinstance(record, ConfigRecord) else record
        for key in ("header", "config"):
            content[key] = m.content[key]
        return Message(content, node, "train", ttl=m.metadata.ttl, group_id=m.metadata.group_id)

    def _checked(self, reply: Message, node: int, stage: str, asked: Mapping[str, Any]) -> RecordDict:
        """What Flower's stage may see of a reply. ``asked``: the stage's record, as it was sent to this node.

        Raises:
            WireError: the reply is an error, or not what the stage asks for.
        """
        if reply.has_error():
            raise WireError("error", "", f"stage {stage!r}: code {reply.error.code}: {reason(reply.error.reason)}")
        if reply.metadata.src_node_id != node:
            raise WireError("metadata", "", f"expected a reply of node {node}, but it says node {reply.metadata.src_node_id}")
        content = reply.content
        if stage == Stage.SETUP:
            keys = KEYS.of_configs(content)
            for name in ("pk1", "pk2"):
                _check_key(name, keys[name])
            self.plans[node] = self._plan(PLAN.of_metrics(content), node)
            return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(dict(keys))})
        if stage == Stage.SHARE_KEYS:
            shares, others = SHARES_OUT.of_configs(content), {int(key) for key in asked if key != Key.STAGE} - {node}
            _same_nodes("dsts", shares["dsts"], others)
            if len(shares["ctxts"]) != len(shares["dsts"]):
                raise WireError(RECORD_KEY_CONFIGS, "ctxts", f"expected {len(shares['dsts'])}, but got {len(shares['ctxts'])}")
            return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(dict(shares))})
        if stage == Stage.COLLECT_MASKED_VECTORS:
            if "unreadable" in (complaint := UNREADABLE.of_configs(content)):
                return self._complain(node, complaint["unreadable"], asked)
            return self._result(content, node)
        back = SHARES_BACK.of_configs(content)
        _same_nodes("nids", back["nids"], {*asked[Key.ACTIVE_NODE_ID_LIST], *asked[Key.DEAD_NODE_ID_LIST]})
        if len(back["shares"]) != len(back["nids"]) or any(len(share) < 20 or len(share) % 16 != 4 for share in back["shares"]):
            raise WireError(RECORD_KEY_CONFIGS, "shares", f"expected {len(back['nids'])} of 4 + 16 n bytes, but got {said(back['shares'])}")
        return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(dict(back))})

    def _plan(self, told: Mapping[str, Any], node: int) -> Plan:
        plan, limit = Plan(told["samples"], told["passes"], told["steps"]), self.clients[node].samples
        if plan.samples > limit:
            raise WireError("plan", "samples", f"expected at most {limit}, as the client said of itself, but got {plan.samples}")
        if 0 < self.max_steps < plan.steps:
            raise WireError("plan", "steps", f"expected at most {self.max_steps}, as the server asked for, but got {plan.steps}")
        if plan.passes > limit * max(plan.steps, 1):
            raise WireError("plan", "passes", f"expected at most {limit} samples in each of {plan.steps} batches, but got {plan.passes}")
        return plan

    def _result(self, content: RecordDict, node: int) -> RecordDict:
        told, weight, status = RESULT.of_configs(content), WEIGHT.of_metrics(content), STATUS.of_configs(content)
        self.header.check(header_from(told))
        if (plan := self._plan(told, node)) != self.plans[node]:
            raise WireError("fitres.metrics", "samples", f"expected {self.plans[node]}, as the client said at the start, but got {plan}")
        if told["activations"].keys() != self.layers:
            problem = f"expected a number for each of {len(self.layers)} layers, but got {said(list(told['activations']))}"
            raise WireError("fitres.metrics", "activations", problem)
        if "kept" in told and told["kept"] >= self.header.round:
            raise WireError("fitres.metrics", "kept", f"expected a round before {self.header.round}, but got {told['kept']}")
        masked = MASKED.of_configs(content)["masked_params"]
        _check_masked(masked, self.size)
        self.activations[node], self.kept[node] = told["activations"], {"kept": float(told["kept"])} if "kept" in told else {}
        result = FitRes(Status(Code(status["code"]), ""), ndarrays_to_parameters([]), weight["num_examples"], {})
        checked: RecordDict = compat.fitres_to_recorddict(result, keep_input=False)
        checked[RECORD_KEY_CONFIGS] = ConfigRecord({Key.MASKED_PARAMETERS: masked})
        return checked

    def _complain(self, node: int, about: Sequence[int], asked: Mapping[str, Any]) -> RecordDict:
        if not about or not set(about) <= set(asked[Key.SOURCE_LIST]):
            raise WireError(RECORD_KEY_CONFIGS, "unreadable", f"expected some of the nodes whose shares it got, but got {said(about)}")
        self.complaints |= {frozenset((node, other)) for other in about}
        raise WireError(RECORD_KEY_CONFIGS, "unreadable", f"it cannot read the shares of nodes {said(sorted(about))}")

    def _at_odds(self, stage: str, checked: Mapping[int, RecordDict]) -> dict[int, str]:
        """Replies that are right each, but do not go together, by node, with the reason."""
        if stage == Stage.SETUP:
            keys = {node: list(content.config_records[RECORD_KEY_CONFIGS].values()) for node, content in checked.items()}
            times = Counter(key for own in keys.values() for key in own)
            why = f"{RECORD_KEY_CONFIGS}/pk1: expected keys of its own, but one of them came twice"
            return {node: why for node, own in keys.items() if any(times[key] > 1 for key in own)}
        if stage == Stage.COLLECT_MASKED_VECTORS and checked:
            said_by = {node: tuple(sorted(self.activations[node].items())) for node in checked}
            (usual, votes), *_ = Counter(said_by.values()).most_common()
            if 2 * votes > len(checked):  # else there is no telling, and ``Sum.activations`` says so
                why = "fitres.metrics/activations: expected the same per sample as at most clients (inputs of one size), but got others"
                return {node: why for node, own in said_by.items() if own != usual}
        return {}

    def leaving(self) -> set[int]:
        """Whom to go on without, since shares could not be read: who is in most complaints first; of two alone, nobody knows who lies."""
        left, gone = set(self.complaints), set[int]()
        while left:
            (most, times), *_ = Counter(node for pair in left for node in sorted(pair)).most_common()
            gone |= {most} if times > 1 else {node for pair in left for node in pair}
            left = {pair for pair in left if not pair & gone}
        self.complaints.clear()
        for node in gone:
            self.refused.setdefault(self.clients[node].index, "shares of its secrets could not be read, or it says so of others'")
        return gone


def _same_nodes(name: str, came: Sequence[int], wanted: set[int]) -> None:
    if len(came) != len(wanted) or set(came) != wanted:
        raise WireError(RECORD_KEY_CONFIGS, name, f"expected each of {said(sorted(wanted))} once, but got {said(came)}")


def _check_key(name: str, pem: bytes) -> None:
    try:
        key = load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise WireError(RECORD_KEY_CONFIGS, name, "expected a public key in PEM, but it cannot be read") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != CURVE:
        raise WireError(RECORD_KEY_CONFIGS, name, f"expected a public key on {CURVE}, but got another kind")


def _check_masked(arrays: Sequence[bytes], size: int) -> None:
    shapes = [(1,), (size,)]
    if len(arrays) != 2 or any(len(one) > 8 * math.prod(shape) + LONGEST_HEAD for one, shape in zip(arrays, shapes, strict=True)):
        problem = f"expected int64 vectors of shapes {shapes}, but got {said(list(map(len, arrays)))} bytes"
        raise WireError(RECORD_KEY_CONFIGS, "masked_params", problem)
    vectors = [array_from(one, RECORD_KEY_CONFIGS, "masked_params") for one in arrays]
    if [v.shape for v in vectors] != shapes or any(
        v.dtype != np.int64 or v.min(initial=0) < 0 or v.max(initial=0) >= MODULUS for v in vectors
    ):
        got = f"{[v.shape for v in vectors]} of {[str(v.dtype) for v in vectors]}"
        raise WireError(RECORD_KEY_CONFIGS, "masked_params", f"expected int64 vectors of shapes {shapes} in [0, {MODULUS}), but got {got}")


def _workflow(settings: SecureAggregation, clients: int, timeout: float) -> Any:
    """Flower's own, with the same weight for everyone: how much a client counts is in its vector. Raises ValueError: see ``check``."""
    settings.check(clients)
    shares, threshold = settings.shares_of(clients), settings.threshold_of(clients)
    return server_half.SecAggPlusWorkflow(
        shares,
        1.0 if threshold == shares else threshold,  # Flower takes all of them as a fraction only
        max_weight=1.0,
        clipping_range=float(settings.clipping_range),
        quantization_range=2**settings.quantization_range,
        modulus_range=MODULUS,
        timeout=timeout,
    )


class _Legacy(FedAvg):
    """What Flower's workflow takes for a strategy: names the nodes, and takes the average out."""

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        super().__init__()
        self.grid, self.nodes = grid, nodes
        self.mean, self.results = np.zeros(0), dict[int, FitRes]()

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        return [(GridClientProxy(node, self.grid, 0), FitIns(ndarrays_to_parameters([]), {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: Any) -> Any:
        self.results = {proxy.node_id: result for proxy, result in results}
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


def secure_sum(
    grid: Grid,
    messages: Sequence[Message],
    cohort: Sequence[Client],
    header: Header,
    settings: SecureAggregation,
    timeout: float,
    size: int,
    *,
    least: int = LEAST,
    weighted: tuple[bool, bool] = (True, True),
    statistics_by_passes: bool = True,
    layers: Iterable[str] = (),
    max_steps: int = 0,
    whole: Callable[[np.ndarray], bool] = lambda mean: True,
) -> Sum:
    """Sum the cohort's vectors (``size``,) without seeing any.

    ``messages``: the plain instruction of each client, with a ``config`` record. ``least``: the fewest clients that may be in the sum.
    ``weighted``: whether updates, and statistics, weigh by samples; ``statistics_by_passes``: or statistics by all samples that passed.
    ``layers``: whose activations are counted; ``max_steps`` that a client may plan. ``whole``: whether a mean can be one, so that all
    masks are gone.

    Raises:
        SumFailed: too few clients came, answered in time, or kept the shares of the others.
    """
    by_node = {client.node: client for client in cohort}
    instructions = {m.metadata.dst_node_id: m for m in messages}
    stages = _Stages(grid, header, by_node, instructions, timeout, size, frozenset(layers), max_steps)
    nodes = sorted(by_node, key=lambda node: by_node[node].index)
    while True:
        if len(nodes) < max(least, LEAST):
            raise SumFailed(f"{len(nodes)} of {len(cohort)} clients are left, but {max(least, LEAST)} are needed", stages.refused)
        try:
            workflow = _workflow(settings, len(nodes), timeout)
        except ValueError as error:
            raise SumFailed(str(error), stages.refused) from error
        legacy, state = _Legacy(grid, nodes), server_half.WorkflowState()
        context = _context(legacy, header.round)
        workflow.setup_stage(stages, context, state)
        stages.refused |= {by_node[n].index: "it sits this round out" for n in state.active_node_ids if not stages.plans[n].samples}
        present = {node for node in state.active_node_ids if stages.plans[node].samples}
        if len(present) == len(nodes):
            workflow.share_keys_stage(stages, context, state)
            present = set(state.active_node_ids)
        if len(present) == len(nodes):
            weighting = _weigh(stages, nodes, state, weighted, statistics_by_passes)
            enough = workflow.collect_masked_vectors_stage(stages, context, state)
            if not stages.complaints:
                break
            present -= stages.leaving()
        nodes = [node for node in nodes if node in present]
    sampled, came = len(nodes), len(state.active_node_ids)
    if not enough or came < least:
        raise SumFailed(f"only {came} of {sampled} masked vectors came (threshold {state.threshold}, needed {least})", stages.refused)
    _unmask(workflow, stages, context, state, legacy, whole)
    parts = [_summand(by_node[n], stages, n) for n in nodes if n in legacy.results]
    there = {part.client.index for part in parts}
    return Sum(legacy.mean, parts, weighting, {index: why for index, why in stages.refused.items() if index not in there})


def _weigh(stages: _Stages, nodes: Sequence[int], state: Any, weighted: tuple[bool, bool], by_passes: bool) -> Weighting:
    """What weighs 1 in this sum, which the instructions then tell everyone."""
    plans = [stages.plans[node] for node in nodes]
    passes = max(p.passes if by_passes else p.samples for p in plans)
    most = max(p.samples for p in plans)
    weighting = Weighting(most if weighted[0] else 0, passes if weighted[1] else 0, most)
    told = {f"secagg-{key}-weight": value for key, value in asdict(weighting).items()}
    state.nid_to_fitins = {}
    for node in nodes:
        content = RecordDict(dict(stages.instructions[node].content.items()))
        content["config"] = ConfigRecord({**dict(content.config_records["config"]), **told})
        stages.instructions[node].content["config"] = content["config"]
        state.nid_to_fitins[node] = content
    return weighting


def _unmask(workflow: Any, stages: _Stages, context: Any, state: Any, legacy: _Legacy, whole: Callable[[np.ndarray], bool]) -> None:
    """The last stage. Where the masks do not come off, it is tried without each of those who sent shares: one of them may have lied.

    Raises:
        SumFailed: too few sent shares, or more than one of them false ones.
    """
    active, summed = set(state.active_node_ids), list(state.aggregate_ndarrays)
    neighbours = {node: set(of) for node, of in state.nid_to_neighbours.items()}
    problem = ""
    for without in (-1, *sorted(active)):
        stages.without = without
        state.active_node_ids, state.aggregate_ndarrays = set(active), list(summed)
        state.nid_to_neighbours = {node: set(of) for node, of in neighbours.items()}
        try:
            with np.errstate(all="ignore"):
                done = workflow.unmask_stage(stages, context, state)
            if not done:
                problem = problem or f"too few clients kept the others' shares to remove the masks (threshold {state.threshold})"
            elif whole(legacy.mean):
                if without in stages.clients:
                    stages._refuse(without, "false shares of the others' secrets: the sum is right without them", Stage.UNMASK)
                return
            else:
                problem = problem or MASKED_STILL
        except (ValueError, KeyError, TypeError, IndexError, ArithmeticError) as error:  # of shares that do not fit
            problem = problem or f"the masks could not be removed: {error!r}"
    raise SumFailed(problem, stages.refused)


def _summand(client: Client, stages: _Stages, node: int) -> Summand:
    plan = stages.plans[node]
    return Summand(client, plan, stages.activations[node], {"steps": float(plan.steps)} | stages.kept[node])


def _context(strategy: _Legacy, round: int) -> LegacyContext:
    context = LegacyContext(Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={}), strategy=strategy)
    context.state["config"] = ConfigRecord({"current_round": round})
    context.state["parameters"] = compat.parameters_to_arrayrecord(ndarrays_to_parameters([]), keep_input=True)
    return context
