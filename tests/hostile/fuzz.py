"""Mutated messages by the thousand, and what became of each. The honest ones are recorded from real runs (``recorded``).

    python -m tests.hostile.fuzz --mutations 100000        # prints counts per outcome, and the server's peak memory

Four targets: a *server* in whole rounds of every method (plain, robust, layer-wise exchange by replay), of which one client lies in one
message; the same in *secure* rounds, with real clients, since there each reply depends on those before; an exchange's *session*, request by
request, in protobuf's bytes; and a *client* of a server that lies. What must hold is in ``judged``.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from fl_bn.exchange.call import Answer, ExchangeFailed, Local, Refused, Request
from fl_bn.exchange.grpc import exchange_pb2 as pb
from fl_bn.exchange.grpc.wire import decode_request, encode_request
from fl_bn.exchange.session import Deliver, Session
from fl_bn.federation import schema
from fl_bn.federation.companions import companions
from fl_bn.federation.payload import to_numpy
from fl_bn.flower.codec import array_from
from fl_bn.flower.in_process import InProcessGrid
from fl_bn.flower.log import LOGGER
from fl_bn.wire import WireError
from tests.hostile.liars import LIAR
from tests.hostile.recorded import (
    CANNED,
    CLIENTS,
    SCENARIOS,
    SECURE,
    Liar,
    LivingGrid,
    PlayingGrid,
    Served,
    app_of,
    cloned,
    recorded,
    served,
)

Rng = np.random.Generator
REFUSED, SAME, HONEST, GIVEN_UP, BROKEN = (
    "refused, and named",
    "accepted: no bit of the model changed",
    "accepted: as an honest client could have sent",
    "round given up, and said why",
    "BROKEN",
)
FAR = 4.0  # under a defence no weight may become so many times the largest honest one

# values

INTS = [-1, 0, 1, 2, 7, 2**31, 2**53, 2**53 + 1, 2**62, -(2**63)]
FLOATS = [float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 0.0, -0.5, 1e-320, 3.5]
TEXTS = ["", "x", "..", "a/b\n", "\x00\x1b[2J", "x" * 100_000, "[" * 100_000, "[1e999]", "[" + "9" * 5000 + "]", '{"a": 1}', "null"]
BLOBS = [b"", b"x", bytes(range(256)), b"\x93NUMPY" + bytes(100), b"x" * 1_000_000]
LISTS: list[list[Any]] = [[], [1] * 1000, [0, 0], [float("nan")], [2**63 - 1]]


def pick(rng: Rng, values: list[Any]) -> Any:
    return values[int(rng.integers(len(values)))]


def hostile(rng: Rng, config: bool) -> Any:
    kinds = [INTS, FLOATS, LISTS, *([TEXTS, BLOBS, [[b""], ["a"], [b"x" * 5000], [True]]] if config else [])]
    return pick(rng, pick(rng, kinds))


def near(value: Any, rng: Rng) -> Any:
    """Something of the same kind."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | bytes | list):
        return value
    if isinstance(value, int):
        return value + int(rng.integers(-3, 4))
    if isinstance(value, float):
        return value * float(rng.choice([-1, 0, 0.5, 2, 1e6]))
    if isinstance(value, list):
        return pick(rng, [value[:-1], value + value[:1], value[::-1], value * 2])
    cut = int(rng.integers(len(value) + 1))
    if isinstance(value, str):
        return pick(rng, [value[:cut], value + value[:cut], value[::-1], value.replace("1", "2")])
    flipped = bytearray(value)
    if flipped:
        flipped[cut - 1] ^= 1 << int(rng.integers(8))
    return pick(rng, [value[:cut], value + value[:cut], bytes(flipped)])


# mutations of content, in place; each returns what it did


def drop_record(content: RecordDict, rng: Rng) -> None:
    if content:
        del content[pick(rng, list(content))]


def rename_record(content: RecordDict, rng: Rng) -> None:
    if content:
        name = pick(rng, list(content))
        record = content[name]
        del content[name]
        content[pick(rng, ["x", name + " ", "weights", "moments", "metrics2", "y" * 5000])] = record


