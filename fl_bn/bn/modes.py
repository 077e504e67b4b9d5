"""Keep parts of a network in evaluation mode in training, if its owner has put them there.

Fine-tuning recipes do so with a backbone: by ``net.train(); net.backbone.eval()`` before the network is given
to fl-bn, or by a class that overrides ``train()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_bn.support.modules import named_modules

MARK = "stays_in_evaluation_mode"
MIXING = "mixing_logit"  # HBN's own parameter, which says nothing about what the owner of the network froze


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


def _trains_as_torch(modules: Iterable[nn.Module]) -> bool:
    return all(type(module).train is nn.Module.train and "train" not in vars(module) for module in modules)


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
    if _trains_as_torch(modules.values()):
        held = {name for name, layer in modules.items() if isinstance(layer, _BatchNorm) and getattr(layer, MARK, False)}
        return held | frozen_affine(model)
    modes = {module: module.training for module in modules.values()}
    train_mode(model)
    held = {name for name, layer in modules.items() if isinstance(layer, _BatchNorm) and not layer.training}
    for module, mode in modes.items():
        module.training = mode
    return held | frozen_affine(model)
