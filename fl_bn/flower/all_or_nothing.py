"""A round changes the shared model, or leaves it as it was: what is not finite is never stored, and whoever made it so is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from fl_bn.federation.defence import Defence, TooFew
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.record import RoundRecord
from fl_bn.federation.rounds import Rounds
from fl_bn.flower.replies import Contribution
from fl_bn.flower.shared_model import NotFinite, SharedModel
from fl_bn.methods import Phase

T = TypeVar("T")


def without_overflow(
    parts: Sequence[Contribution], attempt: Callable[[list[Contribution], int], T]
) -> tuple[list[Contribution], dict[int, str], T]:
    """``attempt(parts, 0)``; where that is NotFinite, again without the contribution that is the largest, ``attempt(others, 1)`` ...

    Returns the parts that were used, the reason for each of the others by client index, and the result. A TooFew of ``attempt`` goes on
    with the names of those who were left out.
    """
    left, refused = list(parts), dict[int, str]()
    while True:
        try:
            return left, refused, attempt(left, len(refused))
        except TooFew as error:
            names = "; ".join(f"client {index}: {why}" for index, why in refused.items())
            raise TooFew(f"{error} ({names})" if names else str(error)) from error
        except NotFinite as problem:
            worst = left.pop(problem.farthest(left))
            refused[worst.client.index] = problem.refusal(worst)


def change_model(
    shared: SharedModel,
    optimizer: ServerOptimizer,
    rounds: Rounds,
    record: RoundRecord,
    cohort: int,
    pace: float,
    defence: Defence,
    contributions: list[Contribution],
    overflowing: int,
) -> list[float]:
    """Change ``shared`` by a round's ``contributions``, of a ``cohort`` of so many; ``pace``: see ``LayerReports``; ``overflowing``: how
    many were left out for that.

    Returns what ``SharedModel.change`` does.

    Raises:
        TooFew: the round may not count with so few.
        NotFinite: what came out is no model.
    """
    phase, needed = Phase(record.phase), max(float(rounds.min_cohort), rounds.min_replies * cohort)
    if len(contributions) < needed:
        usable = f"{len(contributions)} of {cohort} replies could be used"
        raise TooFew(f"only {usable}, but {math.ceil(needed)} are needed: nothing changes")
    if overflowing and phase is Phase.EXCHANGE and rounds.exchange.policy == "abort":
        raise TooFew("nothing changes: clients left the cohort's batch after its exchange (exchange-policy is abort)")
    defence = defence.without(overflowing)
    try:
        defence.check(len(contributions))
    except TooFew as error:
        raise TooFew(f"nothing changes, since {error}") from error
    believed = not defence.active and (rounds.client_weights == "samples" or phase is Phase.EXCHANGE)
    weights = [float(c.weight) if believed else 1.0 for c in contributions]
    statistics = shared.combined(contributions, phase, defence, pace)
    return shared.change(contributions, weights, optimizer, record.learning_rate, defence, statistics)
