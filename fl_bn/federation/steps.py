"""Check that fl-bn's training loop can use a user's optimiser and scheduler: it calls ``step()`` without arguments after every batch."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

LOGGER = logging.getLogger("flwr")
OWN_LOOP = "or write a loop of your own (docs/how-to/loop.md)"


def check_parameters(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Check that ``optimizer`` updates some of the given ``parameters``, and no others.

    Args:
        optimizer: The optimiser that the user's function made.
        parameters: The parameters that the function was given.

    Raises:
        ValueError: It updates none of them, or others, too. The function then ignores its argument, or returns an optimiser made before.
    """
    given = {id(p) for p in parameters}
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    if foreign := sum(id(p) not in given for p in mine):
        raise ValueError(
            f"optimizer makes {type(optimizer).__name__} with {foreign} of {len(mine)} parameters that are not those that it was given, so "
            "training them would not train a client's network: make it anew from the argument, such as lambda parameters: "
            "SGD(parameters, lr=0.1)"
        )
    if not mine:
        raise ValueError(f"optimizer makes {type(optimizer).__name__} without parameters, so no weight would change: give it the argument")


def check_optimizer_steps(optimizer: Optimizer, model: nn.Module) -> None:
    """Check that ``optimizer`` can step after every batch. Warn if it has a scheduler, which ``Federation`` does not step.

    Args:
        optimizer: The optimiser that the user's function made for the parameters of ``model``.
        model: The network.

    Raises:
        ValueError: Its step needs an argument (LBFGS), or it is SparseAdam and a parameter has dense gradients.
    """
    kind = type(optimizer).__name__
    if needed := _needed(optimizer):
        raise ValueError(
            f"optimizer makes {kind}, whose step needs {needed}, but Federation calls step() once per batch: take SGD or Adam, {OWN_LOOP}"
        )
    if isinstance(optimizer, SparseAdam):
        sparse = {id(p) for module in model.modules() if getattr(module, "sparse", False) for p in module.parameters(recurse=False)}
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if dense := [name for name, p in model.named_parameters() if id(p) in mine - sparse]:
            raise ValueError(f"optimizer makes {kind}, which needs sparse gradients, but the gradient of {dense[0]} is dense: take Adam")
    if any("initial_lr" in group for group in optimizer.param_groups):
        LOGGER.warning(
            "optimizer makes a scheduler of %s, too, which Federation does not step: give it as scheduler=..., or the rate stays at %.3g",
            kind,
            optimizer.param_groups[0]["lr"],
        )


def check_scheduler_steps(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Check that ``scheduler`` changes the rate of ``optimizer``, and can step after every batch.

    Raises:
        ValueError: It is of another optimiser, or its step needs an argument (ReduceLROnPlateau).
    """
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"scheduler makes {type(scheduler).__name__} of another optimiser than the one that it was given, whose rate would stay the "
            "same: make it anew from the argument, such as lambda optimizer: StepLR(optimizer, 10)"
        )
    if needed := _needed(scheduler):
        raise ValueError(
            f"scheduler makes {type(scheduler).__name__}, whose step needs {needed}, but Federation calls step() once per batch: take a "
            f"scheduler of steps, such as StepLR or CosineAnnealingLR, {OWN_LOOP}"
        )


def _needed(steps: Any) -> str:
    """Return, in words, the arguments that ``steps.step`` requires. Empty if there are none."""
    _, *parameters = inspect.signature(type(steps).step).parameters.values()  # the class's: a scheduler wraps its optimiser's own
    named = [one.name for one in parameters if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return f"arguments ({', '.join(named)})" if len(named) > 1 else f"a {named[0]}" if named else ""
