"""Switch off dropout in a network, as in papers that fine-tune a network without it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch off the dropout layers of ``model``, in place.

    Returns:
        ``model``.

    Raises:
        ValueError: ``model`` has no dropout layer. Calls of ``torch.nn.functional.dropout`` in ``forward`` are not found.
    """
    layers = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    if not layers:
        raise ValueError(f"dropout=false is for networks with dropout layers, but {type(model).__name__} has none: leave dropout out")
    for layer in layers:
        layer.p = 0.0
    return model
