"""Change gradients before a step: centre them, and clip them.

**Centring** subtracts from the gradient of each output unit's weights its mean over
the unit's inputs. BatchNorm subtracts the batch's mean, so that the mean input of
the layer before does not contribute to that layer's gradient. If training
normalises with constants, it contributes most: after a ReLU, the positive inputs'
mean has nearly the same direction for every unit, which limits the learning rate,
and lets clients with different classes drift apart. With centred gradients FBN
learns as fast as BatchNorm on IID clients: docs/methods/fbn.md.

Gradient Centralization: A New Optimization Technique for Deep Neural Networks, Yong
et al., ECCV 2020 (equation 1), where every weight is centred.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import SGD, Optimizer

from fl_bn.models.head import head_of
from fl_bn.support.names import check_name

if TYPE_CHECKING:
    from fl_bn.federation.settings import LocalTraining
    from fl_bn.methods import Method

CLIPS = ("none", "norm", "round", "value", "adaptive")
PATH = 20.0
"""Limit of the clip ``round`` for networks that train with constant statistics: by experiments."""
STEP = 1.0
"""Limit of the clip ``round`` in rounds of one local step: docs/methods/fbn.md."""
SMALLEST = 1e-3  # the smallest norm that weights count with; otherwise weights that start at zero could never change
CENTRED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose ``weight`` has the output as first axis, and the inputs as others."""
FEWEST = 8
"""The fewest inputs per unit. With two, a centred gradient has one direction only."""


def centred_weights(model: nn.Module) -> list[str]:
    """Return the weights to centre: of linear layers and convolutions but the last layer.

    Weights computed from other parameters, or with fewer than ``FEWEST`` inputs per
    unit, are left out.
    """
    head = head_of(model)
    found = {
        id(module.weight): (f"{name}.weight" if name else "weight", module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, CENTRED) and "weight" in module._parameters and not (head and module is head[1])
    }
    return [name for name, shape in found.values() if math.prod(shape[1:]) >= FEWEST]


