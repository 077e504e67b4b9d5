"""A thousand malformed replies: none is averaged, each is named in the record and in the log, and the rounds go on."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import Array

from fl_bn.flower import BatchNormStrategy, Rounds
from fl_bn.flower.codec import Header, Payload, from_records, to_records
from fl_bn.methods import METHODS, Method
from fl_bn.training.local import Samples
from tests.federation import random_samples
from tests.in_process import WatchedGrid, arrays_of, client_app, identical
from tests.networks import seeded_network

Rng = np.random.Generator
Metrics = dict[str, object]
NAMES = ("fedavg", "fbn", "hbn", "fedbn")
CLIENTS = 5


@dataclass
class Reply:
    """A reply taken apart, to be spoilt. ``raw``: arrays that are no NumPy arrays."""

    payload: Payload
    header: dict[str, object]
    metrics: Metrics
    raw: dict[tuple[str, str], Array]

    def pick(self, rng: Rng, *endings: str) -> tuple[str, str]:
        """A random tensor (whose name ends so)."""
        found = [(s, n) for s, arrays in self.payload.items() for n in arrays if n.endswith(endings or "")]
        return found[rng.integers(len(found))]

    def content(self) -> RecordDict:
        content = to_records(self.payload, Header("", "", 0, ""))
        content["header"] = ConfigRecord(self.header)  # type: ignore[arg-type]
        for (section, name), array in self.raw.items():
            content[section][name] = array  # type: ignore[index]
        if self.metrics:
            content["metrics"] = MetricRecord(self.metrics)  # type: ignore[arg-type]
        return content


def taken_apart(message: Message) -> Reply:
    payload, header = from_records(message.content)
    own = {s: {n: a.copy() for n, a in arrays.items()} for s, arrays in payload.items()}
    return Reply(own, dict(asdict(header)), dict(message.content.metric_records["metrics"]), {})


Spoil = Callable[[Reply, Rng], str]  # spoils the reply and returns what the refusal must begin with


def value(*values: float, ending: tuple[str, ...] = ("weight", "bias", "mean", "var")) -> Spoil:
    def spoil(reply: Reply, rng: Rng) -> str:
        section, name = reply.pick(rng, *ending)
        reply.payload[section][name].reshape(-1)[rng.integers(reply.payload[section][name].size)] = rng.choice(values)
        return f"{section}/{name}: "

    return spoil


def array(change: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    def spoil(reply: Reply, rng: Rng) -> str:
        section, name = reply.pick(rng)
        reply.payload[section][name] = change(reply.payload[section][name])
        return f"{section}/{name}: expected "

    return spoil


def missing_tensor(reply: Reply, rng: Rng) -> str:
    section, name = reply.pick(rng)
    del reply.payload[section][name]
    return f"{section}/{name}: missing"


def missing_section(reply: Reply, rng: Rng) -> str:
    section, _ = reply.pick(rng)
    del reply.payload[section]
    return f"{section}: missing"


def extra_tensor(reply: Reply, rng: Rng) -> str:
    section, _ = reply.pick(rng)
    reply.payload[section]["1.num_batches_tracked"] = np.array(7)
    return f"{section}/1.num_batches_tracked: extra"


def extra_section(reply: Reply, rng: Rng) -> str:
    section = ["local", "gradients", "momentum"][rng.integers(3)]
    reply.payload[section] = {"0.weight": np.zeros(2, np.float32)}
    return f"{section}: extra"


def foreign_header(field: str, *others: object) -> Spoil:
    def spoil(reply: Reply, rng: Rng) -> str:
        reply.header[field] = others[rng.integers(len(others))]
        return f"header/{field}: expected "

    return spoil


def cut_header(reply: Reply, rng: Rng) -> str:
    field = list(reply.header)[rng.integers(len(reply.header))]
    del reply.header[field]
    return f"header/{field}: expected "


def data(make: Callable[[np.ndarray, Rng], bytes], stype: str = "numpy.ndarray") -> Spoil:
    def spoil(reply: Reply, rng: Rng) -> str:
        section, name = reply.pick(rng)
        was = reply.payload[section][name]
        reply.raw[section, name] = Array(dtype=str(was.dtype), shape=was.shape, stype=stype, data=make(was, rng))
        return f"{section}/{name}: expected a NumPy array, but its bytes"

    return spoil


def saved(array: np.ndarray, rng: Rng) -> bytes:
    target = io.BytesIO()
    np.save(target, array, allow_pickle=True)
    return target.getvalue()


def archive(array: np.ndarray, rng: Rng) -> bytes:
    target = io.BytesIO()
    np.savez(target, array)
    return target.getvalue()


def metric(key: str, *values: object) -> Spoil:
    """None: absent."""

    def spoil(reply: Reply, rng: Rng) -> str:
        new = values[rng.integers(len(values))]
        reply.metrics = {k: v for k, v in reply.metrics.items() if k != key} | ({} if new is None else {key: new})
        return f"metrics/{key}: "

    return spoil


def no_metrics(reply: Reply, rng: Rng) -> str:
    reply.metrics = {}
    return "metrics: missing"


MALFORMED: dict[str, Spoil] = {
    "NaN": value(np.nan),
    "infinite": value(np.inf, -np.inf),
    "negative variance": value(-1e-6, -3.0, ending=("var",)),
    "negative count": value(-1, ending=("count",)),
    "missing tensor": missing_tensor,
    "missing section": missing_section,
    "extra tensor": extra_tensor,
    "extra section": extra_section,
    "one axis more": array(lambda a: a[None]),
    "one element more": array(lambda a: np.append(a, a.reshape(-1)[:1])),
    "nothing of it": array(lambda a: a[:0]),
    "double": array(lambda a: a.astype("float16" if a.dtype == np.float64 else "float64")),
    "complex": array(lambda a: a.astype("complex64")),
    "text": array(lambda a: a.astype("U8")),
    "big-endian": array(lambda a: a.astype(a.dtype.newbyteorder(">"))),
    "of another method": foreign_header("method", "fixbn", ""),
    "of another phase": foreign_header("phase", "frozen", "measure"),
    "of another round": foreign_header("round", 0, -1, 10_000),
    "of another model": foreign_header("signature", "0" * 16),
    "of another format": foreign_header("format", "fl-bn/0", "numpy"),
    "header of wrong type": foreign_header("round", 1.0, "1", b"1", True),
    "header cut short": cut_header,
    "truncated bytes": data(lambda a, rng: saved(a, rng)[: -rng.integers(1, a.nbytes + 1)]),
    "noise": data(lambda a, rng: rng.bytes(200)),
    "no bytes": data(lambda a, rng: b""),
    "archive": data(archive),
    "half an archive": data(lambda a, rng: archive(a, rng)[: rng.integers(4, 60)]),
    "pickled objects": data(lambda a, rng: saved(np.array([{"a": 1}] * len(a), dtype=object), rng)),
    "pickle": data(lambda a, rng: b"\x80\x04" + rng.bytes(30)),
    "other serialisation": data(saved, stype="pickle"),
    "samples": metric("samples", -1, None, 2.5, [3], 0, float("nan")),
    "steps": metric("steps", -1, None, 2.5, [3], 0, float("nan")),
    "drift-layer": metric("drift-layer", float("nan"), -1, 0.5, [0]),
    "no metrics": no_metrics,
}


def malformed(kind: str, honest: Message, instruction: Message, rng: Rng) -> tuple[Message, str]:
    """What a client answers to ``instruction`` in place of ``honest``, and the beginning of the reason for its refusal."""
    if kind == "error":
        return Message(Error(2, "ValueError: out of memory"), reply_to=instruction), "error: code 2: ValueError: out of memory"
    if kind == "empty":
        return Message(RecordDict(), reply_to=instruction), "header: expected a record 'header'"
    reply = taken_apart(honest)
    begins = MALFORMED[kind](reply, rng)
    return Message(reply.content(), reply_to=instruction), begins


def kinds_for(name: str) -> list[str]:
    """The kinds that ``name``'s replies can have: without statistics there is no variance to be negative."""
    lacks = {"fedavg": {"negative count"}, "fedbn": {"negative count", "negative variance"}}.get(name, set())
    return [kind for kind in [*MALFORMED, "error", "empty"] if kind not in lacks]