def extra_record(content: RecordDict, rng: Rng) -> None:
    number = int(rng.choice([1, 1, 50]))
    for i in range(number):
        name = f"{pick(rng, ['local', 'weights', 'moments', 'kept', 'transcript', 'exchange', 'z' * 300])}{i if number > 1 else ''}"
        if name not in content:
            content[name] = pick(rng, [ArrayRecord({"0.weight": Array(np.ones(3))}), ConfigRecord({"a": 1}), MetricRecord({"b": 2})])


def fields(content: RecordDict) -> list[str]:
    return [name for name, record in content.items() if not isinstance(record, ArrayRecord) and len(record)]


def change_field(content: RecordDict, rng: Rng) -> None:
    if found := fields(content):
        name = pick(rng, found)
        old, config = dict(content[name]), name in content.config_records
        key = pick(rng, list(old))
        how = int(rng.integers(4))
        if how == 0:
            del old[key]
        elif how == 1:
            old[key] = near(old[key], rng)
        else:
            old[key] = hostile(rng, config)
        replace_record(content, name, old, config)


def extra_field(content: RecordDict, rng: Rng) -> None:
    if found := fields(content):
        name = pick(rng, found)
        config = name in content.config_records
        new = {pick(rng, ["kept", "updates", "drift", "unreadable", "save", "x" * 1000, "a\nb"]): hostile(rng, config)}
        if rng.integers(8) == 0:
            new = {f"field {i}": 1 for i in range(12_000)}
        replace_record(content, name, {**dict(content[name]), **new}, config)


def other_kind(content: RecordDict, rng: Rng) -> None:
    """A config record where metrics are expected, or the other way about."""
    if found := fields(content):
        name = pick(rng, found)
        values = dict(content[name])
        try:
            replace_record(content, name, values, name not in content.config_records)
        except (TypeError, ValueError):
            replace_record(content, name, {}, name in content.config_records)


def replace_record(content: RecordDict, name: str, values: dict[str, Any], config: bool) -> None:
    new = (ConfigRecord if config else MetricRecord)(values)
    del content[name]
    content[name] = new


def sections(content: RecordDict) -> list[str]:
    return [name for name, record in content.items() if isinstance(record, ArrayRecord) and len(record)]


def change_array(content: RecordDict, rng: Rng) -> None:
    if found := sections(content):
        record = content.array_records[pick(rng, found)]
        name = pick(rng, list(record))
        how = pick(rng, [values, values, values, shape_or_dtype, raw_bytes, raw_bytes, untrue_claim])
        record[name] = how(record[name], rng)


def plain(array: Array) -> np.ndarray:
    """Its values; zeros where an earlier change left none that can be read."""
    try:
        return array_from(array.data, "") if array.stype == "numpy.ndarray" else np.zeros(4, np.float32)
    except WireError:
        return np.zeros(4, np.float32)


def values(array: Array, rng: Rng) -> Array:
    new = plain(array).copy()
    flat = new.reshape(-1)
    if flat.size:
        where = slice(None) if rng.integers(2) else int(rng.integers(flat.size))
        big = [1e30, -1e30, 3e38, 4.6e18, 1e9, -1.0, 0.0, 1e-30, float("nan"), float("inf")]
        if flat.dtype.kind == "f":
            flat[where] = flat[where] * 1.5 if rng.integers(3) == 0 else pick(rng, big)
        else:
            flat[where] = pick(rng, INTS)
    return Array(new)


def shape_or_dtype(array: Array, rng: Rng) -> Array:
    new = plain(array)
    kinds: list[Callable[[], np.ndarray]] = [
        lambda: new[None],
        lambda: new.reshape(-1)[:0],
        lambda: np.append(new, new),
        lambda: new.astype("float64" if new.dtype != np.float64 else "float16"),
        lambda: new.astype(">f4"),
        lambda: new.astype("U4"),
        lambda: np.asfortranarray(new.T),
        lambda: np.zeros((1000, 1000), np.float32),
        lambda: new.astype("complex64"),
    ]
    return Array(pick(rng, kinds)())


