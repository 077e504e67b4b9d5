"""Keep the tensors of a run's model as evaluated last, also in rounds without an evaluation, and in runs that end early.

HBN and static BN measure the statistics of a model only before it is evaluated. The tensors of a round without an evaluation are no
model that could be used: under static BN, they have mean 0 and variance 1. So the model stays that of the last evaluation. Other methods
have a complete model after every round.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from fl_bn.federation.payload import Named
from fl_bn.methods import Method, Refresh

LOGGER = logging.getLogger("flwr")


@dataclass
class Newest:
    """Hold the newest complete tensors of a run.

    Attributes:
        tensors: Name -> shared tensor.
        round: The round of these tensors; 0: before round 1.
        done: The number of the last finished round; 0: none is finished.
    """

    tensors: Named
    round: int = 0
    done: int = 0

    def take(self, round: int, evaluated: Named) -> None:
        """Take the tensors of a finished round.

        Args:
            round: The round.
            evaluated: Name -> shared tensor (``federation.run.Round.evaluated``). Empty: the model stays that of an earlier round.
        """
        self.done = round
        if evaluated:
            self.tensors, self.round = evaluated, round

    def say(self, method: Method) -> None:
        """Log a warning if the run ends early, and its model is that of an earlier round."""
        if method.refresh is Refresh.NOTHING or not self.tensors or self.round == self.done:
            return
        LOGGER.warning(
            "the run ends after round %d, but its model is that %s: %s measures statistics only before an evaluation. Evaluate more often "
            "to lose fewer rounds (evaluate_every)",
            self.done,
            f"of round {self.round}, the last evaluation" if self.round else "before round 1, since no round was evaluated",
            method.name,
        )
