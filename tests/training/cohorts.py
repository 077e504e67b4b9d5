"""Train one round of a cohort, client by client and as one program, from the same initial state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fl_bn.conversion import convert
from fl_bn.federation.client import LocalRound
from fl_bn.federation.client_round import client_round, client_rounds
from fl_bn.federation.engines.engine import Member
from fl_bn.federation.engines.vectorised import AsOneProgram
from fl_bn.federation.local import Samples
from fl_bn.federation.settings import LocalTraining
from fl_bn.federation.sources import SampleSource, alone
from fl_bn.federation.values import ClientState, Reply
from fl_bn.methods import Method, Phase
from fl_bn.roles import roles
from tests.federation import random_samples
from tests.networks import seeded_network

Results = list[tuple[Reply, ClientState]]
STEPS = LocalTraining(batch_size=6, steps=3, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True)
class Cohort:
    """Describe a round of a cohort: client ``clients[i]`` has ``sizes[i]`` samples.

    Tensors that ``method`` keeps local differ between the clients.
    """

    method: Method
    settings: LocalTraining = STEPS
    sizes: Sequence[int] = (12, 12, 12)
    clients: Sequence[int] = (0, 1, 2)
    network: Callable[[], nn.Module] = lambda: seeded_network("", dtype=torch.float64)
    phase: Phase = Phase.TRAIN
    kept: Callable[[int], dict[str, dict[str, torch.Tensor]]] = lambda client: {}
    received: Callable[[nn.Module], dict[str, dict[str, torch.Tensor]]] = lambda model: {}
    seed: int = 0
    number: int = 1

    def samples(self) -> list[Samples]:
        return [random_samples(n, seed=client, brightness=client / 10) for n, client in zip(self.sizes, self.clients, strict=True)]

    def rounds(self) -> list[LocalRound]:
        shared = convert(self.network(), self.method)
        return [self._round(copy.deepcopy(shared), client) for client in self.clients]

    def _round(self, model: nn.Module, client: int) -> LocalRound:
        generator = torch.Generator().manual_seed(client)
        state, role = model.state_dict(), roles(model)
        for name, tensor in state.items():
            if role[name] in self.method.local and tensor.is_floating_point():
                tensor.add_(0.2 * torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype))
        kept = ClientState(1, self.kept(client))
        start = alone(model, self.method, replace(self.settings, maintain="reset"), 0.1, self.phase)
        sections = {**start.instruction.sections, **self.received(model)}
        instruction = replace(start.instruction, round=self.number, sections=sections)
        return LocalRound(model, self.method, instruction, kept, self.settings)

    def one_by_one(self) -> Results:
        rounds = zip(self.rounds(), self.samples(), self.clients, strict=True)
        return [client_round(round, SampleSource(own, self.seed, client, tells_drift=True)) for round, own, client in rounds]

    def together(self) -> Results:
        return as_one_program(self.rounds(), self.samples(), self.seed, self.clients, tells_drift=True)


def as_one_program(
    rounds: Sequence[LocalRound], samples: Sequence[Samples], seed: int, clients: Sequence[int], tells_drift: bool = False
) -> Results:
    """Train all clients at once, as one program; return each client's reply and the state that it keeps."""
    sources = [SampleSource(own, seed, client, tells_drift=tells_drift) for own, client in zip(samples, clients, strict=True)]
    return client_rounds([Member(round, source) for round, source in zip(rounds, sources, strict=True)], AsOneProgram())


def off(a: Results, b: Results) -> float:
    """Return the largest difference of any number that is sent or kept; infinite if only one side has a tensor or another shape."""
    return max(_off(_numbers(*x), _numbers(*y)) for x, y in zip(a, b, strict=True))


def _numbers(reply: Reply, kept: ClientState) -> dict[str, Any]:
    metrics = {name: value for name, value in reply.metrics.items() if name != "waited"}
    whole = {"samples": reply.samples, "client": reply.client, **metrics}
    sections = {**reply.sections, **{f"kept {name}": of for name, of in kept.sections.items()}}
    return whole | {f"{section}/{name}": tensor for section, of in sections.items() for name, tensor in of.items()}


def _off(a: dict[str, Any], b: dict[str, Any]) -> float:
    if a.keys() != b.keys():
        return math.inf
    pairs = [(torch.as_tensor(a[name]).double(), torch.as_tensor(b[name]).double()) for name in a]
    return max(float((x - y).abs().max()) if x.shape == y.shape else math.inf for x, y in pairs if x.numel())
