"""Recompute buffers of layers that compute weights (spectral norm, parametrizations).

Spectral norm divides a weight by its largest singular value. Every training pass
improves its buffers ``u`` and ``v``. Their average does not belong to the averaged
weight, so the server computes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fl_bn.bn.roles import RECOMPUTE, STATED, Role, roles

MOST_STEPS = 200  # of the power iteration from the previous vectors; more are needed only if two singular values are nearly equal


def derivation(module: nn.Module) -> str:
    """Say how a weight of ``module`` is computed (``spectral_norm of 'weight'``); empty if none is."""
    if is_parametrized(module):
        lists: Any = module.parametrizations
        return ", ".join(f"parametrization {type(one).__name__.lstrip('_')} of {name!r}" for name, chain in lists.items() for one in chain)
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm | WeightNorm):
            kind = "spectral_norm" if isinstance(hook, SpectralNorm) else "weight_norm"
            return f"torch.nn.utils.{kind} of {hook.name!r}"
        if isinstance(hook, BasePruningMethod):
            return f"torch.nn.utils.prune of {hook._tensor_name!r}"
    return ""


@torch.no_grad()
def recompute(model: nn.Module) -> None:
    """Compute in place the buffers of ``model`` that follow from its weights."""
    computed = {name for name, role in roles(model).items() if role is Role.RECOMPUTED}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for place, one in enumerate(module if isinstance(module, ParametrizationList) else ()):
            if f"{prefix}{place}._u" in computed and isinstance(one, parametrizations._SpectralNorm):
                _iterate(one._reshape_weight_to_matrix(_given_to(module, place)), one._u, one._v, one.eps)
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, SpectralNorm) and f"{prefix}{hook.name}_u" in computed:
                weight = hook.reshape_weight_to_matrix(getattr(module, f"{hook.name}_orig"))
                _iterate(weight, getattr(module, f"{hook.name}_u"), getattr(module, f"{hook.name}_v"), hook.eps)
        if Role.RECOMPUTED in vars(module).get(STATED, {}).values() and hasattr(module, RECOMPUTE):
            getattr(module, RECOMPUTE)()


def _given_to(chain: ParametrizationList, place: int) -> Tensor:
    """Return the input tensor of parametrization number ``place`` of ``chain``."""
    given: list[Tensor] = [chain.original] if chain.is_tensor else [getattr(chain, f"original{i}") for i in range(chain.ntensors)]
    for one in list(chain)[:place]:
        given = [one(*given)]
    return given[0]


def _iterate(weight: Tensor, u: Tensor, v: Tensor, eps: float) -> None:
    """Improve ``u`` and ``v`` of ``weight``, in place, by at most ``MOST_STEPS`` power iterations."""
    still = 8 * torch.finfo(weight.dtype).eps
    for _ in range(MOST_STEPS):
        before = u.clone()
        v.copy_(F.normalize(torch.mv(weight.t(), u), dim=0, eps=eps))
        u.copy_(F.normalize(torch.mv(weight, v), dim=0, eps=eps))
        if float((u - before).abs().max()) <= still:
            return


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], strict: bool = False) -> None:
    """Load ``tensors`` into ``model``, in place, by ``load_state_dict``.

    Some modules (torchvision's MNASNet) need the version numbers of ``model``'s own
    state_dict.
    """
    state: Any = OrderedDict(tensors)
    state._metadata = getattr(model.state_dict(), "_metadata", None)
    model.load_state_dict(state, strict=strict)


def plain_names(model: nn.Module) -> dict[str, str]:
    """Map the names in ``model``'s state_dict to those without wrappers.

    These lack ``module.`` (DataParallel) and ``_orig_mod.`` (``torch.compile``). A
    user's own submodule called ``module`` stays.
    """
    return {name: _plain(model, name) for name in model.state_dict()}


def full_names(model: nn.Module) -> dict[str, str]:
    """Map module names in ``unwrapped``'s result to their names in ``model``."""
    return {_plain(model, name): name for name, _ in model.named_modules()}  # a wrapper comes before its content, which counts


def unwrapped(model: nn.Module) -> nn.Module:
    """Replace each wrapper in ``model`` by its content, in place. Return the result."""
    while inner := _wrapped(model):
        model = getattr(model, inner)
    for name, child in model.named_children():
        setattr(model, name, unwrapped(child))
    return model


def _plain(model: nn.Module, name: str) -> str:
    here: nn.Module | None = model
    parts = []
    for part in name.split("."):
        if here is None or part != _wrapped(here):
            parts.append(part)
        here = None if here is None else here._modules.get(part)
    return ".".join(parts)


def _wrapped(module: nn.Module) -> str:
    """Return the attribute that holds a wrapper's network, or an empty text."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return "module"
    return "_orig_mod" if type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules else ""
