"""Run the server's half of secure aggregation: Flower's SecAgg+ workflow, over fl-bn's messages.

A sum takes four messages per client, one in each stage. ``setup`` collects keys and the
client's counts. ``share keys`` gives shares of each client's secrets to other clients.
``collect masked vectors`` sends the model and collects the vectors. ``unmask`` removes the
masks from the sum. If a client is lost in the first two stages, the others begin again without
it. If a client is lost later, the others' shares remove its masks from the sum. With shares
from fewer than ``threshold`` clients, nothing is revealed.

Flower's workflow sees only records that are made here. Forms (``messages``) declare which
values each field of a reply may have. This file checks the values that depend on the stage
before, on the other clients, or on the size of the model.

The server learns the sum of the vectors, and each client's counts. The protocol protects
against a server that is curious. It does not protect against a server that invents clients.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.serverapp import Grid

from fl_bn.federation.policy import unbounded
from fl_bn.flower.compat import GridClientProxy, Key, Stage, fitres_to_recorddict, log, parameters_to_arrayrecord
from fl_bn.flower.population import Client
from fl_bn.flower.secagg.instructions import History, from_config, put_together, to_config
from fl_bn.flower.secagg.masks import bound_to, server_half
from fl_bn.flower.secagg.sums import CHECK, EVALUATION, Layout, Plan, Weighting, from_vector, length
from fl_bn.flower.wire import messages as forms
from fl_bn.flower.wire.codec import LONGEST_HEAD, array_from, header_of
from fl_bn.flower.wire.messages import OWN_HISTORY, RECORD_KEY_CONFIGS, add_to_config, records_of
from fl_bn.flower.wire.messaging import send_and_receive
from fl_bn.secure.settings import LEAST, MODULUS, SecureAggregation
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import WireError, excerpt, reason

V = TypeVar("V")
CURVE = "secp384r1"  # the elliptic curve of Flower's keys
ANSWERS = {  # the form of the record that Flower's workflow reads, by stage
    Stage.SETUP: forms.KEYS,
    Stage.SHARE_KEYS: forms.SHARES_OUT,
    Stage.COLLECT_MASKED_VECTORS: forms.MASKED,
    Stage.UNMASK: forms.SHARES_BACK,
}
ACCUSED = "another client could not read its shares, or it claims that it cannot read another's"
DO_NOT_FIT = (ValueError, TypeError, LookupError, ArithmeticError)  # Flower's errors for shares that do not fit together
Problem = tuple[str, str, str]
"""What is wrong with a reply: the record, the field, and what was expected and came."""


class SumFailed(Exception):
    """Signal that a secure sum failed, so that the server has no result.

    Args:
        reason: why the sum failed.
        refused: the known reasons why clients are not in the sum, by client index.
    """

    def __init__(self, reason: str, refused: Mapping[int, str]) -> None:
        self.refused = dict(refused)
        super().__init__(reason)


@dataclass(frozen=True)
class Sum:
    """Hold the result of a secure sum.

    Attributes:
        mean: the mean of the clients' weighted vectors, (d,), float64.
        plans: the numbers of samples and steps, which a client sent unmasked, of each client in
            the sum, by client index.
        activations: each client's number of activations per sample by layer, by client index.
        weighting: the counts (of samples) at which a client's weight in the sum is 1.
        refused: the reasons why other clients are not in the sum, by client index.
    """

    mean: np.ndarray
    plans: dict[int, Plan]
    activations: dict[int, dict[str, int]]
    weighting: Weighting
    refused: dict[int, str]

    def weights(self, section: str) -> list[float]:
        """Return the clients' weights in ``section``. ``mean``, divided by the mean of these, is the weighted average."""
        return [self.weighting.of(section, plan) for plan in self.plans.values()]


class _Legacy(FedAvg):
    """Serve Flower's workflow as its strategy: give it the nodes of the cohort, and store the mean of the vectors."""

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        super().__init__()
        self.grid, self.nodes = grid, nodes
        self.mean, self.summed = np.zeros(0), set[int]()

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        return [(GridClientProxy(node, self.grid, 0), FitIns(ndarrays_to_parameters([]), {})) for node in self.nodes]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: Any) -> Any:
        self.summed = {proxy.node_id for proxy, _ in results}
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


