"""Refuse combinations of method, objective and options that do not work together, and networks without trainable parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import SGD, Optimizer

from fl_bn.bn.roles import Role
from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import Method, Phase
from fl_bn.objectives import Objective


def check_composition(method: Method, settings: LocalTraining, robust: bool = False, server_optimizer: str = "fedavg") -> None:
    """Check that the parts of a run fit together.

    Args:
        method: The method.
        settings: The settings of the clients' training.
        robust: Whether the server has rules against Byzantine clients, or the run has such clients.
        server_optimizer: The name of the server's optimiser.

    Raises:
        ValueError: Two parts do not fit together. The message has the reason and the remedy.
    """
    objective, exchanges = settings.objective, Phase.EXCHANGE in (method.phase(1, 2), method.phase(2, 2))
    if exchanges and objective.corrects:
        raise ValueError(
            f"the first local step of {method.name} must equal a step on all clients' batches together, but {objective.name} changes each "
            "client's gradient by itself: take another objective"
        )
    if exchanges and objective.repeats:
        raise ValueError(
            f"{objective.name} runs each batch twice through the network, but {method.name} exchanges the statistics of the first batch "
            "only once: take another objective"
        )
    if exchanges and settings.clip != "none":
        raise ValueError(
            f"the first local step of {method.name} must equal a step on all clients' batches together, but clipping changes each client's "
            "gradient by itself: set clip='none'"
        )
    if objective.anchored and not method.shares(Role.WEIGHT):
        raise ValueError(
            f"{objective.name} compares a client's weights with the server's, but {method.name} shares no weights: set objective to none"
        )
    if robust and (objective.travels or settings.maintain == "global"):
        what = f"{objective.name}'s control variates" if objective.travels else "the buffers of maintain-momentum='global'"
        raise ValueError(
            f"{what} are sent with the weights, and no robust rule guards them against Byzantine clients: take another "
            "objective, or another value of maintain-momentum"
        )
    if settings.update == "gradients" and method.frozen - {Role.STATISTIC}:
        raise ValueError(
            f"{method.name} freezes scale and shift at the clients, but with update='gradients' the server changes them: set "
            "update='weights' or freeze-what='statistics'"
        )
    if settings.update == "gradients" and server_optimizer == "fedacg":
        raise ValueError(
            "server-optimizer fedacg needs the clients' weights after local steps, but update='gradients' sends one gradient: take fedavgm"
        )


def check_weights(method: Method, client_weights: str) -> None:
    """Check that ``client_weights`` is ``samples`` if ``method`` exchanges layer by layer in training (FedTAN).

    Raises:
        ValueError: ``client_weights`` is another value, and the method exchanges layer by layer.
    """
    if client_weights != "samples" and Phase.EXCHANGE in (method.phase(1, 2), method.phase(2, 2)):
        raise ValueError(
            f"{method.name}'s first step equals centralised training only if clients are weighted by the sizes of their batches: "
            f"client_weights must be 'samples', but got {client_weights!r}"
        )


def rate_for(objective: Objective, optimizer: Optimizer, others: Sequence[float] = ()) -> float | None:
    """Return the learning rate of ``optimizer``; None if it has none.

    Args:
        objective: The local objective.
        optimizer: The optimiser.
        others: The rates of other optimisers that take part in the same step.

    Raises:
        ValueError: The objective needs plain SGD with one learning rate. But ``optimizer`` is not SGD, has momentum or
            ``maximize=True``, or there are several rates.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
    if objective.travels and (not isinstance(optimizer, SGD) or any(group["momentum"] for group in optimizer.param_groups)):
        raise ValueError(
            f"{objective.name}'s control variates are means of the gradients of plain SGD, but the optimiser is "
            f"{type(optimizer).__name__}{' with momentum' * isinstance(optimizer, SGD)}: take torch.optim.SGD without momentum"
        )
    if objective.travels and any(group["maximize"] for group in optimizer.param_groups):
        raise ValueError(f"{objective.name} lowers the loss, but the optimiser has maximize=True: change the sign of the loss instead")
    if objective.travels and len(several := sorted({*rates, *others})) > 1:
        raise ValueError(
            f"{objective.name}'s control variates are changes of weights divided by one learning rate, but the loop steps with the rates "
            f"{', '.join(f'{rate:g}' for rate in several)}: give all parameters the same rate"
        )
    return rates[0] if rates else None


def learns(model: nn.Module) -> bool:
    """Tell whether ``model`` has a parameter that can be trained, that is, one with ``requires_grad=True``."""
    return any(parameter.requires_grad for parameter in model.parameters())


def check_learns(model: nn.Module, learning: bool | None = None) -> None:
    """Check that ``model`` has a parameter that can be trained.

    Args:
        model: The network as its author wrote it.
        learning: What ``learns`` returned earlier, when a copy of ``model`` was made. Default: as it is now.

    Raises:
        ValueError: No parameter has ``requires_grad=True``.
    """
    if not (learns(model) if learning is None else learning):
        raise ValueError(
            f"{type(model).__name__} has no parameter with requires_grad=True, so there is nothing to train: give a network with such "
            "parameters, or only measure its statistics (fl-bn recalibrate)"
        )
