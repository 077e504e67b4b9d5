"""Compare two test accuracies of a finished run: one with its running statistics, and one with exact statistics.

Clients of FedBN and SiloBN do not send their statistics. They gather the statistics while they train their own
weights, but are tested with the averaged weights. Exact statistics are measured with the averaged weights: on the
client's training samples or, if the method shares statistics, on those of all clients.
"""

from __future__ import annotations

from statistics import fmean

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_bn.app import assembly
from fl_bn.app.sweep.cells import Cell
from fl_bn.bn.roles import Role, batch_norms
from fl_bn.federation.local import evaluate

AXIS = "statistics"
WAYS = ("as kept", "measured anew")


def measured(cell: Cell) -> dict[str, float]:
    """Return the test accuracies (0..1), each a mean over the clients: kind of statistics (a name in ``WAYS``) -> accuracy."""
    config = cell.config
    samples = [assembly.client_samples(config, client)[:2] for client in range(config.clients)]
    union, found = torch.cat([train.x for train, _ in samples]), dict[str, list[float]]()
    for client, (train, test) in enumerate(samples):
        model = assembly.client_model(config)
        own = cell.path / "clients" / f"client-{client}.safetensors"
        model.load_state_dict(load_file(own if own.exists() else cell.path / "model.safetensors"))
        found.setdefault("as kept", []).append(evaluate(model, test)["accuracy"])
        measure(model, union if config.build_method().shares(Role.STATISTIC) else train.x)
        found.setdefault("measured anew", []).append(evaluate(model, test)["accuracy"])
    return {way: fmean(values) for way, values in found.items()}


def measure(model: nn.Module, x: Tensor) -> None:
    """Set the running statistics of every BatchNorm layer to the statistics of its input when ``x`` is passed as one batch.

    Args:
        model: The network, which is changed in place, and is in training mode afterwards.
        x: The samples, of shape (N, ...).
    """
    layers = batch_norms(model)
    momentum = {name: layer.momentum for name, layer in layers.items()}
    for layer in layers.values():
        layer.momentum = 1.0
    with torch.no_grad():
        model.train()(x)
    for name, layer in layers.items():
        layer.momentum = momentum[name]
