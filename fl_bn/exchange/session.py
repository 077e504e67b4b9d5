"""One round's exchange on the server: who takes part, which requests are missing, and what happens to late clients.

It is a state machine without a thread or a clock. Carriers ``submit`` requests and pass the answers on.
``expire`` is called by a carrier with a clock. A request is answered when all active clients have sent
theirs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median, median_high, median_low

import torch
from torch import nn

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Layer, Local, Quantity, Refused, Request
from fl_bn.moments import Average, Moments, bounds, pool, weighted_mean
from fl_bn.roles import batch_norms
from fl_bn.support.client_names import UNNAMED, ClientNames
from fl_bn.support.names import check_name
from fl_bn.support.stated_sizes import FAR, most_believed

POLICIES = ("abort", "shrink")
NOT_JOINED = "did not join"
LARGEST_COUNT = 2**53  # whole numbers are exact in float64 up to here
STEEPEST = 1e3  # largest gradient of a layer that is accepted without a defence, in units of the median client's

Deliver = Callable[[Answer | ExchangeFailed], None]
LOGGER = logging.getLogger("flwr")  # the run's log; by name, since this package does not import Flower


@dataclass(frozen=True)
class Traffic:
    """One client's exchanges in a round.

    Attributes:
        exchanges: their number.
        up: bytes of values that the client sent.
        down: bytes of values that it received.
    """

    exchanges: int = 0
    up: int = 0
    down: int = 0


def reduce(requests: list[Local], batches: list[int], average: Average = weighted_mean) -> torch.Tensor:
    """Combine the clients' requests for one key.

    Args:
        requests: in client order.
        batches: batch sizes, in client order.
        average: the rule that combines n values.

    Returns:
        The cohort's values in float64.
    """
    values = torch.stack([request.values for request in requests]).double()
    counts = torch.tensor([request.count for request in requests], dtype=torch.float64)
    quantity = requests[0].key.quantity
    if quantity in (Quantity.MOMENTS, Quantity.STATISTICS):
        means, variances = values.chunk(2, dim=1)
        pooled = pool([Moments(r.count, mean, var) for r, mean, var in zip(requests, means, variances, strict=True)], average)
        return torch.cat([pooled.mean, pooled.var])
    return average(values, torch.tensor(batches, dtype=torch.float64) if quantity is Quantity.GRADIENTS else counts)


def exchanged_layers(model: nn.Module) -> dict[str, Layer]:
    """Return the layers whose statistics a round may exchange, by name: those with running statistics."""
    return {
        name: Layer(len(layer.running_mean), torch.promote_types(layer.running_mean.dtype, torch.float32))
        for name, layer in batch_norms(model).items()
        if layer.running_mean is not None
    }


class Session:
    """The exchange of one round.

    A client is dropped if it dies, if its request is refused, or if it is late. A client is late ``deadline``
    seconds after at least half of the clients began to wait for it. The waiting of a minority starts no
    clock: otherwise one early client would drop the others, which still train.

    All methods are safe to call from several threads.

    Args:
        cohort: the clients.
        layers: the layers that may be exchanged, by name.
        average: combines the clients' values: the weighted mean, or a robust rule.
        policy: after a client is dropped. ``abort`` fails the round for all. ``shrink`` goes on without the
            client, with weights over the others.
        deadline: in seconds.
        join_deadline: the same for joining, in seconds after the last client joined.
        samples: each client's number of samples. No batch may be larger.
        believing: counts and batches are those that each client reports. False: every client counts as the
            median client, so that no client decides its own weight under a defence.
        given_up: the end of the log's message if the exchange fails for all.
        called: the clients' names in the log.
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
        given_up: str = "The round is given up (exchange-policy is abort)",
        called: ClientNames = UNNAMED,
    ) -> None:
        check_name("policy", policy, POLICIES)
        self.layers, self.average, self.policy, self.deadline, self.join_deadline = layers, average, policy, deadline, join_deadline
        self.samples, self.believing, self._given_up, self.called = samples or {}, believing, given_up, called
        self.active = set(cohort)
        self.batches: dict[int, int] = {}  # of those who joined
        self.dropped: dict[int, str] = {}
        self.failure = ""
        self._over = ""  # why nobody is answered any more
        self.traffic = {client: Traffic() for client in self.active}
        self.exchanges = 0
        self._passes = Counter[tuple[str, Quantity]]()  # exchanges so far, by layer and quantity
        self._done: set[int] = set()
        self._waiting: dict[int, tuple[Request, Deliver]] = {}
        self._joined = time.monotonic()  # when the last client joined
        self._held_up: float | None = None  # since when at least half of the clients wait for the others
        self._lock = threading.RLock()

    def out(self, client: int) -> str:
        """Return why ``client`` gets no further answer; empty if it may get one."""
        with self._lock:
            return self._over or ("" if client in self.active else self.dropped.get(client, "this client takes no part in the round"))

    @property
    def taking_part(self) -> dict[int, int]:
        """Return the batch size of every client that joined and was not dropped."""
        return {client: batch for client, batch in sorted(self.batches.items()) if client in self.active and batch > 0}

    def submit(self, client: int, request: Request, deliver: Deliver) -> None:
        """Accept a request of ``client``.

        Args:
            client: the client.
            request: its request.
            deliver: receives the answer, now or when the other clients have sent theirs, or the reason for
                its absence.
        """
        with self._lock:
            if reason := self.out(client):
                deliver(ExchangeFailed(reason))
                return
            try:
                self._check(client, request)
            except Refused as refusal:
                deliver(ExchangeFailed(f"refused: {refusal}"))
                self._drop(client, f"refused: {refusal}")
                return
            if isinstance(request, Join):
                self._joined = time.monotonic()
            if isinstance(request, Join) and request.batch == 0:
                self.active.discard(client)
                deliver(Answer(torch.empty(0), 0, 0))
            else:
                self._waiting[client] = (request, deliver)
            self._advance()

    def leave(self, client: int, reason: str = "") -> None:
        """Record that ``client`` sends no more requests.

        Args:
            client: the client.
            reason: drops the client. Empty: the client is done.
        """
        with self._lock:
            if reason:
                self._drop(client, reason)
            elif client in self.active:
                self._done.add(client)
                if client in self._waiting and isinstance(self._waiting[client][0], Local):
                    self._remove({client}, f"left, and did not {self._awaited()}")
                self._advance()

    def expire(self) -> None:
        """Drop the clients that are late."""
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
        """Fail the round's exchange. All clients that wait or come later receive the reason."""
        with self._lock:
            self.failure = self.failure or reason
            self._end(self.failure)

    def close(self) -> None:
        """Close the round. All clients that still wait or come later receive an error."""
        with self._lock:
            self._end(self._over or "the round is over")

    def _end(self, reason: str) -> None:
        self._over = reason
        waiting, self._waiting = self._waiting, {}
        for _, deliver in waiting.values():
            deliver(ExchangeFailed(reason))

    def _awaited(self) -> str:
        first = next(iter(self._waiting.values()))[0]
        return f"send its part of {first.key}" if isinstance(first, Local) else "join"

    def _check(self, client: int, request: Request) -> None:
        if client in self._waiting:
            raise Refused("expected no request before the first was answered, but got a second one")
        if client in self._done:
            raise Refused("expected no request after it left, but got one")
        if isinstance(request, Join):
            if client in self.batches:
                raise Refused("expected it to join once, but it joined again")
            most = self.samples.get(client, LARGEST_COUNT)
            if not 0 <= request.batch <= most:
                what = f"{most} samples, the number that the client reported" if client in self.samples else f"{most} samples"
                raise Refused(f"expected a batch of 0 to {what}, but got {request.batch}")
            return
        key, values = request.key, request.values
        if client not in self.batches:
            raise Refused(f"expected it to join first, but it sent {key}")
        if (layer := self.layers.get(key.layer)) is None:
            raise Refused(f"{key}: expected one of {len(self.layers)} BatchNorm layers ({', '.join(list(self.layers)[:3])} ...)")
        expected = (key.quantity.width(layer.channels),)
        if tuple(values.shape) != expected or values.dtype != layer.dtype:
            raise Refused(f"{key}: expected {expected} of {layer.dtype}, but got {tuple(values.shape)} of {values.dtype}")
        if not 1 <= request.count <= LARGEST_COUNT:
            raise Refused(f"{key}: expected a count of 1 to {LARGEST_COUNT}, but got {request.count}")
        if not math.isfinite(float(values.sum())) and not bool(values.isfinite().all()):  # the sum alone is quicker; it may overflow
            raise Refused(f"{key}: {int((~values.isfinite()).sum())} of {values.numel()} values are not finite (NaN or Inf)")
        self._check_range(key, values, layer)

    def _check_range(self, key: Key, values: torch.Tensor, layer: Layer) -> None:
        """Refuse negative variances, and values so large that those computed from them overflow."""
        mean_bound, var_bound = bounds(layer.dtype)
        if key.quantity is Quantity.GRADIENTS:
            if (most := float(values.abs().max())) > mean_bound:  # rules and clients square them
                raise Refused(f"{key}: expected gradients within +-{mean_bound:.2g}, but the largest is {most:.2g}")
            return
        means = values[:0] if key.quantity is Quantity.VARIANCE else values[: layer.channels]
        variances = values if key.quantity is Quantity.VARIANCE else values[layer.channels :]
        if len(means) and (most := float(means.abs().max())) > mean_bound:
            raise Refused(f"{key}: expected means within +-{mean_bound:.2g}, but the largest is {most:.2g}")
        if len(variances) and (least := float(variances.min())) < 0:
            raise Refused(f"{key}: expected variances >= 0, but the smallest is {least:g}")
        if len(variances) and (most := float(variances.max())) > var_bound:
            raise Refused(f"{key}: expected variances up to {var_bound:.2g}, but the largest is {most:.2g}")

    def _drop(self, client: int, reason: str) -> None:
        """Remove ``client``, then go on or give up, as the policy says."""
        self._remove({client}, reason)
        self._advance()

    def _remove(self, clients: Iterable[int], reason: str) -> None:
        gone = sorted(self.active.intersection(clients))
        if not gone or self._over:
            return
        self.active.difference_update(gone)
        self.dropped.update(dict.fromkeys(gone, reason))
        who = f"{self.called.clients(gone)}: {reason}"
        for _, deliver in [self._waiting.pop(client) for client in gone if client in self._waiting]:
            deliver(ExchangeFailed(reason))
        if self.policy == "abort":
            LOGGER.warning("exchange: %s. %s", who.rstrip("."), self._given_up)
            self.fail(who)
        else:
            remaining = "1 client goes" if len(self.active) == 1 else f"{len(self.active)} clients go"
            LOGGER.warning("exchange: %s. %s on, with weights over these", who.rstrip("."), remaining)

    def _advance(self) -> None:
        """Answer the requests if every active client has sent one or has left in good order."""
        if not self._waiting or 2 * len(self._waiting) < len(self.active):  # most still train or have left: no client is late yet
            self._held_up = None
        elif self._held_up is None:
            self._held_up = time.monotonic()
        if self._over or not self._waiting or self.active - set(self._waiting) - self._done:
            return
        requests = {client: self._waiting[client][0] for client in sorted(self._waiting)}
        joins = {client: request.batch for client, request in requests.items() if isinstance(request, Join)}
        if joins:  # then all requests are joins: none is answered before the last client has joined
            self.batches.update(joins)
            self._deliver(Answer(torch.empty(0), 0, self._together(list(joins.values()))))
            return
        local = {client: request for client, request in requests.items() if isinstance(request, Local)}
        agreed = self._agree({client: request.key for client, request in local.items()}, self._done & self.active)
        values = self._combined(local) if agreed else None
        if values is None:
            self._advance()
        else:
            self._average(local, values)

    def _combined(self, requests: Mapping[int, Local]) -> torch.Tensor | None:
        """Combine the clients' values, unless some of the clients have to be dropped for them.

        The next step uses the mean of the gradients. If one client's gradient is many times the others',
        every client diverges, and the liar can no longer be identified. Loss and scale are common to all, so
        honest gradients do not differ so much.

        Returns:
            The cohort's values. None if clients were dropped: they claim too many activations, or the cohort
            could not go on with their values.
        """
        key = next(iter(requests.values())).key
        if self.believing and self._remove_far(key, requests):
            return None
        largest = {client: float(request.values.abs().max()) for client, request in requests.items()}
        if key.quantity is Quantity.GRADIENTS and self.believing:
            limit = STEEPEST * max(1.0, median_high(largest.values()))
            if steep := {client for client, most in largest.items() if most > limit}:
                most = max(largest[client] for client in steep)
                self._remove(
                    steep,
                    f"refused: {key}: expected gradients within +-{limit:.2g}, which is {STEEPEST:g} times the median client's, or "
                    f"{STEEPEST:g}, but the largest is {most:.2g}",
                )
                return None
        values = self._reduced(requests)
        if bool(values.isfinite().all()):
            return values
        client = max(largest, key=largest.__getitem__)
        self._remove({client}, f"refused: {key}: with its values, up to {largest[client]:.2g}, the cohort's are not finite")
        return None

    def _remove_far(self, key: Key, requests: Mapping[int, Local]) -> bool:
        """Drop clients whose activations per sample are far from the others'.

        Returns:
            Whether any client was dropped.
        """
        behind = self.samples if key.quantity is Quantity.STATISTICS else self.batches  # a pass over all data, or one batch
        claims = {client: request.count / max(behind[client], 1) for client, request in requests.items() if client in behind}
        limit = most_believed(claims.values())
        if far := {client for client, number in claims.items() if number > limit}:
            most = max(claims[client] for client in far)
            self._remove(
                far,
                f"refused: {key}: expected at most {limit:.3g} activations per sample, which is {FAR:g} times the median client's, but got "
                f"{most:.3g}",
            )
        return bool(far)

    def _agree(self, keys: Mapping[int, Key], left: set[int]) -> bool:
        """Check that all clients sent the same key and that no client in ``left`` is done already.

        Otherwise the minority is dropped, or the round fails. The vote is among all active clients, after
        each has sent a request or left: an earlier vote would miss clients that are about to leave, as all do
        after the last layer. In a tie, a key that cannot come next loses.

        Returns:
            Whether all agree.
        """
        votes: Counter[Key | None] = Counter(keys.values())
        if left:
            votes[None] = len(left)
        most = max(votes.values())
        tied = [key for key, count in votes.items() if count == most]
        likely = [key for key in tied if key is None or self._may_come(key)]
        if len(likely or tied) > 1:
            self.fail(self._disagreement(keys, left, likely or tied))
            return False
        (right,) = likely or tied
        if right is not None and left:
            self._remove(left, f"left, and did not send its part of {right}")
        for other in [key for key in votes if key not in (right, None)]:
            odd = [client for client, sent in keys.items() if sent == other]
            wrong = (
                f"it wants to send its part of {other}, but most clients are done"
                if right is None
                else f"expected {right}, but it sent {other}"
            )
            self._remove(odd, f"{wrong}: does it run the same model and version?")
        return len(votes) == 1

    def _may_come(self, key: Key) -> bool:
        """Return whether the protocol allows ``key`` now.

        A layer's passes come in order, and gradients after their pass.
        """
        if key.quantity is Quantity.GRADIENTS:
            return key.call < max(self._passes[key.layer, quantity] for quantity in (Quantity.MOMENTS, Quantity.VARIANCE))
        return key.call == self._passes[key.layer, key.quantity]

    def _disagreement(self, keys: Mapping[int, Key], left: set[int], tied: list[Key | None]) -> str:
        if None in tied:
            ended, others = self.called.clients(sorted(left)), self.called.clients(sorted(keys))
            return f"the clients disagree about the last layer: {ended} left, {others} went on"
        return f"the clients disagree about the next layer, {tied[0]} or {tied[1]}: do all run the same model and version?"

    def _reduced(self, requests: Mapping[int, Local]) -> torch.Tensor:
        """Combine the clients' values, in the layer's dtype."""
        batches, key = [self.batches[client] for client in requests], next(iter(requests.values())).key
        values = reduce(list(requests.values()), batches, self.average)
        count = self._activations(requests)
        if key.quantity is Quantity.STATISTICS and count > 1:
            values[len(values) // 2 :] *= count / (count - 1)  # unbiased, as ``Moments.bessel``
        return values.to(self.layers[key.layer].dtype)

    def _activations(self, requests: Mapping[int, Local]) -> int:
        statistics = next(iter(requests.values())).key.quantity is Quantity.STATISTICS
        return self._together([r.count for r in requests.values()], median if statistics else median_low)

    def _average(self, requests: Mapping[int, Local], values: torch.Tensor) -> None:
        key = next(iter(requests.values())).key
        self.exchanges += 1
        self._passes[key.layer, key.quantity] += 1
        for client in requests:
            traffic = self.traffic[client]
            self.traffic[client] = Traffic(traffic.exchanges + 1, traffic.up + values.nbytes, traffic.down + values.nbytes)
        self._deliver(Answer(values, self._activations(requests), self._together([self.batches[client] for client in requests])))

    def _together(self, claims: list[int], usual: Callable[[list[int]], float] = median_low) -> int:
        """Return the cohort's activations, or samples, from the clients' claims.

        Args:
            claims: one per client.
            usual: chooses the median client's claim.
        """
        return sum(claims) if self.believing else int(usual(claims)) * len(claims)

    def _deliver(self, answer: Answer) -> None:
        waiting, self._waiting, self._held_up = self._waiting, {}, None
        for _, deliver in waiting.values():
            deliver(answer)
