"""The server's half of a round: (state, replies) -> (state, record).

A round changes the shared model, or leaves it as it was: what is not finite is never stored, and whoever made it so is left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from torch import nn

from fl_bn.derived import copied
from fl_bn.exchange.session import Session, Traffic
from fl_bn.federation import schema
from fl_bn.federation.aggregation import Drift, merge_drifts
from fl_bn.federation.auxiliary import auxiliary
from fl_bn.federation.bounds import bounds_of, far_numbers, far_statistics
from fl_bn.federation.composition import check_composition
from fl_bn.federation.defence import NO_DEFENCE, Defence, TooFew
from fl_bn.federation.intake import PartialAverage, StreamingAverage
from fl_bn.federation.left_out import taking_part, without_far, without_overflow
from fl_bn.federation.narrow import EXACT, PayloadDtype, check_payload
from fl_bn.federation.norm_layers import check_layers, say_absent
from fl_bn.federation.optimizers import ServerOptimizer, server_optimizer
from fl_bn.federation.payload import count_tensors
from fl_bn.federation.record import ClientRecord, RoundRecord
from fl_bn.federation.replies import LOOPED, REPLIED, TRAINED, Expected
from fl_bn.federation.report_claims import far_claims
from fl_bn.federation.rounds import Rounds, constant_rate
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.shared_model import NotFinite, ServerStep, SharedModel
from fl_bn.federation.values import Instruction, Reply
from fl_bn.methods import INPUTS, MOMENTS, Method, Phase, Report
from fl_bn.objectives import PLAIN, Objective
from fl_bn.roles import buffers_in_words
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.stated_sizes import FEWEST
from fl_bn.support.wire import Absent, WireError, said

T = TypeVar("T")
LOGGER = logging.getLogger("flwr")


@dataclass
class RoundReplies:
    """A round's replies. ``parts``: usable ones, in client order; ``refused``: why another client's is not, by client.

    ``wrong``: clients whose reply no correct client would have sent. ``cohort``: all who were asked. ``exchange``: the session of the
    layer-wise exchange (FedTAN), with its ``carrier``, and how many ``messages`` a client was sent. ``folded``: the part of the average
    that was made as replies came.
    """

    cohort: Sequence[int]
    parts: list[Reply]
    refused: dict[int, str] = field(default_factory=dict)
    wrong: set[int] = field(default_factory=set)
    exchange: Session | None = None
    carrier: str = ""
    messages: int = 1
    folded: PartialAverage | None = None


class Server:
    """The state of a federation's server: the shared model, what its optimiser remembers, and the rounds so far.

    ``model``: unconverted; its tensors are the start. ``policy``: how rounds are run; ``rounds``: how many there will be. ``optimizer``
    steps on the pseudo-gradient of the shared weights (default: the average itself). ``defence``: rules against Byzantine clients.

    Raises:
        ValueError: ``model`` has no BatchNorm layer, and without one ``method`` means nothing (``norm_layers.check_layers``).
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        policy: Rounds,
        rounds: int = 1,
        *,
        optimizer: ServerOptimizer | None = None,
        defence: Defence = NO_DEFENCE,
    ) -> None:
        check_layers(model, method)
        check_weights(method, policy.client_weights)
        check_payload(policy.payload, method)
        self.source, self.method, self.policy, self.rounds, self.defence = model, method, policy, rounds, defence
        self.shared = SharedModel(model, method, policy.auxiliary, policy.clients)
        say_absent(model, method)
        self.rounding = PayloadDtype.of(policy.payload, self.shared.model)
        self.optimizer = optimizer or server_optimizer("fedavg")
        self.record = RoundRecord(0, Phase.TRAIN.value, 0.0)
        self.round = 0
        self._bounds: dict[str, float] = {}  # of the numbers in the replies to the round that is under way
        self._keeps = False  # all replies until the last has come: a round was lost since one could not be left out any more

    @property
    def model(self) -> nn.Module:
        """The shared model, converted for the method."""
        return self.shared.model

    def instruction(self) -> Instruction:
        """Return what the server asks of the next round's clients.

        Section ``start`` holds what clients keep at home, as the run starts with it: a client that keeps nothing yet begins with that. You
        may leave it out for the others. It is not in the record's bytes.
        """
        asked = self.begin(self.round + 1)
        return replace(asked, sections=asked.sections | self.shared.start())

    def begin(self, round: int) -> Instruction:
        """Open the record of ``round``, and return what its clients are asked to do.

        Raises:
            ValueError: there is nothing to train.
        """
        check_learns(self.source)
        phase, scheduled = self.method.phase(round, self.rounds), self.policy.rate(round, self.rounds)
        rate = self.method.learning_rate(self.policy.rate, round, self.rounds)
        asked = self.shared.instruction_to_train(round, phase, self.optimizer, rate, 1.0 if rate == scheduled else rate / scheduled)
        down = asked.sections
        self._bounds = {} if self.defence.active else bounds_of(down, rate, self.shared.buffers)  # a rule needs none
        self.record = RoundRecord(round, phase.value, rate, tensors_down=count_tensors(down), bytes_down=self.rounding.nbytes(down))
        return asked

    def expected(self, phase: Phase) -> schema.Schema:
        """Return which tensors a client's reply holds in ``phase``."""
        return schema.reply(self.model, self.method, phase, self.policy.update, self.policy.auxiliary)

    def expects(self, round: int, phase: Phase, samples: Mapping[int, int] = MappingProxyType({})) -> Expected:
        """Return what a reply in ``phase`` of ``round`` must be. ``samples``: how many each client said that it has, where it did."""
        form = REPLIED if phase is Phase.MEASURE else TRAINED
        bounds = {} if phase is Phase.MEASURE else self._bounds
        return Expected(
            round, self.shared.signature, self.expected(phase), form, samples, self.policy.most_steps, bounds, self.shared.buffers
        )

    def checked(self, replies: Sequence[Reply], asked: Instruction) -> RoundReplies:
        """Return the ``replies`` in this process that answer ``asked``, and why the others do not.

        Of several usable replies that call themselves the same client's, none counts. What is no client's reply is named in the log.
        """
        expected, parts, refused, wrong = self.expects(asked.round, asked.phase), dict[int, list[Reply]](), dict[int, str](), set[int]()
        expected = replace(expected, form=LOOPED) if expected.form is TRAINED else expected
        for reply in replies:
            if (problem := self._stranger(reply)) is not None:
                LOGGER.warning("round %s: a reply is not used: %s", asked.round, problem)
                continue
            try:
                usable = expected.check(reply)
                parts.setdefault(reply.client, []).append(usable)
            except WireError as error:
                refused[reply.client] = str(error)
                wrong |= set() if isinstance(error, Absent) else {reply.client}
        for client in [client for client, several in parts.items() if len(several) > 1]:
            number = len(parts.pop(client))
            refused[client] = f"{number} replies call themselves its own: number the clients, round.reply(samples, client=...)"
            wrong.add(client)
        refused = {client: why for client, why in refused.items() if client not in parts}
        return RoundReplies(sorted(parts.keys() | refused.keys()), [parts[i][0] for i in sorted(parts)], refused, wrong - parts.keys())

    def _stranger(self, reply: Reply) -> str | None:
        """Return why ``reply`` is no client's; None where it is one's."""
        if not isinstance(reply, Reply):
            return f"expected what round.reply(...) returns first, but got a {type(reply).__name__}"
        if type(reply.client) is not int or not 0 <= reply.client < self.policy.clients:
            known = f"expected one of client 0..{self.policy.clients - 1}, as many as the server was told of"
            return f"{known}, but it calls itself client {said(reply.client)}"
        return None

    def intake(self, samples: Mapping[int, int]) -> StreamingAverage | None:
        """Takes the replies of the round that is under way one by one, and frees their weights. None where all are needed at once: by
        robust rules, the layer-wise exchange, and what travels beside the weights (control variates, momentum).

        ``samples``: how many each client of the cohort said that it has.
        """
        phase, policy = Phase(self.record.phase), self.policy
        if self.defence.active or phase is Phase.EXCHANGE or policy.auxiliary or self._keeps:
            return None
        by_samples, compares = policy.client_weights == "samples", self.method.reports(phase) is not Report.NOTHING
        return StreamingAverage(
            {client: float(policy.planned(n)) if by_samples else 1.0 for client, n in samples.items()},
            lambda reply: float(reply.weight) if by_samples else 1.0,
            lambda reply, others: self.shared.may_be_refused(reply) or reply.client in self._far([*others, reply], phase),
            FEWEST if compares else 1,
        )

    def _far(self, parts: Sequence[Reply], phase: Phase) -> dict[int, str]:
        """Return why some of ``parts`` are not used, by client: what they claim is far from what the others do. Under a defence no claim
        counts, so none is refused."""
        report = self.method.reports(phase)
        if self.defence.active:
            return {}
        claims = far_claims(parts, report, self.policy.asks_for_steps) if report in MOMENTS else {}
        if phase is Phase.MEASURE:
            return claims
        far = far_statistics(parts, self.shared.statistics()) if report is Report.RUNNING else {}
        return far_numbers(parts, [extra.section for extra in self.policy.auxiliary]) | far | claims

    def conclude(self, came: RoundReplies) -> bool:
        """Check and combine the round's replies, and make the server's step: true, or false where too few were usable; then nothing
        changes. ``record`` says which."""
        shared, record, phase = self.shared, self.record, Phase(self.record.phase)
        self.round = record.round
        parts, refused, wrong = list(came.parts), dict(came.refused), len(came.wrong)
        far = self._far(parts, phase)
        self._keeps |= any(part.folded for part in parts if part.client in far)
        parts, refused = without_far(parts, far), refused | far
        if phase is Phase.EXCHANGE and came.exchange is not None:
            parts = taking_part(came.exchange, parts, refused)
        before = shared.statistics()

        def change(parts: list[Reply], overflowing: int) -> list[float]:
            return self._change(parts, overflowing, len(came.cohort), wrong, came.folded)

        try:
            parts, overflowing, distances = without_overflow(parts, change, self.policy.called)
        except TooFew as error:
            self._keeps |= isinstance(error.__cause__, NotFinite)
            self._enter(came, parts, refused)
            LOGGER.warning("round %s: %s", record.round, error)
            return False
        self._enter(came, parts, refused | overflowing)
        record.aggregated = True
        record.measure(distances)
        drifts = [part.local_drift(list(shared.layers)) for part in parts]
        record.drift = Drift.between(before, shared.statistics()) or merge_drifts(drift for drift in drifts if drift is not None)
        return True

    def pace(self) -> float:
        """See ``LayerReports``."""
        return self.policy.pace(self.record.learning_rate, self.rounds)

    def _change(self, parts: list[Reply], overflowing: int, cohort: int, wrong: int, folded: PartialAverage | None = None) -> list[float]:
        """Change the shared model by a round's replies, of a ``cohort`` of so many; ``overflowing``: how many were left out for that,
        ``wrong``: for what they hold.

        Returns what ``SharedModel.change`` does.

        Raises:
            TooFew: the round may not count with so few.
            NotFinite: what came out is no model.
        """
        policy, phase = self.policy, Phase(self.record.phase)
        needed = max(float(policy.min_cohort), policy.min_replies * cohort)
        if len(parts) < needed:
            usable = f"{len(parts)} of {cohort} replies could be used"
            raise TooFew(f"only {usable}, but {math.ceil(needed)} are needed: nothing changes")
        if overflowing and phase is Phase.EXCHANGE and policy.exchange.policy == "abort":
            raise TooFew("nothing changes: clients left the cohort's batch after its exchange (exchange-policy is abort)")
        defence = self.defence.without(wrong + overflowing, len(parts))
        try:
            defence.check(len(parts))
        except TooFew as error:
            raise TooFew(f"nothing changes, since {error}") from error
        believed = not defence.active and (policy.client_weights == "samples" or phase is Phase.EXCHANGE)
        weights = [float(part.weight) if believed else 1.0 for part in parts]
        statistics = self.shared.combined(parts, phase, defence, self.pace())
        return self.shared.change(ServerStep(parts, weights, self.optimizer, self.record.learning_rate, defence, folded), statistics)

    def measured(self, parts: list[Reply], wrong: int = 0, what: str = INPUTS) -> tuple[list[Reply], dict[int, str]]:
        """Store the statistics that an exchange of ``what`` alone found; the replies that count, and why others do not, by client.

        Raises:
            TooFew: fewer than the defence needs; the statistics stay as they are.
        """

        def store(parts: list[Reply], overflowing: int) -> None:
            defence = self.defence.without(wrong + overflowing, len(parts))
            defence.check(len(parts))
            self.shared.store(self.shared.measured(parts, defence, what))

        far = self._far(parts, Phase.MEASURE)
        near, overflowing, _ = without_overflow(without_far(parts, far), store, self.policy.called)
        return near, far | overflowing

    def _enter(self, came: RoundReplies, parts: Sequence[Reply], refused: Mapping[int, str]) -> None:
        """Every client of the cohort, and the bytes of the round, into the record; who was refused, and why, into the log."""
        exchange = came.exchange if Phase(self.record.phase) is Phase.EXCHANGE else None
        self.record.carrier = "" if exchange is None else came.carrier
        enter(self.record, came.cohort, parts, refused, exchange, came.messages, self.rounding, self.policy.called)


