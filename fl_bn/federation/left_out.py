"""Refuse replies after all have arrived.

The reasons: the client took no part in the layer-wise exchange, its counts are false, or its values make a sum overflow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from fl_bn.exchange.session import Session
from fl_bn.federation.bounds import far_numbers, far_statistics
from fl_bn.federation.defence import TooFew
from fl_bn.federation.report_claims import far_claims
from fl_bn.federation.rounds import Rounds
from fl_bn.federation.shared_model import NotFinite
from fl_bn.federation.values import Reply
from fl_bn.methods import MOMENTS, Phase, StatisticsReport
from fl_bn.support.client_names import UNNAMED, ClientNames

T = TypeVar("T")
LOGGER = logging.getLogger("flwr")


def without_far(parts: Sequence[Reply], far: Collection[int], called: ClientNames) -> list[Reply]:
    """Return ``parts`` without the replies of the clients in ``far``.

    A reply that was already added to the average cannot be left out. It stays, and a warning is logged.
    """
    for part in (stays := [part for part in parts if part.folded and part.client in far]):
        LOGGER.warning(
            "%s: its reply has far larger counts or running means than the other clients' replies. This showed after the reply was "
            "added to the average, so it stays there. If this warning comes again, check this client's code and data",
            called.client(part.client),
        )
    return [part for part in parts if part.client not in far or part in stays]


def without_overflow(
    parts: Sequence[Reply], attempt: Callable[[list[Reply], int], T], called: ClientNames = UNNAMED
) -> tuple[list[Reply], dict[int, str], T]:
    """Call ``attempt(parts, 0)``. While it raises NotFinite, leave out the reply with the largest values and call it again.

    Args:
        parts: The replies.
        attempt: A function of the remaining replies and of the number of replies left out so far.
        called: The names of the clients.

    Returns:
        The replies that were used; client -> the reason, for each refused reply; and the result of ``attempt``.

    Raises:
        TooFew: ``attempt`` raised it, and the message now names the refused clients. Or no reply can be left out.
    """
    remaining, refused = list(parts), dict[int, str]()
    while True:
        try:
            return remaining, refused, attempt(remaining, len(refused))
        except TooFew as error:
            names = "; ".join(f"{called.client(index)}: {why}" for index, why in refused.items())
            raise TooFew(f"{error} ({names})" if names else str(error)) from error
        except NotFinite as problem:
            if (farthest := problem.farthest(remaining)) is None:
                why = "No reply can be left out any more, since all are in the average already. Later rounds add none before all are there"
                raise TooFew(f"nothing changes: {problem}. {why}") from problem
            worst = remaining.pop(farthest)
            refused[worst.client] = problem.refusal(worst)


def taking_part(session: Session, parts: Sequence[Reply], refused: dict[int, str]) -> list[Reply]:
    """Return the replies of clients that took part in the exchange, each weighted by its batch size in the exchange.

    With ``exchange-policy='abort'``, one missing reply makes all others unusable.

    Args:
        session: The session of the exchange.
        parts: The replies.
        refused: Client -> the reason why its reply is not used. This function adds the clients whose replies it leaves out.
    """
    usable, batches = {part.client: part for part in parts}, session.taking_part
    missing = sorted(set(batches) - set(usable))
    if missing and session.policy == "abort":
        session.fail(f"{session.called.clients(missing)} took part, but sent no usable reply (exchange-policy is abort)")
    refused |= {index: "it took no part in the exchange" for index in usable if index not in batches}
    if session.failure:
        refused |= dict.fromkeys(refused.keys() | usable.keys(), session.failure)
    refused |= session.dropped
    return [replace(part, weight=batches[index]) for index, part in sorted(usable.items()) if index not in refused]


def far_replies(
    parts: Sequence[Reply], report: StatisticsReport, phase: Phase, policy: Rounds, sent: Mapping[str, float]
) -> dict[int, str]:
    """Find the replies whose counts, auxiliary tensors or running means are far larger than the other clients'.

    Counts (activations per sample or step, and local steps) may be at most 64 times those of the median client (``FAR``).
    Auxiliary tensors and running means may be about 1000 times those of the median client (``far_numbers``,
    ``far_statistics``).

    Args:
        parts: The replies.
        report: The kind of statistics that the replies report.
        phase: The phase of the round.
        policy: The options of the server's rounds.
        sent: Name -> the largest absolute value of a statistic in the instruction.

    Returns:
        Client -> the reason why its reply is not used.
    """
    claims = far_claims(parts, report, policy.asks_for_steps) if report in MOMENTS else {}
    if phase is Phase.MEASURE:
        return claims
    far = far_statistics(parts, sent) if report is StatisticsReport.RUNNING else {}
    return far_numbers(parts, [extra.section for extra in policy.auxiliary]) | far | claims
