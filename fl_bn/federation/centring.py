"""Centre gradients: subtract from a weight's gradient its mean over all inputs of an output unit, for each unit.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from fl_bn.models.head import head_of

CENTRED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose first axis of ``weight`` is the output, and whose other axes are the inputs."""
FEWEST = 8
"""The smallest number of inputs per output unit. With two inputs, a centred gradient could move a unit in one direction only."""


def centred_weights(model: nn.Module) -> list[str]:
    """Return the names of the weights to centre: those of linear layers and convolutions, without the network's last layer.

    A weight that is computed from other parameters (spectral norm, parametrizations) is left out, as it is no parameter.
    """
    head = head_of(model)
    names = {
        id(module.weight): f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, CENTRED) and "weight" in module._parameters and not (head and module is head[1])
    }
    shapes = {id(parameter): parameter.shape for parameter in model.parameters()}
    return [name for key, name in names.items() if math.prod(shapes[key][1:]) >= FEWEST]


@contextmanager
def centring(parameters: Mapping[str, Tensor], names: list[str], stacked: bool = False) -> Iterator[None]:
    """Centre each gradient as soon as autograd has computed it, inside the ``with`` block.

    Args:
        parameters: Name -> parameter. Parameters with ``requires_grad=False`` are skipped.
        names: The names of the weights to centre, see ``centred_weights``.
        stacked: Whether axis 0 of each parameter is the client, as in the vectorised engine.
    """
    with ExitStack() as hooks:
        for name in names:
            if name in parameters and parameters[name].requires_grad:
                hook = parameters[name].register_hook(_centred_from(1 + stacked))
                hooks.callback(hook.remove)
        yield


def _centred_from(axis: int) -> Callable[[Tensor], Tensor]:
    def centred(gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(dim=tuple(range(axis, gradient.dim())), keepdim=True)

    return centred