def enter(
    record: RoundRecord,
    cohort: Sequence[int],
    parts: Sequence[Reply],
    refused: Mapping[int, str],
    exchange: Session | None = None,
    messages: int = 1,
    rounding: PayloadDtype = EXACT,
    called: ClientNames = UNNAMED,
) -> None:
    """Add every client of ``cohort`` to ``record``, and the bytes of the round; say who was refused, and why."""
    usable, traffic = {part.client: part for part in parts}, {} if exchange is None else exchange.traffic
    if exchange is not None:
        record.exchanges = exchange.exchanges
        record.bytes_down = {section: count * messages for section, count in record.bytes_down.items()}
    shared_down = sum(record.bytes_down.values())
    for client in cohort:
        layers = traffic.get(client, Traffic())
        down = shared_down + layers.down
        if (part := usable.get(client)) is None:
            reason = refused[client]
            LOGGER.warning("round %s: %s's reply is not used: %s", record.round, called.client(client), reason)
            record.clients.append(ClientRecord(client, bytes_down=down, exchanges=layers.exchanges, refused=reason))
            continue
        record.bytes_up, record.tensors_up = rounding.nbytes(part.sections), count_tensors(part.sections)
        up = sum(record.bytes_up.values()) + layers.up
        waited = part.metrics.get("waited", 0.0)
        record.clients.append(ClientRecord(client, part.samples, part.steps, part.loss, down, up, layers.exchanges, waited))
    if traffic:
        record.bytes_down |= {"exchange": max(t.down for t in traffic.values())}
        record.bytes_up |= {"exchange": max(t.up for t in traffic.values())}