def raw_bytes(array: Array, rng: Rng) -> Array:
    data = bytearray(array.data or b"x")
    kinds: list[Callable[[], bytes]] = [
        lambda: bytes(data[: int(rng.integers(len(data) + 1))]),
        lambda: bytes(data) + rng.bytes(50),
        lambda: rng.bytes(200),
        lambda: b"",
        lambda: flipped(data, rng),
        lambda: bytes(data) * 50,
        lambda: bytes(data[:128]).replace(b"(4,", b"(9999999999999,").replace(b"(1,", b"(-1,"),
        lambda: bytes(data).replace(b"'<f4'", b"'|O' "),
        lambda: b"PK\x03\x04" + bytes(data),
    ]
    return Array(dtype=array.dtype, shape=tuple(array.shape), stype=array.stype, data=pick(rng, kinds)())


def flipped(data: bytearray, rng: Rng) -> bytes:
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        changed[int(rng.integers(len(changed)))] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def untrue_claim(array: Array, rng: Rng) -> Array:
    claims: list[dict[str, Any]] = [{"dtype": "float99"}, {"dtype": "x" * 10_000}, {"shape": (2**62,)}, {"shape": (-1,)}, {"stype": "x"}]
    return Array(**{"dtype": array.dtype, "shape": tuple(array.shape), "stype": array.stype, "data": array.data, **pick(rng, claims)})


def change_names(content: RecordDict, rng: Rng) -> None:
    if found := sections(content):
        record = content.array_records[pick(rng, found)]
        name = pick(rng, list(record))
        how = int(rng.integers(4))
        array = record[name]
        if how != 3:
            del record[name]
        if how == 0:
            record[pick(rng, ["x", name + "\n", "a" * 10_000, "", "mean/0/1", "moments/999999999999/1"])] = array
        elif how == 1 and len(record):
            record[pick(rng, list(record))] = array
        elif how == 3:
            record["9.more"] = array


CHANGES = [drop_record, rename_record, extra_record, change_field, change_field, change_field, extra_field, other_kind]
CHANGES += [change_array, change_array, change_array, change_names]


# one client that lies in one message


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


class Said(logging.Handler):
    """The warnings of a run."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "was overwritten: record of type" not in record.msg:  # said by the liar's own RecordDict, which is in this process
            self.lines.append(record.getMessage())


@contextmanager
def listening() -> Iterator[Said]:
    """Flower's logger says nothing but to this."""
    said, before, level = Said(), list(LOGGER.handlers), LOGGER.level
    LOGGER.handlers[:], propagate = [said], LOGGER.propagate
    LOGGER.propagate = False
    LOGGER.setLevel(logging.WARNING)
    try:
        yield said
    finally:
        LOGGER.handlers[:], LOGGER.propagate = before, propagate
        LOGGER.setLevel(level)


class Outcome(NamedTuple):
    """``why``: of what is broken, or of a round that was given up; else who was named, and how."""

    kind: str
    why: str


@cache
def honest(name: str) -> Served:
    scenario = SCENARIOS[name]
    return served(name, LivingGrid(app_of(scenario), Liar()) if scenario.secure else PlayingGrid(recorded(name), Liar()))


def largest(tensors: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(array).max(initial=0)) for array in tensors.values())