class Harness:
    """Two servers of one population: ``strategy`` is told what clients answer, ``alone`` hears one honest reply of them."""

    def __init__(self, method: Method, clients: list[Samples]) -> None:
        rounds = Rounds(len(clients), min_replies=0.2, wait=0.0)
        self.strategy = BatchNormStrategy(seeded_network("cnn"), method, rounds)
        self.alone = BatchNormStrategy(seeded_network("cnn"), method, rounds)
        self.grid = WatchedGrid(client_app(method, clients), len(clients))
        self.arrays = self.strategy.shared.arrays()

    def instructions(self, round: int) -> list[Message]:
        list(self.alone.configure_train(round, self.arrays, ConfigRecord(), self.grid))
        return list(self.strategy.configure_train(round, self.arrays, ConfigRecord(), self.grid))

    def answer(self, instruction: Message) -> Message:
        (reply,) = self.grid.send_and_receive([instruction])
        return reply


@pytest.fixture
def clients() -> list[Samples]:
    return [random_samples(6, seed=i) for i in range(CLIENTS)]


@pytest.mark.parametrize("name", NAMES)
def test_a_thousand_malformed_replies(name: str, clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng([20, NAMES.index(name)])
    harness, kinds, used = Harness(METHODS[name](), clients), kinds_for(name), 0
    for round in range(1, 64):  # 63 rounds, 4 malformed replies each, 4 methods: 1,008
        log.clear()
        messages = harness.instructions(round)
        honest = int(rng.integers(CLIENTS))
        good = harness.answer(messages[honest])
        replies, expected = {honest: good}, {}
        for client in set(range(CLIENTS)) - {honest}:
            replies[client], expected[client] = malformed(kinds[used % len(kinds)], good, messages[client], rng)
            used += 1
        order = rng.permutation(CLIENTS)

        after, metrics = harness.strategy.aggregate_train(round, [replies[int(i)] for i in order])

        alone, _ = harness.alone.aggregate_train(round, [good])
        assert after is not None
        assert alone is not None
        assert metrics is not None
        assert identical(arrays_of(after), arrays_of(alone))
        assert not identical(arrays_of(after), arrays_of(harness.arrays))
        record = harness.strategy.record
        assert record.aggregated
        assert [c.client for c in record.accepted] == [honest]
        for client in record.clients:
            if client.client != honest:
                assert client.refused.startswith(expected[client.client])
                assert f"round {round}: client {client.client}'s reply is not used: {expected[client.client]}" in log.text
        harness.arrays = after
    assert used == 252
    assert used > 6 * len(kinds)  # each kind in several places


@pytest.mark.parametrize("name", NAMES)
def test_an_honest_reply_in_the_same_harness_is_aggregated(name: str, clients: list[Samples]) -> None:
    """Positive control: taken apart and put together again without being spoilt, replies count and change the result."""
    harness = Harness(METHODS[name](), clients)
    messages = harness.instructions(1)
    good = harness.answer(messages[0])
    rebuilt = []
    for message in messages[1:]:
        reply = taken_apart(harness.answer(message))
        rebuilt.append(Message(reply.content(), reply_to=message))
    after, _ = harness.strategy.aggregate_train(1, [good, *rebuilt])
    alone, _ = harness.alone.aggregate_train(1, [good])
    assert after is not None
    assert alone is not None
    assert len(harness.strategy.record.accepted) == CLIENTS
    moved = [k for k in after if not np.array_equal(after[k].numpy(), alone[k].numpy())]
    assert moved == list(after)


def test_only_malformed_replies_fail_the_round_and_change_nothing(clients: list[Samples]) -> None:
    harness = Harness(METHODS["fbn"](), clients)
    messages = harness.instructions(1)
    good = harness.answer(messages[0])
    rng = np.random.default_rng(0)
    bad = [malformed(kind, good, message, rng)[0] for kind, message in zip(kinds_for("fbn"), messages, strict=False)]
    assert harness.strategy.aggregate_train(1, bad) == (None, None)
    assert identical(arrays_of(harness.strategy.shared.arrays()), arrays_of(harness.arrays))
    assert not harness.strategy.record.aggregated


def test_strangers_and_second_replies_are_ignored(clients: list[Samples]) -> None:
    harness = Harness(METHODS["fbn"](), clients)
    messages = harness.instructions(1)
    replies = [harness.answer(message) for message in messages]
    expected, _ = harness.alone.aggregate_train(1, replies)
    again = taken_apart(replies[0])
    again.payload["weights"]["9.bias"] += 1
    second = Message(again.content(), reply_to=messages[0])
    stranger = Message(again.content(), reply_to=messages[0])
    stranger.metadata.__dict__["_src_node_id"] = 999
    after, _ = harness.strategy.aggregate_train(1, [stranger, *replies, second])
    assert expected is not None
    assert after is not None
    assert identical(arrays_of(after), arrays_of(expected))
    changed, _ = harness.alone.aggregate_train(1, [second, *replies[1:]])  # control: the first one counts
    assert changed is not None
    assert not identical(arrays_of(changed), arrays_of(expected))


def test_a_missing_reply_is_named(clients: list[Samples], log: pytest.LogCaptureFixture) -> None:
    harness = Harness(METHODS["fedavg"](), clients)
    messages = harness.instructions(1)
    harness.strategy.aggregate_train(1, [harness.answer(messages[2])])
    assert "round 1: client 4's reply is not used: no reply before the deadline" in log.text
    assert [c.refused for c in harness.strategy.record.clients if c.client != 2] == ["no reply before the deadline"] * 4


def test_nothing_a_reply_brings_is_unpickled(clients: list[Samples]) -> None:
    """An object array would run code when unpickled: here it would end the test."""
    harness = Harness(METHODS["fedbn"](), clients)
    (message, *_) = harness.instructions(1)
    reply = taken_apart(harness.answer(message))
    target = io.BytesIO()
    np.save(target, np.array([Bomb()], dtype=object), allow_pickle=True)
    reply.raw["weights", "9.bias"] = Array(dtype="float32", shape=(4,), stype="numpy.ndarray", data=target.getvalue())
    harness.strategy.aggregate_train(1, [Message(reply.content(), reply_to=message)])
    assert "weights/9.bias" in harness.strategy.record.clients[0].refused
    with pytest.raises(AssertionError, match="unpickled"):
        np.load(io.BytesIO(target.getvalue()), allow_pickle=True)  # control: it is a bomb


def explode() -> None:
    raise AssertionError("unpickled")


class Bomb:
    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return explode, ()
