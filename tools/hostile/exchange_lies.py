"""Attack the layer-wise exchange by one lying client, whose requests are changed or come in a wrong order.

The requests go either directly to a session, without training, or to the exchange of a round in which the others train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from fl_bn.exchange.call import Answer, ExchangeFailed, Join, Key, Local, Quantity, Refused, Request
from fl_bn.exchange.grpc import exchange_pb2 as pb
from fl_bn.exchange.grpc.wire import decode_request, encode_request
from fl_bn.exchange.session import Session
from fl_bn.flower import RunFailed
from tests.hostile.liars import LIAR
from tests.hostile.recorded import CLIENTS, SCENARIOS, Liar, LivingGrid, app_of, served
from tools.hostile import protobuf
from tools.hostile.mutations import Rng, pick
from tools.hostile.outcomes import BROKEN, HONEST, REFUSED, SAME, Outcome, honest, judged, listening

Heard = Callable[[Any], None]  # called with the answer to a request
EDGES = [0.0, 1.0, -1.0, 1e6, 1e12, 4.6e18, 1e20, 1.6e38, 3e38, -3e38, 1e-45, float("nan"), float("inf")]
COUNTS = [0, 1, 2, 5, 2**31, 2**53, 2**53 + 1, 2**63]
STEEP = 1e4  # largest gradient in an answer, in units of the largest honest one (at least 1): larger ones make every client diverge


@contextmanager
def overheard(submit: Callable[..., None], leave: Callable[..., None] | None = None) -> Iterator[None]:
    """Replace the methods ``submit`` and ``leave`` of every session during the ``with`` block.

    Each replacement gets the original method as its first argument. None: ``leave`` is not replaced.
    """
    true_submit, true_leave = Session.submit, Session.leave
    Session.submit = lambda *asked: submit(true_submit, *asked)  # type: ignore[method-assign]
    if leave is not None:
        Session.leave = lambda *asked: leave(true_leave, *asked)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Session.submit, Session.leave = true_submit, true_leave  # type: ignore[method-assign]


@cache
def requests() -> dict[int, list[Request]]:
    """Record the requests of an honest round of FedTAN: client -> requests."""
    found: dict[int, list[Request]] = {}

    def note(submit: Callable[..., None], session: Session, client: int, request: Request, deliver: Heard) -> None:
        found.setdefault(client, []).append(request)
        submit(session, client, request, deliver)

    with overheard(note), listening():
        served("fedtan", LivingGrid(app_of(SCENARIOS["fedtan"]), Liar()))
    return found


# requests as bytes, sent to a session


def lie_to_session(name: str, rng: Rng) -> tuple[str, Outcome]:
    """Change, leave out, repeat or reorder some of the liar's requests to a session.

    The other clients must get a usable answer to each of their requests. Return what was changed, and the outcome.
    """
    exchanges = honest("fedtan").strategy.transport.exchanges
    believing = bool(rng.integers(2))
    average = exchanges.average if believing else SCENARIOS["fedtan robust"].defence.average
    samples = dict.fromkeys(range(CLIENTS), 6)
    session = Session(range(CLIENTS), exchanges.layers, average=average, policy="shrink", samples=samples, believing=believing)
    steps = max(map(len, requests().values()))
    lies = {int(step) for step in rng.integers(steps + 1, size=1 if rng.integers(3) else 4)}  # at ``steps`` the others leave
    what = ""
    with listening():
        for step in range(steps):
            got: dict[int, list[Answer | ExchangeFailed]] = {client: [] for client in range(CLIENTS)}
            for client in map(int, rng.permutation(CLIENTS)):
                calls = [encode_request(requests()[client][step]).SerializeToString()]
                if client == LIAR and step in lies:
                    said, calls = called(step, calls[0], rng)
                    what += f"{step}: {said} "
                for data in calls:
                    ask(session, client, data, got[client])
            session.join_deadline = session.deadline = -1.0
            session.expire()  # every missing request is now late
            for client in set(range(CLIENTS)) - {LIAR}:
                if problem := unusable(requests()[client][step], got[client], believing):
                    return what, Outcome(BROKEN, f"client {client} in step {step}: {problem}: {session.failure}")
        for client in map(int, rng.permutation(CLIENTS)):
            if client == LIAR and steps in lies:
                said, calls = called(steps, b"", rng)
                what += f"after the last: {said} "
                for data in calls:
                    ask(session, client, data, [])
            else:
                session.leave(client)
        session.expire()
    if wrongly := set(session.dropped) - {LIAR}:
        return what, Outcome(BROKEN, f"clients {wrongly} were dropped: {session.dropped}")
    if session.failure:
        return what, Outcome(BROKEN, f"the exchange failed for all: {session.failure}")
    if LIAR in session.dropped:
        return what, Outcome(REFUSED, session.dropped[LIAR])
    return what, Outcome(HONEST if what else SAME, "")


def ask(session: Session, client: int, data: bytes, got: list[Any]) -> None:
    """Pass ``data`` to ``session`` as the exchange's service does with the bytes of a stream."""
    try:
        request = decode_request(data, session.layers)
    except Refused as refusal:
        session.leave(client, f"refused: {refusal}")
        return
    if request is None:
        session.leave(client)
    else:
        session.submit(client, request, got.append)


