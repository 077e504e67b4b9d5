"""Define the optimisers of clients, and of the server, which steps along pseudo-gradients.

FedAvg: McMahan et al., AISTATS 2017. FedAvgM: Measuring the Effects of
Non-Identical Data Distribution for Federated Visual Classification, Hsu, Qi, Brown,
2019. FedAdagrad, FedAdam, FedYogi: Adaptive Federated Optimization, Reddi et al.,
ICLR 2021, Algorithm 2. FedACG: Communication-Efficient Federated Learning with
Accelerated Client Gradient, Kim, Kim, Han, CVPR 2024, Algorithm 1.

Server optimisers never change statistics: Adam, for example, can make running
variances negative.

**Eager optimisers.** torch's optimizers import the compiler in the first call,
which takes 1.5 s in every process (torch 2.15). Classes derived from ``Eager`` give
the same bits without it, but ``torch.compile`` cannot trace them. A step of the
default network takes 69 us, and 87 us with ``torch.optim.SGD(foreach=True)``.
``fused=True`` (42 us) imports the compiler, and its bits differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from fl_bn.federation.values import Named
from fl_bn.options import Options, option, takes
from fl_bn.support.names import check_name

Gradient = Callable[[Tensor, Tensor, torch.dtype], Tensor]
"""Returns a weight's gradient in float64, see ``aggregation.difference``.

Its arguments are the weight in float64, the clients' average, which may be
overwritten, and the weight's dtype.
"""


class Eager(optim.Optimizer):
    """Replace methods of torch's optimizers by versions that do not import torch's compiler.

    Derive from this class alone, or from it first and an optimizer of torch second.
    """

    add_param_group = inspect.unwrap(optim.Optimizer.add_param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as ``torch.optim.Optimizer.zero_grad`` does."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if set_to_none or parameter.grad is None else torch.zeros_like(parameter)


def _eager(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return ``step`` of one of torch's classes, for a class derived from ``Eager``."""
    own: Any = inspect.unwrap(kind.step)

    @torch.no_grad()
    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, and return the loss of ``closure``, if any."""
        return own(self, closure)

    step.hooked = True  # type: ignore[attr-defined]  # else torch wraps it at the first construction
    return step


class SGD(Eager, optim.SGD):
    """Optimise as ``torch.optim.SGD``, bit for bit, see ``Eager``."""

    step = _eager(optim.SGD)


class Adam(Eager, optim.Adam):
    """Optimise as ``torch.optim.Adam``, bit for bit, see ``Eager``."""

    step = _eager(optim.Adam)


def first_rate(optimizer: Optimizer) -> float | None:
    """Return the learning rate of the optimiser's first parameters that have one."""
    return next((float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None), None)


class FedOpt(Eager):
    """Step by Algorithm 2 of Adaptive Federated Optimization, as published.

    There is no bias correction, and the second moment v starts as tau^2. ``kind``
    is ``fedadagrad``, ``fedadam`` or ``fedyogi``. ``tau`` keeps the step finite
    where gradients are small.

    Symbols: Delta -> minus the gradient, m -> first, v -> second, eta -> lr, beta_1
    -> beta1, beta_2 -> beta2.
    """

    def __init__(self, parameters: list[nn.Parameter], kind: str, lr: float, beta1: float, beta2: float, tau: float) -> None:
        super().__init__(parameters, {"lr": lr, "kind": kind, "beta1": beta1, "beta2": beta2, "tau": tau})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step, without ``closure``."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
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


