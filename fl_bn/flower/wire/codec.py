"""Convert fl-bn's records to Flower's and back: arrays by name, the header, and the run's id.

Other code uses ``{section: {name: array}}``. In a message each section is an
``ArrayRecord``, and a record ``header`` says what the message is for.
"""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fl_bn.federation import fields
from fl_bn.federation.aggregation import dtype_name
from fl_bn.federation.fields import Values, one_of, text, whole
from fl_bn.federation.shared_model import SharedModel
from fl_bn.federation.values import Payload, to_numpy, views
from fl_bn.methods import Phase
from fl_bn.support.wire import WireError, excerpt, reason

NUMPY = "numpy.ndarray"  # Flower's name for its format of arrays
LONGEST_HEAD = 4096  # the most bytes of an array's head, before its values
HINT = "different model, method or version of fl-bn on the two sides, or another option of the method"
R = TypeVar("R", ArrayRecord, ConfigRecord, MetricRecord)
OURS = "fl-bn/"
"""The prefix of the names of fl-bn's records, in messages and in Flower's ``context.state``."""


def records_of(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return all records of the type ``kind`` (such as ``ArrayRecord``), by name.

    Flower's own properties create reference cycles, which delay the freeing of a
    reply's arrays.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def our_records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return fl-bn's records of the type ``kind`` by name, without the prefix ``OURS``."""
    return {name.removeprefix(OURS): record for name, record in records_of(content, kind).items() if name.startswith(OURS)}


def their_records(content: RecordDict, kind: type[R]) -> dict[str, R]:
    """Return the user's records of the type ``kind``, by name."""
    return {name: record for name, record in records_of(content, kind).items() if not name.startswith(OURS)}


def config_of(content: RecordDict, name: str = f"{OURS}config") -> dict[str, Any]:
    """Return the fields of a message's config record, by default fl-bn's; empty if there is none."""
    return dict(records_of(content, ConfigRecord).get(name, ConfigRecord()))


def add_to_config(content: RecordDict, values: Mapping[str, Any]) -> None:
    """Put ``values`` into fl-bn's config of a message, but not of others with the same config."""
    content[f"{OURS}config"] = ConfigRecord({**config_of(content), **values})


@dataclass(frozen=True)
class Form(fields.Form):
    """Declare a message's record, find it by its name, and read it."""

    prefix: str = OURS

    @property
    def name(self) -> str:
        """Return the record's name in a message."""
        return self.prefix + self.record

    def of(self, content: RecordDict) -> Values:
        """Read this record. ``WireError``: it is missing, or a field is not as declared."""
        record: Any = content.get(self.name)
        return self.read(None if isinstance(record, ArrayRecord) else record)


HEADER = Form(
    "header",
    {
        "method": text(64),
        "phase": one_of(*(phase.value for phase in Phase)),
        "round": whole(),
        "signature": text(64),
    },
)


@dataclass(frozen=True)
class Header:
    """Describe a message's arrays. A reply repeats the header, whose ``signature`` is of model and method.

    ``round`` 0: before round 1.
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
    """Return the header of a message in ``round``, by the method and model of ``shared``."""
    return Header(shared.method.name, phase.value, round, shared.signature)


class LazyArray(Array):
    """Hold an array that never changes, encoded only when its bytes are read."""

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
    record = ArrayRecord()  # Flower's own methods copy the arrays, encode them, and check each one, which is slow
    vars(record).get("_data", record).update({name: LazyArray(array) for name, array in arrays.items()})
    return record


def to_records(payload: Payload, header: Header) -> RecordDict:
    """Return a message's content: the header, and a record of arrays per section."""
    content = RecordDict({HEADER.name: ConfigRecord({**vars(header)})})
    for section, arrays in payload.items():
        content[OURS + section] = to_record(arrays)
    return content


def payload_of(content: RecordDict) -> Payload:
    """Return fl-bn's arrays in a message, by section and name, or raise ``WireError``."""
    return {section: arrays_in(record, section) for section, record in our_records(content, ArrayRecord).items()}


def arrays_in(record: ArrayRecord, section: str) -> dict[str, np.ndarray]:
    """Return the arrays of one ``section``, by name, or raise ``WireError``."""
    return {name: decoded(array, section, name) for name, array in record.items()}


def header_of(content: RecordDict) -> Header:
    """Return a message's header. ``WireError``: a field is not as expected."""
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
    """Read shape, order, dtype and the head's length of an array in .npy format 1.0."""
    stream = io.BytesIO(head)
    version = np.lib.format.read_magic(stream)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=LONGEST_HEAD)
    sizes = len(shape) <= 16 and all(type(size) is int and size >= 0 for size in shape)  # True is an int, too
    if version != (1, 0) or dtype not in DTYPES or not sizes:
        wanted = f"version (1, 0) of NumPy's .npy format, a dtype of {', '.join(sorted(map(str, DTYPES)))}, and at most 16 axes"
        raise ValueError(f"expected {wanted}, but got version {version}, {dtype} and {len(shape)} axes {excerpt(shape)}")
    return shape, fortran, dtype, stream.tell()


