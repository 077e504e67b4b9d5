"""Centre gradients: the gradient of a weight loses its mean over the inputs of each output.

BatchNorm subtracts the batch's mean from its input, so the mean input of the layer before has no part in that layer's
gradient. If training normalises with constants, it has the largest part: inputs that come out of a ReLU are positive,
and their mean points in nearly the same direction for every output. That one direction then decides which learning
rate is stable, and along it clients of different classes pull apart. Without it FBN learns as fast as BatchNorm on IID
clients: docs/methods/fbn.md.

Gradient Centralization: A New Optimization Technique for Deep Neural Networks, Yong et al., ECCV 2020 (equation 1).
There every weight is centred. Here the head is not, nor a weight of few inputs, which has no direction to lose.
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
"""Fewest inputs of an output: a linear layer on two features would lose half of the directions that it may learn."""


def centred_weights(model: nn.Module) -> list[str]:
    """Return the names of the weights whose gradients are centred: those of linear layers and convolutions but the head.

    A weight that is derived from others (spectral norm, parametrizations) is no parameter, and is left out.
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
    """Centre gradients in the block, as autograd makes them, whatever loop computes them.

    Args:
        parameters: Name -> parameter; those that do not learn are skipped.
        names: See ``centred_weights``.
        stacked: Whether a first axis counts clients.
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
