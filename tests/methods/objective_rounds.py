"""Run rounds of a local objective by plain calls of the core's training and averaging, with part of the clients in each round."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.conversion import convert
from fl_bn.federation.aggregation import average
from fl_bn.federation.auxiliary import auxiliary, has_auxiliary
from fl_bn.federation.local import Samples, torch_seed
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import METHODS
from fl_bn.objectives import CONTROL, PLAIN, Objective
from tests.local import Result, train

Schedule = Sequence[Sequence[int]]


class ObjectiveRounds:
    """Run FedAvg with BatchNorm and ``objective``; ``index[i]`` has the batches of client i, the same in every round."""

    def __init__(
        self, net: nn.Module, objective: Objective, clients: Sequence[Samples], index: Sequence[Sequence[np.ndarray]], **settings: object
    ) -> None:
        self.method, self.clients, self.index = METHODS["fedavg"](), clients, index
        self.settings = LocalTraining(7, steps=2, objective=objective, **settings)  # type: ignore[arg-type]
        self.server = convert(net, self.method)
        self.kept: list[Mapping[str, Tensor]] = [{} for _ in clients]
        self.beside = auxiliary(self.settings)
        self.control: dict[str, Tensor] = {}
        if objective.travels:
            self.control = {name: torch.zeros_like(p) for name, p in has_auxiliary(self.server, self.method).items()}
        self.results: list[Result] = []

    def round(self, chosen: Sequence[int], rate: float, seed: int = 0) -> None:
        self.results, models = [], []
        for i in chosen:
            model = copy.deepcopy(self.server)
            with torch_seed(seed + i, torch.device("cpu")):
                result = train(
                    model,
                    self.clients[i],
                    self.index[i],
                    self.settings,
                    rate,
                    self.method,
                    kept={"objective": self.kept[i]},
                    control=self.control,
                )
            self.kept[i] = result.kept
            self.results.append(result)
            models.append({name: t for name, t in model.state_dict().items() if t.is_floating_point()})
        weights = [float(result.samples) for result in self.results]
        for extra in self.beside:
            assert extra.section == CONTROL
            self.control = extra.combine(self.control, [result.sent for result in self.results], weights, len(self.clients))
        self.server.load_state_dict(average(models, weights), strict=False)

    def run(self, schedule: Schedule, rate: float) -> dict[str, Tensor]:
        """Run one round for each entry of ``schedule``, a list of clients; return the shared tensors after the last round."""
        for number, chosen in enumerate(schedule):
            self.round(chosen, rate, 100 * number)
        return self.server.state_dict()


def plain(net: nn.Module, clients: Sequence[Samples], index: Sequence[Sequence[np.ndarray]]) -> ObjectiveRounds:
    return ObjectiveRounds(net, PLAIN, clients, index)
