"""How one case is run: one party sends one message that was changed, to a server, an exchange's session, or a client."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from flwr.app import Error, Message, RecordDict

from fl_bn.exchange.call import Answer, ExchangeFailed, Local, Refused, Request
from fl_bn.exchange.grpc import exchange_pb2 as pb
from fl_bn.exchange.grpc.wire import decode_request, encode_request
from fl_bn.exchange.session import Deliver, Session
from fl_bn.flower import RunFailed
from fl_bn.flower.in_process import InProcessGrid
from tests.hostile.liars import LIAR
from tests.hostile.mutations import CHANGES, TEXTS, Rng, flipped, pick, plain
from tests.hostile.outcomes import BROKEN, GIVEN_UP, HONEST, REFUSED, SAME, Outcome, honest, judged, listening
from tests.hostile.recorded import CANNED, CLIENTS, SCENARIOS, SECURE, Liar, LivingGrid, PlayingGrid, app_of, cloned, recorded, served

# a server, of whose clients one lies in one message


class OneLie(Liar):
    """In its ``turn``-th message; ``others``: content of other messages, of its own or of other rounds, runs and clients, to replay."""

    def __init__(self, rng: Rng, turn: int, others: list[RecordDict]) -> None:
        self.rng, self.turn, self.others = rng, turn, others
        self.lied, self.what, self.reorder = False, "", False
        self._extra: list[Message] = []

    def answer(self, message: Message, turn: int, asked: str, content: RecordDict) -> Message:
        if turn != self.turn:
            return Message(content, reply_to=message)
        self.lied, rng = True, self.rng
        kind = int(rng.integers(24))
        self.what = f"{asked}: "
        if kind == 0:
            return Message(Error(int(rng.choice([0, 2, 3, 8, 999])), pick(rng, TEXTS)), reply_to=message)
        if kind == 1:
            self.what += "another message"
            return Message(cloned(pick(rng, self.others)), reply_to=message)
        if kind == 2:
            self.what += "nothing"
            return Message(RecordDict(), reply_to=message)
        if kind == 3:
            self.what += "order"
            self.reorder = True
        elif kind == 4:
            self.what += "twice"
            again = cloned(content)
            with np.errstate(all="ignore"):
                pick(rng, CHANGES)(again, rng)
            self._extra.append(Message(again, reply_to=message))
        else:
            for _ in range(int(rng.integers(1, 4))):
                change = pick(rng, CHANGES)
                self.what += f"{change.__name__} "
                with np.errstate(all="ignore"):
                    change(content, rng)
        return Message(content, reply_to=message)

    def reordered(self, replies: list[Message]) -> list[Message]:
        extra, self._extra = self._extra, []
        replies = replies + extra
        return [replies[int(i)] for i in self.rng.permutation(len(replies))] if self.reorder else replies


def replays(name: str) -> list[RecordDict]:
    """What a liar may send in place of its own: its messages of other kinds, other clients' and other runs'."""
    other = "fbn" if name != "fbn" else "hbn"
    return [content for _, content in recorded(name).canned.values()] + [content for _, content in recorded(other).canned.values()][:10]


def lie_to_server(name: str, rng: Rng) -> tuple[str, Outcome]:
    recording, scenario = recorded(name), SCENARIOS[name]
    turns = max(turn for node, turn in recording.canned if node == LIAR + 1)
    liar = OneLie(rng, int(rng.integers(1, turns + 1)), replays(name))
    grid: InProcessGrid = LivingGrid(app_of(scenario), liar) if scenario.secure else PlayingGrid(recording, liar)
    with listening() as said:
        try:
            ran = served(name, grid)
        except RunFailed as error:
            gave_up = scenario.secure and any("nothing changes, since the masks did not cancel" in line for line in said.lines)
            return liar.what, Outcome(GIVEN_UP if gave_up else BROKEN, f"the run of one round ended: {error}")
        except Exception as error:  # whatever it is: the server must live
            return liar.what, Outcome(BROKEN, f"the server ended: {error!r}")
        return liar.what, judged(name, ran, said.lines)


# an exchange's session


@cache
def requests() -> dict[int, list[Request]]:
    """Of an honest round of FedTAN, by client."""
    found: dict[int, list[Request]] = {}
    submit = Session.submit

    def note(self: Session, client: int, request: Request, deliver: Deliver) -> None:
        found.setdefault(client, []).append(request)
        submit(self, client, request, deliver)

    Session.submit = note  # type: ignore[method-assign]
    try:
        with listening():
            served("fedtan", LivingGrid(app_of(SCENARIOS["fedtan"]), Liar()))
    finally:
        Session.submit = submit  # type: ignore[method-assign]
    return found


def lie_to_session(name: str, rng: Rng) -> tuple[str, Outcome]:
    """One request of the liar's, changed in its fields or in protobuf's bytes; the others must get finite answers to all of theirs."""
    strategy = honest("fedtan").strategy
    believing = bool(rng.integers(2))
    average = strategy.exchanges.average if believing else SCENARIOS["fedtan robust"].defence.average
    samples = dict.fromkeys(range(CLIENTS), 6)
    session = Session(range(CLIENTS), strategy.exchanges.layers, average=average, policy="shrink", samples=samples, believing=believing)
    steps, lie = max(map(len, requests().values())), int(rng.integers(max(map(len, requests().values()))))
    what, got = "", dict[int, list[Answer | ExchangeFailed]]()
    with listening():
        for step in range(steps):
            got = {client: [] for client in range(CLIENTS)}
            for client in rng.permutation(CLIENTS):
                request = requests()[client][step]
                data = encode_request(request).SerializeToString()
                if client == LIAR and step == lie:
                    what, data = mutated(request, data, rng)
                try:
                    decoded = decode_request(data, session.layers)
                except Refused as refusal:
                    session.leave(client, f"refused: {refusal}")
                    continue
                if decoded is None:
                    session.leave(client)
                else:
                    session.submit(client, decoded, got[client].append)
            session.join_deadline = session.deadline = -1.0
            session.expire()  # a request that never came is late now
            for client in set(range(CLIENTS)) - {LIAR}:
                if len(got[client]) != 1 or not isinstance(answer := got[client][0], Answer):
                    return what, Outcome(BROKEN, f"client {client} got {got[client]} in step {step}: {session.failure}")
                if not bool(answer.values.isfinite().all()):
                    return what, Outcome(BROKEN, "an answer is not finite")
    if LIAR in session.dropped:
        return what, Outcome(REFUSED, session.dropped[LIAR])
    return what, Outcome(HONEST if what else SAME, "")


def mutated(request: Request, data: bytes, rng: Rng) -> tuple[str, bytes]:
    how = int(rng.integers(6))
    if how == 0:
        return "truncated", data[: int(rng.integers(len(data) + 1))]
    if how == 1:
        return "flipped", flipped(bytearray(data), rng) if data else b"\xff"
    if how == 2:
        return "another request", encode_request(pick(rng, requests()[int(rng.integers(CLIENTS))])).SerializeToString()
    if how == 3:
        return "oversized", data + bytes(pb.Request(local=pb.Local(layer="x" * 100_000)).SerializeToString())
    message = pb.Request.FromString(data)
    if isinstance(request, Local):
        number = int(pick(rng, [0, 1, 2**31, 2**53, 2**53 + 1, 2**63]))
        kind = pick(rng, ["layer", "quantity", "call", "count", "values", "size"])
        if kind == "layer":
            message.local.layer = pick(rng, ["", "x", "1", "5", "x" * 10_000])
        elif kind == "quantity":
            message.local.quantity = int(rng.integers(7))
        elif kind == "call":
            message.local.call = number % 2**32
        elif kind == "count":
            message.local.count = number
        elif kind == "values":
            far = pick(rng, [float("nan"), float("inf"), 1e30, -1e30, 1e18, -1.0, 0.0])
            message.local.values = torch.full_like(request.values, far).numpy().tobytes()
        else:
            message.local.values = message.local.values * int(rng.choice([0, 2, 1000]))
        return kind, message.SerializeToString()
    message.join.batch = int(pick(rng, [0, 1, 5, 6, 7, 2**31, 2**53, 2**63]))
    return "batch", message.SerializeToString()


# a client of a server that lies


def lie_to_client(name: str, rng: Rng) -> tuple[str, Outcome]:
    """One instruction, changed; afterwards the client must still answer the honest one."""
    exchanges = [one for one in recorded(name).exchanges if one[0] != "query.rendezvous"]
    asked, instruction, _ = pick(rng, exchanges)
    grid = InProcessGrid(app_of(SCENARIOS[name]), CLIENTS, {})
    content, kind = cloned(instruction), asked.split()[0]
    what = f"{asked}: "
    if rng.integers(12) == 0:
        content, what = cloned(pick(rng, exchanges)[1]), what + "another message"
    else:
        for _ in range(int(rng.integers(1, 4))):
            change = pick(rng, CHANGES)
            what += f"{change.__name__} "
            with np.errstate(all="ignore"):
                change(content, rng)
    with listening():
        (answer,) = grid.send_and_receive([Message(content, LIAR + 1, kind, ttl=600.0, group_id="1")])
        reason = str(answer.error.reason) if answer.has_error() else ""
        sent = [array for record in answer.content.array_records.values() for array in record.values()] if answer.has_content() else []
        if any(array.dtype == "float32" and not np.isfinite(plain(array)).all() for array in sent):
            reason = "diverged"
        if "secure" not in name and kind == "train":
            (again,) = grid.send_and_receive([Message(cloned(instruction), LIAR + 1, kind, ttl=600.0, group_id="1")])
            if again.has_error():
                return what, Outcome(BROKEN, f"afterwards the client refuses an honest message: {again.error.reason}")
    if "Undeclared" in reason or "MemoryError" in reason:
        return what, Outcome(BROKEN, reason)
    return what, Outcome(REFUSED, reason) if reason else Outcome(HONEST, "")


TARGETS: dict[str, tuple[Callable[[str, Rng], tuple[str, Outcome]], list[str], float]] = {  # and the share of all mutations
    "server": (lie_to_server, CANNED, 0.70),
    "session": (lie_to_session, ["fedtan"], 0.20),
    "client": (lie_to_client, ["fedavg", "fbn", "hbn", "fedbn unseen", "fedtan", "fbn maintained", "fbn bfloat16", "fbn secure"], 0.09),
    "secure": (lie_to_server, SECURE, 0.01),
}
