"""Run the rounds of a user's own loop, which calls a strategy's hooks as Flower's ``Strategy.start`` does."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fl_bn.federation.divergence import watch
from fl_bn.federation.payload import Named
from fl_bn.federation.record import RoundRecord, batches_trained
from fl_bn.flower.deployment import Progress
from fl_bn.flower.global_model import GlobalModel
from fl_bn.flower.grid_transport import GridTransport, numbers_of
from fl_bn.flower.log import log
from fl_bn.flower.own.rounds import OwnRounds
from fl_bn.flower.population import Client, RunFailed
from fl_bn.methods import Method, Phase, Refresh

LACKING = (
    "under %s the arrays of aggregate_train lack the tensors that clients keep (%s, ...: %d tensors): strategy.global_model(round, arrays) "
    "returns all tensors of your network"
)
UNKNOWN = 10**9
"""Stands for an unknown number of rounds. The user may leave the number out if nothing depends on it."""


@dataclass
class Asked:
    """Hold the messages that ``configure_train`` or ``configure_evaluate`` made, until the replies come.

    Attributes:
        round: the round's number. 0 or -1: no message was made yet.
        messages: the messages.
        clients: the clients to which the messages go.
    """

    round: int
    messages: list[Message] = field(default_factory=list)
    clients: Sequence[Client] = ()

    def reached(self) -> list[Client]:
        """Return the clients whose message was sent. A user's loop may leave out some messages.

        A message that was sent has an id from the grid. If no message has one, all clients are returned.
        """
        sent = {message.metadata.dst_node_id for message in self.messages if message.metadata.message_id}
        return [client for client in self.clients if client.node in sent] if sent else list(self.clients)


class OwnLoop:
    """Do the work that ``Strategy.start`` does between the hooks, for a user's own loop that calls the hooks.

    The results are the same as those of ``start``. The statistics are measured before round 1, and again before an
    evaluation, if the method needs this. So ``configure_train`` and ``aggregate_train`` may send messages of their own
    over the grid.

    Args:
        rounds: the strategy that runs the rounds.
        grid: Flower's grid.
        arrays: the tensors to start from. Empty: those of the strategy's model.
        number: the number of rounds; ``UNKNOWN`` if nothing depends on it.
        timeout: how many seconds to wait for the replies to messages that a hook sends by itself.
    """

    def __init__(self, rounds: OwnRounds, grid: Grid, arrays: ArrayRecord, number: int, timeout: float) -> None:
        self.rounds, self.number, self.records = rounds, number, list[RoundRecord]()
        self._progress = Progress.of(grid)
        self._transport = GridTransport(rounds, grid, timeout, ConfigRecord(), ConfigRecord())
        self._global_model = GlobalModel(rounds)
        rounds.server.rounds, rounds.population = number, None
        if arrays:
            rounds.starts.begin_with(arrays)
        rounds.clients_of(grid)
        self._trained: Named = rounds.shared.tensors()  # the tensors with which the next round starts
        self._returned: Named = self._trained  # these tensors as the loop got them: with statistics renewed for an evaluation
        self._training, self._evaluating = Asked(0), Asked(-1)
        self._last, self._failed, self._first_loss, self._said = 0, 0, math.nan, False

    def configure_train(self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Make the train messages of a round.

        Args:
            number: the round, higher than all rounds that were trained before.
            arrays: the shared tensors: those that the last ``aggregate_train`` returned, or changed ones.
            config: values for every message.
            grid: Flower's grid.

        Raises:
            RunFailed: the round was trained already, ``number`` is below 1 or above ``num_rounds``, or ``arrays`` are not
                those of this network.
        """
        self._check_round(number)
        rounds, shared = self.rounds, self.rounds.shared
        self._use(grid)
        if not self.records and not self._training.round and shared.statistics():
            self._calibrate(number)
        given = rounds.inward(arrays)
        shared.load({name: self._trained[name] if torch.equal(tensor, self._returned[name]) else tensor for name, tensor in given.items()})
        messages = list(rounds.configure_train(number, rounds.outward(shared.tensors()), config, grid))
        self._trained = shared.tensors()
        self._returned = given
        self._training = Asked(number, messages, rounds.cohort)
        return messages

    def aggregate_train(self, number: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies to the messages of ``configure_train``.

        Args:
            number: the round.
            replies: the replies. A client whose reply is not among them counts as missing.

        Returns:
            The shared tensors to evaluate, and the combined metrics. If too few replies are usable, ``(None, None)``, and
                the round may be tried again.

        Raises:
            RunFailed: the round was not configured, or was aggregated already.
        """
        if number != self._training.round:
            asked = f"the last one was of round {self._training.round}" if self._training.round else "there was none yet"
            raise RunFailed(f"aggregate_train({number}, ...) needs configure_train({number}, ...) before it: {asked}")
        if number == self._last:
            raise RunFailed(f"aggregate_train({number}, ...) was called before, so round {number} is in the model: go on with {number + 1}")
        replies = list(replies)  # a grid may send the messages only when their replies are read
        rounds = self.rounds
        rounds.cohort, rounds.sent = self._training.reached(), self._training.messages
        arrays, metrics = rounds.aggregate_train(number, replies)
        self._failed = self._failed + 1 if arrays is None else 0
        if arrays is None:
            rounds.shared.load(self._trained)
        else:
            self._last, self._trained = number, rounds.shared.tensors()
            self._returned = self._renewed(number)
            rounds.shared.load(self._returned)
        self._note(rounds.record)
        if arrays is None:
            return None, metrics
        arrays = rounds.outward(self._returned)
        if rounds.method.personal and not self._said:
            self._said = True
            kept = sorted(rounds.server.source.state_dict().keys() - arrays.keys())
            log(logging.INFO, LACKING, rounds.method.name, kept[0] if kept else "", len(kept))
        return arrays, metrics

    def configure_evaluate(self, number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Make the evaluate messages of a round.

        Args:
            number: the round. 0: an evaluation before round 1.
            arrays: the tensors to evaluate. The training does not use them.
            config: values for every message.
            grid: Flower's grid.
        """
        rounds = self.rounds
        self._use(grid)
        before = rounds.shared.tensors()
        messages = list(rounds.configure_evaluate(number, arrays, config, grid))
        self._evaluating = Asked(number, messages, rounds.evaluating if messages else [])
        rounds.shared.load(before)
        return messages

    def aggregate_evaluate(self, number: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the evaluations of the clients.

        Args:
            number: the round.
            replies: the replies to the messages of ``configure_evaluate``.

        Returns:
            The combined metrics, which are also stored in the round's record; None if there are none.

        Raises:
            RunFailed: there was no ``configure_evaluate`` of this round.
        """
        if number != self._evaluating.round:
            raise RunFailed(f"aggregate_evaluate({number}, ...) needs configure_evaluate({number}, ...) before it")
        replies, rounds, record = list(replies), self.rounds, self.rounds.record
        rounds.evaluating, rounds.sent = self._evaluating.reached(), self._evaluating.messages
        metrics = rounds.aggregate_evaluate(number, replies)
        by_client, rounds.server.record = rounds.record.client_evaluation, record
        if self.records and self.records[-1].round == number:
            evaluation = {} if metrics is None else numbers_of(metrics)
            changed = replace(self.records[-1], client_evaluation=by_client, evaluation=evaluation)
            self.records[-1] = rounds.disclosures.enter(changed)
        return metrics

    def global_model(self, number: int, arrays: ArrayRecord) -> ArrayRecord | None:
        """Return the arrays of the global model with the given shared tensors, as ``evaluate_fn`` of ``start`` gets them.

        Args:
            number: the round. 0: before round 1.
            arrays: the shared tensors.
        """
        before = self.rounds.shared.tensors()
        model = self._global_model.at(number, self.rounds.inward(arrays), counted=True)
        self.rounds.shared.load(before)
        return model

    def _check_round(self, number: int) -> None:
        if number < 1:
            raise RunFailed(f"configure_train({number}, ...): rounds are numbered from 1")
        if number <= self._last:
            raise RunFailed(
                f"configure_train({number}, ...): round {self._last} is in the model already, so number the next one {self._last + 1} or "
                "higher (for another run, make a new strategy)"
            )
        if number > self.number:
            raise RunFailed(f"configure_train({number}, ...): the strategy has num_rounds={self.number}: set it to your loop's number")

    def _use(self, grid: Grid) -> None:
        self._transport.grid = grid
        self.rounds.clients_of(grid).grid = grid

    def _calibrate(self, number: int) -> None:
        """Measure the statistics before round 1. A loop that begins with a later round uses the statistics in its arrays."""
        rounds, shared = self.rounds, self.rounds.shared
        if number == 1:
            self._trained = rounds.statistics.calibrated(self._transport, self._trained, self.number)
        elif rounds.statistics.calibration(self.number):
            log(logging.INFO, "the loop begins with round %s: the statistics are those of its arrays, and are not measured first", number)
            if rounds.statistics.rescales(self.number):
                shared.was_at_unit_scale()

    def _renewed(self, number: int) -> Named:
        """Return the shared tensors after a round. Their statistics are measured again for an evaluation, if the method needs it."""
        rounds = self.rounds
        if rounds.method.refresh is Refresh.NOTHING or rounds.record.phase == Phase.FROZEN.value:
            return self._trained
        return rounds.statistics.refreshed(self._transport, number, self._trained)

    def _note(self, record: RoundRecord) -> None:
        """Store the record of a round, report it to ``fl-bn status``, and log a warning if the training diverges."""
        rounds = self.rounds
        rounds.batches_trained += batches_trained([record])
        self._first_loss = record.loss if math.isnan(self._first_loss) else self._first_loss
        for warning in watch(record, self._first_loss):
            log(logging.WARNING, "%s", warning)
        optimizer = rounds.server.optimizer
        rounds.recovery.after_round(record.round, self.number, ArrayRecord(), rounds.shared, optimizer, self._failed)
        self.records.append(rounds.disclosures.enter(record))
        self._progress.on_round(record, 0 if self.number == UNKNOWN else self.number)


def needs_number(method: Method, schedule: Callable[[int, int], float] | None) -> str:
    """Return what depends on the number of rounds, in words; empty: nothing does.

    Args:
        method: the method.
        schedule: the learning rate that the user gave, if any.
    """
    if method.phase(1, 1) is not method.phase(1, UNKNOWN):
        return f"{method.name} freezes after half of the rounds"
    return "" if schedule is None else "the learning rate is a function of (round, rounds)"
