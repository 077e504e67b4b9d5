"""The server's optimisers: a step on the pseudo-gradient of the shared weights and affine parameters, never on statistics.

FedAvg: McMahan et al., AISTATS 2017. FedAvgM: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, Hsu, Qi, Brown, 2019. FedAdagrad, FedAdam, FedYogi: Adaptive Federated Optimization, Reddi et al., ICLR 2021, Algorithm 2.
FedACG: Communication-Efficient Federated Learning with Accelerated Client Gradient, Kim, Kim, Han, CVPR 2024, Algorithm 1.

With BatchNorm, running variances that pass through Adam become negative. Here they never do: statistics go through the method's rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

Named = Mapping[str, Tensor]


class FedOpt(Optimizer):
    """Algorithm 2 of Adaptive Federated Optimization, as published: no bias correction, v starts as tau^2.

    Symbols: Delta -> minus the gradient, m -> first, v -> second, eta -> lr, beta_1 -> beta1, beta_2 -> beta2, tau -> tau.
    """

    def __init__(self, parameters: list[nn.Parameter], kind: str, lr: float, beta1: float, beta2: float, tau: float) -> None:
        super().__init__(parameters, {"lr": lr, "kind": kind, "beta1": beta1, "beta2": beta2, "tau": tau})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, delta = self.state[p], -p.grad
                first = state["first"] = group["beta1"] * state.get("first", 0) + (1 - group["beta1"]) * delta
                before = state.get("second", torch.full_like(p, group["tau"] ** 2))
                state["second"] = second = self._second(group["kind"], before, delta.square(), group["beta2"])
                p.add_(group["lr"] * first / (second.sqrt() + group["tau"]))

    @staticmethod
    def _second(kind: str, before: Tensor, square: Tensor, beta2: float) -> Tensor:
        if kind == "fedadagrad":
            return before + square
        if kind == "fedyogi":
            return before - (1 - beta2) * square * torch.sign(before - square)
        return beta2 * before + (1 - beta2) * square


class FedACG(Optimizer):
    """The server's half of FedACG: the weights become the clients' average, and their last movement shows where the clients start next.

    Clients start at ``weights + momentum * movement`` (``ServerOptimizer.lookahead``); the paper's local penalty towards that point is
    FedProx's. Symbols: theta -> the weights, m -> movement, lambda -> momentum.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: float) -> None:
        super().__init__(parameters, {"lr": 1.0, "lookahead": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["movement"] = -p.grad
                p.sub_(p.grad)


class ServerOptimizer:
    """Any torch optimiser stepping on the pseudo-gradient of the shared learnable weights; it never sees statistics.

    Works in float64 on the weights the clients started from, so that SGD with learning rate 1 along ``pseudo_gradient`` returns the
    average itself.
    """

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self._make = make
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizer: Optimizer | None = None

    def step(self, weights: Named, gradient: Named, learning_rate_factor: float = 1.0) -> dict[str, Tensor]:
        """Weights after one step along ``gradient`` (the names of ``gradient`` only), in float64."""
        if not gradient:  # nothing is shared
            return {}
        optimizer = self._optimizer or self._start({name: weights[name] for name in gradient})
        for name, parameter in self._parameters.items():
            parameter.data.copy_(weights[name])
            parameter.grad = gradient[name].double()
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * learning_rate_factor
        optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def lookahead(self, weights: Named) -> dict[str, Tensor]:
        """Where clients start, in float64, if elsewhere than at ``weights`` (FedACG); else nothing."""
        if self._optimizer is None or not (momentum := self._optimizer.param_groups[0].get("lookahead", 0.0)):
            return {}
        state = self._optimizer.state
        return {name: weights[name].double() + momentum * state[p]["movement"] for name, p in self._parameters.items() if state[p]}

    def _start(self, weights: Named) -> Optimizer:
        self._parameters = {name: nn.Parameter(weight.double().clone()) for name, weight in weights.items()}
        self._optimizer = self._make(list(self._parameters.values()))
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        return self._optimizer

    def buffers(self) -> dict[str, Tensor]:
        """What it remembers between steps (momentum, moments, counts), by ``buffer/weight``; empty for plain SGD and before the first."""
        if self._optimizer is None:
            return {}
        state = {name: self._optimizer.state[parameter] for name, parameter in self._parameters.items()}
        return {
            f"{key}/{name}": torch.as_tensor(value).clone()
            for name, buffers in state.items()
            for key, value in buffers.items()
            if value is not None
        }

    def restore(self, buffers: Named) -> None:
        """Go on from another's ``buffers``."""
        shapes = {entry.partition("/")[2]: tensor for entry, tensor in buffers.items()}
        if not shapes:
            self._optimizer = None
            return
        optimizer = self._start({name: torch.zeros_like(tensor) for name, tensor in shapes.items()})
        for entry, tensor in buffers.items():
            key, _, name = entry.partition("/")
            optimizer.state[self._parameters[name]][key] = tensor.clone()


ADAPTIVE = ("fedadagrad", "fedadam", "fedyogi")
SERVER_OPTIMIZERS = {  # and the momentum of each where none is given: beta_1 of the adaptive ones, lambda of FedACG
    "fedavg": 0.0,
    "fedavgm": 0.9,
    "fedadagrad": 0.0,
    "fedadam": 0.9,
    "fedyogi": 0.9,
    "fedacg": 0.85,
}


def server_optimizer(
    name: str, learning_rate: float = 1.0, momentum: float | None = None, beta2: float = 0.99, adaptivity: float = 1e-3
) -> ServerOptimizer:
    """One of ``SERVER_OPTIMIZERS``. ``momentum`` None: its own. ``beta2`` and ``adaptivity`` (tau): of the adaptive ones.

    Raises:
        ValueError: an argument is out of range, or not one of this optimizer.
    """
    if name not in SERVER_OPTIMIZERS:
        raise ValueError(f"server-optimizer must be one of {', '.join(SERVER_OPTIMIZERS)}, but got {name!r}")
    beta = SERVER_OPTIMIZERS[name] if momentum is None else momentum
    if not 0 < learning_rate < math.inf or not 0 <= beta < 1:
        raise ValueError(f"the server needs a finite learning rate > 0 and momentum in [0, 1), but got {learning_rate} and {beta}")
    if not 0 <= beta2 < 1 or not 0 < adaptivity < math.inf:
        raise ValueError(f"server-beta2 must be in [0, 1) and server-adaptivity a finite number > 0, but got {beta2} and {adaptivity}")
    if name == "fedavg" and beta > 0:
        raise ValueError(f"fedavg has no server momentum: set server-optimizer to fedavgm, or server-momentum to 0, but got {beta}")
    if name == "fedacg":
        if learning_rate != 1:
            raise ValueError(f"fedacg takes the clients' average as it is: set server-learning-rate to 1, but got {learning_rate}")
        return ServerOptimizer(lambda parameters: FedACG(parameters, beta))
    if name in ADAPTIVE:
        return ServerOptimizer(lambda parameters: FedOpt(parameters, name, learning_rate, beta, beta2, adaptivity))
    return ServerOptimizer(lambda parameters: SGD(parameters, lr=learning_rate, momentum=beta))
