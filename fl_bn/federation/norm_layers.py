"""Whether a network has the layers that a method is about: said, or refused, before round 1, by one rule in every door."""

from __future__ import annotations

import logging
from collections import defaultdict

from torch import nn

from fl_bn.kinds import kind_of
from fl_bn.methods import Method, Refresh, Report
from fl_bn.roles import Role, batch_norms, tracks_statistics, unknown_norms

LOGGER = logging.getLogger("flwr")
SHOWN = 3  # layers of a kind that a message names


def has_batch_norm(model: nn.Module) -> bool:
    """Whether ``model``, converted or not, has a layer that methods take for BatchNorm."""
    return bool(batch_norms(model)) or any(kind_of(module) is not None for module in model.modules())


def no_batch_norm(model: nn.Module, method: Method) -> str:
    """Say that ``method`` has nothing to do in a ``model`` without BatchNorm.

    Returns:
        One sentence; empty where it has something to do, or where averaging is all that was asked.
    """
    if has_batch_norm(model) or method.prepare is not None or not method.shares(Role.WEIGHT) or method.name == "fedavg":
        return ""
    if without_subject(method):
        said = (
            f"method {method.name} is about the statistics of BatchNorm, but this model has no BatchNorm layer, so all that is left is "
            "federated averaging. Take fedavg, or a network with BatchNorm"
        )
    else:
        said = f"this model has no BatchNorm layer: method {method.name} is plain federated averaging here"
    lookalikes = {type(layer).__name__: None for layer in unknown_norms(model).values() if tracks_statistics(layer)}
    return said + "".join(f". If {kind} is BatchNorm, register it: {registering(kind)}" for kind in lookalikes)


def registering(kind: str) -> str:
    """The call that registers a class named ``kind``, which is no subclass of torch's BatchNorm, as one of its kinds."""
    return f"fl_bn.register_batch_norm({kind}, convert=...)"


def without_subject(method: Method) -> bool:
    """Whether ``method`` is about statistics that clients report or measure: without BatchNorm it is refused.

    Others are federated averaging there, and say so: those that keep BatchNorm at the clients, or replace it by another normaliser.
    """
    return method.report is not Report.NOTHING or method.refresh is not Refresh.NOTHING


def check_layers(model: nn.Module, method: Method) -> None:
    """Look for BatchNorm in ``model``, converted for ``method`` or not.

    Raises:
        ValueError: there is none, and without it ``method`` means nothing.
    """
    if without_subject(method) and (reason := no_batch_norm(model, method)):
        raise ValueError(reason)


def looks_like_norm(model: nn.Module, method: Method) -> list[str]:
    """Name the layers of ``model`` that are norm layers by their looks alone, one sentence for each kind."""
    found = defaultdict[type[nn.Module], list[str]](list)
    for name, layer in unknown_norms(model).items():
        if kind_of(layer) is None:
            found[type(layer)].append(name or "the model")
    said = []
    for kind, names in found.items():
        which = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        where = f"{which} ({kind.__name__})"
        if tracks_statistics(model.get_submodule("" if names[0] == "the model" else names[0])):
            fate = "shares its tensors" if any(map(method.shares, Role)) else "keeps its tensors"
            said.append(
                f"{where}: looks like BatchNorm, but is none by type, so method {method.name} {fate} like those of any other layer. If it "
                f"is BatchNorm, register it: {registering(kind.__name__)}"
            )
        else:
            said.append(f"{where}: a norm layer by its name alone, treated like any other layer without statistics")
    return said


def say_absent(model: nn.Module, method: Method) -> None:
    """Log, once at the start of a run, what ``method`` does not find in the unconverted ``model``, or does not know."""
    if reason := no_batch_norm(model, method):
        LOGGER.warning("%s", reason)
    for line in looks_like_norm(model, method):
        LOGGER.log(logging.WARNING if "register" in line else logging.INFO, "%s", line)
