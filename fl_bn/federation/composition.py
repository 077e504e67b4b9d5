"""Refuse combinations of method, objective, optimiser and options that do not work."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import SGD, Optimizer

from fl_bn.bn.roles import Role
from fl_bn.federation.defence import Defence
from fl_bn.federation.optimizers import ServerOptimizer
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import Method
from fl_bn.objectives import Objective
from fl_bn.options import Fits, is_a, refuse

OBJECTS: Fits = {
    "method": is_a(Method, "methods.fbn()"),
    "objective": is_a(Objective, "FedProx(0.01)"),
    "optimizer": is_a(ServerOptimizer | None, "fedadam()"),
    "server_optimizer": is_a(ServerOptimizer | None, "fedadam()"),
    "defence": is_a(Defence, "Defence(1, 'median', 'median')"),
}
"""The objects of which a run is composed, by the names of arguments that take them."""


def check_composition(method: Method, settings: LocalTraining, robust: bool = False, server_optimizer: str = "fedavg") -> None:
    """Check that the parts of a run fit together.

    ``robust``: the server has rules against Byzantine clients, or the run has such clients.

    Raises:
        ValueError: Two parts do not fit together. The message has the reason and the remedy.
    """
    objective, exchanges = settings.objective, method.exchanges
    as_centralised = f"the first local step of {method.name} must equal a step on all clients' batches together, but"
    unguarded = f"{objective.name}'s control variates" if objective.travels else "the buffers of maintain-momentum='global'"
    refuse(
        (exchanges and objective.corrects,
         f"{as_centralised} {objective.name} changes each client's gradient by itself: take another objective"),
        (exchanges and objective.repeats,
         f"{objective.name} runs each batch twice, but {method.name} exchanges statistics once: take another objective"),
        (exchanges and settings.clip != "none",
         f"{as_centralised} clipping changes each client's gradient by itself: set clip='none'"),
        (objective.anchored and not method.shares(Role.WEIGHT),
         f"{objective.name} compares a client's weights with the server's, but {method.name} shares no weights: set objective to none"),
        (robust and (objective.travels or settings.maintain == "global"),
         f"no robust rule guards {unguarded}: take another objective, or another value of maintain-momentum"),
        (settings.update == "gradients" and method.frozen - {Role.STATISTIC},
         f"{method.name} freezes scale and shift at the clients alone: set update='weights' or freeze-what='statistics'"),
        (settings.update == "gradients" and server_optimizer == "fedacg",
         "server-optimizer fedacg needs the clients' weights after local steps, but update='gradients' sends one gradient: take fedavgm"),
    )  # fmt: skip


def check_weights(method: Method, client_weights: str) -> None:
    """Raise ValueError if ``method`` exchanges in training and weights are not ``samples`` (FedTAN)."""
    refuse(
        (client_weights != "samples" and method.exchanges,
         f"{method.name} weights clients by the sizes of their batches: client_weights must be 'samples', but got {client_weights!r}"),
    )  # fmt: skip


def check_rates(objective: Objective, optimizer: Optimizer, others: Sequence[float] = ()) -> None:
    """Check that ``optimizer`` is plain SGD of one rate, which control variates need.

    ``others`` are the rates of other optimisers that take part in the same step.

    Raises:
        ValueError: ``optimizer`` is not SGD, has momentum or ``maximize=True``, or there are several rates.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
    several = sorted({*rates, *others})
    refuse(
        (not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups),
         f"{objective.name}'s control variates need torch.optim.SGD without momentum, but the optimiser is {type(optimizer).__name__}"),
        (any(group.get("maximize") for group in optimizer.param_groups),
         f"{objective.name} lowers the loss, but the optimiser has maximize=True: change the sign of the loss instead"),
        (len(several) > 1,
         f"{objective.name}'s control variates need one learning rate for all parameters, but the loop has the rates {several}"),
    )  # fmt: skip


def check_learns(model: nn.Module) -> None:
    """Raise ValueError unless ``model`` has a parameter that can be trained."""
    refuse(
        (not any(parameter.requires_grad for parameter in model.parameters()),
         f"{type(model).__name__} has no parameter with requires_grad=True, so there is nothing to train"),
    )  # fmt: skip
