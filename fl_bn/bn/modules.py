"""Find and copy the modules of a network, and keep parts of it in evaluation mode in training.

Fine-tuning recipes hold a backbone so: by ``net.train(); net.backbone.eval()`` before the network is given
to fl-bn, or by a class that overrides ``train()``.
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
MARK = "stays_in_evaluation_mode"
MIXING = "mixing_logit"  # HBN's own parameter, which says nothing about what the owner of the network froze


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return ``model.named_modules()`` as a dict, in less than half the time."""
    found = {model: ""}
    _visit(model._modules, "", found)
    return {name: module for module, name in found.items()}


def _visit(modules: Mapping[str, nn.Module | None], prefix: str, found: dict[nn.Module, str]) -> None:
    """Add ``modules`` and all modules in them to ``found``, by full names from ``prefix`` on."""
    for key, module in modules.items():
        if module is not None and module not in found:
            found[module] = name = prefix + key
            if module._modules:
                _visit(module._modules, f"{name}.", found)


def copied(model: M) -> M:
    """Copy a network deeply.

    ``copy.deepcopy`` refuses tensors that a computation made, such as those of ``nn.utils.weight_norm``. The copy
    gets them as constants. A tensor whose entries share memory (``expand``) becomes writable. Functions are not
    copied: a lambda in an attribute calls the original network (docs/how-to/network.md).

    Raises:
        Unconvertible: The network cannot be copied.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors(list(vars(module).values())):
            if not tensor.is_leaf or (_shares_entries(tensor) and not isinstance(tensor, nn.Parameter)):
                memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever the user's class raises
        raise Unconvertible(
            f"the network cannot be copied, and fl-bn trains a copy of it ({type(error).__name__}: {error}): make what cannot be copied in "
            "forward, or give its class a method __deepcopy__"
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
    """Mark the parts of a training ``model`` that are in evaluation mode. A copy keeps the marks."""
    for module in named_modules(model).values():
        if model.training and not module.training:
            setattr(module, MARK, True)


def train_mode(model: nn.Module) -> None:
    """Put ``model`` into training mode by its ``train()``, but for what ``remember_modes`` marked."""
    model.train()
    for module in named_modules(model).values():
        if MARK in vars(module):
            module.training = False


def frozen_affine(model: nn.Module) -> set[str]:
    """Return the FBN, HBN and Static BN layers whose affine parameters the owner has frozen.

    The running statistics of these layers count as frozen, too. A layer without affine parameters counts as
    frozen if all parameters of the nearest module around it that has any are frozen.
    """
    modules = named_modules(model)
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
    """Restore the modes of all modules of ``model`` at the end of the ``with`` block."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def held_layers(model: nn.Module) -> set[str]:
    """Return the BatchNorm layers whose statistics the owner of ``model`` has frozen.

    They are the layers that stay in evaluation mode while the model trains, and the layers of ``frozen_affine``.
    """
    modules = named_modules(model)
    if all(type(module).train is nn.Module.train and "train" not in vars(module) for module in modules.values()):
        held = {name for name, layer in modules.items() if isinstance(layer, _BatchNorm) and getattr(layer, MARK, False)}
        return held | frozen_affine(model)
    modes = {module: module.training for module in modules.values()}
    train_mode(model)
    held = {name for name, layer in modules.items() if isinstance(layer, _BatchNorm) and not layer.training}
    for module, mode in modes.items():
        module.training = mode
    return held | frozen_affine(model)
