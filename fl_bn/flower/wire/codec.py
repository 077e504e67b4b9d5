"""Convert named arrays to Flower's messages and back.

Other code uses ``{section: {name: array}}``. In a message each section is an ``ArrayRecord`` with the
arrays by name, and a record ``header`` says what the message is for. ``NumPyClient`` needs lists of
arrays without names: ``flatten`` makes one, with the names as JSON, and ``unflatten`` reads it. At the
server, ``Reading`` converts a round's replies to checked ``Reply`` objects.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fl_bn.federation.aggregation import dtype_name
from fl_bn.federation.replies import Expected
from fl_bn.federation.shared_model import SharedModel
from fl_bn.federation.values import Payload, Reply, to_numpy, views
from fl_bn.flower.compat import fill
from fl_bn.flower.population import Client
from fl_bn.flower.wire.messages import HEADER, OURS, our_records, their_records
from fl_bn.methods import Phase
from fl_bn.support.wire import Absent, WireError, excerpt, reason

NUMPY = "numpy.ndarray"  # Flower's name for its format of arrays
LONGEST_HEAD = 4096  # the most bytes of an array's head, before its values
HINT = "different model, method or version of fl-bn on the two sides, or another option of the method"


@dataclass(frozen=True)
class Header:
    """Describe what the arrays of a message are for. A reply repeats the header of its instruction.

    Attributes:
        round: the round's number. 0: before round 1.
        signature: a hash of the model's tensors and the method.
    """

    method: str
    phase: str
    round: int
    signature: str

    def check(self, other: Header, why: Callable[[], str] = lambda: HINT) -> None:
        """Raise ``WireError`` if a field of ``other`` differs. ``why`` explains another signature."""
        for key, expected in vars(self).items():
            if (actual := getattr(other, key)) != expected:
                raise WireError("header", key, f"expected {expected!r}, but got {actual!r}" + (f": {why()}" if key == "signature" else ""))


def header_for(shared: SharedModel, round: int, phase: Phase) -> Header:
    """Return the header of a message in ``round``, with the method and signature of ``shared``."""
    return Header(shared.method.name, phase.value, round, shared.signature)


class LazyArray(Array):
    """Hold an array that changes no more, and encode it only when its bytes are read: not in one process."""

    array: np.ndarray

    def __init__(self, array: np.ndarray) -> None:
        view = array.view()
        view.flags.writeable = False
        self.__dict__.update(array=view, dtype=dtype_name(array.dtype), shape=array.shape, stype=NUMPY)  # Flower's setters are slow

    @cached_property
    def data(self) -> bytes:  # type: ignore[override]
        """Return the array's bytes in NumPy's .npy format."""
        return Array(np.asarray(self.array, order="C")).data

    def numpy(self) -> np.ndarray:
        """Return the array itself, read-only."""
        return self.array

    def __reduce__(self) -> tuple[Callable[[np.ndarray], LazyArray], tuple[np.ndarray]]:
        return lazily, (self.array,)


LazyArray.__qualname__ = Array.__qualname__  # Flower writes this name into messages as the object's type


def lazily(array: np.ndarray) -> LazyArray:
    """Return ``array`` as a ``LazyArray``. Pickle calls this function by its name."""
    return LazyArray(array)


def to_record(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    """Return a record of arrays without copying them."""
    record = ArrayRecord()  # given to the constructor, Flower would copy the arrays and encode them
    fill(record, {name: LazyArray(array) for name, array in arrays.items()})
    return record


def to_records(payload: Payload, header: Header) -> RecordDict:
    """Return a message's content: the header, and a record of arrays per section."""
    content = RecordDict({HEADER.name: ConfigRecord({**vars(header)})})
    for section, arrays in payload.items():
        content[OURS + section] = to_record(arrays)
    return content


def from_records(content: RecordDict) -> tuple[Payload, Header]:
    """Return payload and header of a message, or raise ``WireError`` if one of them cannot be read."""
    header = header_of(content)
    return payload_of(content), header


def payload_of(content: RecordDict) -> Payload:
    """Return fl-bn's arrays in a message, by section and name, or raise ``WireError``."""
    return {section: arrays_in(record, section) for section, record in our_records(content, ArrayRecord).items()}


def arrays_in(record: ArrayRecord, section: str) -> dict[str, np.ndarray]:
    """Return the arrays of one ``section``, by name, or raise ``WireError``."""
    return {name: decoded(array, section, name) for name, array in record.items()}


def header_of(content: RecordDict) -> Header:
    """Return the header of a message, or raise ``WireError`` if a field is not as expected."""
    return Header(**HEADER.of(content))


DTYPES = frozenset(map(np.dtype, "?bBhHiIqQefd"))
"""The dtypes that a received array may have, little-endian."""


def array_from(data: bytes, section: str, name: str = "") -> np.ndarray:
    """Decode an array in .npy format, read-only in the memory of ``data``, or raise ``WireError``."""
    try:
        shape, fortran, dtype, begin = _head(data[: 10 + int.from_bytes(data[8:10], "little")])
        values = np.frombuffer(data, dtype, offset=begin) if len(data) > begin else np.empty(0, dtype)
        return values.reshape(shape, order="F" if fortran else "C")
    # for received bytes NumPy may raise anything that its parsers raise: TokenError, SyntaxError, OverflowError ...
    except Exception as error:
        raise WireError(section, name, f"expected a NumPy array, but its bytes cannot be read: {reason(str(error))}") from error


