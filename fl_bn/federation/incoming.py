"""Load a server's instruction, and the state that the client keeps, into the network of a client's round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fl_bn.bn.moments import Running
from fl_bn.bn.roles import Role
from fl_bn.federation import schema
from fl_bn.federation.aggregation import running_statistics
from fl_bn.federation.auxiliary import Auxiliary
from fl_bn.federation.network import Copy
from fl_bn.federation.payload import to_numpy
from fl_bn.federation.values import ClientState, Instruction
from fl_bn.methods import Phase, Place
from fl_bn.objectives import CONTROL

_NUMBERS = count()
_NEWEST: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Network -> the number of the last ``Loaded`` of it. A network may serve several clients in turn."""
_STARTS: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
"""Network -> the first values of its buffers with the role ``KEPT``, by name. Every client begins with them."""


@dataclass(frozen=True)
class Loaded:
    """Hold what a round remembers of the tensors that it loaded.

    Attributes:
        model: The network.
        number: The number of this loading, counted over all networks.
        own_statistics: Layer -> the running statistics that were loaded, if they stay at the client; empty if they are shared.
    """

    model: nn.Module
    number: int
    own_statistics: Mapping[str, Running]

    @property
    def newest(self) -> bool:
        """Tell whether no later round has loaded other tensors into the network."""
        return _NEWEST.get(self.model) == self.number


def load(copy: Copy, instruction: Instruction, kept: ClientState, auxiliary: Sequence[Auxiliary]) -> Loaded:
    """Check the tensors of ``instruction``, and load them into ``copy`` with those that the client keeps.

    Args:
        copy: The network of the round.
        instruction: The server's instruction.
        kept: The state that the client keeps.
        auxiliary: The kinds of auxiliary tensors that the instruction has beside the model's tensors. They are checked, but not loaded.

    Raises:
        ValueError: The server's model differs from the one in ``copy``, or only one side has an objective with control variates.
        WireError: A tensor of the instruction is missing, unexpected, or of a wrong shape or dtype.
    """
    network, method = copy.network, copy.network.method
    locality = network.locality
    expected = network.instruction(auxiliary)
    arrays = {section: to_numpy(tensors) for section, tensors in instruction.sections.items()}
    if instruction.signature and (mine := network.signature) != instruction.signature:
        raise ValueError(
            f"the server's model has signature {instruction.signature}, but this client's has {mine}: "
            f"{schema.difference(expected, arrays)}. Give the server's network, converted for its method: convert(model, method). Here "
            f"the method is {method.name}"
        )
    if kept.signature not in ("", network.signature):
        raise ValueError(
            f"kept is the state of a client with another network or method: its signature is {kept.signature}, but that of the network "
            f"converted for {method.name} is {network.signature}. Give what round.reply returned for this network and method, or no state"
        )
    beside = {extra.section for extra in auxiliary}
    if (CONTROL in beside) != (CONTROL in instruction.sections):
        raise ValueError(
            f"the server's objective is {instruction.objective or 'none'}, this client's loop has {'one' if CONTROL in beside else 'none'} "
            "with control variates: give both sides the same objective=..."
        )
    expected.check(arrays)
    tensors = {name: t for key in instruction.sections.keys() - beside for name, t in instruction.sections[key].items()}
    copy.load(_starts(copy) | _unmixed(copy, instruction.phase) | tensors | kept.get("local"))
    number = _NEWEST[copy.model] = next(_NUMBERS)
    return Loaded(copy.model, number, running_statistics(copy.model, locality.home_statistics))


def _starts(copy: Copy) -> dict[str, Tensor]:
    """Return the values with which every client begins, of the buffers that each client keeps, by name.

    They replace the values in the network, which may be those of another client.
    """
    if not (kept := copy.network.locality.names(Place.HOME, of=[Role.KEPT])):
        return {}
    if copy.model not in _STARTS:
        _STARTS[copy.model] = {name: copy.state[name].clone() for name in kept}
    return _STARTS[copy.model]


def _unmixed(copy: Copy, phase: Phase) -> dict[str, Tensor]:
    """Return a zero tensor for each of HBN's mixing logits, by name; empty if the logits are shared.

    The zeros replace the values in the network, which may be those of another client.
    """
    mixing, trained = copy.network.locality.names(Place.HOME, of=[Role.MIXING]), copy.trainable(phase)
    return {name: torch.zeros_like(trained[name]) for name in mixing if name in trained}
