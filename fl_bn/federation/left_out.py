"""Whose replies of a round are left out when all have come, and why: clients of no exchange, false claims, numbers that overflow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from fl_bn.exchange.session import Session
from fl_bn.federation.defence import TooFew
from fl_bn.federation.shared_model import NotFinite
from fl_bn.federation.values import Reply
from fl_bn.support.client_names import UNNAMED, ClientNames

T = TypeVar("T")
LOGGER = logging.getLogger("flwr")


def without_far(parts: Sequence[Reply], far: Collection[int]) -> list[Reply]:
    """Return ``parts`` without the replies of the clients ``far``, but for those whose weights are in the average already."""
    for part in (stays := [part for part in parts if part.folded and part.client in far]):
        LOGGER.warning("the reply of client %s was added up before the others' showed that its claims are far from theirs", part.client)
    return [part for part in parts if part.client not in far or part in stays]


def without_overflow(
    parts: Sequence[Reply], attempt: Callable[[list[Reply], int], T], called: ClientNames = UNNAMED
) -> tuple[list[Reply], dict[int, str], T]:
    """``attempt(parts, 0)``; where that is NotFinite, again without the reply that is the largest, ``attempt(others, 1)`` ...

    Returns the parts that were used, the reason for each of the others by client, and the result. A TooFew of ``attempt`` goes on with
    the names of those who were left out.
    """
    left, refused = list(parts), dict[int, str]()
    while True:
        try:
            return left, refused, attempt(left, len(refused))
        except TooFew as error:
            names = "; ".join(f"{called.client(index)}: {why}" for index, why in refused.items())
            raise TooFew(f"{error} ({names})" if names else str(error)) from error
        except NotFinite as problem:
            if (farthest := problem.farthest(left)) is None:
                why = "no reply can be left out any more; the next rounds keep all replies until the last has come"
                raise TooFew(f"nothing changes: {problem}, and {why}") from problem
            worst = left.pop(farthest)
            refused[worst.client] = problem.refusal(worst)


def taking_part(session: Session, parts: Sequence[Reply], refused: dict[int, str]) -> list[Reply]:
    """Return the replies of clients that took part in the exchange, each weighted by the batches that the exchange has of it.

    Under ``abort`` these are all of the replies, or none. The reason why a reply is left out is added to ``refused``.
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