class SecureSum:
    """Sum a cohort's vectors without seeing any single one.

    To Flower's workflow it is the grid: it sends the workflow's messages with fl-bn's records
    and time limit, and returns only replies with valid values.

    Args:
        grid: Flower's grid.
        messages: the plain instruction to each client, with a ``config`` record.
        cohort: the clients.
        settings: the settings of secure aggregation.
        timeout: how many seconds to wait for the replies of a stage.
        shapes: the layout of a client's vector.
        least: the smallest number of clients in the sum.
        weighted: two values: whether updates are weighted by samples, and whether statistics
            are.
        most_steps: maps a client's number of samples to the largest possible number of steps.
            0: unknown.
        once: whether a client's statistics come from a single batch or pass. Then its count
            ``passes`` is limited to its number of samples.
        called: the names of clients and nodes in the log.

    Attributes:
        plans: the clients' counts for this round, by node.
        activations: activations per sample, by node and layer.
        refused: the reasons why clients are refused, by client index.
        complaints: pairs of nodes, of which one reports that it cannot read the other's shares.
            A pair does not say which one.
        without: the node whose reply is left out in the last stage. -1: none.
        histories: for each node, the hashes of earlier instructions that its client reports at
            the start.
        history: for each earlier round, the hash that most clients report.
        digests: the hash of each client's instruction, which it sends with its masked vector.
        digest: the hash of most clients' instruction. The masks in the sum depend on it.
    """

    def __init__(
        self,
        grid: Grid,
        messages: Sequence[Message],
        cohort: Sequence[Client],
        settings: SecureAggregation,
        timeout: float,
        shapes: Layout,
        *,
        least: int = LEAST,
        weighted: tuple[bool, bool] = (False, False),
        most_steps: Callable[[int], int] = unbounded,
        once: bool = False,
        called: ClientNames = UNNAMED,
    ) -> None:
        self.grid, self.settings, self.timeout, self.shapes = grid, settings, timeout, shapes
        self.weighted, self.most_steps, self.once, self.called = weighted, most_steps, once, called
        self.round, self.levels = header_of(messages[0].content).round, 2**settings.quantization_range
        self.least = max(LEAST, settings.threshold_of(len(cohort)), least)
        self.clients = {client.node: client for client in cohort}
        self.instructions = {message.metadata.dst_node_id: message for message in messages}
        self.plans, self.activations = dict[int, Plan](), dict[int, dict[str, int]]()
        self.refused, self.complaints = dict[int, str](), set[frozenset[int]]()
        self.histories, self.history = dict[int, History](), History()
        self.digests, self.digest = dict[int, str](), ""
        self.without, self._shares = -1, dict[int, Message]()

    def result(self) -> Sum:
        """Run the protocol, and return the sum.

        Raises:
            SumFailed: too few clients joined, answered in time, or sent shares; or the masks
                did not cancel.
        """
        nodes = sorted(self.clients, key=lambda node: self.clients[node].index)
        while True:
            if len(nodes) < self.least:
                few = f"a secure sum needs at least {self.least} clients, but only {len(nodes)} of {len(self.clients)} can take part"
                raise SumFailed(few, self.refused)
            workflow, legacy, state = self._workflow(len(nodes)), _Legacy(self.grid, nodes), server_half.WorkflowState()
            context = _context(legacy, self.round)
            workflow.setup_stage(self, context, state)
            present = {node for node in state.active_node_ids if self.plans[node].samples}
            self.refused |= {self.clients[n].index: "it takes no part in this round" for n in {*state.active_node_ids} - present}
            if len(present) == len(nodes):
                workflow.share_keys_stage(self, context, state)
                present = set(state.active_node_ids)
            if len(present) == len(nodes):
                weighting = self._weigh(nodes, state)
                enough = workflow.collect_masked_vectors_stage(self, context, state)
                if not self.complaints:
                    break
                present -= self._accused()
            nodes = [node for node in nodes if node in present]
        if not enough or len(state.active_node_ids) < self.least:
            raise SumFailed(
                f"only {len(state.active_node_ids)} of {len(nodes)} clients sent a masked vector, but removing the masks needs "
                f"{state.threshold} clients (secagg-threshold), and the sum needs {self.least}",
                self.refused,
            )
        self._unmask(workflow, context, state, legacy)
        there = {self.clients[node].index: node for node in nodes if node in legacy.summed}
        plans = {index: self.plans[node] for index, node in there.items()}
        activations = {index: self.activations[node] for index, node in there.items()}
        return Sum(legacy.mean, plans, activations, weighting, {i: why for i, why in self.refused.items() if i not in there})

    def _workflow(self, clients: int) -> Any:
        """Return Flower's workflow, with equal weights: each client multiplies its vector by its weight itself."""
        shares, threshold = self.settings.shares_of(clients), self.settings.threshold_of(clients)
        return server_half.SecAggPlusWorkflow(
            shares,
            1.0 if threshold == shares else threshold,  # Flower accepts "all shares" only as the fraction 1.0
            max_weight=1.0,
            clipping_range=float(self.settings.clipping_range),
            quantization_range=self.levels,
            modulus_range=MODULUS,
            timeout=self.timeout,
        )

    def _weigh(self, nodes: Sequence[int], state: Any) -> Weighting:
        """Choose the weights of this sum (``Weighting``), and add them and the combined history to all clients' instructions.

        In sums of moments, a sample that a client uses twice counts twice in the weight of its
        statistics. ``state`` is Flower's.
        """
        plans = [self.plans[node] for node in nodes]
        most, passes = max(p.samples for p in plans), max(p.passes if "moments" in self.shapes else p.samples for p in plans)
        weighting = Weighting(most if self.weighted[0] else 0, passes if self.weighted[1] else 0, most)
        values = {f"secagg-{key}-weight": value for key, value in asdict(weighting).items()} | to_config(self.history)
        for node in nodes:
            add_to_config(self.instructions[node].content, values)
        state.nid_to_fitins = {node: RecordDict(dict(self.instructions[node].content.items())) for node in nodes}
        return weighting

    def _accused(self) -> set[int]:
        """Return the nodes to leave out because shares could not be read, and forget the complaints.

        They are the nodes with the most complaints, made by them or about them. A complaint
        between two nodes that are in no other complaint does not show which one is at fault, so
        both are left out.
        """
        times = Counter(node for pair in self.complaints for node in pair)
        gone = {node for node, number in times.items() if number == max(times.values())}
        self.complaints.clear()
        for node in gone:
            self.refused.setdefault(self.clients[node].index, ACCUSED)
        return gone

    def _unmask(self, workflow: Any, context: Context, state: Any, legacy: _Legacy) -> None:
        """Run the last stage, which removes the masks. ``legacy`` gets the mean of the vectors.

        If the masks do not cancel, a client may have sent false shares. The stage is then repeated,
        each time without the shares of another client.

        Raises:
            SumFailed: too few clients sent shares, or several sent false ones.
        """
        active, summed = set(state.active_node_ids), list(state.aggregate_ndarrays)
        neighbours = {node: set(of) for node, of in state.nid_to_neighbours.items()}
        problem = ""
        for self.without in (-1, *sorted(active)):
            state.active_node_ids, state.aggregate_ndarrays = set(active), list(summed)
            state.nid_to_neighbours = {node: set(of) for node, of in neighbours.items()}
            try:
                with np.errstate(all="ignore"), bound_to(bytes.fromhex(self.digest)):
                    enough = workflow.unmask_stage(self, context, state)
            except DO_NOT_FIT as error:
                problem = problem or f"the masks could not be removed: {error!r}"
                continue
            if enough and self._unmasked(legacy.mean):
                if self.without in self.clients:
                    self._refuse(self.without, "false shares of the others' secrets: the sum is right without them", Stage.UNMASK)
                return
            problem = problem or (
                "the masks did not cancel (server and clients with different versions of fl-bn, or a false share)"
                if enough
                else f"too few clients sent their shares to remove the masks: {state.threshold} are needed (secagg-threshold)"
            )
        raise SumFailed(problem, self.refused)

    def _unmasked(self, mean: np.ndarray) -> bool:
        """Return whether the masks have cancelled: two entries of a mean are then the constants ``CHECK``, which every vector has."""
        constants = from_vector(mean, self.shapes)["check"]["check"] / self.settings.clipping_range
        return bool((constants - torch.tensor(CHECK, dtype=torch.float64)).abs().max() <= 4 / self.levels)

    # one stage: messages to the clients, and their replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send a stage's messages, and return the replies for Flower's workflow. They hold checked values only."""
        originals = list(messages)
        everyone = sorted(message.metadata.dst_node_id for message in originals)
        sent = {message.metadata.dst_node_id: self._ours(message, everyone) for message in originals}
        requests = {node: dict(m.content.config_records[RECORD_KEY_CONFIGS]) for node, m in sent.items()}
        stage = str(next(iter(requests.values()))[Key.STAGE]) if requests else ""
        if stage == Stage.UNMASK and self._shares:  # repeated without one client's shares
            return [reply for node, reply in self._shares.items() if node != self.without]
        good, silent = dict[int, Message](), set(sent)
        for reply in send_and_receive(self.grid, sent.values(), self.timeout, called=self.called):
            node = next((n for n, m in sent.items() if m.metadata.message_id == reply.metadata.reply_to_message_id), None)
            if node is None or node not in silent:
                continue
            silent.discard(node)
            try:
                if wrong := next(self._problems(reply, node, stage, requests[node]), None):
                    raise WireError(*wrong)
                content = self._for_workflow(reply.content, stage)
            except WireError as error:
                self._refuse(node, str(error), stage)
                continue
            good[node] = copy.copy(reply)  # the original is not changed
            good[node].content = content
        for node, why in self._at_odds(stage, good).items():
            del good[node]
            self._refuse(node, why, stage)
        for node in silent:
            self._refuse(node, f"no reply in stage {stage!r} before the deadline", stage)
        if stage == Stage.UNMASK:
            self._shares = good
        return list(good.values())

    def _refuse(self, node: int, why: str, stage: str) -> None:
        client = self.clients[node].index
        if stage == Stage.UNMASK:
            log(logging.WARNING, "%s's shares are not used: %s", self.called.client(client), why)
        self.refused.setdefault(client, why)

    def _ours(self, message: Message, everyone: list[int]) -> Message:
        """Return a copy of Flower's ``message`` with fl-bn's records and with records that no other message shares.

        Flower's messages of one stage share a record, which Flower's client mod changes. In the
        set-up stage, the copy also lists all nodes that get this message (``everyone``).
        """
        node = message.metadata.dst_node_id
        m, content = self.instructions[node], RecordDict()
        for key, record in message.content.items():
            content[key] = ConfigRecord(dict(record)) if isinstance(record, ConfigRecord) else record
        for name, record in records_of(m.content, ConfigRecord).items():
            content[name] = record
        if content.config_records[RECORD_KEY_CONFIGS].get(Key.STAGE) == Stage.SETUP:
            content.config_records[RECORD_KEY_CONFIGS]["cohort"] = everyone
        return Message(content, node, "train", ttl=m.metadata.ttl, group_id=m.metadata.group_id)

    def _for_workflow(self, content: RecordDict, stage: str) -> RecordDict:
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([]), 1, {})
        made: RecordDict = fitres_to_recorddict(result, keep_input=False) if stage == Stage.COLLECT_MASKED_VECTORS else RecordDict()
        made[RECORD_KEY_CONFIGS] = ConfigRecord(dict(ANSWERS[stage].of(content)))
        return made

    def _problems(self, reply: Message, node: int, stage: str, request: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield what is wrong with the reply of ``node`` to ``request`` in a ``stage``, and store what it tells.

        Raises:
            WireError: a field of the reply is missing or not as declared.
        """
        if reply.has_error():
            yield "error", "", f"stage {stage!r}: code {reply.error.code}: {reason(reply.error.reason)}"
            return
        if reply.metadata.src_node_id != node:
            yield "metadata", "", f"expected a reply from node {node}, but it names node {reply.metadata.src_node_id} as its sender"
        content = reply.content
        if stage == Stage.COLLECT_MASKED_VECTORS and (about := forms.UNREADABLE.of(content).get("unreadable")) is not None:
            if about and set(about) <= set(request[Key.SOURCE_LIST]):
                self.complaints |= {frozenset((node, other)) for other in about}
            yield RECORD_KEY_CONFIGS, "unreadable", f"the client says that it cannot read the shares of nodes {excerpt(sorted(about))}"
        own = ANSWERS[stage].of(content)
        if stage == Stage.SETUP:
            yield from ((RECORD_KEY_CONFIGS, name, f"expected a public key on {CURVE} in PEM") for name in own if not is_key(own[name]))
            counts = forms.PLAN.of(content)
            self.plans[node] = plan = Plan(counts["samples"], counts["passes"], counts["steps"])
            self.histories[node] = from_config(records_of(content, ConfigRecord).get(OWN_HISTORY.name), OWN_HISTORY, self.round)
            yield from self._plan_problems(plan, self.clients[node].samples)
        elif stage == Stage.SHARE_KEYS:
            yield from _node_problems("dsts", own["dsts"], {int(key) for key in request if key != Key.STAGE} - {node})
            yield from _share_problems("ctxts", own["ctxts"], len(own["dsts"]), sealed=True)
        elif stage == Stage.UNMASK:
            yield from _node_problems("nids", own["nids"], {*request[Key.ACTIVE_NODE_ID_LIST], *request[Key.DEAD_NODE_ID_LIST]})
            yield from _share_problems("shares", own["shares"], len(own["nids"]), sealed=False)
        else:
            told, layers = forms.RESULT.of(content), {name.rpartition(".")[0] for name in self.shapes.get("moments", {})}
            if told["activations"].keys() != layers:
                problem = f"expected a number for each of {len(layers)} layers, but got {excerpt(list(told['activations']))}"
                yield "fitres.metrics", "activations", problem
            yield from _vector_problems(own["masked_params"], length(self.shapes))
            self.digests[node], self.activations[node] = told["digest"], told["activations"]

    def _plan_problems(self, plan: Plan, limit: int) -> Iterator[Problem]:
        if plan.samples > limit and EVALUATION not in self.shapes:
            yield "plan", "samples", f"expected at most {limit}, the number of samples in the client's introduction, but got {plan.samples}"
        if 0 < (most := self.most_steps(limit)) < plan.steps:
            yield "plan", "steps", f"expected at most {most}, as the server asked for, but got {plan.steps}"
        batches = 1 if self.once else max(plan.steps, 1)
        if plan.passes > limit * batches:
            yield "plan", "passes", f"expected at most {limit} samples in each of {batches} batches, but got {plan.passes}"

    def _at_odds(self, stage: str, checked: Mapping[int, Message]) -> dict[int, str]:
        """Return the nodes whose replies are valid, but contradict the other nodes' replies, each with the reason."""
        if stage == Stage.SETUP:
            keys = {node: list(reply.content.config_records[RECORD_KEY_CONFIGS].values()) for node, reply in checked.items()}
            times = Counter(key for own in keys.values() for key in own)
            why = f"{RECORD_KEY_CONFIGS}/pk1: expected keys that no other client has, but one of them came from two clients"
            twice = {node: why for node, own in keys.items() if any(times[key] > 1 for key in own)}
            odd = twice | self._far_plans(checked.keys() - twice.keys())
            return odd | self._other_histories(checked.keys() - odd.keys())
        if stage == Stage.COLLECT_MASKED_VECTORS and checked:
            odd = self._other_instructions(checked)
            return odd | (self._of_other_sizes(checked.keys() - odd.keys()) if len(odd) < len(checked) else {})
        return {}

    def _far_plans(self, nodes: Collection[int]) -> dict[int, str]:
        """Return the nodes whose counts are too far from the other nodes' counts, each with the reason.

        A client's weight in the sum is its count divided by the largest count. A client whose
        weight is too small for the quantiser refuses to take part (``weight_refusals``). If the
        smallest weight is too small, the nodes are left out whose count differs from the median
        so much that two such differences make a weight too small.
        """
        odd: dict[int, str] = {}
        for name in ("samples", "passes"):
            counts = {node: count for node in nodes if (count := getattr(self.plans[node], name)) > 0}
            if counts and 2 * max(counts.values()) > self.levels * min(counts.values()):
                middle = median(counts.values())
                why = f"is too far from the others' counts: the smallest weight in the sum would be below 2 of {self.levels} levels"
                far = {node: n for node, n in counts.items() if 2 * max(n / middle, middle / n) ** 2 > self.levels}
                odd = {node: f"plan/{name}: {n} {why}" for node, n in far.items()} | odd
        return odd

    def _other_histories(self, nodes: Collection[int]) -> dict[int, str]:
        """Return the nodes that got another instruction than most nodes in an earlier round, each with the reason.

        Store the hashes of the instructions that most nodes got. All clients get these hashes.
        """
        self.history, at_odds = put_together({node: self.histories[node] for node in sorted(nodes)})
        why = "in round {} this client got another instruction than most clients, and its state depends on it"
        return {node: f"told/{forms.HISTORY_HASHES}: {why.format(round)}" for node, round in at_odds.items()}

    def _other_instructions(self, nodes: Collection[int]) -> dict[int, str]:
        """Return the nodes whose instruction differs from that of most nodes, each with the reason.

        Masks depend on the instruction, so the masks of these nodes would not cancel. If no
        instruction has a majority, all nodes are returned.
        """
        self.digest, alike = _vote({node: self.digests[node] for node in nodes})
        why = "fitres.metrics/digest: this client got another instruction than most clients (model, config or run config)"
        return {node: why for node in nodes if node not in alike}

    def _of_other_sizes(self, nodes: Collection[int]) -> dict[int, str]:
        """Return the nodes whose inputs have another size than those of most clients, each with the reason.

        If no size has a majority, no node is returned. ``SecureRounds._moments`` then raises an
        error.
        """
        _, alike = _vote({node: tuple(sorted(self.activations[node].items())) for node in nodes})
        why = "fitres.metrics/activations: its activations per sample differ from most clients': all inputs must have one size"
        return {node: why for node in nodes if alike and node not in alike}


def _vote(said: Mapping[int, V]) -> tuple[V, set[int]]:
    """Return what most nodes say, and the nodes that say so. If they are no majority, no node is returned."""
    (usual, votes), *_ = Counter(said.values()).most_common()
    return usual, {node for node, own in said.items() if own == usual and 2 * votes > len(said)}


def _node_problems(name: str, actual: Sequence[int], expected: set[int]) -> Iterator[Problem]:
    if sorted(actual) != sorted(expected):
        yield RECORD_KEY_CONFIGS, name, f"expected each of the nodes {excerpt(sorted(expected))} once, but got {excerpt(actual)}"


def _share_problems(name: str, shares: Sequence[bytes], number: int, sealed: bool) -> Iterator[Problem]:
    if len(shares) != number or not (sealed or all(len(share) >= 20 and len(share) % 16 == 4 for share in shares)):
        form = "encrypted shares" if sealed else "shares of 4 + 16 n bytes each"
        yield RECORD_KEY_CONFIGS, name, f"expected {number} {form}, one for each node, but got {excerpt(shares)}"


def _vector_problems(arrays: Sequence[bytes], size: int) -> Iterator[Problem]:
    shapes = [(1,), (size,)]
    wanted = f"expected int64 vectors of shapes {shapes} in [0, {MODULUS})"
    if len(arrays) != 2 or any(len(one) > 8 * math.prod(shape) + LONGEST_HEAD for one, shape in zip(arrays, shapes, strict=True)):
        yield RECORD_KEY_CONFIGS, "masked_params", f"{wanted}, but got {excerpt(list(map(len, arrays)))} bytes"
    vectors = [array_from(one, RECORD_KEY_CONFIGS, "masked_params") for one in arrays]
    fits = all(v.dtype == np.int64 and v.min(initial=0) >= 0 and v.max(initial=0) < MODULUS for v in vectors)
    if not fits or [v.shape for v in vectors] != shapes:
        yield RECORD_KEY_CONFIGS, "masked_params", f"{wanted}, but got {[(v.shape, str(v.dtype)) for v in vectors]}"


def is_key(pem: bytes) -> bool:
    """Return whether ``pem`` is a public key on ``CURVE``."""
    try:
        key = load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == CURVE


def _context(strategy: _Legacy, round: int) -> LegacyContext:
    context = LegacyContext(Context(run_id=0, node_id=0, node_config={}, state=RecordDict(), run_config={}), strategy=strategy)
    context.state["config"] = ConfigRecord({"current_round": round})
    context.state["parameters"] = parameters_to_arrayrecord(ndarrays_to_parameters([]), keep_input=True)
    return context
