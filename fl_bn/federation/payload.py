"""Convert payloads (named tensors in sections) between torch tensors in memory and NumPy arrays in messages.

Weights and gradients may be sent in two bytes per value instead of four. Rounding to ``bfloat16``, which has the range of float32,
changes a value by at most 2^-8 of its absolute value. Rounding to ``float16``, whose largest value is 65504, changes a value by at
most 2^-11 of its absolute value. Below 2^-14, float16 has steps of 2^-24, so the error of such a value is up to 2^-25. All other
tensors are sent exactly: statistics and moments, buffers, and auxiliary tensors (control variates, momentum). NumPy has no bfloat16,
so the bit patterns are sent as uint16. The message's header names the dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.bn.moments import Moments
from fl_bn.methods import Method
from fl_bn.support.names import check_name
from fl_bn.support.wire import WireError

Named = Mapping[str, Tensor]
Sections = dict[str, dict[str, Tensor]]
Payload = dict[str, dict[str, np.ndarray]]
AS_THE_MODEL = "float32"
PAYLOADS = (AS_THE_MODEL, "bfloat16", "float16")
ROUNDED = ("weights", "gradients")
ON_THE_WIRE = {"bfloat16": "uint16", "float16": "float16"}
BYTES = 2
Turn = Callable[[str, str, np.ndarray], np.ndarray]

with warnings.catch_warnings():  # PyTorch warns once in a process that it has no read-only tensors
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(4), np.float32))


def nbytes(payload: Mapping[str, Mapping[str, Tensor | np.ndarray]]) -> int:
    """Return the number of bytes of all tensors or arrays together, without headers of messages."""
    return sum(int(array.nbytes) for arrays in payload.values() for array in arrays.values())


def count_tensors(payload: Mapping[str, Mapping[str, Tensor | np.ndarray]]) -> int:
    """Return the number of tensors in all sections together."""
    return sum(len(arrays) for arrays in payload.values())


def tensor_name(layer: str, key: str) -> str:
    """Return the state_dict name of tensor ``key`` of ``layer``. The layer "" is the model itself."""
    return f"{layer}.{key}" if layer else key


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Convert tensors to NumPy arrays, by the same names.

    Raises:
        WireError: NumPy does not have a tensor's dtype, so the tensor cannot be sent.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        try:
            arrays[name] = (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy(force=True)
        except TypeError as error:
            raise WireError(
                "tensor",
                name,
                f"expected a dtype that NumPy has, but got {tensor.dtype}: keep the model in float32, and set precision to mixed",
            ) from error
    return arrays


def to_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Copy arrays to tensors with memory of their own, since received arrays are read-only."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def encode_moments(moments: Mapping[str, Moments], dtype: torch.dtype) -> dict[str, Tensor]:
    """Encode moments as three tensors per layer, on the CPU.

    For each layer, they are ``count`` int64 (1,), and ``mean`` and ``var`` (C,) in ``dtype``. Count 0 means that the layer
    did not run.
    """
    tensors: dict[str, Tensor] = {}
    for layer, m in moments.items():
        tensors[tensor_name(layer, "count")] = torch.tensor([m.count])
        tensors |= {tensor_name(layer, key): getattr(m, key).to(dtype).cpu() for key in ("mean", "var")}
    return tensors


def decode_moments(tensors: Named) -> dict[str, Moments]:
    """Return layer -> moments in float64 from tensors that passed a ``Schema``. This is the inverse of ``encode_moments``."""
    layers = [name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] == "count"]

    def of(layer: str, key: str) -> Tensor:
        return tensors[tensor_name(layer, key)]

    return {layer: Moments(int(of(layer, "count")), of(layer, "mean").double(), of(layer, "var").double()) for layer in layers}


def views(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors that share the arrays' memory. Do not change them: a received array is a part of its message's bytes."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class Overflow(ValueError):
    """Report a value that is too large for the dtype in which it should be sent."""


@dataclass(frozen=True)
class PayloadDtype:
    """Convert a message's weights and gradients to the dtype in which they are sent, and back.

    Attributes:
        dtype: The name of the dtype in which weights and gradients are sent.
        tensors: Name -> the model's own dtype, of each parameter to convert.
    """

    dtype: str = AS_THE_MODEL
    tensors: Mapping[str, torch.dtype] = field(default_factory=dict)

    @classmethod
    def of(cls, dtype: str, model: nn.Module) -> PayloadDtype:
        """Make the conversion to ``dtype`` for those parameters of ``model`` that have more than two bytes per value."""
        check_name("payload", dtype, PAYLOADS)
        if dtype == AS_THE_MODEL:
            return EXACT
        wide = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False) if p.dtype.itemsize > BYTES}
        return cls(dtype, wide)

    def narrow(self, payload: Payload, overflows: bool = False) -> Payload:
        """Return ``payload`` in the dtype in which it is sent. NaN and Inf, from training that diverged, stay as they are.

        Args:
            payload: The payload in the model's own dtypes.
            overflows: Whether a value that is too large becomes Inf. False: it raises an error.

        Raises:
            Overflow: A finite value is too large, and ``overflows`` is False.
        """
        return payload if self.dtype == AS_THE_MODEL else self._each(payload, partial(self._narrowed, overflows))

    def widen(self, payload: Payload) -> Payload:
        """Return ``payload`` in the model's own dtypes. Names and shapes are not checked: a ``Schema`` does so afterwards.

        Raises:
            WireError: A tensor does not have the dtype in which it should be sent.
        """
        return payload if self.dtype == AS_THE_MODEL else self._each(payload, self._widened)

    def nbytes(self, sections: Mapping[str, Mapping[str, Tensor]]) -> dict[str, int]:
        """Return section -> the bytes of its tensors as they are sent."""
        sizes = {section: nbytes({section: tensors}) for section, tensors in sections.items()}
        for section in ROUNDED if self.tensors else ():
            narrowed = [tensor for name, tensor in sections.get(section, {}).items() if name in self.tensors]
            sizes |= {section: sizes[section] - sum(t.numel() * (t.itemsize - BYTES) for t in narrowed)} if narrowed else {}
        return sizes

    def unmoved(self, name: str, mean: Tensor, sent: Tensor) -> bool:
        """Tell whether ``mean`` is the rounded form of ``sent``: then no client moved this tensor, and its exact values stay valid."""
        return name in self.tensors and torch.equal(mean.to(sent.dtype), sent.to(getattr(torch, self.dtype)).to(sent.dtype))

    def _each(self, payload: Payload, turned: Turn) -> Payload:
        new = dict(payload)
        for section in ROUNDED:
            if section in payload:
                arrays = payload[section].items()
                new[section] = {name: turned(section, name, array) if name in self.tensors else array for name, array in arrays}
        return new

    def _narrowed(self, overflows: bool, section: str, name: str, array: np.ndarray) -> np.ndarray:
        wide = views({name: array})[name]
        narrow = wide.to(getattr(torch, self.dtype))
        if not overflows and (over := int((narrow.isinf() & wide.isfinite()).sum())):
            raise Overflow(
                f"{section}/{name}: {over} of {array.size} values are beyond {torch.finfo(narrow.dtype).max:.6g}, the largest number of "
                f"payload-dtype={self.dtype!r}, so the tensor was not sent: lower the learning rate, or set payload-dtype to bfloat16 or "
                "float32"
            )
        return narrow.view(torch.int16).numpy().view(ON_THE_WIRE[self.dtype])

    def _widened(self, section: str, name: str, array: np.ndarray) -> np.ndarray:
        if str(array.dtype) != (wanted := ON_THE_WIRE[self.dtype]):
            patterns = " (its bit patterns)" if wanted != self.dtype else ""
            raise WireError(section, name, f"expected {self.dtype} as {wanted}{patterns}, but got {array.dtype}")
        bits = views({name: np.ascontiguousarray(array).view(np.int16)})[name]
        return bits.view(getattr(torch, self.dtype)).to(self.tensors[name]).numpy()


EXACT = PayloadDtype()


def check_payload(dtype: str, method: Method) -> None:
    """Check that ``method`` works with a payload of ``dtype``.

    Raises:
        ValueError: ``dtype`` rounds, but the method needs exact weights.
    """
    check_name("payload", dtype, PAYLOADS)
    if dtype != AS_THE_MODEL and method.exchanges:
        raise ValueError(
            f"{method.name}'s step equals that of centralised training only with exact weights: payload-dtype must be {AS_THE_MODEL}, but "
            f"got {dtype!r}"
        )
