"""Roles: the part each tensor of a model plays, decided by the type of the module that owns it, never by its name.

A test by name ("bn" in key) misses BatchNorm inside ``nn.Sequential`` and torchvision's ``downsample.1``: it turns FedBN into
FedAvg without a word.
"""

from __future__ import annotations

import re
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


class Role(Enum):
    """What a tensor is for, and so whether it may leave the client and how the server combines it."""

    WEIGHT = "weight"  # learnable, not in a norm layer
    AFFINE = "affine"  # scale and shift of a BatchNorm layer
    OTHER_AFFINE = "affine of other norms"  # scale and shift of LayerNorm, GroupNorm and their kin: shared like weights
    STATISTIC = "statistic"  # running mean and variance
    MIXING = "mixing"  # HBN's learnable mix of batch and shared statistics, before the sigmoid
    COUNTER = "counter"  # integers such as num_batches_tracked: never averaged
    BUFFER = "buffer"  # floating point, not learnable, not in a norm layer: averaged, never optimised


class SharedStatisticsNorm(nn.Module):
    """Abstract base of this project's own norm layers (see ``layers``); here so that roles know them by type."""

    running_mean: Tensor
    running_var: Tensor
    momentum: float


class UnknownTensor(ValueError):
    """A norm layer holds a tensor whose role nobody defined."""


BATCH_NORMS = (_BatchNorm, SharedStatisticsNorm)
NORM_LAYERS = (_NormBase, SharedStatisticsNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

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
        role = _NORM_TENSORS[key]
        return Role.OTHER_AFFINE if role is Role.AFFINE and not isinstance(module, BATCH_NORMS) else role
    if learnable:
        return Role.WEIGHT
    return Role.BUFFER if torch.is_floating_point(tensor) else Role.COUNTER


def unknown_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer of ``model`` that looks like a norm layer but is none that is known by type, by name: what it holds is shared like the
    tensors of any other layer.

    It looks like one where it owns ``running_mean`` and ``running_var``, or owns parameters and has "norm" in the name of its class. Layers
    of constants (torchvision's ``FrozenBatchNorm2d``) are left out. This is for messages: no tensor's role depends on it.
    """
    return {name: module for name, module in model.named_modules() if not isinstance(module, NORM_LAYERS) and _looks_like_norm(module)}


def tracks_statistics(module: nn.Module) -> bool:
    """Whether ``module`` itself owns buffers with BatchNorm's names for running statistics."""
    return {"running_mean", "running_var"} <= {name for name, _ in module.named_buffers(recurse=False)}


def _looks_like_norm(module: nn.Module) -> bool:
    kind, learns = type(module), any(True for _ in module.parameters(recurse=False))
    if tracks_statistics(module):
        return learns or "frozen" not in kind.__name__.lower()
    return learns and re.search("norm(?!al)", kind.__name__, re.IGNORECASE) is not None


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm | SharedStatisticsNorm]:
    """Every BatchNorm layer of ``model`` (torch's and this project's) by name, in the order of ``named_modules``."""
    return {name: module for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)}