@contextmanager
def centring(parameters: Mapping[str, Tensor], names: Sequence[str], stacked: bool = False) -> Iterator[None]:
    """Centre the gradients of ``names`` as autograd computes them, in the block, in any loop.

    ``stacked``: axis 0 of each parameter is the client.
    """

    def centred(gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(dim=tuple(range(1 + stacked, gradient.dim())), keepdim=True)

    with ExitStack() as hooks:
        for weight in [parameters[name] for name in names if name in parameters and parameters[name].is_floating_point()]:
            learns = weight.requires_grad
            weight.requires_grad_(True)  # torch takes hooks only of tensors that need gradients, but keeps them when that changes
            hooks.callback(weight.register_hook(centred).remove)
            weight.requires_grad_(learns)
        yield


def unit_norm(x: Tensor) -> Tensor:
    """Return the norm of each output unit of a weight (out, ...), as (out, 1, ...).

    A tensor with at most one axis has one norm over all its values.
    """
    axes = tuple(range(1, x.dim())) or None
    return torch.linalg.vector_norm(x, dim=axes, keepdim=axes is not None)  # type: ignore[no-any-return]


def clip(
    parameters: Iterable[nn.Parameter],
    how: str,
    limit: float,
    head: Iterable[nn.Parameter] = (),
    norm_of: Callable[[Tensor], Tensor] = unit_norm,
) -> None:
    """Clip the gradients in place.

    Args:
        parameters: The parameters.
        how: ``norm`` or ``round``: limit the norm over all; ``value``: limit every
            value; ``adaptive``: see ``clip_adaptive``.
        limit: The limit, for ``round`` that of ``norm_in_round``.
        head: The last layer's parameters, which ``adaptive`` does not clip.
        norm_of: Returns the norm of each output unit.
    """
    parameters = list(parameters)
    if how in ("norm", "round"):
        nn.utils.clip_grad_norm_(parameters, limit)
    elif how == "value":
        nn.utils.clip_grad_value_(parameters, limit)
    elif how == "adaptive":
        unclipped = {id(p) for p in head}
        clip_adaptive([p for p in parameters if id(p) not in unclipped], limit, norm_of)


def chosen(how: str, limit: float, drifts: bool) -> tuple[str, float]:
    """Return way and limit of clipping; ``auto`` is ``round`` if ``drifts``, else ``none``.

    ``drifts``: whether clients' weights could move far from the shared ones in a
    round.
    """
    if how != "auto":
        return how, limit
    return ("round", PATH) if drifts else ("none", limit)


def bounded(
    method: Method, clip: str, optimizers: Mapping[int, Optimizer], settings: LocalTraining
) -> tuple[Method, dict[int, LocalTraining]]:
    """Choose the clipping of ``clip="auto"``: SGD moves weights by a limited distance per round.

    Nothing changes with ``clip="none"``, another optimiser, control variates
    (SCAFFOLD), or a method that does not normalise its first batch with shared
    statistics. Return method, and settings by ``optimizers``' keys.
    """
    check_name("clip", clip, ("auto", "none"))
    if clip == "none" or not all(isinstance(one, SGD) for one in optimizers.values()) or settings.objective.travels:
        return method, dict.fromkeys(optimizers, settings)
    some = 2  # how many rounds come is not known yet; in a run of 2 or more, only freeze_after=0 freezes round 1
    how, limit = chosen(clip, settings.clip_limit, drifts=method.uses_shared(some))
    step = STEP if method.starts_small else 0.0
    return method.bounded(), {
        key: replace(settings, momentum=float(one.param_groups[0]["momentum"]), clip=how, clip_limit=limit, step_clip=step)
        for key, one in optimizers.items()
    }


def norm_in_round(path: float, learning_rate: float, steps: int, momentum: float) -> float:
    """Return the norm with which ``steps`` SGD steps move weights by at most ``path``. At rate 0, any norm does."""
    return path * (1 - momentum) / (learning_rate * max(steps, 1) or 1.0)


@torch.no_grad()
def clip_rows(parameters: Iterable[nn.Parameter], how: str, limits: Tensor, head: Iterable[nn.Parameter] = ()) -> None:
    """Clip stacked gradients (K, ...) of K clients in place, client k's by ``limits[k]``.

    For ``value`` and ``adaptive``, all limits must be the same.
    """
    parameters = list(parameters)
    if how in ("norm", "round"):
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = [vmap(torch.linalg.vector_norm)(gradient) for gradient in gradients]
        scale_K = (limits / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp(max=1)  # as in torch
        for gradient in gradients:
            gradient.mul_(scale_K.view(-1, *[1] * (gradient.dim() - 1)))
    else:
        clip(parameters, how, float(limits[0]), head, _unit_norm_of_rows)


def _unit_norm_of_rows(x: Tensor) -> Tensor:
    norm = vmap(unit_norm)(x)
    return norm.view(*norm.shape, *[1] * (x.dim() - norm.dim()))


@torch.no_grad()
def clip_adaptive(parameters: Iterable[nn.Parameter], limit: float, norm_of: Callable[[Tensor], Tensor]) -> None:
    """Clip each output unit's gradient, in place, to ``limit`` times the norm of its weights.

    High-Performance Large-Scale Image Recognition Without Normalization, Brock, De,
    Smith, Simonyan, ICML 2021, equation 3, used by FedWon's clients. A bias or
    scale counts as one unit, and a norm below ``SMALLEST`` as ``SMALLEST``. The
    caller leaves out the last layer, as in the paper.
    """
    for p in parameters:
        if p.grad is not None:
            most = norm_of(p).clamp_min(SMALLEST) * limit
            norm = norm_of(p.grad)
            p.grad.mul_(torch.where(norm > most, most / norm.clamp_min(1e-12), torch.ones_like(norm)))
