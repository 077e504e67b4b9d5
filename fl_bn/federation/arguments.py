"""Check what a ``Federation`` is given, and try its optimisers and schedulers once before round 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fl_bn.bn.conversion import check_complete, hooked_parameters
from fl_bn.bn.copying import copied
from fl_bn.bn.roles import inputs_like
from fl_bn.federation.defence import Defence
from fl_bn.federation.engines.vectorised import ENGINES, VECTORISED
from fl_bn.federation.engines.workers import MOST_WORKERS
from fl_bn.federation.loaders import Loader, check_clients, check_loader
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.per_client import MakeOptimizer, MakeScheduler, rate_of
from fl_bn.federation.same_run import of_optimizer
from fl_bn.federation.step_rates import check_optimizer
from fl_bn.federation.steps import check_follows_rate, check_optimizer_steps, check_parameters, check_scheduler_steps
from fl_bn.methods import Method
from fl_bn.objectives import Objective
from fl_bn.support.names import check_name


def check_arguments(
    model: nn.Module,
    method: Method,
    clients: Sequence[Loader],
    *,
    objective: Objective,
    server_optimizer: ServerOptimizer | None,
    defence: Defence,
    schedule: Callable[[int, int], float],
    local_epochs: int,
    evaluate_every: int,
    engine: str,
    workers: int,
) -> None:
    """Check arguments of a ``Federation`` each by itself; ``Federation`` says what they are.

    Raises:
        ValueError: An argument has a wrong type or value.
    """
    check_name("engine", engine, ENGINES)
    if not isinstance(workers, int) or not 0 <= workers <= MOST_WORKERS or (engine == VECTORISED and workers > 1):
        raise ValueError(
            f"workers must be 0..{MOST_WORKERS}; with engine='vectorised' it must be 0 or 1, since one process computes the cohort; "
            f"but got workers={workers} and engine={engine!r}"
        )
    check_clients(clients)
    wrong = [one for one in (local_epochs, evaluate_every) if isinstance(one, bool) or not isinstance(one, int) or one < 1]
    if not len(clients) or wrong:
        raise ValueError(
            f"a federation needs at least 1 client, and whole numbers >= 1 as local_epochs and evaluate_every, but got {len(clients)} "
            f"clients, local_epochs={local_epochs!r} and evaluate_every={evaluate_every!r}"
        )
    for argument, value, kind, such in (
        ("model", model, nn.Module, "a torch network"),
        ("method", method, Method, "methods.fbn()"),
        ("objective", objective, Objective, "FedProx(0.01)"),
        ("server_optimizer", server_optimizer, ServerOptimizer | None, "fedadam()"),
        ("defence", defence, Defence, "Defence(...)"),
    ):
        if not isinstance(value, kind):
            raise ValueError(f"{argument} must be an object such as {such}, but got {value!r}")
    if not callable(schedule):
        raise ValueError(f"schedule must be a function of (round, rounds) that returns a factor, but got {schedule!r}")
    for number, loader in enumerate(clients):
        check_loader(f"client {number}", loader)


def device_of(device: torch.device | str | None, model: nn.Module) -> torch.device:
    """Return the device on which clients train: ``device``, or the network's own if it is None.

    Raises:
        ValueError: No tensor can be computed on ``device`` here.
    """
    if device is None:
        return inputs_like(model).device
    try:
        torch.ones(1, device=device).item()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        seen = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        raise ValueError(
            f"device must be one on which torch can compute here, such as {' or '.join(seen)}, but got {device!r}: "
            f"{str(error).partition(chr(10))[0]}"
        ) from error
    return torch.device(device)


def check_network(model: nn.Module) -> None:
    """Check that clients can train copies of a network.

    Raises:
        ValueError: The network has a lazy layer or a tensor on the meta device, or a parameter has a gradient hook.
    """
    check_complete(model)
    if empty := [name for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor) and tensor.is_meta]:
        raise ValueError(
            f"{empty[0]} is on the meta device, so it has a shape, but no values: give the network values first, by "
            "model.to_empty(device='cpu') and model.load_state_dict(...)"
        )
    if hooked := hooked_parameters(model):
        raise ValueError(
            f"parameter {hooked[0]} has a gradient hook, which the clients' copies of the network would not have: put what the "
            "hook does into the network (torch.autograd.Function), or write a loop of your own (docs/how-to/loop.md)"
        )


class Trials:
    """Make each client's optimiser and scheduler once, for a copy of the network, to check them and to read their learning rates.

    Args:
        model: The network; it stays unchanged.
        makers: Each client's function that makes its optimiser.
        objective: The local objective, which must fit the optimisers.

    Attributes:
        optimizers: The id of each function in ``makers`` -> an optimiser that it made.
        rate: The largest learning rate of all clients, which the federation's schedule scales. None: no optimiser has one.

    Raises:
        ValueError: An optimiser has other parameters than the network's, does not step, or does not fit the objective.
    """

    def __init__(self, model: nn.Module, makers: Sequence[MakeOptimizer], objective: Objective) -> None:
        self._makers = makers
        self._copy = copied(model)  # not ``model``, which a function that ignores its argument may know
        self.optimizers = {id(make): make(self._copy.parameters()) for make in makers}
        for optimizer in self.optimizers.values():
            check_parameters(optimizer, self._copy.parameters())
            check_optimizer(objective, optimizer)
            check_optimizer_steps(optimizer, self._copy)
        self._rates = {key: rate_of(optimizer) for key, optimizer in self.optimizers.items()}
        self.rate = max((rate for rate in self._rates.values() if rate), default=None)

    @property
    def shares(self) -> list[float]:
        """Return each client's learning rate as a share of ``rate``; 1 for a client without one."""
        rate = self.rate or 1.0
        return [(self._rates[id(make)] or rate) / rate for make in self._makers]

    @property
    def in_words(self) -> str:
        """Return the kinds and settings of all optimisers, each once."""
        return ", ".join(dict.fromkeys(of_optimizer(self.optimizers[id(make)]) for make in self._makers))

    def check_schedulers(self, schedulers: Sequence[MakeScheduler | None], follows: bool) -> None:
        """Check each client's scheduler with its optimiser.

        Args:
            schedulers: Each client's function that makes its scheduler, or None.
            follows: Whether the federation changes learning rates between rounds. Schedulers must then follow them.

        Raises:
            ValueError: A scheduler does not step the optimiser, or sets rates of its own where it must follow.
        """
        for make_scheduler, make in {(id(one), id(make)): (one, make) for one, make in zip(schedulers, self._makers, strict=True)}.values():
            if make_scheduler is not None and (made := make_scheduler(optimizer := make(self._copy.parameters()))) is not None:
                check_scheduler_steps(made, optimizer)
                if follows:
                    check_follows_rate(make, make_scheduler, [*self._copy.parameters()])
