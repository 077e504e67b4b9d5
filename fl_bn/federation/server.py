"""Carry out the server's half of a round: (state, replies) -> (state, record).

If a new shared tensor is not finite, the round changes nothing, and the next one
leaves out the client whose reply has the largest values.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from torch import nn

from fl_bn.federation.aggregation import NO_DEFENCE, Defence, Drift, TooFew
from fl_bn.federation.composition import check_layers, check_weights, say_absent, say_unmeasured
from fl_bn.federation.optimizers import ServerOptimizer, server_optimizer
from fl_bn.federation.policy import ServerPolicy
from fl_bn.federation.record import RoundRecord, watch, with_clients
from fl_bn.federation.replies import REPLIED, TRAINED, Expected, Intake, bounds_of, taking_part
from fl_bn.federation.shared_model import NotFinite, ServerStep, SharedModel
from fl_bn.federation.values import Instruction, Named, Reply, RoundReplies, count_tensors, section_bytes
from fl_bn.methods import Method, Phase

LOGGER = logging.getLogger("flwr")


class Server:
    """Hold the server's state: shared model, optimiser's buffers, record of the last round.

    Args:
        model: The unconverted network. The run starts with its tensors.
        rounds: The run's number of rounds, on which phases and learning rates
            depend.
        optimizer: Steps along the pseudo-gradient of the weights, as a fresh copy.
            Default: the clients' average.
        defence: Rules against Byzantine clients. Default: none.

    Raises:
        ValueError: ``method`` needs BatchNorm, but ``model`` has none, or
            ``policy`` does not fit the method.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        policy: ServerPolicy,
        rounds: int = 1,
        *,
        optimizer: ServerOptimizer | None = None,
        defence: Defence = NO_DEFENCE,
    ) -> None:
        check_layers(model, method)
        check_weights(method, policy.client_weights)
        self.source, self.method, self.policy, self.rounds = model, method, policy, rounds
        self.defence, self.defended = defence, defence.active
        self.shared = SharedModel(model, method, policy.auxiliary, policy.clients)
        say_absent(model, method)
        self.optimizer = (optimizer or server_optimizer("fedavg")).fresh()
        self.record = RoundRecord(0, Phase.TRAIN.value, 0.0)
        self.round, self.first_loss = 0, math.nan  # the run's first known training loss
        self._bounds: dict[str, float] = {}  # section -> the largest allowed value in replies of this round
        self.left_out: set[int] = set()  # clients without which the next round goes, since their values spoilt a round's sum

    @property
    def model(self) -> nn.Module:
        """Return the shared model, converted for the method."""
        return self.shared.model

    def instruction(self) -> Instruction:
        """Return the instruction to the next round's clients.

        Section ``start``, initial values, is only for a client without kept
        tensors.
        """
        instruction = self.begin(self.round + 1)
        return replace(instruction, sections=instruction.sections | self.shared.start())

    def begin(self, round: int) -> Instruction:
        """Open the record of ``round`` (from 1), and return the instruction to its clients."""
        phase, scheduled = self.method.phase(round, self.rounds), self.policy.scheduled(round, self.rounds)
        rate = self.method.learning_rate(self.policy.scheduled, round, self.rounds)
        share = 1.0 if rate == scheduled else rate / scheduled
        fields = {"learning_rate": rate, "rate_share": share, "objective": self.policy.objective}
        instruction = self.shared.instruction_to_train(round, phase, self.optimizer, **fields)
        down = instruction.sections
        self._bounds = {} if self.defended else bounds_of(down, rate, self.shared.buffers)  # a robust rule needs no bounds
        self.record = RoundRecord(round, phase.value, rate, tensors_down=count_tensors(down), bytes_down=section_bytes(down))
        return instruction

    def intake(self, cohort: Sequence[int]) -> Intake | None:
        """Return what takes the cohort's replies one by one, and frees their weights' memory.

        None: robust rules, the layer-wise exchange or auxiliary tensors need all at
        the same time.
        """
        whole = self.defended or Phase(self.record.phase) is Phase.EXCHANGE or self.policy.auxiliary
        return None if whole else Intake(cohort, self._weight)

    def _weight(self, part: Reply) -> float:
        by_samples = self.policy.client_weights == "samples" or Phase(self.record.phase) is Phase.EXCHANGE
        return float(part.weight) if by_samples and not self.defended else 1.0

    def warnings(self, last: bool, failed: int = 0) -> Iterator[str]:
        """Yield what ``watch`` says of the round that is over, the ``last`` of the run or not."""
        self.first_loss = self.record.loss if math.isnan(self.first_loss) else self.first_loss
        return watch(self.record, self.first_loss, last, failed)

    def conclude(self, replies: RoundReplies) -> bool:
        """Combine ``replies`` to ``begin``'s instruction, and tell whether the model changed.

        ``record`` then names the refused clients, with the reasons.
        """
        shared, phase, called = self.shared, Phase(self.record.phase), self.policy.called
        self.round, self.left_out = self.record.round, set()
        parts, refused = list(replies.parts), dict(replies.refused)
        if phase is Phase.EXCHANGE and replies.exchange is not None:
            parts = taking_part(replies.exchange, parts, refused)
        before = shared.statistics()
        try:
            distances = self._step(parts, replies)
        except (TooFew, NotFinite) as error:
            why = str(error)
            if isinstance(error, NotFinite):
                worst = max(parts, key=lambda part: part.largest)
                parts, self.left_out = [part for part in parts if part is not worst], {worst.client}
                refused[worst.client] = f"{error}, and this client's values are the largest, up to {worst.largest:.3g}"
                why = f"{why}: nothing changes, and the next round goes without {called.client(worst.client)}"
            self.record = with_clients(self.record, replies, parts, refused, called)
            LOGGER.warning("round %s: %s", self.round, why)
            return False
        self.record = replace(
            with_clients(self.record, replies, parts, refused, called, distances),
            aggregated=True,
            drift=Drift.between(before, shared.statistics()),
        )
        if shared.unseen or shared.reached is not None:
            say_unmeasured(shared, self.round, self.rounds)
        return True

    def _step(self, parts: list[Reply], replies: RoundReplies) -> list[float]:
        """Update the shared model by the usable replies, ``parts``.

        Return the distance (L2) of each update to the robust one, if any.

        Raises:
            TooFew: There are too few replies for the round, or for the robust rule.
            NotFinite: A new tensor would not be finite. The model stays unchanged.
        """
        policy, phase, cohort = self.policy, Phase(self.record.phase), len(replies.cohort)
        if len(parts) < (needed := policy.needed(cohort)):
            usable = f"only {len(parts)} of {cohort} replies could be used"
            raise TooFew(f"{usable}, but {needed} are needed (min-replies, min-cohort, min_train_nodes): nothing changes")
        try:
            defence = self.defence.among(len(parts), len(replies.wrong)) if self.defended else None
        except TooFew as error:
            raise TooFew(f"nothing changes, since {error}") from error
        statistics = self.shared.combined(parts, phase, defence, policy.pace(self.record.learning_rate, self.rounds))
        weights = [self._weight(part) for part in parts]
        step = ServerStep(parts, weights, self.optimizer, self.record.learning_rate, defence, replies.sum, phase)
        return self.shared.change(step, statistics)

    def expects(self, round: int, phase: Phase, samples: Mapping[int, int] = MappingProxyType({})) -> Expected:
        """Describe the expected replies to an instruction.

        ``samples`` is client -> the number of samples that it announced.
        """
        form = REPLIED if phase is Phase.MEASURE else TRAINED
        bounds, expected = {} if phase is Phase.MEASURE else self._bounds, self.shared.expected(phase, self.policy.update)
        return Expected(round, self.shared.signature, expected, form, samples, self.policy.most_steps, bounds, self.shared.buffers)


