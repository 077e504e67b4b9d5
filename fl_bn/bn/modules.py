"""Find and copy a network's modules, and keep parts in evaluation mode in training.

Fine-tuning recipes freeze a backbone so: by ``net.train(); net.backbone.eval()``
before fl-bn gets it, or by an own ``train()``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.bn.kinds import Unconvertible

M = TypeVar("M", bound=nn.Module)
MARK = "_fl_bn_stays_in_evaluation_mode"
MIXING = "mixing_logit"  # HBN's own parameter, which says nothing about what the owner of the network froze


def copied(model: M) -> M:
    """Copy a network deeply.

    The copy has the modes, roles of buffers and ``requires_grad`` of ``model``, and
    layers of its types. ``copy.deepcopy`` refuses computed tensors, such as those of
    ``nn.utils.weight_norm``. The copy has them as constants. A tensor whose entries
    share memory (``expand``) becomes writable. Functions are not copied: a lambda
    in an attribute calls the original network.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors(list(vars(module).values())):
            if not tensor.is_leaf or (_shares_entries(tensor) and not isinstance(tensor, nn.Parameter)):
                memo[id(tensor)] = tensor.detach().clone()
    try:
        twin = copy.deepcopy(model, memo)
        for name, one in model.named_modules():  # a class's own __deepcopy__ (torch.fx has such) may lose what follows
            other = twin.get_submodule(name)
            if isinstance(one, _BatchNorm) and type(one) is not type(other):
                raise TypeError(f"__deepcopy__ makes a {type(other).__name__} of the {type(one).__name__} {name}")
            vars(other).update({key: value for key, value in vars(one).items() if key.startswith("_fl_bn_")})
            if vars(one).get("training") is not vars(other).get("training"):
                other.train(vars(one)["training"])
        for name, p in model.named_parameters():
            twin.get_parameter(name).requires_grad_(p.requires_grad)
        return twin
    except Exception as error:  # whatever the user's class raises
        raise Unconvertible(
            f"the network cannot be copied, and fl-bn trains a copy of it ({type(error).__name__}: {error}): make what cannot be copied in "
            "forward, or let the __deepcopy__ of its class copy every layer as it is"
        ) from error


def _shares_entries(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _tensors(value: object, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one, depth - 1)


def remember_modes(model: nn.Module) -> None:
    """Mark what is in evaluation mode in a training ``model``. Copies keep the marks."""
    for module in model.modules():
        if model.training and not module.training:
            setattr(module, MARK, True)


def train_mode(model: nn.Module) -> None:
    """Call ``model.train()``, but keep evaluation mode where ``remember_modes`` marked it."""
    model.train()
    for module in model.modules():
        if MARK in vars(module):
            module.training = False


def frozen_affine(model: nn.Module) -> set[str]:
    """Return the FBN, HBN and Static BN layers whose affine parameters are frozen.

    Their running statistics count as frozen, too. For a layer without affine
    parameters, those of the nearest module around it that has any count.
    """
    modules = dict(model.named_modules())
    return {name for name, layer in modules.items() if getattr(layer, "held_with_affine", False) and _is_frozen(name, modules)}


def _is_frozen(name: str, modules: Mapping[str, nn.Module]) -> bool:
    while True:
        if learns := [p.requires_grad for key, p in modules[name].named_parameters() if not key.endswith(MIXING)]:
            return not any(learns)
        if not name:
            return False
        name = name.rpartition(".")[0]


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore all modes of ``model`` at the end of the ``with`` block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def held_layers(model: nn.Module) -> set[str]:
    """Return the BatchNorm layers whose statistics ``model``'s owner has frozen.

    These stay in evaluation mode in training, or are in ``frozen_affine``.
    """
    modules = dict(model.named_modules())
    if all(type(module).train is nn.Module.train and "train" not in vars(module) for module in modules.values()):
        held = {name for name, layer in modules.items() if isinstance(layer, _BatchNorm) and getattr(layer, MARK, False)}
        return held | frozen_affine(model)
    with kept_modes(model):
        train_mode(model)
        held = {name for name, layer in modules.items() if isinstance(layer, _BatchNorm) and not layer.training}
    return held | frozen_affine(model)
