"""Run the server's half of secure aggregation: the four stages of SecAgg+ with Flower's mod at the clients.

``setup`` collects keys and the client's counts. ``share_keys`` gives shares of each
client's secrets to its neighbours. ``collect_masked_vectors`` sends the model and
collects the vectors. ``unmask`` removes the masks from the sum. If a client is lost
in the first two stages, the others begin again without it. If it is lost later, the
others' shares remove its masks. With shares from fewer than ``threshold`` clients,
nothing is revealed.

The server learns the sum of the vectors, and each client's counts. The protocol
protects against a curious server, but not against one that invents clients, nor a
sum against a client that lies.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import TypeVar

import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fl_bn.federation.policy import ServerPolicy
from fl_bn.flower.compat import Stage
from fl_bn.flower.population import Client
from fl_bn.flower.secagg.instructions import History, from_config, put_together, to_config
from fl_bn.flower.secagg.masks import bound_to, key_stream, server_half
from fl_bn.flower.secagg.sums import EVALUATION, Layout, Plan, Weighting, length
from fl_bn.flower.wire import messages as forms
from fl_bn.flower.wire.codec import LONGEST_HEAD, add_to_config, array_from, header_of, records_of
from fl_bn.flower.wire.messages import OWN_HISTORY, RECORD_KEY_CONFIGS
from fl_bn.flower.wire.messaging import receive
from fl_bn.methods import Phase
from fl_bn.secure.settings import LEAST, MODULUS, SecureAggregation
from fl_bn.support.wire import WireError, excerpt, reason

T = TypeVar("T")
CURVE = "secp384r1"  # the elliptic curve of Flower's keys
DO_NOT_FIT = (ValueError, TypeError, LookupError, ArithmeticError)  # errors of Flower's functions for shares that do not fit together
NOT_CANCELLED = "the masks did not cancel (different versions of fl-bn, or a false share)"


class SumFailed(Exception):
    """Signal why a secure sum failed, and why clients are ``refused``, by index."""

    def __init__(self, reason: str, refused: Mapping[int, str]) -> None:
        self.refused = dict(refused)
        super().__init__(reason)


@dataclass(frozen=True)
class Sum:
    """Hold the result of a secure sum.

    Attributes:
        mean: the mean of the clients' weighted vectors, (d,), float64.
        activations: the number of activations per sample, by layer, the same at all
            clients.
        weighting: the counts (of samples) at which a client's weight is 1.
        refused: why other clients are not in the sum, by client index.
    """

    mean: np.ndarray
    plans: dict[int, Plan]
    activations: dict[str, int]
    weighting: Weighting
    refused: dict[int, str]

    def weights(self, section: str) -> list[float]:
        """Return the clients' weights in ``section``, by whose mean ``mean`` is divided."""
        return [self.weighting.of(section, plan) for plan in self.plans.values()]


@dataclass(frozen=True)
class Masked:
    """Hold what a client sent of its vector.

    Attributes:
        arrays: the client's weight in levels (1,), which shows whether masks
            cancelled, and the vector (d,). Both are masked, int64.
        activations: its number of activations per sample, by layer.
    """

    arrays: list[np.ndarray]
    digest: str
    activations: dict[str, int]


