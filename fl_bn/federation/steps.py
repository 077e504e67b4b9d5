"""Check that fl-bn's training loop can use a user's optimiser and scheduler.

The loop calls ``step()`` without arguments after every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


def check_parameters(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Check that ``optimizer`` updates some of the given ``parameters``, and no others.

    Args:
        optimizer: The optimiser that the user's function made.
        parameters: The parameters that the function was given.

    Raises:
        ValueError: The optimiser updates none of ``parameters``, or also others. The user's function then ignores its
            argument, or did not make the optimiser anew.
    """
    given = {id(p) for p in parameters}
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    if foreign := sum(id(p) not in given for p in mine):
        raise ValueError(
            f"optimizer must update only the parameters that it is given, but {foreign} of the {len(mine)} parameters of its "
            f"{type(optimizer).__name__} are others, so a client's network would not be trained: make the optimiser anew from the "
            "argument, such as lambda parameters: SGD(parameters, lr=0.1)"
        )
    if not mine:
        raise ValueError(
            f"optimizer makes {type(optimizer).__name__} without parameters, so no weight would change: pass on the function's argument, "
            "such as lambda parameters: SGD(parameters, lr=0.1)"
        )


def check_scheduler_steps(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Check that ``scheduler`` changes the rate of ``optimizer``.

    Raises:
        ValueError: The scheduler is of another optimiser.
    """
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"scheduler makes {type(scheduler).__name__} of another optimiser than the one that it was given, so the rate of the given "
            "one would stay the same: make the scheduler anew from the argument, such as lambda optimizer: StepLR(optimizer, 10)"
        )


def check_follows_rate(make: Callable[[Any], Optimizer], make_scheduler: Callable[[Any], Any], parameters: Sequence[nn.Parameter]) -> None:
    """Check that a scheduler starts from the optimiser's learning rate, which ``schedule`` and the method change between rounds.

    Args:
        make: Makes an optimiser of parameters.
        make_scheduler: Makes a scheduler of an optimiser.
        parameters: The parameters for the optimisers of this check.

    Raises:
        ValueError: The scheduler ignores the optimiser's learning rate, as OneCycleLR and CyclicLR do.
    """
    rates = []
    for factor in (1.0, 0.5):
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = group["lr"] * factor
        scheduler = make_scheduler(optimizer)
        rates.append([float(group.get("lr", 0.0)) for group in optimizer.param_groups])
    if any(full and abs(half - full / 2) > 1e-6 * abs(full) for full, half in zip(*rates, strict=True)):
        raise ValueError(
            f"scheduler makes {type(scheduler).__name__}, which ignores the optimiser's learning rate. The changes of that rate by "
            "the argument schedule=..., and in rounds with frozen statistics, would be lost. Take a scheduler that starts from the "
            "optimiser's rate, such as LambdaLR or CosineAnnealingLR"
        )
