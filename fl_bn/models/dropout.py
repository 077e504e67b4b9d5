"""Networks without dropout, as papers have them that fine-tune networks with it."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def without_dropout(model: nn.Module) -> nn.Module:
    """Return ``model``, changed in place: its dropout layers leave everything as it is.

    Raises:
        ValueError: ``model`` has no dropout layer. A call of ``torch.nn.functional.dropout`` in its ``forward`` is none.
    """
    layers = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    if not layers:
        raise ValueError(f"dropout=false is for networks with dropout layers, but {type(model).__name__} has none: leave dropout out")
    for layer in layers:
        layer.p = 0.0
    return model
