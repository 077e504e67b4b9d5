"""Hold the values of a round: named tensors in sections, instruction, state, reply."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fl_bn.bn.moments import Moments
from fl_bn.methods import INPUTS, Phase
from fl_bn.support.wire import WireError

if TYPE_CHECKING:
    from fl_bn.exchange.session import Session
    from fl_bn.federation.aggregation import WeightedSum

Named = Mapping[str, Tensor]
Sections = dict[str, dict[str, Tensor]]
Payload = dict[str, dict[str, np.ndarray]]

with warnings.catch_warnings():  # PyTorch warns once in a process that it has no read-only tensors
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(4), np.float32))


def nbytes(payload: Mapping[str, Mapping[str, Tensor | np.ndarray]]) -> int:
    """Return the bytes of all tensors or arrays, without messages' headers."""
    return sum(int(array.nbytes) for arrays in payload.values() for array in arrays.values())


def section_bytes(payload: Mapping[str, Mapping[str, Tensor | np.ndarray]]) -> dict[str, int]:
    """Return section -> bytes of its tensors."""
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
        WireError: NumPy does not have a tensor's dtype.
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


def encode_moments(layer: str, moments: Moments, dtype: torch.dtype) -> dict[str, Tensor]:
    """Encode a layer's moments: ``count`` int64 (1,), ``mean`` and ``var`` (C,) in ``dtype``.

    Count 0: the layer did not run.
    """
    mean, var = moments.mean.to(dtype).cpu(), moments.var.to(dtype).cpu()
    return {tensor_name(layer, key): t for key, t in (("count", torch.tensor([moments.count])), ("mean", mean), ("var", var))}


def decode_moments(tensors: Named) -> dict[str, Moments]:
    """Return layer -> float64 moments from checked tensors: inverse of ``encode_moments``."""
    layers = [name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] == "count"]

    def of(layer: str, key: str) -> Tensor:
        return tensors[tensor_name(layer, key)]

    return {layer: Moments(int(of(layer, "count")), of(layer, "mean").double(), of(layer, "var").double()) for layer in layers}


def views(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Return tensors in received arrays' memory. Do not change them."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@dataclass(frozen=True)
class Instruction:
    """Hold the server's instruction to a cohort: what to do in a round, with which tensors.

    Attributes:
        phase: The phase. ``Phase.MEASURE``: clients only measure statistics.
        sections: Section -> name in the state_dict -> tensor: ``weights``,
            ``statistics`` if shared, auxiliary tensors in training, and perhaps
            ``start``, initial values of kept tensors.
        measured: The moments that a statistics-only exchange measures: of layers'
            ``inputs``, or ``normalisers``, with which training normalises.
        signature: That of model and method (``Locality.signature``); empty: not
            checked.
        memory: The most bytes of activations in an exchange that goes layer by
            layer.
        rate_share: ``learning_rate`` divided by the schedule's rate, below 1 if
            frozen statistics lower it (``Method.learning_rate``).
        objective: The expected objective (``Objective.described``). Empty: not
            checked.
    """

    round: int
    phase: Phase
    sections: Sections
    learning_rate: float = 0.1
    measured: str = INPUTS
    signature: str = ""
    memory: int = 0
    rate_share: float = 1.0
    objective: str = ""

    @property
    def trains(self) -> bool:
        """Tell whether clients train; otherwise they only measure statistics."""
        return self.phase is not Phase.MEASURE


@dataclass(frozen=True)
class ClientState:
    """Hold the state that a client keeps between its rounds.

    Attributes:
        round: The round after which the client stored it; 0 before the first.
        sections: Section -> name -> tensor. ``local`` has the model's,
            ``momentum``, ``objective`` and ``optimizer`` have buffers for the next
            round.
        counted: Whether the server used the client's reply of that round.
        signature: The signature of model and method, if known.
    """

    round: int = 0
    sections: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)
    counted: bool = True
    signature: str = ""

    def get(self, section: str) -> dict[str, Tensor]:
        """Return the tensors of ``section``, by name; empty if it is missing."""
        return self.sections.get(section, {})


NOTHING = ClientState()


@dataclass(frozen=True)
class Reply:
    """Hold one client's reply after a round.

    Attributes:
        sections: Section -> name -> tensor: ``weights`` or ``gradients``,
            ``statistics`` or ``moments`` if the method reports them, and auxiliary
            tensors.
        samples: The number of different samples that the client trained on or
            measured, of all its samples with ``LocalTraining.weigh_all``.
        weight: Its weight in averages: ``samples``, but in phase EXCHANGE the first
            batch's size.
        metrics: Numbers by name. ``loss``: the mean over the training batches.
            ``steps``: local steps. ``batch``: samples of the first batch.
            ``measured``: samples of a statistics pass. ``waited``: seconds in
            exchanges. ``kept``: the round of the state at the start. ``before`` and
            ``after`` local training: the task's metric on the client's test data.
        largest: The largest absolute value in the sections; 0 if unknown.
    """

    client: int
    sections: Sections
    samples: int
    weight: int
    metrics: dict[str, float] = field(default_factory=dict)
    round: int = 0
    signature: str = ""
    largest: float = 0.0

    @property
    def steps(self) -> int:
        """Return the number of local steps."""
        return int(self.metrics.get("steps", 0))

    @property
    def loss(self) -> float:
        """Return the mean training loss; NaN if it is missing."""
        return self.metrics.get("loss", math.nan)


@dataclass(frozen=True)
class RoundReplies:
    """Hold the replies to one instruction, and the reasons why some are not used.

    Attributes:
        parts: The usable replies, in client order.
        refused: Client -> the reason why its reply is not used.
        wrong: Clients whose reply breaks the protocol: they are faulty or
            Byzantine.
        exchange: The session of the layer-wise exchange (FedTAN), if any.
        carrier: This exchange's transport, if any.
        messages: The number of messages that each client received.
        sum: The weighted sum of weights or gradients added as they arrived.
    """

    cohort: Sequence[int]
    parts: Sequence[Reply]
    refused: Mapping[int, str] = field(default_factory=dict)
    wrong: Collection[int] = ()
    exchange: Session | None = None
    carrier: str = ""
    messages: int = 1
    sum: WeightedSum | None = None
