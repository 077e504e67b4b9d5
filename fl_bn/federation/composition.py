"""Which local objectives, momentum, clipping, methods and servers do not go together, and why."""

from __future__ import annotations

from fl_bn.federation.settings import LocalTraining
from fl_bn.methods import Method, Phase
from fl_bn.roles import Role


def check_composition(method: Method, settings: LocalTraining, robust: bool = False, server_optimizer: str = "fedavg") -> None:
    """``robust``: the server has rules against Byzantine clients, or the run has such clients.

    Raises:
        ValueError: the combination makes no sense; the message says why, and what to do.
    """
    objective, exchanges = settings.objective, Phase.EXCHANGE in (method.phase(1, 2), method.phase(2, 2))
    if exchanges and objective.corrects:
        raise ValueError(
            f"{method.name} makes the centralised step first, but {objective.name} corrects each client's gradient by itself, so it would "
            "be none: take another objective"
        )
    if exchanges and objective.repeats:
        raise ValueError(
            f"{objective.name} computes each batch twice, but {method.name} exchanges the statistics of its first batch once: take another "
            "objective"
        )
    if exchanges and settings.clip != "none":
        raise ValueError(
            f"{method.name} makes the centralised step first, but clipping changes each client's gradient by itself, so it would be none: "
            "set clip to none"
        )
    if objective.anchored and not method.shares(Role.WEIGHT):
        raise ValueError(
            f"{objective.name} compares a client with the server's model, but {method.name} shares none: set objective to none"
        )
    if robust and (objective.travels or settings.maintain == "global"):
        what = f"{objective.name}'s control variates" if objective.travels else "maintain-momentum='global'"
        raise ValueError(f"{what} travel beside the weights, and no robust rule guards them: leave them out against Byzantine clients")
    if settings.update == "gradients" and method.frozen - {Role.STATISTIC}:
        raise ValueError(
            f"{method.name} freezes scale and shift at the clients, but with update='gradients' the server steps them: set update to "
            "weights, or freeze-what to statistics"
        )
    if settings.update == "gradients" and server_optimizer == "fedacg":
        raise ValueError("fedacg takes what clients' weights have moved, but update='gradients' sends one gradient: take fedavgm")
