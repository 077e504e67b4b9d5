"""Measure how accurate FedAvg's weights are with each of three kinds of BatchNorm statistics: one client's, averaged, and exact."""

from __future__ import annotations

from collections.abc import Sequence

from safetensors.torch import load_file

from experiments.definitions.programs.recalibration_study import plan
from fl_bn.app import assembly
from fl_bn.app.sweep.cells import Cell
from fl_bn.federation.local import Samples, evaluate
from fl_bn.federation.recalibration import recalibrate

__all__ = ["AXIS", "WAYS", "measured", "plan"]
AXIS = "statistics"
WAYS = ("one client's", "averaged", "exact")


def measured(cell: Cell) -> dict[str, float]:
    """Return the test accuracies (0..1) of a finished run: kind of statistics (a name in ``WAYS``) -> accuracy.

    ``one client's`` statistics are those of client 0, measured with the averaged weights.
    """
    data, clients = assembly.dataset(cell.config), [assembly.client_samples(cell.config, i)[0] for i in range(cell.config.clients)]

    def accuracy(measuring: Sequence[Samples]) -> float:
        model = assembly.client_model(cell.config)
        model.load_state_dict(load_file(cell.path / "model.safetensors"))
        if measuring:
            recalibrate(model, measuring)
        return evaluate(model, Samples(data.x_test, data.y_test))["accuracy"]

    return {"one client's": accuracy(clients[:1]), "averaged": accuracy([]), "exact": accuracy(clients)}
