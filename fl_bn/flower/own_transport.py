"""Carry the rounds of a Flower app of your own, whose clients report metrics of any name."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor, nn

from fl_bn.bn.derived import plain_names
from fl_bn.federation.rounds import Rounds, constant_rate
from fl_bn.federation.schema import instruction
from fl_bn.federation.values import Instruction
from fl_bn.flower.compat import log
from fl_bn.flower.evaluation import OwnMetrics, is_number
from fl_bn.flower.grid_transport import GridTransport
from fl_bn.flower.population import Client, Introductions, Population, RunFailed, round_half_up, sample_cohort
from fl_bn.flower.recovery import Starts
from fl_bn.flower.wire.codec import arrays_of, tensors_of
from fl_bn.methods import Method
from fl_bn.support.wire import WireError, printable

RATES = ("lr", "learning_rate", "learning-rate")
"""The names by which a ``train_config`` may give the clients' learning rate, as in Flower's own examples."""
TAKEN = "%s in train_metrics_clientapp is fl-bn's own number, not your metric %s, which is in client_metrics alone: give yours another name"


class OwnTransport(GridTransport):
    """Carry the rounds of an app of your own.

    Args:
        model: the network, unconverted.
        method: the method.
        rounds: the server's settings for rounds.
        evaluating: the share of the clients that evaluate in a round, 0..1, and the smallest number of them. 0: nobody evaluates.
        metrics: combines the clients' own metrics.
        introductions: the nodes' introductions so far.
        config_key: the name of the user's config in a message.
        options: further arguments of ``GridTransport``, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        rounds: Rounds,
        *,
        evaluating: tuple[float, int],
        metrics: OwnMetrics,
        introductions: Introductions,
        config_key: str,
        **options: Any,
    ) -> None:
        super().__init__(model, method, rounds, **options)
        self.config_key, self.starts, self.at_clients = config_key, Starts(self.shared, sends=True), evaluating[0] > 0
        self._evaluating, self._metrics, self._introductions = evaluating, metrics, introductions
        self._expected = instruction(self.shared.model, self.shared.locality)  # of the shared tensors
        self._taken = set[str]()  # names of own metrics of which the log told

    def outward(self, tensors: Mapping[str, Tensor]) -> ArrayRecord:
        """Convert shared tensors to arrays for the hooks, by state_dict name. Tensors that clients keep are left out."""
        return arrays_of(self.shared.whole(tensors, self.batches_trained))

    def inward(self, arrays: ArrayRecord) -> dict[str, Tensor]:
        """Return the shared tensors among ``arrays``, which a hook may have changed.

        Raises:
            RunFailed: an array has another shape or dtype, or invalid values, or is missing, or is none of this network's.
        """
        own, given = self.shared.tensors(), tensors_of(arrays)
        plain = plain_names(self.shared.model)
        missing = [plain[name] for name in own if given and plain[name] not in given and name not in given]
        if strange := [*missing, *sorted(given.keys() - {*plain, *plain.values()})]:
            what = "left out" if missing else "gave an unknown array"
            raise RunFailed(
                f"a hook {what} {printable(strange[0])}{f' and {len(strange) - 1} more' if len(strange) > 1 else ''}: return all arrays "
                "that the hook got, by their names. Which tensors are shared is the method's choice (FedBN, SiloBN)"
            )
        tensors = {name: given.get(plain[name], given.get(name, tensor)) for name, tensor in own.items()}
        for section, specs in self._expected.sections.items():
            for name, spec in specs.items():
                if (tensor := tensors[name]) is not own[name] and tensor.is_floating_point() and own[name].is_floating_point():
                    tensor = tensors[name] = tensor.to(own[name].dtype)
                try:
                    spec.check(section, name, tensor.numpy())
                except WireError as error:  # every client would refuse a message with it
                    advice = "keep the shapes and dtypes of the arrays that the hook got, and add noise of your own to weights only"
                    raise RunFailed(f"a hook gave {error}: {advice}") from error
        return tensors

    def _instruction(self, number: int, arrays: ArrayRecord, config: Mapping[str, Any]) -> Instruction:
        """Return the instruction of the round, with the learning rate that ``config`` names, which a hook may have changed."""
        if isinstance(self.policy.rate, NamedRates) and self.policy.rate.note(number, config):
            self._asked = None
        return super()._instruction(number, arrays, config)

    def _their_config(self, config: Mapping[str, Any], instruction: Instruction) -> dict[str, Any]:
        """Return ``config`` with each learning rate multiplied by ``rate_share`` (below 1 if the statistics are frozen)."""
        values = super()._their_config(config, instruction)
        for name in RATES:
            if instruction.rate_share != 1 and (rate := as_number(values.get(name))) is not None:
                lowered = rate * instruction.rate_share
                values[name] = str(lowered) if isinstance(values[name], str) else lowered
        return values

    def combine(self, number: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies, and the clients' own training metrics.

        Returns:
            The shared tensors, and the metrics; ``(None, None)`` if too few replies are usable. If the user has a function
            that combines training metrics, the metrics are its result. Otherwise they include ``loss`` and ``samples``.
        """
        arrays, metrics = super().combine(number, replies)
        if arrays is None or metrics is None:
            return None, None
        accepted = {client.client: client.samples for client in self.record.accepted}
        own = {index: records for index, records in self._reading.own.items() if records and index in accepted}
        combined, by_client = self._metrics.training(own, accepted)
        means = {} if combined is None else {k: float(v) for k, v in combined.items() if isinstance(v, int | float)}
        self.server.record = replace(self.record, own_metrics=means, client_metrics=by_client)
        if self._metrics.combines_training and combined is not None:
            return arrays, combined
        self._say_taken(by_client)
        return arrays, MetricRecord({**(combined or {}), **metrics})

    def _say_taken(self, by_client: Mapping[int, Mapping[str, float]]) -> None:
        """Log a warning, once for each name, if a metric of the user's is called like one of fl-bn's own: ``loss`` or ``samples``.

        A ``loss`` with the same values as fl-bn's own causes no warning.
        """
        losses = {client.client: client.loss for client in self.record.accepted}
        samples = any("samples" in own for own in by_client.values())
        loss = any(math.isfinite(losses[client]) and own.get("loss", losses[client]) != losses[client] for client, own in by_client.items())
        for name in [name for name, taken in (("loss", loss), ("samples", samples)) if taken and name not in self._taken]:
            self._taken.add(name)
            log(logging.WARNING, TAKEN, name, name)

    def evaluators_of(self, number: int, clients: list[Client], population: int) -> list[Client]:
        """Return those of ``clients`` that evaluate in this round, sorted by index. ``population`` is the number of all clients."""
        fraction, least = self._evaluating
        size = min(len(clients), max(least, round_half_up(fraction * population)))
        if size >= len(clients):
            return clients
        chosen = sample_cohort([client.index for client in clients], size, random.Random(f"{self.policy.seed}/evaluate/{number}"))
        return [client for client in clients if client.index in set(chosen)]

    def combine_evaluations(self, number: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine and return the clients' metrics; None if clients do not evaluate, or if none sent metrics."""
        if not self.at_clients:
            return None
        decoded = self.disclosures.evaluations(replies, self.everyone())
        combined, by_client = self._metrics.evaluation(decoded, self.evaluating, self.sent)
        self.server.record = replace(self.record, client_evaluation=by_client)
        return combined

    def _population(self, grid: Grid) -> Population:
        return Population(grid, self.policy, self.shared.signature, introductions=self._introductions, clients_are_nodes=True)


def named_rate(config: Mapping[str, Any]) -> float | None:
    """Return the first number in ``config`` under one of the names ``RATES``, also one that is written as text; None if there is none.

    Raises:
        RunFailed: The number is negative or not finite.
    """
    for name in RATES:
        if (value := as_number(config.get(name))) is None:
            continue
        if not 0 <= value < math.inf:
            raise RunFailed(f"{name} in the train config must be a finite number >= 0 (the learning rate), but is {value}")
        return value
    return None


def as_number(value: Any) -> float | None:
    """Return a number, or the number that a text such as ``"0.1"`` is; None for anything else."""
    if is_number(value):
        return float(value)
    with suppress(ValueError):
        return float(value) if isinstance(value, str) else None
    return None


class NamedRates:
    """Map rounds to learning rates. A round whose config has no rate uses the rate of the last round before it that has one."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def note(self, round: int, config: Mapping[str, Any]) -> bool:
        """Store the learning rate in the train config of ``round``, if it has one. Return whether this changes the round's rate.

        Raises:
            RunFailed: The rate is negative or not finite.
        """
        before = self(round, round)
        if (rate := named_rate(config)) is not None:
            self._rates[round] = rate
        return self(round, round) != before

    def __call__(self, round: int, rounds: int) -> float:
        """Return the learning rate of ``round``: the last one that was stored for this or an earlier round.

        If there is none, return the rate of the first later round that has one. If no rate was stored, return that of
        ``constant_rate``.
        """
        if not self._rates:
            return constant_rate(round, rounds)
        before = [number for number in self._rates if number <= round]
        return self._rates[max(before) if before else min(self._rates)]