@lru_cache(maxsize=1024)
def _head(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read shape, order, dtype and the head's bytes of an array in version 1.0 of NumPy's format."""
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=LONGEST_HEAD)
    sizes = len(shape) <= 16 and all(type(size) is int and size >= 0 for size in shape)  # True is an int, too
    if version != (1, 0) or dtype not in DTYPES or not sizes:
        wanted = f"version (1, 0) of NumPy's .npy format, a dtype of {', '.join(sorted(map(str, DTYPES)))}, and at most 16 axes"
        raise ValueError(f"expected {wanted}, but got version {version}, {dtype} and {len(shape)} axes {excerpt(shape)}")
    return shape, fortran, dtype, stream.tell()


def decoded(array: Array, section: str, name: str = "") -> np.ndarray:
    """Return the values of ``array``, read-only and without a copy, or raise ``WireError``."""
    if isinstance(array, LazyArray):
        return array.array
    return array_from(array.data if array.stype == NUMPY else b"", section, name)


def flatten(payload: Payload) -> tuple[list[np.ndarray], str]:
    """Return the arrays as a list, and their layout as JSON: ``[[section, [name, ...]], ...]``."""
    layout = [[section, list(arrays)] for section, arrays in payload.items()]
    return [array for arrays in payload.values() for array in arrays.values()], json.dumps(layout)


def unflatten(arrays: list[np.ndarray], layout: str) -> Payload:
    """Invert ``flatten``."""
    remaining = iter(arrays)
    return {section: {name: next(remaining) for name in names} for section, names in json.loads(layout)}


def arrays_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a record of ``tensors``."""
    return to_record(to_numpy(tensors))


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors in a record, by name."""
    return views({name: array.numpy() for name, array in record.items()})  # each array is decoded into memory of its own


# replies at the server


@dataclass(frozen=True)
class Decoded:
    """Hold a reply that is decoded but not yet checked.

    Attributes:
        node: the node that sent it.
        failed: the error that came instead of content, in words.
        header: the header. None if it cannot be read. Then the arrays are not decoded either.
        payload: the readable arrays by section and name. They share the memory of the message.
        metrics: fl-bn's metric record, if there is one.
        problem: the first reason why the header or an array cannot be decoded. It must be copied before
            it is raised: an exception that was raised keeps the reply's arrays in memory.
        own: the user's metric records, by name.
    """

    node: int
    failed: str = ""
    header: Header | None = None
    payload: Payload = field(default_factory=dict)
    metrics: Mapping[str, Any] | None = None
    problem: WireError | None = None
    own: Mapping[str, MetricRecord] = field(default_factory=dict)


def decode(message: Message) -> Decoded:
    """Decode a reply. An error is stored in the result, and never raised."""
    node = message.metadata.src_node_id
    if message.has_error():
        return Decoded(node, failed=f"code {message.error.code}: {reason(message.error.reason)}")
    content = message.content
    metrics, own = our_records(content, MetricRecord).get("metrics"), their_records(content, MetricRecord)
    try:
        header = header_of(content)
    except WireError as error:
        return Decoded(node, metrics=metrics, problem=copy(error), own=own)
    payload: Payload = {}
    problem: WireError | None = None
    for section, arrays in our_records(content, ArrayRecord).items():
        payload[section] = {}
        for name, array in arrays.items():
            try:
                payload[section][name] = decoded(array, section, name)
            except WireError as error:
                problem = problem or copy(error)
    return Decoded(node, "", header, payload, metrics, problem, own)


class Reading:
    """Read a round's replies, one by one.

    A client is refused if its reply is an error, is late, is missing or is invalid, or if it has no
    samples (it took no part). Each client's first reply counts.

    Attributes:
        parts: the valid replies, by client index. The caller may take them out.
        own: the users' own metric records, by client index.
        refused: why clients are refused, by index.
        wrong: the refused clients whose reply breaks the protocol, which are faulty or Byzantine.

    Args:
        header: the header of the instruction, which a reply must repeat.
        expected: the tensors and numbers of a valid reply. None: replies have only records of the user's.
    """

    def __init__(self, cohort: Sequence[Client], header: Header | None = None, expected: Expected | None = None) -> None:
        self._cohort, self._header, self._expected = cohort, header, expected
        self._by_node, self.parts = {client.node: client for client in cohort}, dict[int, Reply]()
        self.own, self.refused, self.wrong = dict[int, Mapping[str, MetricRecord]](), dict[int, str](), set[int]()

    def read(self, reply: Decoded) -> int | None:
        """Check one reply, and return its client's index. None: not in the cohort, or not the first."""
        client = self._by_node.get(reply.node)
        if client is None or client.index in self.own:
            return None
        self.own[client.index] = reply.own
        try:
            if reply.failed:
                raise Absent("error", "", reply.failed)
            if self._expected is not None:
                self.parts[client.index] = self._part(reply, client.index, self._expected)
        except WireError as error:
            self.refused[client.index] = str(error)
            self.wrong |= set() if isinstance(error, Absent) else {client.index}
        return client.index

    def _part(self, reply: Decoded, client: int, expected: Expected) -> Reply:
        if reply.problem is not None:
            raise copy(reply.problem)
        assert reply.header is not None
        assert self._header is not None
        self._header.check(reply.header)
        values = expected.numbers(client, reply.metrics)
        return expected.reply(client, values, reply.payload)

    def end(self) -> None:
        """Refuse the clients that have not replied, after the last reply."""
        self.refused |= {c.index: "no reply before the deadline" for c in self._cohort if c.index not in self.own}

    def all(self, replies: Iterable[Decoded]) -> tuple[list[Reply], dict[int, str], set[int]]:
        """Return the valid replies in client order, why clients are refused, and the ``wrong`` ones."""
        for reply in replies:
            self.read(reply)
            del reply
        self.end()
        return [self.parts[client] for client in sorted(self.parts)], self.refused, self.wrong