def unusable(request: Request, got: list[Any], believing: bool) -> str:
    """Return the reason why an honest client could not go on with the answer to ``request``; empty: it could.

    Args:
        request: The client's request.
        got: What the session delivered for it: one answer is expected.
        believing: Whether the session uses the counts that clients report.
    """
    if len(got) != 1 or not isinstance(answer := got[0], Answer):
        return f"it got {got}"
    if not bool(answer.values.isfinite().all()):
        return "an answer is not finite"
    if not believing and isinstance(request, Local) and request.key.quantity is Quantity.GRADIENTS:
        most = max(float(theirs.values.abs().max()) for own in requests().values() for theirs in own if isinstance(theirs, Local))
        if float(answer.values.abs().max()) > STEEP * max(1.0, most):
            return f"gradients of {float(answer.values.abs().max()):.3g}"
    if isinstance(request, Local) and answer.values.dtype == torch.float32 and not bool(answer.values.square().sqrt().isfinite().all()):
        wide = request.key.quantity in (Quantity.MOMENTS, Quantity.VARIANCE, Quantity.STATISTICS)
        means = answer.values[: len(answer.values) // 2] if request.key.quantity is not Quantity.VARIANCE else answer.values[:0]
        return "" if wide and bool(means.square().isfinite().all()) else "values that no client can square"
    return ""


def called(step: int, data: bytes, rng: Rng) -> tuple[str, list[bytes]]:
    """Draw what the liar sends in place of its request of one step. Return a description, and the messages as protobuf's bytes."""
    how = int(rng.integers(12))
    if how == 0:
        return "nothing", []
    if how == 1:
        return "twice", [data, data]
    if how == 2:
        return "a leave", [pb.Request(leave=pb.Leave()).SerializeToString()]
    if how == 3:
        return "a leave, and goes on", [pb.Request(leave=pb.Leave()).SerializeToString(), data]
    if how == 4:
        return "another request", [any_request(rng)]
    if how == 5:
        return "one more request", [data, any_request(rng)]
    if how == 6:
        return "requests out of turn", [any_request(rng) for _ in range(int(rng.integers(1, 6)))]
    if how <= 8:
        return "bytes", [protobuf.changed_protobuf(data, rng)]
    message = pb.Request.FromString(data or any_request(rng))
    if message.WhichOneof("kind") != "local":
        message.join.batch = int(pick(rng, COUNTS))
        return "batch", [message.SerializeToString()]
    local, kind = message.local, pick(rng, ["layer", "quantity", "call", "count", "values", "values", "values", "one value", "size"])
    if kind == "layer":
        local.layer = pick(rng, ["", "x", "1", "5", "x" * 10_000])
    elif kind == "quantity":
        local.quantity = int(rng.integers(7))
    elif kind == "call":
        local.call = int(pick(rng, COUNTS)) % 2**32
    elif kind == "count":
        local.count = int(pick(rng, COUNTS))
    elif kind == "size":
        local.values = local.values * int(rng.choice([0, 2, 1000]))
    else:
        values = torch.frombuffer(bytearray(local.values), dtype=torch.float32)
        values[slice(None) if kind == "values" else int(rng.integers(len(values)))] = pick(rng, EDGES)
        local.values = values.numpy().tobytes()
    return f"{kind} of {local.layer[:20]}", [message.SerializeToString()]


def any_request(rng: Rng) -> bytes:
    """Return a random request of the honest round, as bytes. Half of the requests about a layer get a random call number."""
    request = pick(rng, requests()[int(rng.integers(CLIENTS))])
    message = encode_request(request)
    if message.WhichOneof("kind") == "local" and rng.integers(2):
        message.local.call = int(rng.integers(3))
    return message.SerializeToString()


# a round in which the others train


def lie_in_a_round(name: str, rng: Rng) -> tuple[str, Outcome]:
    """Change one request of the liar, or add one, in a round in which the others train. The round must still change the model.

    Return what was changed, and the outcome.
    """
    lie, turn, what = int(rng.integers(sum(isinstance(r, Local) for r in requests()[LIAR]) + 3)), [0], [""]

    def submit(true: Callable[..., None], session: Session, client: int, request: Request, deliver: Heard) -> None:
        if client == LIAR:
            turn[0] += 1
            if turn[0] == lie:
                what[0], request = other(request, rng)
        true(session, client, request, deliver)

    def leave(true: Callable[..., None], session: Session, client: int, reason: str = "") -> None:
        if client == LIAR and not reason and lie > turn[0] and not what[0] and session.batches:
            key = Key(pick(rng, list(session.layers)), pick(rng, list(Quantity)), int(rng.integers(3)))
            what[0] = f"one more request, {key}"
            layer = session.layers[key.layer]
            values = torch.ones(key.quantity.width(layer.channels), dtype=layer.dtype)
            session.submit(client, Local(key, values, 1), lambda answer: None)
        else:
            true(session, client, reason)

    with overheard(submit, leave), listening() as said:
        try:
            ran = served(name, LivingGrid(app_of(SCENARIOS[name]), Liar()))
        except RunFailed as error:
            return what[0], Outcome(BROKEN, f"the run of one round ended: {error}")
        except Exception as error:  # the server must survive every request
            return what[0], Outcome(BROKEN, f"the server ended: {error!r}")
    return what[0], judged(name, ran, said.lines)


def other(request: Request, rng: Rng) -> tuple[str, Request]:
    if isinstance(request, Join):
        batch = int(pick(rng, COUNTS))
        return f"batch {batch}", Join(batch)
    key, values, count = request.key, request.values.clone(), request.count
    how = int(rng.integers(8))
    if how == 0:
        key = Key(pick(rng, ["", "x", key.layer]), pick(rng, list(Quantity)), int(rng.integers(3)))
        return f"{key} in place of {request.key}", Local(key, values, count)
    if how == 1:
        count = int(pick(rng, COUNTS))
        return f"count {count}", Local(key, values, count)
    value = pick(rng, EDGES)
    values[slice(None) if how > 3 else int(rng.integers(len(values)))] = value
    return f"{value} in {key}", Local(key, values, count)