class SecureSum:
    """Sum a cohort's vectors without seeing any single one.

    Args:
        messages: the plain instruction to each client, with a ``config`` record.
        timeout: how many seconds to wait for the replies of a stage.
        shapes: the layout of a client's vector.
        phase: the phase of the round. None: clients evaluate.
        once: whether statistics come from one batch or pass, so that ``passes`` is
            at most ``samples``.
    """

    def __init__(
        self,
        grid: Grid,
        messages: Sequence[Message],
        cohort: Sequence[Client],
        settings: SecureAggregation,
        policy: ServerPolicy,
        timeout: float,
        shapes: Layout,
        phase: Phase | None = None,
        once: bool = False,
    ) -> None:
        self.grid, self.settings, self.policy, self.timeout, self.shapes, self.once = grid, settings, policy, timeout, shapes, once
        self.trains, self.exact = phase not in (None, Phase.MEASURE), phase is not None and settings.privacy is None
        self.round, self.levels = header_of(messages[0].content).round, int(2**settings.quantization_range)
        self.least = max(LEAST, settings.threshold_of(len(cohort)))
        if self.trains:
            self.least = max(self.least, policy.needed(len(cohort)))
        self.clients = {client.node: client for client in cohort}
        self.instructions = {message.metadata.dst_node_id: message for message in messages}
        self.refused, self.plans, self.histories = dict[int, str](), dict[int, Plan](), dict[int, History]()
        self.neighbours = dict[int, set[int]]()

    def result(self) -> Sum:
        """Run the protocol, and return the sum, or raise ``SumFailed``."""
        nodes = sorted(self.clients, key=lambda node: self.clients[node].index)
        while True:
            if len(nodes) < self.least:
                few = f"a secure sum needs at least {self.least} clients, but only {len(nodes)} of {len(self.clients)} can take part"
                raise SumFailed(few, self.refused)
            present = set(keys := self._setup(nodes))
            if len(keys) == len(nodes):
                present = set(sealed := self._share_keys(keys))
                if len(sealed) == len(nodes):
                    break
            nodes = [node for node in nodes if node in present]
        weighting = self._weigh(nodes)
        masked, digest = self._collect(nodes, sealed)
        threshold = self.settings.threshold_of(len(nodes))
        if len(masked) < self.least or any(len(around & masked.keys()) < threshold for around in self.neighbours.values()):
            needed = f"removing masks needs {threshold} (see secagg-shares), and the sum {self.least}"
            raise SumFailed(f"only {len(masked)} of {len(nodes)} clients sent a masked vector, but {needed}", self.refused)
        mean = self._unmask(keys, masked, threshold, digest)
        plans = {self.clients[node].index: self.plans[node] for node in nodes if node in masked}
        activations = next(iter(masked.values())).activations
        return Sum(mean, plans, activations, weighting, {i: why for i, why in self.refused.items() if i not in plans})

    # the four stages

    def _setup(self, nodes: list[int]) -> dict[int, list[bytes]]:
        """Choose each node's neighbours, and collect the clients' public keys, counts and histories."""
        shares, ring = self.settings.shares_of(len(nodes)), list(nodes)
        random.shuffle(ring)
        around = range(-(shares // 2), shares // 2 + 1)
        self.neighbours = {node: {ring[(at + offset) % len(ring)] for offset in around} for at, node in enumerate(ring)}
        asked = {
            "sample_num": len(nodes),
            "share_num": shares,
            "threshold": self.settings.threshold_of(len(nodes)),
            "clipping_range": float(self.settings.clipping_range),
            "target_range": self.levels,
            "mod_range": MODULUS,
            "max_weight": 1.0,  # each client multiplies its vector by its weight itself
            "cohort": sorted(nodes),
        }
        keys = self._ask(Stage.SETUP, dict.fromkeys(nodes, asked), self._keys)
        times = Counter(key for pair in keys.values() for key in pair)
        for node, pair in list(keys.items()):
            if not self.plans[node].samples:
                self._refuse(keys, node, "it takes no part in this round")
            elif any(times[key] > 1 for key in pair):
                self._refuse(keys, node, f"{RECORD_KEY_CONFIGS}/pk1: expected keys that no other client has, but two clients sent one")
        why = "told/secagg-told: in round {} this client got another instruction than most clients, and its state depends on it"
        for node, round in put_together({node: self.histories[node] for node in keys})[1].items():
            self._refuse(keys, node, why.format(round))
        return keys

    def _keys(self, node: int, content: RecordDict) -> list[bytes]:
        pair, counts, limit = forms.KEYS.of(content), forms.PLAN.of(content), self.clients[node].samples
        for name, key in pair.items():
            if not is_key(key):
                raise WireError(RECORD_KEY_CONFIGS, name, f"expected a public key on {CURVE} in PEM")
        self.plans[node] = plan = Plan(counts["samples"], counts["passes"], counts["steps"])
        self.histories[node] = from_config(records_of(content, ConfigRecord).get(OWN_HISTORY.name), OWN_HISTORY, self.round)
        for name, most in (
            ("samples", limit if EVALUATION not in self.shapes else plan.samples),
            ("steps", (self.trains and self.policy.most_steps(limit)) or plan.steps),
            ("passes", limit * (1 if self.once else max(plan.steps, 1))),
        ):
            if counts[name] > most:
                raise WireError("plan", name, f"expected at most {most} (of {limit} samples), but got {counts[name]}")
        return [pair["pk1"], pair["pk2"]]

    def _share_keys(self, keys: Mapping[int, list[bytes]]) -> dict[int, dict[int, bytes]]:
        """Send each client its neighbours' keys. Return the shares by node and receiver."""
        requests = {node: {str(other): keys[other] for other in around} for node, around in self.neighbours.items()}

        def read(node: int, content: RecordDict) -> dict[int, bytes]:
            own = forms.SHARES_OUT.of(content)
            return _by_node("dsts", own["dsts"], own["ctxts"], self.neighbours[node] - {node})

        return self._ask(Stage.SHARE_KEYS, requests, read)

    def _weigh(self, nodes: Sequence[int]) -> Weighting:
        """Choose the weights, and add them and the combined history to all instructions."""
        plans, together = [self.plans[node] for node in nodes], put_together({node: self.histories[node] for node in nodes})[0]
        most, passes = max(p.samples for p in plans), max(p.passes if "moments" in self.shapes else p.samples for p in plans)
        by_samples = self.exact and self.policy.client_weights == "samples"
        weighting = Weighting(most if by_samples else 0, passes if self.exact else 0, most)
        values = {f"secagg-{key}-weight": value for key, value in asdict(weighting).items()} | to_config(together)
        for node in nodes:
            add_to_config(self.instructions[node].content, values)
        return weighting

    def _collect(self, nodes: Sequence[int], sealed: Mapping[int, Mapping[int, bytes]]) -> tuple[dict[int, Masked], str]:
        """Send the instructions, and return the masked vectors and the hash of the instruction.

        Clients with another instruction than most are left out, since their masks
        would not cancel. So are those whose inputs have another size: samples do
        not weigh their statistics.
        """
        sources = {node: [other for other in nodes if node in sealed[other]] for node in nodes}
        requests = {n: {"srcs": of, "ctxts": [sealed[other][n] for other in of]} for n, of in sources.items()}
        masked = self._ask(Stage.COLLECT_MASKED_VECTORS, requests, self._masked)
        said = {node: (one.digest, tuple(sorted(one.activations.items()))) for node, one in masked.items()}
        (usual, votes), *_ = [*Counter(said.values()).most_common(), (("", ()), 0)]
        for node, own in said.items():
            if own != usual or 2 * votes <= len(said):
                what = "another instruction than most clients (model, config or run config), or inputs of another size"
                self._refuse(masked, node, f"fitres.metrics: this client got {what}")
        return masked, usual[0]

    def _masked(self, node: int, content: RecordDict) -> Masked:
        data, told = forms.MASKED.of(content)["masked_params"], forms.RESULT.of(content)
        layers = {name.rpartition(".")[0] for name in self.shapes.get("moments", {})}
        if told["activations"].keys() != layers:
            problem = f"expected a number for each of {len(layers)} layers, but got {excerpt(list(told['activations']))}"
            raise WireError("fitres.metrics", "activations", problem)
        shapes, arrays = [(1,), (length(self.shapes),)], list[np.ndarray]()
        if [len(one) <= 8 * math.prod(shape) + LONGEST_HEAD for one, shape in zip(data, shapes, strict=False)] == [True, True]:
            arrays = [array_from(one, RECORD_KEY_CONFIGS, "masked_params") for one in data]
        whole = all(v.dtype == np.int64 and v.min(initial=0) >= 0 and v.max(initial=0) < MODULUS for v in arrays)
        if not whole or [v.shape for v in arrays] != shapes:
            problem = f"expected int64 arrays of shapes {shapes} in [0, {MODULUS}), but got {excerpt(list(map(len, data)))} bytes"
            raise WireError(RECORD_KEY_CONFIGS, "masked_params", problem)
        return Masked(arrays, told["digest"], told["activations"])

    def _unmask(self, keys: Mapping[int, list[bytes]], masked: Mapping[int, Masked], threshold: int, digest: str) -> np.ndarray:
        """Ask for shares of secrets, remove the masks from the sum, and return the mean of the vectors.

        Of a client in the sum, the secret is the seed of its private mask; of a
        lost one, the key of the masks that it shares with its neighbours.
        """
        active = masked.keys()
        around = {node: self.neighbours[node] for node in active}
        requests = {n: {"active_nids": sorted(near & active), "dead_nids": sorted(near - active)} for n, near in around.items()}

        def read(node: int, content: RecordDict) -> dict[int, bytes]:
            own = forms.SHARES_BACK.of(content)
            return _by_node("nids", own["nids"], own["shares"], self.neighbours[node])

        answers = list(self._ask(Stage.UNMASK, requests, read).values())
        total = [reduce(np.add, parts) for parts in zip(*(one.arrays for one in masked.values()), strict=True)]
        try:
            with bound_to(bytes.fromhex(digest)):
                for node, near in self.neighbours.items():
                    shares = [one[node] for one in answers if node in one]
                    if len(shares) < threshold:
                        few = f"{len(shares)} clients sent shares that remove masks, but {threshold} are needed (see secagg-shares)"
                        raise SumFailed(few, self.refused)
                    for seed, sign in self._seeds(node, server_half.combine_shares(shares), near & active, keys):
                        for part, mask in zip(total, key_stream(seed, MODULUS, [part.shape for part in total]), strict=True):
                            part += sign * mask
        except DO_NOT_FIT as error:
            raise SumFailed(f"{NOT_CANCELLED}: {error!r}", self.refused) from error
        (whole,), vector = (part & (MODULUS - 1) for part in total)
        if int(whole) != len(masked) * self.levels:  # the sum of the weights of 1, as levels
            raise SumFailed(NOT_CANCELLED, self.refused)
        (mean,) = server_half.dequantize([vector], float(self.settings.clipping_range), self.levels)
        mean += -(len(masked) - 1) * float(self.settings.clipping_range)
        mean *= 1 / len(masked)
        return np.asarray(mean)

    def _seeds(self, node: int, secret: bytes, active: set[int], keys: Mapping[int, list[bytes]]) -> list[tuple[bytes, int]]:
        """Return the seeds of the masks that ``secret`` removes from the sum, with their signs."""
        if node in active:
            return [(secret, -1)]
        private, public = server_half.bytes_to_private_key(secret), server_half.bytes_to_public_key
        return [(server_half.generate_shared_key(private, public(keys[other][0])), 1 if node > other else -1) for other in sorted(active)]

    # one stage

    def _ask(self, stage: str, requests: Mapping[int, Mapping[str, object]], read: Callable[[int, RecordDict], T]) -> dict[int, T]:
        """Send requests of a ``stage``. Return what ``read`` makes of the replies, by node."""
        sent, answers = [], dict[int, T]()
        for node, request in requests.items():
            m = self.instructions[node]
            whole = stage == Stage.COLLECT_MASKED_VECTORS
            content = RecordDict({**(m.content if whole else records_of(m.content, ConfigRecord))})
            content[RECORD_KEY_CONFIGS] = ConfigRecord({"stage": stage, **request})  # type: ignore[dict-item]
            sent.append(Message(content, node, "train", ttl=m.metadata.ttl, group_id=m.metadata.group_id))
        silent = set(requests)
        for reply in receive(self.grid, sent, self.timeout, called=self.policy.called):
            node = reply.metadata.src_node_id
            if node not in silent:
                continue
            silent.discard(node)
            try:
                if reply.has_error():
                    raise WireError("error", "", f"stage {stage!r}: code {reply.error.code}: {reason(reply.error.reason)}")
                answers[node] = read(node, reply.content)
            except WireError as error:
                self._refuse(answers, node, str(error))
        for node in silent:
            self._refuse(answers, node, f"no reply in stage {stage!r} before the deadline")
        return answers

    def _refuse(self, answers: dict[int, T], node: int, why: str) -> None:
        answers.pop(node, None)
        self.refused.setdefault(self.clients[node].index, why)


def _by_node(name: str, nodes: Sequence[int], shares: Sequence[bytes], expected: set[int]) -> dict[int, bytes]:
    if sorted(nodes) != sorted(expected) or len(shares) != len(nodes):
        problem = f"expected a share for each of the nodes {excerpt(sorted(expected))}, but got {len(shares)} for {excerpt(nodes)}"
        raise WireError(RECORD_KEY_CONFIGS, name, problem)
    return dict(zip(nodes, shares, strict=True))


def is_key(pem: bytes) -> bool:
    """Return whether ``pem`` is a public key on ``CURVE``."""
    try:
        key = load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False
    return isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == CURVE
