"""Check before round 1 that a network has BatchNorm if its method needs it. Every way of starting a run does this check."""

from __future__ import annotations

import logging
from collections import defaultdict

from torch import nn

from fl_bn.bn.kinds import kind_of
from fl_bn.bn.roles import Role, batch_norms, unknown_norms
from fl_bn.methods import Method

LOGGER = logging.getLogger("flwr")


def has_batch_norm(model: nn.Module) -> bool:
    """Tell whether ``model``, converted or not, has a layer that methods treat as BatchNorm."""
    return bool(batch_norms(model)) or any(kind_of(module) is not None for module in model.modules())


def no_batch_norm(model: nn.Module, method: Method) -> str:
    """Explain that ``method`` is plain federated averaging for ``model``, because this model has no BatchNorm layer.

    Returns:
        The explanation. Empty if the method differs from plain averaging for this model, or is ``fedavg`` itself.
    """
    if has_batch_norm(model) or method.prepare is not None or not method.shares(Role.WEIGHT) or method.name == "fedavg":
        return ""
    if method.has_statistics:
        sentence = (
            f"method {method.name} is about the statistics of BatchNorm, but this model has no BatchNorm layer, so the method would be "
            "plain federated averaging. Take fedavg, or a network with BatchNorm"
        )
    else:
        sentence = f"this model has no BatchNorm layer: method {method.name} is plain federated averaging here"
    lookalikes = {type(layer).__name__: None for layer in unknown_norms(model).values()}
    return sentence + "".join(f". If {kind} is BatchNorm, register it: {registering(kind)}" for kind in lookalikes)


def registering(kind: str) -> str:
    """Return, as text, the call that makes fl-bn treat layers of the class named ``kind`` as BatchNorm.

    Only a class that does not derive from torch's BatchNorm needs this call.
    """
    return f"fl_bn.register_batch_norm({kind}, convert=...)"


def check_layers(model: nn.Module, method: Method) -> None:
    """Check that ``model``, converted for ``method`` or not, has BatchNorm if ``method`` needs it.

    Raises:
        ValueError: ``model`` has no BatchNorm layer, and ``method`` uses its statistics.
    """
    if method.has_statistics and (reason := no_batch_norm(model, method)):
        raise ValueError(reason)


def looks_like_norm(model: nn.Module) -> list[str]:
    """Return a sentence about each class of layers in ``model`` with running statistics that fl-bn does not know as BatchNorm."""
    by_kind = defaultdict[str, list[str]](list)
    for name, layer in unknown_norms(model).items():
        if kind_of(layer) is None:
            by_kind[type(layer).__name__].append(name or "the model")
    return [
        f"{', '.join(names)} ({kind}): looks like BatchNorm, but its class is not known as BatchNorm, so its tensors are treated like "
        f"those of any other layer. If it is BatchNorm, register it: {registering(kind)}"
        for kind, names in by_kind.items()
    ]


def say_absent(model: nn.Module, method: Method) -> None:
    """Warn in the log if the unconverted ``model`` lacks BatchNorm or has unknown norm layers. Call this at the start of a run."""
    for line in filter(None, [no_batch_norm(model, method), *looks_like_norm(model)]):
        LOGGER.warning("%s", line)