class FedACG(Eager):
    """Set the weights to the clients' average, and store the movement: FedACG's server half.

    Clients start at ``weights + momentum * movement`` (``lookahead``), with
    FedProx's penalty.

    Symbols: theta -> the weights, m -> movement, lambda -> momentum.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: float) -> None:
        super().__init__(parameters, {"lr": 1.0, "lookahead": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make one step, without ``closure``."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p]["movement"] = -p.grad
                p.sub_(p.grad)


class ServerOptimizer:
    """Step shared weights by any torch optimiser along the pseudo-gradient, tensor by tensor.

    It works in float64, along ``aggregation.difference``. ``make`` makes the torch
    optimiser of a list of parameters.
    """

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self._make = make
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizer: Optimizer | None = None

    def fresh(self) -> Self:
        """Return a copy without buffers, so that no run continues another's momentum."""
        own = copy(self)
        own._parameters, own._optimizer = {}, None
        return own

    def step(self, weights: Named, tensors: Named, gradient: Gradient | None = None, learning_rate_factor: float = 1.0) -> None:
        """Write the weights after one step into ``tensors``, copying one at a time.

        Args:
            weights: Name -> weight before the step.
            tensors: Name -> float64 tensor, overwritten with the new weight: the
                gradient, or what ``gradient`` takes.
            gradient: Computes the gradient from the clients' average, see
                ``Gradient``.
            learning_rate_factor: Multiplies the step size.
        """
        if not tensors:  # nothing is shared
            return
        optimizer = self._optimizer or self._start({name: weights[name] for name in tensors})
        for name in [name for name in tensors if name not in self._parameters]:  # frozen until now
            self._parameters[name] = nn.Parameter(_without_memory(weights[name]))
            optimizer.param_groups[0]["params"].append(self._parameters[name])
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * learning_rate_factor
        if gradient is not None and _takes_the_average(optimizer):
            return
        for name, tensor in tensors.items():
            weight, parameter = weights[name], self._parameters[name]
            parameter.data = weight.to(torch.float64, copy=True)
            parameter.grad = tensor if gradient is None else gradient(parameter.data, tensor, weight.dtype)
            optimizer.step()
            tensor.copy_(parameter.data)
            parameter.grad, parameter.data = None, _without_memory(tensor)

    def lookahead(self, weights: Named) -> dict[str, Tensor]:
        """Return name -> clients' first weight in float64, where FedACG's differs from ``weights``."""
        if self._optimizer is None or not (momentum := self._optimizer.param_groups[0].get("lookahead", 0.0)):
            return {}
        state = self._optimizer.state
        moved = [(name, p) for name, p in self._parameters.items() if name in weights and state[p]]
        return {name: weights[name].double() + momentum * state[p]["movement"] for name, p in moved}

    def _start(self, weights: Named) -> Optimizer:
        self._parameters = {name: nn.Parameter(_without_memory(weight)) for name, weight in weights.items()}
        self._optimizer = self._make(list(self._parameters.values()))
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        return self._optimizer

    def buffers(self) -> dict[str, Tensor]:
        """Return ``buffer/weight`` -> the optimiser's buffer, if any."""
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
        """Load the ``buffers`` of an equal server optimiser. Empty: forget present ones."""
        shapes = {entry.partition("/")[2]: tensor for entry, tensor in buffers.items()}
        if not shapes:
            self._optimizer = None
            return
        optimizer = self._start({name: torch.zeros_like(tensor) for name, tensor in shapes.items()})
        for entry, tensor in buffers.items():
            key, _, name = entry.partition("/")
            optimizer.state[self._parameters[name]][key] = tensor.clone()


def _takes_the_average(optimizer: Optimizer) -> bool:
    """Tell whether a step along ``difference`` always ends at the rounded average."""
    plain = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "maximize": False}
    return isinstance(optimizer, SGD) and all(group[name] == value for group in optimizer.param_groups for name, value in plain.items())


def _without_memory(like: Tensor) -> Tensor:
    """Return float64 zeros like ``like``: an expanded scalar, with one number's memory."""
    return torch.zeros((), dtype=torch.float64).expand(like.shape)


def _momentum(default: float, what: str) -> Any:
    return option(default, f"{what} (-1: {default:g})", "[0, 1)", key="server-momentum", unset=-1.0)


def _adaptivity() -> Any:
    return option(1e-3, "keeps the step finite where gradients are small (tau in the paper)", "> 0", key="server-adaptivity", hidden=True)


