"""Run the rounds of a Flower app of your own, whose clients report metrics of any name."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from torch import Tensor, nn

from fl_bn.bn.derived import plain_names
from fl_bn.federation.rounds import Rounds
from fl_bn.federation.values import Instruction, RoundReplies
from fl_bn.flower.log import log
from fl_bn.flower.own.metrics import OwnMetrics
from fl_bn.flower.own.rates import RATES, NamedRates, as_number
from fl_bn.flower.population import Client, Introductions, Population, RunFailed, round_half_up, sample_cohort
from fl_bn.flower.starts import Starts
from fl_bn.flower.strategy import BatchNormStrategy
from fl_bn.flower.wire.codec import arrays_of, tensors_of
from fl_bn.flower.wire.replies import Decoded, Reading
from fl_bn.methods import Method, Place
from fl_bn.support.wire import printable


@dataclass(frozen=True)
class Evaluators:
    """Choose the clients that evaluate in a round.

    Attributes:
        fraction: the share of the clients that evaluate, 0..1. 0: nobody evaluates.
        least: the smallest number of clients that evaluate, if that many are connected.
    """

    fraction: float = 1.0
    least: int = 1

    def sample(self, clients: list[Client], population: int, seed: int, round: int) -> list[Client]:
        """Return those of ``clients`` that evaluate in ``round``, sorted by index. ``population`` is the number of all clients."""
        size = min(len(clients), max(self.least, round_half_up(self.fraction * population)))
        if size >= len(clients):
            return clients
        chosen = sample_cohort([client.index for client in clients], size, random.Random(f"{seed}/evaluate/{round}"))
        return [client for client in clients if client.index in set(chosen)]


TAKEN = "%s in train_metrics_clientapp is fl-bn's own number, not your metric %s, which is in client_metrics alone: give yours another name"


class OwnRounds(BatchNormStrategy):
    """Run the rounds of an app of your own.

    Args:
        model: the network, unconverted.
        method: the method.
        rounds: the server's settings for rounds.
        evaluators: chooses the clients that evaluate.
        metrics: combines the clients' own metrics.
        introductions: the nodes' introductions so far.
        configrecord_key: the name of the user's config in a message.
        options: further arguments of ``BatchNormStrategy``, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        rounds: Rounds,
        *,
        evaluators: Evaluators,
        metrics: OwnMetrics,
        introductions: Introductions,
        configrecord_key: str,
        **options: Any,
    ) -> None:
        super().__init__(model, method, rounds, **options)
        self.evaluators, self.metrics, self.introductions = evaluators, metrics, introductions
        self.configrecord_key, self.starts = configrecord_key, Starts(self.shared, sends=True)
        self.at_clients = evaluators.fraction > 0
        self._taken = set[str]()  # names of own metrics of which the log told
        self._own = dict[int, Mapping[str, MetricRecord]]()  # own metrics of the clients that replied in this round

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
        if given and not {*plain.values(), *own} & given.keys():
            raise RunFailed(
                f"a hook gave arrays of another network ({printable(next(iter(given)))}): return arrays with the names and shapes of "
                "those that the hook got"
            )
        missing = [plain[name] for name in own if given and plain[name] not in given and name not in given]
        if strange := [*missing, *sorted(given.keys() - {*plain, *plain.values()})]:
            what = "left out" if missing else "gave an unknown array"
            raise RunFailed(
                f"a hook {what} {printable(strange[0])}{f' and {len(strange) - 1} more' if len(strange) > 1 else ''}: return all arrays "
                "that the hook got, by their names. Which tensors are shared is the method's choice (FedBN, SiloBN)"
            )
        tensors = {name: given.get(plain[name], given.get(name, tensor)) for name, tensor in own.items()}
        for name, tensor in tensors.items():
            if tensor.dtype != own[name].dtype:
                if not (tensor.is_floating_point() and own[name].is_floating_point()):
                    raise RunFailed(
                        f"a hook gave {printable(name)} as {tensor.dtype}, but the network has {own[name].dtype}: return arrays of the "
                        "dtypes of those that the hook got"
                    )
                tensor = tensors[name] = tensor.to(own[name].dtype)
            if tensor.shape != own[name].shape:
                raise RunFailed(
                    f"a hook gave {printable(name)} with shape {tuple(tensor.shape)}, but the network has {tuple(own[name].shape)}: return "
                    "arrays with the names and shapes of those that the hook got"
                )
            if not torch.allclose(tensor, own[name], rtol=0, atol=0, equal_nan=True):
                self._check_values(name, tensor)
        return tensors

    def _check_values(self, name: str, tensor: Tensor) -> None:
        """Check the values of a shared tensor that a hook, or a loop of the user's own, has changed.

        Raises:
            RunFailed: a value is not finite, or a variance is below 0. Every client would refuse a message with it.
        """
        advice = "add noise of your own to weights only" if self.shared.locality.place[name] is Place.STATISTIC else "leave out such values"
        if not tensor.isfinite().all():
            raise RunFailed(f"a hook gave {printable(name)} with values that are not finite: {advice}")
        if self.shared.locality.place[name] is Place.STATISTIC and name.endswith("var") and (tensor < 0).any():
            raise RunFailed(f"a hook gave {printable(name)} with a variance below 0 ({float(tensor.min()):.3g}): {advice}")

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Make one train message per client of the cohort, with the learning rate that ``config`` names."""
        if isinstance(self.rounds.rate, NamedRates):
            self.rounds.rate.note(server_round, config)
        return super().configure_train(server_round, arrays, config, grid)

    def _their_config(self, config: Mapping[str, Any], instruction: Instruction) -> dict[str, Any]:
        """Return ``config`` with each learning rate multiplied by ``rate_share`` (below 1 if the statistics are frozen)."""
        values = super()._their_config(config, instruction)
        for name in RATES:
            if instruction.rate_share != 1 and (rate := as_number(values.get(name))) is not None:
                lowered = rate * instruction.rate_share
                values[name] = str(lowered) if isinstance(values[name], str) else lowered
        return values

    def _read_replies(self, replies: Iterable[Decoded], reading: Reading) -> RoundReplies:
        """Check the replies, and store the clients' own training metrics for ``aggregate_train``."""
        self._own = {}
        by_node = {client.node: client.index for client in self.cohort}

        def noted() -> Iterator[Decoded]:
            for reply in replies:
                if reply.own and reply.node in by_node:
                    self._own.setdefault(by_node[reply.node], reply.own)
                yield reply
                del reply  # frees its memory while the loop waits for the next reply

        return super()._read_replies(noted(), reading)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the replies, and the clients' own training metrics.

        Returns:
            The shared tensors, and the metrics; ``(None, None)`` if too few replies are usable. If the user has a function
            that combines training metrics, the metrics are its result. Otherwise they include ``loss`` and ``samples``.
        """
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None or metrics is None:
            return None, None
        accepted = {client.client: client.samples for client in self.record.accepted}
        own = {index: records for index, records in self._own.items() if index in accepted}
        combined, by_client = self.metrics.training(own, accepted)
        means = {} if combined is None else {k: float(v) for k, v in combined.items() if isinstance(v, int | float)}
        self.server.record = replace(self.record, own_metrics=means, client_metrics=by_client)
        if self.metrics.combines_training and combined is not None:
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

    def evaluators_of(self, server_round: int, clients: list[Client], population: int) -> list[Client]:
        """Return those of ``clients`` that evaluate in this round."""
        return self.evaluators.sample(clients, population, self.rounds.seed, server_round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine and return the clients' metrics; None if clients do not evaluate in this round, or if none sent metrics."""
        if not self.at_clients or not self._due(server_round):
            return None
        decoded = self.disclosures.evaluations(replies, self.everyone())
        combined, by_client = self.metrics.evaluation(decoded, self.evaluating, self.sent)
        self.server.record = replace(self.record, client_evaluation=by_client)
        return combined

    def _population(self, grid: Grid) -> Population:
        return Population(grid, self.rounds, self.shared.signature, introductions=self.introductions, clients_are_nodes=True)
