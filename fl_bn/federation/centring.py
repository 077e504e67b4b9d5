"""Centre gradients: for each output unit of a layer, subtract from its weights' gradient the mean over the unit's inputs.

BatchNorm subtracts the batch's mean from its input. So the mean input of the layer before BatchNorm contributes nothing
to that layer's gradient. If training normalises with constants, the mean input contributes the largest part. The reason:
inputs that come out of a ReLU are positive, so their mean has nearly the same direction for every output unit. This
direction limits the learning rate, and clients with different classes drift apart along it. With centred gradients FBN
learns as fast as BatchNorm on IID clients: docs/methods/fbn.md.

Gradient Centralization: A New Optimization Technique for Deep Neural Networks, Yong et al., ECCV 2020 (equation 1).
The paper centres every weight. This module leaves out the network's last layer (``head_of``), and weights with fewer
than ``FEWEST`` inputs per output unit.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from fl_bn.models.head import head_of

CENTRED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose first axis of ``weight`` is the output, and whose other axes are the inputs."""
FEWEST = 8
"""The smallest number of inputs per output unit. With two inputs, a centred gradient could move a unit in one direction only."""


def centred_weights(model: nn.Module) -> list[str]:
    """Return the names of the weights to centre: those of linear layers and convolutions, without the network's last layer.

    A weight that is computed from other parameters (spectral norm, parametrizations) is left out, as it is no parameter.
    A weight with fewer than ``FEWEST`` inputs per output unit is left out, too.
    """
    head = head_of(model)
    found = {
        id(module.weight): (f"{name}.weight" if name else "weight", module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, CENTRED) and "weight" in module._parameters and not (head and module is head[1])
    }
    return [name for name, shape in found.values() if math.prod(shape[1:]) >= FEWEST]


class Centring:
    """Centre each gradient as soon as autograd has computed it, inside the ``with`` block. Any training loop can be inside.

    A loop may also write gradients to ``p.grad`` that autograd did not compute there, such as those of
    ``torch.func.grad``. The method ``complete`` centres these before an optimiser steps along them.

    Args:
        parameters: Name -> parameter. While a parameter has ``requires_grad=False``, it has no gradient to centre.
        names: The names of the weights to centre, see ``centred_weights``.
        stacked: Whether axis 0 of each parameter is the client, as in the vectorised engine.
    """

    def __init__(self, parameters: Mapping[str, Tensor], names: Sequence[str], stacked: bool = False) -> None:
        self._weights = {name: parameters[name] for name in names if name in parameters and parameters[name].is_floating_point()}
        self._axis, self._hooks = 1 + stacked, ExitStack()
        self._made = set[str]()  # the weights with a centred gradient along which no step was made

    @property
    def active(self) -> bool:
        """Tell whether there is a weight to centre."""
        return bool(self._weights)

    def __enter__(self) -> Centring:
        for name, weight in self._weights.items():
            learns = weight.requires_grad
            if not learns:  # torch takes hooks only of tensors that need gradients, but keeps them when that changes
                weight.requires_grad_(True)
            self._hooks.callback(weight.register_hook(partial(self._centred, name)).remove)
            weight.requires_grad_(learns)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _centred(self, name: str, gradient: Tensor) -> Tensor:
        self._made.add(name)
        return gradient - self._mean(gradient)

    def _mean(self, gradient: Tensor) -> Tensor:
        return gradient.mean(dim=tuple(range(self._axis, gradient.dim())), keepdim=True)

    @torch.no_grad()
    def complete(self, parameters: Container[int]) -> None:
        """Centre ``p.grad``, in place, where autograd did not compute it. ``parameters`` has the ids of the parameters to check."""
        if len(self._made) == len(self._weights):
            return
        for name, weight in self._weights.items():
            if name not in self._made and weight.grad is not None and id(weight) in parameters:
                weight.grad.sub_(self._mean(weight.grad))
                self._made.add(name)

    def stepped(self, parameters: Container[int] | None = None) -> None:
        """Forget which gradients are centred, since a step was made along them.

        Args:
            parameters: The ids of the parameters that moved. None: all.
        """
        self._made = {name for name in self._made if parameters is not None and id(self._weights[name]) not in parameters}