@dataclass(frozen=True)
class FedAvgOptions(Options):
    """Hold the options of FedAvg, which all server optimisers have but FedACG."""

    name: ClassVar[str] = "fedavg"
    learning_rate: float = option(
        1.0, "the server optimiser's step size (times the clients' rate for update=gradients)", "> 0", key="server-learning-rate"
    )


@takes(FedAvgOptions)
def fedavg(options: FedAvgOptions) -> ServerOptimizer:
    """Make FedAvg's SGD. With a learning rate of 1, the weights become the average itself."""
    return ServerOptimizer(partial(SGD, lr=options.learning_rate))


@dataclass(frozen=True)
class FedAvgMOptions(FedAvgOptions):
    """Hold the options of FedAvgM."""

    name: ClassVar[str] = "fedavgm"
    momentum: float = _momentum(0.9, "momentum")


@takes(FedAvgMOptions)
def fedavgm(options: FedAvgMOptions) -> ServerOptimizer:
    """Make FedAvgM: SGD with momentum."""
    return ServerOptimizer(partial(SGD, lr=options.learning_rate, momentum=options.momentum))


@dataclass(frozen=True)
class FedAdagradOptions(FedAvgOptions):
    """Hold the options of FedAdagrad."""

    name: ClassVar[str] = "fedadagrad"
    momentum: float = _momentum(0.0, "beta_1")
    adaptivity: float = _adaptivity()


@takes(FedAdagradOptions)
def fedadagrad(options: FedAdagradOptions) -> ServerOptimizer:
    """Make FedAdagrad."""
    return _adaptive(options, beta2=0.0)


@dataclass(frozen=True)
class FedAdamOptions(FedAvgOptions):
    """Hold the options of FedAdam."""

    name: ClassVar[str] = "fedadam"
    momentum: float = _momentum(0.9, "beta_1")
    beta2: float = option(0.99, "weight of the old second moment (beta_2 in the paper)", "[0, 1)", key="server-beta2", hidden=True)
    adaptivity: float = _adaptivity()


@takes(FedAdamOptions)
def fedadam(options: FedAdamOptions) -> ServerOptimizer:
    """Make FedAdam."""
    return _adaptive(options, options.beta2)


@dataclass(frozen=True)
class FedYogiOptions(FedAdamOptions):
    """Hold the options of FedYogi."""

    name: ClassVar[str] = "fedyogi"


@takes(FedYogiOptions)
def fedyogi(options: FedYogiOptions) -> ServerOptimizer:
    """Make FedYogi."""
    return _adaptive(options, options.beta2)


def _adaptive(options: FedAdagradOptions | FedAdamOptions, beta2: float) -> ServerOptimizer:
    rate, momentum, tau = options.learning_rate, options.momentum, options.adaptivity
    return ServerOptimizer(partial(FedOpt, kind=options.name, lr=rate, beta1=momentum, beta2=beta2, tau=tau))


@dataclass(frozen=True)
class FedACGOptions(Options):
    """Hold the options of FedACG."""

    name: ClassVar[str] = "fedacg"
    momentum: float = _momentum(0.85, "lambda")


@takes(FedACGOptions)
def fedacg(options: FedACGOptions) -> ServerOptimizer:
    """Make FedACG."""
    return ServerOptimizer(partial(FedACG, momentum=options.momentum))


OPTIMIZERS: tuple[Callable[..., ServerOptimizer], ...] = (fedavg, fedavgm, fedadagrad, fedadam, fedyogi, fedacg)
SERVER_OPTIMIZERS = {make.__name__: make for make in OPTIMIZERS}


def server_optimizer(name: str, *args: Any, **options: Any) -> ServerOptimizer:
    """Make the server optimiser ``name``, with its options by position or by name.

    Raises:
        ValueError: There is no such optimiser, or an option is out of range.
    """
    check_name("server-optimizer", name, SERVER_OPTIMIZERS)
    return SERVER_OPTIMIZERS[name](*args, **options)
