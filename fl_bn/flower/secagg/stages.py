"""Check the clients' replies in the stages of SecAgg+. Flower's workflow sees only records that are made here.

Forms (``messages``) declare which values each field may have. This file checks the values that depend on the
stage before, on the other clients, or on the size of the model.
"""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.serverapp import Grid

from fl_bn.flower.compat import Key, Stage, fitres_to_recorddict, log
from fl_bn.flower.population import Client
from fl_bn.flower.secagg.instruction_history import History, from_config, put_together
from fl_bn.flower.secagg.sums import Plan
from fl_bn.flower.wire.codec import LONGEST_HEAD, Header, array_from, header_from
from fl_bn.flower.wire.fields import records_of
from fl_bn.flower.wire.messages import (
    HISTORY_HASHES,
    HISTORY_ROUNDS,
    KEYS,
    MASKED,
    OWN_HISTORY,
    PLAN,
    RECORD_KEY_CONFIGS,
    RESULT,
    SHARES_BACK,
    SHARES_OUT,
    STATUS,
    UNREADABLE,
    WEIGHT,
)
from fl_bn.flower.wire.messaging import send_and_receive
from fl_bn.secure.settings import MODULUS
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import WireError, excerpt, reason

CURVE = "secp384r1"  # the elliptic curve of Flower's keys


