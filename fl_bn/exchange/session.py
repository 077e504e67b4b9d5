"""Run the server's half of a round's exchange: who takes part, is missing, or is late.

A carrier passes requests to ``submit`` and answers to the clients, and calls
``expire`` regularly.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median, median_low

import torch
from torch import nn

from fl_bn.bn.moments import Average, Moments, pool, weighted_mean
from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Layer, Local, Quantity, Request
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.names import check_name

POLICIES = ("abort", "shrink")
NOT_JOINED = "did not join"
SAME = "Every client must run the same model, and call the same layers in the same order for every batch"
LARGEST_COUNT = 2**53  # whole numbers are exact in float64 up to here

Deliver = Callable[[Answer | ExchangeFailed], None]
LOGGER = logging.getLogger("flwr")  # the logger of the run, which is Flower's; this package does not import Flower


@dataclass(frozen=True)
class Traffic:
    """Count one client's exchanges in a round, and the bytes of values sent and received."""

    exchanges: int = 0
    up: int = 0
    down: int = 0


def reduce(requests: list[Local], batches: list[int], average: Average = weighted_mean) -> torch.Tensor:
    """Combine requests' vectors, in client order, to the cohort's vector (d,) in float64.

    ``average`` combines values (n, d) of n clients to one vector (d,), with weights
    (n,).
    """
    values = torch.stack([request.values for request in requests]).double()
    counts = torch.tensor([request.count for request in requests], dtype=torch.float64)
    quantity = requests[0].key.quantity
    if quantity in (Quantity.MOMENTS, Quantity.STATISTICS):
        means, variances = values.chunk(2, dim=1)
        pooled = pool([Moments(r.count, mean, var) for r, mean, var in zip(requests, means, variances, strict=True)], average)
        return torch.cat([pooled.mean, pooled.var])
    return average(values, torch.tensor(batches, dtype=torch.float64) if quantity is Quantity.GRADIENTS else counts)


def exchanged_layers(model: nn.Module, names: Collection[str]) -> dict[str, Layer]:
    """Return the BatchNorm layers ``names`` of ``model``, which may be exchanged."""
    means = {name: model.get_submodule(name).get_buffer("running_mean") for name in names}
    return {name: Layer(len(mean), torch.promote_types(mean.dtype, torch.float32)) for name, mean in means.items()}