def check_weights(method: Method, client_weights: str) -> None:
    """Raises ValueError where they are not those of the method's exchange."""
    if client_weights != "samples" and Phase.EXCHANGE in (method.phase(1, 2), method.phase(2, 2)):
        raise ValueError(f"{method.name} weighs clients by the batches they drew: client_weights must be 'samples', or its step is inexact")


def check_learns(model: nn.Module) -> None:
    """Raises ValueError where ``model`` has nothing that an optimiser could step."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameter that learns (requires_grad), so there is nothing to train: give a network with "
            "parameters, or measure its statistics alone (fl-bn recalibrate)"
        )


def server_state(
    model: nn.Module,
    method: Method,
    rounds: int,
    *,
    clients: int = 1,
    optimizer: ServerOptimizer | None = None,
    defence: Defence = NO_DEFENCE,
    objective: Objective = PLAIN,
    rate: Callable[[int, int], float] = constant_rate,
) -> Server:
    """The server's state before round 1 of ``rounds``, for ``server_round``. ``model``: unconverted. ``clients``: in the population.

    ``objective``: the clients'. ``rate(round, rounds)``: the learning rate that clients are told; a loop of your own may ignore it.

    >>> from fl_bn import methods, server_state
    >>> state = server_state(nn.Linear(2, 1), methods.fedavg(), rounds=5)
    >>> state.instruction().round
    1
    """
    settings = LocalTraining(batch_size=2, epochs=1, objective=objective)
    check_composition(method, settings, robust=defence.active)
    policy = Rounds(clients=clients, rate=rate, auxiliary=auxiliary(settings))
    server = Server(model, method, policy, rounds, optimizer=optimizer, defence=defence)
    if buffers := buffers_in_words(server.model):
        LOGGER.info("%s", buffers)
    return server


def server_round(state: Server, replies: Sequence[Reply], exchange: Session | None = None) -> tuple[Server, RoundRecord]:
    """Combine the ``replies`` to ``state.instruction()``. ``state`` is not changed; the record names refused replies, with the reason.

    >>> from fl_bn import convert, local_round, methods, server_round, server_state
    >>> net, method = nn.Linear(2, 1), methods.fedavg()
    >>> state = server_state(net, method, rounds=1)
    >>> with local_round(convert(net, method), method, state.instruction()) as round:
    ...     pass  # your loop
    >>> state, record = server_round(state, [round.reply(samples=10)[0]])
    >>> record.aggregated  # ``exchange``: of FedTAN's layers
    True
    """
    new = copied(state)
    came = new.checked(replies, new.begin(state.round + 1))
    came.exchange = exchange
    new.conclude(came)
    return new, new.record
