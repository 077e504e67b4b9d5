"""Make the model that ``evaluate_fn`` gets: arrays that load into the user's own network by ``load_state_dict``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord

from fl_bn.bn.roles import Role, batch_norms
from fl_bn.federation.payload import Named
from fl_bn.federation.record import batches_trained
from fl_bn.flower.app.unseen import average_kept
from fl_bn.flower.log import log
from fl_bn.flower.wire.codec import arrays_of
from fl_bn.methods import Place

if TYPE_CHECKING:
    from fl_bn.flower.strategy import BatchNormStrategy

NO_MODEL = (
    "evaluate_fn is not called from round %d on: under %s every client keeps its BatchNorm, so there is no global model. %s. Clients may "
    "send their BatchNorm layers for an average: answer(..., tells=True) in client_app.py (in fl-bn's application: unseen-client = true)"
)
AVERAGED = "evaluate_fn gets a model with the average of the clients' BatchNorm (%s), since every client keeps its own under %s"
NOTHING_SHARED = "evaluate_fn is not called from round %d on: under %s clients share no weights, so there is no global model"
CONVERTED = "evaluate_fn gets the arrays of the converted network, since %s replaces BatchNorm: load them into fl_bn.convert(Net(), method)"
KEPT = "evaluate_fn gets the server's own values of %s (%d tensors), since every client keeps its own"


class GlobalModel:
    """Make the arrays of one run's global model, and log once what they contain.

    Args:
        strategy: the run's strategy.
    """

    def __init__(self, strategy: BatchNormStrategy) -> None:
        self._strategy, self._none, self._said = strategy, False, set[str]()

    def at(self, number: int, tensors: Named, counted: bool = False) -> ArrayRecord | None:
        """Return the arrays after a round; None if there is no global model. The log then says why.

        Args:
            number: the round. 0: before round 1, when every client starts with these tensors.
            tensors: the shared tensors, by name.
            counted: whether the strategy's ``batches_trained`` includes this round's batches already. If not, they are added.
        """
        shared, method = self._strategy.shared, self._strategy.method
        state, locality = shared.model.state_dict(), shared.locality
        others = {name: state[name] for name in locality.names(Place.HOME) if locality.role[name] is not Role.MIXING}
        if batch_norms(self._strategy.server.source) and not locality.norm_layers:
            self._say(CONVERTED % method.name)
        if number and method.keeps(Role.WEIGHT):
            self._say(NOTHING_SHARED % (number, method.name), once="nothing is shared")
            return None
        if number and method.personal and others:
            if (average := self._average(number)) is None:
                return None
            others |= average
        if number and (kept := locality.names(Place.HOME, of=[Role.KEPT])):
            self._say(KEPT % (kept[0], len(kept)))
        batches = self._strategy.batches_trained + (0 if counted or not number else batches_trained([self._strategy.record]))
        return arrays_of(shared.whole({**tensors, **others}, batches, others))

    def _average(self, number: int) -> Mapping[str, object] | None:
        strategy = self._strategy
        if self._none:
            return None
        population, rounds = strategy.population, strategy.rounds
        refused: dict[int, str] = {}
        average: dict[str, object] = {}
        if strategy.secure is None and population is not None:
            clients = strategy.with_models(population.everyone())
            run_id, overheard = strategy.recovery.run_id, strategy.overheard
            average = {**average_kept(population.grid, clients, strategy.shared, number, rounds, run_id, overheard, refused.update)}
        if not average:
            self._none = True
            why = (
                "Secure aggregation hides each client's layers"
                if strategy.secure
                else next((f"{rounds.called.client(index)}: {reason}" for index, reason in sorted(refused.items())), "No client is online")
            )
            log(logging.WARNING, NO_MODEL, number, strategy.method.name, why)
            return None
        told = f"{len(clients) - len(refused)} of {len(clients)} clients sent theirs"
        self._say(AVERAGED % (told, strategy.method.name))
        return average

    def _say(self, line: str, once: str = "") -> None:
        """Log ``line``, unless it, or a line with the same ``once``, was logged before."""
        if (once or line) not in self._said:
            self._said.add(once or line)
            log(logging.INFO, "%s", line)
