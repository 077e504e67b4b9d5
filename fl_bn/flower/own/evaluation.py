"""Combine the clients' evaluations in an app of your own: any metrics, each checked before it counts."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from flwr.app import Message

from fl_bn.federation.fields import number
from fl_bn.federation.values import Reply
from fl_bn.flower.evaluation import LogOnce
from fl_bn.flower.log import log
from fl_bn.flower.population import Client
from fl_bn.flower.wire.messages import OWN_METRICS
from fl_bn.flower.wire.replies import Decoded, Reading, read_replies
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.wire import WireError, excerpt, printable

Ranges = Mapping[str, tuple[float, float]]
RANGES: Ranges = MappingProxyType({"accuracy": (0.0, 1.0)})
LONGEST_NAME, MOST_NAMES = 100, 1000
NOT_COUNTED = "%s's evaluation is not counted: %s"  # for ``LogOnce``


def evaluation_of_own_app(
    replies: Iterable[Decoded],
    clients: Sequence[Client],
    sent: Iterable[Message],
    ranges: Ranges = RANGES,
    *,
    say: LogOnce,
    alike: bool = False,
    called: ClientNames = UNNAMED,
) -> dict[str, float]:
    """Average the metrics over ``clients``, weighted by ``num-examples``.

    A metric counts if more than half of the clients send it. Three faults exclude a client, and the log names
    it: a number that is not finite or outside its range, a metric's name that cannot be printed, or the lack of
    a metric that counts. No client weighs more than all others together. Lists are not averaged.

    Args:
        replies: the replies to ``sent``. Each client's first reply counts.
        clients: the clients to which the messages went.
        sent: the evaluate messages.
        ranges: the smallest and the largest value of a metric, by name.
        say: logs the excluded clients (``NOT_COUNTED``).
        alike: whether all clients weigh alike, whatever their ``num-examples``. A defence needs that.
        called: the clients' names in the log.

    Returns:
        The averages by name; empty where nothing can be averaged.
    """
    parts, refused, _ = read_replies(replies, Reading(clients, partial(_read, ranges), sent))
    senders = Counter(name for part in parts for name in part.metrics)
    names = [name for name, count in senders.items() if 2 * count > len(parts)]
    for part in parts:
        if missing := [name for name in names if name not in part.metrics]:
            refused[part.client] = f"metrics/{missing[0]}: missing, but more than half of the clients send it"
    say(refused)
    if few := sorted(senders.keys() - set(names)):
        log(logging.WARNING, "not averaged, since no more than half of the clients send them: %s", ", ".join(map(printable, few[:5])))
    counted = [part for part in parts if part.client not in refused]
    weights = [1] * len(counted) if alike else _weights(counted, called)
    total = sum(weights)
    if not total:
        return {}
    return {name: sum(weight / total * part.metrics[name] for weight, part in zip(weights, counted, strict=True)) for name in names}


def _read(ranges: Ranges, reply: Decoded, client: Client) -> Reply:
    """Check one evaluation. An app of your own repeats no header, so Flower alone tells which message the reply answers."""
    metrics = OWN_METRICS.read(reply.metrics)
    examples: int = metrics.pop("num-examples")
    if len(metrics) > MOST_NAMES:
        raise WireError("metrics", "", f"expected at most {MOST_NAMES} metrics, but got {len(metrics)}")
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if len(name) > LONGEST_NAME or not name.isprintable():
            raise WireError("metrics", name, f"expected a name of up to {LONGEST_NAME} printable characters")
        if isinstance(value, list):
            continue
        wanted = number(*ranges.get(name, (-math.inf, math.inf)))
        if not wanted.fits(value):
            hint = f" (another range: the strategy's ranges={{{name!r}: (0, 100)}})" if name in ranges else ""
            raise WireError("metrics", name, f"expected {wanted.wanted}, but got {excerpt(value)}{hint}")
        numbers[name] = float(value)
    return Reply(client.index, {}, examples, examples, numbers)


def _weights(parts: Sequence[Reply], called: ClientNames) -> list[int]:
    """Return each client's ``num-examples``, but no more than those of all others together."""
    total, weights = sum(part.samples for part in parts), [part.samples for part in parts]
    for i, part in enumerate(parts):
        if len(parts) > 1 and part.samples > (others := total - part.samples):
            weights[i] = others
            more = "%s reports %d test examples, more than all others together (%d): it weighs as much as these"
            log(logging.WARNING, more, called.client(part.client), part.samples, others)
    return weights
