"""Roles: the part each tensor of a model plays, decided by the type of the module that owns it, never by its name.

A test by name ("bn" in key) misses BatchNorm inside ``nn.Sequential`` and torchvision's ``downsample.1``: it turns FedBN into
FedAvg without a word.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


class Role(Enum):
    """What a tensor is for, and so whether it may leave the client and how the server combines it."""

    WEIGHT = "weight"  # learnable, not in a norm layer
    AFFINE = "affine"  # scale and shift of a norm layer
    STATISTIC = "statistic"  # running mean and variance
    MIXING = "mixing"  # HBN's learnable mix of batch and shared statistics, before the sigmoid
    COUNTER = "counter"  # integers such as num_batches_tracked: never averaged
    BUFFER = "buffer"  # floating point, not learnable, not in a norm layer: averaged, never optimised


class UnknownTensor(ValueError):
    """A norm layer holds a tensor whose role nobody defined."""


NORM_LAYERS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

_NORM_TENSORS = {
    "weight": Role.AFFINE,
    "bias": Role.AFFINE,
    "running_mean": Role.STATISTIC,
    "running_var": Role.STATISTIC,
    "mixing_logit": Role.MIXING,
    "num_batches_tracked": Role.COUNTER,
}


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of every tensor in ``model.state_dict()``, in its order.

    Raises:
        UnknownTensor: a norm layer owns a tensor that is none of torch's or this project's.
        ValueError: a lazy module was not yet initialised, or an entry of the state_dict is no tensor.
    """
    role: dict[str, Role] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{name}." if name else ""
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        for key, tensor in {**parameters, **buffers}.items():
            if nn.parameter.is_lazy(tensor):
                raise ValueError(f"{prefix}{key} is not initialised yet: run one batch through the model first")
            role[prefix + key] = _role(module, prefix + key, key, tensor, key in parameters)
    names = list(model.state_dict())
    if missing := [name for name in names if name not in role]:
        raise ValueError(f"state_dict entries {missing} belong to no parameter or buffer, so they have no role")
    return {name: role[name] for name in names}


def _role(module: nn.Module, name: str, key: str, tensor: Tensor, learnable: bool) -> Role:
    if isinstance(module, NORM_LAYERS):
        if key not in _NORM_TENSORS:
            raise UnknownTensor(
                f"{name}: {type(module).__name__} holds a tensor {key!r} whose role is unknown (known: "
                f"{', '.join(_NORM_TENSORS)}). Sharing or keeping it would be a guess: keep it outside the norm layer."
            )
        return _NORM_TENSORS[key]
    if learnable:
        return Role.WEIGHT
    return Role.BUFFER if torch.is_floating_point(tensor) else Role.COUNTER


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Every BatchNorm layer of ``model`` (torch's and this project's) by name, in the order of ``named_modules``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