class Transport(ABC):
    """Take instructions to clients, and bring their replies back.

    ``federation.run`` decides when clients train, measure and evaluate. A subclass
    must define ``train``, ``measure`` and ``evaluate``. An example is
    tests/extension/threads_transport.py.

    Attributes:
        server: The server of the run. Set it in the constructor.
    """

    server: Server

    @abstractmethod
    def train(self, instruction: Instruction) -> RoundReplies:
        """Let the round's cohort train, and return checked replies."""

    @abstractmethod
    def measure(self, instruction: Instruction) -> RoundReplies:
        """Let clients measure all layers in one forward pass, and return checked replies."""

    @abstractmethod
    def evaluate(self, number: int, tensors: Named) -> dict[str, float]:
        """Evaluate shared ``tensors`` after round ``number``. Return metrics, empty without data."""

    def measure_layer_by_layer(self, instruction: Instruction) -> RoundReplies | None:
        """Let clients measure all layers exactly, layer by layer, if that is possible."""
        return None

    def conclude(self, replies: RoundReplies) -> bool:
        """Combine the ``replies`` of ``train``, and tell whether the model changed."""
        return self.server.conclude(replies)

    def store(self, instruction: Instruction, replies: RoundReplies) -> None:
        """Store measured statistics, from checked ``replies``, in the server.

        Raises:
            TooFew: There are fewer replies than needed.
            NotFinite: A combined statistic is not finite.
        """
        server, parts = self.server, replies.parts
        if not parts:
            raise TooFew("there is no reply to combine")
        defence = server.defence.among(len(parts), len(replies.wrong)) if server.defended else None
        server.shared.store(server.shared.measured(parts, defence, instruction.measured))

    def finish_round(self, number: int, changed: bool) -> None:
        """Do what is needed after round ``number``, before its record is complete."""
        return
