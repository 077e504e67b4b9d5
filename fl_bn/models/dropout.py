"""Networks without dropout, for papers that fine-tune a network and drop its dropout layers."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd


def without_dropout(model: nn.Module) -> nn.Module:
    """Switch off the dropout layers of ``model``, in place.

    Returns:
        ``model``.

    Raises:
        ValueError: ``model`` has no dropout layer. A call of ``torch.nn.functional.dropout`` in its
            ``forward`` is no layer.
    """
    layers = [module for module in model.modules() if isinstance(module, _DropoutNd)]
    if not layers:
        raise ValueError(f"dropout=false is for networks with dropout layers, but {type(model).__name__} has none: leave dropout out")
    for layer in layers:
        layer.p = 0.0
    return model
