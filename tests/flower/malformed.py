"""Make malformed replies of every kind, each with the text with which the server's refusal must begin."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from flwr.app import Array, ConfigRecord, Error, Message, MetricRecord, RecordDict

from tests.flower.inside import Header, Payload, from_records, to_records

Rng = np.random.Generator
Metrics = dict[str, object]


@dataclass
class Reply:
    """Hold the parts of a reply, so that a test can change them.

    ``raw`` maps a section and a name to an array that is not a NumPy array.
    """

    payload: Payload
    header: dict[str, object]
    metrics: Metrics
    raw: dict[tuple[str, str], Array]

    def pick(self, rng: Rng, *endings: str) -> tuple[str, str]:
        """Return the section and name of a random tensor; if ``endings`` are given, of one whose name has such an ending."""
        found = [(s, n) for s, arrays in self.payload.items() for n in arrays if n.endswith(endings or "")]
        return found[rng.integers(len(found))]

    def content(self) -> RecordDict:
        content = to_records(self.payload, Header("", "", 0, ""))
        content["fl-bn/header"] = ConfigRecord(self.header)  # type: ignore[arg-type]
        for (section, name), array in self.raw.items():
            content[f"fl-bn/{section}"][name] = array  # type: ignore[index]
        if self.metrics:
            content["fl-bn/metrics"] = MetricRecord(self.metrics)  # type: ignore[arg-type]
        return content


def taken_apart(message: Message) -> Reply:
    payload, header = from_records(message.content)
    own = {s: {n: a.copy() for n, a in arrays.items()} for s, arrays in payload.items()}
    return Reply(own, dict(asdict(header)), dict(message.content.metric_records["fl-bn/metrics"]), {})


Spoil = Callable[[Reply, Rng], str]  # spoils the reply and returns what the refusal must begin with


def value(*values: float, ending: tuple[str, ...] = ("weight", "bias", "mean", "var")) -> Spoil:
    def spoil(reply: Reply, rng: Rng) -> str:
        section, name = reply.pick(rng, *ending)
        reply.payload[section][name].reshape(-1)[rng.integers(reply.payload[section][name].size)] = rng.choice(values)
        return f"{section}/{name}: "

    return spoil


def array(*changes: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    def spoil(reply: Reply, rng: Rng) -> str:
        section, name = reply.pick(rng)
        reply.payload[section][name] = changes[rng.integers(len(changes))](reply.payload[section][name])
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


def saved(array: np.ndarray) -> bytes:
    target = io.BytesIO()
    np.save(target, array, allow_pickle=True)
    return target.getvalue()


def archive(array: np.ndarray) -> bytes:
    target = io.BytesIO()
    np.savez(target, array)
    return target.getvalue()


UNREADABLE: list[Callable[[np.ndarray, Rng], bytes]] = [
    lambda a, rng: saved(a)[: -rng.integers(1, a.nbytes + 1)],  # truncated
    lambda a, rng: rng.bytes(200),
    lambda a, rng: b"",
    lambda a, rng: archive(a),
    lambda a, rng: archive(a)[: rng.integers(4, 60)],
    lambda a, rng: saved(np.array([{"a": 1}] * len(a), dtype=object)),  # pickled objects
    lambda a, rng: b"\x80\x04" + rng.bytes(30),  # a pickle
]


def unreadable(reply: Reply, rng: Rng) -> str:
    """Replace an array's bytes by others, or what they are said to be."""
    section, name = reply.pick(rng)
    was, kind = reply.payload[section][name], rng.integers(len(UNREADABLE) + 1)
    stype, data = ("pickle", saved(was)) if kind == len(UNREADABLE) else ("numpy.ndarray", UNREADABLE[kind](was, rng))
    reply.raw[section, name] = Array(dtype=str(was.dtype), shape=was.shape, stype=stype, data=data)
    return f"{section}/{name}: expected a NumPy array, but its bytes"


def metric(key: str, *values: object) -> Spoil:
    """Return a function that gives the metric ``key`` one of ``values``; None removes the metric."""

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
    "another shape": array(lambda a: a[None], lambda a: np.append(a, a.reshape(-1)[:1]), lambda a: a[:0]),
    "another type": array(
        lambda a: a.astype("float16" if a.dtype == np.float64 else "float64"),
        lambda a: a.astype("complex64"),
        lambda a: a.astype("U8"),
        lambda a: a.astype(a.dtype.newbyteorder(">")),
    ),
    "of another method": foreign_header("method", "fixbn", ""),
    "of another phase": foreign_header("phase", "frozen", "measure"),
    "of another round": foreign_header("round", 0, -1, 10_000),
    "of another model": foreign_header("signature", "0" * 16),
    "of another format": foreign_header("format", "fl-bn/0", "numpy"),
    "of another payload": foreign_header("payload", "bfloat16", "float64", 2),
    "header of wrong type": foreign_header("round", 1.0, "1", b"1", True),
    "header cut short": cut_header,
    "unreadable": unreadable,
    "unreadable, too": unreadable,
    "samples": metric("samples", -1, None, 2.5, [3], 0, float("nan")),
    "steps": metric("steps", -1, None, 2.5, [3], 0, float("nan")),
    "drift-layer": metric("drift-layer", float("nan"), -1, 0.5, [0]),
    "no metrics": no_metrics,
}


def malformed(kind: str, honest: Message, instruction: Message, rng: Rng) -> tuple[Message, str]:
    """Make a malformed reply to ``instruction`` from the honest one.

    Returns:
        The reply, and the text with which the reason for its refusal must begin.
    """
    if kind == "error":
        return Message(Error(2, "ValueError: out of memory"), reply_to=instruction), "error: code 2: ValueError: out of memory"
    if kind == "empty":
        return Message(RecordDict(), reply_to=instruction), "header: expected a record 'fl-bn/header'"
    reply = taken_apart(honest)
    begins = MALFORMED[kind](reply, rng)
    return Message(reply.content(), reply_to=instruction), begins


def kinds_for(name: str) -> list[str]:
    """Return the kinds of malformed replies that are possible for the method ``name``.

    For example, clients of FedBN send no statistics, so no variance of theirs can be negative.
    """
    lacks = {"fedavg": {"negative count"}, "fedbn": {"negative count", "negative variance"}}.get(name, set())
    return [kind for kind in [*MALFORMED, "error", "empty"] if kind not in lacks]
