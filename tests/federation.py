"""Run a federation in one process, without Flower: plain calls of the core's training, averaging and combining."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fl_bn.bn.conversion import convert
from fl_bn.bn.moments import Moments, Running
from fl_bn.bn.roles import batch_norms
from fl_bn.federation.aggregation import average, combine, running_statistics
from fl_bn.federation.local import Samples, statistics_pass, torch_seed
from fl_bn.federation.schema import Locality
from fl_bn.federation.settings import LocalTraining, seeded
from fl_bn.methods import LayerReports, Method, Phase, Place, StatisticsReport
from tests.local import Result, train

Rule = Callable[[LayerReports], Running]
ONE_STEP = LocalTraining(batch_size=64, steps=1)


def random_samples(n: int, *, size: int = 8, brightness: float = 0.0, seed: int = 0) -> Samples:
    """Make ``n`` random images (3, size, size) of 4 classes. ``brightness`` (0..1) shifts the range of the pixels upwards."""
    rng = np.random.default_rng(seed)
    low = int(120 * brightness)
    x = rng.integers(low, low + 100 + seed % 3, size=(n, 3, size, size), dtype=np.uint8)
    return Samples(torch.from_numpy(x), torch.from_numpy(rng.integers(0, 4, n)))


def union(clients: Sequence[Samples]) -> Samples:
    return Samples(torch.cat([c.x for c in clients]), torch.cat([c.y for c in clients]))


class Federation:
    """Hold the server's model, and for each client the tensors that the method keeps local.

    ``rule`` combines the statistics instead of the method's own rule, for negative controls.
    """

    def __init__(self, model: nn.Module, method: Method, clients: Sequence[Samples], rule: Rule | None = None) -> None:
        self.method, self.clients, self.rule = method, clients, rule or method.combine
        self.server = convert(model, method)
        self.locality = Locality.of(self.server, method)
        self.role, state = self.locality.role, self.server.state_dict()
        self.kept = [{k: state[k].clone() for k in self.locality.home} for _ in clients]
        self.sent = self.locality.names(Place.SHARED)

    def client(self, i: int) -> nn.Module:
        """Return the model that client ``i`` trains and evaluates."""
        model = copy.deepcopy(self.server)
        model.load_state_dict(self.kept[i], strict=False)
        return model

    def round(
        self,
        number: int = 1,
        *,
        batches: Sequence[Sequence[np.ndarray]] | None = None,
        settings: LocalTraining = ONE_STEP,
        rate: float = 0.1,
        phase: Phase = Phase.TRAIN,
        weights: Sequence[float] | None = None,
    ) -> list[Result]:
        """Run one round with all clients; return the result of each client's training.

        Args:
            number: The number of the round.
            batches: Client -> step -> indices of samples; None: each client makes one step on all its samples.
            settings: The settings of local training.
            rate: The learning rate.
            phase: The phase of the round.
            weights: The clients' weights in the average; None: their numbers of samples.
        """
        models = [self.client(i) for i in range(len(self.clients))]
        reports: list[dict[str, Moments]] = []
        results = []
        for i, (model, samples) in enumerate(zip(models, self.clients, strict=True)):
            drawn = [np.arange(len(samples))] if batches is None else batches[i]
            measured = self.measure(model, i, number) if self.method.reports(phase) is StatisticsReport.PASS else {}
            with torch_seed(1000 * number + i, torch.device("cpu")):
                result = train(model, samples, drawn, settings, rate, self.method, phase)
            self.kept[i] = {k: model.state_dict()[k].clone() for k in self.kept[i]}
            reports.append(self._report(model, result, phase) | measured)
            results.append(result)
        shares = [float(result.samples) for result in results] if weights is None else weights
        states = [model.state_dict() for model in models]
        shared = running_statistics(self.server, self.locality.shared_statistics)
        if self.method.reports(phase) is not StatisticsReport.NOTHING:
            self.store(combine(self.rule, shared, reports, [r.steps for r in results], batch_norms(self.server)))
        self.server.load_state_dict(average([{k: s[k] for k in self.sent} for s in states], shares), strict=False)
        return results

    def measure(self, model: nn.Module, i: int, number: int) -> dict[str, Moments]:
        return statistics_pass(model, self.clients[i], self.method.statistics_pass, seeded(0, i, number))

    def _report(self, model: nn.Module, result: Result, phase: Phase) -> dict[str, Moments]:
        if self.method.reports(phase) is not StatisticsReport.RUNNING:
            return result.moments
        return {k: Moments(result.samples, s.mean.double(), s.var.double()) for k, s in running_statistics(model).items()}

    @torch.no_grad()
    def store(self, statistics: dict[str, Running]) -> None:
        for name, layer in batch_norms(self.server).items():
            if name in statistics:
                layer.running_mean.copy_(statistics[name].mean)
                layer.running_var.copy_(statistics[name].var)


def largest_deviation(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest absolute difference over all tensors of ``b``; ``a`` may have more tensors."""
    return max(float((a[k].detach().double() - b[k].detach().double()).abs().max()) for k in b)