def judged(name: str, ran: Served, lines: list[str]) -> Outcome:
    """What became of one lie. Broken: the round did not go on, another client paid, or the model is none that clients take."""
    truth, tensors = honest(name), ran.tensors
    named = [line for line in lines if f"client {LIAR}" in line or f"node {LIAR + 1} " in line]
    others = [c for c in ran.record.clients if c.client != LIAR and c.refused]
    if any(len(line) > 4000 or "\x1b" in line or "\n" in line for line in lines):
        return Outcome(BROKEN, "a line of the log holds what a client made of it")
    if others:
        if SCENARIOS[name].secure and not ran.record.aggregated:
            return Outcome(GIVEN_UP, lines[-1])
        return Outcome(BROKEN, f"client {others[0].client} paid: {others[0].refused}")
    if not ran.record.aggregated:
        return Outcome(GIVEN_UP if SCENARIOS[name].secure else BROKEN, lines[-1] if lines else "nothing was said")
    shared = ran.strategy.shared
    try:
        beside = companions(SCENARIOS[name].settings)
        asked = ran.strategy.server.begin(1).sections
        schema.instruction(shared.model, shared.method, beside).check({section: to_numpy(tensors) for section, tensors in asked.items()})
    except ValueError as error:
        return Outcome(BROKEN, f"clients would refuse the model: {error}")
    if ran.strategy.defence.active and largest(tensors) > FAR * largest(truth.tensors):
        return Outcome(BROKEN, f"under a defence the largest weight is {largest(tensors):.3g}")
    evaluated = set(ran.record.client_evaluation) if truth.record.client_evaluation else set()
    if truth.record.client_evaluation and not set(truth.record.client_evaluation) - {LIAR} <= evaluated:
        return Outcome(BROKEN, "an honest client's evaluation is missing")
    if named:
        return Outcome(REFUSED, named[0])
    same = all(np.array_equal(tensors[k], a) for k, a in truth.tensors.items())
    return Outcome(SAME if same else HONEST, "")


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


# the whole


TARGETS: dict[str, tuple[Callable[[str, Rng], tuple[str, Outcome]], list[str], float]] = {  # and the share of all mutations
    "server": (lie_to_server, CANNED, 0.70),
    "session": (lie_to_session, ["fedtan"], 0.20),
    "client": (lie_to_client, ["fedavg", "fbn", "hbn", "fedbn unseen", "fedtan", "fbn maintained", "fbn secure"], 0.09),
    "secure": (lie_to_server, SECURE, 0.01),
}


class Tally(NamedTuple):
    counts: Counter[tuple[str, str]]  # by target and kind of outcome
    broken: list[str]
    peak: float  # MB that the process grew by


def fuzz(mutations: int, seed: int = 0, seconds: float = float("inf")) -> Tally:
    """``mutations`` over all targets, as many as fit into ``seconds``: the same for the same seed."""
    with listening():
        for name in SCENARIOS:
            honest(name)  # recorded, and in memory, before memory is measured
        requests()
    before, end = peak_memory(), time.monotonic() + seconds
    counts, broken = Counter[tuple[str, str]](), list[str]()
    for number in range(mutations):
        rng = np.random.default_rng([seed, number])
        target = str(rng.choice(list(TARGETS), p=[share for _, _, share in TARGETS.values()]))
        attack, names, _ = TARGETS[target]
        name = pick(rng, names)
        with listening():
            what, outcome = attack(name, rng)
        counts[target, outcome.kind] += 1
        if outcome.kind == BROKEN:
            broken.append(f"{seed}/{number} {target} {name}: {what}: {outcome.why}"[:1000])
        if time.monotonic() > end:
            break
    return Tally(counts, broken, peak_memory() - before)


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def table(tally: Tally) -> str:
    kinds = [kind for kind in (REFUSED, SAME, HONEST, GIVEN_UP, BROKEN) if any(k == kind for _, k in tally.counts)]
    lines = ["| target | mutations | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 2) + "|"]
    for target in TARGETS:
        row = [tally.counts[target, kind] for kind in kinds]
        lines.append(f"| {target} | {sum(row)} | " + " | ".join(map(str, row)) + " |")
    total = [sum(tally.counts[target, kind] for target in TARGETS) for kind in kinds]
    return "\n".join([*lines, f"| all | {sum(total)} | " + " | ".join(map(str, total)) + " |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    begin, cpu = time.monotonic(), time.process_time()
    tally = fuzz(asked.mutations, asked.seed, asked.seconds)
    print(table(tally))
    print(f"\npeak memory: {peak_memory():.0f} MB, of which {tally.peak:.0f} MB since the first mutation")
    print(f"{time.monotonic() - begin:.0f} s, {time.process_time() - cpu:.0f} s of one core")
    for line in tally.broken[:50]:
        print(line)
    return 1 if tally.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
