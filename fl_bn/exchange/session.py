"""One round's exchange, seen from the server: who takes part, what is awaited, and what becomes of those who do not come.

A state machine without a thread or a clock of its own: carriers ``submit`` requests and hand the answers on; ``expire`` is called by
whoever has a clock. A request is answered when all active clients have sent theirs.
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
STEEPEST = 1e3  # a client's largest gradient of a layer, in units of the median client's: without a defence no larger one is believed

Deliver = Callable[[Answer | ExchangeFailed], None]
LOGGER = logging.getLogger("flwr")  # the log in which a run tells its story; by name, since Flower stays behind its boundary


@dataclass(frozen=True)
class Traffic:
    """One client's exchanges in a round: how many there were, and the bytes of values that went up and down."""

    exchanges: int = 0
    up: int = 0
    down: int = 0


def reduce(requests: list[Local], batches: list[int], average: Average = weighted_mean) -> torch.Tensor:
    """The cohort's values, float64, of requests for one key, in client order."""
    values = torch.stack([request.values for request in requests]).double()
    counts = torch.tensor([request.count for request in requests], dtype=torch.float64)
    quantity = requests[0].key.quantity
    if quantity in (Quantity.MOMENTS, Quantity.STATISTICS):
        means, variances = values.chunk(2, dim=1)
        pooled = pool([Moments(r.count, mean, var) for r, mean, var in zip(requests, means, variances, strict=True)], average)
        return torch.cat([pooled.mean, pooled.var])
    return average(values, torch.tensor(batches, dtype=torch.float64) if quantity is Quantity.GRADIENTS else counts)


def exchanged_layers(model: nn.Module) -> dict[str, Layer]:
    """The layers whose statistics a round may exchange, by name: those that keep running ones."""
    return {
        name: Layer(len(layer.running_mean), torch.promote_types(layer.running_mean.dtype, torch.float32))
        for name, layer in batch_norms(model).items()
        if layer.running_mean is not None
    }


class Session:
    """The exchange of one round among ``cohort``.

    ``layers``: the layers that may be exchanged. ``average`` combines what comes (the weighted mean, or a robust rule). ``policy`` for a
    client that dies, is refused, or comes ``deadline`` (s) after at least half of the clients waited for it (``join_deadline`` after the
    last to join): ``abort`` fails the round for all, ``shrink`` goes on without it, with weights over the others. A minority that waits
    starts no clock: one client that sends early would have the others, which still train, dropped. Safe to call from several threads.

    ``samples``: what each client has in all; no batch may be larger. ``believing``: counts and batches are what each client says; else
    everyone counts as the median client, so that under a defence the cohort's are in nobody's hand. ``given_up``: what the log says
    after the reason where the exchange fails for all. ``called``: what the log calls the clients.
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
        """Why ``client`` will get no further answer; empty while it may."""
        with self._lock:
            return self._over or ("" if client in self.active else self.dropped.get(client, "this client takes no part in the round"))

    @property
    def taking_part(self) -> dict[int, int]:
        """Batch size of every client that joined and was not dropped."""
        return {client: batch for client, batch in sorted(self.batches.items()) if client in self.active and batch > 0}

    def submit(self, client: int, request: Request, deliver: Deliver) -> None:
        """Take ``client``'s request; ``deliver`` gets the answer, now or when the others have come, or why there is none."""
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
        """``client`` will send nothing more: of its own will and in good order, or for ``reason``."""
        with self._lock:
            if reason:
                self._drop(client, reason)
            elif client in self.active:
                self._done.add(client)
                if client in self._waiting and isinstance(self._waiting[client][0], Local):
                    self._remove({client}, f"left, and did not {self._awaited()}")
                self._advance()

    def expire(self) -> None:
        """Drop those who are awaited beyond the deadline."""
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
        """Give the round's exchange up: everyone who waits, and everyone who comes later, is told why."""
        with self._lock:
            self.failure = self.failure or reason
            self._end(self.failure)

    def close(self) -> None:
        """The round is over: whoever still waits or comes is told so."""
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
            raise Refused("a second request before the first was answered")
        if client in self._done:
            raise Refused("a request after it left")
        if isinstance(request, Join):
            if client in self.batches:
                raise Refused("it has joined already")
            most = self.samples.get(client, LARGEST_COUNT)
            if not 0 <= request.batch <= most:
                what = f"{most} samples, as the client said of itself" if client in self.samples else f"{most} samples"
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
        """Variances are not negative, and no client's values are so large that they overflow in what is made of all of them."""
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
        """Go on without ``client``, or give up, as the policy says."""
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
            left = "1 client goes" if len(self.active) == 1 else f"{len(self.active)} clients go"
            LOGGER.warning("exchange: %s. %s on, with weights over these", who.rstrip("."), left)

    def _advance(self) -> None:
        """Answer, if everyone has spoken: sent a request, or left in good order."""
        if not self._waiting or 2 * len(self._waiting) < len(self.active):  # most still train, or have left: nobody holds them up
            self._held_up = None
        elif self._held_up is None:
            self._held_up = time.monotonic()
        if self._over or not self._waiting or self.active - set(self._waiting) - self._done:
            return
        requests = {client: self._waiting[client][0] for client in sorted(self._waiting)}
        joins = {client: request.batch for client, request in requests.items() if isinstance(request, Join)}
        if joins:  # then all are: nobody's join is answered before the last has joined
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
        """Combine the cohort's values. Returns None where clients are dropped: they claim too many activations, or the cohort could not go
        on with their values.

        The step that follows has the mean of the gradients. One client's that is many times the others' makes every client diverge, and
        the liar could not be told from them any more. Loss and scale are common, so that honest gradients do not differ so much.
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
        """Drop those whose activations per sample are far from the others', and say whether there were any."""
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
        """Check that all sent the same key and that nobody ``left``; otherwise drop the minority, or fail the round.

        Every active client has a vote here, and has used it: one that has not spoken yet may be about to leave, as all do after the last
        layer. In a tie, a key that cannot come next loses.
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
        """Tell whether the protocol allows ``key`` now: a layer's passes come in order, and gradients after their pass."""
        if key.quantity is Quantity.GRADIENTS:
            return key.call < max(self._passes[key.layer, quantity] for quantity in (Quantity.MOMENTS, Quantity.VARIANCE))
        return key.call == self._passes[key.layer, key.quantity]

    def _disagreement(self, keys: Mapping[int, Key], left: set[int], tied: list[Key | None]) -> str:
        if None in tied:
            ended, others = self.called.clients(sorted(left)), self.called.clients(sorted(keys))
            return f"the clients disagree about the last layer: {ended} left, {others} went on"
        return f"the clients disagree about the next layer, {tied[0]} or {tied[1]}: do all run the same model and version?"

    def _reduced(self, requests: Mapping[int, Local]) -> torch.Tensor:
        """The cohort's values, in the layer's dtype."""
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
        """The cohort's activations, or samples, by what each client claims; ``usual``: the median client's."""
        return sum(claims) if self.believing else int(usual(claims)) * len(claims)

    def _deliver(self, answer: Answer) -> None:
        waiting, self._waiting, self._held_up = self._waiting, {}, None
        for _, deliver in waiting.values():
            deliver(answer)
