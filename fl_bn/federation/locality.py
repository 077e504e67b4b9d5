"""Say where every tensor of a converted network lives under a method.

The table is computed once. Schemas, client state, disclosure, adaptation, secure sums and re-calibration read it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from fl_bn.bn.roles import Role, batch_norms, roles
from fl_bn.federation.payload import tensor_name
from fl_bn.methods import Method, Phase, Place

KEPT_BY_CLIENTS = frozenset({Role.AFFINE, Role.STATISTIC})
"""The roles of BatchNorm tensors whose average, over the clients that keep them, serves a client that was never in a round."""


@dataclass(frozen=True)
class Locality:
    """Hold place and role of each tensor, by name and in the order of the state_dict.

    Attributes:
        norm_layers: The names of all BatchNorm layers.
        shared_statistics: The names of those BatchNorm layers whose running statistics the server sends and combines.
        home_statistics: The names of those whose running statistics stay at the client.
    """

    method: Method
    place: Mapping[str, Place]
    role: Mapping[str, Role]
    norm_layers: tuple[str, ...]
    shared_statistics: tuple[str, ...]
    home_statistics: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, method: Method) -> Locality:
        """Compute the table of ``model``, which must be converted for ``method``."""
        layers = batch_norms(model)
        numbered = {layer: (name, index) for index, (name, layer) in enumerate(layers.items())}
        every = model.named_modules(remove_duplicate=False)  # a layer that is used twice has two names
        home = {name: method.home(*numbered[layer]) for name, layer in every if layer in numbered}
        role = roles(model)
        place = {name: method.place(one, home.get(name.rpartition(".")[0], frozenset())) for name, one in role.items()}
        at = {name: place.get(tensor_name(name, "running_mean")) for name in layers}  # a layer may have no running statistics
        shared, kept = (tuple(name for name in layers if at[name] is where) for where in (Place.STATISTIC, Place.HOME))
        return cls(method, place, role, tuple(layers), shared, kept)

    def names(self, *places: Place, of: Collection[Role] = tuple(Role)) -> list[str]:
        """Return the names of the tensors in ``places`` whose role is in ``of``."""
        return [name for name, place in self.place.items() if place in places and self.role[name] in of]

    def started_by_server(self) -> list[str]:
        """Return the names of the tensors at home whose first values the server may send.

        Mixing logits start at 0 at every client, and buffers of the role KEPT with the values in the client's own network.
        """
        return self.names(Place.HOME, of=[role for role in Role if role not in (Role.MIXING, Role.KEPT)])

    def kept_by_clients(self) -> list[str]:
        """Return the names of affine parameters and statistics that clients keep."""
        return self.names(Place.HOME, of=KEPT_BY_CLIENTS)

    def fewest(self, phase: Phase) -> int:
        """Return a batch's fewest samples: 2 if a layer normalises with its statistics, else 1."""
        constant = len(self.shared_statistics) if self.method.constant else 0
        return 1 if self.method.freezes_statistics(phase) or constant == len(self.norm_layers) else 2

    def signature(self, model: nn.Module) -> str:
        """Return a short hash of the method at clients, and of each tensor's name, role, shape, dtype.

        If single layers stay at home (``Method.local_in``), it depends on the names of all tensors at home, too.
        """
        parts = [f"{k} {self.role[k].value} {tuple(t.shape)} {t.dtype}" for k, t in model.state_dict().items()]
        at_home = [] if self.method.local_in is None else self.names(Place.HOME)
        return hashlib.sha256("\n".join([self.method.name, self.method.at_clients, *parts, *at_home]).encode()).hexdigest()[:16]
