"""Measure how far the gradient of a client is from its part of the centralised gradient, because of batch statistics.

Source: FedTAN's paper, assumption 1. Because BatchNorm uses local statistics, the local gradient deviates by B_i from
its part of the centralised gradient. The deviation does not vanish with the learning rate. So FedAvg with BatchNorm
does not converge if the clients' data differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl_bn.bn.modules import copied
from fl_bn.bn.roles import batch_norms, inputs_like
from fl_bn.exchange.call import Layer
from fl_bn.exchange.local import LocalExchange, Turns, admit, dismiss, end_task
from fl_bn.exchange.session import Session
from fl_bn.methods.fedtan import exchanging
from fl_bn.task import CLASSIFICATION, Task

Batch = tuple[Tensor, Tensor]
Gradient = Mapping[str, Tensor]


class Deviations(NamedTuple):
    """Hold the deviations of the clients' gradients.

    Attributes:
        squared: The squared deviation B_i^2 of every client's gradient, see ``gradient_deviations``.
        centralised: The squared norm of the gradient on the union of the batches, for comparison.
    """

    squared: list[float]
    centralised: float


def gradient_deviations(model: nn.Module, batches: Sequence[Batch], task: Task = CLASSIFICATION) -> Deviations:
    """Compute B_i^2 = ||g_i - c_i||^2 of every client's batch, at the weights of ``model``.

    ``g_i`` is the gradient of the mean loss of client i, where BatchNorm uses the client's own batch statistics, as
    ``nn.BatchNorm`` does. ``c_i`` is the gradient of the same loss, where BatchNorm uses the statistics of all batches
    together. For ``c_i``, the gradients with respect to these statistics are averaged over the clients (FedTAN, Algorithms 2 and 3).
    The gradient on all batches together is ``sum p_i c_i``, with ``p_i`` proportional to the batch sizes. Dropout is off.
    The activations of all clients are in memory at the same time.

    Args:
        model: A network converted for FedTAN.
        batches: Inputs and targets of each client.
        task: The task, for its loss.

    Symbols: B_i^2 -> squared, p_i -> batch sizes, normalised.
    """
    like = inputs_like(model).dtype
    layers = {name: Layer(layer.running_mean.numel(), like) for name, layer in batch_norms(model).items() if layer.running_mean is not None}
    session = Session(range(len(batches)), layers)
    tokens = admit(session)

    def shared(client: int) -> Gradient:
        try:
            exchange = LocalExchange(tokens[client], len(batches[client][1]))
            return _gradient(model, batches[client], task, exchange)
        except BaseException as error:
            end_task(tokens[client], repr(error))
            raise

    try:
        centralised = Turns(len(batches)).run([partial(shared, client) for client in range(len(batches))])
    finally:
        dismiss(tokens)
    squared = [_distance(_gradient(model, batch, task), share) for batch, share in zip(batches, centralised, strict=True)]
    total = sum(len(y) for _, y in batches)
    mean = {
        n: torch.stack([g[n] * (len(y) / total) for g, (_, y) in zip(centralised, batches, strict=True)]).sum(0) for n in centralised[0]
    }
    return Deviations(squared, float(sum(g.double().square().sum() for g in mean.values())))


def _gradient(model: nn.Module, batch: Batch, task: Task, exchange: LocalExchange | None = None) -> Gradient:
    mine = copied(model).eval()
    mine.zero_grad()
    for layer in batch_norms(mine).values():
        layer.train()
    if exchange is None:
        task.loss(task.predict(mine, batch[0]), batch[1]).backward()
    else:
        with exchanging(mine, exchange, lambda: False):
            task.loss(task.predict(mine, batch[0]), batch[1]).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in mine.named_parameters() if p.requires_grad}


def _distance(a: Gradient, b: Gradient) -> float:
    return float(sum((a[name] - b[name]).double().square().sum() for name in a))