class Session:
    """Run the exchange of one round at the server. Several threads may call its methods.

    The session drops a client that dies, sends a wrong request, or is late: at
    least half of the active clients have waited for it for ``deadline`` seconds.
    The time does not count while fewer wait, so a fast client does not cause others
    to be dropped while they still train.

    Args:
        average: as in ``reduce``.
        policy: after a client is dropped, ``abort`` fails the round, ``shrink``
            goes on.
        deadline: seconds after which a client is late with a vector.
        join_deadline: seconds without another client that joins, after which the
            missing ones are late.
        samples: each client's number of samples, the most for its batch.
        believing: whether clients count as they report. False, with robust rules:
            each counts with the median, so that no client decides its own weight.
    """

    def __init__(
        self,
        cohort: Iterable[int],
        layers: Mapping[str, Layer],
        *,
        average: Average = weighted_mean,
        policy: str = "abort",
        deadline: float = 30.0,
        join_deadline: float = 30.0,
        samples: Mapping[int, int] | None = None,
        believing: bool = True,
        called: ClientNames = UNNAMED,
    ) -> None:
        check_name("policy", policy, POLICIES)
        self.layers, self.average, self.policy, self.deadline, self.join_deadline = layers, average, policy, deadline, join_deadline
        self.samples, self.believing, self.called = samples or {}, believing, called
        self.active = set(cohort)
        self.batches: dict[int, int] = {}  # batch size of each client that has joined
        self.dropped: dict[int, str] = {}
        self.failure = ""
        self._over = ""  # why no client gets an answer any more; empty while the round runs
        self.traffic = {client: Traffic() for client in self.active}
        self.exchanges = 0
        self._done: set[int] = set()
        self._waiting: dict[int, tuple[Request, Deliver]] = {}
        self._joined = time.monotonic()  # when the last client joined
        self._held_up: float | None = None  # the time since which at least half of the clients have been waiting
        self._lock = threading.RLock()

    def out(self, client: int) -> str:
        """Return why ``client`` gets no further answers; empty if it may get them."""
        with self._lock:
            return self._over or ("" if client in self.active else self.dropped.get(client, "this client takes no part in the round"))

    @property
    def taking_part(self) -> dict[int, int]:
        """Return the batch size of every client that takes part and was not dropped."""
        return {client: batch for client, batch in sorted(self.batches.items()) if client in self.active and batch > 0}

    def submit(self, client: int, request: Request, deliver: Deliver) -> None:
        """Accept a request of ``client``, or drop it for a wrong one.

        ``deliver`` gets the answer once all active clients have sent requests, or
        the reason for having none.
        """
        with self._lock:
            if reason := self.out(client):
                deliver(ExchangeFailed(reason))
                return
            if problem := next(self._problems(client, request), ""):
                deliver(ExchangeFailed(f"refused: {problem}"))
                self._remove({client}, f"refused: {problem}")
            elif isinstance(request, Join) and request.batch == 0:
                self._joined = time.monotonic()
                self.active.discard(client)
                deliver(Answer(torch.empty(0), 0, 0))
            else:
                self._joined = time.monotonic() if isinstance(request, Join) else self._joined
                self._waiting[client] = (request, deliver)
            self._advance()

    def leave(self, client: int, reason: str = "") -> None:
        """Record that ``client`` sends nothing more. With a ``reason``, it is dropped."""
        with self._lock:
            if reason:
                self._remove({client}, reason)
            elif client in self.active:
                self._done.add(client)
                if client in self._waiting and isinstance(self._waiting[client][0], Local):
                    self._remove({client}, f"left the round and did not {self._awaited()}")
            self._advance()

    def expire(self) -> None:
        """Drop the clients past their deadline."""
        with self._lock:
            joining = not self.batches
            limit = self.join_deadline if joining else self.deadline
            late = self.active - set(self._waiting) - self._done
            since = self._joined if joining else self._held_up
            if since is None or not late or time.monotonic() - since < limit:
                return
            self._remove(late, f"{NOT_JOINED if joining else f'did not {self._awaited()}'} within {limit:g} s")
            self._advance()

    def fail(self, reason: str) -> None:
        """Fail the exchange. Clients that wait now or send later get the first ``reason``."""
        with self._lock:
            self.failure = self.failure or reason
            self._end(self.failure)

    def close(self) -> None:
        """End the round. Clients that wait now or send later get an error."""
        with self._lock:
            self._end(self._over or "the round is over")

    def _end(self, reason: str) -> None:
        self._over = reason
        self._deliver(ExchangeFailed(reason))

    def _awaited(self) -> str:
        first = next(iter(self._waiting.values()))[0]
        return f"send its values of {first.key}" if isinstance(first, Local) else "join"

    def _problems(self, client: int, request: Request) -> Iterator[str]:
        """Yield the reasons to refuse a single request."""
        if client in self._waiting:
            yield "expected one request at a time, but the client sent a second one before the first was answered"
        if client in self._done:
            yield "the client sent a request after it had left the round"
        if isinstance(request, Join):
            if client in self.batches:
                yield "the client joined the round twice"
            if not 0 <= request.batch <= self.samples.get(client, LARGEST_COUNT):
                yield f"expected a batch of 0 to {self.samples.get(client, LARGEST_COUNT)} samples, but got {request.batch}"
            return
        key, values, layer = request.key, request.values, self.layers.get(request.key.layer)
        if client not in self.batches:
            yield f"the client sent its values of {key} before it had joined the round"
        if layer is None:
            yield f"{key}: expected one of the model's {len(self.layers)} BatchNorm layers ({', '.join(list(self.layers)[:3])} ...). {SAME}"
            return
        expected = (key.quantity.width(layer.channels),)
        if tuple(values.shape) != expected or values.dtype != layer.dtype:
            yield f"{key}: expected shape {expected} and {layer.dtype}, but got shape {tuple(values.shape)} and {values.dtype}"
        if not 1 <= request.count <= LARGEST_COUNT:
            yield f"{key}: expected 1 to {LARGEST_COUNT} activations per channel, but got {request.count}"
        for what, part, least, most in key.quantity.ranges(values, layer):
            low, high = float(part.min()), float(part.max())
            if not (least <= low and high <= most):  # NaN is in no range
                yield f"{key}: expected finite {what} from {least:.2g} to {most:.2g}, but got {low:.2g} to {high:.2g}"

    def _remove(self, clients: Iterable[int], reason: str) -> None:
        gone = sorted(self.active.intersection(clients))
        if not gone or self._over:
            return
        self.active.difference_update(gone)
        self.dropped.update(dict.fromkeys(gone, reason))
        who = f"{self.called.clients(gone)}: {reason}"
        for _, deliver in [self._waiting.pop(client) for client in gone if client in self._waiting]:
            deliver(ExchangeFailed(reason))
        abort = self.policy == "abort"
        what = "The exchange has failed for all" if abort else f"The other clients go on ({len(self.active)})"
        LOGGER.warning("exchange: %s. %s", who.rstrip("."), what)
        if abort:
            self.fail(who)

    def _advance(self) -> None:
        if not self._waiting or 2 * len(self._waiting) < len(self.active):  # most clients still train or have finished, so none is late yet
            self._held_up = None
        elif self._held_up is None:
            self._held_up = time.monotonic()
        if self._over or not self._waiting or self.active - set(self._waiting) - self._done:
            return
        requests = {client: self._waiting[client][0] for client in sorted(self._waiting)}
        joins = {client: request.batch for client, request in requests.items() if isinstance(request, Join)}
        if joins:  # if one request is a join, all are: no client gets an answer before the last one has joined
            self.batches.update(joins)
            self._deliver(Answer(torch.empty(0), 0, self._together(list(joins.values()))))
            return
        local = {client: request for client, request in requests.items() if isinstance(request, Local)}
        if self._agree({client: request.key for client, request in local.items()}, self._done & self.active):
            self._average(local)
        else:
            self._advance()

    def _agree(self, keys: Mapping[int, Key], left: set[int]) -> bool:
        """Check that all clients sent the same key, and that none has finished too early.

        Clients without the majority's key are dropped. Without a majority, the
        round fails. The vote waits for every active client, to count those that are
        about to finish (``left``).
        """
        said: dict[int, Key | None] = {**keys, **dict.fromkeys(left)}
        (right, top), *others = Counter(said.values()).most_common()
        if others and others[0][1] == top:
            self.fail(self._apart(said))
            return False
        most = next(client for client, key in said.items() if key == right)
        for client in [client for client, key in said.items() if key != right]:
            self._remove([client], self._apart({client: said[client], most: right}))
        return not others

    def _apart(self, said: Mapping[int, Key | None]) -> str:
        at = "; ".join(f"{self.called.client(client)}: {key or 'finished'}" for client, key in said.items())
        return f"the clients are not at the same layer ({at}). {SAME}"

    def _average(self, requests: Mapping[int, Local]) -> None:
        key, batches = next(iter(requests.values())).key, [self.batches[client] for client in requests]
        values, statistics = reduce(list(requests.values()), batches, self.average), key.quantity is Quantity.STATISTICS
        count = self._together([request.count for request in requests.values()], median if statistics else median_low)
        if statistics and count > 1:
            values[len(values) // 2 :] *= count / (count - 1)  # unbiased, as ``Moments.bessel``
        values = values.to(self.layers[key.layer].dtype)
        self.exchanges += 1
        for client in requests:
            traffic = self.traffic[client]
            self.traffic[client] = Traffic(traffic.exchanges + 1, traffic.up + values.nbytes, traffic.down + values.nbytes)
        self._deliver(Answer(values, count, self._together(batches)))

    def _together(self, claims: list[int], usual: Callable[[list[int]], float] = median_low) -> int:
        """Return the sum of ``claims`` or, if not ``believing``, their median times their number."""
        return sum(claims) if self.believing else int(usual(claims)) * len(claims)

    def _deliver(self, answer: Answer | ExchangeFailed) -> None:
        waiting, self._waiting, self._held_up = self._waiting, {}, None
        for _, deliver in waiting.values():
            deliver(answer)
