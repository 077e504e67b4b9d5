"""Named arrays on the wire: the only place that knows an order.

Domain code sees ``{section: {name: array}}``. On Flower's wire each section is an ``ArrayRecord`` keyed by name, beside a ``header``
that says what the payload is for. ``NumPyClient`` speaks lists: ``flatten`` and ``unflatten`` translate, with the layout as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common import Array
from torch import Tensor, nn

from fl_bn.methods import Method
from fl_bn.moments import Moments
from fl_bn.roles import roles

FORMAT = "fl-bn/1"
Payload = dict[str, dict[str, np.ndarray]]


class WireError(ValueError):
    """A payload is not what this side expects; names the section and the tensor."""

    def __init__(self, section: str, tensor: str, problem: str) -> None:
        self.section, self.tensor, self.problem = section, tensor, problem
        super().__init__(f"{section}/{tensor}: {problem}" if tensor else f"{section}: {problem}")


@dataclass(frozen=True)
class Header:
    """What a payload is for. A reply repeats the header of its instruction."""

    method: str
    phase: str
    round: int
    signature: str
    format: str = FORMAT

    def check(self, other: Header) -> None:
        for key, expected in asdict(self).items():
            if (came := getattr(other, key)) != expected:
                hint = " (different model, method or version of fl-bn on the two sides)" if key in ("signature", "format") else ""
                raise WireError("header", key, f"expected {expected!r}, but got {came!r}{hint}")


def signature(model: nn.Module, method: Method) -> str:
    """A short digest of the method's name and of every tensor's name, role, shape and dtype."""
    role = roles(model)
    parts = [f"{k} {role[k].value} {tuple(t.shape)} {t.dtype}" for k, t in model.state_dict().items()]
    return hashlib.sha256("\n".join([method.name, *parts]).encode()).hexdigest()[:16]


def to_records(payload: Payload, header: Header) -> RecordDict:
    content = RecordDict({"header": ConfigRecord(asdict(header))})
    for section, arrays in payload.items():
        content[section] = ArrayRecord({name: Array(np.asarray(array, order="C")) for name, array in arrays.items()})
    return content


def from_records(content: RecordDict) -> tuple[Payload, Header]:
    """The payload and header of a message.

    Raises:
        WireError: the header or an array cannot be read.
    """
    header = header_of(content)
    payload: Payload = {}
    for section, arrays in content.array_records.items():
        payload[section] = {}
        for name, array in arrays.items():
            payload[section][name] = _decode(section, name, array)
    return payload, header


def header_of(content: RecordDict) -> Header:
    """Raises WireError where there is none, or one of its fields has another type."""
    record = content.config_records.get("header")
    if record is None:
        raise WireError("header", "", f"expected a record 'header' of {FORMAT}, but got records {sorted(content)}")
    expected = {"method": str, "phase": str, "round": int, "signature": str, "format": str}
    for key, kind in expected.items():
        if type(record.get(key)) is not kind:
            raise WireError("header", key, f"expected {kind.__name__}, but got {record.get(key)!r}")
    return Header(**{key: record[key] for key in expected})  # type: ignore[arg-type]


def _decode(section: str, name: str, array: Array) -> np.ndarray:
    try:
        decoded = array.numpy()
    except Exception as error:  # on bytes off the wire np.load raises whatever its parsers do: TokenError, BadZipFile, OverflowError ...
        raise WireError(section, name, f"expected a NumPy array, but its bytes cannot be read: {error}") from error
    if not isinstance(decoded, np.ndarray):  # the bytes of an .npz archive
        raise WireError(section, name, f"expected a NumPy array, but its bytes are a {type(decoded).__name__}")
    return decoded


def flatten(payload: Payload) -> tuple[list[np.ndarray], str]:
    """``(arrays, layout)``: the arrays in the payload's order, and the names in that order as JSON."""
    layout = [[section, list(arrays)] for section, arrays in payload.items()]
    return [array for arrays in payload.values() for array in arrays.values()], json.dumps(layout)


def unflatten(arrays: list[np.ndarray], layout: str) -> Payload:
    """The inverse of ``flatten``.

    Raises:
        WireError: the layout does not describe these arrays.
    """
    try:
        sections = [(str(section), [str(name) for name in names]) for section, names in json.loads(layout)]
    except (ValueError, TypeError) as error:
        raise WireError("layout", "", f"expected JSON [[section, [name, ...]], ...], but got {layout[:80]!r}") from error
    if (expected := sum(len(names) for _, names in sections)) != len(arrays):
        raise WireError("layout", "", f"describes {expected} arrays, but {len(arrays)} came")
    remaining = iter(arrays)
    return {section: {name: next(remaining) for name in names} for section, names in sections}


def nbytes(payload: Payload) -> int:
    """Bytes of the arrays themselves, without Flower's framing."""
    return sum(array.nbytes for arrays in payload.values() for array in arrays.values())


def count_tensors(payload: Payload) -> int:
    return sum(len(arrays) for arrays in payload.values())


def tensor_name(layer: str, key: str) -> str:
    """The state_dict name of tensor ``key`` of ``layer`` ("" is the model itself)."""
    return f"{layer}.{key}" if layer else key


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Raises WireError for a dtype that NumPy, and so the wire, does not have."""
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        try:
            arrays[name] = tensor.detach().cpu().numpy()
        except TypeError as error:
            raise WireError(
                "tensor",
                name,
                f"expected a dtype that NumPy has, but got {tensor.dtype}: keep the model in float32, and set precision to mixed",
            ) from error
    return arrays


def to_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Tensors of their own memory: arrays off the wire are read-only."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def tensors_of(record: ArrayRecord) -> dict[str, Tensor]:
    return to_tensors({name: array.numpy() for name, array in record.items()})


def encode_moments(moments: Mapping[str, Moments], dtype: torch.dtype) -> dict[str, np.ndarray]:
    """Three arrays per layer: ``count`` int64 (1,), ``mean`` and ``var`` (C,) in the model's ``dtype``. Count 0: it did not run."""
    arrays: dict[str, np.ndarray] = {}
    for layer, m in moments.items():
        arrays[tensor_name(layer, "count")] = np.array([m.count], dtype=np.int64)
        arrays |= to_numpy({tensor_name(layer, key): getattr(m, key).to(dtype) for key in ("mean", "var")})
    return arrays


def decode_moments(arrays: Mapping[str, np.ndarray]) -> dict[str, Moments]:
    """The inverse of ``encode_moments``, in float64; the arrays have passed a ``Schema``."""
    layers = [name.rpartition(".")[0] for name in arrays if name.rpartition(".")[2] == "count"]
    tensors = to_tensors(arrays)

    def of(layer: str, key: str) -> Tensor:
        return tensors[tensor_name(layer, key)]

    return {layer: Moments(int(of(layer, "count")), of(layer, "mean").double(), of(layer, "var").double()) for layer in layers}
