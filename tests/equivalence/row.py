"""Say what a row of the table of equivalences is. Modules of ``tests/oracles`` list their rows in ``ROWS``, and never import fl_bn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from tests.networks import seeded_network

Client = list[tuple[Tensor, Tensor]]  # the client's batches of one round
Found = nn.Module | Mapping[str, Any]
Rule = Callable[["Row"], Found] | Mapping[str, Any]
BITS = 5e-324  # as a tolerance: no bit may differ
BOTH = ("federation", "own loop")


def make_clients(*sizes: int, pieces: int = 1, shape: tuple[int, ...] = (3, 8, 8), seed: int = 0) -> list[Client]:
    """Make random inputs of 4 classes in float64, in ``pieces`` batches per client. Clients differ in mean and in deviation."""
    rng, clients = torch.Generator().manual_seed(seed), []
    for i, n in enumerate(sizes):
        x = (0.6 + 0.2 * i) * torch.randn(n, *shape, generator=rng, dtype=torch.float64) + 0.5 * i - 0.2
        y = torch.randint(4, (n,), generator=rng)
        clients.append([(x[list(part)], y[list(part)]) for part in np.array_split(range(n), pieces)])
    return clients


def union(clients: Sequence[Client]) -> tuple[Tensor, Tensor]:
    """Return all batches of all clients as one."""
    return torch.cat([x for own in clients for x, _ in own]), torch.cat([y for own in clients for _, y in own])


@dataclass(frozen=True)
class Row:
    """Compare what fl-bn computes with a reference, and with wrong rules, from which it must differ.

    A reference or a wrong rule is a function of this row, which returns the tensors after the last round, as a network or by name;
    ``2/name`` is a tensor of client 2. Or it is a dict of fields of this row that change: what fl-bn itself computes then.
    """

    name: str
    reference: Rule
    wrong: Mapping[str, Rule]  # tempting mistakes, by name
    method: str = "fedavg"  # a key of METHODS
    options: Mapping[str, Any] = field(default_factory=dict)  # the method's
    network: str | Callable[[], nn.Module] = "plain"  # a name of tests.networks, or makes the network
    dropout: bool = False  # whether the network keeps its dropout
    clients: Sequence[Client] = field(default_factory=lambda: make_clients(6, 14, 10, pieces=2))
    rounds: int = 2
    epochs: int = 1  # passes over a client's batches in a round
    rate: float = 0.1
    sgd: Mapping[str, float] = field(default_factory=dict)  # further arguments of the clients' SGD
    objective: tuple[str, Mapping[str, Any]] = ("none", {})  # the local objective's name and options
    server: tuple[str, Mapping[str, Any]] = ("fedavg", {})  # the server optimizer's
    defence: Sequence[Any] = ()  # arguments of Defence
    local: Mapping[str, Any] = field(default_factory=dict)  # settings of local training that only the application has
    uniform: bool = False  # whether each client has the same weight in averages
    calibrate: int = 0  # exchanges of statistics before round 1
    cohorts: Sequence[Sequence[int]] = ()  # the clients of each round; empty: all in every round
    doors: Sequence[str] = ("federation",)  # keys of product.DOORS: the interfaces; wrong rules are computed through the first one alone
    slow: Sequence[str] = ()  # further ones, as slow tests
    only: Sequence[str] = ()  # parts of the names of tensors that are compared; empty: all that the reference has
    tolerance: float = 1e-11  # the deviation below which two tensors are equal

    def net(self) -> nn.Module:
        """Make the network, in float64, with scales, shifts and running statistics that are not those of a new one."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = (seeded_network(self.network) if isinstance(self.network, str) else self.network()).double()
            for module in model.modules():
                if isinstance(module, nn.Dropout) and not self.dropout:
                    module.p = 0.0
                if isinstance(module, _BatchNorm):
                    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                        if tensor.is_floating_point():
                            tensor.uniform_(0.5, 2) if name == "running_var" else tensor.normal_(float(name == "weight"))
        return model

    @property
    def steps(self) -> list[Client]:
        """Return the batches of each client's steps of a round."""
        return [client * self.epochs for client in self.clients]

    @property
    def sizes(self) -> list[int]:
        """Return the clients' numbers of samples."""
        return [sum(len(y) for _, y in own) for own in self.clients]

    @property
    def schedule(self) -> list[list[int]]:
        """Return the clients of each round."""
        return [list(cohort) for cohort in self.cohorts] or [list(range(len(self.clients)))] * self.rounds


def tensors(found: Found) -> dict[str, Tensor]:
    """Return the floating-point tensors of a network, or of a dict of tensors or arrays."""
    named = found.state_dict() if isinstance(found, nn.Module) else {name: torch.as_tensor(t) for name, t in found.items()}
    return {name: t.detach() for name, t in named.items() if t.is_floating_point()}


def off(found: Found, want: Found, only: Sequence[str] = ()) -> float:
    """Return the largest deviation of a tensor of ``want``. Clients' tensors are compared where ``found`` has such."""
    got, wanted = tensors(found), {name: t for name, t in tensors(want).items() if not only or any(part in name for part in only)}
    if not any("/" in name for name in got):
        wanted = {name: t for name, t in wanted.items() if "/" not in name}
    assert {name: got[name].shape for name in wanted} == {name: t.shape for name, t in wanted.items()} != {}
    return float(torch.stack([(got[name] - t).abs().max() for name, t in wanted.items()]).max())  # NaN if one of them is
