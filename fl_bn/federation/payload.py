"""Convert payloads (named tensors in sections) between torch tensors and NumPy arrays."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fl_bn.bn.moments import Moments
from fl_bn.support.wire import WireError

Named = Mapping[str, Tensor]
Sections = dict[str, dict[str, Tensor]]
Payload = dict[str, dict[str, np.ndarray]]

with warnings.catch_warnings():  # PyTorch warns once in a process that it has no read-only tensors
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(4), np.float32))


def nbytes(payload: Mapping[str, Mapping[str, Tensor | np.ndarray]]) -> int:
    """Return the number of bytes of all tensors or arrays, without messages' headers."""
    return sum(int(array.nbytes) for arrays in payload.values() for array in arrays.values())


def section_bytes(payload: Mapping[str, Mapping[str, Tensor | np.ndarray]]) -> dict[str, int]:
    """Return section -> the number of bytes of its tensors."""
    return {section: nbytes({section: tensors}) for section, tensors in payload.items()}


def count_tensors(payload: Mapping[str, Mapping[str, Tensor | np.ndarray]]) -> int:
    """Return the number of tensors in all sections together."""
    return sum(len(arrays) for arrays in payload.values())


def tensor_name(layer: str, key: str) -> str:
    """Return the state_dict name of tensor ``key`` of ``layer``; "" is the model itself."""
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
    """Copy arrays to tensors with their own memory, since received arrays are read-only."""
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def encode_moments(moments: Mapping[str, Moments], dtype: torch.dtype) -> dict[str, Tensor]:
    """Encode a layer's moments on the CPU: ``count`` int64 (1,), ``mean`` and ``var`` (C,) in ``dtype``.

    Count 0 means that the layer did not run.
    """
    tensors: dict[str, Tensor] = {}
    for layer, m in moments.items():
        tensors[tensor_name(layer, "count")] = torch.tensor([m.count])
        tensors |= {tensor_name(layer, key): getattr(m, key).to(dtype).cpu() for key in ("mean", "var")}
    return tensors


def decode_moments(tensors: Named) -> dict[str, Moments]:
    """Return layer -> float64 moments from checked tensors: inverse of ``encode_moments``."""
    layers = [name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] == "count"]

    def of(layer: str, key: str) -> Tensor:
        return tensors[tensor_name(layer, key)]

    return {layer: Moments(int(of(layer, "count")), of(layer, "mean").double(), of(layer, "var").double()) for layer in layers}


def views(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors in the arrays' memory, a part of a message's bytes. Do not change them."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