def decoded(array: Array, section: str, name: str = "") -> np.ndarray:
    """Return the values of ``array``, read-only and uncopied, or raise ``WireError``."""
    if isinstance(array, LazyArray):
        return array.array
    return array_from(array.data if array.stype == NUMPY else b"", section, name)


def arrays_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return a record of ``tensors``."""
    return to_record(to_numpy(tensors))


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors in a record, by name."""
    return views({name: array.numpy() for name, array in record.items()})  # each array is decoded into memory of its own


# the run

FOLDER = r"(?![.~ -])[^/\\\x00-\x1f\x7f]{1,255}"
RESUME = re.compile(r"([0-9a-f]{8}):([0-9]{1,15})")
RESUMES = rf"(?:{RESUME.pattern}(?:,{RESUME.pattern})*)?"
FIRST = "0"
NAME = re.compile(rf"{FOLDER}/state-[0-9a-f]{{8}}")


@dataclass(frozen=True)
class RunId:
    """Identify a run, and list how often it was resumed and from which rounds.

    Attributes:
        run: the run's unique name FOLDER/state-XXXXXXXX, with eight random
            hexadecimal digits.
        resumes: a random token, and the round of the checkpoint, for each resume in
            order of time.
        durable: the earliest round to which a later resume can go back. A client
            needs only the newest of its states up to this round.
    """

    run: str
    resumes: tuple[tuple[str, int], ...] = ()
    durable: int = 0

    @classmethod
    def new(cls, name: str) -> RunId:
        """Return the id of a new run in the folder ``name``, else ``run`` if that is no name."""
        run = f"{name}/state-{secrets.token_hex(4)}"
        return cls(run if NAME.fullmatch(run) else f"run/state-{secrets.token_hex(4)}")

    @property
    def attempt(self) -> str:
        """Return the last resume's token, which clients store with their states, else ``0``."""
        return self.resumes[-1][0] if self.resumes else FIRST

    @property
    def attempts(self) -> list[str]:
        """Return ``0``, the token of the start, and those of all resumes in order of time."""
        return [FIRST, *(token for token, _ in self.resumes)]

    def resumed(self, round: int) -> RunId:
        """Return the id of this run when it is resumed after ``round``.

        Every resume gets a random token, so clients ignore the states of another
        resume from that checkpoint.
        """
        return replace(self, resumes=(*self.resumes, (secrets.token_hex(4), round)))

    def counts(self, round: int, attempt: str) -> bool:
        """Return whether a state of ``round``, stored after the resume ``attempt``, counts."""
        if attempt not in self.attempts:
            return False
        return all(round <= resumed for _, resumed in self.resumes[self.attempts.index(attempt) :])

    def to_config(self) -> dict[str, str | int]:
        """Return this id as fields of a config, without empty ones, on which Flower fails."""
        resumes = ",".join(f"{token}:{round}" for token, round in self.resumes)
        return {"run": self.run, **({"resumes": resumes} if resumes else {}), "durable": self.durable}

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RunId:
        """Read the id from a checked config. Its ``run`` is empty if the config names none."""
        resumes = tuple((token, int(round)) for token, round in RESUME.findall(config.get("resumes", "")))
        return cls(config.get("run", ""), resumes, config.get("durable", 0))