@dataclass
class Stages:
    """Serve as the grid of Flower's workflow: send its messages to the clients, and check the replies.

    Messages to clients get fl-bn's records and time limit. Flower's workflow gets only replies with valid values.

    Attributes:
        grid: Flower's grid.
        header: the instruction's header.
        clients: the clients, by node.
        instructions: the plain instructions, by node.
        timeout: how many seconds to wait for the replies of a stage.
        size: the length d of the vector.
        layers: the layers in which a client counts activations.
        most_steps: maps a client's number of samples to the largest possible number of steps. 0: unknown.
        evaluates: whether this is a sum of evaluations, in which clients count test samples.
        levels: the number of levels of the quantiser. A client's weight in the sum must be at least 2 / ``levels``.
        once: whether a client's statistics come from a single batch or pass. Then its count ``passes`` is limited to its
            number of samples.
        plans: the clients' counts for this round, by node.
        activations: activations per sample, by node and layer.
        refused: the reasons why clients are refused, by client index.
        complaints: pairs of nodes, of which one reports that it cannot read the other's shares. A pair does not say which one.
        shares: the replies of the last stage, by node.
        without: the node whose reply is left out in the last stage. -1: none.
        histories: for each node, the hashes of earlier instructions that its client reports at the start.
        history: for each earlier round, the hash that most clients report.
        digests: the hash of each client's instruction, which it sends with its masked vector.
        digest: the hash of most clients' instruction. The masks in the sum depend on it.
        called: the names of clients and nodes in the log.
    """

    grid: Grid
    header: Header
    clients: dict[int, Client]
    instructions: dict[int, Message]
    timeout: float
    size: int
    layers: frozenset[str]
    most_steps: Callable[[int], int]
    evaluates: bool = False
    levels: int = 2**30
    once: bool = False
    plans: dict[int, Plan] = field(default_factory=dict)
    activations: dict[int, dict[str, int]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    complaints: set[frozenset[int]] = field(default_factory=set)
    shares: dict[int, Message] = field(default_factory=dict)
    without: int = -1
    histories: dict[int, History] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    digest: str = ""
    called: ClientNames = UNNAMED

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send a stage's messages, and return the replies for Flower's workflow. They hold checked values only."""
        originals = list(messages)
        everyone = sorted(message.metadata.dst_node_id for message in originals)
        sent = [self._ours(message, everyone) for message in originals]
        stage = str(sent[0].content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]) if sent else ""
        if stage == Stage.UNMASK and self.shares:  # the last stage again, without one client's shares
            return [reply for node, reply in self.shares.items() if node != self.without]
        requests = {m.metadata.dst_node_id: dict(m.content.config_records[RECORD_KEY_CONFIGS]) for m in sent}
        checked = dict[int, RecordDict]()
        replies = dict[int, Message]()
        for reply in send_and_receive(self.grid, sent, self.timeout, called=self.called):
            node = next((m.metadata.dst_node_id for m in sent if m.metadata.message_id == reply.metadata.reply_to_message_id), None)
            if node is None or node in replies:
                continue
            replies[node] = reply
            try:
                checked[node] = self._checked(reply, node, stage, requests[node])
            except WireError as error:
                self.refuse(node, str(error), stage)
        for node, why in self._at_odds(stage, checked).items():
            del checked[node]
            self.refuse(node, why, stage)
        for node in requests:
            if node not in replies:
                self.refuse(node, f"no reply in stage {stage!r} before the deadline", stage)
        good = {node: copy.copy(replies[node]) for node in checked}  # the originals are not changed
        for node, reply in good.items():
            reply.content = checked[node]
        if stage == Stage.UNMASK:
            self.shares = good
        return list(good.values())

    def refuse(self, node: int, why: str, stage: str) -> None:
        """Record why the client of ``node`` is refused in ``stage``."""
        client = self.clients[node].index
        if stage == Stage.UNMASK:
            log(logging.WARNING, "%s's shares are not used: %s", self.called.client(client), why)
        self.refused.setdefault(client, why)

    def _ours(self, message: Message, everyone: list[int]) -> Message:
        """Return a copy of Flower's ``message`` with fl-bn's records and with records that no other message shares.

        Flower's messages of one stage share a record, which Flower's client mod changes. In the set-up stage, the copy
        also lists all nodes that get this message (``everyone``).
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

    def _checked(self, reply: Message, node: int, stage: str, request: Mapping[str, Any]) -> RecordDict:
        """Check the content of a reply, and return it for Flower's workflow.

        Args:
            reply: the reply.
            node: the node that must have sent it.
            stage: the stage of SecAgg+.
            request: the record that was sent to this node.

        Raises:
            WireError: the reply is an error, or not what the stage expects.
        """
        if reply.has_error():
            raise WireError("error", "", f"stage {stage!r}: code {reply.error.code}: {reason(reply.error.reason)}")
        if reply.metadata.src_node_id != node:
            raise WireError(
                "metadata", "", f"expected a reply from node {node}, but it names node {reply.metadata.src_node_id} as its sender"
            )
        content = reply.content
        if stage == Stage.SETUP:
            keys = KEYS.of_configs(content)
            for name in ("pk1", "pk2"):
                _check_key(name, keys[name])
            self.plans[node] = self._plan(PLAN.of_metrics(content), node)
            self.histories[node] = from_config(records_of(content, ConfigRecord).get(OWN_HISTORY.name), OWN_HISTORY)
            if beyond := [round for round in self.histories[node] if not 1 <= round <= self.header.round]:
                raise WireError(OWN_HISTORY.record, HISTORY_ROUNDS, f"expected rounds 1..{self.header.round}, but got {excerpt(beyond)}")
            return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(dict(keys))})
        if stage == Stage.SHARE_KEYS:
            shares, others = SHARES_OUT.of_configs(content), {int(key) for key in request if key != Key.STAGE} - {node}
            _same_nodes("dsts", shares["dsts"], others)
            if len(shares["ctxts"]) != len(shares["dsts"]):
                problem = f"expected an encrypted share for each of {len(shares['dsts'])} nodes, but got {len(shares['ctxts'])}"
                raise WireError(RECORD_KEY_CONFIGS, "ctxts", problem)
            return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(dict(shares))})
        if stage == Stage.COLLECT_MASKED_VECTORS:
            if "unreadable" in (complaint := UNREADABLE.of_configs(content)):
                return self._complain(node, complaint["unreadable"], request)
            return self._result(content, node)
        back = SHARES_BACK.of_configs(content)
        _same_nodes("nids", back["nids"], {*request[Key.ACTIVE_NODE_ID_LIST], *request[Key.DEAD_NODE_ID_LIST]})
        if len(back["shares"]) != len(back["nids"]) or any(len(share) < 20 or len(share) % 16 != 4 for share in back["shares"]):
            problem = f"expected {len(back['nids'])} shares of 4 + 16 n bytes each, but got {excerpt(back['shares'])}"
            raise WireError(RECORD_KEY_CONFIGS, "shares", problem)
        return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(dict(back))})

    def _plan(self, counts: Mapping[str, Any], node: int) -> Plan:
        plan, limit = Plan(counts["samples"], counts["passes"], counts["steps"]), self.clients[node].samples
        if plan.samples > limit and not self.evaluates:
            raise WireError(
                "plan", "samples", f"expected at most {limit}, the number of samples in the client's introduction, but got {plan.samples}"
            )
        if 0 < (most := self.most_steps(limit)) < plan.steps:
            raise WireError("plan", "steps", f"expected at most {most}, as the server asked for, but got {plan.steps}")
        batches = 1 if self.once else max(plan.steps, 1)
        if plan.passes > limit * batches:
            raise WireError("plan", "passes", f"expected at most {limit} samples in each of {batches} batches, but got {plan.passes}")
        return plan

    def _result(self, content: RecordDict, node: int) -> RecordDict:
        counts, weight, status = RESULT.of_configs(content), WEIGHT.of_metrics(content), STATUS.of_configs(content)
        self.header.check(header_from(counts))
        if (plan := self._plan(counts, node)) != self.plans[node]:
            raise WireError("fitres.metrics", "samples", f"expected {self.plans[node]}, as the client said at the start, but got {plan}")
        if counts["activations"].keys() != self.layers:
            problem = f"expected a number for each of {len(self.layers)} layers, but got {excerpt(list(counts['activations']))}"
            raise WireError("fitres.metrics", "activations", problem)
        masked = MASKED.of_configs(content)["masked_params"]
        _check_masked(masked, self.size)
        self.digests[node] = counts["digest"]
        self.activations[node] = counts["activations"]
        result = FitRes(Status(Code(status["code"]), ""), ndarrays_to_parameters([]), weight["num_examples"], {})
        checked: RecordDict = fitres_to_recorddict(result, keep_input=False)
        checked[RECORD_KEY_CONFIGS] = ConfigRecord({Key.MASKED_PARAMETERS: masked})
        return checked

    def _complain(self, node: int, about: Sequence[int], request: Mapping[str, Any]) -> RecordDict:
        if not about or not set(about) <= set(request[Key.SOURCE_LIST]):
            problem = f"expected one or more nodes that sent it shares, but got {excerpt(about)}"
            raise WireError(RECORD_KEY_CONFIGS, "unreadable", f"the client says it cannot read some shares: {problem}")
        self.complaints |= {frozenset((node, other)) for other in about}
        raise WireError(RECORD_KEY_CONFIGS, "unreadable", f"the client cannot read the shares of nodes {excerpt(sorted(about))}")

    def _at_odds(self, stage: str, checked: Mapping[int, RecordDict]) -> dict[int, str]:
        """Return the nodes whose replies are valid, but contradict the other nodes' replies, each with the reason."""
        if stage == Stage.SETUP:
            keys = {node: list(content.config_records[RECORD_KEY_CONFIGS].values()) for node, content in checked.items()}
            times = Counter(key for own in keys.values() for key in own)
            why = f"{RECORD_KEY_CONFIGS}/pk1: expected keys that no other client has, but one of them came from two clients"
            twice = {node: why for node, own in keys.items() if any(times[key] > 1 for key in own)}
            odd = twice | self._far_plans(checked.keys() - twice.keys())
            return odd | self._other_histories(checked.keys() - odd.keys())
        if stage == Stage.COLLECT_MASKED_VECTORS and checked:
            odd = self._other_instructions(checked)
            return odd | self._of_other_sizes([node for node in checked if node not in odd])
        return {}

    def _far_plans(self, nodes: Collection[int]) -> dict[int, str]:
        """Return the nodes whose counts are too far from the other nodes' counts, each with the reason.

        A client's weight in the sum is its count divided by the largest count. A client whose weight is too small for the
        quantiser refuses to take part (``check_weights``). While the smallest weight is too small, this function adds a node to the
        result: the one whose count differs from the median by the largest factor. This count is the smallest or the largest.
        """
        odd: dict[int, str] = {}
        for name in ("samples", "passes"):
            counts = {node: count for node in nodes if node not in odd and (count := getattr(self.plans[node], name)) > 0}
            while len(counts) > 1 and 2 * max(counts.values()) > self.levels * min(counts.values()):
                middle = median(counts.values())
                node = max(counts, key=lambda node: max(counts[node] / middle, middle / counts[node]))
                odd[node] = (
                    f"plan/{name}: {counts.pop(node)} is too far from the others' counts: the smallest weight in the sum would be below "
                    f"2 of {self.levels} levels"
                )
        return odd

    def _other_histories(self, nodes: Collection[int]) -> dict[int, str]:
        """Return the nodes that got another instruction than most nodes in an earlier round, each with the reason.

        Store the hashes of the instructions that most nodes got. All clients get these hashes.
        """
        self.history, at_odds = put_together({node: self.histories[node] for node in sorted(nodes)})
        why = "in round {} this client got another instruction than most clients, and its state depends on it"
        return {node: f"told/{HISTORY_HASHES}: {why.format(round)}" for node, round in at_odds.items()}

    def _other_instructions(self, nodes: Collection[int]) -> dict[int, str]:
        """Return the nodes whose instruction differs from that of most nodes, each with the reason.

        Masks depend on the instruction, so the masks of these nodes would not cancel. If no instruction has a majority,
        all nodes are returned.
        """
        (self.digest, votes), *_ = Counter(self.digests[node] for node in nodes).most_common()
        usual = self.digest if 2 * votes > len(nodes) else ""
        why = "fitres.metrics/digest: this client got another instruction than most clients (model, config or run config)"
        return {node: why for node in nodes if self.digests[node] != usual}

    def _of_other_sizes(self, nodes: Collection[int]) -> dict[int, str]:
        """Return the nodes whose inputs have another size than those of most clients, each with the reason.

        If no size has a majority, no node is returned. ``SecureRounds._moments`` then raises an error.
        """
        counted = {node: tuple(sorted(self.activations[node].items())) for node in nodes}
        (usual, votes), *_ = Counter(counted.values()).most_common() or [((), 0)]
        if 2 * votes <= len(counted):
            return {}
        why = "fitres.metrics/activations: its activations per sample differ from most clients': all inputs must have one size"
        return {node: why for node, own in counted.items() if own != usual}

    def leaving(self) -> set[int]:
        """Return the nodes to leave out because shares could not be read.

        The node with the most complaints, made by it or about it, is left out first. A complaint between two nodes that
        are in no other complaint does not show which one is at fault, so both are left out.
        """
        remaining, gone = set(self.complaints), set[int]()
        while remaining:
            (most, times), *_ = Counter(node for pair in remaining for node in sorted(pair)).most_common()
            gone |= {most} if times > 1 else {node for pair in remaining for node in pair}
            remaining = {pair for pair in remaining if not pair & gone}
        self.complaints.clear()
        for node in gone:
            self.refused.setdefault(
                self.clients[node].index, "another client could not read its shares, or it claims that it cannot read another's"
            )
        return gone


def _same_nodes(name: str, actual: Sequence[int], expected: set[int]) -> None:
    if len(actual) != len(expected) or set(actual) != expected:
        raise WireError(RECORD_KEY_CONFIGS, name, f"expected each of the nodes {excerpt(sorted(expected))} once, but got {excerpt(actual)}")


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
        problem = f"expected int64 vectors of shapes {shapes}, but got {excerpt(list(map(len, arrays)))} bytes"
        raise WireError(RECORD_KEY_CONFIGS, "masked_params", problem)
    vectors = [array_from(one, RECORD_KEY_CONFIGS, "masked_params") for one in arrays]
    if [v.shape for v in vectors] != shapes or any(
        v.dtype != np.int64 or v.min(initial=0) < 0 or v.max(initial=0) >= MODULUS for v in vectors
    ):
        got = f"{[v.shape for v in vectors]} of {[str(v.dtype) for v in vectors]}"
        raise WireError(RECORD_KEY_CONFIGS, "masked_params", f"expected int64 vectors of shapes {shapes} in [0, {MODULUS}), but got {got}")
