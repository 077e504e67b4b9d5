"""Record the shared tensors with which a run evaluates: the arguments of the strategy's hook ``configure_evaluate``."""

from __future__ import annotations

from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from fl_bn.flower import BatchNormStrategy

Arrays = dict[str, np.ndarray]


def noted(strategy: BatchNormStrategy) -> dict[int, Arrays]:
    """Return round -> the shared tensors that are evaluated after it. The dict is filled while ``strategy`` runs."""
    found: dict[int, Arrays] = {}
    hook: Any = strategy.configure_evaluate

    def configure_evaluate(server_round: int, arrays: ArrayRecord, config: Any, grid: Any) -> Any:
        found[server_round] = {name: arrays[name].numpy().copy() for name in strategy.transport.shared.tensors()}
        return hook(server_round, arrays, config, grid)

    strategy.configure_evaluate = configure_evaluate  # type: ignore[method-assign]
    return found
